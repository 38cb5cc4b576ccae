"""Say which stage of a long call runs, to whoever listens, such as the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def stages_go_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Have ``begins`` call a function."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def begins(stage: str) -> None:
    """Say that a stage of a call begins, in a few words; nothing happens where nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(stage)
