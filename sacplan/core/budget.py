"""Read memory budgets as people write them, and write bytes for people."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Integral, Rational, Real

from sacplan.errors import BudgetError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
# No two units differ by case alone, so ``gib`` can only be GiB.
_BY_LOWER = {unit.lower(): factor for unit, factor in _UNITS.items()}
_KNOWN = ", ".join([*_UNITS, "%"])

_LARGEST_GIB = 2**20  # one PiB: a plain number above it was meant as bytes

# A decimal number, with underscores and an exponent if there are any, and then a unit or a percent sign.
_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%]*)\s*")


def parse_budget(budget: float | str, baseline_peak_bytes: int) -> int:
    """Read a memory budget and return it in bytes, rounded down.

        parse_budget(22, peak)        # 22 GiB
        parse_budget("24GB", peak)    # 24 * 10**9 bytes
        parse_budget("60%", peak)     # that share of the unplanned peak

    Args:
        budget: a number is GiB; a string carries its unit (any case) or a percent sign.
        baseline_peak_bytes: the peak without checkpointing, which a percentage refers to.

    Raises:
        BudgetError: the budget is no finite, positive number, or its unit is missing or unknown.
    """
    # A bool is an int to Python, so it is refused before numbers are taken. Fractions keep shares and decimals exact.
    if isinstance(budget, bool):
        raise BudgetError(
            f"memory budget {budget!r} is a bool; give a number of GiB or a string like '22GiB'"
        )
    if isinstance(budget, str):
        amount, factor = _parse_text(budget, baseline_peak_bytes)
    elif isinstance(budget, Real):
        # numpy's numbers are registered as Real too, but Fraction only takes Python's own
        exact = int(budget) if isinstance(budget, Integral) else budget
        if not isinstance(exact, Rational):
            exact = float(exact)
            if not math.isfinite(exact):
                raise BudgetError(f"memory budget {budget!r} is not finite; give a number of GiB")
        amount, factor = Fraction(exact), Fraction(2**30)
        if amount > _LARGEST_GIB:
            raise BudgetError(
                f"memory budget {budget!r} would be GiB, more than a PiB; for bytes write '{budget}B'"
            )
    else:
        raise BudgetError(
            f"memory budget {budget!r} is a {type(budget).__name__}; "
            f"give a number of GiB or a string with a unit ({_KNOWN})"
        )
    if amount <= 0:
        raise BudgetError(f"memory budget {budget!r} must be positive")
    n_bytes = math.floor(amount * factor)
    if n_bytes <= 0:
        raise BudgetError(f"memory budget {budget!r} is less than one byte")
    return n_bytes


def _parse_text(text: str, baseline_peak_bytes: int) -> tuple[Fraction, Fraction]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise BudgetError(
            f"memory budget {text!r} cannot be read; write a number and a unit, "
            f"like '22GiB' or '60%' (known units: {_KNOWN})"
        )
    number, unit = match.groups()
    if not unit:
        raise BudgetError(
            f"memory budget {text!r} has no unit; write {number}GiB, or one of the known units: {_KNOWN}"
        )
    try:
        # beyond a double's range, a Fraction would have too many digits
        if not math.isfinite(float(number)):
            raise ValueError(number)
        amount = Fraction(number)
    except ValueError:
        raise BudgetError(f"memory budget {text!r}: {number!r} is not a finite number") from None
    if unit == "%":
        return amount, Fraction(baseline_peak_bytes, 100)
    try:
        return amount, Fraction(_BY_LOWER[unit.lower()])
    except KeyError:
        raise BudgetError(
            f"memory budget {text!r} has unknown unit {unit!r};{_meant(number, unit)} known units: {_KNOWN}"
        ) from None


def _meant(number: str, unit: str) -> str:
    """Suggest both readings of a unit such as ``G``: they differ by 7%, so none is assumed."""
    prefix = unit[0].upper()
    return f" did you mean '{number}{prefix}B' or '{number}{prefix}iB'?" if prefix in "KMGT" else ""


def is_share(budget: object) -> bool:
    """Whether a budget is written as a share, ``"60%"``."""
    return isinstance(budget, str) and budget.rstrip().endswith("%")


def exact_bytes(n_bytes: int, argument: str = "budget") -> str:
    """Write a budget to copy, and its size for people: ``budget="17838196736B" (16.61 GiB)``."""
    return f'{argument}="{n_bytes}B" ({format_bytes(n_bytes)})'


def format_bytes(n_bytes: int) -> str:
    """Write bytes for people, in the largest binary unit that leaves at least one: ``"2.41 GiB"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        # Differences are written as well, and may be negative.
        if abs(n_bytes) >= _UNITS[unit]:
            return f"{n_bytes / _UNITS[unit]:.2f} {unit}"
    return f"{n_bytes} B"


def format_difference(more: int, less: int) -> str:
    """Write by how much one size is larger: exactly the difference of what ``format_bytes`` writes of both.

    A reader subtracts the figures that are printed, so their rounding is in the difference as well. The smaller of
    their two units is used, where a difference needs no more than two decimals.
    """
    (n, unit_n), (m, unit_m) = (format_bytes(size).split() for size in (more, less))
    smaller = min(unit_n, unit_m, key=_UNITS.__getitem__)
    by = (Fraction(n) * _UNITS[unit_n] - Fraction(m) * _UNITS[unit_m]) / _UNITS[smaller]
    # Different sizes may be written alike, but are not equal.
    return f"{float(by):.2f} {smaller}" if by or more == less else f"less than 0.01 {smaller}"


def format_share(part: float, whole: float) -> str:
    """Write a part of a whole for people: ``"12.5%"``. A step of no time or FLOPs has no parts: ``"0.0%"``."""
    return f"{part / whole:.1%}" if whole else "0.0%"
