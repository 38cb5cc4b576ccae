"""The versions of torch that sacplan was tried with, and one clear error where another lacks what sacplan needs.

sacplan uses private names of torch: no public ones see an op below autograd, or tell what autograd saves. They can go
in any release. ``private_names.json`` lists them, so that a torch without one is refused when sacplan is imported, by
name, and not by an ``AttributeError`` in the middle of a training step. Names in modules that torch itself imports late
are looked up when they are used, inside ``torch_names()``, or are ``LATE``. ``docs/versions.md`` says what was run with
each version.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sacplan.errors import SacplanWarning, UnsupportedTorch

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last release that was tried, as (major, minor)."""

_NAMES = json.loads(Path(__file__).with_name("private_names.json").read_text(encoding="utf-8"))

NEEDED: tuple[str, ...] = tuple(_NAMES["needed"])
"""Private names that sacplan uses, other than those of modules that torch imports late."""

LATE: tuple[str, ...] = tuple(_NAMES["late"])
"""Private names that only code inside ``torch.compile``, or around it, looks up, or that a build may lack.

They cannot be checked before: to import Dynamo takes seconds, and what Dynamo traces must look names up plainly.
"""

_SPAN = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
_INSTALL = f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"


def check_torch() -> None:
    """Warn of a torch that was not tried.

    Raises:
        UnsupportedTorch: names of ``NEEDED`` are missing.
    """
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        raise _unsupported(missing)
    if not OLDEST <= torch_release() <= NEWEST:
        warnings.warn(
            f"sacplan was tried with torch {_SPAN}, and this is {torch.__version__}: check peaks and plans with "
            f"sacplan.verify, or use {_INSTALL}.",
            SacplanWarning,
            stacklevel=2,
        )


@contextmanager
def torch_names() -> Iterator[None]:
    """Inside, names of torch are imported or looked up; one that is missing is an ``UnsupportedTorch``."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise _unsupported([str(error)]) from error


def torch_release() -> tuple[int, int]:
    """Return the major and minor version of the torch that runs."""
    # The third part may hold letters, as in 2.13.0a0+git or 2.13.0+cu130.
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _is_there(name: str) -> bool:
    # Every name begins with "torch", so the walk begins at its second part.
    parts = name.split(".")
    found: Any = torch
    for i, part in enumerate(parts[1:], 2):
        # An imported module need not be an attribute of its package.
        found = getattr(found, part, sys.modules.get(".".join(parts[:i])))
        if found is None:
            return False
    return True


def _unsupported(missing: Iterable[str]) -> UnsupportedTorch:
    return UnsupportedTorch(
        f"torch {torch.__version__} lacks what sacplan needs of it: {', '.join(missing)}. sacplan was tried with "
        f"torch {_SPAN}: {_INSTALL}."
    )
