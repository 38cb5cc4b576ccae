"""``sac_milp``: which modules to checkpoint, and how much each discards, after PR #137908.

    minimise    recompute time of the units
    subject to  row - bytes that units have freed by then <= budget        for each memory row
                no unit is inside another

The prototype writes this with big-M constraints. Here the same optimum is found by stronger programs: over reachable
points the problem of ``subtrees.py``, solved by ``Refinement`` as for ``plan``; over piecewise linear fits the program
of ``continuous.py``.

Solvers work within tolerances, a budget does not: every answer is evaluated again in whole bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from sacplan.classic.continuous import solve_continuous
from sacplan.classic.graph import Graph
from sacplan.classic.subtrees import tree_problem
from sacplan.classic.tree import TreePlan, TreeSolution, UnitTree, cost_ms, tree_of
from sacplan.core.arguments import checked
from sacplan.core.budget import exact_bytes, format_bytes, parse_budget
from sacplan.errors import InfeasibleBudget, PlanError, SolverError
from sacplan.solvers.milp import Milp, Refinement
from sacplan.solvers.mip import WORK_LIMIT, check_options, relative_gap


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
        status: "optimal" (proved, within the asked gap) or "feasible" (the limit of work came first).
        bound_ms: no plan takes less than this; None where the solver proved nothing.
        gap: (recomputation_time_ms - bound_ms) / recomputation_time_ms; None like the bound.
    """

    status: Literal["optimal", "feasible"]
    bound_ms: float | None
    gap: float | None

    def __new__(  # noqa: D102  # the docstring of the class documents it
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


@checked(PlanError, "memory_budget")
def sac_milp(
    graph: Graph,
    memory_budget: float | str,
    world_size: int = 1,
    ac_units: Sequence[str] | None = None,
    fsdp_units: Sequence[str] | None = None,
    *,
    choices: Literal["reachable", "continuous"] = "reachable",
    gap: float = 1e-4,
    work_limit: int = 6 * WORK_LIMIT,
    seed: int = 0,
) -> SacMilpResult:
    """Choose the units and their discard ratios that fit the budget with the least recomputation.

        ac_decisions, recomputation_time_ms, peak_bytes = sac_milp(graph, "22GiB")

    Units never nest, and leaves are never units. The graph is not changed. The same input gives the
    same plan, however fast or busy the machine is.

    Args:
        graph: from ``parse_module_info``.
        memory_budget: a number is GiB, a string carries its unit or is a share of the peak
            without checkpointing (``"60%"``).
        world_size: ranks that parameters, gradients and optimizer state are divided by.
        ac_units: only these modules may be units; None for no such restriction. Names with or without the
            root's, matched whole.
        fsdp_units: modules that strictly contain one of these cannot be units.
        choices: "reachable" takes one of a module's exactly reachable points. "continuous" takes any
            ratio on the piecewise linear fit. A graph in which no module has points, such as one of
            bare fits, is always continuous.
        gap: relative gap at which a plan counts as optimal.
        work_limit: nodes of branch and bound, each counted as the nonzeros of its program, after which the best plan
            found is returned (its status is "feasible").
        seed: of the solver.

    Raises:
        BudgetError: a budget that cannot be read.
        InfeasibleBudget: no choice fits; says the smallest budget that does.
        PlanError: unknown modules, or options out of range.
        SolverError: no plan found with that much work.
    """
    if choices not in ("reachable", "continuous"):
        raise PlanError(f"unknown choices {choices!r}; there are 'reachable' and 'continuous'")
    check_options(gap, work_limit, seed)
    options = Milp(gap, work_limit, seed, peak_gap=0.0)
    tree = tree_of(graph, world_size, ac_units, fsdp_units, continuous=choices == "continuous")
    unplanned_bytes = int(tree.base[-1])
    budget_bytes = parse_budget(memory_budget, unplanned_bytes)
    # Rows rise strictly, so the last one is the peak. If it fits, nothing has to be discarded.
    if unplanned_bytes <= budget_bytes:
        return SacMilpResult({}, 0.0, unplanned_bytes, "optimal", 0.0)

    # Units have lines only where plans are made on the fit, as asked for or for lack of reachable points.
    if any(unit.segments for unit in tree.units):
        answer = solve_continuous(tree, budget_bytes, options)
    else:
        answer = _solve_reachable(tree, budget_bytes, options)
    plan, proved = answer.plan, answer.proved
    if plan is None:
        # The plan with the smallest peak may still fit; else this raises, and says how much memory that plan needs.
        plan, proved = _smallest(tree, budget_bytes, options, proved), False
    recompute_ms, peak_bytes = cost_ms(plan), int(tree.used(plan).max())
    if peak_bytes > budget_bytes:
        raise SolverError(f"internal: the plan needs {peak_bytes} B of {budget_bytes} B; please report")
    return SacMilpResult(
        {tree.units[i].fqn: plan[i].ratio for i in sorted(plan, key=lambda i: tree.units[i].index)},
        recompute_ms,
        peak_bytes,
        "optimal" if proved else "feasible",
        # A tolerance may put the bound above the plan's own time. Below 0 it would say nothing.
        None if answer.bound_ms is None else min(recompute_ms, max(0.0, answer.bound_ms)),
    )


def _solve_reachable(tree: UnitTree, budget_bytes: int, options: Milp) -> TreeSolution:
    offered = tree_problem(tree, budget_bytes)
    search = Refinement(options, offered.problem)
    solution = search.cheapest()
    if solution is None:
        return TreeSolution(None, search.infeasible, None)
    return TreeSolution(offered.plan(solution.picks), solution.status == "optimal", solution.bound)


def _smallest(tree: UnitTree, budget_bytes: int, options: Milp, infeasible: bool) -> TreePlan:
    """Return the plan with the smallest peak: every unit that is taken discards as much as it can.

    Raises:
        InfeasibleBudget: the plan is over the budget, and it is proved that no plan fits, or that none is smaller.
        SolverError: the plan is over the budget, and neither is proved.
    """
    offered = tree_problem(tree.at_most(), budget_bytes)
    picks, exact = Refinement(options, offered.problem).smallest()
    # Units of ``at_most`` have their last option only, at no cost. The plan takes it from ``tree``, with its true time.
    plan = {i: tree.units[i].options[-1] for i in offered.plan(picks)}
    used = tree.used(plan)
    smallest_bytes = int(used.max())
    if smallest_bytes <= budget_bytes:
        return plan
    # Without one of the two proofs, to call the budget infeasible could be wrong.
    if not (infeasible or exact):
        raise SolverError(
            f"neither a plan for {format_bytes(budget_bytes)} nor a proof that there is none was found with the work "
            f"of {options.work_limit} (nodes x nonzeros); raise work_limit, or give "
            f"{exact_bytes(smallest_bytes, 'memory_budget')}"
        )
    binding = tree.names[int(used.argmax())]
    advice = f"give at least {exact_bytes(smallest_bytes, 'memory_budget')}, shrink the batch, or shard over more ranks"
    if not tree.units:
        advice = "no module may be checkpointed (see ac_units and fsdp_units); " + advice
    raise InfeasibleBudget(
        f"no plan fits {format_bytes(budget_bytes)} ({budget_bytes} B): unplanned the peak is "
        f"{format_bytes(int(tree.base[-1]))}, and with all the checkpointing that the units allow it is "
        f"{format_bytes(smallest_bytes)}, at {binding!r}; {advice}",
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=smallest_bytes,
        binding=binding,
    )
