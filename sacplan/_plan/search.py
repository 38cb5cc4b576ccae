"""The closed loop: a solver proposes, the rewritten program says what that takes, and the solver is asked again.

A solver works on effects that add up (``effects.py``); the rewritten program is the step. So a solution counts only
with the peak of the program that it gives, a difference between the two moves what the solver is asked for, and of all
that hold the budget the cheapest is the plan.

Regions are chosen for one by one first. Where that is not enough, or far from the bound, neighbouring regions are
joined, two, three and more, so that what passes between them may be discarded too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sacplan._device.devices import DeviceSpec
from sacplan._plan.context import PlanningContext
from sacplan._plan.effects import RegionProblem
from sacplan._program.decisions import Decision
from sacplan._program.liveness import Footprint
from sacplan._program.program import Program
from sacplan._solve.local import give_back
from sacplan._solve.problem import DEVICE_MEMORY, Solution
from sacplan._solve.solvers import Solver
from sacplan._technique.regions import Option, Region
from sacplan._technique.technique import StepSolver
from sacplan._techniques import TECHNIQUES, rewritten

_IN_VAIN = 3  # sizes of regions in a row that make nothing cheaper, or no peak smaller
_ROUNDS = 4  # of asking a solver again
_AT_FLOOR = 1.001  # times what no plan can be under: the smallest peak, near enough
_NEAR, _SMALL = 2e-2, 2e-3  # share of its cost, or of the step, up to which joined regions are not looked at


@dataclass(frozen=True, slots=True)
class Candidate:
    """Decisions, and the step with them.

    Attributes:
        decisions: of a plan.
        footprint: of the rewritten program.
        added_ms: how much longer it takes, without what runs again.
        status: "optimal" or "feasible" in the solver's own model; "unplanned".
        gap: relative gap that the solver proved; None where it proved nothing.
        solver: its name.
    """

    decisions: tuple[Decision, ...]
    footprint: Footprint
    added_ms: float
    status: str
    gap: float | None
    solver: str


@dataclass(slots=True)
class PlanSearch:
    """Measures each set of decisions once and remembers it."""

    context: PlanningContext
    tried: dict[frozenset[Decision], Candidate] = field(default_factory=dict)
    limits_reached: dict[str, None] = field(default_factory=dict)
    """Solvers that a limit of work ended; searches for one plan may share it."""

    def __post_init__(self) -> None:
        self._measure((), "unplanned", None, "none")

    @property
    def program(self) -> Program:
        """The step without a plan."""
        return self.context.program

    def solve(self, solver: Solver | StepSolver, budget_bytes: int) -> None:
        """Regions one by one, then joined, as long as that makes it cheaper."""
        if isinstance(solver, StepSolver):
            self._add_proposals(solver, budget_bytes)
            return
        if budget_bytes < self.context.floor_bytes:
            return
        cheapest: float | None = None
        in_vain = 0
        for size in self.context.sizes:
            self._close_loop(solver, self.context.effects(size), budget_bytes)
            found = self.best(budget_bytes)
            if found is None:
                continue
            cost = self.cost(found)
            in_vain = in_vain + 1 if cheapest is not None and cost >= cheapest else 0
            cheapest = cost
            of_cost, of_step = self.above_bound(budget_bytes)
            if of_cost <= _NEAR or of_step <= _SMALL or in_vain == _IN_VAIN:
                break

    def minimise(self, solvers: Sequence[Solver | StepSolver], budget_bytes: int) -> None:
        """The smallest peaks, in regions of all sizes, until one holds the budget."""
        enough = max(budget_bytes, _AT_FLOOR * self.context.floor_bytes)
        for solver in solvers:
            if isinstance(solver, StepSolver):
                self._add_proposals(solver, 0)
                continue
            if self.smallest.footprint.peak_bytes <= self.context.floor_bytes:
                continue
            worse = 0
            for size in self.context.sizes:
                before = self.smallest.footprint.peak_bytes
                effects = self.context.effects(size)
                self._add(effects, self._noted(solver.smallest(effects.problem), solver), solver.name)
                now = self.smallest.footprint.peak_bytes
                worse = worse + 1 if now >= before else 0
                if now <= enough or worse == _IN_VAIN:
                    return

    def cost(self, candidate: Candidate) -> float:
        """What is minimised: what runs again, and the cost of other techniques' ops."""
        again = sum(self.context.step.costs[op] for op in candidate.footprint.again)
        return again + self.context.step.added_cost(candidate.added_ms)

    def best(self, budget_bytes: int) -> Candidate | None:
        """The cheapest that holds; the lower peak on a tie."""
        holding = [t for t in self.tried.values() if t.footprint.peak_bytes <= budget_bytes]
        return min(holding, key=lambda t: (self.cost(t), t.footprint.peak_bytes), default=None)

    def above_bound(self, budget_bytes: int) -> tuple[float, float]:
        """How far the best is above what any schedule costs, as a share of its cost and of the step's."""
        found = self.best(budget_bytes)
        if found is None:
            return math.inf, math.inf
        cost = self.cost(found)
        above = max(0.0, cost - self.context.bound.at(budget_bytes))
        return above / cost if cost else 0.0, above / sum(self.context.step.costs)

    def has_found(self, solver: Solver | StepSolver) -> bool:
        """Whether a solver has found anything."""
        return any(one.solver == solver.name for one in self.tried.values())

    @property
    def smallest(self) -> Candidate:
        """The lowest peak seen."""
        return min(self.tried.values(), key=lambda t: (t.footprint.peak_bytes, self.cost(t)))

    def _close_loop(self, solver: Solver, effects: RegionProblem, budget_bytes: int) -> None:
        """Ask at the budget, then at budgets moved by what the program says otherwise than the effects."""
        problem = effects.problem
        asked = budget_bytes
        for _ in range(_ROUNDS):
            limited = problem.with_limit(DEVICE_MEMORY, asked)
            solution = solver.solve(limited)
            if solution is None or self._noted(solution, solver).status == "unknown":
                break
            tried = self._add(effects, solution, solver.name)
            if solution.bound is not None:  # it also minimised costs paid once, which recompute nothing
                free = replace(limited, once_costs=())
                leaner = replace(solution, picks=give_back(free, solution.picks), status="feasible")
                self._add(effects, leaner, solver.name)
            off = tried.footprint.peak_bytes - problem.peak(solution.picks)
            if off == budget_bytes - asked or tried.footprint.peak_bytes <= budget_bytes <= asked + off:
                break
            asked = budget_bytes - off

    def _noted(self, solution: Solution, solver: Solver) -> Solution:
        if solution.limited:
            self.limits_reached[solver.name] = None
        return solution

    def _add(self, effects: RegionProblem, solution: Solution, solver: str) -> Candidate:
        cost = effects.problem.cost(solution.picks)
        gap = None
        if solution.bound is not None:
            gap = max(0.0, cost - solution.bound) / cost if cost else 0.0
        decisions = decisions_of(self.program, effects.taken(solution.picks), self.context.step.device)
        return self._measure(decisions, solution.status, gap, solver)

    def _measure(
        self, decisions: tuple[Decision, ...], status: str, gap: float | None, solver: str
    ) -> Candidate:
        key = frozenset(decisions)
        if key not in self.tried:
            program = rewritten(self.program, decisions, self.context.step.device)
            found = program.footprint
            added_ms = program.step_ms - self.program.step_ms - found.recompute_ms if decisions else 0.0
            self.tried[key] = Candidate(decisions, found, added_ms, status, gap, solver)
        return self.tried[key]

    def _add_proposals(self, solver: StepSolver, budget_bytes: int) -> None:
        """What a solver of whole steps proposes; it knows of no offers."""
        if not self.context.offers:
            for decisions in solver.proposals(self.context.step, budget_bytes):
                self._measure(decisions, "feasible", None, solver.name)


def decisions_of(
    program: Program, taken: Sequence[tuple[Region, Option]], device: DeviceSpec | None = None
) -> tuple[Decision, ...]:
    """Options that regions take, as decisions. A technique names call sites of what those before it leave."""
    found: list[Decision] = []
    for technique in TECHNIQUES.values():
        own = [(region, option) for region, option in taken if option.technique == technique.name]
        found += technique.decisions(rewritten(program, found, device), own)
    return tuple(found)
