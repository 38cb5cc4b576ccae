"""A model's step without a plan and with plans at three budgets, run for real on one CPU thread.

Predicted is the peak that the profile, or the plan, promises; measured are the profiler's allocation events over one
real step, plus what was alive before. The budgets are 85, 70 and 55 % of the unplanned peak. Where no plan has 55 %,
they are the smallest feasible peak (marked ``smallest``), and a third and two thirds of the way from there to the
unplanned peak.

A profile is fake where it can be. Where the fake trace had to assume what depends on data (routing, matching, masks
drawn at random), the profile is made again with trace="real", from the same random state as the step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sacplan
from benchmarks.harness.plans import as_budget, timed
from benchmarks.harness.steps import on_one_thread, seed_everything
from benchmarks.models.cases import Case

SHARES = (0.55, 0.70, 0.85)
_SEED = 7  # of the profile, too: a real trace must see what the step sees


@dataclass(frozen=True, slots=True)
class Row:
    """One step: unplanned (``budget`` is "none"), or with the plan for a budget.

    Attributes:
        budget: "85%", "smallest 61%", or "none".
        trace: how the profile was made.
        recompute_share: of the predicted time of the unplanned step.
        wall_ms: of the measured step, under the profiler.
        bit_equal: loss, gradients and buffers as in the unplanned step; None for that one itself.
        seconds: for the profile (unplanned), or for the plan.
    """

    model: str
    family: str
    trace: str
    parameters: int
    budget: str
    budget_bytes: int | None
    predicted_bytes: int
    measured_bytes: int
    recompute_share: float
    wall_ms: float
    bit_equal: bool | None
    seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is at most the budget."""
        return self.budget_bytes is None or self.measured_bytes <= self.budget_bytes


@on_one_thread
def profile_of(case: Case) -> sacplan.Profile:
    """Profile with a fake trace, or with a real one where the fake one rests on assumptions about data."""

    def profile(trace: Any) -> sacplan.Profile:
        seed_everything(_SEED)
        return case.profile("cpu", trace=trace)

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", sacplan.SacplanWarning)
            found = profile("fake")
    except sacplan.errors.DataDependentError:
        return profile("real")
    # Or where the largest of an optimizer's steps depends on data.
    depends = any("depends on data" in str(warning.message) for warning in said)
    return profile("real") if found.rules or depends else found


def plans_of(profile: sacplan.Profile) -> Iterator[tuple[str, sacplan.Plan, float]]:
    """Yield ``(budget in words, plan, seconds)``, the largest budget first; see the module's docstring."""
    peak = profile.peak_bytes
    try:
        sacplan.plan(profile, as_budget(SHARES[0] * peak))
        budgets = [(f"{share:.0%}", int(share * peak)) for share in SHARES]
    except sacplan.InfeasibleBudget as error:
        smallest = error.smallest_feasible_bytes
        steps = [smallest + (peak - smallest) * i // len(SHARES) for i in range(len(SHARES))]
        budgets = [(f"{b / peak:.0%}" if i else f"smallest {b / peak:.0%}", b) for i, b in enumerate(steps)]
    for words, budget_bytes in reversed(budgets):
        yield words, *timed(functools.partial(sacplan.plan, profile, as_budget(budget_bytes)))


@on_one_thread
def steps_of(name: str, family: str, case: Case) -> list[Row]:
    """Return the unplanned step of a model, then one row for each budget."""
    profile, seconds = timed(lambda: profile_of(case))
    plain = case.step()
    parameters = sum(p.numel() for p in case.model.parameters())
    about = name, family, profile.trace, parameters
    peaks = profile.peak_bytes, plain.peak_bytes
    rows = [Row(*about, "none", None, *peaks, 0.0, plain.wall_ms, None, seconds)]
    for budget, plan, took in plans_of(profile):
        seen = case.step(plan=plan)
        peaks, share = (plan.peak_bytes, seen.peak_bytes), plan.recompute_ms / plan.step_ms
        same = seen.same_bits(plain)
        rows.append(Row(*about, budget, plan.budget_bytes, *peaks, share, seen.wall_ms, same, took))
    return rows
