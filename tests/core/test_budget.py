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


@pytest.mark.parametrize("budget", [0, -1, -0.5, "0GiB", "-3GiB", "-10%", "0%"])
def test_must_be_positive(budget: float | str) -> None:
    with pytest.raises(BudgetError, match="must be positive"):
        parse_budget(budget, PEAK)


@pytest.mark.parametrize("budget", [math.nan, math.inf, -math.inf, np.float32("nan"), "1e999GiB"])
def test_must_be_finite(budget: float | str) -> None:
    with pytest.raises(BudgetError, match="finite"):
        parse_budget(budget, PEAK)


@pytest.mark.parametrize("budget", ["", "GiB", "nanGiB", "infGiB", "1.2.3GiB", "12 GiB or so", "-", "%"])
def test_cannot_be_read(budget: str) -> None:
    with pytest.raises(BudgetError, match="cannot be read") as caught:
        parse_budget(budget, PEAK)
    assert repr(budget) in str(caught.value)


@pytest.mark.parametrize("budget", [True, False, None, [1], 1j, np.bool_(True)])
def test_wrong_type(budget: object) -> None:
    with pytest.raises(BudgetError):
        parse_budget(budget, PEAK)  # type: ignore[arg-type]


def test_unknown_unit_quotes_the_input_and_lists_units() -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget("22Gibi", PEAK)
    message = str(caught.value)
    assert "'22Gibi'" in message
    for unit in ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "%"):
        assert unit in message
    assert isinstance(caught.value, SacplanError)


@pytest.mark.parametrize(
    ("budget", "meant"),
    [
        ("24G", "'24GB' or '24GiB'"),
        ("24g", "'24GB' or '24GiB'"),
        ("24M", "'24MB' or '24MiB'"),
        ("24 gigs", "'24GB' or '24GiB'"),
        ("1.5Tera", "'1.5TB' or '1.5TiB'"),
    ],
)
def test_a_unit_that_may_mean_two_is_not_guessed(budget: str, meant: str) -> None:
    with pytest.raises(BudgetError, match=f"did you mean {meant}"):
        parse_budget(budget, PEAK)


def test_a_string_needs_a_unit_and_bytes_are_not_gib() -> None:
    with pytest.raises(BudgetError, match="has no unit"):
        parse_budget("22", PEAK)
    with pytest.raises(BudgetError, match="'23622320128B'"):
        parse_budget(22 * 2**30, PEAK)


def test_less_than_a_byte() -> None:
    with pytest.raises(BudgetError, match="less than one byte"):
        parse_budget("0.5B", PEAK)


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
