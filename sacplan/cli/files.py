"""Check output files before any work is done, so that no file of another program is overwritten."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from sacplan.cli.exits import OutputError
from sacplan.core.files import read

Kind = Literal["plan", "profile", "curve", "report"]

_HEAD_CHARACTERS = 4096
# A pattern that files of each kind contain, and whether it lies within the first characters.
_SIGNS: dict[Kind, tuple[str, bool]] = {
    "plan": (r'\A\{\s*"what": "plan"', True),
    "profile": (r'\A\{\s*"what":\s*"profile"', True),
    "curve": (r"\Asolver,budget_bytes,peak_bytes,", True),
    "report": (r"<footer>[^<]*Made by sacplan|<meta name=.generator. content=.sacplan", False),
}


class _KindHead(msgspec.Struct):
    what: Any = None
    model_type: Any = None
    architectures: Any = None


def kind_of(path: Path) -> str | None:
    """Return the kind of a JSON file, or None if it is unknown.

    Files of sacplan say it themselves. ``"configuration"`` is a configuration of transformers.
    """
    try:
        head = msgspec.json.decode(read(path), type=_KindHead)
    except (OSError, RecursionError, ValueError, EOFError, zlib.error):
        return None  # the loader that reads the file next says what is wrong with it
    if isinstance(head.what, str):
        return head.what
    return "configuration" if head.model_type or head.architectures else None


def check_output(path: Path | None, kind: Kind, *, force: bool) -> None:
    """Raise ``OutputError`` if a file cannot be written, or if it exists and sacplan did not write it as this kind."""
    # Nothing is to be saved.
    if path is None:
        return
    if path.is_dir():
        raise OutputError(f"{path} is a directory; name a file in it.")
    if not path.parent.is_dir():
        raise OutputError(f"{path} cannot be written: there is no directory {path.parent}.")
    if path.exists():
        # Such as a device or a pipe: a file is written by replacing it, which would not work there.
        if not path.is_file():
            raise OutputError(f"{path} is not a regular file; name one.")
        # An empty file, such as one of ``mktemp``, has nothing to lose, and a file of the same kind may be that of
        # an earlier run.
        if not force and path.stat().st_size and not is_ours(path, kind):
            raise OutputError(
                f"{path} exists and is not a sacplan {kind}; choose another name, or overwrite it with --force."
            )
    # Found out now, and not after minutes of planning.
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OutputError(f"{path} cannot be written: no permission.")


def is_ours(path: Path, kind: Kind) -> bool:
    """Return whether sacplan wrote a file of this kind."""
    sign, at_the_beginning = _SIGNS[kind]
    characters = _HEAD_CHARACTERS if at_the_beginning else -1
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:
            return re.search(sign, file.read(characters)) is not None
    except (OSError, EOFError):  # unreadable, or named .gz without being compressed
        return False
