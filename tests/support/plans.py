"""Plans that were not searched for: given call sites of given units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import structs

import sacplan
from sacplan.core.decisions import as_decisions
from sacplan.core.program import CallSite, Program
from sacplan.planning.units import unit_plans

Sites = Collection[CallSite | tuple[str, int]]
"""Call sites; a pair is an op's name and its place among those of that name in the unit's calls."""


def times_of(sites: Sites, program: Program | None = None, unit: str = "") -> dict[CallSite, int]:
    """Discarded call sites and how often each is dropped: what a mapping says, else once."""
    times = sites if isinstance(sites, Mapping) else dict.fromkeys(sites, 1)
    named: dict[tuple[str, int], CallSite] = {}
    for scope in program.calls.get(unit, ()) if program is not None else ():
        seen: dict[str, int] = defaultdict(int)
        for site in program.sites(scope).values():
            named.setdefault((site.op, seen[site.op]), site)
            seen[site.op] += 1
    return {
        site if isinstance(site, CallSite) else named.get(site, CallSite(*site)): n
        for site, n in times.items()
    }


def discarding(
    plan: sacplan.Plan,
    sites: Mapping[str, Sites],
    profile: sacplan.Profile | None = None,
    **changes: Any,
) -> sacplan.Plan:
    """The plan with other decisions; its figures stay those of the plan, but for the changes.

    Without the profile, of the plan's own units or for a plan that is not run.
    """
    program = profile.program if profile is not None else None
    discarded = {unit: times_of(found, program, unit) for unit, found in sites.items()}
    if profile is None:
        known = {unit: plan.units[unit].calls for unit in sites if unit in plan.units}
        units = {unit: sacplan.UnitPlan(1.0, 0.0, calls=known.get(unit, ())) for unit in sites}
    else:
        units, changes["sequences"] = unit_plans(profile.program, discarded, discarded)
    return structs.replace(plan, decisions=as_decisions(discarded), units=units, **changes)
