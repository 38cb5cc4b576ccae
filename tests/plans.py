"""Plans that were not searched for: given call sites of given units."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import structs

import sacplan
from sacplan._program.decisions import as_decisions
from sacplan._program.program import CallSite, times_of


def discarding(plan: sacplan.Plan, sites: Mapping[str, Collection[CallSite]], **changes: Any) -> sacplan.Plan:
    """The plan with other decisions; its figures stay those of the plan, but for the changes."""
    return structs.replace(
        plan,
        decisions=as_decisions({unit: times_of(discarded) for unit, discarded in sites.items()}),
        units={unit: sacplan.UnitPlan(1.0, 0.0) for unit in sites},
        **changes,
    )
