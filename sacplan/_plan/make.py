"""Make a plan from decisions: the figures of the step with them, and what each unit does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from numbers import Integral
from typing import Any

import torch
from msgspec import UNSET

import sacplan
from sacplan._device.device_memory import device_memory
from sacplan._plan.bound import bound_of
from sacplan._plan.limits import OF_DEVICE, Limit
from sacplan._plan.plan import Plan
from sacplan._plan.provenance import Provenance, Scalar
from sacplan._plan.reading import LayerReading, kept_layers, kept_sections
from sacplan._plan.value import Status, UnitPlan
from sacplan._profile.profile import Profile
from sacplan._program.decisions import Decision, Discarded, Offload, Recompute, discarded_by
from sacplan._program.notebook import Section
from sacplan._program.optimizer_ops import check_updates, steps_in_backward
from sacplan._program.pins import NO_PINS, Pins
from sacplan._program.places import OpSequence
from sacplan._program.program import CallSite, Program
from sacplan._ranks.unit_limits import check_units
from sacplan._record.fake_values import decides_sizes
from sacplan._technique.step import Objective, op_costs
from sacplan._techniques import DEFAULT_TECHNIQUES, by_technique, rewritten


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


def made_plan(
    profile: Profile,
    decisions: tuple[Decision, ...],
    made_by: MadeBy,
    *,
    status: Status,
    gap: float | None = None,
    budget_bytes: int | None = None,
) -> Plan:
    """Return the plan with these decisions. All its figures are those of the rewritten program.

    Args:
        profile: The step without a plan.
        decisions: The decisions of the plan.
        made_by: How the plan was made.
        status: See ``Plan``.
        gap: See ``Plan``.
        budget_bytes: The budget in bytes that the plan was made for; None if there was none.

    Raises:
        PlanError: A unit that cannot be one under ``fully_shard``, or an op that would run again from a parameter that
            an optimizer has changed by then.
    """
    provenance = provenance_of(profile, made_by)
    plain, program = profile.program, rewritten(profile.program, decisions, profile.spec)
    # What the other techniques leave. Recomputation is described and bounded from below for that program: they may have
    # moved ops away. Copies of what is kept move none.
    left = rewritten(
        plain, [one for one in decisions if not isinstance(one, (Recompute, Offload))], profile.spec
    )
    # Techniques that watch the ops of a unit see those that are left, also where nothing is recomputed.
    watched = any(technique.shares_units for technique, _ in by_technique(decisions))
    # Where memory is freed in other ways than by recomputation, nothing has to run again.
    otherwise = any(technique.frees_otherwise for technique, _ in by_technique(decisions))
    found, discarded = program.footprint, discarded_by(decisions)
    check_units(plain, discarded)
    # Optimizers that step after the backward pass change nothing that is still read.
    if steps_in_backward(profile.recorded):
        check_updates(program)
    # With recomputation alone there is no other time. The difference of the sums would leave a rounding error.
    alone = all(isinstance(one, Recompute) for one in decisions)
    # Costs are times whatever the objective was, since the bound is reported in ms.
    bound_ms = (
        0.0
        if otherwise
        else bound_of(left, op_costs(left, "time"), made_by.pins.kept_ops).at(found.peak_bytes)
    )
    units, sequences = unit_plans(
        left if watched else plain,
        discarded,
        dict.fromkeys(unit for one in decisions for unit in one.units),
    )
    return Plan(
        status=status,
        gap=None if gap is None else float(gap),
        peak_bytes=found.peak_bytes,
        baseline_peak_bytes=profile.peak_bytes,
        budget_bytes=budget_bytes,
        recompute_ms=found.recompute_ms,
        recompute_flops=found.recompute_flops,
        lower_bound_ms=min(bound_ms, found.recompute_ms),
        added_ms=0.0 if alone else program.step_ms - plain.step_ms - found.recompute_ms,
        step_ms=profile.step_ms,
        step_flops=plain.flops,
        device=profile.device,
        ranks=profile.ranks,
        provenance=provenance,
        decisions=decisions,
        units=units,
        sequences=sequences,
        fingerprint=profile.fingerprint,
        device_memory=device_memory(program) if profile.spec.kind == "cuda" else None,
        host_bytes=found.host_peak_bytes,
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


def unit_plans(
    program: Program, discarded: Discarded, fqns: Iterable[str]
) -> tuple[dict[str, UnitPlan], tuple[OpSequence, ...]]:
    """Return what each unit keeps and recomputes, and the op sequences that the calls of the units run.

    A ``UnitPlan`` refers to these sequences by index, since many units run the same one.
    """
    units = {}
    sequences: dict[OpSequence, int] = {}
    # Only what autograd has a handle on is kept for the backward pass. Other outputs are gone with the code that made
    # them.
    held = set(program.handle_storages)
    for fqn in fqns:
        times = discarded.get(fqn, {})
        kept: dict[CallSite, int] = {}
        # Every decision has an entry here, in order, even if its op made nothing that autograd keeps. The figures of a
        # unit are read side by side with its decisions.
        dropped = dict.fromkeys(times, (0, 0.0))
        saved_bytes = 0
        calls: dict[int, None] = {}
        # A decision holds for all calls of a unit, so bytes and times add up over the calls.
        for scope in program.calls[fqn]:
            calls[sequences.setdefault(program.sequence(scope), len(sequences))] = None
            for i, site in program.sites(scope).items():
                op = program.ops[i]
                n_bytes = sum(program.storage_bytes[s] for s in op.writes if s in held)
                saved_bytes += n_bytes
                # Rotor may drop a value several times, and its op then runs as many times again.
                if site in times:
                    before, ms = dropped[site]
                    dropped[site] = before + n_bytes, ms + times[site] * op.time_ms
                elif n_bytes:
                    kept[site] = kept.get(site, 0) + n_bytes
        discarded_bytes = sum(n_bytes for n_bytes, _ in dropped.values())
        units[fqn] = UnitPlan(
            discard_ratio=discarded_bytes / saved_bytes if saved_bytes else 0.0,
            recompute_ms=math.fsum(ms for _, ms in dropped.values()),
            kept=tuple(kept),
            calls=tuple(calls),
            kept_bytes=tuple(kept.values()),
            discarded_bytes=tuple(n_bytes for n_bytes, _ in dropped.values()),
            discarded_ms=tuple(ms for _, ms in dropped.values()),
        )
    return units, tuple(sequences)


def kept_by_layer(profile: Profile) -> list[LayerReading]:
    """Return what autograd keeps in each layer of a step without a plan."""
    program = profile.program
    # A loss function may call parts of the model and never the model itself. Then these parts take its place.
    outermost = [""] if "" in program.calls else [fqn for fqn in program.calls if "." not in fqn]
    return kept_layers(*unit_plans(program, {}, outermost))


def profile_sections(profile: Profile) -> list[Section]:
    """Return a profile in words: its figures, and what autograd keeps in each layer."""
    return [profile.in_words(), *kept_sections(kept_by_layer(profile))]
