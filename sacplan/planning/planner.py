"""The planner of one step: it looks for the cheapest plan.

``Choice`` has the searches with one choice of techniques, one or two at first (``search.py``). The first has no offers.
If techniques make offers that may pay at any budget (such as the loss in slices), a second one includes them. For a
budget:

1. Each search asks its solvers in turn, the quick ones first, and stops when a plan is within ``_OPTIMAL`` of the lower
   bound. The cheapest plan of all searches wins.
2. If none holds the budget, or only with a clearly longer step (``_DEAR``), look at the smallest peak. About it, or
   else about each moment near it, techniques may settle something, the same for all modules that are alike, or make
   further offers (``basis.py``). All of it together becomes a further search, which is looked at in the same way, for
   as long as its plans are dear.
3. If even that is above the budget, ask Rotor, which may recompute a value several times. It works only for chains.

Techniques that free memory otherwise than by running ops again come on top: the choice without them is asked first, and
the search with them begins with what that one has settled and offered.

``Planner`` has the choices. More techniques must never make a plan dearer. But a search that has more options to choose
from tries fewer of each, and one that soon holds the budget looks no further. So each narrower choice of techniques is
asked, too, and the best of all plans is taken. One that no bound says anything about is asked only if no plan holds the
budget so far, or the best one costs more than ``_VERY_DEAR``: it takes long to look for a plan without what makes
others cheap, such as recomputation.

All choices know what the others have found. No search is made or solved of which bounds prove that it finds nothing
better (``Planner.may_gain_in``), and all of them together make few further searches.

No step backtracks, so the result is the best of what was tried. ``Plan.gap`` and ``Plan.lower_bound_ms`` say how far it
may be from the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

from sacplan.core.program import Phase
from sacplan.errors import PlanError
from sacplan.planning.basis import Basis
from sacplan.planning.candidate import Candidate
from sacplan.planning.search import PlanSearch
from sacplan.solvers.rotor.sequences import Rotor
from sacplan.solvers.solvers import Solver
from sacplan.techniques.base.technique import StepSolver
from sacplan.techniques.registry import TECHNIQUES

_OPTIMAL = 2e-3  # no other solver is asked if a plan is above the bound by at most this share of its cost
_FURTHER = 4  # further searches of one choice, first about the smallest peak alone
_DEAR = 0.02  # share of the step's cost that a plan may add without further offers being asked for
_VERY_DEAR = 0.25  # the same without narrower choices being asked of which no bound says what they find
ROTOR_STAGES = 48
"""Length of the chain that Rotor is given if no other solver holds the budget."""


# Choices are told apart by their techniques, and hold what they have found: they are no values.
@dataclass(eq=False)
class Planner:
    """The searches for the cheapest plan of a step. ``Request.planner`` makes one from checked arguments.

    Use a planner for one budget only. It remembers every plan that it has measured, so a second budget might get a
    cheaper plan than ``plan`` returns for it. Regions, effects and bounds follow from the step alone; all planners of a
    program share them.

    Attributes:
        basis: The step as it was recorded, without offers, and the techniques that plans may use.
        solvers: Solvers in the order in which they are asked.
        crowded: Solvers for searches with several offers, such as those of all layers, and for those in which memory is
            freed otherwise than by running ops again. There each layer has many options, with rough prices.
        last: The solver to ask if none of the others holds the budget; None for none.
        by_hand: The solver to ask at the end, if others hold the budget: a plan is no dearer than what it proposes.
        limits_reached: Names of the solvers that have stopped at their limit of work so far.
        choices: The choices that were asked for so far, by their techniques.
    """

    basis: Basis
    solvers: tuple[Solver | StepSolver, ...]
    crowded: tuple[Solver | StepSolver, ...] = ()
    last: Rotor | None = None
    by_hand: StepSolver | None = None
    limits_reached: dict[str, None] = field(default_factory=dict)
    choices: dict[tuple[str, ...], Choice] = field(default_factory=dict, repr=False)

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of the techniques that plans may use."""
        return self.basis.techniques

    @property
    def widest(self) -> Choice:
        """The choice of all techniques."""
        return self.choice(self.techniques)

    def choice(self, names: tuple[str, ...]) -> Choice:
        """Return the choice of some of the techniques."""
        if names not in self.choices:
            basis = self.basis if names == self.techniques else replace(self.basis, techniques=names)
            self.choices[names] = Choice(self, basis)
        return self.choices[names]

    def with_technique(self, name: str) -> Planner:
        """Return a planner with one more technique, whose searches begin anew and do not ask Rotor."""
        more = replace(self.basis, techniques=(*self.techniques, name))
        return Planner(more, self.solvers, self.crowded, by_hand=self.by_hand)

    def that_knows(self, other: Planner) -> Planner:
        """Return a planner that takes over what another one, with fewer techniques, has searched for this budget."""
        known = replace(self, choices={})
        mine = known.choice(other.techniques)
        mine.searches = other.widest.searches
        return known

    @property
    def searches(self) -> list[PlanSearch]:
        """All searches so far, those with all techniques first."""
        others = [one for one in self.choices.values() if one is not self.widest and "searches" in vars(one)]
        return [search for one in (self.widest, *others) for search in one.searches]

    @property
    def nearest(self) -> PlanSearch:
        """The search that has reached the smallest peak."""
        return min(self.searches, key=smallest_bytes)

    def cheapest(self, budget_bytes: int, *, quick: bool = False) -> Candidate | None:
        """Return the cheapest candidate that holds a budget, or None.

        Args:
            budget_bytes: The budget.
            quick: Do not look for the smallest peak where the first searches hold no budget. That takes far longer.
        """
        # Those that bounds leave without a plan are asked last, and then only for the smallest peak, if at all.
        for one in sorted(self._asked(quick=quick), key=lambda one: not one.may_hold(budget_bytes)):
            if self._may_gain(one, budget_bytes):
                one.look_for_cheapest(budget_bytes, quick=quick)
        if not quick:
            self._ask_at_smallest(budget_bytes)
            # Only now, so that searches are the same with it, and only for a budget that ``smallest`` reaches as well.
            if self.by_hand is not None and self.best(budget_bytes) is not None:
                self.widest.searches[0].solve(self.by_hand, budget_bytes)
        return self.best(budget_bytes)

    def smallest(self, budget_bytes: int, *, quick: bool = False) -> Candidate:
        """Return the candidate with the smallest peak, or one that holds a budget.

        Args:
            budget_bytes: No smaller peak is looked for.
            quick: Ask only the searches that there are, and not what else techniques could do about the peak.
        """
        for one in self._asked(quick=quick):
            if self._may_gain(one, budget_bytes):
                (one.minimise if quick else one.go_further)(budget_bytes)
        if not quick:
            self._ask_at_smallest(budget_bytes)
        return self.nearest.smallest

    def cheapest_beyond(self, other: Planner, budget_bytes: int, limit_ms: float) -> Candidate | None:
        """Return the cheapest candidate below a cost that only this planner finds, and not one with fewer techniques.

        Searches that both make are left out, and so are those whose lower bound is at the limit.
        """
        # Contexts are shared by all planners of a program. A search with this one has been made for the other planner.
        known = other.basis.context
        searches = [one for one in self.widest.searches if one.context is not known]
        searches = [one for one in searches if one.context.bound_at(budget_bytes, limit_ms) < limit_ms]
        for search in searches:
            self.widest.solve(search, budget_bytes)
        found = _cheapest(searches, budget_bytes)
        return None if found is None or found.cost > limit_ms else found

    # --- what is known so far

    def best(self, budget_bytes: int) -> Candidate | None:
        """Return the cheapest candidate so far that holds a budget, or None."""
        return _cheapest(self.searches, budget_bytes)

    def costs_more_than(self, share: float, budget_bytes: int) -> bool:
        """Whether no plan so far holds a budget, or none that adds no more than a share to the step."""
        found = self.best(budget_bytes)
        return found is None or found.cost > share * sum(self.basis.recorded.costs)

    def may_gain_in(self, search: PlanSearch, budget_bytes: int) -> bool:
        """Whether bounds allow a search a cheaper plan than is known, or a smaller peak if no plan holds the budget."""
        context, found = search.context, self.best(budget_bytes)
        if found is None:
            return context.floor_bytes < smallest_bytes(self.nearest)
        # What is settled costs as much in every plan of the search.
        left = found.cost - search.tried[frozenset(search.basis.settled)].cost
        if left <= 0 or context.floor_bytes > budget_bytes:
            return False
        # A bound on what has to run again says nothing where memory can be had otherwise.
        return context.frees_otherwise or context.bound_at(budget_bytes, left) < left

    def _may_gain(self, one: Choice, budget_bytes: int) -> bool:
        """Whether to ask a choice: it may find something better than what is known so far."""
        # Others have searched with its options already, and little is left to do.
        shares = one is self.widest.fewer or one.searches[0] is self.widest.searches[0]
        if one.takes_long and not shares and not self.costs_more_than(_VERY_DEAR, budget_bytes):
            return False
        # What it settles and offers later may lower every bound.
        if one.is_about_peaks:
            return self.costs_more_than(0.0, budget_bytes)
        return self.may_gain_in(one.searches[0], budget_bytes)

    # --- who is asked

    def _asked(self, *, quick: bool) -> list[Choice]:
        """Return every choice among the techniques, in the order in which they are asked.

        The widest come first: what they find shows for most of the others that they need not be asked. For a quick
        answer, no narrower ones are asked than the search itself begins with.
        """
        names = tuple(dict.fromkeys(self.techniques))
        sizes = range(len(names), len(names) - 1 if quick else 0, -1)
        choices = [self.choice(some) for n in sizes for some in combinations(names, n)]
        return list(dict.fromkeys(each for one in choices for each in (one.fewer, one) if each is not None))

    def _ask_at_smallest(self, budget_bytes: int) -> None:
        """Ask each choice, if none holds the budget, for a plan with a smaller peak, and then Rotor."""
        for one in self._asked(quick=False):
            if not self._may_gain(one, budget_bytes):
                continue
            one.ask_for_less(budget_bytes)
            # What else there is to choose from makes no difference to Rotor.
            if self.last is not None and set(one.techniques) == set(self.last.techniques):
                self._ask_last(self.last, one.searches[0], budget_bytes)

    def _ask_last(self, rotor: Rotor, search: PlanSearch, budget_bytes: int) -> None:
        """Ask Rotor for its smallest peak if no other solver holds the budget, and if that holds it, for a plan.

        Its smallest peak comes first so that results agree: whoever asks for a budget of exactly the smallest peak that
        an error reports gets a plan.
        """
        run = search.smallest.footprint
        # A plan of the same techniques holds the budget already; or the peak is in the optimizer's step, which no
        # recomputation changes; or other techniques have found what Rotor cannot reach.
        done = run.peak_bytes <= budget_bytes or run.peak_phase == Phase.OPTIMIZER
        if done or not self.may_gain_in(search, budget_bytes):
            return
        try:
            search.solve(rotor, 0)
            if smallest_bytes(search) <= budget_bytes:
                search.solve(rotor, budget_bytes)
        except PlanError:
            return  # the model is not a chain, or pins forbid making all of it one unit


@dataclass(eq=False)
class Choice:
    """The searches with one choice among the techniques of a planner.

    Attributes:
        planner: What all of its choices have found decides which searches are worth while.
        basis: The step as it was recorded, without offers, and the techniques that are chosen.
    """

    planner: Planner = field(repr=False)
    basis: Basis

    @property
    def techniques(self) -> tuple[str, ...]:
        """Names of the techniques."""
        return self.basis.techniques

    @property
    def is_about_peaks(self) -> bool:
        """Whether techniques may settle or offer something later."""
        return any(TECHNIQUES[name].is_about_peaks for name in self.techniques)

    @property
    def takes_long(self) -> bool:
        """Whether bounds on what has to run again do not say what its plans cost."""
        return self.is_about_peaks or any(TECHNIQUES[name].frees_otherwise for name in self.techniques)

    @property
    def fewer(self) -> Choice | None:
        """The choice without techniques that free memory otherwise than by running ops again; None if it is this one.

        It is asked first, since the searches of this one begin with what it has settled and offered.
        """
        names = tuple(name for name in self.techniques if not TECHNIQUES[name].frees_otherwise)
        return None if names in ((), self.techniques) else self.planner.choice(names)

    @cached_property
    def searches(self) -> list[PlanSearch]:
        """A search without offers, and if there are offers that may pay at any budget, one with them.

        ``go_further`` appends further searches.
        """
        # The search without offers is always the first one, and others rely on that: Rotor is asked in it.
        about_regions = tuple(name for name in self.techniques if TECHNIQUES[name].is_about_regions)
        if about_regions in ((), self.techniques):
            found = [self._search(self.basis)]
        else:  # without offers, the other techniques add nothing to it
            found = [self.planner.choice(about_regions).searches[0]]
        offered = self.basis.offered()
        return [*found, self._search(offered)] if offered.offers else found

    def _search(self, basis: Basis) -> PlanSearch:
        return PlanSearch(basis, limits_reached=self.planner.limits_reached)

    def own_solvers(self) -> list[StepSolver]:
        """Return the solvers that the techniques bring themselves."""
        return [one for name in self.techniques for one in TECHNIQUES[name].solvers(self.basis.recorded)]

    def may_hold(self, budget_bytes: int) -> bool:
        """Whether bounds allow a plan that holds a budget, or something may be settled that lowers them."""
        return self.is_about_peaks or self.searches[0].context.floor_bytes <= budget_bytes

    def look_for_cheapest(self, budget_bytes: int, *, quick: bool) -> None:
        """Ask for a plan that holds a budget; unless that is to be quick, search further for as long as it is dear."""
        # Every search is asked, even if the first has a plan: another one may have a cheaper one.
        for search in self.searches:
            self.solve(search, budget_bytes)
        if not quick and self.planner.costs_more_than(_DEAR, budget_bytes):
            self.go_further(budget_bytes)
            # What lowers the smallest peak leaves more room below a budget, so the last search is asked first.
            for search in reversed(self.searches):
                if self.planner.costs_more_than(_DEAR, budget_bytes):
                    self.solve(search, budget_bytes)

    def solve(self, search: PlanSearch, budget_bytes: int) -> None:
        """Ask the solvers of a search in turn, up to a plan near its bound."""
        # A step that fits as it is needs no solver. Its search begins with the empty plan.
        unplanned = search.context.program.footprint.peak_bytes
        # Bounds are about options, and say nothing of a technique's own solver.
        may_gain = bool(self.own_solvers()) or self.planner.may_gain_in(search, budget_bytes)
        if unplanned > budget_bytes and may_gain:
            for one in self._solvers(search):
                search.solve(one, budget_bytes)
                if search.above_bound(budget_bytes)[0] <= _OPTIMAL:
                    break

    def minimise(self, budget_bytes: int) -> None:
        """Look for the smallest peak, up to one that holds a budget."""
        for search in reversed(
            self.searches
        ):  # the one with offers first: it usually reaches the smaller peak
            search.minimise(self._solvers(search), budget_bytes)
            if smallest_bytes(search) <= budget_bytes:
                break

    def go_further(self, budget_bytes: int) -> None:
        """Ask what else techniques can do about the smallest peak, until a plan holds a budget and is not dear."""
        fewer = [] if self.fewer is None else self.fewer.searches
        search = min(fewer or self.searches, key=smallest_bytes)
        if fewer and search.basis.is_further:
            basis: Basis | None = replace(search.basis, techniques=self.techniques).offered()
        else:
            self.minimise(budget_bytes)
            search = min(self.searches, key=smallest_bytes)
            # What was in vain with fewer techniques is not asked again.
            if any(one.basis.is_further for one in fewer):
                return
            # Without offers, several choices have the same search.
            basis = replace(search.basis, techniques=self.techniques).further(search.smallest)
        for _ in range(_FURTHER):
            if basis is None or not self.planner.costs_more_than(_DEAR, budget_bytes):
                break
            search, lowest = self._search(basis), smallest_bytes(search)
            if not self.planner.may_gain_in(search, budget_bytes):
                break
            search.minimise(self._solvers(search), budget_bytes)
            self.searches.append(search)
            if lowest > budget_bytes and smallest_bytes(search) >= lowest:  # in vain
                break
            basis = search.basis.further(search.smallest)

    def ask_for_less(self, budget_bytes: int) -> None:
        """Ask for a plan with a smaller peak than the smallest, if no plan holds the budget.

        ``minimise`` and the closed loop go about it differently. With offers, asking for a budget of one byte less may
        find a plan with a smaller peak, and then the reported peak would not be the smallest.
        """
        search, planner = min(self.searches, key=smallest_bytes), self.planner
        # A plan holds the budget; or what others have found is out of reach.
        held = planner.best(budget_bytes) is not None
        if not search.context.offers or held or not planner.may_gain_in(search, budget_bytes):
            return
        # ``minimise`` stops at the first solver that larger regions do not help. The others may go lower.
        for solver in self._solvers(search):
            search.minimise((solver,), budget_bytes)
        self.solve(search, max(budget_bytes, smallest_bytes(search) - 1))

    def _solvers(self, search: PlanSearch) -> tuple[Solver | StepSolver, ...]:
        context = search.context
        crowded = len(context.offers) > 1 or context.frees_otherwise
        return (*self.own_solvers(), *(self.planner.crowded if crowded else self.planner.solvers))


def smallest_bytes(search: PlanSearch) -> int:
    """Return the smallest peak that a search has seen."""
    return search.smallest.footprint.peak_bytes


def _cheapest(searches: Sequence[PlanSearch], budget_bytes: int) -> Candidate | None:
    holding = filter(None, (search.best(budget_bytes) for search in searches))
    return min(holding, key=lambda best: (best.cost, best.footprint.peak_bytes), default=None)
