"""Plans for a compiled step: proposals are those for the eager step, and the judge is a dry run of the compiled one.

The compiler saves less than an eager step, or more; it recomputes what fuses for nothing, and reuses buffers. So the
peak of a plan in eager mode says little, and none of that is modelled here. The search asks the planner of the eager
step for a budget, puts the plan on the model, has torch.compile compile it without kernels, and reads the peak:

    b = eager peak - (compiled peak - budget)
    repeat: plan for b in eager mode; run it compiled; b moves by what is left, or over

A proposal counts only with the peak of its dry run. The cheapest one that holds the budget wins, by its compiled time.
It is not optimal: the planner weighs ops by what they cost in eager mode, where pointwise ones are dearer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from sacplan._device.device_memory import device_memory
from sacplan._plan.limits import ROUNDS, Limit, Room
from sacplan._plan.plan import Plan
from sacplan._plan.request import Request
from sacplan._profile.profile import Profile
from sacplan._program.budget import exact_bytes, format_bytes
from sacplan.errors import InfeasibleBudget

_CLOSE = 0.01
"""Share of the budget that a plan may leave unused without a dearer one being sought."""


@dataclass(frozen=True, slots=True)
class _Try:
    """A plan for the eager step, and the step with it as it runs compiled."""

    eager_budget: int
    plan: Plan
    seen: Profile
    needs: int


def compiled_plan(
    request: Request, profile: Profile, planned: Callable[[Request, Profile], Plan]
) -> Plan | InfeasibleBudget:
    """Return the cheapest plan that was found for a compiled step, or why there is none.

    Args:
        request: what is asked for.
        profile: of the compiled step.
        planned: plans an eager step, or raises ``InfeasibleBudget``.

    Raises:
        PlanError: the profile cannot run again, or a proposal cannot run compiled.
    """
    room = request.limit.room_of(profile)
    eager = profile.uncompiled
    tries: list[_Try] = []
    over = max(0, room.needs(profile.program) - room.n_bytes)
    budget: int | None = eager.peak_bytes - over
    while budget is not None and len(tries) < ROUNDS:
        asked = dataclasses.replace(request, limit=Limit.exactly(max(1, budget)))
        try:
            plan, seen = profile.planned_and_run(functools.partial(planned, asked))
        except InfeasibleBudget as error:
            # The smallest peak of the eager step, once. It may be small enough when it is compiled.
            if any(one.eager_budget <= error.smallest_feasible_bytes for one in tries):
                break
            budget = error.smallest_feasible_bytes
            continue
        tries.append(_Try(budget, plan, seen, room.needs(seen.program)))
        budget = _next_budget(room, tries, eager.peak_bytes)
    fitting = [one for one in tries if one.needs <= room.n_bytes]
    if not fitting:
        return _infeasible(profile, room, tries)
    best = min(fitting, key=lambda one: one.seen.step_ms)
    found = structs.replace(
        best.plan,
        budget_bytes=room.for_peak(best.seen.program),
        status="feasible" if best.plan.decisions else "unplanned",
    )
    return as_compiled(found, profile)


def _next_budget(room: Room, tries: Sequence[_Try], most: int) -> int | None:
    """Return the budget of the eager step to plan for next; None if the search is over."""
    last = tries[-1]
    fits = max((one.eager_budget for one in tries if one.needs <= room.n_bytes), default=None)
    over = min((one.eager_budget for one in tries if one.needs > room.n_bytes), default=None)
    left = room.n_bytes - last.needs
    if fits is None:
        # Peaks of plans lie below their budgets: the next one must do better than this plan did.
        return min(last.plan.peak_bytes, last.eager_budget) + left
    if left >= 0 and (left <= _CLOSE * room.n_bytes or last.eager_budget >= most or not last.plan.decisions):
        return None
    if over is None:
        return min(most, last.eager_budget + left)
    between = (fits + over) // 2
    return None if over - fits <= _CLOSE * room.n_bytes else between


def as_compiled(plan: Plan, profile: Profile) -> Plan:
    """Return a plan of the eager step with the figures of the compiled one, which is run with it, dry."""
    seen = profile.run_with(plan)
    figures: dict[str, Any] = {
        "peak_bytes": seen.peak_bytes,
        "baseline_peak_bytes": profile.peak_bytes,
        # What the compiler recomputes has no place in the plan; what it adds to the step has.
        "recompute_ms": max(0.0, seen.step_ms - profile.step_ms),
        "recompute_flops": max(0, seen.program.flops - profile.program.flops),
        "step_ms": profile.step_ms,
        "step_flops": profile.program.flops,
        "lower_bound_ms": 0.0,
        "added_ms": 0.0,
        "gap": None,
        "device_memory": device_memory(seen.program) if profile.spec.kind == "cuda" else None,
        "host_bytes": seen.program.footprint.host_peak_bytes,
        "fingerprint": profile.fingerprint,
    }
    return structs.replace(plan, **figures)


def _infeasible(profile: Profile, room: Room, tries: Sequence[_Try]) -> InfeasibleBudget:
    best = min(tries, key=lambda one: one.needs)
    at = best.seen.program.footprint
    where = at.peak_fqn or at.peak_phase.name.lower()
    return InfeasibleBudget(
        f"no plan found keeps the compiled step under {format_bytes(room.n_bytes)}; {len(tries)} were run, dry. "
        f"Unplanned it takes {format_bytes(profile.peak_bytes)}. The smallest reached is {format_bytes(best.needs)}, "
        f"in the {at.peak_phase.name.lower()} of {where}. "
        f"Give at least {exact_bytes(best.needs)}, or make the batch smaller.",
        budget_bytes=room.n_bytes,
        smallest_feasible_bytes=best.needs,
        binding=where,
    )
