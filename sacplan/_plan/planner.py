"""The planner of one step: it looks for the cheapest plan.

The planner runs one or two searches (``search.py``). The first has no offers. If techniques make offers that may pay at
any budget (such as the loss in slices), a second one includes them. For a budget:

1. Each search asks its solvers in turn, the quick ones first, and stops when a plan is within ``_OPTIMAL`` of the lower
   bound. The cheapest plan of all searches wins.
2. If none holds the budget, or only with a clearly longer step (``_DEAR``), look at the smallest peak. About it, or
   else about each moment near it, techniques may settle something, the same for all modules that are alike, or make
   further offers. All of it together becomes a search of its own, which is looked at in the same way, for as long as
   its plans are dear.
3. If even that is above the budget, ask Rotor, which may recompute a value several times. It works only for chains.

Techniques that free memory otherwise than by running ops again come on top: a planner without them is asked first, and
the search with them begins with what that one has settled and offered.

More techniques must never make a plan dearer. But a search that has more options to choose from tries fewer of each,
and one that soon holds the budget looks no further. So the planner of each narrower choice of techniques is asked, too,
and the best of all plans is taken. It is left out where its bounds prove that it can find nothing better than what is
known. One that no bound says anything about is asked only if no plan holds the budget so far, or the best one costs
more than ``_VERY_DEAR``: it takes long to look for a plan without what makes others cheap, such as recomputation.

No step backtracks, so the result is the best of what was tried. ``Plan.gap`` and ``Plan.lower_bound_ms`` say how far it
may be from the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, islice

from sacplan._device.devices import DeviceSpec
from sacplan._plan.candidate import Candidate
from sacplan._plan.context import PlanningContext, planning_context
from sacplan._plan.search import PlanSearch
from sacplan._program.decisions import Decision
from sacplan._program.derived import derived, settled_from
from sacplan._program.fingerprint import Fingerprint
from sacplan._program.liveness import Footprint, bytes_at_ops, summits
from sacplan._program.pins import Pins, resolve_pins
from sacplan._program.program import Phase, Program
from sacplan._rotor.sequences import Rotor
from sacplan._solve.solvers import Solver
from sacplan._technique.offers import Offer
from sacplan._technique.step import PlanStep
from sacplan._technique.technique import StepSolver
from sacplan._techniques import TECHNIQUES, rewritten, why_not
from sacplan.errors import PlanError

_OPTIMAL = 2e-3  # no other solver is asked if a plan is above the bound by at most this share of its cost
_FURTHER = 4  # how often techniques are asked what else lowers the smallest peak, first about it alone
_MOMENTS = 8  # kinds of modules that are asked about at a time, those with the highest moments
_NEAR_PEAK = 0.8  # share of the smallest peak from which on a moment is near it
_DEAR = 0.02  # share of the step's cost that a plan may add without further offers being asked for
_VERY_DEAR = 0.25  # the same without narrower choices being asked of which no bound says what they find
_WORTH_OFFERING = 0.01  # share of the smallest peak that an offer about a lower moment has to free somewhere
_WORTH_ASKING = 0.998  # times the smallest peak before: a search is asked again if it lowers it this far
ROTOR_STAGES = 48
"""Length of the chain that Rotor is given if no other solver holds the budget."""


@dataclass(frozen=True)
class Planner:
    """The searches for the cheapest plan of a step. ``Request.planner`` makes one from checked arguments.

    Use a planner for one budget only. It remembers every plan that it has measured, so a second budget might get a
    cheaper plan than ``plan`` returns for it. Regions, effects and bounds follow from the step alone; all planners of a
    program share them. ``cheapest`` and ``smallest`` ask all planners that this one contains; methods with an
    underscore are about one of them.

    Attributes:
        recorded: The step as it was recorded, with the requirements on a plan.
        fingerprint: Of the model: its modules are what pins can name.
        solvers: Solvers in the order in which they are asked.
        techniques: Names of the techniques that plans may use.
        last: The solver to ask if none of the others holds the budget; None for none.
        crowded: Solvers for searches with several offers, such as those of all layers.
        settled: Decisions with which the step is planned as if it had been recorded with them.
        limits_reached: Names of the solvers that have stopped at their limit of work so far.
        family: Planners of the same step, for the same budget, by their techniques. All of them share this.
    """

    recorded: PlanStep
    fingerprint: Fingerprint
    solvers: tuple[Solver | StepSolver, ...]
    techniques: tuple[str, ...]
    last: Rotor | None = None
    crowded: tuple[Solver | StepSolver, ...] = ()
    settled: tuple[Decision, ...] = ()
    limits_reached: dict[str, None] = field(default_factory=dict)
    family: dict[tuple[str, ...], Planner] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def step(self) -> PlanStep:
        """The step to plan: as it was recorded, or with what is settled."""
        if not self.settled:
            return self.recorded
        program = _settled_program(self.recorded.program, self.settled, self.recorded.device)
        # Pins name ops by number, and the ops of that step are numbered anew.
        pins = self.recorded.pins
        pins = resolve_pins(program, self.fingerprint, pins.keep, pins.never)
        return replace(self.recorded, program=program, pins=pins)

    def with_settled(self, settled: tuple[Decision, ...]) -> Planner:
        """Return the planner of the step with these decisions."""
        return self if settled == self.settled else replace(self, settled=settled, family={})

    def with_technique(self, name: str) -> Planner:
        """Return a planner with one more technique, whose searches begin anew and do not ask Rotor."""
        # The limits of work that it reaches are not those of this planner, so it has a family of its own.
        return replace(self, techniques=(*self.techniques, name), limits_reached={}, last=None, family={})

    def own_solvers(self) -> list[StepSolver]:
        """Return the solvers that the techniques bring themselves."""
        return [solver for name in self.techniques for solver in TECHNIQUES[name].solvers(self.step)]

    @property
    def searches(self) -> list[PlanSearch]:
        """All searches so far, this planner's own first."""
        return [*self.own, *(search for one in self.contained if one is not self for search in one.own)]

    @property
    def _with_fewer(self) -> list[PlanSearch]:
        """The searches so far of this planner and of the one with ``fewer`` techniques."""
        return self.own if self.fewer is None else [*self.own, *self.fewer.own]

    @cached_property
    def own(self) -> list[PlanSearch]:
        """A search without offers, and if there are offers that may pay at any budget, one with them.

        ``go_further`` appends further searches.
        """
        # The search without offers is always the first one, and others rely on that: Rotor is asked in it.
        about_regions = tuple(name for name in self.techniques if TECHNIQUES[name].is_about_regions)
        if about_regions in ((), self.techniques):
            found = [self.search(self.step.pins)]
        else:  # without offers, the other techniques add nothing to it
            found = [self._narrowed(about_regions).own[0]]
        offers = self._offers(None)
        if offers:
            found.append(self._with_offers(offers))
        return found

    @property
    def nearest(self) -> PlanSearch:
        """The search that has reached the smallest peak."""
        return min(self.searches, key=smallest_bytes)

    @cached_property
    def fewer(self) -> Planner | None:
        """The planner without techniques that free memory otherwise than by running ops again; None if there are none.

        It is asked first, since the searches of this planner begin with what that one has settled and offered.
        """
        names = tuple(name for name in self.techniques if not TECHNIQUES[name].frees_otherwise)
        return None if names in ((), self.techniques) else self._narrowed(names)

    @cached_property
    def contained(self) -> tuple[Planner, ...]:
        """The planners of every choice among the techniques, in the order in which they are asked.

        The widest come first: what they find shows for most of the others that they need not be asked.
        """
        names = tuple(dict.fromkeys(self.techniques))
        choices = [choice for n in range(len(names), 0, -1) for choice in combinations(names, n)]
        planners = [self, *(self._narrowed(choice) for choice in choices[1:])]
        in_order = (each for one in planners for each in (one.fewer, one) if each is not None)
        return tuple({one.techniques: one for one in in_order}.values())

    def _narrowed(self, names: tuple[str, ...]) -> Planner:
        """Return the planner of the family that has some of the techniques."""
        if names not in self.family:
            self.family[names] = replace(self, techniques=names)
        return self.family[names]

    def search(
        self, pins: Pins, offers: tuple[Offer, ...] = (), peaks: tuple[Footprint, ...] = ()
    ) -> PlanSearch:
        """Return a new search with these pins and offers."""
        return PlanSearch(
            self.context(pins, offers), self.recorded, self.settled, peaks, limits_reached=self.limits_reached
        )

    def context(self, pins: Pins, offers: tuple[Offer, ...] = ()) -> PlanningContext:
        """Return what is derived from the step with these pins and offers. Planners of one program share it."""
        return planning_context(replace(self.step, pins=pins), self.techniques, offers)

    def _offers(self, peak: Footprint | None, known: tuple[Offer, ...] = ()) -> tuple[Offer, ...]:
        """Return the known offers, and those of the techniques that are compatible with them.

        ``peak`` is the footprint whose peak the offers should lower; None asks for those that may pay at any budget.
        """
        # By kind, since either all layers that are alike go with what is settled, or none does.
        goes: dict[Hashable, bool] = {}
        for name in self.techniques:
            for offer in TECHNIQUES[name].offers(self.step, peak):
                # The user's patterns name an op of the offer, or it replaces events that a known offer replaces, too.
                if not self.step.pins.named_ops.isdisjoint(offer.ops) or not all(map(offer.goes_with, known)):
                    continue
                # Its kind takes all of its options, which nobody has asked for so far.
                if self.settled:
                    kind = offer.region.kind
                    if kind not in goes:
                        goes[kind] = self._goes_with_settled(name, offer)
                    if not goes[kind]:
                        continue
                known = (*known, offer)
        return known

    def _goes_with_settled(self, name: str, offer: Offer) -> bool:
        """Whether a technique can carry out an offer in the recorded step together with what is settled."""
        technique, step = TECHNIQUES[name], self.recorded
        # Other techniques rewrite the program one after the other. Only decisions of the same technique can be in the
        # way.
        own = [one for one in self.settled if isinstance(one, technique.decision)]
        return not own or not technique.why_not(step.program, (*own, offer.furthest), step.device)

    def _with_offers(self, offers: tuple[Offer, ...], peaks: tuple[Footprint, ...] = ()) -> PlanSearch:
        """Return a search in which pins keep the other techniques away from the ops and modules of these offers."""
        pins = self.step.pins
        # The other techniques see these modules as if the user had named them in ``never``, and the ops in ``keep``.
        alone = [unit for offer in offers for unit in offer.alone]
        if alone:
            pins = resolve_pins(self.step.program, self.fingerprint, pins.keep, (*pins.never, *alone))
        kept = pins.kept_ops.union(*(offer.kept for offer in offers))
        return self.search(replace(pins, kept_ops=kept), offers, peaks)

    def _further(self, search: PlanSearch) -> PlanSearch | None:
        """Return a search that settles or offers more about the smallest peak of this one; None if there is no more.

        If there is nothing about the peak itself, all moments near it are asked about: a plan that has more to choose
        from may have its peak at any of them.
        """
        if not any(TECHNIQUES[name].is_about_peaks for name in self.techniques):
            return None
        return self._further_about(search, 1.0) or self._further_about(search, _NEAR_PEAK)

    def _further_about(self, search: PlanSearch, share: float) -> PlanSearch | None:
        """Do so about all moments with this share of the peak, the highest first.

        What is settled costs little, and leaves the other techniques their choices, so nothing is offered about a
        moment for which something is settled.
        """
        peaks = search.peaks
        plan = tuple(one for one in search.smallest.decisions if one not in search.settled)
        near = tuple(islice(summits(search.smallest.program, share), _MOMENTS))
        asked, known = self.with_settled(search.settled), search.context.offers
        for peak in near:
            # A lower moment settles nothing twice.
            more = asked._settled_at(peak, plan, known, again=peak is near[0])
            if more != asked.settled:
                # The ops of the settled step have other numbers, so offers are asked for anew, about the same peaks.
                asked = self.with_settled(more)
                known = asked._offers_about(peaks)
                continue
            further = asked._offers(peak, known)[len(known) :]
            # Offers about one moment are about modules that are alike, so the first one speaks for all of them.
            if further and asked._frees(further[0], _WORTH_OFFERING * near[0].peak_bytes):
                peaks, known = (*peaks, peak), (*known, *further)
        if asked.settled == search.settled and peaks == search.peaks:
            return None
        return asked._with_offers(known, peaks)

    def _settled_at(
        self, peak: Footprint, plan: tuple[Decision, ...], offers: Sequence[Offer], *, again: bool
    ) -> tuple[Decision, ...]:
        """Return what is settled once techniques were asked about a moment of a plan.

        Args:
            peak: The moment.
            plan: What the plan decides beside what is settled.
            offers: Other plans may take these; nothing is settled about their ops.
            again: Settle something else about units that are settled already.
        """
        taken = (*self.settled, *plan, *(offer.furthest for offer in offers))
        settled = () if again else {one.unit for one in self.settled}
        found = [
            one
            for name in self.techniques
            # Asked about the recorded step, since that is what decisions are carried out on.
            for one in TECHNIQUES[name].settled(self.recorded, peak, taken)
            if one.unit not in settled
        ]
        # What is found takes the place of what was settled about the same units.
        units = {one.unit for one in found}
        asked = (*(one for one in self.settled if one.unit not in units), *found)
        # It may not go together with what the plan has beside it.
        refused = why_not(self.recorded.program, (*asked, *plan), self.recorded.device)
        return self.settled if refused else asked

    def _offers_about(self, peaks: Sequence[Footprint]) -> tuple[Offer, ...]:
        """Return the offers that pay at any budget, and those about these peaks."""
        offers = self._offers(None)
        for peak in peaks:
            offers = self._offers(peak, offers)
        return offers

    def _frees(self, offer: Offer, least_bytes: float) -> bool:
        """Whether an offer makes that much less be alive at some op of the step."""
        program, device, furthest = self.step.program, self.step.device, (offer.furthest,)
        # It does not go together with what is settled.
        if why_not(program, furthest, device):
            return False
        before, now = bytes_at_ops(program), bytes_at_ops(rewritten(program, furthest, device))
        # Ops that the offer adds come behind the recorded ones, and are left out. A recorded op that no longer runs has
        # 0 bytes, which does not mean that anything was freed at it.
        now = now[: len(before)]
        freed: int = (before - now)[now > 0].max(initial=0)
        return freed >= least_bytes

    def cheapest(self, budget_bytes: int, *, quick: bool = False) -> Candidate | None:
        """Return the cheapest candidate that holds a budget, or None.

        Args:
            budget_bytes: The budget.
            quick: Do not look for the smallest peak where the first searches hold no budget. That takes far longer.
        """
        for one in self._asked(quick=quick):
            if self._may_gain(one, budget_bytes):
                one._look_for_cheapest(budget_bytes, quick=quick)
        if not quick:
            self._ask_at_smallest(budget_bytes)
        return _cheapest(self.searches, budget_bytes)

    def _asked(self, *, quick: bool) -> tuple[Planner, ...]:
        """Return the planners to ask. For a quick answer, no narrower ones than the search itself begins with."""
        if not quick:
            return self.contained
        return (self,) if self.fewer is None else (self.fewer, self)

    def _may_gain(self, one: Planner, budget_bytes: int) -> bool:
        """Whether to ask a planner that this one contains: it may find something better than what is known so far."""
        techniques = [TECHNIQUES[name] for name in one.techniques]
        # What it settles and offers later may lower every bound.
        unbounded = any(technique.is_about_peaks for technique in techniques)
        # Others have searched with these options already, and little is left to do.
        shares = one is self.fewer or one.own[0] is self.own[0]
        if not shares:
            takes_long = unbounded or any(technique.frees_otherwise for technique in techniques)
            if takes_long and not self._costs_more_than(_VERY_DEAR, self.searches, budget_bytes):
                return False
        if unbounded:
            return self._costs_more_than(0.0, self.searches, budget_bytes)
        return self._may_gain_in(one.own[0], budget_bytes)

    def _may_gain_in(self, search: PlanSearch, budget_bytes: int) -> bool:
        """Whether bounds allow a search a cheaper plan than is known, or a smaller peak if no plan holds the budget."""
        context, found = search.context, _cheapest(self.searches, budget_bytes)
        if found is None:
            return context.floor_bytes < smallest_bytes(self.nearest)
        if found.cost <= 0 or context.floor_bytes > budget_bytes:
            return False
        # A bound on what has to run again says nothing where memory can be had otherwise.
        return context.frees_otherwise or context.bound_at(budget_bytes, found.cost) < found.cost

    def _look_for_cheapest(self, budget_bytes: int, *, quick: bool) -> None:
        # Every search is asked, even if the first has a plan: another one may have a cheaper one.
        for search in self.own:
            self._solve(search, budget_bytes)
        if not quick and self._is_dear(budget_bytes):
            self.go_further(budget_bytes)
            # What lowers the smallest peak leaves more room below a budget, so the last search is asked first.
            for search in reversed(self.own):
                if self._is_dear(budget_bytes):
                    self._solve(search, budget_bytes)

    def _is_dear(self, budget_bytes: int) -> bool:
        """Whether no plan holds a budget so far, or none without making the step clearly longer."""
        return self._costs_more_than(_DEAR, self._with_fewer, budget_bytes)

    def _costs_more_than(self, share: float, searches: Sequence[PlanSearch], budget_bytes: int) -> bool:
        """Whether no plan of these searches holds a budget, or none that adds no more than a share to the step."""
        found = _cheapest(searches, budget_bytes)
        return found is None or found.cost > share * sum(self.recorded.costs)

    def _solvers(self, search: PlanSearch) -> tuple[Solver | StepSolver, ...]:
        return (*self.own_solvers(), *(self.crowded if len(search.context.offers) > 1 else self.solvers))

    def cheapest_beyond(self, other: Planner, budget_bytes: int, limit_ms: float) -> Candidate | None:
        """Return the cheapest candidate below a cost that only this planner finds, and not one with fewer techniques.

        Searches that both make are left out, and so are those whose lower bound is at the limit.
        """
        # Contexts are shared by all planners of a program. A search with this one has been made for the other planner.
        known = other.context(other.step.pins)
        searches = [
            search
            for search in self._with_fewer
            if search.context is not known and search.context.bound_at(budget_bytes, limit_ms) < limit_ms
        ]
        for search in searches:
            self._solve(search, budget_bytes)
        found = _cheapest(searches, budget_bytes)
        return None if found is None or found.cost > limit_ms else found

    def _solve(self, search: PlanSearch, budget_bytes: int) -> None:
        # A step that fits as it is needs no solver. Its search begins with the empty plan.
        if search.context.program.footprint.peak_bytes > budget_bytes:
            for one in self._solvers(search):
                search.solve(one, budget_bytes)
                if search.above_bound(budget_bytes)[0] <= _OPTIMAL:
                    break

    def smallest(self, budget_bytes: int, *, quick: bool = False) -> Candidate:
        """Return the candidate with the smallest peak, or one that holds a budget.

        Args:
            budget_bytes: No smaller peak is looked for.
            quick: Ask only the searches that there are, and not what else techniques could do about the peak.
        """
        for one in self._asked(quick=quick):
            if not self._may_gain(one, budget_bytes):
                continue
            if quick:
                one._minimise(budget_bytes)
            else:
                one.go_further(budget_bytes)
        if not quick:
            self._ask_at_smallest(budget_bytes)
        return self.nearest.smallest

    def _minimise(self, budget_bytes: int) -> None:
        for search in reversed(self.own):  # the one with offers first: it usually reaches the smaller peak
            search.minimise(self._solvers(search), budget_bytes)
            if smallest_bytes(search) <= budget_bytes:
                break

    def go_further(self, budget_bytes: int) -> None:
        """Ask what else techniques can do about the smallest peak, until a plan holds a budget and is not dear."""
        further = self._begun_with_fewer()
        if further is None:
            self._minimise(budget_bytes)
            further = self._further(min(self.own, key=smallest_bytes))
        for _ in range(_FURTHER):
            if further is None or not self._is_dear(budget_bytes):
                break
            further.minimise(self._solvers(further), budget_bytes)
            self.own.append(further)
            # Its smallest peak may be no smaller, but it may have left the peak to another moment: go on from there.
            further = self._further(further)

    def _begun_with_fewer(self) -> PlanSearch | None:
        """Return a search with what fewer techniques have settled and offered; None if that is nothing."""
        if self.fewer is None:
            return None
        reached = min(self.fewer.own, key=smallest_bytes)
        if not reached.settled and not reached.peaks:
            return None
        asked = self.with_settled(reached.settled)
        return asked._with_offers(asked._offers_about(reached.peaks), reached.peaks)

    def _ask_at_smallest(self, budget_bytes: int) -> None:
        """Ask each planner that holds no budget for plans with smaller and smaller peaks, and then Rotor.

        ``minimise`` and the closed loop go about it differently. With offers, asking for a budget of one byte less may
        find a plan with a smaller peak, and then the reported peak would not be the smallest.
        """
        for one in self.contained:
            if not self._may_gain(one, budget_bytes):
                continue
            best, known = min(one.own, key=smallest_bytes), math.inf
            # Each round may lower it by a few bytes only, so it has to be worth the next one.
            while best.context.offers and budget_bytes < smallest_bytes(best) <= _WORTH_ASKING * known:
                # A plan with fewer techniques holds the budget; or what others have found is out of reach.
                if _cheapest(one._with_fewer, budget_bytes) is not None or not self._may_gain_in(
                    best, budget_bytes
                ):
                    break
                known = smallest_bytes(best)
                # ``minimise`` stops at the first solver that larger regions do not help. The others may go lower.
                for solver in one._solvers(best):
                    best.minimise((solver,), budget_bytes)
                one._solve(best, max(budget_bytes, smallest_bytes(best) - 1))
            # What else a planner with more techniques has to choose from makes no difference to Rotor.
            if self.last is not None and set(one.techniques) == set(self.last.techniques):
                self._ask_last(self.last, one.own[0], budget_bytes)

    def _ask_last(self, rotor: Rotor, search: PlanSearch, budget_bytes: int) -> None:
        """Ask Rotor for its smallest peak if no other solver holds the budget, and if that holds it, for a plan.

        Its smallest peak comes first so that results agree: whoever asks for a budget of exactly the smallest peak that
        an error reports gets a plan.
        """
        run = search.smallest.footprint
        # A plan of the same techniques holds the budget already; or the peak is in the optimizer's step, which no
        # recomputation changes; or other techniques have found what Rotor cannot reach.
        if (
            run.peak_bytes <= budget_bytes
            or run.peak_phase == Phase.OPTIMIZER
            or not self._may_gain_in(search, budget_bytes)
        ):
            return
        try:
            search.solve(rotor, 0)
            if smallest_bytes(search) <= budget_bytes:
                search.solve(rotor, budget_bytes)
        except PlanError:
            return  # the model is not a chain, or pins forbid making all of it one unit


@derived
def _settled_program(program: Program, decisions: tuple[Decision, ...], device: DeviceSpec | None) -> Program:
    """Return the step with what is settled, its ops in order. Worked out once, so that searches share it."""
    found = rewritten(program, decisions, device).renumbered()
    settled_from(found).append(program)
    return found


def smallest_bytes(search: PlanSearch) -> int:
    """Return the smallest peak that a search has seen."""
    return search.smallest.footprint.peak_bytes


def _cheapest(searches: Sequence[PlanSearch], budget_bytes: int) -> Candidate | None:
    found = (search.best(budget_bytes) for search in searches)
    holding = [best for best in found if best is not None]
    return min(holding, key=lambda best: (best.cost, best.footprint.peak_bytes), default=None)
