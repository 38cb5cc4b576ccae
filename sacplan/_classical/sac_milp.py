"""Which modules to checkpoint, and how much each discards: the mixed-integer program of PR #137908.

The optimum is that of the model, reached by a program that solvers like. With y_i "module i is a
unit", r_i its discard share, z_ik "unit i takes its reachable point k":

- Time. Over reachable points, sum_k ms_ik z_ik. Over the piecewise linear fit, the perspective
  reformulation (Frangioni & Gentile, Math. Program. 106, 2006): rct_i >= T_i (slope r_i + intercept
  y_i) for each segment and r_i <= rmax_i y_i. Its relaxation is the convex hull of each unit alone, so
  there is no big M.
- Memory. A row says that what the first p modules discard covers what is over the budget. Prefix sums
  D_p = D_p' + (what units between p' and p discard) make the rows sparse, and rows that another one
  implies are left out, so the needs rise strictly from row to row.
- Nesting. Units form an antichain of the module tree: one clique row for each path from the root to a
  lowest candidate.
- Symmetry. Of units with the same trade-off, as in repeated layers, the earlier discards no less: its
  memory is free at least as long. Without it, a dozen equal layers keep CBC busy for a minute.

A solver works within tolerances; a plan does not. What it returns is evaluated again in whole bytes,
repaired where some bytes are missing, and cut off where that would cost more than the asked gap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from sacplan._classical.graph import Graph, ModuleStats
from sacplan._classical.subtrees import solve_shared
from sacplan._program.budget import format_bytes, parse_budget
from sacplan._solve.milp import Milp
from sacplan._solve.mip import LinearProgram, Solution, check_options, relative_gap
from sacplan.errors import InfeasibleBudget, PlanError, SolverError

# Coefficients are scaled to this size: far above the solvers' tolerances (1e-6), not so far apart as to
# lose digits.
_SCALE = 1000.0

# By how much rows are relaxed: a solver must not call a plan infeasible that just fits. What it then
# lets through is found in whole bytes.
_SLACK = 1e-6

_MAX_ROUNDS = 25  # of cutting off a solution that only a tolerance made feasible


class _Triple(NamedTuple):
    ac_decisions: dict[str, float]
    recomputation_time_ms: float
    peak_bytes: int


class SacMilpResult(_Triple):
    """``ac_decisions, recomputation_time_ms, peak_bytes = sac_milp(...)``, and how good it is.

    Attributes:
        ac_decisions: fqn to share of ``sac_memory`` discarded, in execution order.
        recomputation_time_ms: what the plan adds to the step.
        peak_bytes: the largest memory row under the plan, exact.
        status: "optimal" (proved, within the asked gap) or "feasible" (the time limit came first).
        bound_ms: no plan takes less than this; None where the solver proved nothing.
        gap: (recomputation_time_ms - bound_ms) / recomputation_time_ms; None like the bound.
    """

    status: Literal["optimal", "feasible"]
    bound_ms: float | None
    gap: float | None

    def __new__(
        cls,
        ac_decisions: dict[str, float],
        recomputation_time_ms: float,
        peak_bytes: int,
        status: Literal["optimal", "feasible"] = "optimal",
        bound_ms: float | None = None,
    ) -> SacMilpResult:
        self = super().__new__(cls, ac_decisions, recomputation_time_ms, peak_bytes)
        self.status = status
        self.bound_ms = bound_ms
        self.gap = relative_gap(recomputation_time_ms, bound_ms)
        return self

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, status={self.status!r}, bound_ms={self.bound_ms}, gap={self.gap})"


class _Choice(NamedTuple):
    ratio: float
    freed: int
    ms: float


@dataclass(frozen=True, slots=True)
class _Unit:
    """A module that may be checkpointed. ``above`` are the units around it, nearest first."""

    fqn: str
    index: int
    memory: int
    choices: tuple[_Choice, ...]  # both freed and ms rise strictly; in continuous mode only the last
    segments: tuple[tuple[float, float], ...]  # (slope, intercept) in ms; empty if only points count
    above: tuple[int, ...]

    def at(self, ratio: float) -> _Choice:
        """The continuous trade-off at one ratio."""
        return _on_fit(self.memory, self.segments, ratio)


def _on_fit(memory: int, segments: tuple[tuple[float, float], ...], ratio: float) -> _Choice:
    ms = max(0.0, max(slope * ratio + intercept for slope, intercept in segments))
    return _Choice(ratio, _freed(memory, ratio), ms)


class _Row(NamedTuple):
    n_units: int  # the first so many units (by end of forward) discard before this moment
    n_bytes: int
    name: str


# A plan in the making: unit (place in the list of units) to what it does.
_Plan = dict[int, _Choice]


@dataclass(frozen=True, slots=True)
class _Model:
    units: tuple[_Unit, ...]  # in the order in which their forward ends
    rows: tuple[_Row, ...]  # n_units and n_bytes rise strictly
    below: tuple[tuple[int, ...], ...]  # units inside a unit

    def peak(self, plan: _Plan) -> tuple[int, _Row]:
        """The largest row under a plan; exact."""
        freed, unit = 0, 0
        best: tuple[int, _Row] | None = None
        for row in self.rows:
            while unit < row.n_units:
                freed += plan[unit].freed if unit in plan else 0
                unit += 1
            if best is None or row.n_bytes - freed > best[0]:
                best = row.n_bytes - freed, row
        assert best is not None
        return best

    def violated(self, plan: _Plan, budget_bytes: int) -> tuple[_Row, int] | None:
        """The first row over budget, and by how many bytes."""
        freed, unit = 0, 0
        for row in self.rows:
            while unit < row.n_units:
                freed += plan[unit].freed if unit in plan else 0
                unit += 1
            if row.n_bytes - freed > budget_bytes:
                return row, row.n_bytes - freed - budget_bytes
        return None


def sac_milp(
    graph: Graph,
    memory_budget: float | str,
    world_size: int = 1,
    ac_units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] | None = None,
    *,
    choices: Literal["reachable", "continuous"] = "reachable",
    solver: str = "auto",
    gap: float = 1e-4,
    time_limit: float = 60.0,
    seed: int = 0,
) -> SacMilpResult:
    """Choose the units and their discard ratios that fit the budget with the least recomputation.

        ac_decisions, recomputation_time_ms, peak_bytes = sac_milp(graph, "22GiB")

    Units never nest, and leaves are never units. The graph is not changed. The same input gives the
    same plan, unless the time limit ends the search.

    Args:
        graph: from ``parse_module_info``.
        memory_budget: a number is GiB, a string carries its unit or is a share of the peak
            without checkpointing (``"60%"``).
        world_size: ranks that parameters, gradients and optimizer state are divided by.
        ac_units: only these modules may be units; None for no such restriction. Names with or without the
            root's, matched whole.
        fsdp_units: modules that strictly contain one of these may not be units.
        choices: "reachable" takes one of a module's exactly reachable points. "continuous" takes any
            ratio on the piecewise linear fit. A graph in which no module has points, such as one of
            bare fits, is always continuous.
        solver: "auto" (HiGHS if installed, else CBC), "highs" or "cbc".
        gap: relative gap at which a plan counts as optimal.
        time_limit: seconds.
        seed: of the solver.

    Raises:
        BudgetError: a budget that cannot be read.
        InfeasibleBudget: no choice fits; says the smallest budget that does.
        PlanError: unknown modules, or options out of range.
        SolverError: no solver, or no plan found in the time.
    """
    if choices not in ("reachable", "continuous"):
        raise PlanError(f"unknown choices {choices!r}; there are 'reachable' and 'continuous'")
    check_options(solver, gap, time_limit, seed)
    model = _model(graph, world_size, ac_units, fsdp_units, choices)
    unplanned_bytes = model.rows[-1].n_bytes
    budget_bytes = parse_budget(memory_budget, unplanned_bytes)
    if unplanned_bytes <= budget_bytes:
        return SacMilpResult({}, 0.0, unplanned_bytes, "optimal", 0.0)

    deadline = time.monotonic() + time_limit
    plan, proved, bound_ms = _shared(model, budget_bytes, solver, gap, time_limit, seed)
    if not proved:
        search = _Search(model, budget_bytes, solver, gap, deadline, seed)
        plan, proved, bound_ms = search.run(plan, bound_ms)
    if plan is None:
        smallest_bytes, smallest_plan, exact = _smallest_peak(model, solver, time_limit, seed)
        if smallest_bytes > budget_bytes:
            if not (proved or exact):
                raise SolverError(
                    f"neither a plan for {format_bytes(budget_bytes)} nor a proof that there is none was "
                    f"found within {time_limit} s; raise time_limit, or the budget to {smallest_bytes}B"
                )
            raise _infeasible(model, budget_bytes, smallest_bytes, smallest_plan)
        plan, proved = smallest_plan, False
    recompute_ms = _cost(plan)
    result = SacMilpResult(
        {
            model.units[i].fqn: plan[i].ratio
            for i in sorted(plan, key=lambda i: model.units[i].index)
            if plan[i].freed > 0
        },
        recompute_ms,
        model.peak(plan)[0],
        "optimal" if proved else "feasible",
        None if bound_ms is None else min(recompute_ms, max(0.0, bound_ms)),
    )
    if result.peak_bytes > budget_bytes:
        raise SolverError(
            f"internal: the plan needs {result.peak_bytes} B of {budget_bytes} B; please report"
        )
    return result


# The model ---------------------------------------------------------------------------------------------


def _model(
    graph: Graph,
    world_size: int,
    ac_units: Sequence[str] | None,
    fsdp_units: Sequence[str] | None,
    choices: str,
) -> _Model:
    allowed = None if ac_units is None else graph.match(ac_units, "ac_units")
    sharded = graph.match(fsdp_units or (), "fsdp_units")
    holds_sharded = {ancestor for fqn in sharded for ancestor in graph.ancestors(fqn)}
    reachable = choices == "reachable" and any(node.points for node in graph.nodes)

    found: list[tuple[ModuleStats, tuple[_Choice, ...], tuple[tuple[float, float], ...]]] = []
    for fqn in graph.fw_post_order:
        node = graph[fqn]
        if node.is_leaf or fqn in holds_sharded or (allowed is not None and fqn not in allowed):
            continue
        segments = () if reachable else _segments(node)
        options = _pareto(node) if reachable else _last(node, segments)
        if options:
            found.append((node, options, segments))

    place = {node.fqn: i for i, (node, _, _) in enumerate(found)}
    units = tuple(
        _Unit(
            node.fqn,
            graph.index(node.fqn),
            node.sac_memory,
            options,
            segments,
            tuple(place[fqn] for fqn in graph.ancestors(node.fqn) if fqn in place),
        )
        for node, options, segments in found
    )
    below: list[list[int]] = [[] for _ in units]
    for i, unit in enumerate(units):
        for j in unit.above:
            below[j].append(i)

    # Discarded bytes only grow along the rows, so a row as large as all before it is implied by none,
    # and one that is not larger is implied.
    positions = [graph.position(unit.fqn) for unit in units]
    rows: list[_Row] = []
    n_units = 0
    for position, n_bytes, name in graph.named_memory_rows(world_size):
        while n_units < len(units) and positions[n_units] < position:
            n_units += 1
        if rows and n_bytes <= rows[-1].n_bytes:
            continue
        if rows and rows[-1].n_units == n_units:
            rows.pop()
        rows.append(_Row(n_units, n_bytes, name))
    return _Model(units, tuple(rows), tuple(tuple(inside) for inside in below))


def _shared(
    model: _Model, budget_bytes: int, solver: str, gap: float, time_limit: float, seed: int
) -> tuple[_Plan | None, bool, float | None]:
    """The program with shared variables, where there are only reachable points and the subtrees are small."""
    if any(unit.segments for unit in model.units):
        return None, False, None
    options = Milp(check_options(solver, gap, time_limit, seed), gap, time_limit, seed)
    answer = solve_shared(model.units, [row[:2] for row in model.rows], budget_bytes, options)
    if answer is None:
        return None, False, None
    plan = None if answer.taken is None else {i: model.units[i].choices[o] for i, o in answer.taken.items()}
    return plan, answer.proved, answer.bound_ms


def _freed(memory: int, ratio: float) -> int:
    return round(memory * ratio)


def _pareto(node: ModuleStats) -> tuple[_Choice, ...]:
    """The reachable points that no other dominates, by bytes freed."""
    points = [
        _Choice(p.discard_ratio, _freed(node.sac_memory, p.discard_ratio), p.recompute_ms)
        for p in node.points
    ]
    kept: list[_Choice] = []
    for point in sorted(points, key=lambda p: (p.ms, -p.freed)):
        if point.freed > (kept[-1].freed if kept else 0):
            kept.append(point)
    return tuple(kept)


def _segments(node: ModuleStats) -> tuple[tuple[float, float], ...]:
    return tuple(
        (node.sac_runtime * slope, node.sac_runtime * intercept)
        for slope, intercept in zip(node.slopes, node.intercepts, strict=True)
    )


def _last(node: ModuleStats, segments: tuple[tuple[float, float], ...]) -> tuple[_Choice, ...]:
    """The largest discard of the fit, if there is a fit."""
    if not segments:
        return ()
    ratios = node.breakpoints or tuple(ratio for ratio, _ in node.tradeoff_curve) or (1.0,)
    choice = _on_fit(node.sac_memory, segments, min(1.0, max(ratios)))
    return (choice,) if choice.freed > 0 else ()


def _cost(plan: _Plan) -> float:
    return math.fsum(plan[i].ms for i in sorted(plan) if plan[i].freed > 0)


# The search --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Encoding:
    """The program, and what its variables mean."""

    program: LinearProgram
    picks: tuple[tuple[tuple[int, _Choice], ...], ...]  # per unit: binary variable, what it stands for
    shares: tuple[int, ...]  # per unit, in continuous mode: the share of the pick's discard
    ms_scale: float  # of the objective

    def read(self, solution: Solution, model: _Model) -> _Plan:
        plan: _Plan = {}
        for i, picks in enumerate(self.picks):
            for variable, choice in picks:
                if solution.values[variable] > 0.5:
                    if self.shares:
                        share = min(1.0, max(0.0, solution.values[self.shares[i]]))
                        choice = model.units[i].at(share * choice.ratio)
                    if choice.freed > 0:
                        plan[i] = choice
        return plan

    def cut_off(self, plan: _Plan, row: _Row, missing: int) -> bool:
        """Exclude a plan that leaves a row over budget: some unit before it has to discard more.

        Says whether there is such a cut (in continuous mode only where the units of the plan do not
        suffice, whatever their ratios).
        """
        spare = 0
        more = []
        for i in range(row.n_units):
            for variable, choice in self.picks[i]:
                if i not in plan or (not self.shares and choice.freed > plan[i].freed):
                    more.append((variable, 1.0))
                elif self.shares:
                    spare += max(0, choice.freed - plan[i].freed)
        if spare >= missing:
            return False
        self.program.row(more, lower=1.0)
        return True


def _encode(model: _Model, budget_bytes: int) -> _Encoding:
    program = LinearProgram()
    largest_need = model.rows[-1].n_bytes - budget_bytes
    offered = [_useful(unit, largest_need) for unit in model.units]
    ms_scale = max((choice.ms for choices in offered for choice in choices), default=0.0) / _SCALE or 1.0
    memory_scale = largest_need / _SCALE

    picks: list[tuple[tuple[int, _Choice], ...]] = []
    shares: list[int] = []
    discards: list[list[tuple[int, float]]] = []
    for unit, choices in zip(model.units, offered, strict=True):
        # a discard larger than every need counts as one that just meets it
        sizes = [min(choice.freed, largest_need) / memory_scale for choice in choices]
        if not unit.segments:
            variables = [program.binary(cost=choice.ms / ms_scale) for choice in choices]
            if len(variables) > 1 and not unit.above:
                program.row([(z, 1.0) for z in variables], upper=1.0)
            picks.append(tuple(zip(variables, choices, strict=True)))
            discards.append(list(zip(variables, sizes, strict=True)))
            continue
        (choice,) = choices
        y = program.binary()
        share = program.variable(upper=1.0)
        ms = program.variable(cost=1.0)
        program.row([(y, 1.0), (share, -1.0)], lower=0.0)
        for slope, intercept in unit.segments:
            program.row(
                [(ms, 1.0), (share, -slope * choice.ratio / ms_scale), (y, -intercept / ms_scale)], lower=0.0
            )
        picks.append(((y, choice),))
        shares.append(share)
        discards.append([(share, choice.freed / memory_scale)])

    _add_cliques(program, model, [[(variable, 1.0) for variable, _ in of_unit] for of_unit in picks])
    _add_memory_rows(program, model, discards, budget_bytes, memory_scale)
    _add_order(program, model, picks, shares)
    return _Encoding(program, tuple(picks), tuple(shares), ms_scale)


def _useful(unit: _Unit, largest_need: int) -> tuple[_Choice, ...]:
    """The choices up to the first that meets every need."""
    if unit.segments:
        (last,) = unit.choices
        if last.freed > largest_need and all(slope >= 0 for slope, _ in unit.segments):
            return (unit.at(largest_need / unit.memory),)
        return unit.choices
    enough = next((k for k, choice in enumerate(unit.choices) if choice.freed >= largest_need), None)
    return unit.choices if enough is None else unit.choices[: enough + 1]


def _add_cliques(program: LinearProgram, model: _Model, terms: Sequence[Sequence[tuple[int, float]]]) -> None:
    """At most one unit on each path from the root; ``terms[i]`` sum to y_i."""
    for i, unit in enumerate(model.units):
        if unit.above and not model.below[i]:
            program.row([term for j in (i, *unit.above) for term in terms[j]], upper=1.0)


def _add_memory_rows(
    program: LinearProgram,
    model: _Model,
    discards: Sequence[Sequence[tuple[int, float]]],
    budget_bytes: int,
    memory_scale: float,
    excess: int | None = None,
) -> None:
    """For each row: prefix sum of discards (plus the variable ``excess``) >= what is over the budget."""
    previous: list[tuple[int, float]] = []
    n_units = 0
    # sums of whole choices are whole bytes, so half a byte less asks for the same
    half = 0.0 if any(unit.segments for unit in model.units) else 0.5
    for row in model.rows:
        if row.n_bytes <= budget_bytes:
            continue
        need = max(0.0, (row.n_bytes - budget_bytes - half) / memory_scale - _SLACK)
        added = [term for terms in discards[n_units : row.n_units] for term in terms]
        total = program.variable(lower=need if excess is None else 0.0)
        program.row([(total, -1.0), *previous, *added], lower=0.0)
        if excess is not None:
            program.row([(total, 1.0), (excess, 1.0)], lower=need)
        previous = [(total, 1.0)]
        n_units = row.n_units


def _add_order(
    program: LinearProgram,
    model: _Model,
    picks: Sequence[Sequence[tuple[int, _Choice]]],
    shares: Sequence[int],
) -> None:
    """Of units with the same trade-off, such as repeated layers, the earlier discards no less.

    This loses no optimum: to give the larger of two choices to the unit that ends first costs the same
    and frees no later. It binds only while the units around the first and inside it are not in use,
    since only then the first is free to take any choice.
    """
    last_alike: dict[object, int] = {}
    for i, unit in enumerate(model.units):
        first = last_alike.get((unit.memory, unit.choices, unit.segments))
        last_alike[unit.memory, unit.choices, unit.segments] = i
        if first is None:
            continue
        ranks = [[(shares[j], 1.0)] if shares else _ranked(picks[j]) for j in (first, i)]
        most = ranks[0][-1][1]
        in_use = [
            (variable, most)
            for j in (*model.units[first].above, *model.below[first])
            if j != i and j not in unit.above and i not in model.units[j].above
            for variable, _ in picks[j]
        ]
        program.row([*ranks[0], *in_use, *((z, -rank) for z, rank in ranks[1])], lower=0.0)


def _ranked(picks: Sequence[tuple[int, _Choice]]) -> list[tuple[int, float]]:
    return [(variable, float(rank)) for rank, (variable, _) in enumerate(picks, start=1)]


@dataclass(frozen=True, slots=True)
class _Search:
    model: _Model
    budget_bytes: int
    solver: str
    gap: float
    deadline: float
    seed: int

    def run(
        self, best: _Plan | None = None, bound_ms: float | None = None
    ) -> tuple[_Plan | None, bool, float | None]:
        """The plan, whether it (or that there is none) is proved, and a lower bound in ms.

        ``best`` and ``bound_ms`` are what is known already.
        """
        encoding = _encode(self.model, self.budget_bytes)
        for _ in range(_MAX_ROUNDS):
            time_left = self.deadline - time.monotonic()
            if time_left <= 0:
                break
            solution = encoding.program.solve(
                solver=self.solver, gap=self.gap, time_limit_s=time_left, seed=self.seed
            )
            if solution.status == "infeasible":
                # with a plan at hand it is the cuts that say so, and they cut off no plan that fits
                return best, best is None, bound_ms
            if solution.bound is not None:
                bound_ms = max(bound_ms or 0.0, solution.bound * encoding.ms_scale)
            if solution.status == "unknown":
                break
            plan = encoding.read(solution, self.model)
            violated = self.model.violated(plan, self.budget_bytes)
            if violated is None:
                if best is None or _cost(plan) <= _cost(best):
                    return plan, solution.status == "optimal", bound_ms
                break
            repaired = self._repair(plan)
            if repaired is not None and (best is None or _cost(repaired) < _cost(best)):
                best = repaired
            if self._close(best, bound_ms) or not encoding.cut_off(plan, *violated):
                break
        return best, self._close(best, bound_ms), bound_ms

    def _close(self, plan: _Plan | None, bound_ms: float | None) -> bool:
        if plan is None or bound_ms is None:
            return False
        # where the optimum costs nothing, some bytes of repair are no reason to doubt it
        dearest = max(unit.choices[-1].ms for unit in self.model.units)
        return _cost(plan) - bound_ms <= max(self.gap * _cost(plan), _SLACK * dearest)

    def _repair(self, plan: _Plan) -> _Plan | None:
        """Discard the few bytes more that a tolerance hid, as cheaply as one step at a time can."""
        plan = dict(plan)
        while violated := self.model.violated(plan, self.budget_bytes):
            row, missing = violated
            steps = [
                (choice.ms - (plan[i].ms if i in plan else 0.0), i, choice, gain)
                for i in range(row.n_units)
                for choice, gain in self._more(i, plan, missing)
            ]
            if not steps:
                return None
            enough = [step for step in steps if step[3] >= missing]
            step = min(enough) if enough else max(steps, key=lambda step: step[3])
            plan[step[1]] = step[2]
        return plan

    def _more(self, i: int, plan: _Plan, missing: int) -> list[tuple[_Choice, int]]:
        unit = self.model.units[i]
        if i not in plan and any(j in plan for j in (*unit.above, *self.model.below[i])):
            return []
        freed = plan[i].freed if i in plan else 0
        offered = unit.choices
        if unit.segments and unit.choices[-1].freed > freed + missing:
            offered = (unit.at((freed + missing) / unit.memory),)
        return [(choice, choice.freed - freed) for choice in offered if choice.freed > freed]


# The smallest peak -------------------------------------------------------------------------------------


def _smallest_peak(model: _Model, solver: str, time_limit_s: float, seed: int) -> tuple[int, _Plan, bool]:
    """The smallest peak that any plan reaches, a plan for it, and whether that is proved.

    Every unit discards as much as it can; what is left to choose is which. No plan gets a row lower than
    the antichain that discards the most before it. Where the antichain of one row also serves the
    others, that settles it; else a program decides.
    """
    lower_bound, tried = 0, []
    for row in model.rows:
        plan = _largest_discard(model, row.n_units)
        lower_bound = max(lower_bound, row.n_bytes - sum(choice.freed for choice in plan.values()))
        tried.append(plan)
    best_bytes, best = min(((model.peak(plan)[0], plan) for plan in tried), key=lambda found: found[0])
    if best_bytes == lower_bound:
        return best_bytes, best, True

    largest_need = model.rows[-1].n_bytes - lower_bound
    scale = largest_need / _SCALE
    program = LinearProgram()
    excess = program.variable(cost=1.0)
    chosen = [program.binary() for _ in model.units]
    _add_cliques(program, model, [[(y, 1.0)] for y in chosen])
    discards = [
        [(y, min(unit.choices[-1].freed, largest_need) / scale)]
        for y, unit in zip(chosen, model.units, strict=True)
    ]
    _add_memory_rows(program, model, discards, lower_bound, scale, excess)
    solution = program.solve(solver=solver, gap=0.0, time_limit_s=time_limit_s, seed=seed)
    if solution.values:
        plan = {i: unit.choices[-1] for i, unit in enumerate(model.units) if solution.values[chosen[i]] > 0.5}
        if model.peak(plan)[0] < best_bytes:
            best_bytes, best = model.peak(plan)[0], plan
    return best_bytes, best, solution.status == "optimal"


def _largest_discard(model: _Model, n_units: int) -> _Plan:
    """The antichain that discards the most among the first units, by dynamic programming on the tree."""
    inside = [0] * len(model.units)  # what the best antichain strictly inside a unit discards
    takes = [False] * len(model.units)
    total_at: list[int] = [0] * len(model.units)
    for i in sorted(range(len(model.units)), key=lambda i: -len(model.units[i].above)):
        own = model.units[i].choices[-1].freed if i < n_units else 0
        takes[i] = own > inside[i]
        total_at[i] = max(own, inside[i])
        if model.units[i].above:
            inside[model.units[i].above[0]] += total_at[i]
    return {
        i: unit.choices[-1]
        for i, unit in enumerate(model.units)
        if takes[i] and not any(takes[j] for j in unit.above)
    }


def _infeasible(
    model: _Model, budget_bytes: int, smallest_bytes: int, smallest_plan: _Plan
) -> InfeasibleBudget:
    binding = model.peak(smallest_plan)[1].name
    advice = f"raise the budget to at least '{smallest_bytes}B', shrink the batch, or shard over more ranks"
    if not model.units:
        advice = "no module may be checkpointed (see ac_units and fsdp_units); " + advice
    return InfeasibleBudget(
        f"no plan fits {format_bytes(budget_bytes)} ({budget_bytes} B): with all the checkpointing that the "
        f"units allow the peak is {format_bytes(smallest_bytes)}, at {binding!r}; {advice}",
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=smallest_bytes,
        binding=binding,
    )


# One module's ops --------------------------------------------------------------------------------------
