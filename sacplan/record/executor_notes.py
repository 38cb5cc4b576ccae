"""What executors and the recorder tell each other about ops that run again, or that no mode sees."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


# By thread: on a GPU, autograd runs a backward pass on threads of its own.
class _Noted(threading.local):
    """What recorder and executor tell each other.

    Attributes:
        latest: the op that was recorded last; -1 where nothing is recorded.
        again: the recorded op that an executor runs again now; -1 for none.
        deferred: called with an op, the types of its tensors and its arguments where a mode answers NotImplemented, so
            that the recorder below does not see it.
    """

    latest = -1
    again = -1
    deferred: Callable[[Any, Any, Any], None] = staticmethod(lambda func, types, args: None)


noted = _Noted()
"""Notes of the current thread."""
