"""``fit``: whether a step fits a device, by how much not, and what to do about it.

    print(sacplan.fit(model, lambda n: torch.randint(0, 50257, (n, 1024)), device="rtx-4090"))

The step is recorded without its optimizer, once at the asked size and once at another; other sizes are computed from
these (``scaled.py``). Optimizers are recorded on the parameters alone (``optimizers.py``): each adds its state to the
step, and has a peak of its own. So what planning derives from the step serves all optimizers, and each has a budget of
its own: the budget less its state. A row is what ``plan`` finds for that budget with the techniques of its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch

from sacplan._device.devices import DeviceSpec, resolve_device
from sacplan._plan.limits import budget_of_device, looking_for_plans, memory_less
from sacplan._plan.planning import Planner
from sacplan._plan.search import Candidate
from sacplan._profile.optimizers import (
    BY_NAME,
    OptimizerCandidate,
    OptimizerStep,
    recorded_step,
    with_optimizer,
)
from sacplan._profile.profile import Profile
from sacplan._profile.tracing import profile
from sacplan._program.arguments import checked
from sacplan._program.decisions import Decision
from sacplan._program.liveness import bytes_at_ops
from sacplan._program.pins import NO_PINS
from sacplan._program.program import Phase
from sacplan._questions.largest import largest
from sacplan._questions.scaled import Peaks, Sized, sized
from sacplan._questions.verdict import TECHNIQUES, FitRow, Verdict, Way, recommended
from sacplan._record.step import LossFn, resolve_batch
from sacplan.errors import PlanError

_COMPUTED = "Peaks follow from recordings of the step and of the optimizers, largest sizes from the step at two sizes."
_LARGEST = 2**24  # no larger size is looked for
_WAYS: tuple[Way, ...] = ("plan", "chunked loss", "plan + chunked loss")  # found without a long search
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
    sweep = _Sweep(
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
        return sweep.found(name or type(model).__name__, sizes, on_verdict)


@dataclass
class _Sweep:
    """Optimizers times ways, and what is recorded and computed for them."""

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
    _planned: dict[tuple[Way, int], Candidate | None] = field(default_factory=dict)  # by way and budget
    _decided: dict[tuple[str, Way], frozenset[Decision]] = field(default_factory=dict)  # by optimizer and way
    _known: dict[tuple[str, Way], Peaks] = field(default_factory=dict)  # by "batch" or "seq", and way

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
    def smallest(self) -> dict[Way, Candidate]:
        """By way, what has the smallest peak at the asked size, and is tried at other sizes."""
        found = {way: self._smallest(way) for way in _WAYS}
        found = {"as it is": Planner.of(self.base).search(NO_PINS).smallest, **found}
        if not found["chunked loss"].decisions:  # the loss has to be whole, or slices save nothing
            del found["chunked loss"], found["plan + chunked loss"]
        return found

    def _smallest(self, way: Way) -> Candidate:
        # The quick solver: a peak that is a little smaller changes no row that fits.
        return Planner.of(self.base, "greedy", techniques=TECHNIQUES[way]).smallest(0, quick=way in _WAYS)

    def row(self, name: str, way: Way) -> FitRow:
        """One way with one optimizer, at the asked size."""
        state, own_peak, ms = self.own[name]
        found = self._cheapest(way, self.budget_bytes - state) if own_peak <= self.budget_bytes else None
        best = found or self.smallest[way]
        peak = max(best.footprint.peak_bytes + state, own_peak)
        fits = peak <= self.budget_bytes
        recompute_ms, added_ms = best.footprint.recompute_ms, best.added_ms
        is_timed = fits or not TECHNIQUES[way]
        self._decided[name, way] = frozenset(best.decisions)
        same = next(w for w in self.smallest if self._decided.get((name, w)) == self._decided[name, way])
        return FitRow(
            optimizer=name,
            way=way,
            fits=fits,
            peak_bytes=peak,
            unplanned_peak_bytes=max(self.base.peak_bytes + state, own_peak),
            step_ms=self.base.step_ms + recompute_ms + added_ms + ms if is_timed else None,
            recompute_ms=recompute_ms if is_timed else None,
            added_ms=added_ms if is_timed else None,
            same_as=None if same == way else same,
        )

    def _cheapest(self, way: Way, left: int) -> Candidate | None:
        """What ``plan`` finds for a budget; None where it finds nothing, or would have to look long."""
        if not TECHNIQUES[way]:
            return None
        if (way, left) not in self._planned:
            planner = Planner.of(self.base, techniques=TECHNIQUES[way])
            self._planned[way, left] = planner.cheapest(left, quick=way in _WAYS)
        return self._planned[way, left]

    def with_sizes(self, row: FitRow) -> FitRow:
        """The row with the largest batch and sequence."""
        none = not row.fits and self.batch == 1  # then no other batch has to be recorded
        batch = 0 if none else self.largest(row.optimizer, row.way, "batch")
        return replace(row, largest_batch=batch, longest_seq=self.largest(row.optimizer, row.way, "seq"))

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
        looked: dict[int, int] = {}

        def look(n: int) -> None:
            looked[n] = self._excess(steps, axis, way, n * unit, left)

        return unit * largest(looked, look, most or _LARGEST, lambda excess: excess <= 0, float)

    @cached_property
    def constant_bytes(self) -> int:
        """What no size goes below: parameters, buffers and gradients."""
        return self.base.baseline.end_bytes - self._batch_bytes

    @property
    def _batch_bytes(self) -> int:
        program = self.base.recorded
        initial = (s for s in program.initial if program.storage_kinds[s].name == "OTHER")
        return sum(program.storage_bytes[s] for s in initial)

    def _excess(self, steps: Sized, axis: str, way: Way, n: int, left: int) -> int:
        """Return how many bytes a step takes more than there are, in this way or as it is, whichever takes less.

        Peaks come from lines through recordings; where rounding could decide, from the program at that size.
        """
        peaks = []
        for one in dict.fromkeys((way, "as it is")):
            peak = self._peaks(steps, axis, one).at(n)
            margin = len(self.base.recorded.storage_bytes) * self.spec.round_up(1)
            if abs(peak - left) <= margin:
                peak = steps.at(n).footprint(self.smallest[one].decisions).peak_bytes
            peaks.append(peak)
        return min(peaks) - left

    def _peaks(self, steps: Sized, axis: str, way: Way) -> Peaks:
        """The peaks of a way by size, worked out when they are first asked for."""
        if (axis, way) not in self._known:
            self._known[axis, way] = steps.peaks(self.smallest[way].decisions, 1 if axis == "batch" else 2)
        return self._known[axis, way]

    # --- the answer

    def found(self, name: str, sizes: bool, on_verdict: Callable[[Verdict], object] | None) -> Verdict:
        """All rows, and the one to take; first without the largest sizes."""
        rows = [self.row(each, way) for each in self.steps for way in self.smallest]
        if not any(row.fits for row in rows) and self._could_fit:  # the search that takes long
            self.smallest["plan + chunks"] = self._smallest("plan + chunks")
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
