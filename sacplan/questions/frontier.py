"""``frontier``: peaks and costs of plans, for every solver over a range of budgets, and for policies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from sacplan.core.arguments import checked, opened
from sacplan.core.budget import format_bytes
from sacplan.core.progress import begins
from sacplan.errors import PlanError
from sacplan.planning.infeasible import looking_for_plans
from sacplan.planning.limits import Limit
from sacplan.planning.make import Outcome, outcome_of, smallest_plan
from sacplan.planning.policies import layers_of, policy
from sacplan.planning.request import Request
from sacplan.profiling.profile import Profile, ProfileOrPath
from sacplan.questions.sweep import Row, frame
from sacplan.solvers.rotor.sequences import Rotor, unit_of
from sacplan.solvers.solvers import Solver
from sacplan.techniques.base.step import Objective

if TYPE_CHECKING:
    import pandas as pd


MAX_POINTS = 1000  # each takes a plan; a larger number is a slip

_POLICIES: dict[str, tuple[str, int | str | None]] = {
    "full": ("full", None),
    "every 2nd layer": ("selective", 2),
    "every 3rd layer": ("selective", 3),
    "op": ("selective", "op"),
    "op, all matmuls kept": ("selective", "op-keep-matmuls"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierRow(Row):
    """The row of a solver at a budget, or of a policy, with its peak as budget. ``frontier`` lists the figures."""

    shown: ClassVar = (
        "solver", "budget_bytes", "peak_bytes", "recompute_ms", "lower_bound_ms", "recompute_share", "recompute_flops",
        "recompute_flops_share", "added_ms", "added_share", "units", "status",
    )  # fmt: skip

    solver: str
    budget_bytes: int

    def figures(self) -> dict[str, Any]:
        """Return the figures of the plan, and shares computed from them."""
        made = self.plan
        assert made is not None  # a budget that is not held has no row
        # Without time or FLOPs, a step would be divided by 0; with infinity, its shares are 0.
        step_ms, step_flops = made.step_ms or math.inf, made.step_flops or math.inf
        found = {
            "solver": self.solver,
            "budget_bytes": self.budget_bytes,
            "recompute_share": made.recompute_ms / step_ms,
            "recompute_flops_share": made.recompute_flops / step_flops,
            "added_share": made.added_ms / step_ms,
            "units": len(made.units),
        }
        return {name: found[name] if name in found else getattr(made, name) for name in self.shown}


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
) -> pd.DataFrame:
    """Plan with every solver at budgets from the smallest peak to the unplanned one, and make the named policies.

    The first solver also gets the peak of each policy as a budget. The cost of a plan between two budgets does not
    follow from its neighbours, so each policy is compared with a plan for its own peak.

    Args:
        profile: A profile from ``sacplan.profile``, or the path of one.
        points: Number of budgets, evenly spaced; 2 to 1000.
        solvers: Names or solver objects. The default is milp and greedy, and rotor if the model is a chain; in
            inference it is best.
        objective: The amount of recomputation that solvers minimise, see ``sacplan.plan``.
        policies: Whether to add a row for each of the modes that people use by hand (``sacplan.policy``): full, every
            second and every third layer, by op, and if ``"chunk"`` is among the techniques, the loss in 16 slices. A
            policy that needs layers the model does not have, or would change nothing, is left out.
        keep, never: Patterns of what no plan here touches, see ``sacplan.plan``.
        techniques: What the plans may do, see ``sacplan.plan``. Policies do what their name says.

    Returns:
        A table with one row for each solver and budget for which it found a plan. Columns: ``solver``, ``budget_bytes``
        (for a policy, its peak), ``peak_bytes``, ``recompute_ms``, ``lower_bound_ms`` (no schedule with this peak
        recomputes less), ``recompute_share`` (of the predicted time of the step), ``recompute_flops``,
        ``recompute_flops_share`` (of the FLOPs of the step), ``added_ms`` and ``added_share`` (additional time because
        of chunks), ``units``, ``status``. The last row of each solver is the unplanned step.

    Raises:
        PlanError: ``points`` is out of range; or an unknown solver, objective or technique; or a pattern that matches
            nothing.
    """
    profile = opened(profile, Profile)
    if not 2 <= points <= MAX_POINTS:
        raise PlanError(f"points={points}: a frontier has 2 to {MAX_POINTS} budgets.")
    if solvers is None:
        solvers = ("milp", "greedy", *(("rotor",) if _may_use_rotor(profile, never) else ()))
        # One solver is enough in inference: chunks have a search of their own, so all would give the same plan. And a
        # compiled step takes a dry run for each plan.
        if profile.mode == "inference" or profile.runs_compiled:
            solvers = ("best",)
    # A template: each case replaces the solver and the limit.
    how = Request(Limit.exactly(profile.peak_bytes), "best", objective, keep, never, techniques)
    with looking_for_plans():
        # Policies are made first, since their peaks are budgets for the first solver.
        named = list(_named_policies(profile, how)) if policies else []
        return frame(list(_rows(profile, points, solvers, how, named)))


def _rows(
    profile: Profile,
    points: int,
    solvers: Sequence[str | Solver | Rotor],
    how: Request,
    named: list[FrontierRow],
) -> Iterator[FrontierRow]:
    # Budgets lie between the smallest peak, below which there is no plan, and the unplanned peak, above which none is
    # needed. So peaks of policies outside of this range are no budgets.
    smallest = smallest_plan(how, profile, without_rotor=True).peak_bytes
    evenly = {smallest + (profile.peak_bytes - smallest) * i // (points - 1) for i in range(points)}
    theirs = {row.budget_bytes for row in named if smallest <= row.budget_bytes <= profile.peak_bytes}
    asked = [
        (budget, replace(how, solver=solver, limit=Limit.exactly(budget)))
        for i, solver in enumerate(solvers)
        # Each budget takes a plan, so only the first solver (i = 0) is compared with the policies.
        for budget in sorted(evenly if i else evenly | theirs)
    ]
    for at, (budget, request) in enumerate(asked, 1):
        name = request.solver if isinstance(request.solver, str) else request.solver.name
        begins(f"{name} at {format_bytes(budget)}, {at} of {len(asked)}")
        row = FrontierRow(solver=name, budget_bytes=budget, **Row.taken(outcome_of(request, profile)))
        if row.fits:
            yield row
    yield from named


def _may_use_rotor(profile: Profile, never: Sequence[str]) -> bool:
    if never:  # rotor makes the whole model one unit, which ``never`` forbids
        return False
    try:
        unit_of(profile.program)
    except PlanError:  # the model is not a chain
        return False
    return True


def _named_policies(profile: Profile, how: Request) -> Iterator[FrontierRow]:
    try:
        n_layers = len(layers_of(profile.uncompiled.program))
    except PlanError:  # a model without layers
        n_layers = 0
    for name, (mode, option) in _POLICIES.items():
        # Every k-th layer needs k layers, the other policies one.
        if n_layers < (option if isinstance(option, int) else 1):
            continue
        try:
            found = policy(mode, option, profile=profile, keep=how.keep, never=how.never)
        except PlanError:  # patterns and options were checked, so this policy would change nothing
            continue
        taken = Row.taken(Outcome(profile, found, found.peak_bytes))
        yield FrontierRow(solver=name, budget_bytes=found.peak_bytes, **taken)
