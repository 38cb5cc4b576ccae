"""``plan``: solve, replay, correct, until the replayed peak is under the budget.

A solver works on effects that add up (``effects.py``); the replay is the step. So a solution counts only with its
replayed peak, a difference between the two moves what the solver is asked for, and of all replayed solutions
that hold the budget the cheapest is the plan.

Regions are chosen for one by one first. Where that is not enough, or far from the bound, neighbouring regions are
joined, two, three and more, so that what passes between them may be discarded too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from sacplan._plan.context import Objective, PlanningContext, planning_context
from sacplan._plan.effects import RegionProblem
from sacplan._plan.make import made_plan
from sacplan._plan.plan import Plan, Status
from sacplan._plan.provenance import Provenance, options_of
from sacplan._profile.profile import Profile
from sacplan._program.budget import format_bytes, parse_budget
from sacplan._program.decisions import Discarded
from sacplan._program.liveness import Footprint
from sacplan._program.program import CallSite, Phase, Program, times_of
from sacplan._ranks.unit_limits import narrowed
from sacplan._recompute.pins import NO_PINS, Pins, resolve_pins
from sacplan._recompute.regions import Region
from sacplan._recompute.rewrite import recomputed
from sacplan._rotor.sequences import Rotor, sequences, unit_of
from sacplan._solve.greedy import Greedy
from sacplan._solve.local import give_back
from sacplan._solve.milp import Milp
from sacplan._solve.problem import DEVICE_MEMORY, Solution
from sacplan._solve.solvers import Solver
from sacplan._solve.uniform import Uniform
from sacplan.errors import InfeasibleBudget, PlanError

_IN_VAIN = 3  # sizes of regions in a row that make nothing cheaper, or no peak smaller
_ROUNDS = 4  # of asking a solver again
_AT_FLOOR = 1.001  # times what no plan can be under: the smallest peak, near enough
_OPTIMAL = 2e-3  # share of its cost that a plan may be above the bound for no other solver to be asked
_NEAR, _SMALL = 2e-2, 2e-3  # share of its cost, or of the step, up to which joined regions are not looked at


@dataclass(frozen=True, slots=True)
class _Tried:
    decisions: Discarded
    replay: Footprint
    status: str
    gap: float | None
    solver: str


@dataclass(slots=True)
class Search:
    """Replays each solution once and remembers it."""

    profile: Profile
    context: PlanningContext
    pins: Pins = NO_PINS
    tried: dict[frozenset[tuple[str, CallSite, int]], _Tried] = field(default_factory=dict)

    def add(self, effects: RegionProblem, solution: Solution, solver: str) -> _Tried:
        """Measure a solution."""
        program = self.profile.program
        decisions = decisions_of(program, effects.taken(solution.picks))
        key = _key(decisions)
        if key not in self.tried:
            cost = effects.problem.cost(solution.picks)
            gap = None
            if solution.bound is not None:
                gap = max(0.0, cost - solution.bound) / cost if cost else 0.0
            status = solution.status if solution.picks else "unplanned"
            self.tried[key] = _Tried(decisions, recomputed(program, decisions).footprint, status, gap, solver)
        return self.tried[key]

    def add_sequences(self, rotor: Rotor, budget_bytes: int) -> None:
        """Rotor's sequences for a budget, or the one with the smallest peak."""
        program, pins = self.profile.program, self.pins
        if pins.widest_units is not None and not pins.may_be_a_unit(program, unit_of(program)):
            raise PlanError(
                f"solver 'rotor' runs all stages in one unit, {unit_of(program) or 'the model itself'!r}, but "
                f"never={list(pins.never)!r} leaves modules in it alone. Use another solver, or keep= instead."
            )
        for found in sequences(program, budget_bytes, rotor, pins.kept_ops):
            decisions = narrowed(program, found.decisions)
            run = found.replay if decisions == found.decisions else recomputed(program, decisions).footprint
            tried = _Tried(decisions, run, "feasible", None, rotor.name)
            self.tried.setdefault(_key(decisions), tried)

    def cost(self, tried: _Tried) -> float:
        """What is minimised."""
        return sum(self.context.costs[op] for op in tried.replay.again)

    def best(self, budget_bytes: int) -> _Tried | None:
        """The cheapest that holds; the lower peak on a tie."""
        holding = [t for t in self.tried.values() if t.replay.peak_bytes <= budget_bytes]
        return min(holding, key=lambda t: (self.cost(t), t.replay.peak_bytes), default=None)

    def above_bound(self, budget_bytes: int) -> tuple[float, float]:
        """How far the best is above what any schedule costs, as a share of its cost and of the step's."""
        found = self.best(budget_bytes)
        if found is None:
            return math.inf, math.inf
        cost = self.cost(found)
        above = max(0.0, cost - self.context.bound.at(budget_bytes))
        return above / cost if cost else 0.0, above / sum(self.context.costs)

    @property
    def smallest(self) -> _Tried:
        """The lowest peak seen."""
        return min(self.tried.values(), key=lambda t: (t.replay.peak_bytes, self.cost(t)))


def _key(decisions: Discarded) -> frozenset[tuple[str, CallSite, int]]:
    return frozenset(
        (unit, site, times) for unit, sites in decisions.items() for site, times in sites.items()
    )


def plan(
    profile: Profile,
    budget: float | str,
    solver: str | Solver | Rotor = "best",
    objective: Objective = "time",
    *,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
) -> Plan:
    """Choose what each module discards, so that the whole step stays under a budget.

        plan = sacplan.plan(profile, budget="22GiB")
        plan = sacplan.plan(profile, "60%", keep=["*.router", "aten.topk"], never=["vision_tower.*"])

    Args:
        profile: from ``sacplan.profile``.
        budget: a number is GiB; a string has a unit (``"22GiB"``, ``"24GB"``), or is a share of the
            unplanned peak (``"60%"``). It bounds the peak of the whole step.
        solver: ``"milp"``, ``"greedy"``, ``"uniform"``, ``"best"`` (greedy, and milp where that is not at the bound;
            the cheaper plan wins), or an object such as ``sacplan.Milp(gap=1e-4)``. ``"rotor"`` plans for models that
            are a chain (``sacplan.Rotor``): dearer, but its smallest peak may be lower, since it may make the same
            values again several times; it always minimises time.
        objective: what is recomputed the least of: ``"time"`` (ms, as the profile predicts them) or ``"flops"``.
        keep: patterns of ops and modules; what they make is never discarded. A pattern that starts with ``aten.`` or
            ``prims.``, or has ``::`` in it, is matched (``fnmatch``) with the names of ops: ``"aten.topk"``,
            ``"aten.topk.default"``, ``"aten.*attention*"``, ``"mylib::scan"``. Any other is matched with the names of
            modules; without ``*``, ``?`` or ``[`` it is the name itself. All that runs in a module that matches
            counts. ``*`` also matches dots.
        never: patterns of modules that are left alone: nothing in them is discarded, and neither they nor a module
            around or inside of them becomes a unit, so they run as without a plan. Of a module around one, only what
            inner modules compute can then be discarded.

    With pins ``Plan.lower_bound_ms`` is what no schedule undercuts that keeps what is pinned.

    Raises:
        BudgetError: a budget that cannot be read.
        PlanError: an unknown solver or objective; a pattern that matches nothing.
        InfeasibleBudget: no plan found holds it; carries the smallest peak that one does.
    """
    solvers = resolve_solver(solver)
    search = _search(profile, objective, keep, never)
    budget_bytes = parse_budget(budget, profile.peak_bytes)
    if profile.peak_bytes <= budget_bytes:
        return _as_plan(search, search.smallest, solvers, budget, budget_bytes)
    for one in solvers:
        _solve(search, one, budget_bytes)
        if search.above_bound(budget_bytes)[0] <= _OPTIMAL:
            break
    found = search.best(budget_bytes)
    if found is None:
        _smallest(search, solvers, budget_bytes)
        found = search.best(budget_bytes)
    if found is None:
        raise _infeasible(search, solvers, budget_bytes)
    return _as_plan(search, found, solvers, budget, budget_bytes)


def plan_smallest(
    profile: Profile,
    solver: str | Solver | Rotor = "best",
    objective: Objective = "time",
    *,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
) -> Plan:
    """The plan with the smallest peak that the search finds, whatever it recomputes.

    Its ``peak_bytes`` is the ``smallest_feasible_bytes`` that ``InfeasibleBudget`` reports. ``keep`` and ``never`` are
    those of ``plan``.
    """
    search = _search(profile, objective, keep, never)
    solvers = resolve_solver(solver)
    _smallest(search, solvers, 0)
    return _as_plan(search, search.smallest, solvers)


def resolve_solver(solver: str | Solver | Rotor) -> list[Solver | Rotor]:
    """Solver objects by name; ``"best"`` is those whose plans are worth comparing, the quickest first."""
    if not isinstance(solver, str):
        return [solver]
    known: dict[str, list[Solver | Rotor]] = {
        "milp": [Milp()],
        "greedy": [Greedy()],
        "uniform": [Uniform()],
        "rotor": [Rotor()],
        "best": [Greedy(), Milp()],
    }
    if solver not in known:
        raise PlanError(
            f"unknown solver {solver!r}; known are {', '.join(map(repr, known))}, or an object such as "
            "sacplan.Milp()."
        )
    return known[solver]


def _search(
    profile: Profile, objective: Objective, keep: Sequence[str] = (), never: Sequence[str] = ()
) -> Search:
    pins = resolve_pins(profile.program, profile.fingerprint, keep, never)
    search = Search(profile, planning_context(profile.program, objective, pins), pins)
    search.add(search.context.effects(1), Solution({}, "feasible"), "none")
    return search


def _solve(search: Search, solver: Solver | Rotor, budget_bytes: int) -> None:
    """Regions one by one, then joined, as long as that makes it cheaper."""
    if isinstance(solver, Rotor):
        search.add_sequences(solver, budget_bytes)
        return
    context = search.context
    if budget_bytes < context.program.liveness.floor_bytes:
        return
    cheapest: float | None = None
    in_vain = 0
    for size in context.sizes:
        _close_loop(search, solver, context.effects(size), budget_bytes)
        found = search.best(budget_bytes)
        if found is None:
            continue
        cost = search.cost(found)
        in_vain = in_vain + 1 if cheapest is not None and cost >= cheapest else 0
        cheapest = cost
        of_cost, of_step = search.above_bound(budget_bytes)
        if of_cost <= _NEAR or of_step <= _SMALL or in_vain == _IN_VAIN:
            break


def _close_loop(search: Search, solver: Solver, effects: RegionProblem, budget_bytes: int) -> None:
    """Ask at the budget, then at budgets moved by what the replay says otherwise than the effects."""
    problem = effects.problem
    asked = budget_bytes
    for _ in range(_ROUNDS):
        limited = problem.with_limit(DEVICE_MEMORY, asked)
        solution = solver.solve(limited)
        if solution is None:
            break
        tried = search.add(effects, solution, solver.name)
        if solution.bound is not None:  # it weighs costs paid once, which are estimates and no recomputation
            free = replace(limited, once_costs=())
            leaner = replace(solution, picks=give_back(free, solution.picks), status="feasible")
            search.add(effects, leaner, solver.name)
        off = tried.replay.peak_bytes - problem.peak(solution.picks)
        if off == budget_bytes - asked or tried.replay.peak_bytes <= budget_bytes <= asked + off:
            break
        asked = budget_bytes - off


def _smallest(search: Search, solvers: Sequence[Solver | Rotor], budget_bytes: int) -> None:
    """The smallest peaks, in regions of all sizes, until one holds the budget."""
    for solver in solvers:
        if isinstance(solver, Rotor):
            search.add_sequences(solver, 0)
            continue
        worse = 0
        for size in search.context.sizes:
            before = search.smallest.replay.peak_bytes
            effects = search.context.effects(size)
            search.add(effects, solver.smallest(effects.problem), solver.name)
            now = search.smallest.replay.peak_bytes
            worse = worse + 1 if now >= before else 0
            if (
                now <= max(budget_bytes, _AT_FLOOR * search.context.program.liveness.floor_bytes)
                or worse == _IN_VAIN
            ):
                return


def decisions_of(program: Program, taken: Sequence[tuple[Region, int]]) -> dict[str, dict[CallSite, int]]:
    """Units that do not nest, and the call sites that each discards; a module takes over those in it."""
    gone = frozenset(op for region, option in taken for op in region.ops(region.options[option]))
    wanted = {unit for region, option in taken for unit in region.units[option]}
    scopes = {scope for unit in wanted for scope in program.calls[unit]}
    outer = {
        unit
        for unit in wanted
        if not any(a in scopes for scope in program.calls[unit] for a in program.ancestors(scope))
    }
    found: dict[str, dict[CallSite, int]] = defaultdict(dict)
    for unit in program.calls:
        if unit in outer:
            for scope in program.calls[unit]:
                for op, site in program.sites(scope).items():
                    if op in gone:
                        found[unit][site] = 1
    return narrowed(program, found)


def _infeasible(search: Search, solvers: Sequence[Solver | Rotor], budget_bytes: int) -> InfeasibleBudget:
    run = search.smallest.replay
    if run.peak_phase == Phase.OPTIMIZER:
        binding = "optimizer step"
    else:
        binding = run.peak_fqn or (
            "the loss, outside of any module" if run.peak_scope < 0 else "the model itself"
        )
    where = f"{run.peak_phase.name.lower()} of {binding}" if binding != "optimizer step" else binding
    names = " and ".join(s.name for s in solvers)
    advice = "make the batch smaller"
    if binding == "optimizer step":
        advice = (
            "use an optimizer with less state or fewer temporaries (fused=True), or train fewer parameters: a smaller "
            "batch does not help"
        )
    return InfeasibleBudget(
        f"no plan found keeps the step under {format_bytes(budget_bytes)} (solvers: {names}). The smallest peak "
        f"reached is {format_bytes(run.peak_bytes)} ({run.peak_bytes} bytes), in the {where}. "
        f"{_pinned_share(search, solvers)}{_with_rotor(search, budget_bytes)}"
        f'Give at least budget="{run.peak_bytes}B", or {advice}.',
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=run.peak_bytes,
        binding=binding,
    )


def _with_rotor(search: Search, budget_bytes: int) -> str:
    """A sentence on what Rotor, which may make values again more than once, would do."""
    free = Search(search.profile, search.context, search.pins)
    try:
        free.add_sequences(Rotor(), budget_bytes)
    except PlanError:
        return ""  # the model is no chain
    found = free.best(budget_bytes)
    if found is None:
        return ""
    return f'solver="rotor" holds the budget, with {found.replay.recompute_ms:.4g} ms of recomputation. '


def _pinned_share(search: Search, solvers: Sequence[Solver | Rotor]) -> str:
    """A sentence on how much smaller the smallest peak would be without pins, if it would be."""
    if not search.pins:
        return ""
    free = _search(search.profile, search.context.objective)
    _smallest(free, solvers, 0)
    smallest = free.smallest.replay.peak_bytes
    if smallest >= search.smallest.replay.peak_bytes:
        return ""
    named = (("keep", search.pins.keep), ("never", search.pins.never))
    pins = " and ".join(f"{argument}={list(patterns)!r}" for argument, patterns in named if patterns)
    return (
        f"That is with {pins}; without the pins the smallest is {format_bytes(smallest)} ({smallest} bytes). "
    )


def _as_plan(
    search: Search,
    found: _Tried,
    solvers: Sequence[Solver | Rotor],
    budget: float | str | None = None,
    budget_bytes: int | None = None,
) -> Plan:
    used = next((options_of(solver) for solver in solvers if solver.name == found.solver), None)
    made_by = Provenance.now(
        search.profile,
        found.solver,
        used,
        objective=search.context.objective,
        budget=budget,
        pins=search.pins,
    )
    return made_plan(
        search.profile,
        {unit: times_of(sites) for unit, sites in found.decisions.items()},
        found.replay,
        made_by,
        search.pins,
        status=cast(Status, found.status),
        gap=found.gap,
        budget_bytes=budget_bytes,
    )
