"""``frontier``: replayed peak against recomputation, for every solver over a range of budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan
from sacplan._plan.planning import plan, plan_smallest
from sacplan._solve.solvers import Solver
from sacplan._trace.profile import Profile
from sacplan.errors import InfeasibleBudget, PlanError

if TYPE_CHECKING:
    import pandas as pd


def frontier(
    profile: Profile, points: int = 8, solvers: tuple[str | Solver, ...] = ("milp", "greedy", "uniform")
) -> pd.DataFrame:
    """Plans of every solver at budgets from the smallest feasible peak to the unplanned one.

    Args:
        profile: from ``sacplan.profile``.
        points: how many budgets, evenly spaced.
        solvers: names, or solver objects.

    Returns:
        One row per solver and budget that it can hold: ``solver``, ``budget_bytes``, ``peak_bytes``,
        ``recompute_ms``, ``recompute_share`` (of the step's predicted time), ``recompute_flops``,
        ``recompute_flops_share`` (of the step's FLOPs), ``units``, ``status``. The last row of each solver is
        the unplanned step.
    """
    import pandas as pd

    if points < 2:
        raise PlanError(f"points={points}: a frontier needs at least 2.")
    smallest = plan_smallest(profile).peak_bytes
    rows = []
    for solver in solvers:
        name = solver if isinstance(solver, str) else solver.name
        for i in range(points):
            budget = smallest + (profile.peak_bytes - smallest) * i // (points - 1)
            try:
                found = plan(profile, f"{budget}B", solver)
            except InfeasibleBudget:
                continue
            rows.append({"solver": name, "budget_bytes": budget} | _figures(found))
    return pd.DataFrame(rows)


def _figures(found: Plan) -> dict[str, object]:
    return {
        "peak_bytes": found.peak_bytes,
        "recompute_ms": found.recompute_ms,
        "recompute_share": found.recompute_ms / found.step_ms if found.step_ms else 0.0,
        "recompute_flops": found.recompute_flops,
        "recompute_flops_share": found.recompute_flops / found.step_flops if found.step_flops else 0.0,
        "units": len(found.units),
        "status": found.status,
    }
