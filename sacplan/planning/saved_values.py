"""Which values a compiled step saves for its backward pass: a mixed-integer program on the joint graph.

Two variables for each value of the forward pass: whether the backward pass has it (a), and whether it is made again
for that (r). A value that is there and not made again is saved (s = a - r):

    minimise    sum of rerun_ms r + save_ms s
    subject to  a >= r;  a = 1 for what the backward pass reads;  a of an input >= r of what is made of it
                sum of bytes s <= limit

Without the last row it is a minimum cut.

There are no rows for moments inside the backward pass: what is alive there is known only once inductor has fused and
lowered the graph, which the caller has it do for several limits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from sacplan.solvers.mip import LinearProgram
from sacplan.torch_compat.partitioning import ForwardValue


def bytes_of(values: Sequence[ForwardValue], names: Collection[str]) -> int:
    """Return the bytes of the values with these names."""
    return sum(value.nbytes for value in values if value.name in names)


def needed(values: Sequence[ForwardValue], saved: Collection[str]) -> Iterator[ForwardValue]:
    """Yield each value that the backward pass needs, once: what it reads, and the inputs of each that is not saved."""
    missing = [i for i, value in enumerate(values) if value.is_read]
    seen = set[int]()
    while missing:
        i = missing.pop()
        if i in seen:
            continue
        seen.add(i)
        yield values[i]
        if values[i].name not in saved:
            missing += values[i].inputs


def price_of(values: Sequence[ForwardValue], names: Collection[str]) -> float:
    """Return the objective of the program in ms if these values are saved, without infinite prices."""
    prices = (v.save_ms if v.name in names else v.rerun_ms for v in needed(values, names))
    return sum(price for price in prices if price < math.inf)


def with_unrepeatable_saved(values: Sequence[ForwardValue], names: Collection[str]) -> frozenset[str]:
    """Return ``names``, plus each value that would run again although it must not (infinite ``rerun_ms``)."""
    saved = set(names)
    # ``needed`` is lazy: it looks into ``saved`` after each yield, so it skips the inputs of values added here.
    for value in needed(values, saved):
        # An op with several results is not savable; its results are values that have it as input. To make such a
        # result again, the op runs again too. So if the op must not, the result is saved.
        runs_again = (value, *(values[i] for i in value.inputs if not values[i].is_savable))
        if any(one.rerun_ms == math.inf for one in runs_again):
            saved.add(value.name)
    return frozenset(saved)


def cheapest_saved(values: Sequence[ForwardValue], limit: float) -> frozenset[str]:
    """Return the names of the cheapest values to save within ``limit`` bytes; if none fit, of the fewest bytes."""
    found = _solved(values, limit)
    if found is None:
        found = _solved(values, None)
    assert found is not None, "to save all that the backward pass reads is always possible"
    return found


def _solved(values: Sequence[ForwardValue], limit: float | None) -> frozenset[str] | None:
    """Return the cheapest names to save within a limit, or None; without a limit, those of the fewest bytes."""
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
    return frozenset(v.name for v, a, r in zip(values, there, again, strict=True) if on[a] and not on[r])
