"""Which stretches run in slices, and in how many: the least time under a budget, or the smallest peak.

The nodes of a graph are the gaps between ops, 0 to n. There are two kinds of edges:

- from i to i + 1, at no cost, if op i fits as it is: ``total[i] <= budget``;
- over a stretch, from before its first op to after the last one whose memory it changes, at the cost of its slices. It
  needs ``outside <= budget`` and ``base + inside(slices) <= budget``, and has the fewest slices for which that holds.

All edges go forward, so one sweep from left to right finds the cheapest path from 0 to n. For the smallest peak the
same sweep minimises the maximum along a path instead of the sum.

The path is optimal for the candidates that ``regions.py`` gives, as long as estimates hold and stretches do not
overlap: on a path they cannot, so that two whose ops interleave are never both taken. Estimates are then replaced by
figures: the stretches are written into the program (``stretches.py``), what each loop takes is learned, and the path is
found again. If nothing new was learned and the peak is still too high, the budget that is asked for goes down by the
difference. Each of these loops ends after ``_ROUNDS``, and of all that was measured the best is taken. That need not be
the optimum.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

from sacplan.core.decisions import Chunk
from sacplan.core.derived import derived
from sacplan.core.pins import NO_PINS, Pins
from sacplan.core.program import Program
from sacplan.device.devices import DeviceSpec
from sacplan.errors import PlanError
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.chunk.dataflow import Dataflow
from sacplan.techniques.chunk.families import merged
from sacplan.techniques.chunk.regions import Candidate, candidates, unit_scope
from sacplan.techniques.chunk.stretches import stretch_rewrite

_ROUNDS = 12  # of correcting estimates
_SLACK = 1.01  # factor by which a limit rises that can be reached by the estimates, but not as measured
_TINY_MS = 1e-7  # added to the cost of a stretch: of equal paths, the one with fewer stretches is taken


@dataclass(frozen=True, slots=True)
class MeasuredStretches:
    """Stretches, and figures of the step with them, from its rewritten program.

    Attributes:
        decisions: the stretches.
        peak_bytes: peak of the step.
        extra_ms: by how much the step is slower than without them.
    """

    decisions: tuple[Chunk, ...]
    peak_bytes: int
    extra_ms: float


_Pick: TypeAlias = tuple[Candidate, int]
"""A stretch, and its number of slices."""


class StretchSearch:
    """Finds stretches for a program on a device. It remembers what it has measured, so that several budgets share it.

    ``pins``: no loop runs the ops that they keep, and no stretch is named by a module that must not be a unit.
    """

    def __init__(self, program: Program, spec: DeviceSpec, pins: Pins = NO_PINS) -> None:
        self.program, self.spec, self.pins = program, spec, pins
        self.flow = Dataflow(program, pins.kept_ops)
        self.tried: dict[tuple[Chunk, ...], MeasuredStretches] = {}
        self._total: list[int] = program.liveness.at_op.tolist()
        self._is_minimised = False
        # The step without stretches is within some budgets, and is where the search for the smallest peak begins.
        self._measure(())

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """The stretches that may be taken; found when they are first asked for."""
        return candidates(self.flow, self.spec, self.pins)

    @functools.cached_property
    def _by_start(self) -> dict[int, list[Candidate]]:
        found: dict[int, list[Candidate]] = defaultdict(list)
        for one in self.candidates:
            found[one.start].append(one)
        return found

    def solve(self, budget: int) -> MeasuredStretches:
        """Search for the least extra time within a budget; if nothing fits, for the smallest peak."""
        if self.program.footprint.peak_bytes > budget:
            self._close_loop(budget)
            # The search for the smallest peak tries other limits, and may come upon a path within the budget.
            if not self._within(budget):
                self._minimise()
        fitting = self._within(budget)
        return min(fitting, key=lambda f: (f.extra_ms, f.peak_bytes)) if fitting else self._smallest

    def _within(self, budget: int) -> list[MeasuredStretches]:
        return [found for found in self.tried.values() if found.peak_bytes <= budget]

    @property
    def _smallest(self) -> MeasuredStretches:
        return min(self.tried.values(), key=lambda f: (f.peak_bytes, f.extra_ms))

    def _minimise(self) -> None:
        """Search for the smallest peak.

        The limit to reach is the least that estimates allow. If a round measures nothing new, the limit rises a little.
        The search ends when a measured peak is as low as the limit, or after ``_ROUNDS``.
        """
        slack = 1.0
        for _ in range(0 if self._is_minimised else _ROUNDS):
            least = int(slack * self._least_peak())
            if least >= self._smallest.peak_bytes:
                break
            tried = len(self.tried)
            self._close_loop(least)
            if len(self.tried) == tried:
                slack *= _SLACK
        self._is_minimised = True

    # --- the closed loop ---

    def _close_loop(self, budget: int) -> None:
        """Measure cheapest paths and correct the estimates, until one is within the budget or there is no path."""
        asked = budget
        for _ in range(_ROUNDS):
            picks = self._cheapest(asked)
            if picks is None:
                return  # no path, by the estimates
            decisions = tuple(self.decision(*pick) for pick in picks)
            known = decisions in self.tried
            found = self._measure(decisions)
            if found.peak_bytes <= budget:
                return
            corrected = self._learn(picks, decisions)
            # Nothing new to learn, and the peak is too high: the limit goes down by what the estimates leave out.
            if known or not corrected:
                asked -= max(1, found.peak_bytes - budget)

    def _learn(self, picks: Sequence[_Pick], decisions: Sequence[Chunk]) -> bool:
        """Replace estimates of the picked loops by what they take; return whether any was wrong."""
        wrong = False
        for (candidate, slices), decision in zip(picks, decisions, strict=True):
            inside = stretch_rewrite(self.program, decision, self.spec).loop_bytes
            wrong |= candidate.shape.learn(slices, inside)
        return wrong

    def _measure(self, decisions: tuple[Chunk, ...]) -> MeasuredStretches:
        if decisions not in self.tried:
            program = self.program
            if decisions:
                found = [stretch_rewrite(program, decision, self.spec) for decision in decisions]
                program = program.with_(merged(program, found))
            self.tried[decisions] = MeasuredStretches(
                decisions, program.footprint.peak_bytes, program.step_ms - self.program.step_ms
            )
        return self.tried[decisions]

    # --- paths ---

    def _least_peak(self) -> int:
        """Return the lowest limit for which there is a path, by the estimates: a path's largest edge, minimised."""
        # Invariant: when the sweep reaches node i, ``best[i]`` is the least maximum over all paths to i, since
        # all edges go forward.
        best = [0] + [1 << 62] * self.flow.n_ops
        for i, total in enumerate(self._total):
            best[i + 1] = min(best[i + 1], max(best[i], total))
            for one in self._by_start.get(i, ()):
                best[one.until + 1] = min(best[one.until + 1], max(best[i], one.least_peak()))
        return best[-1]

    def _cheapest(self, budget: int) -> list[_Pick] | None:
        """Return the stretches of the cheapest path, by the estimates; None if there is no path.

        A stretch is left out where all ops that it replaces fit as they are, since the path passes there at no cost.
        That is so for most of them if the step has its peak in one place.
        """
        # ``above[i]`` is the number of ops before i that do not fit: a stretch is wanted only if it replaces some.
        above = [0, *accumulate(total > budget for total in self._total)]
        # The same sweep with sums: ``cost[i]`` is final when i is reached.
        cost = [0.0] + [math.inf] * self.flow.n_ops
        via: list[_Pick | None] = [None] * len(cost)
        for i, total in enumerate(self._total):
            here = cost[i]
            if total <= budget and here < cost[i + 1]:
                cost[i + 1], via[i + 1] = here, None
            for one in self._by_start.get(i, ()) if here < math.inf else ():
                until = one.until + 1
                if one.outside > budget or above[until] == above[i]:
                    continue
                slices = one.shape.fewest_slices(budget - one.base)
                taken = here + one.shape.extra_ms(slices) + _TINY_MS
                if slices and taken < cost[until]:
                    cost[until], via[until] = taken, (one, slices)
        if cost[-1] == math.inf:
            return None
        # Back along the edges that were taken; None is the edge over an op that runs as it is.
        picks: list[_Pick] = []
        at = self.flow.n_ops
        while at > 0:
            pick = via[at]
            if pick is not None:
                picks.append(pick)
            at = at - 1 if pick is None else pick[0].start
        return picks[::-1]

    def decision(self, candidate: Candidate, slices: int) -> Chunk:
        """Return the decision of a plan for a candidate."""
        program, shape, end = self.program, candidate.shape, candidate.end
        # Sites name ops that compute. Their views are found again from what they read (``stretches.py``).
        members = [end + i for i in shape.members if self.flow.computes[end + i]]
        scope = unit_scope(program, [program.ops[i].scope for i in members], self.pins)
        sites = program.sites(scope)
        position = {op: i for i, op in enumerate(members)}
        return Chunk(
            unit=program.scopes[scope].fqn,
            span="stretch",
            slices=slices,
            dim=shape.axis.dim,
            outer=shape.axis.outer,
            inner=shape.axis.inner,
            sites=tuple(sites[i] for i in members),
            exits=tuple((position[end + op], output) for op, output in shape.exits),
        )


@derived
def stretch_search(program: Program, spec: DeviceSpec, pins: Pins = NO_PINS) -> StretchSearch:
    """Return the search for a program on a device; one for all budgets."""
    return StretchSearch(program, spec, pins)


@dataclass(frozen=True, slots=True)
class StretchSolver:
    """The solver of plans for inference: a path through stretches."""

    name: str = "path"
    techniques: tuple[str, ...] = ("chunk",)

    def proposals(self, step: PlanStep, budget_bytes: int) -> Sequence[tuple[Chunk, ...]]:
        """Propose the stretches with the least time within a budget; if none fit, those with the smallest peak."""
        if step.device is None:
            raise PlanError("stretches are planned for a device; it was not given.")
        return (stretch_search(step.program, step.device, step.pins).solve(budget_bytes).decisions,)
