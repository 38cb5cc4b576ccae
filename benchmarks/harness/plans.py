"""Plans for a number of bytes, where there may be none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import sacplan
from sacplan.device.devices import DeviceSpec

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Call a function; return its result and the seconds that it took."""
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def as_budget(nbytes: float) -> str:
    """Write bytes as ``sacplan.plan`` reads them: a plain number would be GiB."""
    return f"{int(nbytes)}B"


def budget_bytes_on(spec: DeviceSpec) -> int:
    """Return a budget in bytes that leaves 15 % of a device's memory free."""
    return spec.memory_bytes - int(0.15 * spec.memory_bytes)


def budget_at(share: float, smallest_bytes: int, peak_bytes: int) -> int:
    """Return the bytes at a share of the way from the smallest feasible peak (0) to the unplanned one (1)."""
    return int(smallest_bytes + share * (peak_bytes - smallest_bytes))


def plan_or_least(
    profile: sacplan.Profile, budget_bytes: int, solver: str = "best", **options: Any
) -> tuple[sacplan.Plan | None, int]:
    """Plan for a number of bytes; return the plan and its peak, or None and the smallest peak that was found."""
    try:
        plan = sacplan.plan(profile, as_budget(budget_bytes), solver, **options)
    except sacplan.InfeasibleBudget as error:
        return None, error.smallest_feasible_bytes
    return plan, plan.peak_bytes
