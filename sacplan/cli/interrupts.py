"""End a command with one line on Ctrl-C, from its first import on."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130

_SEEN: list[int] = []


def watch() -> None:
    """Remember an interrupt, since libraries that are being imported may turn it into another error or drop it."""
    # Any other handler means that somebody chose it: under nohup, for example, the signal is ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    # Remembered before raising: whoever catches the exception cannot undo this.
    _SEEN.append(number)
    raise KeyboardInterrupt


def seen() -> bool:
    """Return whether this process was interrupted."""
    return bool(_SEEN)


def say_so() -> int:
    """Report the interrupt in one line on stderr, and return the exit code."""
    sys.stderr.write("interrupted\n")
    return EXIT_CODE
