"""The program of a profile with a plan, after checking that the two belong together."""

from __future__ import annotations

from sacplan.core.budget import format_bytes
from sacplan.core.decisions import Recompute
from sacplan.core.program import Program
from sacplan.errors import PlanMismatch
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile

_REMEDY = "Take the profile that it was made from, or make the plan again."


def planned(profile: Profile, plan: Plan | None) -> Program:
    """Return the program of the step, rewritten by the plan if there is one.

    Raises:
        PlanMismatch: The plan was made from another profile, or discards the output of ops that the step does not run.
    """
    if plan is None:
        return profile.program
    if not plan.fingerprint.is_of_same(profile.fingerprint):
        raise PlanMismatch(
            f"the plan is of a {plan.fingerprint.model_class} with other parameters or another batch "
            f"({plan.fingerprint.batch_in_words}) than the profile of {profile.fingerprint.model_class} "
            f"({profile.fingerprint.batch_in_words}). {_REMEDY}"
        )
    # Model and batch are the same, but the device, optimizer or loss may differ, which shows in the peak.
    program = profile.with_plan(plan)
    found = program.footprint.peak_bytes
    if found != plan.peak_bytes:
        raise PlanMismatch(
            f"the plan's peak is {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes, on {plan.device}), but on "
            f"this profile (on {profile.device}) it is {format_bytes(found)} ({found} bytes): it was made from another "
            f"profile, with another device, optimizer or loss. {_REMEDY}"
        )
    if not profile.runs_compiled:  # the step was run with the plan
        _check_sites(profile, plan)
    return program


def _check_sites(profile: Profile, plan: Plan) -> None:
    """Raise ``PlanMismatch`` for a call site that no call of its unit has: nothing would be discarded there."""
    # Other decisions may remove or add ops, so sites are looked up in the program with these decisions.
    program = profile.with_plan([one for one in plan.decisions if not isinstance(one, Recompute)])
    for unit, sites in plan.discarded.items():
        there = {site for scope in program.calls.get(unit, ()) for site in program.sites(scope).values()}
        for site in sites:
            if site not in there:
                raise PlanMismatch(
                    f"the plan discards {site.op} (number {site.occurrence}, place {site.place!r}) in unit {unit!r}, "
                    f"but the step of the profile runs no such op there. {_REMEDY}"
                )
