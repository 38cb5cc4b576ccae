"""Apply a plan while a trainer runs, and check the peaks of its first steps; shared by the callbacks of both trainers.

The sizes of batches are compared in all steps, before each runs (``running/watch.py``). Peaks are measured in the first
ones:

    watch = PeakWatch(plan, steps=2, tolerance=0.05, hint="Plan for what is trained.")
    watch.begin(model, [optimizer])
    ...one training step...
    watch.end()  # warns if the step took more than the plan says

A peak is measured as in ``sacplan.verify(..., run="real")``: the parameters, gradients, optimizer state and batch that
the step found, plus the most that it allocated. Other tensors on the device do not count.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity

from sacplan.core.budget import format_bytes
from sacplan.core.call_sites import StepDifference
from sacplan.core.setup import Setup, optimizer_name, warn_of
from sacplan.device.devices import resolve_device
from sacplan.errors import DeviceError, PlanError, SacplanWarning
from sacplan.planning.plan import Plan, PlanOrPath
from sacplan.record.state import kept_by
from sacplan.record.step import Step, check_model, default_loss, inner_optimizer
from sacplan.running.apply import Handle, opened_plans, put_on_all
from sacplan.running.measure import CUDA_ROUND_BYTES, bytes_alive, drop_cublas_workspaces
from sacplan.torch_compat.allocations import allocation_events, profiler_is_on
from sacplan.torch_compat.host_memory import device_of

_SCALARS_BYTES = 4096
"""Allowance for what a trainer keeps in addition to the step's tensors, such as running losses and norms."""

_BEGIN, _END = "sacplan: a step begins", "sacplan: a step ends"


class PlannedTraining:
    """Plans that are applied to a model from ``_put_on`` to ``_take_off``. A trainer's callback calls these.

    Attributes:
        plans: as ``apply`` takes them; ``plan`` is the one with the largest peak, which no step should exceed.
    """

    _hint: ClassVar[str]

    def __init__(
        self,
        plan: PlanOrPath | Sequence[PlanOrPath],
        *,
        check: bool = True,
        watch_steps: int = 2,
        tolerance: float = 0.05,
    ) -> None:
        self.plans = opened_plans(plan)
        plan = self.plan = max(self.plans, key=lambda planned: planned.peak_bytes)
        self._check = check
        self._watch_steps = watch_steps
        self._tolerance = tolerance
        self._handle: Handle | None = None
        self._to_compare: torch.nn.Module | None = None  # until the first step is over
        self._differences: tuple[StepDifference, ...] = ()
        self._watch = PeakWatch(plan, watch_steps, tolerance, self._hint)

    @property
    def peaks_bytes(self) -> tuple[int, ...]:
        """Measured peaks in the first steps of the last run."""
        return tuple(self._watch.peaks_bytes)

    @property
    def differences(self) -> tuple[StepDifference, ...]:
        """Where the steps of the last run differed from those planned for, see ``Handle.differences``."""
        return self._differences if self._handle is None else self._handle.differences

    def _put_on(self, model: torch.nn.Module, *, batches: int = 1) -> None:
        """Apply the plan, and watch the first steps. Each of the ``batches`` of a step is measured on its own."""
        check_model(model)
        self._handle = put_on_all(model, self.plans, check=self._check)
        warn_of(self.plan.fingerprint.setup.model_differences(Setup.of(model)), stacklevel=4)
        self._to_compare = model
        # A new watch for each run: one that has stopped does not start again.
        self._watch = PeakWatch(self.plan, self._watch_steps * batches, self._tolerance, self._hint)

    def _compare(self, optimizers: Iterable[Any]) -> None:
        """Warn if the modes of modules or the optimizer are not as planned.

        Called after each step, but compares after the first only: before that step, modules may be in other modes.
        """
        # Setting it to None makes this work once in a run.
        model, self._to_compare = self._to_compare, None
        if model is None:
            return
        planned = self.plan.fingerprint.setup
        differences = list(planned.mode_differences(Setup.of(model)))
        names = [optimizer_name(inner_optimizer(optimizer)) for optimizer in optimizers]
        # With several optimizers there is no single name to compare with the planned one.
        if len(names) == 1:
            differences.extend(planned.optimizer_difference(names[0]))
        warn_of(differences, stacklevel=3)

    def _take_off(self) -> None:
        """Remove the plan. A run that failed leaves it on, so this is called before the next one, too."""
        self._to_compare = None
        # The watch first: it may hold a running profiler, of which there can be only one in the process.
        self._watch.stop()
        handle, self._handle = self._handle, None
        # None if nothing was applied, or if it was removed already.
        if handle is not None:
            self._differences = handle.differences
            handle.remove()


class PeakWatch:
    """Measure the first steps of a run, and warn if one exceeds the plan's prediction or budget.

    On CUDA a watched step costs a reset of the allocator's peak. On a CPU ``torch.profiler`` runs from the first
    watched step to the last, and the peaks are known at the end.

    Args:
        plan: the plan that is on the model.
        steps: how many steps to measure; 0 for none. The first step creates the optimizer's state, so the second is
            the first complete one.
        tolerance: by how much a step may exceed the predicted peak, as a share of it. The budget has no tolerance.
        hint: a sentence on what to do about a peak that was not predicted.

    Attributes:
        peaks_bytes: peaks of the steps measured so far.
    """

    def __init__(self, plan: Plan, steps: int, tolerance: float, hint: str) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise PlanError(f"watch_steps must be a number of steps, 0 or more, not {steps!r}.")
        if not 0 <= tolerance < float("inf"):
            raise PlanError(f"tolerance must be a share of the predicted peak, 0 or more, not {tolerance!r}.")
        self.peaks_bytes: list[int] = []
        self._plan = plan
        self._left = steps
        self._tolerance = tolerance
        self._hint = hint
        self._meter: _OnCpu | _OnCuda | None = None
        self._running = False
        self._warned = False

    def begin(
        self, model: torch.nn.Module, optimizers: Iterable[Any], batch: Iterable[torch.Tensor] | None = None
    ) -> None:
        """Begin a step. Without the batch, its size is taken from the plan."""
        # In case the trainer did not report the end of the step before.
        if self._running:
            self.end()
        # Nothing is left to measure, or nothing ever was (``steps=0``).
        if not self._left:
            return
        device = device_of(model)
        if self._meter is None:
            # A run that cannot be measured stays so: later steps do not try (and do not warn) again.
            if not self._can_measure(device.type):
                self._left = 0
                return
            self._meter = _OnCuda(device) if device.type == "cuda" else _OnCpu()
        own_bytes = bytes_alive(
            Step(model, None, default_loss, None),
            [*(batch or ()), *(t for o in optimizers for t in kept_by(inner_optimizer(o)))],
            round_bytes=self._meter.round_bytes,
        )
        # The Trainer's callbacks do not see the batches of a step, so those planned for stand in.
        if batch is None:
            own_bytes += _bytes_of_planned_batch(self._plan)
        self._left -= 1
        self._running = True
        self._meter.begin(own_bytes)

    def end(self) -> None:
        """End the step. ``SacplanWarning`` if it took more than it should have."""
        if self._meter is None or not self._running:
            return
        self._running = False
        self._judge(self._meter.end())
        # On a CPU peaks are known only when the profiler stops, so it stops after the last step.
        if not self._left:
            self.finish()

    def finish(self) -> None:
        """Stop measuring, and judge the steps that were not judged yet."""
        self._judge(self.stop())

    def stop(self) -> list[int]:
        """Stop measuring, and return the peaks that were not judged yet; a step that failed has none."""
        # Also sets the counters, so that a step that is still running is not measured any more.
        meter, self._meter = self._meter, None
        self._left, self._running = 0, False
        return [] if meter is None else meter.finish()

    def _can_measure(self, kind: str) -> bool:
        planned = _kind_of(self._plan.device)
        # Another allocator and other kernels: a comparison would warn without a reason.
        if planned != kind:
            self._warn(
                f"the plan was made for {self._plan.device}, but this step runs on {kind}: its peak there is not what "
                f'was predicted, and is not checked. Plan with device="{kind}" to have it checked, or pass '
                "watch_steps=0."
            )
            return False
        if kind == "cpu" and profiler_is_on():
            self._warn(
                "a profiler is on already, and there can be only one: the peaks of the first steps, which come from a "
                "profiler's allocation events, are not checked. Pass watch_steps=0 to skip the check."
            )
            return False
        return True

    def _judge(self, peaks_bytes: Iterable[int]) -> None:
        plan = self._plan
        for peak_bytes in peaks_bytes:
            self.peaks_bytes.append(peak_bytes)
            over_prediction = peak_bytes > plan.peak_bytes * (1 + self._tolerance)
            # A plan may just fit its budget, and a trainer's own scalars are in the measured peak.
            over_budget = plan.budget_bytes is not None and peak_bytes > plan.budget_bytes + _SCALARS_BYTES
            # One warning for a run; all peaks are kept.
            if self._warned or not (over_prediction or over_budget):
                continue
            self._warned = True
            budget = "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
            self._warn(
                f"step {len(self.peaks_bytes)} took {format_bytes(peak_bytes)} at its peak, "
                f"{peak_bytes / plan.peak_bytes - 1:+.1%} from the {format_bytes(plan.peak_bytes)} that its plan "
                f"predicts ({budget}). The plan was made for a batch of {plan.fingerprint.batch_in_words}. {self._hint}"
                + "".join(f" Assumed was: {sentence}." for sentence in plan.provenance.assumed)
            )

    def _warn(self, message: str) -> None:
        warnings.warn(message, SacplanWarning, stacklevel=4)


class _OnCpu:
    """Measure steps by the allocation events of one ``torch.profiler``, which runs from the first step to the last.

    A profiler of its own for each step would miss when memory of an earlier step, such as gradients, is freed.
    """

    round_bytes = 1

    def __init__(self) -> None:
        self._own_bytes: list[int] = []
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.start()
        # A step that raises never ends, and not every trainer says so; the profiler must not outlive the watch.
        self._stop = weakref.finalize(self, self._profiler.stop)

    def begin(self, own_bytes: int) -> None:
        self._own_bytes.append(own_bytes)
        with torch.profiler.record_function(_BEGIN):
            pass

    def end(self) -> list[int]:
        with torch.profiler.record_function(_END):
            pass
        return []

    def finish(self) -> list[int]:
        self._stop()
        # ``zip`` leaves out a step that began and did not end: it has no rise.
        return [own + rise for own, rise in zip(self._own_bytes, _rises(self._profiler), strict=False)]


class _OnCuda:
    """Measure steps by the counter of the CUDA allocator."""

    round_bytes = CUDA_ROUND_BYTES

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own_bytes = self._before_bytes = 0

    def begin(self, own_bytes: int) -> None:
        torch.cuda.synchronize(self._device)
        # The planned step allocates its own workspace, so the measured one must, too.
        drop_cublas_workspaces()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._own_bytes, self._before_bytes = own_bytes, torch.cuda.memory_allocated(self._device)

    def end(self) -> list[int]:
        return [torch.cuda.max_memory_allocated(self._device) - self._before_bytes + self._own_bytes]

    def finish(self) -> list[int]:
        return []


def _rises(profiler: torch.profiler.profile) -> list[int]:
    """Return by how many bytes the peak of each finished step exceeds what was allocated when it began."""
    rises: list[int] = []
    live = peak = before = 0
    for event in allocation_events(profiler, (_BEGIN, _END)):
        # ``live`` goes on from step to step, as the profiler sees the whole run: what a step frees of the one
        # before counts as freed. The rise of a step is its peak over the value at its beginning.
        if event == _BEGIN:
            peak = before = live
        elif event == _END:
            rises.append(peak - before)
        else:
            assert isinstance(event, int)
            live += event
            peak = max(peak, live)
    return rises


def _kind_of(device: str) -> str:
    try:
        return resolve_device(device).kind
    except DeviceError:
        return "cuda"  # a DeviceSpec of the user's own, taken to be a GPU


def _bytes_of_planned_batch(plan: Plan) -> int:
    return sum(
        prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize
        for _, shape, dtype in plan.fingerprint.batch
    )
