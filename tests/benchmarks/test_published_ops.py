"""Predicted times and peaks of ops against those that were measured on GPUs."""

from __future__ import annotations

import pytest

from benchmarks import published_ops
from benchmarks.models.published_ops import CASES, read_rows


@pytest.mark.slow
def test_times_are_those_that_were_measured() -> None:
    rows = [
        published_ops.row_of(row) for row in read_rows("speed") if row.measured > published_ops.SHORTEST_MS
    ]
    found = published_ops.times_summary(rows)
    assert found["rows"] == 172
    assert found["median"] <= 0.05
    assert found["p90"] <= 0.15
    assert found["worst"] <= 0.35


# The one that differs: its process had run others before, whose free blocks are not known.
_OFF = ("embedding", 1024)


@pytest.mark.parametrize("op", sorted(CASES))
def test_peaks_are_those_that_were_measured(op: str) -> None:
    rows = [row for row in read_rows("memory") if row.op == op]
    assert rows
    # The first size and the last one; the command compares all of them.
    for row in (rows[0], rows[-1]):
        found = published_ops.row_of(row)
        off_kib = abs(found["predicted"] - found["published"]) * 1024
        assert off_kib <= (256 if (row.op, row.size) == _OFF else 64), row
