"""From a request to a plan: ask the planner of a step, and make a plan of the candidate that it finds.

Everything that plans goes this way: ``plan`` itself, each sharding of a mesh (``meshes.py``), and each case of a sweep
(``questions/sweep.py``). An outcome without a plan carries the error that ``plan`` raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from numbers import Integral
from typing import Any, cast

import torch
from msgspec import UNSET, structs

import sacplan
from sacplan.core.decisions import Decision
from sacplan.core.pins import NO_PINS, Pins
from sacplan.device.device_memory import device_memory
from sacplan.errors import InfeasibleBudget, PlanError
from sacplan.planning.beyond import beyond
from sacplan.planning.candidate import Candidate
from sacplan.planning.compiled import as_compiled, compiled_plan, smallest_compiled
from sacplan.planning.infeasible import differentiated_twice, infeasible, segments_do_not_fit
from sacplan.planning.limits import OF_DEVICE, Limit, within
from sacplan.planning.plan import Plan
from sacplan.planning.planner import Planner
from sacplan.planning.provenance import Provenance, Scalar
from sacplan.planning.request import Request
from sacplan.planning.value import Status
from sacplan.profiling.profile import Profile
from sacplan.record.fake_values import decides_sizes
from sacplan.techniques.base.step import Objective, PlanStep
from sacplan.techniques.registry import DEFAULT_TECHNIQUES


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that was planned for, and its plan if there is one.

    Attributes:
        profile: The step.
        plan: It holds the limit; None if none does.
        peak_bytes: Peak of the plan, or the smallest that was reached.
        error: Why there is no plan.
        nearest_reserved_bytes: Where the tensors fit a GPU and no plan's segments do: the fewest that are reserved.
    """

    profile: Profile
    plan: Plan | None
    peak_bytes: int
    error: InfeasibleBudget | None = None
    nearest_reserved_bytes: int | None = None

    def made(self) -> Plan:
        """Return the plan, or raise the error that says why there is none."""
        if self.error is not None:
            raise self.error
        assert self.plan is not None
        return self.plan

    @property
    def reserved_bytes(self) -> int | None:
        """Bytes reserved on a GPU; None on a CPU, and where no plan's tensors fit."""
        memory = None if self.plan is None else self.plan.device_memory
        return self.nearest_reserved_bytes if memory is None else memory.reserved_bytes()

    @property
    def step_ms(self) -> float | None:
        """Predicted time of the step with the plan; None without one."""
        made = self.plan
        return None if made is None else made.planned_ms

    @property
    def binding(self) -> str:
        """The module or step at which the smallest peak is; ``""`` if a plan holds the budget."""
        return "" if self.error is None else self.error.binding


def outcome_of(request: Request, profile: Profile, *, looks_further: bool = False) -> Outcome:
    """Plan a step: return its cheapest plan within the limit, or why there is none. Errors are those of ``plan``.

    A limit that no plan holds is no error here: ``Outcome.made`` raises it. With ``looks_further``, a plan with the
    default techniques says what others would save, and the error what else would hold the limit.
    """
    if profile.runs_compiled:
        return _compiled_outcome(request, profile)
    room = request.limit.room_of(profile)

    def planned(budget_bytes: int) -> tuple[Planner, Candidate]:
        # A planner for each budget: the result is then what the user gets who asks for that budget. If nothing holds
        # the budget, the plan with the smallest peak says how far it is off.
        asked = request.planner(profile)
        return asked, asked.cheapest(budget_bytes) or asked.nearest.smallest

    def takes(made: tuple[Planner, Candidate]) -> tuple[int, int]:
        return made[1].footprint.peak_bytes, room.needs(made[1].program)

    least = within(room, planned, takes)
    asked, found = least.made
    if least.needs <= room.n_bytes:
        # The plan with the smallest peak may be above the budget, and fit the room. Then its peak is the limit.
        kept_bytes = max(least.budget_bytes, least.peak_bytes)
        # Whoever names the techniques has chosen. In inference, nothing else helps.
        looks_further = looks_further and request.techniques is None and profile.mode == "train"
        said = beyond(asked, found, kept_bytes) if looks_further else ()
        made_by = made_by_search(request, asked, found, said)
        return Outcome(profile, made_plan(profile, found, made_by, kept_bytes), least.peak_bytes)
    # Segments are looked at only where the tensors fit. If they do not, there was one try.
    if least.peak_bytes <= room.n_bytes:
        error = segments_do_not_fit(profile, found, least.needs, room)
        return Outcome(profile, None, least.peak_bytes, error, least.needs)
    error = infeasible(profile, asked, room.n_bytes, looks_further=looks_further)
    return Outcome(profile, None, error.smallest_feasible_bytes, error)


def _compiled_outcome(request: Request, profile: Profile) -> Outcome:
    unplanned = _unplanned(request, profile)
    found = compiled_plan(request, profile, lambda asked, eager: outcome_of(asked, eager).made(), unplanned)
    if isinstance(found, InfeasibleBudget):
        return Outcome(profile, None, found.smallest_feasible_bytes, found)
    limit = request.limit
    made_by = structs.replace(
        found.provenance, budget=_as_written(limit.budget), headroom=_as_written(limit.headroom)
    )
    return Outcome(profile, structs.replace(found, provenance=made_by), found.peak_bytes)


def _unplanned(request: Request, profile: Profile) -> Plan:
    made_by = MadeBy("milp", {}, request.objective, techniques=("recompute",))
    candidate = Candidate(PlanStep(profile.program, device=profile.spec), (), "unplanned")
    return made_plan(profile, candidate, made_by)


def smallest_plan(request: Request, profile: Profile, *, without_rotor: bool = False) -> Plan:
    """Return the plan with the smallest peak, whatever the limit of the request.

    Rotor may reach a smaller peak than the other solvers, at several times the cost of the step. A comparison or a
    recommendation does not want that plan: ``without_rotor``.
    """
    if profile.runs_compiled:
        unplanned = _unplanned(request, profile)
        return smallest_compiled(request, profile, lambda eager: smallest_plan(request, eager), unplanned)
    asked = request.planner(profile)
    if without_rotor:
        asked = replace(asked, last=None)
    found = asked.smallest(0)
    # No limit was asked for, so the plan names none.
    return made_plan(profile, found, made_by_search(replace(request, limit=OF_DEVICE), asked, found))


def plan_by_hand(
    profile: Profile, decisions: tuple[Decision, ...], made_by: MadeBy, *, status: Status = "policy"
) -> Plan:
    """Return the plan with decisions that no search has found: those of a policy, or of whoever writes them down."""
    if profile.runs_compiled:
        return as_compiled(plan_by_hand(profile.uncompiled, decisions, made_by, status=status), profile)
    step = PlanStep(profile.program, pins=made_by.pins, device=profile.spec)
    return made_plan(profile, Candidate(step, decisions, status), made_by)


@dataclass(frozen=True, slots=True)
class MadeBy:
    """The solver or policy that makes a plan, and what it was asked for; with the profile, the plan's ``Provenance``.

    Attributes:
        solver: Name of the solver or policy.
        options: Its options.
        objective, techniques, limits_reached, beyond: See ``Provenance``.
        limit: The limit as the user gave it.
        host_budget: That for the memory of the host; None: the device's row has it.
        pins: Ops and modules that the plan leaves alone. The lower bound takes them into account.
    """

    solver: str
    options: Mapping[str, Any] = field(default_factory=dict)
    objective: Objective | None = None
    limit: Limit = OF_DEVICE
    host_budget: Any = None
    pins: Pins = NO_PINS
    techniques: tuple[str, ...] = DEFAULT_TECHNIQUES
    limits_reached: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()


def made_by_search(
    request: Request, asked: Planner, found: Candidate, beyond: tuple[str, ...] = ()
) -> MadeBy:
    """Return how the candidate of a planner was made."""
    known = (*asked.solvers, *asked.crowded, *(() if asked.last is None else (asked.last,)))
    return MadeBy(
        found.solver,
        # A solver that a technique brings itself is in none of these lists, and its options are not noted.
        next((_options_of(solver) for solver in known if solver.name == found.solver), {}),
        request.objective,
        request.limit,
        request.host_budget,
        asked.basis.recorded.pins,
        asked.techniques,
        tuple(asked.limits_reached),
        beyond,
    )


def _options_of(solver: object) -> dict[str, Any]:
    # Solvers of sacplan are dataclasses. One of the user's own may be any object.
    if dataclasses.is_dataclass(solver):
        return {f.name: getattr(solver, f.name) for f in dataclasses.fields(solver)}
    return dict(getattr(solver, "__dict__", {}))


def made_plan(profile: Profile, found: Candidate, made_by: MadeBy, budget_bytes: int | None = None) -> Plan:
    """Return the plan with the decisions of a candidate, whose figures it has.

    Args:
        profile: The step without a plan.
        found: Decisions about this step.
        made_by: How the plan was made.
        budget_bytes: The budget in bytes that the plan was made for; None if there was none.

    Raises:
        PlanError: A unit that cannot be one under ``fully_shard``, or an op that would run again from a parameter that
            an optimizer has changed by then.
    """
    if why := found.why_refused:
        raise PlanError(why)
    footprint, (units, sequences) = found.footprint, found.units
    return Plan(
        status=cast(Status, found.status),
        gap=None if found.gap is None else float(found.gap),
        peak_bytes=footprint.peak_bytes,
        baseline_peak_bytes=profile.peak_bytes,
        budget_bytes=budget_bytes,
        recompute_ms=footprint.recompute_ms,
        recompute_flops=footprint.recompute_flops,
        lower_bound_ms=found.lower_bound_ms,
        # With recomputation alone there is no other time. The difference of the sums would leave a rounding error.
        added_ms=0.0 if found.only_recomputes else found.added_ms,
        waits_ms=profile.waits_ms(found.program) - profile.waits_ms(profile.program),
        step_ms=profile.step_ms,
        step_flops=profile.program.flops,
        device=profile.device,
        ranks=profile.ranks,
        provenance=provenance_of(profile, made_by),
        decisions=found.decisions,
        units=units,
        sequences=sequences,
        fingerprint=profile.fingerprint,
        device_memory=device_memory(found.program) if profile.spec.kind == "cuda" else None,
        host_bytes=footprint.host_peak_bytes,
    )


def provenance_of(profile: Profile, made_by: MadeBy) -> Provenance:
    """Return the provenance of a plan that is made now, by this version."""
    # Of the rules of the profile, only those about sizes count: an assumed value alone makes no tensor larger. Seconds
    # are enough for the date.
    return Provenance(
        solver=made_by.solver,
        options={name: _scalar(value) for name, value in made_by.options.items()},
        objective=made_by.objective,
        techniques=made_by.techniques,
        keep=made_by.pins.keep,
        never=made_by.pins.never,
        budget=_as_written(made_by.limit.budget),
        headroom=_as_written(made_by.limit.headroom),
        host_budget=UNSET if (host := _as_written(made_by.host_budget)) is None else host,
        mode=profile.mode,
        trace=profile.trace,
        runtime=profile.runtime,
        assumptions=tuple(filter(decides_sizes, profile.rules)) or UNSET,
        limits_reached=made_by.limits_reached or UNSET,
        beyond=made_by.beyond or UNSET,
        remarks=differentiated_twice(profile.program) or UNSET,
        sacplan=sacplan.__version__,
        torch=str(torch.__version__),
        date=datetime.now(timezone.utc).replace(microsecond=0),
    )


def _scalar(value: Any) -> Scalar:
    # Told apart by exact type: a subclass, such as ``numpy.float64``, becomes text like any other object.
    return value if type(value) in (bool, int, float, str, type(None)) else repr(value)


def _as_written(size: Any) -> int | float | str | None:
    if size is None or isinstance(size, str):
        return size
    # Numbers of NumPy count as Integral or Real, too. A file has Python's.
    return int(size) if isinstance(size, Integral) else float(size)
