"""What every report takes: a profile, a plan of that profile or none, a frontier or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._program.program import Program
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

_FRONTIER_COLUMNS = ("solver", "peak_bytes", "recompute_share", "lower_bound_ms", "status")


def check_frontier(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with ``cost_share``, of the step: recomputed, or added by chunks.

    Raises:
        PlanError: it is none that ``sacplan.frontier`` returns.
    """
    missing = [c for c in _FRONTIER_COLUMNS if c not in getattr(frame, "columns", ())]
    if missing or not len(frame):
        what = f"has no column {', '.join(map(repr, missing))}" if missing else "has no rows"
        raise PlanError(f"the frontier {what}. Give the frame that sacplan.frontier(profile) returns.")
    added = frame.get("added_share", 0.0)  # older frames have none
    return frame.assign(cost_share=frame["recompute_share"] + added)


def has_chunks(frame: pd.DataFrame) -> bool:
    """Whether any plan of a frontier runs something in slices."""
    return "added_share" in frame and bool(frame["added_share"].any())


def in_slices(profile: Profile, plan: Plan | None) -> Program:
    """The program of the step with what a plan does besides recomputing: what it then recomputes is a part of this."""
    if plan is None or not plan.chunks:
        return profile.program
    return profile.with_plan(plan.chunks)


def check_top(top: int | None) -> None:
    """Refuse a number of rows below 1.

    Raises:
        PlanError: ``top`` is less than 1. None stands for all rows.
    """
    if top is not None and top < 1:
        raise PlanError(f"top={top}: ask for at least 1 row, or None for all.")
