"""The tree that ``sac_milp`` plans on: the modules that may be units, and the memory rows that their discards lower."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sacplan.classic.graph import Graph, ModuleStats
from sacplan.solvers.problem import Amounts


class Discard(NamedTuple):
    """A share of a unit's ``sac_memory``, the bytes that it frees, and the time to recompute them."""

    ratio: float
    freed: int
    ms: float


TreePlan = Mapping[int, Discard]
"""The discard of each unit, by its place in the tree."""


@dataclass(frozen=True, slots=True)
class TreeSolution:
    """A plan, if one was found, and a bound that no plan undercuts.

    Attributes:
        plan: None if none was found.
        proved: whether the plan is proved to be optimal, or, without one, that there is none.
        bound_ms: no plan takes less; None if the solver proved nothing.
    """

    plan: TreePlan | None
    proved: bool
    bound_ms: float | None


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that may be a unit.

    Attributes:
        fqn, index: of the module, in the graph.
        memory: its ``sac_memory``.
        options: by rising bytes and ms; on the continuous fit only the largest.
        segments: (slope, intercept) in ms of the fit; empty if only points count.
        above: the units around it, nearest first.
    """

    fqn: str
    index: int
    memory: int
    options: tuple[Discard, ...]
    segments: tuple[tuple[float, float], ...]
    above: tuple[int, ...]

    def at(self, ratio: float) -> Discard:
        """Return a discard on the fit."""
        return _on_fit(self.memory, self.segments, ratio)


@dataclass(frozen=True, slots=True, eq=False)
class UnitTree:
    """Units in the order in which their forward ends, and memory rows.

    Attributes:
        units: a plan takes some, none of them inside another.
        n_units: by row, how many units discard before this moment; rises strictly.
        base: by row, bytes without a plan; rises strictly.
        names: by row, what runs then.
    """

    units: tuple[Unit, ...]
    n_units: Amounts
    base: Amounts
    names: tuple[str, ...]

    def used(self, plan: TreePlan) -> Amounts:
        """Return the bytes of each row under a plan."""
        freed = np.zeros(len(self.units) + 1, dtype=np.int64)
        for unit, discard in plan.items():
            freed[unit + 1] = discard.freed
        # Units are in the order of their ends, so the first n of them have freed the sum of their discards.
        used: Amounts = self.base - freed.cumsum()[self.n_units]
        return used

    def at_most(self) -> UnitTree:
        """Return the tree whose units discard all they can or nothing, at no cost: enough for the smallest peak."""
        units = tuple(replace(u, options=(u.options[-1]._replace(ms=0.0),)) for u in self.units)
        return replace(self, units=units)


def cost_ms(plan: TreePlan) -> float:
    """Return the recompute time of a plan."""
    return math.fsum(plan[unit].ms for unit in sorted(plan))


def tree_of(
    graph: Graph,
    world_size: int,
    ac_units: Sequence[str] | None,
    fsdp_units: Sequence[str] | None,
    *,
    continuous: bool,
) -> UnitTree:
    """Return the units that a graph and its user allow, with the memory rows that matter; see ``sac_milp``."""
    allowed = None if ac_units is None else graph.match(ac_units, "ac_units")
    sharded = graph.match(fsdp_units or (), "fsdp_units")
    holds_sharded = {ancestor for fqn in sharded for ancestor in graph.ancestors(fqn)}
    # Statistics without reachable points have nothing but their fit to plan with.
    continuous = continuous or not any(node.points for node in graph.nodes)
    units: list[Unit] = []
    for fqn in graph.fw_post_order:
        node = graph[fqn]
        if node.is_leaf or fqn in holds_sharded or (allowed is not None and fqn not in allowed):
            continue
        segments = _segments(node) if continuous else ()
        options = _largest(node, segments) if continuous else _undominated(node)
        if options:
            units.append(Unit(fqn, graph.index(fqn), node.sac_memory, options, segments, ()))
    place = {unit.fqn: i for i, unit in enumerate(units)}
    units = [
        replace(unit, above=tuple(place[fqn] for fqn in graph.ancestors(unit.fqn) if fqn in place))
        for unit in units
    ]

    # What is discarded only grows along the rows. So a row is implied by an earlier one that is as large, and by
    # a later one that is larger before another unit has ended.
    positions = [graph.position(unit.fqn) for unit in units]
    rows: list[tuple[int, int, str]] = []
    for position, n_bytes, name in graph.memory_rows(world_size):
        n_units = int(np.searchsorted(positions, position))
        if rows and n_bytes <= rows[-1][1]:
            continue
        if rows and rows[-1][0] == n_units:
            rows.pop()
        rows.append((n_units, n_bytes, name))
    ended, base, names = zip(*rows, strict=True)
    return UnitTree(tuple(units), np.array(ended), np.array(base, dtype=np.int64), names)


def _on_fit(memory: int, segments: Sequence[tuple[float, float]], ratio: float) -> Discard:
    # A line of the fit may lie below 0; a time cannot.
    ms = max(0.0, max(slope * ratio + intercept for slope, intercept in segments))
    return Discard(ratio, round(memory * ratio), ms)


def _undominated(node: ModuleStats) -> tuple[Discard, ...]:
    """Return the reachable points that no other dominates: none frees as much in less time."""
    points = [
        Discard(p.discard_ratio, round(node.sac_memory * p.discard_ratio), p.recompute_ms)
        for p in node.points
    ]
    kept: list[Discard] = []
    for point in sorted(points, key=lambda p: (p.ms, -p.freed)):
        # By rising time: a point is of use only if it frees more than all cheaper ones.
        if point.freed > (kept[-1].freed if kept else 0):
            kept.append(point)
    return tuple(kept)


def _segments(node: ModuleStats) -> tuple[tuple[float, float], ...]:
    return tuple(
        (node.sac_runtime * slope, node.sac_runtime * intercept)
        for slope, intercept in zip(node.slopes, node.intercepts, strict=True)
    )


def _largest(node: ModuleStats, segments: Sequence[tuple[float, float]]) -> tuple[Discard, ...]:
    """Return the largest discard of the fit, if there is a fit."""
    if not segments:
        return ()
    # The fit is good up to the largest ratio that it was made from. Bare lines are taken up to 1.
    ratios = node.breakpoints or tuple(ratio for ratio, _ in node.tradeoff_curve) or (1.0,)
    discard = _on_fit(node.sac_memory, segments, min(1.0, max(ratios)))
    return (discard,) if discard.freed > 0 else ()
