"""Cases that only ``make test-exhaustive`` runs, where a test has quick ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(n: int, cases: Iterable[Any]) -> list[Any]:
    """For ``parametrize``: the first cases as they are, all others marked slow."""
    found = list(cases)
    return found[:n] + [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in found[n:]
    ]
