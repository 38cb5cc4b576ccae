"""``Milp``: the mixed-integer program that chooses an option for every cell.

With x_co "cell c takes option o" and the effects of ``_plan/effects.py``, which add up,

    minimise    sum of cost_co x_co
    subject to  base_s + sum of change_cos x_co <= budget     for every stretch s of the step
                sum over o of x_co <= 1                        for every cell c

The rows hold the working set of the recomputation, the gradients that come in and the kernels' workspaces, since
the effects do. Optimal to the asked gap, among the options that the cells offer.

Neighbouring stretches differ in a cell or two, so each row is written as the one before plus what differs:
the program stays sparse, and grows with the depth only linearly. What is found is rounded to whole options and
looked at in whole bytes; bytes that a tolerance hid are found by asking again a little tighter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sacplan._plan.effects import Effects
from sacplan._solve.local import give_back
from sacplan._solve.pulp import Program, Solution
from sacplan._solve.solvers import Proposal

_SCALE = 1000.0  # bytes are scaled so that what is over the budget is this
_SLACK = 1e-6  # by how much rows are relaxed: a solver must not call a plan infeasible that just fits
_ROUNDS = 4  # of asking again for the bytes that a tolerance hid


@dataclass(frozen=True, slots=True)
class Milp:
    """The mixed-integer program over the options of all cells (through PuLP).

    Attributes:
        backend: "auto" (HiGHS where installed, else CBC), "highs", "cbc".
        gap: relative gap at which a solution counts as optimal.
        time_limit_s, seed: of each solve.
    """

    backend: Literal["auto", "highs", "cbc"] = "auto"
    gap: float = 1e-2
    time_limit_s: float = 10.0
    seed: int = 0

    @property
    def name(self) -> str:
        """``"milp"``."""
        return "milp"

    def propose(self, effects: Effects, budget_bytes: int) -> Proposal | None:
        """The cheapest choice whose peak is at most there; None if there is none."""
        asked = budget_bytes
        for _ in range(_ROUNDS):
            encoding = _Encoding(effects, asked)
            solution = encoding.solve(self)
            if not solution.values:
                return None
            choice = encoding.read(solution)
            over = effects.peak(choice)[0] - budget_bytes
            if over <= 0:
                choice = give_back(effects, choice, budget_bytes)
                return Proposal(
                    choice, "optimal" if solution.status == "optimal" else "feasible", solution.bound
                )
            asked -= over
        return None

    def smallest(self, effects: Effects) -> Proposal:
        """The choice with the smallest peak."""
        encoding = _Encoding(effects, None)
        solution = encoding.solve(self)
        choice = encoding.read(solution) if solution.values else {}
        peak = effects.peak(choice)[0]
        return self.propose(effects, peak) or Proposal(choice, "feasible")


class _Encoding:
    """The program for a budget; without one, the peak is what is minimised."""

    def __init__(self, effects: Effects, budget_bytes: int | None) -> None:
        self.effects = effects
        self.program = Program()
        smallest = budget_bytes is None
        costs = [float(c) for cell in effects.costs for c in cell]
        self._cost_scale = max(costs, default=0.0) or 1.0
        self._variables: dict[int, list[int]] = {}
        for cell, own in enumerate(effects.costs):
            scaled = (0.0 if smallest else float(cost) / self._cost_scale for cost in own[1:])
            self._variables[cell] = [self.program.binary(cost=cost) for cost in scaled]
            if len(self._variables[cell]) > 1:
                self.program.row([(x, 1.0) for x in self._variables[cell]], upper=1.0)
        wide = [
            x
            for cell, own in self._variables.items()
            for x, w in zip(own, effects.cells[cell].wide[1:], strict=True)
            if w
        ]
        if wide and effects.wide_cost and not smallest:
            is_wide = self.program.binary(cost=effects.wide_cost / self._cost_scale)
            for x in wide:
                self.program.row([(is_wide, 1.0), (x, -1.0)], lower=0.0)
        largest = int(effects.base.max())
        self._scale = max(1.0, largest if budget_bytes is None else largest - budget_bytes) / _SCALE
        self._memory_rows(budget_bytes)

    def _memory_rows(self, budget_bytes: int | None) -> None:
        """What is freed, stretch after stretch, covers what is over the budget."""
        effects = self.effects
        peak = self.program.variable(cost=1.0) if budget_bytes is None else None
        over = -self._scaled(effects.changes)
        before, last = None, None
        for stretch in self._binding(budget_bytes):
            need = (effects.base[stretch] - (budget_bytes or 0)) / self._scale - _SLACK
            freed = self.program.variable(lower=None if peak is not None else float(need))
            terms = [(freed, -1.0)]
            difference = over[:, stretch]
            if before is not None:
                terms.append((before, 1.0))
                difference = difference - over[:, last]
            for column in np.flatnonzero(difference):
                terms.append((self._column(int(column)), float(difference[column])))
            self.program.row(terms, lower=0.0, upper=0.0)
            if peak is not None:
                self.program.row([(freed, 1.0), (peak, 1.0)], lower=float(need))
            before, last = freed, stretch

    def _binding(self, budget_bytes: int | None) -> list[int]:
        """The stretches that some choice puts over the budget."""
        effects = self.effects
        if budget_bytes is None:
            return list(range(len(effects.base)))
        worst = effects.base + sum(np.maximum(change.max(axis=0), 0) for change in effects.changes)
        return [int(s) for s in np.flatnonzero(worst > budget_bytes)]

    def _scaled(self, changes: tuple[np.ndarray, ...]) -> np.ndarray:
        self._columns = [(cell, o) for cell, own in self._variables.items() for o in range(len(own))]
        stacked = [change[1:] for change in changes if len(change) > 1]
        if not stacked:
            return np.zeros((0, len(self.effects.base)))
        return np.concatenate(stacked) / self._scale

    def _column(self, column: int) -> int:
        cell, option = self._columns[column]
        return self._variables[cell][option]

    def solve(self, options: Milp) -> Solution:
        solution = self.program.solve(
            solver=options.backend, gap=options.gap, time_limit_s=options.time_limit_s, seed=options.seed
        )
        if solution.bound is None:
            return solution
        return Solution(
            solution.status, solution.values, solution.objective, solution.bound * self._cost_scale
        )

    def read(self, solution: Solution) -> dict[int, int]:
        """Cell to the option that it takes, 0 left out."""
        return {
            cell: option
            for cell, own in self._variables.items()
            for option, x in enumerate(own, start=1)
            if solution.values[x] > 0.5
        }
