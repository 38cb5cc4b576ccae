"""``verify``: run one step with the plan applied, and report its peak and its recomputation."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from sacplan.core.arguments import checked, opened
from sacplan.core.budget import format_bytes
from sacplan.core.call_sites import StepDifference
from sacplan.core.program import Program
from sacplan.core.sections import Section
from sacplan.core.setup import SetupDifference, current_autocast, warn_of
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.errors import PlanError, SumOfOutputsWarning
from sacplan.planning.limits import OF_DEVICE
from sacplan.planning.plan import Plan, PlanOrPath
from sacplan.profiling.remarks import adamw_state_bytes, summed_outputs, without_optimizer
from sacplan.profiling.tracing import StepRequest, check_runs_here, trace_step
from sacplan.record.compiled import really_compiled
from sacplan.record.limits import explained_limits
from sacplan.record.state import held_by_function, preserved_rng, preserved_state
from sacplan.record.step import (
    LossFn,
    Step,
    check_accumulation,
    check_model,
    each_optimizer,
    inner_optimizer,
    loss_or_default,
    optimizer_over,
    resolve_batch,
)
from sacplan.running.apply import Handle, put_on
from sacplan.running.measure import measured_step
from sacplan.torch_compat.compiling import compiled_in_place
from sacplan.torch_compat.distributed_modules import unwrapped

_IN_ONE_MEMORY = (
    "a CPU has one memory: what waits on the host is in the peak and in the budget. Predicted is the sum of both "
    "peaks, which the step reaches only if both are at the same time"
)


@dataclass(frozen=True, slots=True)
class Verification:
    """Peak, time and recomputation of a step with the plan applied.

    Attributes:
        peak_bytes: of the whole step; traced (``run="fake"``) or measured (``run="real"``).
        predicted_peak_bytes: the plan's own figure.
        budget_bytes: the limit for the peak that the plan was made for. For a plan without one, the peak that the
            device has room for: see ``sacplan.plan``. On a GPU, the segments that the allocator reserves beyond the
            peak are taken off (fake steps), and so is what lies outside of the allocator.
        recompute_flops: floating-point operations of what ran again.
        step_ms: predicted time with the plan (fake), or wall time of the measured step (real). A fake step counts
            copies to the host as kernels and knows of no waits for them; with offloading, the plan has the time.
        run: "fake" or "real".
        source: where the peak comes from.
        assumptions: assumptions behind the figures, see ``Profile.assumptions``.
        differences: where the step differed from the one that the plan was made for, see ``Handle.differences``.
        setup_differences: where the setup differs from that of the planned step: cache, attention, dropout, modes,
            loss, optimizer, autocast.
        requested_bytes: on CUDA the peak as the sum of tensors, which is what a budget bounds, by the allocator's
            ``requested_bytes``; ``peak_bytes`` is that of blocks, which may be larger than their tensors. Else None.
        predicted_host_bytes: the plan's own figure for the memory of the host, ``Plan.host_bytes``.
        host_bytes: the most that the step had on the host (fake); None for a measured step. A CPU has one memory, so
            on a CPU what waits on the host is in the peak, the predicted peak and the budget, see ``assumptions``.
    """

    peak_bytes: int
    predicted_peak_bytes: int
    budget_bytes: int
    recompute_flops: int
    step_ms: float
    run: str
    source: str
    differences: tuple[StepDifference, ...] = ()
    assumptions: tuple[str, ...] = ()
    setup_differences: tuple[SetupDifference, ...] = ()
    predicted_host_bytes: int = 0
    host_bytes: int | None = None
    requested_bytes: int | None = None

    @property
    def tensor_bytes(self) -> int:
        """The peak as the sum of tensors."""
        return self.peak_bytes if self.requested_bytes is None else self.requested_bytes

    @property
    def within_budget(self) -> bool:
        """Whether the peak, as the sum of tensors, is at most the budget."""
        return self.tensor_bytes <= self.budget_bytes

    @property
    def error(self) -> float:
        """Predicted over observed peak, as the sum of tensors, minus one."""
        return self.predicted_peak_bytes / self.tensor_bytes - 1

    @property
    def host_text(self) -> str:
        """The memory of the host in words, planned and seen."""
        seen = "in the peak" if self.host_bytes is None else f"{format_bytes(self.host_bytes)} seen"
        return f"{format_bytes(self.predicted_host_bytes)} planned, {seen}"

    @property
    def _tensors_text(self) -> str:
        return "" if self.requested_bytes is None else f"; tensors {format_bytes(self.requested_bytes)}"

    def in_words(self) -> Section:
        """Return the verdict and its figures, for people."""
        rows = [
            ("budget", format_bytes(self.budget_bytes)),
            ("planned", format_bytes(self.predicted_peak_bytes)),
            ("seen", f"{format_bytes(self.peak_bytes)}, {self.source}{self._tensors_text}"),
            *([("on the host", self.host_text)] if self.predicted_host_bytes else []),
            ("difference", f"{self.error:+.3%}, planned against seen"),
            ("recompute", f"{self.recompute_flops / 1e9:.2f} GFLOP"),
            ("step", f"{self.step_ms:.2f} ms ({'wall time' if self.run == 'real' else 'predicted'})"),
            *(("not as planned", str(difference)) for difference in self.differences[:3]),
            *(("set up otherwise", str(difference)) for difference in self.setup_differences),
            *(("assumed", sentence) for sentence in self.assumptions),
        ]
        verdict = "Within the budget" if self.within_budget else "OVER the budget"
        return Section(verdict, tuple(rows))

    def __repr__(self) -> str:
        return (
            f"Verification({'within' if self.within_budget else 'OVER'} budget {format_bytes(self.budget_bytes)}: peak "
            f"{format_bytes(self.peak_bytes)} ({self.source}{self._tensors_text}), "
            f"predicted {format_bytes(self.predicted_peak_bytes)} "
            f"({self.error:+.2%}), recompute {self.recompute_flops / 1e9:.2f} GFLOP, step {self.step_ms:.2f} ms"
            + (f", on the host {self.host_text}" if self.predicted_host_bytes else "")
            + "".join(f"; not the step planned for: {found}" for found in self.differences[:1])
            + "".join(f"; set up otherwise: {found}" for found in self.setup_differences)
            + ")"
        )


@checked(PlanError, "model", "batch", "optimizer")
def verify(
    model: torch.nn.Module,
    batch: Any,
    plan: PlanOrPath,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    run: Literal["fake", "real"] = "fake",
    *,
    accumulation_steps: int | None = None,
) -> Verification:
    """Run one step with the plan applied; afterwards the model is as it was.

    Args:
        model, batch, loss_fn, optimizer: as given to ``profile``.
        plan: must not be applied to the model already.
        run: ``"fake"`` runs a fake step with the kernels of the plan's device; no hardware is needed.
            ``"real"`` runs on the model's own tensors and measures: ``torch.cuda.max_memory_allocated`` on CUDA,
            the profiler's allocation events plus what was alive before on a CPU.
        accumulation_steps: as for ``profile``; by default those that were planned for.

    Raises:
        PlanMismatch: the model or the batch is not the one planned for.
        PlanError: unknown ``run``, or ``run="real"`` for a plan of one of several ranks.

    Warns:
        SacplanWarning: the step is set up so that it may take more than planned, see ``setup_differences``.
        SumOfOutputsWarning: the step trains the sum of the outputs, for want of a loss, as the one planned for did.
    """
    plan = opened(plan, Plan)
    if run not in ("fake", "real"):
        raise PlanError(f"unknown run {run!r}; known are 'fake' and 'real'.")
    check_model(model)
    # The model is checked before the batch is made, which may be a callable that takes long.
    plan.fingerprint.check_model(model)
    # A batch that is given as a callable may draw random numbers.
    with preserved_rng():
        batch = resolve_batch(batch)
    plan.fingerprint.check_batch(batch)
    # A fake step can be that of one rank; a real step would need all of them.
    if run == "real" and plan.ranks.devices > 1:
        raise PlanError(
            f"this plan is for one of {plan.ranks.devices} ranks, and run='real' would run the whole model here. "
            "Use run='fake', which runs the step of one rank."
        )
    run_step = _verify_fake if run == "fake" else _verify_real
    if accumulation_steps is None:
        accumulation_steps = plan.fingerprint.setup.accumulation_steps
    with compiled_in_place(model) as model:
        seen = run_step(model, batch, plan, loss_fn, optimizer, accumulation_steps)
    warn_of(seen.setup_differences, stacklevel=3)
    # With another loss than planned, the warning above has said so.
    if all(difference.what != "loss" for difference in seen.setup_differences):
        for said in filter(None, [summed_outputs(plan.fingerprint.setup)]):
            warnings.warn(f"{said}.", SumOfOutputsWarning, stacklevel=3)
    return seen


def _verify_fake(
    model: torch.nn.Module, batch: Any, plan: Plan, loss_fn: LossFn | None, optimizer: Any, steps: int
) -> Verification:
    handles: list[Handle] = []

    def applied(copy: torch.nn.Module) -> Handle:
        handles.append(put_on(unwrapped(copy), plan, spread=False))
        return handles[0]

    seen = trace_step(StepRequest(
        model, batch, loss_fn, optimizer, plan.device, "cost-model", "fake",
        mode=plan.provenance.mode, prepare=applied,
        saved="observe", ranks=plan.ranks, accumulation_steps=steps,
        routing=plan.fingerprint.setup.routing, compiled=plan.fingerprint.setup.compiled,
    ))  # fmt: skip
    return Verification(
        peak_bytes=seen.peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        budget_bytes=_budget_of(plan, seen.spec, seen.program),
        recompute_flops=seen.program.flops - plan.step_flops,
        step_ms=seen.step_ms,
        run="fake",
        source="fake step",
        differences=handles[0].differences,
        assumptions=seen.assumptions,
        setup_differences=plan.fingerprint.setup.differences(seen.fingerprint.setup),
        predicted_host_bytes=plan.host_bytes,
        host_bytes=seen.program.footprint.host_peak_bytes,
    )


def _verify_real(
    model: torch.nn.Module, batch: Any, plan: Plan, loss_fn: LossFn | None, optimizer: Any, steps: int
) -> Verification:
    first = next((t for t in (*model.parameters(), *model.buffers())), None)
    here = first.device.type if first is not None else "cpu"
    spec = resolve_device("cuda" if here == "cuda" else "cpu")
    # The device is where the model is, not that of the plan: the step runs on the model's own tensors.
    check_runs_here(model, spec, 'run="real"')
    optimizer = each_optimizer(optimizer, lambda one: optimizer_over(inner_optimizer(one), model))
    mode = plan.provenance.mode
    check_accumulation(steps)
    step = Step(model, batch, loss_or_default(loss_fn, mode), optimizer, mode, steps)
    held = (*held_by_function(loss_fn), *step.stepped_inside)
    with explained_limits(), preserved_state(model, optimizer, batch, *held):
        tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
        # Three runs: FLOPs without the plan, the peak with it, FLOPs with it. The difference of FLOPs is the
        # recomputation. The first run also finds the tensors that the loss function holds; they must count in
        # the peak.
        # Under the mode that counts FLOPs nothing runs compiled: for a compiled step, the plan's figure is reported.
        compiled = plan.fingerprint.setup.compiled
        unplanned = measured_step(step, tensors, count_flops=True)
        with put_on(model, plan) as handle:
            with really_compiled(model, compiled, step):
                seen = measured_step(step, tensors, read=unplanned.read)
            # Read before the run that counts FLOPs, so that they are those of the measured steps.
            differences = handle.differences
            recompute_flops = plan.recompute_flops
            if compiled is None:
                recompute_flops = measured_step(step, tensors, count_flops=True).flops - unplanned.flops
        # After the runs, and with the model still as it trains: ``preserved_state`` is about to restore it.
        setup = step.setup(current_autocast(here))
    host_in_peak = plan.host_bytes if here == "cpu" else 0
    return Verification(
        peak_bytes=seen.peak_bytes,
        predicted_peak_bytes=plan.peak_bytes + host_in_peak,
        budget_bytes=_budget_of(plan, spec) + host_in_peak,
        recompute_flops=recompute_flops,
        step_ms=seen.wall_ms,
        run="real",
        source=seen.source,
        differences=differences,
        assumptions=(
            *plan.provenance.assumed,
            *([_IN_ONE_MEMORY] if host_in_peak else []),
            *filter(None, [summed_outputs(setup)]),
            *(
                []
                if setup.optimizer is not None or mode == "inference"
                else [_without_optimizer(model, spec)]
            ),
        ),
        setup_differences=plan.fingerprint.setup.differences(setup),
        predicted_host_bytes=plan.host_bytes,
        requested_bytes=seen.requested_bytes,
    )


def _without_optimizer(model: torch.nn.Module, spec: DeviceSpec) -> str:
    trained = (p.nbytes for p in model.parameters() if p.requires_grad)
    return without_optimizer(adamw_state_bytes(trained, spec))


def _budget_of(plan: Plan, spec: DeviceSpec, program: Program | None = None) -> int:
    """Return the plan's budget; for a plan without one, the peak that the device has room for.

    ``program`` is the traced step with the plan. A measured step has none: what was reserved is that of all its runs.
    """
    if plan.budget_bytes is not None:
        return plan.budget_bytes
    room = OF_DEVICE.room(spec, plan.ranks.communicators)
    return room.n_bytes if program is None else room.for_peak(program)
