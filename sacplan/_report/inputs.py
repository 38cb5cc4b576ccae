"""What every report takes: a profile, a plan of that profile or none, a frontier or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._program.budget import format_bytes
from sacplan._recompute.replay import Decisions
from sacplan.errors import PlanError, PlanMismatch

if TYPE_CHECKING:
    import pandas as pd

_FRONTIER_COLUMNS = ("solver", "peak_bytes", "recompute_share", "lower_bound_ms", "status")


def decisions_of_plan(plan: Plan | None) -> Decisions:
    """What a plan discards; without a plan, nothing."""
    return {} if plan is None else plan.decisions


def check_plan(profile: Profile, plan: Plan | None, replayed_peak_bytes: int) -> None:
    """``PlanMismatch`` unless the plan was made from this profile, or one just like it.

    ``replayed_peak_bytes`` is what a replay of the plan's decisions on the profile gives.
    """
    if plan is None:
        return
    if plan.fingerprint != profile.fingerprint:
        raise PlanMismatch(
            f"the plan is of a {plan.fingerprint.model_class} with other parameters or another batch than the profile "
            f"of {profile.fingerprint.model_class}. Report on the profile that it was made from."
        )
    if replayed_peak_bytes != plan.peak_bytes:
        raise PlanMismatch(
            f"the plan's peak is {format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes, on {plan.device}), but on "
            f"this profile (on {profile.device}) it is {format_bytes(replayed_peak_bytes)} ({replayed_peak_bytes} "
            "bytes): it was made from another one, with another device, optimizer or loss. Report on the profile that "
            "it was made from."
        )


def check_frontier(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame, or ``PlanError`` where it is not one from ``sacplan.frontier``."""
    missing = [c for c in _FRONTIER_COLUMNS if c not in getattr(frame, "columns", ())]
    if missing or not len(frame):
        what = f"has no column {', '.join(map(repr, missing))}" if missing else "has no rows"
        raise PlanError(f"the frontier {what}. Give the frame that sacplan.frontier(profile) returns.")
    return frame
