"""``frontier``: replayed peak against what a plan costs, for every solver over a range of budgets."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sacplan._plan.limits import looking_for_plans
from sacplan._plan.plan import Plan
from sacplan._plan.planning import plan, smallest_without_rotor
from sacplan._plan.policies import layers_of, policy
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._program.budget import format_bytes
from sacplan._program.progress import Progress, reported
from sacplan._rotor.sequences import Rotor, unit_of
from sacplan._solve.solvers import Solver
from sacplan._technique.step import Objective
from sacplan.errors import InfeasibleBudget, PlanError

if TYPE_CHECKING:
    import pandas as pd


MAX_POINTS = 1000

_POLICIES: dict[str, tuple[str, int | str | None]] = {
    "full": ("full", None),
    "every 2nd layer": ("selective", 2),
    "every 3rd layer": ("selective", 3),
    "op": ("selective", "op"),
    "op, all matmuls kept": ("selective", "op-keep-matmuls"),
}
_SLICES = 16  # of the loss, as a policy


@checked(PlanError)
def frontier(
    profile: ProfileOrPath,
    points: int = 8,
    solvers: Sequence[str | Solver | Rotor] | None = None,
    *,
    objective: Objective = "time",
    policies: bool = True,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
    techniques: Sequence[str] | None = None,
    progress: Progress = None,
) -> pd.DataFrame:
    """Plans of every solver at budgets from the smallest feasible peak to the unplanned one, and named policies.

    The first solver also gets the peak of each policy as a budget: what a plan costs between two budgets is not known
    from its neighbours, so a policy is compared with a plan for its own peak.

    Args:
        profile: from ``sacplan.profile``.
        points: how many budgets, evenly spaced; 2 to 1000.
        solvers: names, or solver objects; by default milp, greedy and uniform, and rotor where the model is a chain; in
            inference best.
        objective: what the solvers recompute the least of, see ``sacplan.plan``.
        policies: with one row for each of the modes that people use by hand (``sacplan.policy``): full, every
            second and third layer, by op, and with ``"chunk"`` among the techniques the loss in 16 slices. Those that
            the model has no layers for are left out, and those that would change nothing.
        keep, never: what no plan here touches, see ``sacplan.plan``.
        techniques: what the plans may do, see ``sacplan.plan``. Policies do what their name says.
        progress: None shows a bar in a notebook and on a terminal, True anywhere, False never; a function is called
            with each row, a dict, when it is known, and with None for a budget that a solver does not hold.

    Returns:
        One row for each solver and budget that it can hold: ``solver``, ``budget_bytes`` (for a policy, its peak),
        ``peak_bytes``, ``recompute_ms``, ``lower_bound_ms`` (that no schedule with this peak undercuts),
        ``recompute_share`` (of the step's predicted time), ``recompute_flops``, ``recompute_flops_share`` (of the
        step's FLOPs), ``added_ms`` and ``added_share`` (how much longer the step takes besides, for its chunks),
        ``units``, ``status``. The last row of each solver is the unplanned step.
    """
    profile = opened(profile, Profile)
    import pandas as pd

    if not 2 <= points <= MAX_POINTS:
        raise PlanError(f"points={points}: a frontier has 2 to {MAX_POINTS} budgets.")
    if solvers is None:
        solvers = ("milp", "greedy", "uniform", *(("rotor",) if _may_use_rotor(profile, never) else ()))
        if profile.mode == "inference":
            solvers = ("best",)  # there is one search for stretches
    with looking_for_plans():
        rows = _rows(profile, points, solvers, objective, policies, keep, never, techniques, progress)
    return pd.DataFrame(rows)


def _rows(
    profile: Profile,
    points: int,
    solvers: Sequence[str | Solver | Rotor],
    objective: Objective,
    policies: bool,
    keep: Sequence[str],
    never: Sequence[str],
    techniques: Sequence[str] | None,
    progress: Progress,
) -> list[dict[str, object]]:
    smallest = smallest_without_rotor(profile, objective, keep, never, techniques).peak_bytes
    named = _named_policies(profile, keep, never, techniques) if policies else []
    evenly = {smallest + (profile.peak_bytes - smallest) * i // (points - 1) for i in range(points)}
    theirs = {found.peak_bytes for _, found in named if smallest <= found.peak_bytes <= profile.peak_bytes}
    asked = [
        (solver, budget)
        for i, solver in enumerate(solvers)
        for budget in sorted(evenly if i else evenly | theirs)
    ]
    rows: list[dict[str, object]] = []
    with reported(progress, "frontier", len(asked)) as step:
        for solver, budget in asked:
            name = solver if isinstance(solver, str) else solver.name
            row: dict[str, object] | None = None
            with contextlib.suppress(InfeasibleBudget):
                found = plan(
                    profile, f"{budget}B", solver, objective, keep=keep, never=never, techniques=techniques
                )
                row = {"solver": name, "budget_bytes": budget} | _figures(found)
                rows.append(row)
            step(row, f"{name} at {format_bytes(budget)}")
    for name, found in named:
        rows.append({"solver": name, "budget_bytes": found.peak_bytes} | _figures(found))
    return rows


def _may_use_rotor(profile: Profile, never: Sequence[str]) -> bool:
    if never:  # it makes the whole model one unit
        return False
    try:
        unit_of(profile.program)
    except PlanError:  # no chain
        return False
    return True


def _named_policies(
    profile: Profile,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
    techniques: Sequence[str] | None = None,
) -> list[tuple[str, Plan]]:
    try:
        n_layers = len(layers_of(profile.program))
    except PlanError:  # a model without layers
        n_layers = 0
    asked: dict[str, dict[str, Any]] = {
        name: {"mode": mode, "option": option}
        for name, (mode, option) in _POLICIES.items()
        if n_layers >= (option if isinstance(option, int) else 1)
    }
    if "chunk" in (techniques or ()):
        asked[f"loss in {_SLICES} slices"] = {"mode": "chunked-loss", "slices": _SLICES}
    found = []
    for name, how in asked.items():
        try:
            found.append((name, policy(**how, profile=profile, keep=keep, never=never)))
        except PlanError:  # patterns and options are known to be right: it would change nothing
            continue
    return found


def _figures(found: Plan) -> dict[str, object]:
    return {
        "peak_bytes": found.peak_bytes,
        "recompute_ms": found.recompute_ms,
        "lower_bound_ms": found.lower_bound_ms,
        "recompute_share": found.recompute_ms / found.step_ms if found.step_ms else 0.0,
        "recompute_flops": found.recompute_flops,
        "recompute_flops_share": found.recompute_flops / found.step_flops if found.step_flops else 0.0,
        "added_ms": found.added_ms,
        "added_share": found.added_ms / found.step_ms if found.step_ms else 0.0,
        "units": len(found.units),
        "status": found.status,
    }
