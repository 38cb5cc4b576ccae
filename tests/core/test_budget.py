"""What a person may write as a budget."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sacplan.core.budget import format_bytes, parse_budget
from sacplan.errors import BudgetError, SacplanError

PEAK = 10_000_001


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (22, 22 * 2**30),
        (1.75, 1879048192),
        (np.float64(0.5), 2**29),
        (np.int64(3), 3 * 2**30),
        (Fraction(1, 3), 2**30 // 3),
        ("22GiB", 22 * 2**30),
        (" 22 gib ", 22 * 2**30),
        ("24GB", 24 * 10**9),
        ("24.1GB", 24_100_000_000),
        ("512MiB", 2**29),
        ("1e3KB", 10**6),
        (".5TiB", 2**39),
        ("123456B", 123456),
        ("60%", 6_000_000),
        ("100%", PEAK),
        ("33.3 %", 3_330_000),
    ],
)
def test_reads(budget: float | str, expected: int) -> None:
    assert parse_budget(budget, PEAK) == expected


REFUSED = {
    "must be positive": [0, -1, -0.5, "0GiB", "-3GiB", "-10%", "0%"],
    "finite": [math.nan, math.inf, -math.inf, np.float32("nan"), "1e999GiB"],
    "cannot be read": ["", "GiB", "nanGiB", "infGiB", "1.2.3GiB", "12 GiB or so", "-", "%"],
    "budget": [True, False, None, [1], 1j, np.bool_(True)],
    "has no unit": ["22"],
    "'23622320128B'": [22 * 2**30],
    "less than one byte": ["0.5B"],
    # A unit that may mean two is not guessed.
    "did you mean '24GB' or '24GiB'": ["24G", "24g", "24 gigs"],
    "did you mean '24MB' or '24MiB'": ["24M"],
    "did you mean '1.5TB' or '1.5TiB'": ["1.5Tera"],
}


@pytest.mark.parametrize(("why", "budget"), [(why, budget) for why in REFUSED for budget in REFUSED[why]])
def test_what_is_no_budget_is_refused(why: str, budget: object) -> None:
    with pytest.raises(BudgetError, match=why) as caught:
        parse_budget(budget, PEAK)  # type: ignore[arg-type]
    assert not isinstance(budget, str) or repr(budget) in str(caught.value)


def test_unknown_unit_quotes_the_input_and_lists_units() -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget("22Gibi", PEAK)
    message = str(caught.value)
    assert "'22Gibi'" in message
    for unit in ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "%"):
        assert unit in message
    assert isinstance(caught.value, SacplanError)


@given(st.integers(1, 2**50))
def test_bytes_are_exact(n_bytes: int) -> None:
    assert parse_budget(f"{n_bytes}B", PEAK) == n_bytes
    assert parse_budget("100%", n_bytes) == n_bytes


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2_587_000_000, "2.41 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_format(n_bytes: int, expected: str) -> None:
    assert format_bytes(n_bytes) == expected
