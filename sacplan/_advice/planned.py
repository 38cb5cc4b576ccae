"""The step that a plan, or none, makes of a profile."""

from __future__ import annotations

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._program.budget import format_bytes
from sacplan._program.program import Program
from sacplan.errors import PlanMismatch


def planned(profile: Profile, plan: Plan | None) -> Program:
    """The program of the step, rewritten by the plan if there is one.

    Raises:
        PlanMismatch: the plan was made from another profile.
    """
    if plan is None:
        return profile.program
    if not plan.fingerprint.is_of_same(profile.fingerprint):
        raise PlanMismatch(
            f"the plan is of a {plan.fingerprint.model_class} with other parameters or another batch than the profile "
            f"of {profile.fingerprint.model_class}. Report on the profile that it was made from."
        )
    program = profile.with_plan(plan)
    found = program.footprint.peak_bytes
    if found != plan.peak_bytes:
        raise PlanMismatch(
            f"the plan's peak is {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes, on {plan.device}), but on "
            f"this profile (on {profile.device}) it is {format_bytes(found)} ({found} bytes): it was made from another "
            "profile, with another device, optimizer or loss. Report on the profile that it was made from."
        )
    return program
