"""The outcome of planning a step for a budget: a plan, or the smallest peak that was reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan.errors import InfeasibleBudget

PlanMaker = Callable[[Profile], Plan]
"""A function that plans a step for a budget. It raises ``InfeasibleBudget`` if it finds no plan."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that was planned for, and its plan if there is one.

    Attributes:
        profile: The step.
        plan: It holds the budget; None if none does.
        peak_bytes: Peak of the plan, or the smallest that was reached.
        error: Why there is no plan.
    """

    profile: Profile
    plan: Plan | None
    peak_bytes: int
    error: InfeasibleBudget | None = None

    @classmethod
    def of(cls, profile: Profile, planner: PlanMaker) -> Outcome:
        """Plan a step, and turn ``InfeasibleBudget`` into an outcome without a plan."""
        # Any other error is about what was asked for, and not about the budget, so it comes through.
        try:
            made = planner(profile)
        except InfeasibleBudget as error:
            # The error carries the peak that a caller compares if no plan holds the budget.
            return cls(profile, None, error.smallest_feasible_bytes, error)
        return cls(profile, made, made.peak_bytes)

    @property
    def step_ms(self) -> float | None:
        """Predicted time of the step with the plan; None without one."""
        made = self.plan
        return None if made is None else made.step_ms + made.recompute_ms + made.added_ms

    @property
    def binding(self) -> str:
        """The module or step at which the smallest peak is; ``""`` if a plan holds the budget."""
        return "" if self.error is None else self.error.binding
