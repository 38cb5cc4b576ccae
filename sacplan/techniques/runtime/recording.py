"""The recorder of a unit's forward pass that is active, which other executors pause while they run ops of their own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from sacplan.techniques.runtime.saved import SavedStorage


class Pausable(Protocol):
    """A recorder of the ops of a unit's forward pass. It records nothing while it is paused."""

    paused: bool

    def saved_on(self, tensor: torch.Tensor) -> SavedStorage | None:
        """Return what has been saved on the storage of a tensor; None where nothing may be taken away."""
        ...


# By thread: on a GPU, autograd runs a backward pass on threads of its own, where nothing records a forward pass.
class _ThreadRecorder(threading.local):
    recorder: Pausable | None = None


here = _ThreadRecorder()
"""The recorder that is active on this thread."""


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Pause the recorder of this thread, for ops that are no part of a unit's forward pass."""
    recorder = here.recorder
    # No unit's forward pass runs on this thread.
    if recorder is None:
        yield
        return
    # A recorder that was paused already stays paused afterwards.
    paused, recorder.paused = recorder.paused, True
    try:
        yield
    finally:
        recorder.paused = paused
