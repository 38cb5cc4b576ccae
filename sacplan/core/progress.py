"""Report which stage of a long call runs, and parts of its answer, to listeners such as the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeAlias

Listener: TypeAlias = Callable[[str], object] | None
_listeners: ContextVar[tuple[Listener, Listener]] = ContextVar("listeners", default=(None, None))


@contextlib.contextmanager
def stages_go_to(listener: Listener, reader: Listener = None) -> Iterator[None]:
    """Have ``begins`` call the listener, and ``is_known`` the reader."""
    token = _listeners.set((listener, reader))
    try:
        yield
    finally:
        _listeners.reset(token)


def _tell(listener: Listener, text: str) -> None:
    if listener is not None:
        listener(text)


def begins(stage: str) -> None:
    """Say that a stage of a call begins, in a few words; nothing happens where nobody listens."""
    _tell(_listeners.get()[0], stage)


def is_known(line: str) -> None:
    """Say a part of the answer before all of it is known, in one line; nothing happens where nobody reads."""
    _tell(_listeners.get()[1], line)
