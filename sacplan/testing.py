"""Assertions for test suites about the peak of a training step, on any device and without having it."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sacplan.core.arguments import checked, opened
from sacplan.core.budget import format_bytes, format_difference
from sacplan.core.program import Program
from sacplan.core.setup import Routing, warn_of
from sacplan.device.device_memory import beyond_peak_bytes, reserved_bytes
from sacplan.device.devices import DeviceSpec
from sacplan.device.outside_allocator import outside_text
from sacplan.distributed.ranks.ranks import ONE_RANK
from sacplan.errors import PlanError, SacplanWarning
from sacplan.planning.limits import EXPANDABLE_SEGMENTS, Limit, Room
from sacplan.planning.make import outcome_of
from sacplan.planning.plan import Plan, PlanOrPath
from sacplan.planning.request import Request
from sacplan.profiling.profile import Profile
from sacplan.profiling.remarks import no_optimizer
from sacplan.profiling.tracing import StepRequest, Trace, trace_step, warn_of_step
from sacplan.questions.parts import peak_in_words
from sacplan.questions.planned import planned
from sacplan.record.step import LossFn, Mode

__all__ = ["assert_step_fits"]

_WIDTH = 110


@checked(PlanError, "model", "batch", "optimizer")
def assert_step_fits(
    model: torch.nn.Module,
    batch: Any,
    device: str | DeviceSpec | torch.device | None = None,
    budget: float | str | None = None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    plan: PlanOrPath | None = None,
    mode: Mode = "train",
    trace: Trace = "fake",
    accumulation_steps: int | None = None,
) -> Profile:
    """Assert that the peak of one step stays within a budget.

        def test_memory():
            assert_step_fits(make_model(), make_batch(), device="rtx-4090", budget="20GiB", optimizer=torch.optim.AdamW)

    The step is recorded as ``sacplan.profile`` records it: nothing is computed, and the device need not be there.

    Args:
        model, batch, loss_fn, optimizer, mode, trace: as for ``sacplan.profile``. With a plan, the mode is that of
            the plan.
        device: the device that the step must fit, see ``sacplan.devices()``. By default that of the plan.
        budget: for the peak of the step. A number is GiB; a string has a unit (``"20GiB"``), or is a share of the
            unplanned peak (``"60%"``). None: the step must fit the device, as for ``sacplan.plan``. On a GPU, all
            that torch reserves must then fit, not only the peak.
        plan: run the step with this plan, as ``sacplan.apply`` would apply it. With a plan for several ranks, the peak
            is that of one rank.
        accumulation_steps: as for ``sacplan.profile``; by default those of the plan, or 1.

    Returns:
        The profile of the step, without the plan.

    Raises:
        AssertionError: the peak is over the budget, or the step does not fit the device. The message says by how
            much, where the peak is, what is alive then, and what would make it smaller.
        BudgetError: a budget that cannot be read.
        PlanMismatch: the plan was made for another step: model, batch, device, optimizer or loss. Make it again.
        PlanError: neither a device nor a plan.
        TraceError, DeviceError: as ``sacplan.profile``.

    Warns:
        SacplanWarning: a training step without an optimizer, whose state is then missing from the peak; or a plan of a
            step with another setup.
        SumOfOutputsWarning: a training step that trains the sum of the outputs, for want of a loss.
    """
    __tracebackhide__ = True
    plan = opened(plan, Plan)
    if plan is not None:
        plan.fingerprint.check_model(model)
        device, mode = plan.device if device is None else device, plan.provenance.mode
    # Still None only without a plan, which would name its device.
    if device is None:
        raise PlanError('name the device that the step is to fit on, for example device="rtx-4090".')
    routing: Routing = "balanced" if plan is None else plan.fingerprint.setup.routing
    if accumulation_steps is None:
        accumulation_steps = 1 if plan is None else plan.fingerprint.setup.accumulation_steps
    profile = trace_step(StepRequest(
        model, batch, loss_fn, optimizer, device, "cost-model", trace,
        mode=mode, ranks=ONE_RANK if plan is None else plan.ranks, accumulation_steps=accumulation_steps,
        routing=routing,
    ))  # fmt: skip
    warn_of_step(profile, stacklevel=3)
    # A budget given as a share is a share of the unplanned peak of one rank.
    limit = Limit(budget)
    room = limit.room_of(profile)  # before planning: raises if the budget cannot be read
    if profile.has_no_optimizer:
        missing = no_optimizer(profile.program, profile.spec)
        warnings.warn(f"{missing}. Give the optimizer=.", SacplanWarning, stacklevel=3)
    program = profile.program
    if plan is not None:
        program = planned(profile, plan)
        warn_of(plan.fingerprint.setup.differences(profile.fingerprint.setup), stacklevel=3)
    if program.footprint.peak_bytes > room.for_peak(program):
        raise AssertionError(_lines(_report(profile, plan, program, room, limit)))
    return profile


def _report(profile: Profile, plan: Plan | None, program: Program, room: Room, limit: Limit) -> Iterator[str]:
    """Yield paragraphs on what is wrong, where, and what to try."""
    budget_bytes = room.for_peak(program)
    yield from _verdict(profile, program.footprint.peak_bytes, budget_bytes)
    if room.is_reserved:
        yield _in_room(profile, program, room)
    if plan is not None:
        yield f"This is with the plan; without it, the peak is {format_bytes(profile.peak_bytes)}."
    yield peak_in_words(profile, program)
    outcome = outcome_of(Request(limit), profile, looks_further=True)
    if outcome.plan is None:
        yield f"No plan helps: {outcome.error}"
    else:
        fitting = outcome.plan
        yield (
            f"sacplan.plan finds a plan that holds it: peak {format_bytes(fitting.peak_bytes)}, and the step takes "
            f"{fitting.recompute_ms + fitting.added_ms:.3g} ms more."
        )


def _in_room(profile: Profile, program: Program, room: Room) -> str:
    """Say what takes up the memory of the GPU, for a step without a budget."""
    spec, reserved = profile.spec, reserved_bytes(program)
    expandable = reserved_bytes(program, expandable=True)
    helps = ""
    if expandable <= room.n_bytes < reserved:
        helps = f" With {EXPANDABLE_SEGMENTS} it reserves {format_bytes(expandable)}, which fits."
    return (
        f"No budget was given, so the step must fit {spec.name}, which has {format_bytes(spec.memory_bytes)}: outside "
        f"of torch's allocator there is {outside_text(room.outside)}, and the allocator reserves "
        f"{format_bytes(reserved)} (max_memory_reserved), {format_bytes(beyond_peak_bytes(program))} more than the "
        f"peak.{helps}"
    )


def _verdict(profile: Profile, peak: int, budget_bytes: int) -> Iterator[str]:
    rank = " on each rank" if profile.ranks.devices > 1 else ""
    yield (
        f"the step of {profile.fingerprint.model_class} takes {format_bytes(peak)}{rank} on {profile.device}: "
        f"{format_difference(peak, budget_bytes)} over the budget of {format_bytes(budget_bytes)} ({peak} bytes "
        f"against {budget_bytes})."
    )
    yield f"Batch: {profile.fingerprint.batch_in_words}. Recorded with {profile.fingerprint.setup}."
    yield from (f"Note: {sentence}." for sentence in profile.assumptions)


def _lines(paragraphs: Iterable[str]) -> str:
    """Return the paragraphs as one text, wrapped at ``_WIDTH``."""
    return "\n".join(
        line for text in paragraphs for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
    )
