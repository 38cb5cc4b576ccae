"""From a request to a plan: ask the planner of a step, and make a plan of the candidate that it finds.

``plan`` itself, each sharding of a mesh (``meshes.py``) and each case of a sweep (``questions/sweep.py``) are planned
here. An outcome without a plan carries the error that ``plan`` raises.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
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
from sacplan.planning.candidate import Candidate
from sacplan.planning.compiled import as_compiled, compiled_plan, smallest_compiled
from sacplan.planning.infeasible import infeasible, left_alone, segments_do_not_fit
from sacplan.planning.limits import OF_DEVICE, within
from sacplan.planning.plan import Plan
from sacplan.planning.planner import Planner
from sacplan.planning.provenance import Provenance, Scalar
from sacplan.planning.request import Request
from sacplan.planning.value import Status
from sacplan.profiling.profile import Profile
from sacplan.record.fake_values import decides_sizes
from sacplan.techniques.base.step import PlanStep


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that was planned for, and its plan if there is one.

    Attributes:
        profile: The step.
        plan: The plan that holds the limit; None if no plan does.
        peak_bytes: Peak of the plan, or the smallest that was reached.
        error: Why there is no plan.
    """

    profile: Profile
    plan: Plan | None
    peak_bytes: int
    error: InfeasibleBudget | None = None

    def made(self) -> Plan:
        """Return the plan, or raise the error that says why there is none."""
        if self.error is not None:
            raise self.error
        assert self.plan is not None
        return self.plan

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

    A limit that no plan holds raises nothing here, only in ``Outcome.made``. With ``looks_further``, that error says
    what other techniques would reach.
    """
    if profile.runs_compiled and not request.beside_compiled:
        return _compiled_outcome(request, profile)
    room = request.limit.room_of(profile)

    def planned(budget_bytes: int) -> tuple[Planner, Candidate]:
        # A new planner for each budget, so that a user who asks for this budget gets the same result. If nothing holds
        # the budget, the plan with the smallest peak says how far off it is.
        asked = request.planner(profile)
        return asked, asked.cheapest(budget_bytes) or asked.searches.nearest.smallest

    def takes(made: tuple[Planner, Candidate]) -> tuple[int, int]:
        return made[1].footprint.peak_bytes, room.needs(made[1].program)

    least = within(room, planned, takes)
    asked, found = least.made
    if least.needs <= room.n_bytes:
        # The plan with the smallest peak may exceed a lowered budget, and fit the room. Then its peak is the limit.
        limit_bytes = max(least.budget_bytes, least.peak_bytes)
        plan = made_plan(profile, found, limit_bytes, **asked_of(request, asked, found))
        return Outcome(profile, plan, least.peak_bytes)
    # The tensors fit, but the segments do not. If the tensors did not, there was only one try.
    if least.peak_bytes <= room.n_bytes:
        error = segments_do_not_fit(profile, found, least.needs, room)
        return Outcome(profile, None, least.peak_bytes, error)
    error = infeasible(profile, asked, room.n_bytes, looks_further=looks_further)
    return Outcome(profile, None, error.smallest_feasible_bytes, error)


def _compiled_outcome(request: Request, profile: Profile) -> Outcome:
    unplanned = _unplanned(request, profile)
    found = compiled_plan(request, profile, _made, smallest_plan, unplanned)
    if isinstance(found, InfeasibleBudget):
        return Outcome(profile, None, found.smallest_feasible_bytes, found)
    made_by = structs.replace(found.provenance, **_limit_of(request))
    return Outcome(profile, structs.replace(found, provenance=made_by), found.peak_bytes)


def _made(request: Request, profile: Profile) -> Plan:
    return outcome_of(request, profile).made()


def _unplanned(request: Request, profile: Profile) -> Plan:
    step = PlanStep(profile.program, device=profile.spec)
    unplanned = Candidate(step, (), "unplanned", solver="milp")
    return made_plan(profile, unplanned, objective=request.objective, techniques=("recompute",))


def smallest_plan(request: Request, profile: Profile, *, without_rotor: bool = False) -> Plan:
    """Return the plan with the smallest peak, whatever the limit of the request.

    Rotor may reach a smaller peak than the other solvers, at several times the cost of the step. Use ``without_rotor``
    for a comparison or a recommendation, which such a plan would distort.
    """
    if profile.runs_compiled and not request.beside_compiled:
        unplanned = _unplanned(request, profile)
        return smallest_compiled(request, profile, smallest_plan, unplanned)
    asked = request.planner(profile)
    if without_rotor:
        asked = replace(asked, last=None)
    found = asked.smallest(0)
    # No limit was asked for, so the plan names none.
    return made_plan(profile, found, **asked_of(replace(request, limit=OF_DEVICE), asked, found))


def plan_by_hand(
    profile: Profile,
    decisions: tuple[Decision, ...],
    name: str,
    pins: Pins = NO_PINS,
    status: Status = "policy",
    **asked: Any,
) -> Plan:
    """Return the plan with decisions that no search has found: those of a policy or of a user.

    Args:
        profile: The step.
        decisions: The decisions.
        name: Name of what made the decisions.
        pins: Ops and modules that the decisions leave alone, for the lower bound.
        status: Status of the plan.
        asked: What was asked for, see ``provenance_of``.
    """
    if profile.runs_compiled:
        return as_compiled(plan_by_hand(profile.uncompiled, decisions, name, pins, status, **asked), profile)
    step = PlanStep(profile.program, pins=pins, device=profile.spec)
    return made_plan(profile, Candidate(step, decisions, status, solver=name), **asked)


def asked_of(request: Request, asked: Planner, found: Candidate) -> dict[str, Any]:
    """Return fields of ``Provenance``: what a candidate was asked for, and the limits that were reached."""
    searches = asked.searches
    known = (*searches.solvers, *searches.crowded, *(() if asked.last is None else (asked.last,)))
    return {
        # A solver that a technique brings itself is in none of these lists, and its options are not noted.
        "options": next((_options_of(solver) for solver in known if solver.name == found.solver), {}),
        "objective": request.objective,
        "techniques": asked.techniques,
        "limits_reached": tuple(searches.limits_reached),
        "host_budget": _as_written(request.host_budget),
        **_limit_of(request),
    }


def _limit_of(request: Request) -> dict[str, Any]:
    return {"budget": _as_written(request.limit.budget)}


def _options_of(solver: object) -> dict[str, Any]:
    # Solvers of sacplan are dataclasses. A solver of the user may be any object.
    if dataclasses.is_dataclass(solver):
        return {f.name: getattr(solver, f.name) for f in dataclasses.fields(solver)}
    return dict(getattr(solver, "__dict__", {}))


def made_plan(profile: Profile, found: Candidate, budget_bytes: int | None = None, **asked: Any) -> Plan:
    """Return the plan with the decisions and figures of a candidate.

    Args:
        profile: The step without a plan.
        found: Decisions about this step.
        budget_bytes: The budget in bytes that the plan was made for; None if there was none.
        asked: What was asked for, see ``provenance_of``.

    Raises:
        PlanError: A module cannot be a unit under ``fully_shard``, or an op would run again from a parameter that an
            optimizer has changed by then.
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
        # Recomputation alone adds no other time, but the difference of the sums would leave a rounding error.
        added_ms=0.0 if found.only_recomputes else found.added_ms,
        waits_ms=profile.waits_ms(found.program) - profile.waits_ms(profile.program),
        step_ms=profile.step_ms,
        step_flops=profile.program.flops,
        device=profile.device,
        ranks=profile.ranks,
        provenance=provenance_of(profile, found.solver, found.step.pins, **asked),
        decisions=found.decisions,
        units=units,
        sequences=sequences,
        fingerprint=profile.fingerprint,
        device_memory=device_memory(found.program) if profile.spec.kind == "cuda" else None,
        host_bytes=footprint.host_peak_bytes,
    )


def provenance_of(profile: Profile, solver: str, pins: Pins = NO_PINS, **asked: Any) -> Provenance:
    """Return the provenance of a plan that is made now, by this version.

    Args:
        profile: The step without a plan.
        solver: Name of the solver or policy.
        pins: Ops and modules that the plan leaves alone.
        asked: Further fields of ``Provenance``. One that is None or empty is left out.
    """
    given = {name: value for name, value in asked.items() if value is not None and value != ()}
    given["options"] = {name: _scalar(value) for name, value in asked.get("options", {}).items()}
    # Only the profile's rules about sizes are assumptions: an assumed value alone makes no tensor larger.
    return Provenance(
        solver=solver,
        keep=pins.keep,
        never=pins.never,
        mode=profile.mode,
        trace=profile.trace,
        runtime=profile.runtime,
        assumptions=tuple(filter(decides_sizes, profile.rules)) or UNSET,
        remarks=left_alone(profile) or UNSET,
        sacplan=sacplan.__version__,
        torch=str(torch.__version__),
        date=datetime.now(timezone.utc).replace(microsecond=0),
        **given,
    )


def _scalar(value: Any) -> Scalar:
    # Compared by exact type: a value of a subclass, such as ``numpy.float64``, becomes text like any other object.
    return value if type(value) in (bool, int, float, str, type(None)) else repr(value)


def _as_written(size: Any) -> int | float | str | None:
    if size is None or isinstance(size, str):
        return size
    # Converted, since the number may be of NumPy, and a file takes only Python's.
    return int(size) if isinstance(size, Integral) else float(size)
