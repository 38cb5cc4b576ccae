"""Ctrl-C ends a command with one line, from its first import on."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130

_SEEN: list[int] = []


def watch() -> None:
    """Remember an interrupt: libraries that are being imported may turn it into another error, or drop it."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # else it is to be ignored, as under nohup
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _SEEN.append(number)
    raise KeyboardInterrupt


def seen() -> bool:
    """Whether this process was interrupted."""
    return bool(_SEEN)


def say_so() -> int:
    """One line on stderr; returns the exit code."""
    sys.stderr.write("interrupted\n")
    return EXIT_CODE
