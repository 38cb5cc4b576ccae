"""Batch sizes, looked at one by one: a trace and a plan for each, and where they stop fitting.

    sizes = BatchSizes(model, make_batch, budget_bytes, spec, ...)
    unplanned, planned = sizes.edges()

Peaks grow nearly in a line with the batch, so a line through two sizes says where to look next. Where that leads
nowhere, every other look halves what is left. What is under the floor of a step (``Liveness.floor_bytes``) needs no
planning to be ruled out; the floor times the last known ratio of smallest peak to floor stands in for the smallest peak
where that was not searched for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sacplan._chunk.entries import ChunkOptions, loss_chunks
from sacplan._device.devices import DeviceSpec
from sacplan._plan.plan import Plan
from sacplan._plan.planning import plan
from sacplan._profile.profile import Profile
from sacplan._profile.tracing import Trace, profile
from sacplan._program.budget import format_bytes
from sacplan._program.fingerprint import Fingerprint
from sacplan._record.step import LossFn, resolve_batch
from sacplan._solve.solvers import Solver
from sacplan.errors import InfeasibleBudget, PlanError, TraceError

_SECOND = 8  # the size looked at after one: far enough for a slope, small enough to be quick
_MOST = 2**20  # samples; what still fits then does not depend on the batch
_GROWTH = 16  # times the largest size that fits, at most, to look at next
_PATIENCE = 3  # looks along lines, before every other look halves the bracket


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """One batch size that was looked at.

    Attributes:
        batch_size: samples in the batch.
        feasible: whether a plan holds the budget.
        unplanned_peak_bytes: peak of the step without a plan.
        floor_bytes: no plan has a lower peak, unless it runs more than the loss in slices.
        peak_bytes: with the plan. Where none holds: the smallest peak that one was found for, or None where the
            floor is above the budget and none was looked for.
        step_ms: predicted time of the step, recomputation and chunks included; None where no plan holds.
        recompute_ms: what the plan runs a second time; None likewise.
        added_ms: how much longer the step takes besides, for its chunks; None likewise.
        samples_per_s: ``batch_size`` over ``step_ms``; None likewise.
    """

    batch_size: int
    feasible: bool
    unplanned_peak_bytes: int
    floor_bytes: int
    peak_bytes: int | None
    step_ms: float | None
    recompute_ms: float | None
    added_ms: float | None
    samples_per_s: float | None


@dataclass(slots=True)
class BatchSizes:
    """Looks at batch sizes, each once, and remembers what it saw. Arguments: see ``max_batch``.

    Raises:
        InfeasibleBudget: one sample does not fit.
        PlanError: ``make_batch`` does not follow n.
    """

    model: torch.nn.Module
    make_batch: Callable[[int], Any]
    budget_bytes: int
    spec: DeviceSpec
    loss_fn: LossFn | None = None
    optimizer: Any = None
    solver: str | Solver = "best"
    at_most: int | None = None
    trace: Trace = "fake"
    techniques: Sequence[str] | None = None
    progress: Callable[[CapacityPoint, str], None] | None = None
    points: dict[int, CapacityPoint] = field(default_factory=dict)
    plans: dict[int, Plan] = field(default_factory=dict)
    above_floor: float = 1.0
    """Smallest peak found over the floor, where both were last known."""

    def __post_init__(self) -> None:
        self.look(1)
        if self.limit > 1:
            self.look(min(_SECOND, self.limit))

    @property
    def limit(self) -> int:
        """No larger size is looked at."""
        return _MOST if self.at_most is None else self.at_most

    # --- one size -----------------------------------------------------------------------------

    def look(self, n: int) -> CapacityPoint:
        """Trace a batch of n, and plan for it unless no plan can hold."""
        if n in self.points:
            return self.points[n]
        traced = self._profile(n)
        self._check_batch_follows(n, traced.fingerprint)
        may_chunk = "chunk" in (self.techniques or ())
        floor = _floor_bytes(traced, may_chunk)
        found, peak = None, None
        if floor <= self.budget_bytes or may_chunk or n == 1:
            try:
                found = plan(traced, f"{self.budget_bytes}B", self.solver, techniques=self.techniques)
                peak = found.peak_bytes
            except InfeasibleBudget as error:
                if n == 1:
                    raise self._nothing_fits(error) from error
                peak = error.smallest_feasible_bytes
                self.above_floor = peak / floor
        step_ms = None if found is None else found.step_ms + found.recompute_ms + found.added_ms
        point = CapacityPoint(
            batch_size=n,
            feasible=found is not None,
            unplanned_peak_bytes=traced.peak_bytes,
            floor_bytes=floor,
            peak_bytes=peak,
            step_ms=step_ms,
            recompute_ms=None if found is None else found.recompute_ms,
            added_ms=None if found is None else found.added_ms,
            samples_per_s=n / step_ms * 1e3 if step_ms else None,
        )
        self.points[n] = point
        if found is not None:
            self.plans[n] = found
        if self.progress is not None:
            self.progress(point, f"batch {n} {'fits' if point.feasible else 'does not fit'}")
        return point

    def _profile(self, n: int) -> Profile:
        def batch() -> Any:
            return resolve_batch(self.make_batch(n))  # called by profile, which puts the generators back

        try:
            return profile(
                self.model, batch, self.loss_fn, self.optimizer, self.spec, "cost-model", self.trace
            )
        except torch.OutOfMemoryError as error:
            raise TraceError(
                f"a real step with a batch of {n} ran out of memory here. A real trace runs without a plan, so it "
                'cannot look at sizes that only fit with one: use trace="fake", or a smaller at_most or budget.'
            ) from error

    def _check_batch_follows(self, n: int, fingerprint: Fingerprint) -> None:
        """``PlanError`` if the batch has the same shapes as that of one sample."""
        one = self.plans.get(1)
        if one is not None and n >= min(_SECOND, self.limit) and fingerprint.batch == one.fingerprint.batch:
            shapes = ", ".join(str(shape) for _, shape, _ in fingerprint.batch)
            raise PlanError(
                f"make_batch(1) and make_batch({n}) gave batches of the same shapes: {shapes}. It must make a batch of "
                "as many samples as it is asked for, for example lambda n: torch.randint(0, 50257, (n, 1024))."
            )

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
        """The largest size that fits without a plan, or 0; and the largest that a plan holds."""
        looked = -1
        while looked != len(self.points):  # what one of them looked at may tell the other something new
            looked = len(self.points)
            unplanned = self._edge(
                lambda p: p.unplanned_peak_bytes <= self.budget_bytes, lambda p: p.unplanned_peak_bytes
            )
            planned = self._planned_edge()
        return unplanned, planned

    def _planned_edge(self) -> int:
        edge = self._edge(lambda p: p.feasible, self._smallest_peak)
        if edge == _MOST and self.at_most is None:
            raise PlanError(
                f"a batch of {_MOST} still fits in {format_bytes(self.budget_bytes)}: does the model's memory depend "
                "on the batch at all? Give at_most to say how large it may get."
            )
        return edge

    def _smallest_peak(self, point: CapacityPoint) -> float:
        """The smallest peak of a size, as far as it is known."""
        if not point.feasible and point.peak_bytes is not None:
            return point.peak_bytes
        return point.floor_bytes * self.above_floor

    def _edge(self, fits: Callable[[CapacityPoint], bool], peak: Callable[[CapacityPoint], float]) -> int:
        """A size that fits where one more does not; of those that were looked at, the largest that fits."""
        looks = 0
        while True:
            low = max((n for n, p in self.points.items() if fits(p)), default=0)
            if low == self.limit:
                return low
            high = min((n for n in self.points if n > low), default=None)
            if high == low + 1:
                return low
            looks += 1
            if high is not None and looks > _PATIENCE and looks % 2:
                guess = (low + high) // 2
            else:
                guess = self._on_a_line(peak) or 2 * low
            last = min(_GROWTH * max(low, 1), self.limit) if high is None else high - 1
            self.look(min(max(guess, low + 1), last))

    def _on_a_line(self, peak: Callable[[CapacityPoint], float]) -> int | None:
        """Where the line through the two sizes next to the budget meets it."""
        near = sorted(self.points.values(), key=lambda p: abs(peak(p) - self.budget_bytes))[:2]
        if len(near) < 2 or peak(near[0]) == peak(near[1]):
            return None
        a, b = near
        slope = (peak(b) - peak(a)) / (b.batch_size - a.batch_size)
        return int(a.batch_size + (self.budget_bytes - peak(a)) / slope) if slope > 0 else None

    # --- the fastest --------------------------------------------------------------------------

    @property
    def fastest(self) -> int:
        """The size with the most samples per second; the smaller on a tie."""
        return max(self.plans, key=lambda n: (self.points[n].samples_per_s or 0.0, -n))

    def refine(self, looks: int) -> None:
        """Halve the gaps on both sides of the fastest, until there are none; at most so often."""
        for _ in range(looks):
            best = self.fastest
            below = max((n for n in self.plans if n < best), default=best)
            above = min((n for n in self.plans if n > best), default=best)
            gaps = ((best - below, (below + best) // 2), (above - best, (best + above) // 2))
            middles = [(gap, n) for gap, n in gaps if n not in self.points]
            if not middles:
                return
            self.look(max(middles)[1])


def _floor_bytes(traced: Profile, may_chunk: bool) -> int:
    """What no plan is under, unless it runs other things than the loss in slices."""
    programs = [traced.program]
    chunks = loss_chunks(traced.program, traced.spec) if may_chunk else ()
    if isinstance(chunks, ChunkOptions):
        programs += [traced.with_plan((chunk,)) for chunk, _ in chunks.options[-1:]]
    return min(program.liveness.floor_bytes for program in programs)
