"""Check and prepare the arguments that reports share: a frontier, a plan, a number of rows."""

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
    """Return the frame with a column ``cost_share``: recomputation and chunks as a share of the step's time.

    Raises:
        PlanError: ``sacplan.frontier`` has not returned this frame.
    """
    missing = [c for c in _FRONTIER_COLUMNS if c not in getattr(frame, "columns", ())]
    if missing or not len(frame):
        what = f"has no column {', '.join(map(repr, missing))}" if missing else "has no rows"
        raise PlanError(f"the frontier {what}. Give the frame that sacplan.frontier(profile) returns.")
    added = frame.get("added_share", 0.0)  # older frames have none
    return frame.assign(cost_share=frame["recompute_share"] + added)


def has_chunks(frame: pd.DataFrame) -> bool:
    """Return whether any plan of a frontier runs something in slices."""
    return "added_share" in frame and bool(frame["added_share"].any())


def in_slices(profile: Profile, plan: Plan | None) -> Program:
    """Return the program of the step with the chunks of a plan, but without its recomputation."""
    # Nothing runs in slices: the recorded step.
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
