"""The planner of one step: it looks for the cheapest plan.

``Searches`` has the searches with each choice of techniques, one or two at first (``search.py``). The first has no
offers. If techniques make offers that may pay at any budget (such as the loss in slices), a second one includes them.
For a budget:

1. Each search asks its solvers in turn, the quick ones first, and stops when a plan is within ``_OPTIMAL`` of the lower
   bound. The cheapest plan of all searches wins.
2. If no plan holds the budget, or only one with a clearly longer step (``_DEAR``), look at the smallest peak. About
   this peak, or else about each moment near it, techniques may settle something, the same for all modules that are
   alike, or make further offers (``basis.py``). A further search begins with these, and its smallest peak is looked at
   in the same way, for as long as plans are dear.
3. If even the smallest peak is above the budget, or the plan costs more than ``_DEAR_FOR_ROTOR``, ask Rotor, which may
   recompute a value several times. It works only for chains.

Techniques that free memory without running ops again are added last: the choice without them is asked first, and the
search with them begins with what was settled and offered there.

``Planner`` decides which choices of techniques are asked. More techniques must never make a plan dearer. But a search
with more options tries fewer of each, and a search that soon holds the budget ends early. So each narrower choice is
asked, too, and the best of all plans is taken. A choice about which no bound says anything is asked only if no plan
holds the budget so far, or the best plan costs more than ``_VERY_DEAR``: it takes long to look for a plan without the
techniques that make others cheap, such as recomputation.

All choices know what the others have found. A search is skipped if bounds prove that it finds nothing better
(``Searches.may_gain_in``), and all of them together make few further searches.

No step backtracks, so the result is the best of what was tried. ``Plan.gap`` and ``Plan.lower_bound_ms`` say how far it
may be from the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations

from sacplan.core.program import Phase
from sacplan.errors import PlanError
from sacplan.planning.basis import Basis
from sacplan.planning.candidate import Candidate
from sacplan.planning.search import NEAR, PlanSearch
from sacplan.solvers.rotor.sequences import Rotor
from sacplan.solvers.solvers import Solver
from sacplan.techniques.base.technique import StepSolver
from sacplan.techniques.registry import TECHNIQUES

# Far below the error of predicted times, which is some per cent.
_OPTIMAL = 2e-3  # no further solver is asked if a plan is above the bound by at most this share of its cost
# On three of the golden models, at four budgets, 1 to 8 further searches and 0 to .1 of the step find the same plans.
_FURTHER = 4  # further searches of one choice, first about the smallest peak alone
_DEAR = 0.02  # share of the step's cost that a plan may add without further offers being asked for
# Narrower technique sets without a bound are tried only for plans that cost more than this share of the step. Tried
# at any price, they were 10.1 of the 11.2 s of planning gpt2 on an H100.
_VERY_DEAR = 0.25
# If plans cost more than this share of the step, Rotor is asked for a cheaper one. It then finds one for the ResNet-50
# of docs/how.md, but at no budget for gpt2. With .1, planning an encoder of 48 layers takes a third longer.
_DEAR_FOR_ROTOR = 0.2
ROTOR_STAGES = 48
"""Length of the chain that Rotor is given if no other solver holds the budget, or only with a dear plan."""


Names = tuple[str, ...]
"""A choice among the techniques of a planner, by name."""


# Compared by identity, since searches are added to it.
@dataclass(eq=False)
class Searches:
    """The searches for plans of a step, by the techniques that they choose from. All know what the others have found.

    Attributes:
        basis: The step as it was recorded, without offers, and the techniques that plans may use.
        solvers: Solvers in the order in which they are asked.
        crowded: Solvers for searches with several offers, such as one for each layer, or with techniques that free
            memory without running ops again: there each layer has many options, with rough prices.
        found: The searches that were made so far, by their techniques.
        limits_reached: Names of the solvers that have stopped at their limit of work so far.
    """

    basis: Basis
    solvers: tuple[Solver | StepSolver, ...]
    crowded: tuple[Solver | StepSolver, ...] = ()
    found: dict[Names, list[PlanSearch]] = field(default_factory=dict, repr=False)
    limits_reached: dict[str, None] = field(default_factory=dict)

    def of(self, names: Names) -> list[PlanSearch]:
        """Return the searches for a choice: one without offers, and if any may pay at every budget, one with these.

        ``go_further`` appends further searches.
        """
        if names not in self.found:
            # The search without offers is always the first one. ``_ask_at_smallest`` relies on that for Rotor.
            basis = replace(self.basis, techniques=names)
            about_regions = tuple(name for name in names if TECHNIQUES[name].is_about_regions)
            # Without offers, only techniques about regions matter: share their search.
            alone = about_regions in ((), names)
            first = self._search(basis) if alone else self.of(about_regions)[0]
            offered = basis.offered()
            self.found[names] = [first, self._search(offered)] if offered.offers else [first]
        return self.found[names]

    def _search(self, basis: Basis) -> PlanSearch:
        return PlanSearch(basis, limits_reached=self.limits_reached)

    @property
    def all(self) -> list[PlanSearch]:
        """All searches so far, those with all techniques first."""
        widest = self.of(self.basis.techniques)
        return [*widest, *chain(*(searches for searches in self.found.values() if searches is not widest))]

    # --- what is known so far

    @property
    def nearest(self) -> PlanSearch:
        """The search that has reached the smallest peak."""
        return min(self.all, key=smallest_bytes)

    def best(self, budget_bytes: int) -> Candidate | None:
        """Return the cheapest candidate so far that holds a budget, or None."""
        holding = filter(None, (search.best(budget_bytes) for search in self.all))
        return min(holding, key=lambda best: (best.cost, best.footprint.peak_bytes), default=None)

    def costs_more_than(self, share: float, budget_bytes: int) -> bool:
        """Whether no plan so far holds a budget, or the cheapest one costs more than a share of the step."""
        found = self.best(budget_bytes)
        return found is None or found.cost > share * sum(self.basis.recorded.costs)

    def may_gain_in(self, search: PlanSearch, budget_bytes: int) -> bool:
        """Whether bounds let a search find a cheaper plan than known ones; if none holds the budget, a smaller peak."""
        context, found = search.context, self.best(budget_bytes)
        if found is None:
            return context.floor_bytes < smallest_bytes(self.nearest)
        # Every plan of the search pays for what is settled, so only the rest can be cheaper.
        left = found.cost - search.tried[frozenset(search.basis.settled)].cost
        if left <= 0 or context.floor_bytes > budget_bytes:
            return False
        # If memory can be freed without running ops again, bounds on recomputation do not hold.
        return context.frees_otherwise or context.bound_at(budget_bytes, left) < left

    # --- what is asked of the searches with one choice of techniques

    def own_solvers(self, names: Names) -> list[StepSolver]:
        """Return the solvers that the techniques bring themselves."""
        return [one for name in names for one in TECHNIQUES[name].solvers(self.basis.recorded)]

    def look_for_cheapest(self, names: Names, budget_bytes: int, *, quick: bool) -> None:
        """Ask for a plan that holds a budget; unless ``quick``, search further for as long as the plan is dear."""
        # Every search is asked, even if the first one has a plan: others may find a cheaper plan.
        for search in self.of(names):
            self.solve(names, search, budget_bytes)
        if not quick and self.costs_more_than(_DEAR, budget_bytes):
            self.go_further(names, budget_bytes)
            # What lowers the smallest peak leaves more room below a budget, so the last search is asked first.
            for search in reversed(self.of(names)):
                if self.costs_more_than(_DEAR, budget_bytes):
                    self.solve(names, search, budget_bytes)

    def solve(self, names: Names, search: PlanSearch, budget_bytes: int) -> None:
        """Ask the solvers of a search in turn, until a plan is near the bound."""
        # A step that fits as it is needs no solver: the search begins with the empty plan.
        unplanned = search.context.program.footprint.peak_bytes
        # Bounds are about options, and say nothing of a technique's own solver.
        may_gain = bool(self.own_solvers(names)) or self.may_gain_in(search, budget_bytes)
        if unplanned > budget_bytes and may_gain:
            for one in self._solvers(names, search):
                search.solve(one, budget_bytes)
                if search.above_bound(budget_bytes)[0] <= _OPTIMAL:
                    break

    def minimise(self, names: Names, budget_bytes: int, *, roughly: bool = False) -> None:
        """Look for the smallest peak, or one that holds a budget; with ``roughly``, or one near the floor."""
        for search in reversed(self.of(names)):  # with offers first: it usually reaches the smaller peak
            floor_bytes, lowest = search.context.floor_bytes, min(map(smallest_bytes, self.of(names)))
            enough = max(budget_bytes, int((1 + NEAR) * floor_bytes) if roughly else 0)
            # For a rough answer, a search is skipped if its floor is not below the smallest peak so far.
            if not roughly or self.own_solvers(names) or floor_bytes < lowest:
                search.minimise(self._solvers(names, search), enough)
            if smallest_bytes(search) <= budget_bytes:
                break

    def go_further(self, names: Names, budget_bytes: int) -> None:
        """Ask what else techniques can do about the smallest peak, until a plan holds a budget and is not dear."""
        narrower, searches = fewer(names), self.of(names)
        known = [] if narrower is None else self.of(narrower)
        search = min(known or searches, key=smallest_bytes)
        if known and search.basis.is_further:
            basis: Basis | None = replace(search.basis, techniques=names).offered()
        else:
            self.minimise(names, budget_bytes)
            search = min(searches, key=smallest_bytes)
            # What was in vain with fewer techniques is not asked again.
            if any(one.basis.is_further for one in known):
                return
            # Choices may share a search without offers, so its techniques may be others.
            basis = replace(search.basis, techniques=names).further(search.smallest)
        for _ in range(_FURTHER):
            if basis is None or not self.costs_more_than(_DEAR, budget_bytes):
                break
            search, lowest = self._search(basis), smallest_bytes(search)
            if not self.may_gain_in(search, budget_bytes):
                break
            search.minimise(self._solvers(names, search), budget_bytes)
            searches.append(search)
            if lowest > budget_bytes and smallest_bytes(search) >= lowest:  # in vain
                break
            basis = search.basis.further(search.smallest)

    def ask_for_less(self, names: Names, budget_bytes: int) -> None:
        """If no plan holds the budget, ask for a peak below the smallest so far.

        ``minimise`` and the closed loop search differently. With offers, a user who asks for one byte less than the
        smallest peak might get a plan, so that budget is tried before a smallest peak is reported.
        """
        search = min(self.of(names), key=smallest_bytes)
        # There is no such gap; or a plan holds the budget; or bounds rule out a smaller peak.
        held = self.best(budget_bytes) is not None
        if not search.context.offers or held or not self.may_gain_in(search, budget_bytes):
            return
        # ``minimise`` stops at the first solver that larger regions do not help. Others may go lower.
        for solver in self._solvers(names, search):
            search.minimise((solver,), budget_bytes)
        self.solve(names, search, max(budget_bytes, smallest_bytes(search) - 1))

    def _solvers(self, names: Names, search: PlanSearch) -> tuple[Solver | StepSolver, ...]:
        context = search.context
        crowded = len(context.offers) > 1 or context.frees_otherwise
        return (*self.own_solvers(names), *(self.crowded if crowded else self.solvers))


@dataclass(eq=False)
class Planner:
    """Looks for the cheapest plan of a step. ``Request.planner`` makes one from checked arguments.

    Use a planner for one budget only. It remembers every plan that it has measured, so a second budget might get a
    cheaper plan than ``plan`` returns for it. Regions, effects and bounds follow from the step alone; all planners of a
    program share them.

    Attributes:
        searches: The searches for the step, with each choice of its techniques.
        last: The solver to ask if the others hold the budget only with a dear plan, or not at all; None for none.
        by_hand: The solver to ask at the end if a plan holds the budget, so that no plan is dearer than its proposals.
    """

    searches: Searches
    last: Rotor | None = None
    by_hand: StepSolver | None = None

    @property
    def basis(self) -> Basis:
        """The step as it was recorded, and the techniques that plans may use."""
        return self.searches.basis

    @property
    def techniques(self) -> Names:
        """Names of the techniques that plans may use."""
        return self.basis.techniques

    @property
    def _widest(self) -> list[PlanSearch]:
        return self.searches.of(self.techniques)

    def with_technique(self, name: str) -> Planner:
        """Return a planner with one more technique, without the searches so far and without Rotor."""
        more = replace(self.basis, techniques=(*self.techniques, name))
        return Planner(replace(self.searches, basis=more, found={}, limits_reached={}), by_hand=self.by_hand)

    def that_knows(self, other: Planner) -> Planner:
        """Return a planner that takes over the searches of another one with fewer techniques for the same budget."""
        return replace(self, searches=replace(self.searches, found={other.techniques: other._widest}))

    def cheapest(self, budget_bytes: int, *, quick: bool = False) -> Candidate | None:
        """Return the cheapest candidate that holds a budget, or None.

        Args:
            budget_bytes: The budget.
            quick: Do not look for the smallest peak if the first searches hold no budget. That takes far longer.
        """
        # Choices for which bounds rule out a plan come last.
        for names in sorted(
            self._asked(quick=quick), key=lambda names: not self._may_hold(names, budget_bytes)
        ):
            if self._may_gain(names, budget_bytes):
                self.searches.look_for_cheapest(names, budget_bytes, quick=quick)
        if not quick:
            self._ask_at_smallest(budget_bytes)
        # Asked last, so that it changes no other search, and only for a budget that ``smallest`` reaches without it.
        if self.by_hand is not None and self.searches.best(budget_bytes) is not None:
            self._widest[0].solve(self.by_hand, budget_bytes)
        return self.searches.best(budget_bytes)

    def smallest(self, budget_bytes: int, *, quick: bool = False) -> Candidate:
        """Return the candidate with the smallest peak, or one that holds a budget.

        Args:
            budget_bytes: The budget; 0 to look only for the smallest peak.
            quick: Ask only the first searches, and not what else techniques could do about the peak. Without a budget,
                a peak near the floor is then small enough.
        """
        roughly = partial(self.searches.minimise, roughly=not budget_bytes)
        for names in self._asked(quick=quick):
            if self._may_gain(names, budget_bytes):
                (roughly if quick else self.searches.go_further)(names, budget_bytes)
        if not quick:
            self._ask_at_smallest(budget_bytes)
        return self.searches.nearest.smallest

    # --- who is asked

    def _may_hold(self, names: Names, budget_bytes: int) -> bool:
        """Whether bounds allow a plan that holds a budget, or techniques may settle what lowers them."""
        return _is_about_peaks(names) or self.searches.of(names)[0].context.floor_bytes <= budget_bytes

    def _may_gain(self, names: Names, budget_bytes: int) -> bool:
        """Whether to ask a choice of techniques: it may find something better than what is known so far."""
        # Bounds on recomputation do not say what such plans cost.
        takes_long = _is_about_peaks(names) or any(TECHNIQUES[name].frees_otherwise for name in names)
        # Other choices share its searches or begin with them, so asking it adds little work.
        shares = names == fewer(self.techniques) or self.searches.of(names)[0] is self._widest[0]
        if takes_long and not shares and not self.searches.costs_more_than(_VERY_DEAR, budget_bytes):
            return False
        # Decisions and offers that come later may lower every bound.
        if _is_about_peaks(names):
            return self.searches.costs_more_than(0.0, budget_bytes)
        return self.searches.may_gain_in(self.searches.of(names)[0], budget_bytes)

    def _asked(self, *, quick: bool) -> list[Names]:
        """Return every choice among the techniques, in the order in which they are asked.

        The widest come first, since their plans show that most of the others need not be asked. For a quick answer,
        only the choice of all techniques is asked, after the narrower one that it begins with.
        """
        names = tuple(dict.fromkeys(self.techniques))
        sizes = range(len(names), len(names) - 1 if quick else 0, -1)
        choices = [some for n in sizes for some in combinations(names, n)]
        return list(dict.fromkeys(each for one in choices for each in (fewer(one), one) if each is not None))

    def _ask_at_smallest(self, budget_bytes: int) -> None:
        """If no plan holds the budget, ask each choice for a smaller peak. Then ask Rotor if it may pay."""
        for names in self._asked(quick=False):
            if not self._may_gain(names, budget_bytes):
                continue
            self.searches.ask_for_less(names, budget_bytes)
            # Rotor is asked only with its own techniques: it makes no use of others.
            if self.last is not None and set(names) == set(self.last.techniques):
                self._ask_last(self.last, self.searches.of(names)[0], budget_bytes)

    def _ask_last(self, rotor: Rotor, search: PlanSearch, budget_bytes: int) -> None:
        """Ask Rotor for a plan if no other solver holds the budget, or only with a dear plan.

        In the first case, its smallest peak comes first so that results agree: the smallest peak that an error reports
        is a budget for which there is a plan.
        """
        run = search.smallest.footprint
        held = run.peak_bytes <= budget_bytes
        if held:
            done = not self.searches.costs_more_than(_DEAR_FOR_ROTOR, budget_bytes)
        else:  # if the peak is in the optimizer's step, no recomputation changes it
            done = run.peak_phase == Phase.OPTIMIZER
        if done or not self.searches.may_gain_in(search, budget_bytes):
            return
        try:
            if not held:
                search.solve(rotor, 0)
            if smallest_bytes(search) <= budget_bytes:
                search.solve(rotor, budget_bytes)
        except PlanError:
            return  # the model is not a chain, or pins forbid making all of it one unit


def fewer(names: Names) -> Names | None:
    """Return ``names`` without techniques that free memory without running ops again; None if all or none are left.

    The result is asked first, since the searches with all of ``names`` begin with what it has settled and offered.
    """
    found = tuple(name for name in names if not TECHNIQUES[name].frees_otherwise)
    return None if found in ((), names) else found


def _is_about_peaks(names: Names) -> bool:
    """Whether any of these techniques may settle or offer something about peaks."""
    return any(TECHNIQUES[name].is_about_peaks for name in names)


def smallest_bytes(search: PlanSearch) -> int:
    """Return the smallest peak that a search has seen."""
    return search.smallest.footprint.peak_bytes
