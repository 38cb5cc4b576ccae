"""Which values a compiled step saves for its backward pass: a mixed-integer program on the joint graph.

Every value of the forward pass is there for the backward pass or not (a), and is made again for it or not (r). What is
there and is not made again is saved (s = a - r):

    minimise    sum of rerun_ms r + save_ms s
    subject to  a >= r;  a = 1 for what the backward pass reads;  a of an input >= r of what is made of it
                sum of bytes s <= limit

Without the last row it is a minimum cut.

There are no rows for moments inside the backward pass: what fusion leaves of them is known only once inductor has
lowered it. The caller does that, and moves the limit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sacplan._solve.mip import LinearProgram
from sacplan._torch.partitioning import ForwardValue

SHARES = (0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)
"""Limits, as shares of the bytes that PyTorch saves. The smallest peak is sought among them if nothing fits; it may lie
between, since what runs again is alive at once where little is saved."""


@dataclass(frozen=True, slots=True)
class SavedValues:
    """A choice of values to save.

    Attributes:
        names: of the nodes.
        n_bytes: their bytes.
        rerun_ms: time of what runs again.
    """

    names: frozenset[str]
    n_bytes: int
    rerun_ms: float


def bytes_of(values: Sequence[ForwardValue], names: Collection[str]) -> int:
    """Return the bytes of the values with these names."""
    return sum(value.nbytes for value in values if value.name in names)


def cheapest_saved(values: Sequence[ForwardValue], limit: float) -> SavedValues:
    """Return what to save so that it costs least, within a limit of bytes; the least bytes if none does."""
    found = _solved(values, limit) or _solved(values, None)
    assert found is not None, "to save all that the backward pass reads is always possible"
    return found


def _solved(values: Sequence[ForwardValue], limit: float | None) -> SavedValues | None:
    """Return the cheapest choice within a limit, None if there is none; without a limit, that of the least bytes."""
    program = LinearProgram()
    there, again, row = list[int](), list[int](), list[tuple[int, float]]()
    for value in values:
        may = value.rerun_ms < math.inf
        megabytes = value.nbytes / 1e6
        save, rerun = (value.save_ms, value.rerun_ms) if limit is not None else (megabytes, 0.0)
        a = program.variable(lower=float(value.is_read), upper=1.0, cost=save)
        r = program.variable(upper=float(may), integer=may, cost=rerun - save if may else 0.0)
        program.row([(a, 1.0), (r, -1.0)], lower=0.0, upper=None if value.is_savable else 0.0)
        for i in value.inputs:
            program.row([(there[i], 1.0), (r, -1.0)], lower=0.0)
        row += [(a, megabytes), (r, -megabytes)]
        there.append(a)
        again.append(r)
    if limit is not None:
        program.row(row, upper=limit / 1e6)
    found = program.solve(gap=1e-2)
    if not found.values:
        return None
    on = [value > 0.5 for value in found.values]
    names = frozenset(v.name for v, a, r in zip(values, there, again, strict=True) if on[a] and not on[r])
    rerun_ms = math.fsum(v.rerun_ms for v, r in zip(values, again, strict=True) if on[r])
    return SavedValues(names, bytes_of(values, names), rerun_ms)
