"""What ``fit`` prints adds up: by how much a row does not fit is the difference of two figures that are printed."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sacplan.core.budget import format_bytes, format_difference
from sacplan.planning.limits import Room
from sacplan.questions.verdict import FitRow, Verdict

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = r"(\d+(?:\.\d+)?) (B|KiB|MiB|GiB|TiB)"
GIB = 2**30

sizes = st.one_of(
    st.integers(1, 2**44), st.integers(70 * GIB, 90 * GIB), st.integers(GIB - 2**22, GIB + 2**22)
)


def bytes_in(text: str) -> list[Fraction]:
    """Read the sizes that a text names, exactly as they are written."""
    return [Fraction(n) * UNITS[unit] for n, unit in re.findall(SIZE, text)]


@given(sizes, sizes)
@example(int(78.12 * GIB), int(76.61 * GIB))
@example(77 * GIB + 1, 77 * GIB)
@example(GIB, 1000 * 2**20)
def test_a_difference_is_that_of_what_is_written_of_both(a: int, b: int) -> None:
    more, less = max(a, b), min(a, b)
    (x,), (y,) = bytes_in(format_bytes(more)), bytes_in(format_bytes(less))
    said = format_difference(more, less)
    if x == y and more != less:
        assert said.startswith("less than 0.01 ")
    else:
        assert bytes_in(said) == [x - y]


def verdict_of(row: FitRow) -> Verdict:
    return Verdict(
        model="M", parameters=1, batch=1, seq=None, optimizer="adamw", device="d", memory_bytes=100 * GIB,
        budget_bytes=row.limit_bytes, budget=None, rows=(row,), recommended=None,
        larger_devices=(), computed=(),
    )  # fmt: skip


@given(
    peak=sizes, beyond=st.none() | sizes, room=sizes, is_reserved=st.booleans(), host=sizes, host_room=sizes
)
def test_a_verdict_says_the_difference_of_two_figures_in_it(
    peak: int, beyond: int | None, room: int, is_reserved: bool, host: int, host_room: int
) -> None:
    row = FitRow(
        optimizer="adamw", way="as it is", peak_bytes=peak, unplanned_peak_bytes=peak, step_ms=None, recompute_ms=None,
        added_ms=None, room=Room(room, is_reserved), host_bytes=host, host_room_bytes=host_room,
        reserved_bytes=None if beyond is None else peak + beyond,
    )  # fmt: skip
    shown = [peak] if beyond is None else [peak, peak + beyond]
    assert row.fits == (shown[-1 if is_reserved else 0] <= room and host <= host_room)
    if row.fits:
        return
    # The sentence names the limit as well.
    written = bytes_in(verdict_of(row).sentence.partition("It needs ")[2].partition("; the smallest")[0])
    if "less than 0.01" not in row.over:
        assert any(more - less == bytes_in(row.over)[0] for more in written for less in written)
    n, limit = (host, host_room) if row.over_host_bytes else (shown[-1 if is_reserved else 0], room)
    assert row.over.startswith(format_difference(n, limit))
    assert {bytes_in(format_bytes(n))[0], bytes_in(format_bytes(limit))[0]} <= set(written)


@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_what_decides_is_what_the_row_says(budget: str | None) -> None:
    """With a budget the peak decides, whatever is reserved for it."""
    row = FitRow(
        optimizer="adamw", way="as it is", peak_bytes=GIB, unplanned_peak_bytes=GIB, step_ms=None, recompute_ms=None,
        added_ms=None, room=Room(GIB, budget is None), reserved_bytes=GIB + 2**29,
    )  # fmt: skip
    assert (row.fits, row.over_bytes) == ((True, 0) if budget else (False, 2**29))
