"""Sweeps: the answer to a question has a row for each case, and each case is a step planned for a budget.

``frontier`` goes over solvers and budgets, ``max_batch`` and ``throughput`` over batch sizes, ``layouts`` over meshes,
``fit`` over optimizers and techniques. A ``Request`` plans each case. A row has the result, and what distinguishes the
case from the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sacplan.planning.make import Outcome
from sacplan.planning.plan import Plan

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The memory and time of a step in one case of a sweep. All figures are predicted.

    Attributes:
        fits: Whether the peak is within the budget; without one, whether what is reserved fits the GPU.
        peak_bytes: With the plan. If no plan holds the budget: the smallest peak that was reached, or None if none
            was looked for.
        unplanned_peak_bytes: Without a plan.
        step_ms: Time of the step with the plan; None if no plan holds the budget.
        recompute_ms: Part of ``step_ms`` that runs a second time; None likewise.
        added_ms: Part of ``step_ms`` for slices and for waits; None likewise.
        plan: The plan; None if no plan holds the budget, or the question returns no plans.
    """

    shown: ClassVar[tuple[str, ...]] = ()
    """Attributes to show in tables and JSON, in this order."""

    fits: bool
    peak_bytes: int | None
    unplanned_peak_bytes: int
    step_ms: float | None = None
    recompute_ms: float | None = None
    added_ms: float | None = None
    plan: Plan | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def taken(outcome: Outcome) -> dict[str, Any]:
        """Return the fields that every row takes from the outcome of planning."""
        made = outcome.plan
        return {
            "fits": made is not None,
            "peak_bytes": outcome.peak_bytes,
            "unplanned_peak_bytes": outcome.profile.peak_bytes,
            "step_ms": outcome.step_ms,
            "recompute_ms": None if made is None else made.recompute_ms,
            "added_ms": None if made is None else made.added_ms,
            "plan": made,
        }

    def figures(self) -> dict[str, Any]:
        """Return the figures of the row that tables and JSON show."""
        return {name: getattr(self, name) for name in self.shown}


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Return a table of the figures, one line for each row."""
    import pandas as pd

    return pd.DataFrame([row.figures() for row in rows])
