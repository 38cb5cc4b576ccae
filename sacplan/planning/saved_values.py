"""Which values a compiled step saves for its backward pass: a mixed-integer program on the joint graph.

Every value of the forward pass is there for the backward pass or not (a), and is made again for it or not (r). What is
there and is not made again is saved (s = a - r):

    minimise    sum of rerun_ms r + save_ms s
    subject to  a >= r;  a = 1 for what the backward pass reads;  a of an input >= r of what is made of it
                sum of bytes s <= limit

Without the last row it is a minimum cut.

There are no rows for moments inside the backward pass: what fusion leaves of them is known only once inductor has
lowered it. The caller does that, for several limits.
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
    """Yield what has to be there for the backward pass, each once; of what is saved when it was yielded, no inputs."""
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
    """Return what the program minimises, if these are saved, in ms; without what it forbids."""
    prices = (v.save_ms if v.name in names else v.rerun_ms for v in needed(values, names))
    return sum(price for price in prices if price < math.inf)


def with_unrepeatable_saved(values: Sequence[ForwardValue], names: Collection[str]) -> frozenset[str]:
    """Return ``names``, plus each value that would otherwise run again although it must not (infinite ``rerun_ms``)."""
    saved = set(names)
    # ``needed`` is lazy: it checks ``saved`` after each yield, so it does not follow the inputs of what is added here.
    for value in needed(values, saved):
        # An op with several results cannot be saved itself: if it must not run again, its results are saved.
        runs_again = (value, *(values[i] for i in value.inputs if not values[i].is_savable))
        if any(one.rerun_ms == math.inf for one in runs_again):
            saved.add(value.name)
    return frozenset(saved)


def cheapest_saved(values: Sequence[ForwardValue], limit: float) -> frozenset[str]:
    """Return the names of what to save so that it costs least, in a limit of bytes; the least bytes if none does."""
    found = _solved(values, limit)
    if found is None:
        found = _solved(values, None)
    assert found is not None, "to save all that the backward pass reads is always possible"
    return found


def _solved(values: Sequence[ForwardValue], limit: float | None) -> frozenset[str] | None:
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
    return frozenset(v.name for v, a, r in zip(values, there, again, strict=True) if on[a] and not on[r])
