"""``Milp``: the mixed-integer program that chooses an option for every region.

With x_co "region c takes option o" and the effects of ``_plan/effects.py``, which add up,

    minimise    sum of cost_co x_co
    subject to  base_s + sum of change_cos x_co <= budget     for every interval s of the step
                sum over o of x_co <= 1                        for every region c

The rows hold the working set of the recomputation, the gradients that come in and the kernels' workspaces, since
the effects do. Optimal to the asked gap, among the options that the regions offer.

Regions of one kind share variables: n_bo says how many regions of a block b of equal regions take an option. A row is
in the program if its interval treats the regions of each block alike; so at first only what happens outside of
all repeated layers is, and the program is a relaxation that does not grow with the depth. If its solution, laid
out over the regions, is over the budget somewhere, the blocks are split there so that this row can be written,
and the program is solved again. Where nothing is over, the relaxation's optimum is the optimum.

Neighbouring rows differ in few blocks, so each is written as the one before plus what differs. What is found is
looked at in whole bytes; bytes that a tolerance hid are found by asking again a little tighter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sacplan._plan.effects import Additive, Bytes
from sacplan._solve.local import give_back
from sacplan._solve.mip import LinearProgram, Solution
from sacplan._solve.solvers import Proposal

_SCALE = 1000.0  # bytes are scaled so that what is over the budget is this
_SLACK = 1e-6  # by how much rows are relaxed: a solver must not call a plan infeasible that just fits
_SPLITS = 60  # of blocks, at most
_FLOOR = 1e-3  # share of the peak to which the smallest one is found


@dataclass(frozen=True, slots=True)
class Milp:
    """The mixed-integer program over the options of all regions (through PuLP).

    Attributes:
        backend: "auto" (HiGHS where installed, else CBC), "highs", "cbc".
        gap: relative gap at which a solution counts as optimal.
        time_limit_s, seed: of all solves for one budget together, and of each.
    """

    backend: Literal["auto", "highs", "cbc"] = "auto"
    gap: float = 1e-3
    time_limit_s: float = 10.0
    seed: int = 0

    @property
    def name(self) -> str:
        """``"milp"``."""
        return "milp"

    def propose(self, effects: Additive, budget_bytes: int) -> Proposal | None:
        """The cheapest choice whose peak is at most there; None if there is none, or none was found in time."""
        return Refinement(self, effects, budget_bytes).run()

    def smallest(self, effects: Additive) -> Proposal:
        """The choice with the smallest peak (to a thousandth), as cheap as that peak allows."""
        choice = Refinement(self, effects, None).smallest()
        return self.propose(effects, effects.peak(choice)[0]) or Proposal(choice, "feasible")


class Refinement:
    """Solve, lay out, split, until what is laid out fits. Without a budget, the peak is minimised."""

    def __init__(self, options: Milp, effects: Additive, budget_bytes: int | None) -> None:
        self.options = options
        self.effects = effects
        self.budget_bytes = budget_bytes
        self.infeasible = False  # proved
        self.deadline = time.monotonic() + options.time_limit_s
        kinds: dict[object, list[int]] = {}
        for i, region in enumerate(effects.regions):
            if len(region.options) > 1:
                kinds.setdefault((region.kind, region.wide, effects.costs[i].tobytes()), []).append(i)
        self.blocks = list(kinds.values())

    def run(self) -> Proposal | None:
        effects, budget = self.effects, self.budget_bytes
        assert budget is not None
        best: dict[int, int] | None = None
        bound: float | None = None
        asked, exact = budget, True
        for _ in range(_SPLITS):
            solution, program = self._solve(asked)
            if asked == budget and solution.bound is not None:
                bound = max(bound or 0.0, solution.bound)
            if not solution.values:
                self.infeasible = solution.status == "infeasible" and asked == budget
                break
            exact = exact and solution.status == "optimal"
            choice, total = self._lay_out(program.counts(solution))
            if total.max() <= budget:
                found = give_back(effects, choice, budget)
                if best is None or effects.cost(found) < effects.cost(best):
                    best = found
                break
            over = int(total.argmax())
            if not self._split(over):
                asked -= int(total[over]) - budget  # a tolerance hid some bytes
        if best is None:
            return None
        status = "optimal" if exact and bound is not None and self._close(best, bound) else "feasible"
        return Proposal(best, status, bound)

    def smallest(self) -> dict[int, int]:
        """The choice with the smallest peak that is found."""
        best: dict[int, int] = {}
        best_peak = self.effects.peak(best)[0]
        for _ in range(_SPLITS):
            solution, program = self._solve(None)
            if not solution.values:
                break
            choice, total = self._lay_out(program.counts(solution))
            if total.max() < best_peak:
                best, best_peak = choice, int(total.max())
            bound = solution.bound if solution.bound is not None else 0.0
            if best_peak <= bound * program.bytes_scale * (1 + _FLOOR) or not self._split(
                int(total.argmax())
            ):
                break
        return best

    def _close(self, choice: dict[int, int], bound: float) -> bool:
        cost = self.effects.cost(choice)
        return cost - bound <= max(
            self.options.gap * cost, _SLACK * max(float(c.max()) for c in self.effects.costs)
        )

    def _solve(self, budget_bytes: int | None) -> tuple[Solution, _Encoding]:
        program = _Encoding(self.effects, self.blocks, budget_bytes)
        left = self.deadline - time.monotonic()
        if left <= 0:
            return Solution("unknown"), program
        return program.solve(self.options, left), program

    def _lay_out(self, counts: list[list[int]]) -> tuple[dict[int, int], Bytes]:
        """The regions of each block in both orders, whichever has the lower peak; more is discarded first or last."""
        found = []
        for first in (1, -1):
            choice: dict[int, int] = {}
            for block, own in zip(self.blocks, counts, strict=True):
                kept = [cell_options.kept_bytes for cell_options in self.effects.regions[block[0]].options]
                taken = [o for o, count in enumerate(own, start=1) for _ in range(count)]
                taken += [0] * (len(block) - len(taken))
                taken.sort(key=lambda o: first * kept[o])
                choice.update((region, o) for region, o in zip(block, taken, strict=True) if o)
            found.append((choice, self.effects.total(choice)))
        return min(found, key=lambda pair: int(pair[1].max()))

    def _split(self, interval: int) -> bool:
        """Split the blocks whose regions differ at a interval; says whether any did."""
        blocks: list[list[int]] = []
        for block in self.blocks:
            groups: dict[bytes, list[int]] = {}
            for region in block:
                groups.setdefault(self.effects.changes[region][:, interval].tobytes(), []).append(region)
            blocks.extend(groups.values())
        changed = len(blocks) > len(self.blocks)
        self.blocks = blocks
        return changed


class _Encoding:
    """The program for some blocks of equal regions."""

    def __init__(self, effects: Additive, blocks: list[list[int]], budget_bytes: int | None) -> None:
        self.program = LinearProgram()
        self._budget = budget_bytes
        self._effects = effects
        self._blocks = blocks
        costs = [float(c) for block in blocks for c in effects.costs[block[0]]]
        self._cost_scale = max(costs, default=0.0) or 1.0
        self._counts: list[list[int]] = []
        wide = []
        for block in blocks:
            region = effects.regions[block[0]]
            own = []
            for cost, makes_wide in zip(effects.costs[block[0]][1:], region.wide[1:], strict=True):
                price = 0.0 if budget_bytes is None else float(cost) / self._cost_scale
                own.append(self.program.variable(upper=float(len(block)), integer=True, cost=price))
                if makes_wide:
                    wide.append((own[-1], len(block)))
            if len(own) > 1:
                self.program.row([(n, 1.0) for n in own], upper=float(len(block)))
            self._counts.append(own)
        if wide and effects.wide_cost and budget_bytes is not None:
            is_wide = self.program.binary(cost=effects.wide_cost / self._cost_scale)
            for n, size in wide:
                self.program.row([(is_wide, float(size)), (n, -1.0)], lower=0.0)
        largest = int(effects.base.max())
        self.bytes_scale = max(1.0, largest if budget_bytes is None else largest - budget_bytes) / _SCALE
        self._memory_rows()

    def _memory_rows(self) -> None:
        """What is freed, interval after interval, covers what is over the budget."""
        effects, budget = self._effects, self._budget
        peak = self.program.variable(cost=1.0) if budget is None else None
        columns = [n for own in self._counts for n in own]
        if self._blocks:
            freed = -np.concatenate([effects.changes[b[0]][1:] for b in self._blocks]) / self.bytes_scale
        else:
            freed = np.zeros((0, len(effects.base)))
        before, last = None, None
        for interval in self._intervals():
            need = float((effects.base[interval] - (budget or 0)) / self.bytes_scale - _SLACK)
            total = self.program.variable(lower=None if peak is not None else need)
            difference = freed[:, interval] if last is None else freed[:, interval] - freed[:, last]
            terms = [(columns[i], float(difference[i])) for i in np.flatnonzero(difference)]
            if before is not None:
                terms.append((before, 1.0))
            self.program.row([(total, -1.0), *terms], lower=0.0, upper=0.0)
            if peak is not None:
                self.program.row([(total, 1.0), (peak, 1.0)], lower=need)
            before, last = total, interval

    def _intervals(self) -> npt.NDArray[np.intp]:
        """Those that treat the regions of each block alike and that some choice puts over the budget."""
        effects = self._effects
        wanted = np.ones(len(effects.base), dtype=bool)
        worst = effects.base.copy()
        for block in self._blocks:
            first = effects.changes[block[0]]
            for region in block[1:]:
                wanted &= (effects.changes[region] == first).all(axis=0)
            worst += len(block) * np.maximum(first.max(axis=0), 0)
        if self._budget is not None:
            wanted &= worst > self._budget
        return np.flatnonzero(wanted)

    def solve(self, options: Milp, time_limit_s: float) -> Solution:
        gap = options.gap if self._budget is not None else _FLOOR / 2
        found = self.program.solve(
            solver=options.backend, gap=gap, time_limit_s=time_limit_s, seed=options.seed
        )
        if found.bound is None or self._budget is None:
            return found
        return Solution(found.status, found.values, found.objective, found.bound * self._cost_scale)

    def counts(self, solution: Solution) -> list[list[int]]:
        """By block and option (the first left out), how many regions take it."""
        return [[round(solution.values[n]) for n in own] for own in self._counts]
