"""What planning derives from a step whatever the budget, once for each step: regions, effects and bounds."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from sacplan.core.decisions import Decision
from sacplan.core.derived import derived
from sacplan.core.program import Phase, Program
from sacplan.planning.bound import Bound, bound_of
from sacplan.planning.effects import RegionProblem, effects_of
from sacplan.techniques.base.offers import Offer
from sacplan.techniques.base.step import PlanStep, op_costs
from sacplan.techniques.registry import DEFAULT_TECHNIQUES, TECHNIQUES, longest_run, regions, rewritten

_WIDE = 2e-3
"""Cost of making a module around several regions a unit, as a share of the forward pass.

The executor intercepts every op in a unit, even in layers that keep everything, which takes time.
"""


# Numbers of regions to join, between two and all of a kind; each about 1.4 times the one before.
_SIZES = (3, 4, 6, 8, 12, 16, 24, 32)


# Without slots, and compared by identity: derived values are kept in ``__dict__``.
@dataclass(frozen=True, eq=False)
class PlanningContext:
    """Regions, effects and bounds of a step for given techniques and offers, each computed when first needed.

    Attributes:
        step: The step that is planned for. Its pins keep the ops that the offers take.
        techniques: Names of the techniques whose options the regions have. If it is empty, only the offers are left
            to choose from.
        offers: Choices in addition to those of the regions.
    """

    step: PlanStep
    techniques: tuple[str, ...] = DEFAULT_TECHNIQUES
    offers: tuple[Offer, ...] = ()

    @property
    def program(self) -> Program:
        """The program of the step."""
        return self.step.program

    def bound_at(self, peak_bytes: int, most: float = math.inf) -> float:
        """Return the least that any plan with this peak costs, in the unit of the costs.

        With one offer, each of its options gives a rewritten step: the bound is the smallest sum of an option's cost
        and the least recomputation of its step. With several, each offer is taken at its lowest peak, at no cost.

        Args:
            peak_bytes: The peak.
            most: If the bound is at least this, return this instead, so that fewer options have to be worked out.
        """
        if len(self.offers) != 1:
            return min(most, self._bound_with(self._furthest).at(peak_bytes))
        (offer,) = self.offers
        # Not taking the offer is an option, too. Its bound comes first, and limits which others are looked at.
        least = min(most, self._bound_with(()).at(peak_bytes))
        for option, decision in zip(offer.options(), offer.decisions, strict=True):
            # Working out a step may take a rehearsal. Later options cost more, and recompute no less than ``bound``.
            if option.cost >= least or option.cost + self.bound.at(peak_bytes) >= least:
                break
            least = min(least, option.cost + self._bound_with((decision,)).at(peak_bytes))
        return least

    @derived
    def _bound_with(self, decisions: tuple[Decision, ...]) -> Bound:
        """Return lower bounds on the recomputation of the step with these decisions of offers."""
        program, costs = rewritten(self.program, decisions, self.step.device), self.step.costs
        # The rewritten program begins with the recorded ops, which keep their costs: with FLOPs as the objective, a
        # new conversion rate would change them. Only the ops that follow get costs here.
        if decisions:
            costs = costs + op_costs(program, self.step.objective)[len(costs) :]
        return bound_of(program, costs, self.step.pins.kept_ops)

    @property
    def bound(self) -> Bound:
        """Lower bounds on recomputation for schedules that keep what is pinned, with every offer at its lowest peak."""
        return self._bound_with(self._furthest)

    @property
    def frees_otherwise(self) -> bool:
        """Whether a technique frees what autograd keeps without running ops again."""
        return any(TECHNIQUES[name].frees_otherwise for name in self.techniques)

    @property
    def floor_bytes(self) -> int:
        """A peak that no choice of regions and offers goes below."""
        floor = rewritten(self.program, self._furthest, self.step.device).liveness.floor_bytes
        return max(0, floor - sum(TECHNIQUES[name].leaving_bytes(self.step) for name in self.techniques))

    @cached_property
    def _furthest(self) -> tuple[Decision, ...]:
        return tuple(offer.furthest for offer in self.offers)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many neighbouring regions to join, in the order to try: 1, 2, all of a kind, then sizes in between.

        So the extremes are known early. Without techniques for regions, the only size is 1: joining changes nothing.
        """
        run = longest_run(self.step) if self.techniques else 1
        # Larger sizes than the longest run change nothing. ``run`` may also be in ``_SIZES``, so each is taken once.
        sizes = (1, 2, run, *_SIZES)
        return tuple(dict.fromkeys(size for size in sizes if size <= run))

    @derived
    def effects(self, size: int) -> RegionProblem:
        """Return the problem that the regions, joined up to this size, and the offers pose."""
        ops = zip(self.step.costs, self.program.ops, strict=True)
        forward = sum(cost for cost, op in ops if op.phase == Phase.FORWARD)
        found = regions(self.step, size, self.techniques)
        found += [offer.region for offer in self.offers]
        return effects_of(
            self.program, found, _WIDE * forward, self.step.host_bytes, self.step.added_cost(1.0)
        )


def planning_context(
    step: PlanStep, techniques: tuple[str, ...] = DEFAULT_TECHNIQUES, offers: tuple[Offer, ...] = ()
) -> PlanningContext:
    """Return the context of a step. It is kept with the program, so that several budgets share it.

    Techniques without options for regions are not part of its key: they only add offers.
    """
    known = _contexts(step.program)
    techniques = tuple(name for name in techniques if TECHNIQUES[name].is_about_regions)
    # Offers are told apart by the decision of their first option. Offers themselves compare by identity.
    key = (techniques, tuple(offer.first for offer in offers), *step.key)
    if key not in known:
        known[key] = PlanningContext(step, techniques, offers)
    return known[key]


@derived
def _contexts(program: Program) -> dict[Hashable, PlanningContext]:
    """Return the contexts of a program by key: a dict that ``planning_context`` fills."""
    return {}
