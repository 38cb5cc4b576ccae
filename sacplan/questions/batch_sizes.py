"""Batch sizes, tried one by one: each takes a trace and a plan. The search finds the largest one that fits.

    sizes = BatchSizes(model, make_batch, limit, spec, ...)
    unplanned, planned = sizes.edges()

The largest size that fits is found by lines through known peaks and by bisection (``largest.py``). A trace and a plan
take seconds to minutes, so two things save planning:

- A size whose floor (``Liveness.floor_bytes``, a peak that no plan goes below) is above the budget is ruled out.
- The next guess needs the smallest peak of a size, which is known only if planning failed. Else it is estimated as the
  floor times the last known ratio of smallest peak to floor. Only guesses depend on this: reported sizes were planned.

Nothing is assumed about sizes that were not tried: a model may need less memory from some size on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader

from sacplan.core.budget import format_bytes
from sacplan.core.derived import derived
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.pins import resolve_pins
from sacplan.device.devices import DeviceSpec
from sacplan.errors import InfeasibleBudget, PlanError, TraceError
from sacplan.planning.make import Outcome, outcome_of
from sacplan.planning.request import Request
from sacplan.profiling.profile import Profile
from sacplan.profiling.tracing import profile
from sacplan.questions.largest import largest
from sacplan.questions.sweep import Row
from sacplan.record.longest import LongestBatch, is_loader
from sacplan.record.step import resolve_batch
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.chunk.entries import loss_chunks
from sacplan.techniques.registry import TECHNIQUES

_SECOND = 8  # the size to try after 1: far enough from 1 for a slope, small enough to be quick
_MOST = 2**20  # if this many samples still fit, memory does not depend on the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPoint(Row):
    """One batch size that was tried.

    Attributes:
        batch_size: Samples in the batch.
        floor_bytes: No plan has a lower peak, except one that runs more than the loss in slices. For a compiled step,
            the bytes that are alive at its end.
        step_ms: With accumulation, time of the last micro-step with the optimizer's step.
        spared_ms: Part of ``step_ms`` that an average micro-step does not have: most of the optimizer's step.
    """

    shown: ClassVar = (
        "batch_size", "feasible", "unplanned_peak_bytes", "floor_bytes", "peak_bytes", "step_ms", "recompute_ms",
        "added_ms", "samples_per_s",
    )  # fmt: skip

    batch_size: int
    floor_bytes: int
    spared_ms: float = 0.0

    @property
    def feasible(self) -> bool:
        """Whether a plan holds the budget."""
        return self.fits

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second; None if no plan holds the budget."""
        return self.batch_size / (self.step_ms - self.spared_ms) * 1e3 if self.step_ms else None


@dataclass(frozen=True, slots=True)
class Recordings:
    """How a step is recorded at any size.

    Attributes:
        model: The model.
        make_batch: Makes a batch from its sizes: samples, or samples and tokens.
        spec: The device.
        options: Further arguments of ``profile``.
    """

    model: torch.nn.Module
    make_batch: Callable[..., Any]
    spec: DeviceSpec
    options: Mapping[str, Any]

    def at(self, *sizes: int | None, **more: Any) -> Profile:
        """Record the step at a size; a size that is None is not passed on. ``more`` wins over ``options``."""
        given = [size for size in sizes if size is not None]

        def batch() -> Any:
            # Made only inside of ``profile``, which restores the random number generators.
            return resolve_batch(self.make_batch(*given))

        try:
            return profile(self.model, batch, device=self.spec, **{**self.options, **more})
        except torch.OutOfMemoryError as error:
            raise TraceError(
                f"a real step with a batch of {given[0]} ran out of memory here. A real trace runs without a plan, so "
                'it cannot look at sizes that only fit with one: use trace="fake", or a smaller at_most or budget.'
            ) from error


@dataclass(slots=True)
class BatchSizes:
    """Tries batch sizes, each once, and remembers the results.

    Raises:
        InfeasibleBudget: One sample does not fit.
        PlanError: ``make_batch`` makes batches of the same size whatever it is asked for.
    """

    recordings: Recordings
    request: Request
    at_most: int | None = None
    progress: Callable[[CapacityPoint, str], None] | None = None
    points: dict[int, CapacityPoint] = field(default_factory=dict)
    above_base: float = 1.0
    """Ratio of the smallest peak to ``_base``, from the last size at which planning failed."""
    _base: dict[int, int] = field(default_factory=dict)  # by size, its floor; its peak for a compiled step
    _excess: dict[int, int] = field(default_factory=dict)  # by size, of the unplanned step over its limit

    def __post_init__(self) -> None:
        # Two sizes give the search its first line.
        self.look(1)
        if self.most > 1:
            self.look(min(_SECOND, self.most))

    @property
    def most(self) -> int:
        """The largest size to try."""
        return _MOST if self.at_most is None else self.at_most

    @property
    def spec(self) -> DeviceSpec:
        """The device."""
        return self.recordings.spec

    @property
    def budget_bytes(self) -> int:
        """The limit for the peak; without a budget, what the allocator of the GPU may reserve."""
        return self.request.limit.room(self.spec).n_bytes

    # --- one size -----------------------------------------------------------------------------

    def look(self, n: int) -> CapacityPoint:
        """Trace a batch of n, and plan it unless no plan can hold the budget."""
        if n in self.points:  # tried before
            return self.points[n]
        traced = self.recordings.at(n)
        one = self.points[1].plan if 1 in self.points else None
        if one is not None and n >= min(_SECOND, self.most):
            check_batches_differ((1, n), (one.fingerprint, traced.fingerprint))
        may_chunk = "chunk" in (self.request.techniques or ())
        floor = _floor_bytes(traced, self.request.techniques or ())
        self._base[n] = traced.peak_bytes if traced.runs_compiled else floor
        # With chunks, a plan may go below the floor. One sample is always planned: if it does not fit, the error names
        # the smallest peak, and what would help.
        if floor <= self.budget_bytes or may_chunk or n == 1:
            outcome = outcome_of(self.request, traced, looks_further=n == 1)
            if outcome.error is not None:
                if n == 1:
                    raise self._nothing_fits(outcome.error) from outcome.error
                # Only a failed search reports the smallest peak: a plan that fits uses the budget up.
                self.above_base = outcome.peak_bytes / self._base[n]
            taken = Row.taken(outcome)
        else:  # no plan can hold the budget, so the smallest peak is not searched for
            taken = Row.taken(Outcome(traced, None, floor)) | {"peak_bytes": None}
        # The optimizer steps once for all micro-batches, but the recorded micro-step has all of this step.
        spared_ms = traced.update_ms * (1 - 1 / traced.fingerprint.setup.accumulation_steps)
        point = CapacityPoint(batch_size=n, floor_bytes=floor, spared_ms=spared_ms, **taken)
        self.points[n] = point
        # The limit depends on the program: on a GPU, what is reserved beyond the peak counts as well.
        self._excess[n] = traced.peak_bytes - self.request.limit.room_of(traced).for_peak(traced.program)
        if self.progress is not None:
            self.progress(point, f"batch {n} {'fits' if point.fits else 'does not fit'}")
        return point

    def _nothing_fits(self, error: InfeasibleBudget) -> InfeasibleBudget:
        return InfeasibleBudget(
            f"not even a batch of one sample fits on {self.spec.name}: {error} The device has "
            f"{format_bytes(self.spec.memory_bytes)}.",
            budget_bytes=self.budget_bytes,
            smallest_feasible_bytes=error.smallest_feasible_bytes,
            binding=error.binding,
        )

    # --- edges --------------------------------------------------------------------------------

    def edges(self) -> tuple[int, int]:
        """Return the largest size that fits without a plan, or 0, and the largest size that fits with one."""
        looked = -1
        # Each search may learn from sizes that the other one tried, so repeat until neither tries a new one.
        while looked != len(self.points):
            looked = len(self.points)
            unplanned = self._largest(self._unplanned_excess, lambda p: self._unplanned_excess(p) <= 0)
            planned = self._largest(lambda p: self._smallest_peak(p) - self.budget_bytes, lambda p: p.fits)
        if planned == _MOST and self.at_most is None:
            raise PlanError(
                f"a batch of {_MOST} still fits in {format_bytes(self.budget_bytes)}: does the model's memory depend "
                "on the batch at all? Give at_most to say how large it may get."
            )
        return unplanned, planned

    def _largest(
        self, excess: Callable[[CapacityPoint], float], fits: Callable[[CapacityPoint], bool]
    ) -> int:
        return largest(self.points, self.look, self.most, fits, excess)

    def _unplanned_excess(self, point: CapacityPoint) -> int:
        return self._excess[point.batch_size]

    def _smallest_peak(self, point: CapacityPoint) -> float:
        """Return the smallest peak of a size, or an estimate.

        The peak of a plan that fits is no estimate: the plan uses the budget up, whatever the size.
        """
        if not point.fits and point.peak_bytes is not None:  # planning failed, and reported the smallest peak
            return point.peak_bytes
        return self._base[point.batch_size] * self.above_base

    # --- the fastest --------------------------------------------------------------------------

    @property
    def fastest(self) -> int:
        """The size with the most samples per second. On a tie, the smaller one."""
        return max(self._planned, key=lambda n: (self.points[n].samples_per_s or 0.0, -n))

    @property
    def _planned(self) -> list[int]:
        return [n for n, point in self.points.items() if point.fits]

    def refine(self, looks: int) -> None:
        """Try sizes around the fastest one: halve the wider gap to its neighbours, at most ``looks`` times.

        This finds the best size only if samples per second rise and then fall. Rounding to tiles and kernels that
        change with the size may break that.
        """
        for _ in range(looks):
            best = self.fastest
            below = max((n for n in self._planned if n < best), default=best)
            above = min((n for n in self._planned if n > best), default=best)
            gaps = ((best - below, (below + best) // 2), (above - best, (best + above) // 2))
            # Neighbours one apart have no size between them: the middle is one of the two, and has been tried.
            middles = [(gap, n) for gap, n in gaps if n not in self.points]
            if not middles:  # both neighbours of the fastest have been tried
                return
            self.look(max(middles)[1])


def batches_of(make_batch: Callable[..., Any] | DataLoader[Any]) -> Callable[..., Any]:
    """Return the function that makes a batch of a size: the user's, or ``LongestBatch`` of a ``DataLoader``.

    Raises:
        PlanError: ``make_batch`` is neither.
    """
    if is_loader(make_batch):
        return LongestBatch(make_batch)
    # A module is callable as well, but is the model given in the wrong place.
    if not callable(make_batch) or isinstance(make_batch, torch.nn.Module):
        raise PlanError(
            f"make_batch must be a function of the batch size, not {type(make_batch).__name__}. For example "
            "make_batch=lambda n: torch.zeros(n, 1024, dtype=torch.long)."
        )
    return make_batch


def check_batches_differ(sizes: tuple[object, object], made: tuple[Fingerprint, Fingerprint]) -> None:
    """Raise ``PlanError`` if the batches of two sizes have the same shapes."""
    if made[0].batch == made[1].batch:
        shapes = ", ".join(str(shape) for _, shape, _ in made[0].batch)
        raise PlanError(
            f"make_batch gave batches of the same shapes for sizes {sizes[0]} and {sizes[1]}: {shapes}. It must make a "
            "batch of the size that it is asked for, for example lambda n: torch.zeros(n, 1024, dtype=torch.long), or "
            "lambda n, seq: torch.zeros(n, seq, dtype=torch.long)."
        )


@derived
def leaving_bytes(step: Profile, techniques: tuple[str, ...]) -> int:
    """Return the bytes of the parameters that plans with these techniques may leave on the host."""
    pins = resolve_pins(step.program, step.fingerprint, (), ())
    planned = PlanStep(step.program, pins=pins, device=step.spec, gradients=step.mode == "train")
    return sum(TECHNIQUES[name].leaving_bytes(planned) for name in techniques)


def _floor_bytes(traced: Profile, techniques: Collection[str]) -> int:
    """Return a lower bound on the peak of every plan. It does not hold for plans that slice ops outside the loss."""
    if traced.runs_compiled:  # a plan changes the compiled ops, so only what is alive at the end is a bound
        return traced.baseline.end_bytes
    programs = [traced.program]
    if "chunk" in techniques:
        # The last chunk has the most slices, so the least is alive at once.
        chunks = loss_chunks(traced.program, traced.spec).chunks
        programs += [traced.with_plan((chunk,)) for chunk in chunks[-1:]]
    leaving = leaving_bytes(traced, tuple(techniques))
    return max(1, min(program.liveness.floor_bytes for program in programs) - leaving)
