"""Which stretches run in slices, and in how many: the least time under a budget, or the smallest peak.

A path goes from the first op to the last. It passes an op as it is, if what is alive there fits, or jumps over a
stretch that does fit when it is cut finely enough. The cheapest path is the plan, as far as estimates go. Then the
stretches are written into the program exactly (``body.py``); where estimates were off they are corrected, and the path
is found again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sacplan._chunk.body import loop_bytes, ops_by_site, stretches_patch
from sacplan._chunk.dataflow import Dataflow
from sacplan._chunk.regions import Candidates, candidates, unit_scope
from sacplan._device.devices import DeviceSpec
from sacplan._program.decisions import Chunk
from sacplan._program.derived import derived
from sacplan._program.elements import CallSite
from sacplan._program.pins import NO_PINS, Pins
from sacplan._program.program import Program
from sacplan._technique.step import PlanStep
from sacplan.errors import PlanError

_ROUNDS = 12  # of correcting estimates
_SLACK = 1.01  # times a limit that estimates say can be reached, where it cannot
_TINY_MS = 1e-7  # what a stretch costs at least: the fewer, the better


@dataclass(frozen=True, slots=True)
class MeasuredStretches:
    """Stretches, and the step with them.

    Attributes:
        decisions: the stretches.
        program: rewritten.
        extra_ms: by how much the step is slower.
    """

    decisions: tuple[Chunk, ...]
    program: Program
    extra_ms: float

    @property
    def peak_bytes(self) -> int:
        """Of the step with the stretches."""
        return self.program.footprint.peak_bytes


@dataclass(frozen=True, slots=True)
class _Pick:
    candidates: Candidates
    end: int
    slices: int


@dataclass(frozen=True, slots=True)
class _PathNodes:
    """Where candidates are, one after the other: an edge of the path each.

    Attributes:
        starts, untils: the first op, and where the path goes on.
        outside: as in ``Candidates``.
        which: the candidates' number.
        offsets: by number, where its places begin; and the end.
        by_start: the order by the first op.
    """

    starts: npt.NDArray[np.int64]
    untils: npt.NDArray[np.int64]
    outside: npt.NDArray[np.int64]
    which: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    by_start: npt.NDArray[np.int64]

    @classmethod
    def of(cls, candidates: Sequence[Candidates]) -> _PathNodes:
        """Those of some candidates."""
        none = np.zeros(0, dtype=np.int64)
        counts = np.array([len(one.ends) for one in candidates], dtype=np.int64)
        starts = np.concatenate([none, *(one.ends + one.shape.start for one in candidates)])
        return cls(
            starts,
            np.concatenate([none, *(one.ends + one.shape.until + 1 for one in candidates)]),
            np.concatenate([none, *(one.outside for one in candidates)]),
            np.repeat(np.arange(len(candidates)), counts),
            np.concatenate([[0], np.cumsum(counts)]),
            np.argsort(starts, kind="stable"),
        )


class StretchSearch:
    """Stretches for a program on a device. What is measured is remembered, so several budgets share it.

    ``pins``: what is left alone. What it pins is in no loop, and modules that must not be units are none.
    """

    def __init__(self, program: Program, spec: DeviceSpec, pins: Pins = NO_PINS) -> None:
        self.program, self.spec, self.pins = program, spec, pins
        self.flow = Dataflow(program, pins.kept_ops)
        self.tried: dict[tuple[Chunk, ...], MeasuredStretches] = {}
        self._total = np.array(program.liveness.at_op, dtype=np.int64)
        self._candidates: list[Candidates] | None = None
        self._places: _PathNodes | None = None
        self._sites: dict[int, dict[int, CallSite]] = {}
        self._reached_least = False
        self._measure(())

    @property
    def candidates(self) -> list[Candidates]:
        """What may be cut; found when it is first asked for."""
        if self._candidates is None:
            self._candidates = candidates(self.flow, self.spec, self.pins)
        return self._candidates

    def best(self, budget: int) -> MeasuredStretches | None:
        """The least extra time of what was tried and holds."""
        holding = [found for found in self.tried.values() if found.peak_bytes <= budget]
        return min(holding, key=lambda f: (f.extra_ms, f.peak_bytes), default=None)

    @property
    def smallest(self) -> MeasuredStretches:
        """The smallest peak of what was tried."""
        return min(self.tried.values(), key=lambda f: (f.peak_bytes, f.extra_ms))

    def solve(self, budget: int) -> MeasuredStretches | None:
        """The least extra time within a budget; None if nothing is found that holds it."""
        if self.program.footprint.peak_bytes > budget:
            self._close_loop(budget)
            if self.best(budget) is None:
                self.minimise()
        return self.best(budget)

    def minimise(self) -> MeasuredStretches:
        """The smallest peak that is found."""
        if not self._reached_least:
            slack = 1.0
            for _ in range(_ROUNDS):
                least = int(slack * self._least_peak())
                if least >= self.smallest.peak_bytes:
                    break
                tried = len(self.tried)
                self._close_loop(least)
                if len(self.tried) == tried:
                    slack *= _SLACK
            self._reached_least = True
        return self.smallest

    @property
    def places(self) -> _PathNodes:
        """Where they are."""
        if self._places is None:
            self._places = _PathNodes.of(self.candidates)
        return self._places

    # --- the closed loop ---

    def _close_loop(self, budget: int) -> None:
        asked = budget
        for _ in range(_ROUNDS):
            picks = self._cheapest(asked)
            if picks is None:
                return
            decisions = tuple(self.decision(pick.candidates, pick.end, pick.slices) for pick in picks)
            known = decisions in self.tried
            found = self._measure(decisions)
            if found.peak_bytes <= budget:
                return
            corrected = self._learn(picks, decisions)
            if known or not corrected:
                asked -= max(1, found.peak_bytes - budget)  # what estimates leave out altogether

    def _learn(self, picks: Sequence[_Pick], decisions: Sequence[Chunk]) -> bool:
        """Correct estimates; whether any was wrong."""
        wrong = False
        for pick, inside in zip(picks, loop_bytes(self.program, decisions, self.spec), strict=True):
            wrong |= pick.candidates.exact.get(pick.slices) != inside
            pick.candidates.learn(pick.slices, inside)
        return wrong

    def _measure(self, decisions: tuple[Chunk, ...]) -> MeasuredStretches:
        if decisions not in self.tried:
            program = self.program
            if decisions:
                program = program.with_(stretches_patch(program, decisions, self.spec))
            self.tried[decisions] = MeasuredStretches(
                decisions, program, program.step_ms - self.program.step_ms
            )
        return self.tried[decisions]

    # --- paths ---

    def _least_peak(self) -> int:
        """The lowest limit for which there is a path, by the estimates."""
        n, places = self.flow.n_ops, self.places
        if not self.candidates:
            return int(self._total.max(initial=0))
        peaks = np.concatenate([one.least_peak() for one in self.candidates])
        order = places.by_start
        edges = zip(*(each[order].tolist() for each in (places.starts, places.untils, peaks)), strict=True)
        by_start: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for start, until, peak in edges:
            by_start[start].append((until, peak))
        best = [0] + [1 << 62] * n
        total = self._total.tolist()
        for i in range(n):
            best[i + 1] = min(best[i + 1], max(best[i], total[i]))
            for until, peak in by_start[i]:
                best[until] = min(best[until], max(best[i], peak))
        return best[n]

    def _cheapest(self, budget: int) -> list[_Pick] | None:
        """The cheapest path, by the estimates."""
        n = self.flow.n_ops
        starts, untils, costs, slices, which = (each.tolist() for each in self._edges(budget))
        order = np.lexsort((costs, untils, starts))
        fits = (self._total <= budget).tolist()
        cost = [0.0] + [float("inf")] * n
        via: list[int] = [-1] * (n + 1)
        edges = iter([*order.tolist(), -1])
        edge = next(edges)
        for i in range(n):
            here = cost[i]
            if fits[i] and here < cost[i + 1]:
                cost[i + 1], via[i + 1] = here, -1
            while edge >= 0 and starts[edge] == i:
                until = untils[edge]
                total = here + costs[edge]
                if total < cost[until]:
                    cost[until], via[until] = total, edge
                edge = next(edges)
        if cost[n] == float("inf"):
            return None
        picks = []
        at = n
        while at > 0:
            edge = via[at]
            if edge < 0:
                at -= 1
                continue
            one = self.candidates[which[edge]]
            picks.append(_Pick(one, at - 1 - one.shape.until, self._even(one, slices[edge])))
            at = starts[edge]
        return picks[::-1]

    @staticmethod
    def _even(one: Candidates, slices: int) -> int:
        """As many slices as there are of the length that so many slices have."""
        return -(-one.size // -(-one.size // slices))

    def _edges(
        self, budget: int
    ) -> tuple[
        npt.NDArray[np.int64],
        npt.NDArray[np.int64],
        npt.NDArray[np.float64],
        npt.NDArray[np.int64],
        npt.NDArray[np.int64],
    ]:
        """The stretches that fit: where they start, where the path goes on, cost, slices, which candidates.

        Those are left out in whose place all fits as it is: the path passes there at no cost. Most are when the budget
        is near the smallest peak of a step that has its peak in one place.
        """
        places = self.places
        above = np.concatenate([[0], np.cumsum(self._total > budget)])
        wanted = (above[places.untils] > above[places.starts]) & (places.outside <= budget)
        rows: list[npt.NDArray[np.int64]] = [np.zeros(0, dtype=np.int64)]
        cut = [np.zeros(0, dtype=np.int64)]
        costs = [np.zeros(0)]
        for i in np.unique(places.which[wanted]).tolist():
            one, own = self.candidates[i], np.arange(*places.offsets[i : i + 2].tolist())
            slices = one.fewest_slices(budget)
            ok = wanted[own] & (slices > 0)
            if ok.any():
                rows.append(own[ok])
                cut.append(slices[ok])
                costs.append(one.extra_ms(slices[ok]) + _TINY_MS)
        at = np.concatenate(rows)
        return (
            places.starts[at],
            places.untils[at],
            np.concatenate(costs),
            np.concatenate(cut),
            places.which[at],
        )

    def decision(self, candidates: Candidates, end: int, slices: int) -> Chunk:
        """The stretch that ends with an op, as a plan says it."""
        program, shape = self.program, candidates.shape
        members = [end + i for i in shape.members if self.flow.computes[end + i]]
        scope = unit_scope(program, [program.ops[i].scope for i in members], self.pins)
        if scope not in self._sites:
            self._sites[scope] = {op: site for site, op in ops_by_site(program, scope).items()}
        sites = self._sites[scope]
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


def stretch_search(program: Program, spec: DeviceSpec, pins: Pins = NO_PINS) -> StretchSearch:
    """Of a program on a device, made once."""
    known = _searches(program, spec)
    if pins.key not in known:
        known[pins.key] = StretchSearch(program, spec, pins)
    return known[pins.key]


@derived
def _searches(program: Program, spec: DeviceSpec) -> dict[Hashable, StretchSearch]:
    """The searches of a program on a device, by their pins; ``stretch_search`` fills it."""
    return {}


@dataclass(frozen=True, slots=True)
class StretchSolver:
    """The solver of plans for inference: a path through stretches."""

    name: str = "path"
    techniques: tuple[str, ...] = ("chunk",)

    def proposals(self, step: PlanStep, budget_bytes: int) -> Sequence[tuple[Chunk, ...]]:
        """The stretches that take the least time within a budget; where none hold it, those with the smallest peak."""
        if step.device is None:
            raise PlanError("stretches are planned for a device; it was not given.")
        search = stretch_search(step.program, step.device, step.pins)
        found = search.solve(budget_bytes) if budget_bytes else None
        return ((found or search.minimise()).decisions,)
