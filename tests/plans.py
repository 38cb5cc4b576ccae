"""Plans that were not searched for: given call sites of given units."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec import structs

import sacplan
from sacplan._program.decisions import as_decisions
from sacplan._program.program import CallSite


def times_of(sites: Collection[CallSite]) -> Mapping[CallSite, int]:
    """Discarded call sites and how often each is dropped: what a mapping says, else once."""
    return sites if isinstance(sites, Mapping) else dict.fromkeys(sites, 1)


def discarding(plan: sacplan.Plan, sites: Mapping[str, Collection[CallSite]], **changes: Any) -> sacplan.Plan:
    """The plan with other decisions; its figures stay those of the plan, but for the changes."""
    return structs.replace(
        plan,
        decisions=as_decisions({unit: times_of(discarded) for unit, discarded in sites.items()}),
        units={unit: sacplan.UnitPlan(1.0, 0.0) for unit in sites},
        **changes,
    )
