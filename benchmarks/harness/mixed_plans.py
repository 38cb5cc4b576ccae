"""Plans that nobody has searched for: random options of all techniques, and copies to the host at random places.

    plan = mixed_plan(profile, random.Random(7))
    plan = scattered_plan(profile, random.Random(7), ["blocks.0", "blocks.1"])

Options that a solver would never take are drawn as well, and so are places that no option has.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import sacplan
from sacplan.core.decisions import Decision, Offload, SeenTensor, Site
from sacplan.core.liveness import Fold
from sacplan.core.program import Event, Program
from sacplan.planning.make import plan_by_hand
from sacplan.planning.request import Request
from sacplan.techniques.base.regions import Option, Region
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.offload.options import Offloads
from sacplan.techniques.offload.sites import (
    last_writes,
    place_of,
    sites_of,
    tensors_of,
    weight_of,
    weights_asked_for,
)
from sacplan.techniques.registry import decisions_of, regions, why_not

ALL = ("recompute", "chunk", "offload")


def plan_with(profile: sacplan.Profile, decisions: Sequence[Decision]) -> sacplan.Plan:
    """Return the plan with these decisions, and the figures of the step with them."""
    return plan_by_hand(profile, tuple(decisions), "random", status="feasible")


def mixed_plan(
    profile: sacplan.Profile,
    rng: random.Random,
    techniques: Sequence[str] = ALL,
    *,
    joined: int | None = None,
) -> sacplan.Plan:
    """Return a plan in which every region takes one of its options, dominated ones among them.

    Each of the techniques has as good a chance, however few of the options are its own.

    Args:
        profile: the step.
        rng: draws.
        techniques: of the options.
        joined: how many neighbouring regions are joined at most; drawn if it is not given.
    """
    planner = Request(solver="greedy", techniques=techniques).planner(profile)
    # Of the searches with all techniques, one with offers is the last.
    context = planner.searches.of(planner.techniques)[-1].context
    found = regions(context.step, joined or rng.choice((1, 1, 1, 2)), context.techniques)
    found += [offer.region for offer in context.offers]
    # Regions of parameters have a generator of their own: others are drawn as in a step without frozen ones.
    of_weights = random.Random(len(found))
    taken = [(region, _drawn(region, rng if region.members else of_weights)) for region in found]
    taken = [(region, option) for region, option in taken if option is not region.options[0]]
    return plan_with(profile, decisions_of(context.program, taken, profile.spec))


def _drawn(region: Region, rng: random.Random) -> Option:
    """Return an option: first a technique is drawn, then one of its options."""
    if rng.random() < 0.2:
        return region.options[0]
    names = list(dict.fromkeys(option.technique for option in region.options))
    name = rng.choice(names)
    return rng.choice([option for option in region.options if option.technique == name])


def scattered_plan(
    profile: sacplan.Profile, rng: random.Random, units: Iterable[str], *, any_tensor: bool = False
) -> sacplan.Plan:
    """Return a plan that sends tensors of these units, waits and fetches at random places.

    Args:
        profile: the step.
        rng: draws.
        units: modules that do not nest.
        any_tensor: also those that the planner would never move: what a plan file may say. Those that are refused are
            left out.
    """
    found = list(_scattered(profile, rng, list(units), any_tensor=any_tensor))
    if any_tensor:
        found = [one for one in found if not why_not(profile.program, [one], profile.spec)]
    return plan_with(profile, found)


def _scattered(
    profile: sacplan.Profile, rng: random.Random, units: Sequence[str], *, any_tensor: bool
) -> Iterable[Offload]:
    program = profile.program
    own = [unit for unit in units if sites_of(program, unit)]
    offloads = Offloads(PlanStep(program, device=profile.spec), profile.spec)
    anchors = [(unit, op) for unit in own for op in weights_asked_for(program, unit).values()]
    seen: set[Site] = set()
    for unit in own:
        sites = sites_of(program, unit)
        inside = frozenset(program.ops_in(program.calls[unit][0]))
        offloads.units.setdefault(unit, program.calls[unit][0])
        may = set(offloads._kept(offloads._candidates(unit, inside), frozenset()))
        for op in sites:
            # A copy that began before the last write is none of the contents that are needed.
            tensors = [
                s
                for s in tensors_of(program, op)
                if s >= 0 and (any_tensor or (s in may and last_writes(program).get(s, -1) < op))
            ]
            site = Site(unit, *sites[op])
            if not tensors or rng.random() < 0.5 or site in seen:
                continue
            seen.add(site)
            storage = rng.choice(tensors)
            at = rng.choice(own)
            let_go = Site(at, *rng.choice(list(sites_of(program, at).values())))
            place = place_of(program, op, storage)
            assert place is not None
            fetch = None
            if anchors and rng.random() < 0.7:
                where, anchor = rng.choice(anchors)
                fetch = SeenTensor(where, *sites_of(program, where)[anchor], weight_of(program, anchor))
            yield Offload(
                site.unit, site.op, site.occurrence, site.place, tensor=place, let_go=let_go, fetch=fetch
            )


def in_one_place(program: Program) -> int:
    """Return the peak of device and host together, as of a step on a CPU."""
    fold, most = Fold(program), 0
    for code, arg in program.events:
        fold.step(code, arg)
        if code == Event.OP:
            most = max(most, fold.noted + fold.host)
    return most
