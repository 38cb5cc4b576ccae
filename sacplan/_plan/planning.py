"""``plan``: the cheapest plan under a budget; what to say where there is none."""

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

_OPTIMAL = 2e-3  # share of its cost that a plan may be above the bound for no other solver to be asked
_FURTHER = 3  # times that techniques are asked what else would lower the smallest peak
_STAGES = 48  # of a chain that Rotor is asked about where the other solvers hold no budget


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
    """Choose what each module discards, so that the whole step stays under a budget.

        plan = sacplan.plan(profile)  # for the device's memory, less a headroom
        plan = sacplan.plan(profile, budget="22GiB")
        plan = sacplan.plan(profile, "60%", keep=["*.router", "aten.topk"], never=["vision_tower.*"])

    Args:
        profile: from ``sacplan.profile``.
        budget: for the peak of the whole step. A number is GiB; a string has a unit (``"22GiB"``, ``"24GB"``), or is a
            share of the unplanned peak (``"60%"``). None: the memory of the profile's device (on a CPU, all that the
            machine has) less the headroom. Several ranks have one device each, and the budget is that of one.
        headroom: what is left free of the device's memory where no budget is given, a share of it (``0.05``, ``"5%"``)
            or bytes (``"2GiB"``). By default 15%; what for, see ``sacplan.max_batch``.
        solver: ``"milp"``, ``"greedy"``, ``"uniform"``, ``"best"`` (greedy, and milp where that is not at the bound;
            the cheaper plan wins), or an object such as ``sacplan.Milp(gap=1e-4)``. ``"rotor"`` plans for models that
            are a chain (``sacplan.Rotor``): more expensive, but its smallest peak may be lower, since it may recompute
            the same values several times; it always minimises time. Where neither greedy nor milp holds the budget,
            ``"best"`` asks ``sacplan.Rotor(stages=48)``.
        objective: what is recomputed the least of: ``"time"`` (ms, as the profile predicts them) or ``"flops"``.
        keep: patterns of ops and modules; what they make is never discarded. A pattern that starts with ``aten.`` or
            ``prims.``, or has ``::`` in it, is matched (``fnmatch``) with the names of ops: ``"aten.topk"``,
            ``"aten.topk.default"``, ``"aten.*attention*"``, ``"mylib::scan"``. Any other is matched with the names of
            modules; without ``*``, ``?`` or ``[`` it is the name itself. All that runs in a module that matches
            counts. ``*`` also matches dots.
        never: patterns of modules that are left alone: nothing in them is discarded or runs in slices, and neither they
            nor a module around or inside of them becomes a unit, so they run as without a plan. Of a module around one,
            only what inner modules compute can then be discarded.
        techniques: what the plan may do: ``"recompute"`` (the default in training), ``"chunk"`` (the default for a
            profile with ``mode="inference"``, where it is the only one that helps; its stretches are found by a search
            of their own, whatever the solver).
        world_size, fsdp_units: over how many ranks the step is spread, and how, as for ``sacplan.profile``. The
            default is what the profile says.
        accumulate: in what chunks add up the gradients of parameters of modules that compute in half precision:
            ``"float32"``, rounded once at the end, or ``"parameter"``, their own type, which takes less memory while a
            loop runs and rounds once for each slice.

        mesh: spread the step over ranks, too: ``{"dp": 2, "tp": 4}``, the axis with the slowest links first. ``8`` or
            ``"8xh100"`` tries the meshes of so many devices and returns the fastest plan. The batch of the profile is
            that of all ranks together. The budget bounds the peak of each rank; a share is one of the peak that a rank
            has without a plan, in the way that the step is spread. ``Plan.ranks.sharding`` says where parameters lie.
            ``"shard"`` among the techniques says the same.

    With pins ``Plan.lower_bound_ms`` is what no schedule undercuts that keeps what is pinned. A plan that takes more
    than the device has, since the budget is more, gives a ``SacplanWarning``.

    Raises:
        BudgetError: the budget or headroom cannot be read, or both are given.
        PlanError: an unknown solver, objective or technique; a pattern that matches nothing.
        TraceError: the model cannot be spread over ranks so.
        InfeasibleBudget: no plan found holds it; carries the smallest peak that one does.
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
    """The plan with the smallest peak that the search finds, whatever it recomputes.

    Its ``peak_bytes`` is the ``smallest_feasible_bytes`` that ``InfeasibleBudget`` reports. The other arguments are
    those of ``plan``.
    """
    profile = opened(profile, Profile)
    asked = Planner.of(
        profile, solver, objective, keep, never, techniques, world_size, fsdp_units, accumulate
    )
    return handed_out(asked.smallest_plan(), profile.spec)


@dataclass(frozen=True)
class Planner:
    """What a plan is asked for, checked, and the searches for it.

    A planner answers for one budget: what it measured for another one could make its plan cheaper than the one that
    ``plan`` returns. What follows from the step alone is kept with its program, for all planners.

    Attributes:
        profile: The step.
        solvers: They are asked in this order.
        objective: See ``plan``.
        pins: What no plan touches.
        techniques: What plans may do.
        accumulate: See ``plan``.
        last: It is asked where none of the solvers holds a budget.
        limits_reached: Solvers that stopped at their limit of work so far.
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
        """Check what is asked for. The arguments and errors are those of ``plan``."""
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
        """The step that is planned for, with these pins."""
        profile = self.profile
        gradients = profile.mode != "inference"
        return PlanStep(profile.program, self.objective, pins, profile.spec, gradients, self.accumulate)

    def own_solvers(self) -> list[StepSolver]:
        """Those that techniques have themselves."""
        step = self.step(self.pins)
        return [solver for name in self.techniques for solver in TECHNIQUES[name].solvers(step)]

    @cached_property
    def searches(self) -> list[PlanSearch]:
        """A search without offers and one with those that may pay at any budget; ``smallest`` adds to the list."""
        found = [self.search(self.pins)]
        offers = self._offers(None)
        if offers:
            found.append(self._with_offers(offers))
        return found

    def search(self, pins: Pins, offers: tuple[Offer, ...] = ()) -> PlanSearch:
        """One search, with these pins."""
        context = planning_context(self.step(pins), self.techniques, offers)
        return PlanSearch(context, limits_reached=self.limits_reached)

    def _offers(self, peak: Footprint | None, known: tuple[Offer, ...] = ()) -> tuple[Offer, ...]:
        """Those that are known, and what the techniques offer besides that goes with them."""
        step = self.step(self.pins)
        for name in self.techniques:
            for offer in TECHNIQUES[name].offers(step, peak):
                if self.pins.named_ops.isdisjoint(offer.ops) and all(map(offer.goes_with, known)):
                    known = (*known, offer)
        return known

    def _with_offers(self, offers: tuple[Offer, ...]) -> PlanSearch:
        """Pins leave what offers are about to them."""
        profile, pins = self.profile, self.pins
        alone = [unit for offer in offers for unit in offer.alone]
        if alone:
            pins = resolve_pins(profile.program, profile.fingerprint, pins.keep, (*pins.never, *alone))
        kept = pins.kept_ops.union(*(offer.kept for offer in offers))
        return self.search(replace(pins, kept_ops=kept), offers)

    def _with_further_offers(self, search: PlanSearch) -> PlanSearch | None:
        """With what techniques offer, too, to lower the smallest peak of a search; None: nothing."""
        known = search.context.offers
        offers = self._offers(search.smallest.footprint, known)
        return self._with_offers(offers) if len(offers) > len(known) else None

    def plan(self, limit: Limit) -> Plan:
        """The cheapest plan under a budget.

        Raises:
            BudgetError: it cannot be read.
            InfeasibleBudget: no plan found holds it.
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
        for search in reversed(searches):
            search.minimise(solvers, budget_bytes)
            if search.smallest.footprint.peak_bytes <= budget_bytes:
                break
        if quick:
            return min(searches, key=_smallest_bytes).smallest
        for _ in range(_FURTHER):
            best = min(searches, key=_smallest_bytes)
            further = self._with_further_offers(best) if _smallest_bytes(best) > budget_bytes else None
            if further is None:
                break
            further.minimise(solvers, budget_bytes)
            searches.append(further)
        best = min(searches, key=_smallest_bytes)
        known = None
        while best.context.offers and known != _smallest_bytes(best) > budget_bytes:
            known = _smallest_bytes(best)
            self._solve(best, known - 1)  # what a budget right below it would find
        self._ask_last(searches[0], best, budget_bytes)
        return min(searches, key=_smallest_bytes).smallest

    def _ask_last(self, search: PlanSearch, best: PlanSearch, budget_bytes: int) -> None:
        """Rotor's smallest peak if the others hold no budget, and where that holds it, its plan for the budget.

        Only a budget that the smallest peak holds is asked for: the peak that an error reports is then found again by
        whoever asks for it.
        """
        run = best.smallest.footprint
        if self.last is None or run.peak_bytes <= budget_bytes or run.peak_phase == Phase.OPTIMIZER:
            return
        try:
            search.solve(self.last, 0)
            if _smallest_bytes(search) <= budget_bytes:
                search.solve(self.last, budget_bytes)
        except PlanError:
            return  # the model is no chain, or pins do not leave it one unit

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
    """Solver objects by name; ``"best"`` is those whose plans are worth comparing, the quickest first."""
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
            return ""  # who has a solver of its own has tried all that there is
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
    """A sentence on what Rotor, which may recompute values more than once, would do."""
    free, rotor = PlanSearch(search.context), Rotor(stages=_STAGES)
    if asked.last is not None:
        return ""  # it was asked
    try:
        free.solve(rotor, budget_bytes)
        named = f"sacplan.Rotor(stages={_STAGES})" if is_longer(search.program, rotor) else '"rotor"'
    except PlanError:
        return ""  # the model is no chain
    found = free.best(budget_bytes)
    if found is None:
        return ""
    return f"solver={named} holds the budget, with {found.footprint.recompute_ms:.4g} ms of recomputation. "


def _with_techniques(asked: Planner, budget_bytes: int) -> str:
    """A sentence on what another technique would reach."""
    if asked.profile.mode == "inference":
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
    """A sentence on what an Adam that keeps less, or has no temporaries, would reach; tried on the recording."""
    profile = asked.profile
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
    if peaks[best] >= search.smallest.footprint.peak_bytes:
        return ""
    return f"With {best} the smallest is {format_bytes(peaks[best])}. "


def _pinned_share(asked: Planner, search: PlanSearch) -> str:
    """A sentence on how much smaller the smallest peak would be without pins, if it would be."""
    if not asked.pins:
        return ""
    free = asked.search(NO_PINS)
    free.minimise(asked.solvers, 0)
    smallest = free.smallest.footprint.peak_bytes
    if smallest >= search.smallest.footprint.peak_bytes:
        return ""
    return (
        f"That is with {asked.pins.said}; without the pins the smallest is {format_bytes(smallest)} ({smallest} "
        "bytes). "
    )
