"""Say which stage of a long call runs, and what is known already, to whoever listens, such as the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
_reader: ContextVar[Callable[[str], None] | None] = ContextVar("reader", default=None)


@contextlib.contextmanager
def stages_go_to(
    listener: Callable[[str], None] | None, reader: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Have ``begins`` call the listener, and ``is_known`` the reader."""
    tokens = _listener.set(listener), _reader.set(reader)
    try:
        yield
    finally:
        _listener.reset(tokens[0])
        _reader.reset(tokens[1])


def begins(stage: str) -> None:
    """Say that a stage of a call begins, in a few words; nothing happens where nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(stage)


def is_known(line: str) -> None:
    """Say a part of the answer before all of it is known, in one line; nothing happens where nobody reads."""
    reader = _reader.get()
    if reader is not None:
        reader(line)
