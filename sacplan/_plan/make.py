"""Make a plan from decisions and the footprint of the step with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sacplan._plan.bound import Bound
from sacplan._plan.context import planning_context
from sacplan._plan.plan import Plan
from sacplan._plan.provenance import Provenance
from sacplan._plan.reading import LayerReading, kept_layers, kept_sections
from sacplan._plan.value import Status, UnitPlan
from sacplan._profile.profile import Profile
from sacplan._program.decisions import Decision, Discarded, Recompute, discarded_by
from sacplan._program.liveness import Footprint
from sacplan._program.notebook import Section
from sacplan._program.optimizer_ops import recomputed_from_updated, steps_in_backward
from sacplan._program.pins import NO_PINS, Pins
from sacplan._program.places import OpSequence
from sacplan._program.program import CallSite, Program
from sacplan._ranks.unit_limits import too_wide
from sacplan._technique.step import PlanStep, op_costs
from sacplan._techniques import by_technique, rewritten
from sacplan.errors import PlanError


def made_plan(
    profile: Profile,
    decisions: tuple[Decision, ...],
    found: Footprint,
    provenance: Provenance,
    pins: Pins = NO_PINS,
    *,
    status: Status,
    gap: float | None = None,
    budget_bytes: int | None = None,
    added_ms: float = 0.0,
) -> Plan:
    """Return the plan with these decisions.

    Args:
        profile: The step without a plan.
        decisions: The decisions of the plan.
        found: Footprint of the step with them.
        provenance: How the plan was made.
        pins: Ops that the plan leaves alone. The lower bound takes them into account.
        status: See ``Plan``.
        gap: See ``Plan``.
        budget_bytes: The budget in bytes that the plan was made for; None if there was none.
        added_ms: Additional time of the step for what the plan does besides recomputing.

    Raises:
        PlanError: A unit that cannot be one under ``fully_shard``.
    """
    discarded = discarded_by(decisions)
    # ``fully_shard`` may free the parameters of a module after its forward, so a unit around several such modules
    # could not run their ops again.
    wide = sorted(too_wide(profile.program).intersection(discarded))
    if wide:
        raise PlanError(
            f"unit {wide[0]!r} is around several modules that fully_shard gathers one by one: what it recomputes may "
            "need parameters that are freed. A unit of a plan must be inside of one of the profile's fsdp_units."
        )
    _check_updates(profile, decisions)
    if all(isinstance(one, Recompute) for one in decisions):
        added_ms = 0.0  # the caller computes it as a difference of sums, which leaves a rounding error
    # Where memory is freed in other ways too, nothing has to run again.
    otherwise = any(technique.frees_otherwise for technique, _ in by_technique(decisions))
    lower_bound_ms = 0.0 if otherwise else _lower_bound(profile, decisions, pins, found.peak_bytes)
    program = profile.program
    # Techniques that watch the ops of a unit see those that the other techniques leave: they may have moved ops away.
    taken = by_technique(decisions)
    before = [one for technique, own in taken if not technique.shares_units for one in own]
    if len(before) < len(decisions):
        program = rewritten(program, before, profile.spec)
    units, sequences = unit_plans(
        program, discarded, dict.fromkeys(unit for one in decisions for unit in one.units)
    )
    return Plan(
        status=status,
        gap=None if gap is None else float(gap),
        peak_bytes=found.peak_bytes,
        baseline_peak_bytes=profile.peak_bytes,
        budget_bytes=budget_bytes,
        recompute_ms=found.recompute_ms,
        recompute_flops=found.recompute_flops,
        lower_bound_ms=min(lower_bound_ms, found.recompute_ms),
        added_ms=added_ms,
        step_ms=profile.step_ms,
        step_flops=profile.program.flops,
        device=profile.device,
        ranks=profile.ranks,
        provenance=provenance,
        decisions=decisions,
        units=units,
        sequences=sequences,
        fingerprint=profile.fingerprint,
        device_memory=profile.device_memory(decisions),
        host_bytes=found.host_peak_bytes,
    )


def _check_updates(profile: Profile, decisions: tuple[Decision, ...]) -> None:
    """Raise ``PlanError`` if an op would run again from a parameter that an optimizer has changed by then."""
    # Optimizers that step after the backward pass change nothing that is still read.
    if not steps_in_backward(profile.recorded):
        return
    index = recomputed_from_updated(profile.with_plan(decisions))
    if index is not None:
        op = profile.program.ops[index]
        where = profile.program.scopes[op.scope].fqn if op.scope >= 0 else ""
        raise PlanError(
            f"{op.name} in {where or 'the model'!r} would run again after an optimizer in the backward pass has "
            f"changed a parameter that it reads. Keep what the module makes: keep=[{where!r}]."
        )


def _lower_bound(profile: Profile, decisions: Sequence[Decision], pins: Pins, peak_bytes: int) -> float:
    """Return the least that any schedule recomputes with this peak, given what the plan does besides recomputing."""
    # With recomputation alone, the bound is that of the plain step. It is kept with the program, so further plans with
    # the same pins find it there.
    others = [one for one in decisions if not isinstance(one, Recompute)]
    if not others:
        return planning_context(PlanStep(profile.program, "time", pins)).bound.at(peak_bytes)
    # Else it is that of the step that the other techniques leave. Costs are times whatever the objective was, since the
    # bound is reported in ms.
    program = rewritten(profile.program, others, profile.spec)
    return Bound(program.liveness, op_costs(program, "time"), pins.kept_ops).at(peak_bytes)


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
