"""Which recorded op runs again: an executor of recipes says so, and the recorder writes it into ``Op.recomputes``."""

from __future__ import annotations

import threading


# By thread: on a GPU, autograd runs a backward pass on threads of its own.
class _Noted(threading.local):
    """What recorder and executor tell each other.

    Attributes:
        latest: the op that was recorded last; -1 where nothing is recorded.
        again: the op whose node runs; -1 for none.
    """

    latest = -1
    again = -1


noted = _Noted()
"""Notes of the current thread."""
