"""``fit``: whether a step fits a device, by how much not, and what to do about it.

    print(sacplan.fit(model, lambda n: torch.randint(0, 50257, (n, 1024)), device="rtx-4090"))

The step is recorded without its optimizer, once at the asked size and once at another; other sizes are computed from
these (``sizes.py``). Optimizers are recorded on the parameters alone (``optimizers.py``): each adds its state to the
step, and has a peak of its own. So one search for plans serves all of them. A chunked loss goes together with a plan by
planning recomputation for the step with that loss; ``plan`` with both techniques may find something better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from sacplan._advice.sizes import Peaks, Sized, largest, sized
from sacplan._advice.verdict import TECHNIQUES, FitRow, Verdict, Way, recommended
from sacplan._chunk.entries import ChunkOptions, loss_chunks
from sacplan._device.devices import DeviceSpec, resolve_device
from sacplan._plan.limits import budget_of_device, looking_for_plans, memory_less
from sacplan._plan.planning import plan, plan_smallest
from sacplan._profile.optimizers import (
    BY_NAME,
    OptimizerCandidate,
    OptimizerStep,
    recorded_step,
    with_optimizer,
)
from sacplan._profile.profile import Profile, profile
from sacplan._program.arguments import checked
from sacplan._program.decisions import Decision
from sacplan._program.liveness import bytes_at_ops
from sacplan._program.program import Phase
from sacplan._record.step import LossFn, resolve_batch
from sacplan.errors import PlanError

_ENOUGH = 0.1  # share of what the most slices save that half of them may save less
_SOLVER = "greedy"  # what is recommended is planned by all
_COMPUTED = (
    "Peaks follow from recordings of the step and of the optimizers, the largest sizes from the step at two sizes. "
    "sacplan.plan looks longer: its plan may recompute less."
)
_TOKENS = 128  # sequences are looked at in multiples of so many: kernels pad others


@checked(PlanError, "model", "make_batch", "optimizer", "budget")
def fit(
    model: torch.nn.Module,
    make_batch: Callable[..., Any],
    device: str | DeviceSpec | torch.device = "rtx-4090",
    loss_fn: LossFn | None = None,
    optimizer: Any = "adamw",
    budget: float | str | None = None,
    headroom: float | str | None = None,
    *,
    batch: int = 1,
    seq: int | None = None,
    longest: int | None = None,
    name: str | None = None,
    sizes: bool = True,
    on_verdict: Callable[[Verdict], object] | None = None,
) -> Verdict:
    """Whether a training step fits a device; if not, by how much, and what to do.

        found = sacplan.fit(model, lambda n: torch.empty(n, 3, 224, 224, device="meta"), device="rtx-4090", batch=64)
        print(found)
        found = sacplan.fit(model, lambda n, seq: torch.zeros(n, seq, dtype=torch.long), seq=4096)

    Args:
        model: as for ``sacplan.profile``; on the meta device it takes no memory here.
        make_batch: ``make_batch(n)`` makes a batch of n samples; with ``seq``, ``make_batch(n, seq)`` one of so many
            tokens each.
        device: see ``sacplan.devices()``.
        loss_fn: as for ``profile``.
        optimizer: a name (``"adamw"``, ``"adamw-fused"``, ``"adamw-8bit"``, ``"sgd"``), a callable
            ``params -> optimizer``, or None.
        budget, headroom: what the step may take of the device, as for ``max_batch``.
        batch, seq: the size that is asked about.
        longest: no longer sequence is looked at; for models with a limit.
        name: what to call the model.
        sizes: whether to compute the largest batches and sequences; without, it takes about half as long.
        on_verdict: called with the verdict as soon as it is known, before the largest sizes are.

    Peaks of the rows are exact, as those of ``plan`` are. The largest batches and sequences hold with a plan that was
    found near them; a search at each size (``max_batch``) may find a somewhat larger one.

    Raises:
        PlanError: ``make_batch`` is not callable, or makes batches of one size; an unknown name of an optimizer; a size
            below 1.
        BudgetError: a budget or headroom that cannot be read, or leaves nothing.
        TraceError, DeviceError: as for ``profile``.
    """
    if not callable(make_batch) or isinstance(make_batch, torch.nn.Module):
        raise PlanError(
            f"make_batch must be a function of the batch size, not {type(make_batch).__name__}. For example "
            "make_batch=lambda n: torch.zeros(n, 1024, dtype=torch.long)."
        )
    for what, value in (("batch", batch), ("seq", seq)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise PlanError(f"{what}={value!r} must be 1 or more.")
    if isinstance(optimizer, str) and optimizer not in BY_NAME:
        raise PlanError(
            f"unknown optimizer {optimizer!r}; known are {', '.join(map(repr, BY_NAME))}, or a callable."
        )
    spec = resolve_device(device)
    search = _Search(
        model,
        make_batch,
        loss_fn,
        optimizer,
        spec,
        budget_of_device(budget, headroom, spec),
        budget is None,
        batch,
        seq,
        longest,
    )
    with looking_for_plans():
        return search.found(name or type(model).__name__, sizes, on_verdict)


@dataclass
class _Search:
    """What is recorded and computed on the way."""

    model: torch.nn.Module
    make_batch: Callable[..., Any]
    loss_fn: LossFn | None
    optimizer: Any
    spec: DeviceSpec
    budget_bytes: int
    leaves_headroom: bool
    batch: int
    seq: int | None
    longest: int | None
    notes: list[str] = field(default_factory=list)

    def recorded(self, batch: int, seq: int | None, optimizer: Any = None) -> Profile:
        """The step at a size."""
        given = (batch,) if seq is None else (batch, seq)

        def made() -> Any:
            return resolve_batch(self.make_batch(*given))

        return profile(self.model, made, self.loss_fn, optimizer, self.spec)

    @cached_property
    def base(self) -> Profile:
        """The step at the asked size, without an optimizer."""
        return self.recorded(self.batch, self.seq)

    # --- optimizers

    @cached_property
    def candidates(self) -> dict[str, OptimizerCandidate]:
        """The asked optimizer, and those worth comparing with it."""
        own = self.optimizer
        if own is None:
            return {}
        if isinstance(own, str):
            first = BY_NAME[own]
        else:
            first = next((c for c in BY_NAME.values() if c.make is own), None) or OptimizerCandidate(
                getattr(own, "__name__", type(own).__name__), "the optimizer", own, "..."
            )
        others = ("adamw-fused", "adamw-8bit") if first.name.startswith("adam") else ()
        return {one.name: one for one in (first, *(BY_NAME[o] for o in others))}

    @cached_property
    def steps(self) -> dict[str, OptimizerStep | None]:
        """By name, the optimizers' steps; None stands for no optimizer."""
        if not self.candidates:
            return {"no optimizer": None}
        return {one.name: recorded_step(self.base, one.make) for one in self.candidates.values()}

    @cached_property
    def own(self) -> dict[str, tuple[int, int, float]]:
        """By optimizer: what its state adds to all of the step, the peak of its own step, and its time."""
        found = {}
        for name, step in self.steps.items():
            if step is None:
                found[name] = 0, 0, 0.0
                continue
            program = with_optimizer(self.base, step).program
            peak = max(
                int(n)
                for op, n in zip(program.ops, bytes_at_ops(program), strict=True)
                if op.phase == Phase.OPTIMIZER
            )
            found[name] = step.state_bytes, peak, program.step_ms - self.base.step_ms
        return found

    # --- ways

    @cached_property
    def chunks(self) -> tuple[Decision, ...]:
        """The loss in as few slices as save nearly the most, and in the most slices; none where it has to be whole."""
        found = loss_chunks(self.base.program, self.spec)
        if not isinstance(found, ChunkOptions):
            return ()
        peaks = {chunk: self.base.footprint((chunk,)).peak_bytes for chunk, _ in found.options}
        smallest = min(peaks.values())
        if smallest >= self.base.peak_bytes:
            return ()
        enough = smallest + _ENOUGH * (self.base.peak_bytes - smallest)
        return next(chunk for chunk, peak in peaks.items() if peak <= enough), found.options[-1][0]

    @cached_property
    def chunked(self) -> tuple[Decision, Profile]:
        """A chunked loss, and the step with it to plan from: in few slices, or in the most where these do not fit."""
        least = min(state for state, _, _ in self.own.values())
        for chunk in self.chunks:
            step = replace(self.base)
            object.__setattr__(step, "program", self.base.with_plan((chunk,)))
            if plan_smallest(step, _SOLVER).peak_bytes + least <= self.budget_bytes:
                break
        return chunk, step

    @cached_property
    def ways(self) -> dict[Way, tuple[Decision, ...]]:
        """By way, the decisions with the smallest peak."""
        found: dict[Way, tuple[Decision, ...]] = {"as it is": ()}
        found["plan"] = plan_smallest(self.base, _SOLVER).decisions
        if self.chunks:
            found["chunked loss"] = self.chunks[:1]
            chunk, step = self.chunked
            found["plan + chunked loss"] = (chunk, *plan_smallest(step, _SOLVER).decisions)
        return found

    def row(self, name: str, way: Way) -> FitRow:
        """One way with one optimizer, at the asked size."""
        state, own_peak, ms = self.own[name]
        base, left = self.base, self.budget_bytes - state
        decisions, step_ms = self.ways[way], None
        smallest = max(base.footprint(decisions).peak_bytes + state, own_peak)
        if "recompute" in TECHNIQUES[way] and smallest <= self.budget_bytes:
            decisions = self._planned(way, left)
        program = base.with_plan(decisions)
        peak = max(program.footprint.peak_bytes + state, own_peak)
        fits = peak <= self.budget_bytes
        if fits or not TECHNIQUES[way]:
            step_ms = program.step_ms + ms
        self._decided[name, way] = frozenset(decisions)
        same = next(w for w in self.ways if self._decided.get((name, w)) == frozenset(decisions))
        return FitRow(name, way, peak, fits, step_ms, None, None, None if same == way else same)

    def with_sizes(self, row: FitRow) -> FitRow:
        """The row with the largest batch and sequence."""
        none = not row.fits and self.batch == 1  # then no other batch has to be recorded
        batch = 0 if none else self.largest(row.optimizer, row.way, "batch")
        return replace(row, largest_batch=batch, longest_seq=self.largest(row.optimizer, row.way, "seq"))

    def _planned(self, way: Way, left: int) -> tuple[Decision, ...]:
        """The least recomputation under a budget that is known to hold."""
        if way == "plan + chunked loss":
            chunk, step = self.chunked
            return (chunk, *plan(step, f"{left}B", _SOLVER).decisions)
        return plan(self.base, f"{left}B", _SOLVER, techniques=TECHNIQUES[way]).decisions

    @property
    def _could_fit(self) -> bool:
        """Whether any plan could hold: what no plan makes smaller is within the budget."""
        needs = (max(self.constant_bytes + state, own_peak) for state, own_peak, _ in self.own.values())
        return any(n_bytes <= self.budget_bytes for n_bytes in needs)

    # --- sizes

    @cached_property
    def by_batch(self) -> Sized | None:
        """The step at any batch."""
        first = max(2, self.batch)
        one = self.base if first == self.batch else self.recorded(first, self.seq)
        return self._sized("batch", (first, first + 2), one, lambda n: self.recorded(n, self.seq))

    @cached_property
    def by_seq(self) -> Sized | None:
        """The step at any length."""
        if self.seq is None:
            return None
        other = self.seq // 2 if self.seq % (2 * _TOKENS) == 0 else 2 * self.seq
        if self.longest is not None and other > self.longest:
            other = max(1, self.seq // 2)
        if other == self.seq:
            return None
        return self._sized("seq", (self.seq, other), self.base, lambda n: self.recorded(self.batch, n))

    def _sized(
        self, axis: str, sizes: tuple[int, int], one: Profile, record: Callable[[int], Profile]
    ) -> Sized | None:
        found = sized(sizes, (one, record(sizes[1])))
        if found is None:
            what = "batch" if axis == "batch" else "sequence"
            self.notes.append(
                f"Steps with another {what} run other ops, so the largest was not computed: use sacplan.max_batch."
            )
        return found

    def largest(self, name: str, way: Way, axis: Literal["batch", "seq"]) -> int | None:
        """The largest size that fits; None where it cannot be computed."""
        if axis == "seq" and self.seq is None:
            return None
        state, own_peak, _ = self.own[name]
        left = self.budget_bytes - state
        if own_peak > self.budget_bytes or self.constant_bytes > left:
            return 0
        steps = self.by_batch if axis == "batch" else self.by_seq
        if steps is None:
            return None
        unit = _TOKENS if axis == "seq" and self.seq is not None and self.seq % _TOKENS == 0 else 1
        most = None if axis == "batch" or self.longest is None else self.longest // unit
        found = largest(lambda n: self._fits(steps, axis, way, n * unit, left), most)
        return found * unit

    @cached_property
    def constant_bytes(self) -> int:
        """What no size goes below: parameters, buffers and gradients."""
        return self.base.baseline.end_bytes - self._batch_bytes

    @property
    def _batch_bytes(self) -> int:
        program = self.base.recorded
        initial = (s for s in program.initial if program.storage_kinds[s].name == "OTHER")
        return sum(program.storage_bytes[s] for s in initial)

    def _fits(self, steps: Sized, axis: str, way: Way, n: int, left: int) -> bool:
        """By lines through recordings; where rounding could decide, by the program at that size."""
        tried: tuple[Way, ...] = ("as it is",) if way == "as it is" else (way, "as it is")
        for one in tried:
            peak = self._peaks(steps, axis, one).at(n)
            margin = len(self.base.recorded.storage_bytes) * self.spec.round_up(1)
            if abs(peak - left) <= margin:
                peak = steps.at(n).footprint(self.ways[one]).peak_bytes
            if peak <= left:
                return True
        return False

    def _peaks(self, steps: Sized, axis: str, way: Way) -> Peaks:
        """The peaks of a way by size, worked out when they are first asked for."""
        if (axis, way) not in self._known:
            self._known[axis, way] = steps.peaks(self.ways[way], 1 if axis == "batch" else 2)
        return self._known[axis, way]

    @cached_property
    def _decided(self) -> dict[tuple[str, Way], frozenset[Decision]]:
        """What the rows do, by optimizer and way."""
        return {}

    @cached_property
    def _known(self) -> dict[tuple[str, Way], Peaks]:
        return {}

    # --- the answer

    def found(self, name: str, sizes: bool, on_verdict: Callable[[Verdict], object] | None) -> Verdict:
        """All rows, and the one to take; first without the largest sizes."""
        rows = [self.row(each, way) for each in self.steps for way in self.ways]
        if not any(row.fits for row in rows) and self._could_fit:  # the search that takes long
            self.ways["plan + chunks"] = plan_smallest(
                self.base, _SOLVER, techniques=TECHNIQUES["plan + chunks"]
            ).decisions
            rows += [self.row(each, "plan + chunks") for each in self.steps]
        verdict = self._verdict(name, rows)
        if on_verdict is not None:
            on_verdict(verdict)
        return self._verdict(name, list(map(self.with_sizes, rows))) if sizes else verdict

    def _verdict(self, name: str, rows: list[FitRow]) -> Verdict:
        best = recommended(rows)
        smallest = min(row.peak_bytes for row in rows)
        return Verdict(
            model=name,
            parameters=sum(p.numel() for p in self.model.parameters()),
            batch=self.batch,
            seq=self.seq,
            optimizer=next(iter(self.steps)),
            device=self.spec.name,
            memory_bytes=self.spec.memory_bytes,
            budget_bytes=self.budget_bytes,
            budget=None if self.budget_bytes == memory_less(None, self.spec) else f"{self.budget_bytes}B",
            headroom_bytes=self.spec.memory_bytes - self.budget_bytes if self.leaves_headroom else None,
            rows=tuple(rows),
            recommended=best,
            larger_devices=() if best is not None else _holding(smallest),
            computed=(*self.notes, _COMPUTED),
        )


def _holding(n_bytes: int) -> tuple[str, ...]:
    """GPUs of the table that hold so much with the usual headroom, the smallest first."""
    from sacplan._device.devices import devices

    named = [resolve_device(name) for name in devices().index]
    gpus = [spec for spec in named if spec.kind != "cpu"]
    able = [spec for spec in gpus if memory_less(None, spec) >= n_bytes]
    return tuple(spec.name for spec in sorted(able, key=lambda spec: spec.memory_bytes))
