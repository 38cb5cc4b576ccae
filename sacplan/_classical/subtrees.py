"""``sac_milp``'s program with shared variables: subtrees of the module tree become regions.

Units form an antichain, so a small subtree has few sensible ways to choose among its own units: those are its
options, and equal subtrees (repeated layers) are equal regions for ``program.py``. Modules around many others
(the model, an encoder) are taken or not taken one way after the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sacplan._plan.effects import Additive
from sacplan._recompute.regions import Option, Region
from sacplan._solve.milp import Milp, Refinement

_LARGEST_SUBTREE = 12  # units
_MOST_OPTIONS = 300  # of a subtree
_MOST_WAYS = 8  # to take modules around many others


class Choice(Protocol):
    """A reachable point of a unit."""

    @property
    def freed(self) -> int: ...
    @property
    def ms(self) -> float: ...


class Unit(Protocol):
    """A module that may be a unit; ``above`` are the places of those around it, nearest first."""

    @property
    def choices(self) -> Sequence[Choice]: ...
    @property
    def above(self) -> tuple[int, ...]: ...


class _Way(NamedTuple):
    """One antichain of a subtree: unit, relative to the subtree's first, to its choice."""

    ms: float
    taken: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]  # by the units up to each


@dataclass(frozen=True, slots=True)
class Answer:
    """Unit to its choice; whether that is the optimum to the gap, or it is proved that there is none; a bound."""

    taken: Mapping[int, int] | None
    proved: bool
    bound_ms: float | None


def solve_shared(
    units: Sequence[Unit],
    rows: Sequence[tuple[int, int]],
    budget_bytes: int,
    options: Milp,
) -> Answer | None:
    """The cheapest antichain of units that keeps all rows under the budget; None where subtrees are too rich.

    Args:
        units: in the order in which their forward ends.
        rows: (how many of the units have freed their bytes by then, bytes).
        budget_bytes: for each row.
        options: solver, gap, time limit and seed.
    """
    size = [1] * len(units)
    for unit in units:
        for a in unit.above:
            size[a] += 1
    children: dict[int, list[int]] = {i: [] for i in range(-1, len(units))}
    for i, unit in enumerate(units):
        children[unit.above[0] if unit.above else -1].append(i)
    large = [i for i in range(len(units)) if size[i] > _LARGEST_SUBTREE]
    tops = [i for i, u in enumerate(units) if i not in large and (not u.above or u.above[0] in large)]
    shapes: dict[object, tuple[int, list[_Way]]] = {}
    ways_of: dict[int, tuple[int, list[_Way]]] = {}
    for top in tops:
        first = top - size[top] + 1
        if any(first + k not in (top, *_inside(children, top)) for k in range(size[top])):
            return None  # the calls of these modules do not nest in time
        key = tuple(
            (tuple((c.ms, c.freed) for c in units[first + k].choices), units[first + k].above[0] - top)
            if first + k != top
            else tuple((c.ms, c.freed) for c in units[top].choices)
            for k in range(size[top])
        )
        if key not in shapes:
            found = _ways(units, children, top, first, size[top])
            if found is None:
                return None
            shapes[key] = (len(shapes), found)
        ways_of[top] = shapes[key]
    antichains = _antichains(units, large)
    if antichains is None:
        return None

    best: dict[int, int] | None = None
    best_ms = float("inf")
    proved, bounds = True, []
    deadline = time.monotonic() + options.time_limit_s
    for chain in antichains:
        regions = [(top, *ways_of[top]) for top in tops if not set(units[top].above) & chain]
        for k, large_unit in enumerate(sorted(chain)):
            own = [_Way(0.0, (), (0,))]
            own += [_Way(c.ms, ((0, o),), (c.freed,)) for o, c in enumerate(units[large_unit].choices)]
            regions.append((large_unit, len(shapes) + k, own))
        left = max(1e-3, deadline - time.monotonic())
        search = Refinement(
            Milp(options.backend, options.gap, left, options.seed), _additive(regions, rows), budget_bytes
        )
        found_here = search.run()
        if found_here is None:
            proved = proved and search.infeasible
            continue
        bounds.append(found_here.bound)
        proved = proved and found_here.status == "optimal"
        taken = {
            top - len(ways[o].freed) + 1 + unit: choice
            for (top, _, ways), o in ((regions[i], o) for i, o in found_here.choice.items())
            for unit, choice in ways[o].taken
        }
        ms = sum(units[i].choices[o].ms for i, o in taken.items())
        if ms < best_ms:
            best, best_ms = taken, ms
    known = [b for b in bounds if b is not None]
    return Answer(best, proved, min(known) if proved and len(known) == len(bounds) and known else None)


def _inside(children: Mapping[int, list[int]], top: int) -> list[int]:
    found = list(children[top])
    for i in found:
        found.extend(children[i])
    return found


def _ways(
    units: Sequence[Unit], children: Mapping[int, list[int]], top: int, first: int, size: int
) -> list[_Way] | None:
    """The undominated antichains of a subtree; the first takes no unit. None if there are too many."""

    def freed(taken: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        by_unit = [0] * size
        for unit, choice in taken:
            by_unit[unit] = units[first + unit].choices[choice].freed
        return tuple(int(total) for total in np.cumsum(by_unit))

    def at(unit: int) -> list[tuple[float, tuple[tuple[int, int], ...]]] | None:
        combined: list[tuple[float, tuple[tuple[int, int], ...]]] = [(0.0, ())]
        for child in children[unit]:
            inner = at(child)
            if inner is None or len(inner) * len(combined) > 20 * _MOST_OPTIONS:
                return None
            combined = pruned([(a + b, (*x, *y)) for a, x in combined for b, y in inner])
        own = [(c.ms, ((unit - first, o),)) for o, c in enumerate(units[unit].choices)]
        combined = pruned([*combined, *own])
        return combined if len(combined) <= _MOST_OPTIONS else None

    def pruned(
        found: list[tuple[float, tuple[tuple[int, int], ...]]],
    ) -> list[tuple[float, tuple[tuple[int, int], ...]]]:
        vectors = np.array([freed(taken) for _, taken in found])
        order = sorted(range(len(found)), key=lambda i: (found[i][0], -int(vectors[i].sum()), i))
        keep: list[int] = []
        for i in order:
            if not keep or not (vectors[keep] >= vectors[i]).all(axis=1).any():
                keep.append(i)
        return [found[i] for i in keep]

    found = at(top)
    if found is None:
        return None
    return [_Way(ms, taken, freed(taken)) for ms, taken in ((0.0, ()), *(way for way in found if way[1]))]


def _antichains(units: Sequence[Unit], large: Sequence[int]) -> list[set[int]] | None:
    """All sets of large modules of which none is in another; None if there are too many."""
    found: list[set[int]] = [set()]
    for i in large:
        found += [
            {*s, i} for s in found if not s & set(units[i].above) and not any(i in units[j].above for j in s)
        ]
        if len(found) > _MOST_WAYS:
            return None
    return found


def _additive(regions: Sequence[tuple[int, int, list[_Way]]], rows: Sequence[tuple[int, int]]) -> Additive:
    """Rows as intervals: what a way frees by the time of a row is a negative change."""
    made, changes = [], []
    counts = np.array([n_units for n_units, _ in rows])
    for top, kind, ways in regions:
        first = top - len(ways[0].freed) + 1
        by_then = np.clip(counts - first, 0, len(ways[0].freed))
        freed = np.array([(0, *way.freed) for way in ways], dtype=np.int64)
        options = tuple(Option(way.ms, -way.freed[-1], ()) for way in ways)
        made.append(Region("", (), kind, options, ((),) * len(ways), (False,) * len(ways)))
        changes.append(-freed[:, by_then])
    base = np.array([n_bytes for _, n_bytes in rows], dtype=np.int64)
    return Additive(tuple(made), base, tuple(changes))
