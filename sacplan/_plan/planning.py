"""``plan``: the cheapest plan under a budget, and the error that explains why there is none.

The planner runs one or two searches (``search.py``). The first has no offers. If techniques make offers that may pay at
any budget (such as the loss in slices), a second one includes them. For a budget:

1. Each search asks its solvers in turn, the quick ones first, and stops when a plan is within ``_OPTIMAL`` of the lower
   bound. The cheapest plan of all searches wins.
2. If none holds the budget, look for the smallest peak. Techniques may make further offers about that peak; each set of
   offers becomes a search of its own.
3. If even that is above the budget, ask Rotor, which may recompute a value several times. It works only for chains.

No step backtracks, so the result is the best of what was tried. ``Plan.gap`` and ``Plan.lower_bound_ms`` say how far it
may be from the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast, get_args

from sacplan._plan.context import planning_context
from sacplan._plan.limits import Limit, handed_out
from sacplan._plan.make import made_plan
from sacplan._plan.meshes import asks_for_mesh, plan_on_meshes
from sacplan._plan.plan import Plan
from sacplan._plan.provenance import Provenance, options_of
from sacplan._plan.search import Candidate, PlanSearch
from sacplan._plan.value import Status
from sacplan._profile.optimizers import BY_NAME, recorded_step, with_optimizer, without_optimizer
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._program.budget import exact_bytes, format_bytes
from sacplan._program.decisions import Accumulate
from sacplan._program.liveness import Footprint
from sacplan._program.pins import NO_PINS, Pins, resolve_pins
from sacplan._program.program import Phase
from sacplan._ranks.ranks import Ranks
from sacplan._rotor.sequences import Rotor, is_longer
from sacplan._solve.greedy import Greedy
from sacplan._solve.milp import Milp
from sacplan._solve.solvers import Solver
from sacplan._solve.uniform import Uniform
from sacplan._technique.offers import Offer
from sacplan._technique.step import Objective, PlanStep
from sacplan._technique.technique import StepSolver
from sacplan._techniques import DEFAULT_TECHNIQUES, INFERENCE_TECHNIQUES, TECHNIQUES, resolve_techniques
from sacplan.errors import InfeasibleBudget, PlanError

_OPTIMAL = 2e-3  # no other solver is asked if a plan is above the bound by at most this share of its cost
_FURTHER = 3  # how often techniques are asked for further offers that would lower the smallest peak
_STAGES = 48  # length of the chain that Rotor is given if no other solver holds the budget


@checked(PlanError, "budget", "headroom")
def plan(
    profile: ProfileOrPath,
    budget: float | str | None = None,
    solver: str | Solver | StepSolver = "best",
    objective: Objective = "time",
    *,
    headroom: float | str | None = None,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
    techniques: Sequence[str] | None = None,
    world_size: int | None = None,
    fsdp_units: Sequence[str] | None = None,
    accumulate: Accumulate = "float32",
    mesh: Any = None,
) -> Plan:
    """Return the cheapest plan that keeps the peak of the whole step under a budget.

    The plan says which tensors each module discards in the forward pass and recomputes in the backward pass.

        plan = sacplan.plan(profile)  # for the device's memory, less a headroom
        plan = sacplan.plan(profile, budget="22GiB")
        plan = sacplan.plan(profile, "60%", keep=["*.router", "aten.topk"], never=["vision_tower.*"])

    Args:
        profile: A profile from ``sacplan.profile``, or the path of one.
        budget: Limit for the peak of the whole step. A number is in GiB. A string has a unit (``"22GiB"``, ``"24GB"``)
            or is a share of the peak without a plan (``"60%"``). None: the memory of the profile's device (on a CPU,
            all memory of the machine) less the headroom. With several ranks, the budget is that of each rank.
        headroom: Memory of the device to leave free if no budget is given: a share of it (``0.05``, ``"5%"``) or bytes
            (``"2GiB"``). The default is 15%; ``sacplan.max_batch`` says what for.
        solver: ``"milp"``, ``"greedy"``, ``"uniform"``, or an object such as ``sacplan.Milp(gap=1e-4)``. ``"best"``
            asks greedy, and milp if the plan of greedy is not at the lower bound, and takes the cheaper plan.
            ``"rotor"`` (``sacplan.Rotor``) plans models that are a chain. Its plans cost more, but its smallest peak
            may be lower, since it may recompute a value several times. It always minimises time. If neither greedy nor
            milp holds the budget, ``"best"`` asks ``sacplan.Rotor(stages=48)``.
        objective: The amount of recomputation to minimise: ``"time"`` (in ms, as the profile predicts) or ``"flops"``.
        keep: Patterns of ops and modules whose outputs are never discarded. A pattern that starts with ``aten.`` or
            ``prims.`` or contains ``::`` is matched (``fnmatch``) with the names of ops: ``"aten.topk"``,
            ``"aten.topk.default"``, ``"aten.*attention*"``, ``"mylib::scan"``. Any other pattern is matched with the
            names of modules, and stands for everything that runs in them. ``*`` also matches dots. Without ``*``,
            ``?`` or ``[``, a pattern is the name itself.
        never: Patterns of modules to leave alone. Nothing in such a module is discarded or runs in slices. Neither it
            nor a module around it or inside it becomes a unit, so it runs as without a plan. In a module around it,
            only the outputs of other inner modules can then be discarded.
        techniques: What the plan may do. ``"recompute"`` is the default in training. ``"chunk"`` is the default for a
            profile with ``mode="inference"``, where only this helps; a search of its own finds the stretches to run in
            slices, whatever the solver.
        world_size, fsdp_units: Number of ranks and FSDP2 units, as for ``sacplan.profile``. By default, those of the
            profile.
        accumulate: The type in which chunks add up the gradients of parameters, for modules that compute in half
            precision. ``"float32"`` rounds once, at the end. ``"parameter"`` is the type of the parameters: it takes
            less memory while a loop runs, and rounds once for each slice.
        mesh: Also spread the step over ranks: ``{"dp": 2, "tp": 4}``, the axis with the slowest links first. ``8`` or
            ``"8xh100"`` tries all meshes of eight devices and returns the fastest plan. The batch of the profile is
            that of all ranks together. The budget limits the peak of each rank; a share is a share of the peak that a
            rank has without a plan, with the sharding in question. ``Plan.ranks.sharding`` has the placements of the
            parameters. ``"shard"`` among the techniques may be given as well, and means the same.

    Returns:
        The plan: peaks in bytes, times in ms. With ``keep`` or ``never``, ``Plan.lower_bound_ms`` holds for schedules
        that keep the same. A plan that takes more memory than the device has gives a ``SacplanWarning``; this happens
        if the budget is larger than the device.

    Raises:
        BudgetError: The budget or headroom cannot be read, or both are given.
        PlanError: An unknown solver, objective or technique; a pattern that matches nothing; or arguments about a mesh
            that contradict each other.
        TraceError: The model cannot be spread over the ranks in this way.
        InfeasibleBudget: No plan was found that holds the budget. It carries the smallest peak that was reached.
    """
    profile = opened(profile, Profile)
    limit, wanted = Limit(budget, headroom), solver

    def planned(
        profile: Profile, *, techniques: Sequence[str] | None = techniques, solver: str | None = None
    ) -> Plan:
        asked = Planner.of(
            profile, solver or wanted, objective, keep, never, techniques, world_size, fsdp_units, accumulate
        )
        return asked.plan(limit)

    if asks_for_mesh(mesh, techniques, world_size, fsdp_units):
        quick = "greedy" if wanted == "best" else None
        found = plan_on_meshes(profile, mesh, limit, techniques, planned, quick)
    else:
        found = planned(profile)
    return handed_out(found, profile.spec)


@checked(PlanError)
def plan_smallest(
    profile: ProfileOrPath,
    solver: str | Solver | StepSolver = "best",
    objective: Objective = "time",
    *,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
    techniques: Sequence[str] | None = None,
    world_size: int | None = None,
    fsdp_units: Sequence[str] | None = None,
    accumulate: Accumulate = "float32",
) -> Plan:
    """Return the plan with the smallest peak that the search finds, however much it recomputes.

    Its ``peak_bytes`` is what ``InfeasibleBudget`` reports as ``smallest_feasible_bytes``. The search takes longer than
    one for a budget. Arguments and errors are those of ``plan``.
    """
    profile = opened(profile, Profile)
    asked = Planner.of(
        profile, solver, objective, keep, never, techniques, world_size, fsdp_units, accumulate
    )
    return handed_out(asked.smallest_plan(), profile.spec)


@dataclass(frozen=True)
class Planner:
    """The checked arguments of ``plan``, and the searches for its answer.

    Use a planner for one budget only. It remembers every plan that it has measured, so a second budget might get a
    cheaper plan than ``plan`` returns for it. Regions, effects and bounds follow from the step alone; all planners of a
    program share them.

    Attributes:
        profile: The step to plan.
        solvers: Solvers in the order in which they are asked.
        objective: See ``plan``.
        pins: Ops and modules that no plan touches.
        techniques: Names of the techniques that plans may use.
        accumulate: See ``plan``.
        last: The solver to ask if none of the others holds the budget; None for none.
        limits_reached: Names of the solvers that have stopped at their limit of work so far.
    """

    profile: Profile
    solvers: tuple[Solver | StepSolver, ...]
    objective: Objective
    pins: Pins
    techniques: tuple[str, ...]
    accumulate: Accumulate
    last: Rotor | None = None
    limits_reached: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        profile: Profile,
        solver: str | Solver | StepSolver = "best",
        objective: Objective = "time",
        keep: Sequence[str] = (),
        never: Sequence[str] = (),
        techniques: Sequence[str] | None = None,
        world_size: int | None = None,
        fsdp_units: Sequence[str] | None = None,
        accumulate: Accumulate = "float32",
    ) -> Planner:
        """Check the arguments, which are those of ``plan``, as are the errors."""
        solvers = tuple(resolve_solver(solver))
        default = INFERENCE_TECHNIQUES if profile.mode == "inference" else DEFAULT_TECHNIQUES
        names = resolve_techniques(default if techniques is None else techniques)
        if world_size is not None or fsdp_units is not None:
            ranks = Ranks.of(profile.ranks.world_size if world_size is None else world_size, fsdp_units)
            profile = profile.on_ranks(ranks)
        pins = resolve_pins(profile.program, profile.fingerprint, keep, never)
        if accumulate not in get_args(Accumulate):
            known = " and ".join(map(repr, get_args(Accumulate)))
            raise PlanError(f"accumulate is {accumulate!r}; known are {known}.")
        last = Rotor(stages=_STAGES)
        usable = solver == "best" and set(last.techniques) <= set(names)
        return cls(profile, solvers, objective, pins, names, accumulate, last if usable else None)

    def step(self, pins: Pins) -> PlanStep:
        """Return the step to plan, with these pins."""
        profile = self.profile
        gradients = profile.mode != "inference"
        return PlanStep(profile.program, self.objective, pins, profile.spec, gradients, self.accumulate)

    def own_solvers(self) -> list[StepSolver]:
        """Return the solvers that the techniques bring themselves."""
        step = self.step(self.pins)
        return [solver for name in self.techniques for solver in TECHNIQUES[name].solvers(step)]

    @cached_property
    def searches(self) -> list[PlanSearch]:
        """A search without offers, and if there are offers that may pay at any budget, one with them.

        ``smallest`` appends further ones.
        """
        found = [self.search(self.pins)]
        offers = self._offers(None)
        if offers:
            found.append(self._with_offers(offers))
        return found

    def search(self, pins: Pins, offers: tuple[Offer, ...] = ()) -> PlanSearch:
        """Return a new search with these pins and offers."""
        context = planning_context(self.step(pins), self.techniques, offers)
        return PlanSearch(context, limits_reached=self.limits_reached)

    def _offers(self, peak: Footprint | None, known: tuple[Offer, ...] = ()) -> tuple[Offer, ...]:
        """Return the known offers, and those of the techniques that are compatible with them.

        ``peak`` is the footprint whose peak the offers should lower; None asks for those that may pay at any budget.
        """
        step = self.step(self.pins)
        for name in self.techniques:
            for offer in TECHNIQUES[name].offers(step, peak):
                if self.pins.named_ops.isdisjoint(offer.ops) and all(map(offer.goes_with, known)):
                    known = (*known, offer)
        return known

    def _with_offers(self, offers: tuple[Offer, ...]) -> PlanSearch:
        """Return a search in which pins keep the other techniques away from the ops and modules of these offers."""
        profile, pins = self.profile, self.pins
        alone = [unit for offer in offers for unit in offer.alone]
        if alone:
            pins = resolve_pins(profile.program, profile.fingerprint, pins.keep, (*pins.never, *alone))
        kept = pins.kept_ops.union(*(offer.kept for offer in offers))
        return self.search(replace(pins, kept_ops=kept), offers)

    def _with_further_offers(self, search: PlanSearch) -> PlanSearch | None:
        """Return a search with further offers that may lower the smallest peak of this one; None if there are none."""
        known = search.context.offers
        offers = self._offers(search.smallest.footprint, known)
        return self._with_offers(offers) if len(offers) > len(known) else None

    def plan(self, limit: Limit) -> Plan:
        """Return the cheapest plan under a budget.

        Raises:
            BudgetError: The budget cannot be read.
            InfeasibleBudget: No plan was found that holds it.
        """
        budget_bytes = limit.bytes_of(self.profile.spec, self.profile.peak_bytes)
        found = self.cheapest(budget_bytes)
        if found is None:
            raise _infeasible(self, budget_bytes)
        return self._as_plan(found, limit, budget_bytes)

    def smallest_plan(self, *, without_rotor: bool = False) -> Plan:
        """Return the plan with the smallest peak.

        Rotor may reach a smaller peak than the other solvers, at several times the cost of the step. A comparison or a
        recommendation does not want that plan: ``without_rotor``.
        """
        asked = replace(self, last=None) if without_rotor else self
        return asked._as_plan(asked.smallest(0))

    def cheapest(self, budget_bytes: int, *, quick: bool = False) -> Candidate | None:
        """Return the cheapest candidate that holds a budget, or None.

        Args:
            budget_bytes: The budget.
            quick: Do not look for the smallest peak where the first searches hold no budget. That takes far longer.
        """
        for search in self.searches:
            self._solve(search, budget_bytes)
        found = _cheapest(self.searches, budget_bytes)
        if found is None and not quick:
            known = len(self.searches)
            self.smallest(budget_bytes)
            for search in self.searches[known:]:
                self._solve(search, budget_bytes)
            found = _cheapest(self.searches, budget_bytes)
        return found

    def _solve(self, search: PlanSearch, budget_bytes: int) -> None:
        # A step that fits as it is needs no solver. Its search begins with the empty plan.
        if search.program.footprint.peak_bytes > budget_bytes:
            for one in (*self.own_solvers(), *self.solvers):
                search.solve(one, budget_bytes)
                if search.above_bound(budget_bytes)[0] <= _OPTIMAL:
                    break

    def smallest(self, budget_bytes: int, *, quick: bool = False) -> Candidate:
        """Return the candidate with the smallest peak, or one that holds a budget.

        Args:
            budget_bytes: No smaller peak is looked for.
            quick: Ask only the searches that there are, and not what else techniques could do about the peak.
        """
        searches, solvers = self.searches, (*self.own_solvers(), *self.solvers)
        for search in reversed(searches):  # the one with offers first: it usually reaches the smaller peak
            search.minimise(solvers, budget_bytes)
            if search.smallest.footprint.peak_bytes <= budget_bytes:
                break
        if quick:
            return min(searches, key=_smallest_bytes).smallest
        # Further offers are about the op at the peak. Once they have lowered it, the peak is elsewhere: ask again.
        for _ in range(_FURTHER):
            best = min(searches, key=_smallest_bytes)
            further = self._with_further_offers(best) if _smallest_bytes(best) > budget_bytes else None
            if further is None:
                break
            further.minimise(solvers, budget_bytes)
            searches.append(further)
        # ``minimise`` and the closed loop go about it differently. With offers, asking for a budget of one byte less
        # may find a plan with a smaller peak, and then the reported peak would not be the smallest.
        best = min(searches, key=_smallest_bytes)
        known = None
        while best.context.offers and known != _smallest_bytes(best) > budget_bytes:
            known = _smallest_bytes(best)
            self._solve(best, known - 1)
        self._ask_last(searches[0], best, budget_bytes)
        return min(searches, key=_smallest_bytes).smallest

    def _ask_last(self, search: PlanSearch, best: PlanSearch, budget_bytes: int) -> None:
        """Ask Rotor for its smallest peak if no other solver holds the budget, and if that holds it, for a plan.

        Its smallest peak comes first so that results agree: whoever asks for a budget of exactly the smallest peak that
        an error reports gets a plan.
        """
        run = best.smallest.footprint
        # Rotor is not wanted; a plan holds the budget already; or the peak is in the optimizer's step, which no
        # recomputation changes.
        if self.last is None or run.peak_bytes <= budget_bytes or run.peak_phase == Phase.OPTIMIZER:
            return
        try:
            search.solve(self.last, 0)
            if _smallest_bytes(search) <= budget_bytes:
                search.solve(self.last, budget_bytes)
        except PlanError:
            return  # the model is not a chain, or pins forbid making all of it one unit

    def _as_plan(self, found: Candidate, limit: Limit | None = None, budget_bytes: int | None = None) -> Plan:
        known = (*self.solvers, *(() if self.last is None else (self.last,)))
        used = next((options_of(solver) for solver in known if solver.name == found.solver), None)
        made_by = Provenance.now(
            self.profile,
            found.solver,
            used,
            objective=self.objective,
            budget=None if limit is None else limit.budget,
            headroom=None if limit is None else limit.headroom,
            pins=self.pins,
            techniques=self.techniques,
            limits_reached=tuple(self.limits_reached),
        )
        return made_plan(
            self.profile,
            found.decisions,
            found.footprint,
            made_by,
            self.pins,
            status=cast(Status, found.status),
            gap=found.gap,
            budget_bytes=budget_bytes,
            added_ms=found.added_ms,
        )


def _smallest_bytes(search: PlanSearch) -> int:
    return search.smallest.footprint.peak_bytes


def _cheapest(searches: Sequence[PlanSearch], budget_bytes: int) -> Candidate | None:
    found = ((search, search.best(budget_bytes)) for search in searches)
    holding = [
        (search.cost(best), best.footprint.peak_bytes, best) for search, best in found if best is not None
    ]
    return min(holding, key=lambda each: each[:2])[2] if holding else None


def resolve_solver(solver: str | Solver | StepSolver) -> list[Solver | StepSolver]:
    """Return the solvers that a name stands for. ``"best"`` is several whose plans are compared, the quickest first.

    Raises:
        PlanError: The name is unknown.
    """
    if not isinstance(solver, str):
        return [solver]
    known: dict[str, list[Solver | StepSolver]] = {
        "milp": [Milp()],
        "greedy": [Greedy()],
        "uniform": [Uniform()],
        "rotor": [Rotor()],
        "best": [Greedy(), Milp()],
    }
    if solver not in known:
        raise PlanError(
            f"unknown solver {solver!r}; known are {', '.join(map(repr, known))}, or an object such as "
            "sacplan.Milp()."
        )
    return known[solver]


def _infeasible(asked: Planner, budget_bytes: int) -> InfeasibleBudget:
    """Return the error: what was tried, the smallest peak and where it is, and what to do about it.

    Trying alternatives takes as long as planning. So they are tried only when the message is read.
    """
    search = min(asked.searches, key=_smallest_bytes)
    run = search.smallest.footprint
    inference = asked.profile.mode == "inference"
    if run.peak_phase == Phase.OPTIMIZER:
        binding = "optimizer step"
    else:
        outside = (
            "the loss, outside of any module" if run.peak_scope < 0 and not inference else "the model itself"
        )
        binding = run.peak_fqn or outside
    where = f"{run.peak_phase.name.lower()} of {binding}" if binding != "optimizer step" else binding
    advice = "make the batch smaller"
    if binding == "optimizer step":
        advice = (
            "use an optimizer with less state or fewer temporaries (fused=True), or train fewer parameters: a smaller "
            "batch does not help"
        )
    reached = f"{format_bytes(run.peak_bytes)} ({run.peak_bytes} bytes), in the {where}. "
    own = [TECHNIQUES[name].how for one in asked.own_solvers() for name in one.techniques]
    if inference and not own:
        message = (
            f"the step takes more than {format_bytes(budget_bytes)}, and in inference nothing is kept for a backward "
            f"pass, so there is nothing to recompute. Its peak is {reached}"
        )
    else:
        names = " and ".join(s.name for s in asked.solvers)
        if asked.last is not None and any(each.has_found(asked.last) for each in asked.searches):
            names += f", then {asked.last.name}"
        how = f", {', '.join(own)}" if own else f" (solvers: {names})"
        message = (
            f"no plan found keeps the step under {format_bytes(budget_bytes)}{how}. Unplanned it takes "
            f"{format_bytes(asked.profile.peak_bytes)}. The smallest peak reached is {reached}"
        )

    def alternatives() -> str:
        if own:
            return ""  # a technique's own solver has tried everything there is
        return (
            _pinned_share(asked, search)
            + _with_rotor(asked, search, budget_bytes)
            + _with_techniques(asked, budget_bytes)
            + _with_optimizers(asked, search, budget_bytes)
        )

    return InfeasibleBudget(
        message,
        f"Give at least {exact_bytes(run.peak_bytes)}, or {advice}.",
        alternatives=alternatives,
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=run.peak_bytes,
        binding=binding,
    )


def _with_rotor(asked: Planner, search: PlanSearch, budget_bytes: int) -> str:
    """Return a sentence on what Rotor, which may recompute a value several times, would reach; ``""`` if nothing."""
    free, rotor = PlanSearch(search.context), Rotor(stages=_STAGES)
    if asked.last is not None:
        return ""  # Rotor was asked already
    try:
        free.solve(rotor, budget_bytes)
        named = f"sacplan.Rotor(stages={_STAGES})" if is_longer(search.program, rotor) else '"rotor"'
    except PlanError:
        return ""  # the model is not a chain
    found = free.best(budget_bytes)
    if found is None:  # Rotor does not hold the budget either
        return ""
    return f"solver={named} holds the budget, with {found.footprint.recompute_ms:.4g} ms of recomputation. "


def _with_techniques(asked: Planner, budget_bytes: int) -> str:
    """Return sentences on what other techniques would reach; the first one with which the budget holds ends it."""
    if asked.profile.mode == "inference":  # only chunks help there, and they are the default
        return ""
    said = ""
    for name in TECHNIQUES:
        if name in asked.techniques:
            continue
        more = replace(asked, techniques=(*asked.techniques, name))
        found = more.cheapest(budget_bytes)
        named = f"techniques={more.techniques!r}"
        if found is not None:
            share = (found.footprint.recompute_ms + found.added_ms) / asked.profile.step_ms
            takes = f"takes {abs(share):.1%} {'more' if share > 0 else 'less'} time than"
            if f"{abs(share):.1%}" == "0.0%":
                takes = "takes as long as"
            return f"With {named} the budget holds, and the step {takes} without a plan. "
        smallest = min(map(_smallest_bytes, more.searches))
        if smallest < _smallest_bytes(more.searches[0]):
            said += f"With {named} the smallest is {format_bytes(smallest)} ({smallest} bytes). "
    return said


def _with_optimizers(asked: Planner, search: PlanSearch, budget_bytes: int) -> str:
    """Return a sentence on what a fused or an 8-bit Adam would reach; both are tried on the recording."""
    profile = asked.profile
    # The alternatives are variants of Adam. They are recorded on whole parameters, and a rank may have only shards.
    if not (profile.fingerprint.setup.optimizer or "").startswith("Adam") or profile.ranks.world_size > 1:
        return ""
    bare = without_optimizer(profile)
    peaks = {}
    for one in (BY_NAME["adamw-fused"], BY_NAME["adamw-8bit"]):
        step = with_optimizer(bare, recorded_step(profile, one.make))
        peaks[one.says] = step.footprint(search.smallest.decisions).peak_bytes
        if peaks[one.says] <= budget_bytes:
            return f"With {one.says} the budget holds: {format_bytes(peaks[one.says])}. "
    best = min(peaks, key=peaks.__getitem__)
    if peaks[best] >= search.smallest.footprint.peak_bytes:  # neither of them lowers the peak
        return ""
    return f"With {best} the smallest is {format_bytes(peaks[best])}. "


def _pinned_share(asked: Planner, search: PlanSearch) -> str:
    """Return a sentence on the smallest peak without pins, if it is smaller."""
    if not asked.pins:
        return ""
    free = asked.search(NO_PINS)
    free.minimise(asked.solvers, 0)
    smallest = free.smallest.footprint.peak_bytes
    if smallest >= search.smallest.footprint.peak_bytes:  # the pins are not what keeps the peak up
        return ""
    return (
        f"That is with {asked.pins.said}; without the pins the smallest is {format_bytes(smallest)} ({smallest} "
        "bytes). "
    )
