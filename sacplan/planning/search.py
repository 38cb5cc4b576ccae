"""The closed loop: a solver proposes, the rewritten program is measured, and the solver is asked again.

A solver works on a linear model, in which effects add up (``effects.py``). The rewritten program is exact, so only its
peak counts for a proposal. If this differs from the peak in the model, the budget for the solver moves by the
difference:

    asked = budget - (measured peak - modelled peak)

Of all measured proposals that hold the budget, the cheapest is the plan. The loop ends when the difference no longer
moves, or after ``_ROUNDS`` rounds.

At first every region takes an option on its own. If the plan is then missing or far from the lower bound, neighbouring
regions are joined (two, all of a kind, three and more), so that tensors that pass between them may be discarded too.
This stops near the bound, or when several sizes in a row have given no cheaper plan.

An exact solver finds the optimum of each problem, up to its gap. The search as a whole is not optimal: it tries only
some sizes and, where effects do not add up, only a few budgets. ``Plan.lower_bound_ms`` limits how far it can be off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sacplan.core.decisions import Decision
from sacplan.planning.basis import Basis
from sacplan.planning.candidate import Candidate
from sacplan.planning.context import PlanningContext
from sacplan.planning.effects import RegionProblem
from sacplan.solvers.local import give_back
from sacplan.solvers.problem import DEVICE_MEMORY, Solution
from sacplan.solvers.solvers import Solver
from sacplan.techniques.base.technique import StepSolver
from sacplan.techniques.registry import decisions_of, why_not

# On three golden models and a language model of 12 layers, at four budgets and for the smallest peak, these values
# change no plan: 1 to 6 sizes in vain, 1 to 8 rounds, and 1.0 to 1.02 times the floor find the same plans.
_IN_VAIN = 3  # give up after so many sizes in a row without a cheaper plan, or without a smaller peak
_IN_VAIN_ROUGH = 1  # the same where prices are rough, and a plan has to be cheaper by ``NEAR`` to count
_ROUNDS = 4  # of asking a solver at most, for one size
_AT_FLOOR = 1.001  # a peak this many times the floor counts as the smallest
# No larger regions are tried for a plan that is this near the bound: as a share of its cost, or of the step's.
NEAR, _SMALL = 2e-2, 2e-3


@dataclass(slots=True)
class PlanSearch:
    """Asks solvers for proposals. Each set of decisions is measured once and remembered.

    Attributes:
        basis: The step, with what is settled and offered. Candidates are measured on the recorded step, for which pins
            no longer matter.
        tried: All candidates measured so far, by their decisions.
        limits_reached: Names of solvers that stopped at their limit of work; several searches may share this dict.
        asked: The solvers that were asked for a plan so far, each with its budget: none is asked twice for a budget.
        minimised: The solvers that were asked for the smallest peak so far.
    """

    basis: Basis
    tried: dict[frozenset[Decision], Candidate] = field(default_factory=dict)
    limits_reached: dict[str, None] = field(default_factory=dict)
    asked: list[tuple[Solver | StepSolver, int]] = field(default_factory=list)
    minimised: list[Solver | StepSolver] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._measure((), "unplanned", None, "none")

    @property
    def context(self) -> PlanningContext:
        """Regions, effects and bounds of the step to plan, in which the settled decisions are carried out."""
        return self.basis.context

    def solve(self, solver: Solver | StepSolver, budget_bytes: int) -> None:
        """Look for the cheapest plan: with single regions, then with joined ones for as long as that helps."""
        if (solver, budget_bytes) in self.asked:  # its proposals are in ``tried``
            return
        self.asked.append((solver, budget_bytes))
        if isinstance(solver, StepSolver):  # it plans the whole step and knows no regions
            self._add_proposals(solver, budget_bytes)
            return
        if budget_bytes < self.context.floor_bytes:  # no choice of options holds this budget
            return
        # Sizes are tried until the plan is near the bound, or until ``_IN_VAIN`` sizes in a row have found nothing
        # cheaper. Costs never rise from one size to the next, since the best of all candidates counts.
        cheapest: float | None = None
        in_vain = 0
        for size in self.context.sizes:
            self._close_loop(solver, self.context.effects(size), budget_bytes)
            found = self.best(budget_bytes)
            if found is None:  # larger regions may still hold the budget
                continue
            # Prices of waiting for copies are rough, and no bound ends the search: try fewer sizes in vain.
            enough, most = (1 - NEAR, _IN_VAIN_ROUGH) if self.context.frees_otherwise else (1.0, _IN_VAIN)
            in_vain = in_vain + 1 if cheapest is not None and found.cost >= enough * cheapest else 0
            cheapest = found.cost
            of_cost, of_step = self.above_bound(budget_bytes)
            if of_cost <= NEAR or of_step <= _SMALL or in_vain == most:
                break

    def minimise(self, solvers: Sequence[Solver | StepSolver], budget_bytes: int) -> None:
        """Look for the smallest peak, with larger and larger regions, until one holds the budget."""
        if self.smallest.footprint.peak_bytes <= budget_bytes:  # low enough as it is
            return
        # A peak near the floor is small enough, too: larger regions cannot lower it by much.
        enough = max(budget_bytes, _AT_FLOOR * self.context.floor_bytes)
        for solver in solvers:
            if solver in self.minimised:
                continue
            self.minimised.append(solver)
            if isinstance(solver, StepSolver):
                self._add_proposals(solver, 0)
                continue
            if self.smallest.footprint.peak_bytes <= self.context.floor_bytes:  # no option can go lower
                continue
            in_vain = 0
            for size in self.context.sizes:
                effects, before = self.context.effects(size), self.smallest.footprint.peak_bytes
                self._add(effects, self._noted(solver.smallest(effects.problem), solver), solver.name)
                now = self.smallest.footprint.peak_bytes
                in_vain = in_vain + 1 if now >= before else 0
                # Low enough, or larger regions no longer help. Either way, the remaining solvers are not asked.
                if now <= enough or in_vain == _IN_VAIN:
                    return

    def best(self, budget_bytes: int) -> Candidate | None:
        """Return the cheapest candidate that holds the budget, or None. On a tie, the lower peak wins."""
        # Solvers model the host's memory as one sum. Here its peak in the rewritten program counts, as on the device.
        room = self.context.step.host_bytes
        holding = [
            t
            for t in self.tried.values()
            if t.footprint.peak_bytes <= budget_bytes and t.footprint.host_peak_bytes <= room
        ]
        return min(holding, key=lambda t: (t.cost, t.footprint.peak_bytes), default=None)

    def above_bound(self, budget_bytes: int) -> tuple[float, float]:
        """Return how far the best plan is above the lower bound, as a share of its own cost and of the step's.

        Both are infinite if no plan holds the budget.
        """
        found = self.best(budget_bytes)
        if found is None:
            return math.inf, math.inf
        # If memory can be freed without running ops again, bounds on recomputation do not hold.
        bound = 0.0 if self.context.frees_otherwise else self.context.bound_at(budget_bytes)
        above = max(0.0, found.cost - bound)
        return above / found.cost if found.cost else 0.0, above / sum(self.context.step.costs)

    def has_found(self, solver: Solver | StepSolver) -> bool:
        """Whether any candidate comes from this solver."""
        return any(one.solver == solver.name for one in self.tried.values())

    @property
    def smallest(self) -> Candidate:
        """The candidate with the lowest peak."""
        room = self.context.step.host_bytes
        within = (t for t in self.tried.values() if t.footprint.host_peak_bytes <= room)
        return min(within, key=lambda t: (t.footprint.peak_bytes, t.cost))

    def _close_loop(self, solver: Solver, effects: RegionProblem, budget_bytes: int) -> None:
        """Ask a solver at the budget, then at budgets corrected by how far its model was off."""
        problem = effects.problem
        asked = budget_bytes
        for _ in range(_ROUNDS):
            limited = problem.with_limit(DEVICE_MEMORY, asked)
            solution = solver.solve(limited)
            # No choice holds this budget in the model, or the solver ended before it had found one.
            if solution is None or self._noted(solution, solver).status == "unknown":
                break
            # Kept even if it does not hold this budget: it may hold another one, or have the smallest peak.
            tried = self._add(effects, solution, solver.name)
            if tried is None:
                break
            # An exact solver has also minimised the one-time cost of wide units, which is an estimate and recomputes
            # nothing. So try its picks without those that the budget does not need, at costs that leave it out.
            if solution.bound is not None:
                free = replace(limited, once_costs=())
                leaner = replace(solution, picks=give_back(free, solution.picks), status="feasible")
                self._add(effects, leaner, solver.name)
            # Next, allow for how far the model was off.
            off = tried.footprint.peak_bytes - problem.peak(solution.picks)
            corrected, holds = budget_bytes - off, tried.footprint.peak_bytes <= budget_bytes
            # The budget would stay the same, or the plan holds it and the solver would get a smaller one.
            if corrected == asked or (holds and corrected <= asked):
                break
            asked = corrected

    def _noted(self, solution: Solution, solver: Solver) -> Solution:
        # With a higher limit there might be a cheaper plan, and the provenance says so.
        if solution.limited:
            self.limits_reached[solver.name] = None
        return solution

    def _add(self, effects: RegionProblem, solution: Solution, solver: str) -> Candidate | None:
        # The gap is relative to the solver's own model, with the cost of wide units included.
        cost = effects.problem.cost(solution.picks)
        gap = None
        if solution.bound is not None:
            gap = max(0.0, cost - solution.bound) / cost if cost else 0.0
        step, taken = self.context.step, effects.taken(solution.picks)
        decisions = decisions_of(step.program, taken, step.device)
        # Offers that are compatible in the settled step need not be so in the recorded one: drop such a proposal.
        recorded, together = self.basis.recorded, (*self.basis.settled, *decisions)
        if self.context.offers and why_not(recorded.program, together, recorded.device):
            return None
        return self._measure(decisions, solution.status, gap, solver)

    def _measure(
        self, decisions: tuple[Decision, ...], status: str, gap: float | None, solver: str
    ) -> Candidate:
        # Measured as the recorded step with all decisions, and not as the settled step with the further ones.
        decisions = (*self.basis.settled, *decisions)
        # Candidates with the same decisions are the same, in whatever order.
        key = frozenset(decisions)
        if key not in self.tried:
            self.tried[key] = Candidate(self.basis.recorded, decisions, status, gap, solver)
        return self.tried[key]

    def _add_proposals(self, solver: StepSolver, budget_bytes: int) -> None:
        """Measure what a solver of whole steps proposes."""
        # Such a solver does not know which ops the offers have taken, so it is asked only without offers.
        if not self.context.offers:
            for decisions in solver.proposals(self.context.step, budget_bytes):
                self._measure(decisions, "feasible", None, solver.name)
