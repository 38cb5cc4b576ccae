"""Everything that planning derives from a step, whatever the budget: regions, effects and bounds. It is made once."""

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
"""Cost that a unit around several regions is charged, as a share of the forward pass.

The executor looks at every op in a unit, even in layers that keep everything, and that takes time.
"""


# Of joined regions, between two neighbours and all of a kind; each about 1.4 times the one before.
_SIZES = (3, 4, 6, 8, 12, 16, 24, 32)


# Without slots, and compared by identity: what is derived is kept in ``__dict__``.
@dataclass(frozen=True, eq=False)
class PlanningContext:
    """Regions, effects and bounds of a step for given techniques and offers, each computed when first needed.

    Attributes:
        step: The step that is planned for. Its pins keep the ops that the offers take.
        techniques: Names of the techniques whose options the regions have. If there are none, only the offers are
            left to choose from.
        offers: Choices beside the regions.
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

        With one offer, each of its options is a step of its own: the bound is the smallest cost of an option together
        with the recomputation that is left. With several, the offers count as free, each at its lowest peak.

        Args:
            peak_bytes: The peak.
            most: Where the bound is at least this, return this instead. Fewer options have to be worked out then.
        """
        if len(self.offers) != 1:
            return min(most, self._bound_with(self._furthest).at(peak_bytes))
        (offer,) = self.offers
        # The offer not taken is an option, too. It comes first, and limits which of the others are looked at.
        least = min(most, self._bound_with(()).at(peak_bytes))
        for option, decision in zip(offer.options(), offer.decisions, strict=True):
            # Each may take a rehearsal. Those that follow cost more, and leave no less to recompute than the last one.
            if option.cost >= least or option.cost + self.bound.at(peak_bytes) >= least:
                break
            least = min(least, option.cost + self._bound_with((decision,)).at(peak_bytes))
        return least

    @derived
    def _bound_with(self, decisions: tuple[Decision, ...]) -> Bound:
        """Return lower bounds on the recomputation of the step in which these offers are taken."""
        program, costs = rewritten(self.program, decisions, self.step.device), self.step.costs
        # The rewritten program begins with the recorded ops, whose costs stay as they are. With FLOPs as the
        # objective, a new conversion rate would change them. Only the ops behind them get costs here.
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
        """How many neighbouring regions to join: none, two, all of a kind, and then sizes in between.

        This is the order in which they are tried, so that the extremes are known early. Without options for regions,
        joining them changes nothing.
        """
        run = longest_run(self.step) if self.techniques else 1
        # Joining more than the longest run changes nothing. ``run`` may be one of the other sizes, so each size is
        # taken once, in this order.
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

    Techniques without options for regions do not count: what they add are the offers.
    """
    known = _contexts(step.program)
    techniques = tuple(name for name in techniques if TECHNIQUES[name].is_about_regions)
    # Offers are told apart by the decision of their first option. They cannot be hashed themselves, since patches have
    # dicts in them.
    key = (techniques, tuple(offer.first for offer in offers), *step.key)
    if key not in known:
        known[key] = PlanningContext(step, techniques, offers)
    return known[key]


@derived
def _contexts(program: Program) -> dict[Hashable, PlanningContext]:
    """Return the contexts of a program by what was asked for: a dict that ``planning_context`` fills."""
    return {}
