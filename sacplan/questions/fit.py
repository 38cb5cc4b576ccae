"""``fit``: whether a step fits a device, by how much it does not, and what to do about it.

    print(sacplan.fit(model, lambda n: torch.randint(0, 50257, (n, 1024)), device="rtx-4090"))

The answer is a table of optimizers times *ways* to run the step (as it is, with a plan, with a chunked loss, ...).
Recording and planning each entry by itself would take too long, so the work is shared:

- The step is recorded without its optimizer. An optimizer is recorded on the parameters alone (``optimizers.py``). It
  adds its state to the whole step, and its own step has a peak of its own:

      peak = max(peak of the step without optimizer + state, peak of the optimizer's step)

  So everything that planning derives from the step serves all optimizers, and an optimizer only changes the budget:
  the budget less its state.
- The step is recorded at two sizes for each axis (batch, sequence). Other sizes are computed from these
  (``scaled.py``).

Without a budget, a row fits a GPU if what the allocator reserves does (``limits.py``). What is reserved does not follow
from peaks, so each row plays the allocator once or twice, on the step with the row's plan and optimizer.

The peak and time of a row that fits are those of the plan that ``plan`` finds. If none fits, the row has the smallest
peak that a quick search finds. The largest batch and sequence are lower bounds: they hold with the decisions that have
the smallest peak at the asked size, and planning anew at each size might find larger ones.

A compiled step is run with each plan, dry. Its rows are the step as it is and with a plan, and no sizes are computed:
a compiler makes another program of another size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import DataLoader

from sacplan.core.arguments import checked
from sacplan.core.budget import format_bytes, format_difference, parse_budget
from sacplan.core.decisions import Decision
from sacplan.core.derived import derived
from sacplan.core.liveness import Footprint, bytes_at_ops
from sacplan.core.pins import NO_PINS
from sacplan.core.program import Phase, Program
from sacplan.core.progress import begins
from sacplan.core.setup import Routing
from sacplan.device.device_memory import reserved_bytes, retries_within
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec, resolve_device
from sacplan.device.outside_allocator import outside_allocator
from sacplan.distributed.ranks.ranks import FSDP2
from sacplan.errors import PlanError, SacplanWarning
from sacplan.planning.candidate import Candidate
from sacplan.planning.infeasible import looking_for_plans
from sacplan.planning.limits import OF_DEVICE, Limit, Room, Try, limit_of_device, next_budget
from sacplan.planning.make import MadeBy, outcome_of, plan_by_hand, smallest_plan
from sacplan.planning.plan import Plan
from sacplan.planning.planner import Planner
from sacplan.planning.request import Request
from sacplan.profiling.optimizer_table import (
    BY_NAME,
    COMPARED,
    COMPARED_ON_HOST,
    Factory,
    OptimizerCandidate,
    candidate_named,
)
from sacplan.profiling.optimizers import OptimizerStep, program_with_optimizer, recorded_step, with_optimizer
from sacplan.profiling.profile import Profile
from sacplan.profiling.remarks import runs_in_4_bits, types_of_shards
from sacplan.profiling.tracing import profile
from sacplan.questions.batch_sizes import batches_of
from sacplan.questions.largest import largest_that_fits, largest_within
from sacplan.questions.on_ranks import RankRows, read_devices
from sacplan.questions.scaled import Peaks, Sized, sized
from sacplan.questions.verdict import FitRow, Verdict, cheapest_of, is_same_training, recommended
from sacplan.questions.ways import AS_IT_IS, PLAN, Way, host_ways, long_ways, quick_ways
from sacplan.record.compiled import CompileModules
from sacplan.record.fake_values import is_balanced
from sacplan.record.longest import LongestBatch
from sacplan.record.step import LossFn, resolve_batch

_COMPUTED = "Peaks follow from recordings of the step and of the optimizers, largest sizes from the step at two sizes."
_NOT_TIMED = (
    "Times are not predicted for optimizers on the host, whose state crosses the link, or which step there."
)
_LARGEST = 2**24  # the largest size to try
_TOKENS = 128  # sequences are tried in multiples of this: kernels pad others


@checked(PlanError, "model", "make_batch", "optimizer", "budget", "host_budget")
def fit(
    model: torch.nn.Module,
    make_batch: Callable[..., Any] | DataLoader[Any],
    device: str | DeviceSpec | torch.device = DEFAULT_DEVICE,
    loss_fn: LossFn | None = None,
    optimizer: Any = "adamw",
    budget: float | str | None = None,
    headroom: float | str | None = None,
    *,
    devices: int | str = 1,
    batch: int | None = None,
    seq: int | None = None,
    accumulation_steps: int = 1,
    routing: Routing = "balanced",
    longest: int | None = None,
    host_budget: float | str | None = None,
    name: str | None = None,
    sizes: bool = True,
    compile: CompileModules = None,
    on_verdict: Callable[[Verdict], object] | None = None,
) -> Verdict:
    """Say whether a training step fits a device; if it does not, by how much, and what to do.

        found = sacplan.fit(model, lambda n: torch.empty(n, 3, 224, 224, device="meta"), device="rtx-4090", batch=64)
        print(found)
        found = sacplan.fit(model, lambda n, seq: torch.zeros(n, seq, dtype=torch.long), seq=4096)

    Args:
        model: As for ``sacplan.profile``. On the meta device it takes no memory here.
        make_batch: A function: ``make_batch(n)`` returns a batch of n samples. If ``seq`` is given, it is called as
            ``make_batch(n, seq)`` and returns samples of ``seq`` tokens each. Or a ``DataLoader``, whose longest
            samples are taken.
        device: The target device, see ``sacplan.devices()``. ``"8xh100"`` means eight of them.
        loss_fn: As for ``profile``.
        optimizer: A name as on the command line (``"adamw"``, ``"paged-adamw-8bit"``, ``"muon"``), a function
            ``params -> optimizer``, or None.
        budget, headroom: Limit for the peak of the step, as for ``max_batch``. Without either, the step has to fit the
            device, as for ``plan``.
        devices: How many devices there are. With several, rows are for DDP, FSDP2 and meshes with tensor parallelism;
            ``batch`` is that of each device, and peaks are those of a rank.
        batch, seq: The size of the step: samples (by default 1, or those of the loader), and tokens in each. If batches
            differ, of the largest.
        accumulation_steps: As for ``profile``; ``batch`` is one micro-batch. Times are those of all of them.
        routing: As for ``profile``. With balanced routing, a sentence says what the worst would need.
        longest: The longest sequence to try, for models that have a limit.
        host_budget: Limit for the memory of the host that a step takes, as for ``plan``: what waits there, the
            optimizer's state and gradients, and shards. By default the host's share of common machines with the device.
        name: Name of the model in the answer.
        sizes: Whether to compute the largest batches and sequences. Without them, it takes about half as long.
        compile: As for ``profile``. Rows of a compiled step are the step as it is and with a plan, without largest
            sizes: those are what ``max_batch`` looks for.
        on_verdict: A function that is called with the verdict as soon as it is known, before the largest sizes are.

    Returns:
        The verdict: peaks in bytes, times in ms. Peaks are exact, as those of ``plan`` are. The largest batches and
        sequences hold with the plan that has the smallest peak at the size that was asked for. ``max_batch``, which
        plans at each size, may find somewhat larger ones.

    Raises:
        PlanError: ``make_batch`` is not callable or makes batches of one size; the optimizer's name is unknown; a
            size is below 1; or a compiled step is to be spread over devices.
        BudgetError: The budget or headroom cannot be read, or leaves nothing.
        TraceError, DeviceError: As for ``profile``.
    """
    batches = batches_of(make_batch)
    if batch is None:
        batch = (batches.rows if isinstance(batches, LongestBatch) else None) or 1
    for what, value in (("batch", batch), ("seq", seq)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise PlanError(f"{what}={value!r} must be 1 or more.")
    if isinstance(optimizer, str):
        try:
            optimizer = candidate_named(optimizer).name
        except ValueError as error:
            raise PlanError(f"{error} Or give a callable `params -> optimizer`.") from error
    device, n_devices = read_devices(device, devices)
    spec = resolve_device(device)
    if n_devices > 1 and compile not in (None, False):
        raise PlanError(
            f"compile={compile!r} with {n_devices} devices: of a compiled step, fit answers for one device."
        )
    sweep = _Sweep(
        model,
        batches,
        loss_fn,
        optimizer,
        spec,
        limit_of_device(budget, headroom, spec),
        Limit(budget, headroom),
        batch,
        seq,
        accumulation_steps,
        routing,
        longest,
        spec.host_memory_bytes if host_budget is None else parse_budget(host_budget, spec.host_memory_bytes),
        devices=n_devices,
        compile=False if n_devices > 1 else compile,
    )
    with looking_for_plans():
        return sweep.found(name or type(model).__name__, sizes, on_verdict)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A plan of a compiled step, and its dry run; what ``fit`` asks of a ``Candidate``."""

    plan: Plan
    program: Program
    added_ms: float = 0.0

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return self.plan.decisions

    @property
    def footprint(self) -> Footprint:
        return replace(self.program.footprint, recompute_ms=self.plan.recompute_ms)


_Choice: TypeAlias = Candidate | _Compiled


@dataclass
class _Sweep:
    """The table of optimizers and ways, and everything that is recorded and computed for it.

    Recordings and plans are made when they are first needed, and kept.
    """

    model: torch.nn.Module
    make_batch: Callable[..., Any]
    loss_fn: LossFn | None
    optimizer: Any
    spec: DeviceSpec
    limit: Limit
    given: Limit
    batch: int
    seq: int | None
    accumulation_steps: int
    routing: Routing
    longest: int | None
    host_budget_bytes: int
    devices: int = 1
    compile: CompileModules = None
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    _planners: dict[tuple[Way, int], Planner] = field(default_factory=dict)  # by way and budget
    _planned: dict[tuple[Way, int], _Choice | None] = field(default_factory=dict)  # likewise
    _decided: dict[tuple[str, Way], frozenset[Decision]] = field(default_factory=dict)  # by optimizer and way
    _reserved: dict[tuple[str, int, int | None, frozenset[Decision]], int] = field(default_factory=dict)
    _expandables: dict[tuple[str, frozenset[Decision]], int] = field(default_factory=dict)
    _sizes: dict[tuple[str, str, str], int] = field(default_factory=dict)  # by optimizer, way and axis

    @cached_property
    def room(self) -> Room:
        """The room of a step on the device."""
        return self.limit.room(self.spec, int(self.devices > 1))

    @property
    def budget_bytes(self) -> int:
        """The limit for the peak; without a budget, what the allocator of the GPU may reserve."""
        return self.room.n_bytes

    @property
    def counts_segments(self) -> bool:
        """Whether what the allocator reserves decides, and not the peak."""
        return self.room.is_reserved

    def recorded(self, batch: int, seq: int | None, optimizer: Any = None, **options: Any) -> Profile:
        """Record the step at a size; ``options`` are further arguments of ``profile``."""
        given = (batch,) if seq is None else (batch, seq)

        def made() -> Any:
            # Called inside of ``profile``, which restores the random number generators.
            return resolve_batch(self.make_batch(*given))

        return profile(
            self.model, made, self.loss_fn, optimizer, self.spec,
            accumulation_steps=self.accumulation_steps, compile=self.compile, **{"routing": self.routing, **options},
        )  # fmt: skip

    @derived
    def at(self, batch: int, seq: int | None) -> Profile:
        """Return the step at a size, on one device and without an optimizer."""
        return self.recorded(batch, seq)

    @cached_property
    def base(self) -> Profile:
        """The step at the size that was asked for, without an optimizer."""
        begins("the step")
        return self.at(self.batch, self.seq)

    # --- optimizers

    @cached_property
    def candidates(self) -> dict[str, OptimizerCandidate]:
        """By name, the optimizer that was asked for, then those worth comparing with it."""
        own = self.optimizer
        if own is None:
            return {}
        if isinstance(own, str):
            first = BY_NAME[own]
        else:
            # A function of the table has a name and code there. Any other is shown by its own name.
            first = next((c for c in BY_NAME.values() if c.make is own), None) or OptimizerCandidate(
                getattr(own, "__name__", type(own).__name__), "the optimizer", own, "..."
            )
        # The compared optimizers are variants of Adam. For other optimizers they would be another training.
        others = COMPARED if first.name.startswith("adam") else ()
        return {one.name: one for one in (first, *(BY_NAME[o] for o in others))}

    @property
    def hosted(self) -> list[OptimizerCandidate]:
        """Optimizers with their state on the host that are worth comparing with the one that was asked for."""
        is_adam = next(iter(self.candidates), "").startswith("adam")
        return [
            BY_NAME[name] for name in (COMPARED_ON_HOST if is_adam else ()) if name not in self.candidates
        ]

    @cached_property
    def steps(self) -> dict[str, OptimizerStep | None]:
        """By name, the step of each optimizer; None stands for no optimizer."""
        return {name: self._step(name) for name in self.makes}

    @property
    def makes(self) -> dict[str, Factory | None]:
        """By name, what makes each optimizer; None stands for no optimizer."""
        return {one.name: one.make for one in self.candidates.values()} or {"no optimizer": None}

    @derived
    def _step(self, name: str) -> OptimizerStep | None:
        base, make = self.base, self.makes[name]
        if make is None:
            return None
        begins(f"the step of {name}")
        return recorded_step(base, make)

    @cached_property
    def own(self) -> dict[str, tuple[int, int, float]]:
        """By optimizer, the bytes of its state, the peak of its own step in bytes, and the time of that step in ms."""
        return {name: self._own(step) for name, step in self.steps.items()}

    def _own(self, step: OptimizerStep | None) -> tuple[int, int, float]:
        if step is None:
            return 0, 0, 0.0
        # The peak of the whole step may be elsewhere, so only the ops of the optimizer are looked at.
        program = with_optimizer(self.base, step).program
        peak = max(
            int(n)
            for op, n in zip(program.ops, bytes_at_ops(program), strict=True)
            if op.phase == Phase.OPTIMIZER
        )
        return step.state_bytes, peak, program.step_ms - self.base.program.step_ms

    def on_host(self, name: str) -> int:
        """Return the bytes of the host's memory that an optimizer takes; 0 on a CPU, where they are in the peak."""
        step = self.steps[name]
        return 0 if step is None or self.spec.kind == "cpu" else step.host_bytes

    def within_host(self, way: Way, name: str) -> Way:
        """Return a way whose plan takes no more of the host than an optimizer leaves."""
        return way.within(max(1, self.host_budget_bytes - self.on_host(name)))

    # --- ways

    @cached_property
    def ways(self) -> list[Way]:
        """The ways that are tried with each optimizer; ``found`` adds those that take long or the host's memory."""
        if self.base.runs_compiled:
            return [AS_IT_IS, PLAN]
        return quick_ways(lambda way: bool(self.smallest(way).decisions))

    def _compiled(self, plan: Plan) -> _Compiled:
        return _Compiled(plan, self.base.run_with(plan).program)

    @derived
    def smallest(self, way: Way) -> _Choice:
        """Return the candidate with the smallest peak at the asked size. Other sizes use its decisions, too."""
        begins(f"smallest peak: {way.name}")
        if self.base.runs_compiled:
            asked = Request(techniques=way.techniques)
            unplanned = plan_by_hand(self.base, (), MadeBy("none"), status="unplanned")
            return self._compiled(smallest_plan(asked, self.base) if way.techniques else unplanned)
        if not way.techniques:
            return Request().planner(self.base).search(NO_PINS).smallest
        # The quick solver: a peak that is a little smaller changes no row that fits.
        asked = Request(solver="greedy", techniques=way.techniques, host_budget=way.host_budget)
        return asked.planner(self.base).smallest(0, quick=not way.long)

    def row(self, name: str, way: Way) -> FitRow:
        """Return the row of one way with one optimizer, at the asked size."""
        begins(f"{name}, {way.name}")
        way = self.within_host(way, name)
        found = self._found(name, way)
        best, peak = found.made, found.peak_bytes
        host_bytes = self.on_host(name) + best.footprint.host_peak_bytes
        fits = found.needs <= self.budget_bytes and host_bytes <= self.host_budget_bytes
        steps = self.accumulation_steps
        # The smallest peak is found without regard to time, so its time would mislead; copies of an optimizer's state
        # between host and device are not predicted.
        times: dict[str, Any] = dict.fromkeys(("step_ms", "recompute_ms", "added_ms"))
        if (fits or not way.techniques) and not self.on_host(name):
            recompute_ms, added_ms = steps * best.footprint.recompute_ms, steps * best.added_ms
            step_ms = steps * self.base.program.step_ms + recompute_ms + added_ms + self.own[name][2]
            step_ms += (steps - 1) * self.base.waits_ms(best.program)
            step_ms += self.base.waits_ms(self._program(self.base, name, best))
            times = {"step_ms": step_ms, "recompute_ms": recompute_ms, "added_ms": added_ms}
        # Rows are made from the simplest way on. If an earlier one has the same decisions, this way is the
        # same; the search finds this way itself at the latest.
        self._decided[name, way] = frozenset(best.decisions)
        same = next(
            one
            for (by, one), made in self._decided.items()
            if by == name and made == frozenset(best.decisions)
        )
        # Not looked at if the tensors alone do not fit. Where the peak decides, it is only shown.
        reserved = None
        if self.spec.kind == "cuda" and peak <= self.budget_bytes:
            reserved = self._reserved_at(self.base, self.batch, self.seq, name, best)
        return FitRow(
            optimizer=name,
            way=way.name,
            techniques=way.techniques,
            room=self.room,
            peak_bytes=peak,
            unplanned_peak_bytes=self._peak(name, self.smallest(AS_IT_IS)),
            **times,
            reserved_bytes=reserved,
            expandable_bytes=None if fits or reserved is None else self._expandable(name, best),
            runs_with_retries=not (fits or reserved is None or way.techniques)
            and retries_within(self._program(self.base, name, best), self.budget_bytes) is not None,
            same_as=None if same == way else same.name,
            host_bytes=host_bytes,
            host_room_bytes=self.host_budget_bytes,
        )

    def _found(self, name: str, way: Way) -> Try[_Choice]:
        """Return what ``plan`` finds with an optimizer, or the smallest peak where it finds nothing."""
        state, own_peak, _ = self.own[name]
        tries: list[Try[_Choice]] = []
        while (budget_bytes := next_budget(self.room, tries)) is not None:
            # No plan helps if the optimizer's own step is over the budget.
            found = self._cheapest(way, budget_bytes - state) if own_peak <= budget_bytes else None
            made = found or self.smallest(way)
            needs = peak = self._peak(name, made)
            if self.counts_segments and peak <= self.budget_bytes:
                needs = self._reserved_at(self.base, self.batch, self.seq, name, made)
            tries.append(Try(made, budget_bytes, peak, needs))
        return min(tries, key=lambda one: one.needs)

    def _peak(self, name: str, candidate: _Choice) -> int:
        state, own_peak, _ = self.own[name]
        return max(candidate.footprint.peak_bytes + state, own_peak)

    def _reserved_at(self, base: Profile, batch: int, seq: int | None, name: str, candidate: _Choice) -> int:
        """Return what the allocator reserves for a step of some size with an optimizer and a plan."""
        # By decisions and not by way, since several ways may have the same plan.
        key = name, batch, seq, frozenset(candidate.decisions)
        if key not in self._reserved:
            self._reserved[key] = reserved_bytes(self._program(base, name, candidate))
        return self._reserved[key]

    def _expandable(self, name: str, candidate: _Choice) -> int | None:
        """Return what expandable segments would reserve, if that fits where segments of the current kind do not."""
        key = name, frozenset(candidate.decisions)
        if key not in self._expandables:
            program = self._program(self.base, name, candidate)
            self._expandables[key] = reserved_bytes(program, expandable=True)
        found = self._expandables[key]
        return found if found <= self.budget_bytes else None

    def _program(self, base: Profile, name: str, candidate: _Choice) -> Program:
        compiled = isinstance(candidate, _Compiled)
        planned = candidate.program if compiled else base.with_plan(candidate.decisions)
        step = self.steps[name]
        return planned if step is None else program_with_optimizer(planned, step)

    def _cheapest(self, way: Way, left: int) -> _Choice | None:
        """Return what ``plan`` finds for a budget; None if it finds nothing, or would have to search for long."""
        if not way.techniques:  # as it is: nothing to plan
            return None
        if (way, left) not in self._planned and self.base.runs_compiled:
            asked = Request(Limit.exactly(max(1, left)), techniques=way.techniques)
            made = outcome_of(asked, self.base).plan
            self._planned[way, left] = None if made is None else self._compiled(made)
        elif (way, left) not in self._planned:
            planner = Request(techniques=way.techniques, host_budget=way.host_budget).planner(self.base)
            # A planner contains those of fewer techniques. That of "plan" has been asked the same already.
            known = self._planners.get((PLAN, left))
            if known is not None and known.basis.recorded.key == planner.basis.recorded.key:
                planner = replace(planner, family={known.techniques: known})
            self._planners[way, left] = planner
            self._planned[way, left] = planner.cheapest(left, quick=not way.long)
        return self._planned[way, left]

    def with_sizes(self, row: FitRow) -> FitRow:
        """Return the row with its largest batch and sequence."""
        begins(f"largest sizes: {row.optimizer}, {row.way}")
        none = not row.fits and self.batch == 1  # no batch fits, so no other one has to be recorded
        batch = 0 if none else self.largest(row, "batch")
        return replace(row, largest_batch=batch, longest_seq=self.largest(row, "seq"))

    @property
    def _could_fit(self) -> bool:
        """Whether some plan could hold the budget: the memory that no plan reduces is within it."""
        needs = (max(self.constant_bytes + state, own_peak) for state, own_peak, _ in self.own.values())
        return any(n_bytes <= self.budget_bytes for n_bytes in needs)

    # --- sizes

    @cached_property
    def by_batch(self) -> Sized | None:
        """The step at any batch size; None if the recordings run different ops."""
        return self._by_batch(lambda n: self.at(n, self.seq))

    def _by_batch(self, record: Callable[[int], Profile]) -> Sized | None:
        # A batch of one is special: dimensions of size 1 broadcast and have arbitrary strides. So do not extrapolate
        # it.
        first = max(2, self.batch)
        return self._sized("batch", (first, first + 2), record)

    @cached_property
    def by_seq(self) -> Sized | None:
        """The step at any sequence length; None if there are no sequences, or the recordings run different ops."""
        if self.seq is None:
            return None
        # Half the length is quicker to record. But it has to be a multiple of ``_TOKENS`` as well, since
        # padding would bend the line. Otherwise take twice the length, if the model has positions for it.
        other = self.seq // 2 if self.seq % (2 * _TOKENS) == 0 else 2 * self.seq
        if self.longest is not None and other > self.longest:
            other = max(1, self.seq // 2)
        if other == self.seq:  # a sequence of one token, and no longer one is allowed
            return None
        return self._sized("sequence", (self.seq, other), lambda n: self.at(self.batch, n))

    def _sized(self, what: str, sizes: tuple[int, int], record: Callable[[int], Profile]) -> Sized | None:
        found = sized(sizes, (record(sizes[0]), record(sizes[1])))
        note = f"Steps with another {what} run other ops, so the largest was not computed: use sacplan.max_batch."
        if found is None and note not in self.notes:
            self.notes.append(note)
        return found

    def largest(self, row: FitRow, axis: Literal["batch", "seq"]) -> int | None:
        """Return the largest size that fits, 0 if none does, or None if it cannot be computed."""
        if axis == "seq" and self.seq is None:  # the model has no sequences
            return None
        state, own_peak, _ = self.own[row.optimizer]
        left = self.budget_bytes - state
        if own_peak > self.budget_bytes or self.constant_bytes > left:  # over the budget at any size
            return 0
        # An answer in multiples of 128 tokens, if the question is one.
        unit = _TOKENS if axis == "seq" and self.seq is not None and self.seq % _TOKENS == 0 else 1
        # 0 is a limit, too: a longest sequence shorter than the unit
        most = _LARGEST if axis == "batch" or self.longest is None else self.longest // unit
        asked = self.batch if axis == "batch" else self.seq or 0
        # Nothing larger may be tried than what fits, as where a model has no more positions. A single token has no
        # length to compare with.
        if row.fits and 1 < asked == unit * most:
            return asked
        steps = self.by_batch if axis == "batch" else self.by_seq
        if steps is None:  # the two recordings run different ops, so other sizes are unknown
            return None
        if not self.counts_segments:
            return unit * self._largest_peak(steps, axis, self._way(row), unit, most, left)
        if (row.optimizer, row.way, axis) not in self._sizes:
            # The step as it is counts for every way. Its row comes first.
            known = self._sizes.get((row.optimizer, AS_IT_IS.name, axis), 0)
            if row.fits:
                known = max(known, asked)
            if known < unit * most:
                known = self._largest_reserved(steps, axis, row, unit, most, left, known)
            self._sizes[row.optimizer, row.way, axis] = known
        return self._sizes[row.optimizer, row.way, axis]

    def _largest_reserved(
        self, steps: Sized, axis: str, row: FitRow, unit: int, most: int, left: int, known: int
    ) -> int:
        """Return a size whose segments fit; no smaller one than ``known`` is looked for."""
        own = self._way(row)

        def at(n: int, left: int) -> tuple[int, int]:
            # A plan made for the asked size may be worse at this one than the step as it is. Ways have no
            # order, so the name decides between equal peaks.
            peaks = {one: self._peak_at(steps, axis, one, n, left) for one in (own, AS_IT_IS)}
            peak, way = min((peak, one.name, one) for one, peak in peaks.items())[::2]
            size = (n, self.seq) if axis == "batch" else (self.batch, n)
            return peak, self._reserved_at(steps.at(n), *size, row.optimizer, self.smallest(way))

        def by_peak(left: int) -> int:
            return unit * self._largest_peak(steps, axis, own, unit, most, left)

        return largest_that_fits(self.room, left, known, by_peak, at)

    def _way(self, row: FitRow) -> Way:
        """Return the way of a row."""
        return next(way for name, way in self._decided if (name, way.name) == (row.optimizer, row.way))

    def _largest_peak(self, steps: Sized, axis: str, way: Way, unit: int, most: int, left: int) -> int:
        """Return the largest size, in units, at which the peak is at most ``left``, in this way or as it is."""
        ways = (way, AS_IT_IS)
        return largest_within(
            lambda n: min(self._peak_at(steps, axis, one, n * unit, left) for one in ways) - left, most
        )

    @cached_property
    def constant_bytes(self) -> int:
        """Bytes that are alive at every size: parameters, buffers and gradients."""
        # The step has no optimizer and nobody frees gradients, so these and the batch are what is left at its end.
        return self.base.baseline.end_bytes - self._batch_bytes

    @property
    def _batch_bytes(self) -> int:
        program = self.base.recorded
        # What is there before the step and is neither parameter nor buffer is taken for the batch.
        initial = (s for s in program.initial if program.storage_kinds[s].name == "OTHER")
        return sum(program.storage_bytes[s] for s in initial)

    def _peak_at(self, steps: Sized, axis: str, way: Way, n: int, left: int) -> int:
        """Return the peak of a way at a size, without an optimizer.

        Peaks come from polynomials through recordings. These ignore that the allocator rounds each storage. If the
        rounding of all storages together could decide whether it is within ``left``, the peak is computed from the
        program at that size.
        """
        peak = self._peaks(axis, way).at(n)
        margin = len(self.base.recorded.storage_bytes) * self.spec.round_up(1)
        if abs(peak - left) <= margin:
            return steps.at(n).footprint(self.smallest(way).decisions).peak_bytes
        return peak

    @derived
    def _peaks(self, axis: str, way: Way) -> Peaks:
        """Return the peaks of a way as a function of the size.

        Memory is linear in the batch, and in a sequence at most quadratic, because of attention scores.
        """
        steps = self.by_batch if axis == "batch" else self.by_seq
        assert steps is not None  # ``largest`` has looked
        return steps.peaks(self.smallest(way).decisions, 1 if axis == "batch" else 2)

    # --- the answer

    def found(self, name: str, sizes: bool, on_verdict: Callable[[Verdict], object] | None) -> Verdict:
        """Return the verdict with all rows. ``on_verdict`` gets it earlier, without the largest sizes."""
        rows, with_sizes = self._rows_on_ranks() if self.devices > 1 else (self._rows(), self.with_sizes)
        sizes = sizes and not self.base.runs_compiled
        verdict = self._verdict(name, rows)
        if on_verdict is not None:
            on_verdict(verdict)
        if not sizes:
            return verdict
        competing = verdict.competing
        return self._verdict(name, [with_sizes(row) if row in competing else row for row in rows])

    def _rows(self) -> list[FitRow]:
        """Return the rows on one device."""
        rows = [self.row(each, way) for each in self.steps for way in self.ways]
        self._say_worst_routing()
        # What takes long to search for is tried last, and only if it could help.
        long = not any(row.fits for row in rows) and self._could_fit and not self.base.runs_compiled
        rows += [self.row(each, way) for way in (long_ways() if long else ()) for each in self.steps]
        return rows + self._on_the_host(rows)

    def _on_the_host(self, rows: list[FitRow]) -> list[FitRow]:
        """Return rows that take memory of the host, if none fits with the asked optimizer or those that do are dear."""
        if self.spec.kind == "cpu":  # its memory is the host's
            return []
        cheapest = cheapest_of(rows)
        if cheapest is not None and not cheapest.is_dear:
            return []
        # Another optimizer changes the training, so it is tried only if no row fits.
        asked = rows[0].optimizer
        names = [
            name for name in self.steps if is_same_training(name, asked) or not any(row.fits for row in rows)
        ]
        found = []
        for way in host_ways(self.ways) if self._could_fit and not self.base.runs_compiled else ():
            found += self._on_the_host_with(way, names, rows, cheapest)
        # State on the host is a last resort: its way over the link costs time that is not predicted.
        return found if cheapest is not None else found + self._with_state_on_host()

    def _on_the_host_with(
        self, way: Way, names: list[str], rows: list[FitRow], cheapest: FitRow | None
    ) -> list[FitRow]:
        """Return the rows of a way up to the first optimizer that fits, without those that gain nothing."""
        found = []
        for name in names:
            row = self.row(name, way)
            others = [other.over_bytes for other in rows if other.optimizer == name]
            # Beside a plan that fits this one has to be quicker. If none fits, it has to be closer to fitting.
            # A plan that keeps everything on the device is in the table already.
            gains = row.is_quicker(cheapest) if cheapest is not None else row.over_bytes < min(others)
            if gains and row.host_bytes:
                found.append(row)
            # The first optimizer that fits is enough; beside a plan that fits, only the asked one is tried.
            if row.fits or cheapest is not None:
                break
        return found

    def _with_state_on_host(self) -> list[FitRow]:
        """Return rows of optimizers whose state is on the host, each up to the first way that fits."""
        found = []
        for one in self.hosted:
            step = recorded_step(self.base, one.make)
            if step.host_bytes > self.host_budget_bytes:
                # The default is no promise: other machines have another share of the host for each device.
                kind = (
                    "common machines have"
                    if self.host_budget_bytes == self.spec.host_memory_bytes
                    else "there are"
                )
                self.notes.append(
                    f"{one.name} would take {format_bytes(step.host_bytes)} of the host's memory, of which {kind} "
                    f"{format_bytes(self.host_budget_bytes)} for each {self.spec.name}."
                )
                continue
            self.steps[one.name] = step
            self.own[one.name] = self._own(step)
            for way in self.ways:
                found.append(self.row(one.name, way))
                if found[-1].fits:
                    break
        if found:
            self.notes.append(_NOT_TIMED)
        return found

    def _rows_on_ranks(self) -> tuple[list[FitRow], Callable[[FitRow], FitRow]]:
        """Return the rows on several devices, and what completes one with its largest batch."""

        def recorded(batch: int, more: Mapping[str, Any]) -> Profile:
            # A rank has its own recordings.
            return self.recorded(batch, self.seq, **more) if more else self.at(batch, self.seq)

        ranks = RankRows(
            self.model, self.devices, self.makes, self._step, self.limit, self.host_budget_bytes, self.batch, recorded,
            self.notes,
        )  # fmt: skip
        rows = ranks.rows()
        if not rows:
            raise PlanError(f"the step cannot be spread over {self.devices} devices. {' '.join(self.notes)}")
        self._say_worst_routing()
        if any("FSDP2" in row.options for row in rows):
            packed = runs_in_4_bits(self.base.program)
            self.remarks += types_of_shards(self.base.fingerprint.parameters, self.devices, in_4_bits=packed)
        return rows, lambda row: ranks.with_largest(row, self._by_batch)

    def _say_worst_routing(self) -> None:
        """Note what the step as it is would need if a router sent all tokens to the same experts."""
        # The model routes no tokens, or the worst routing was asked for and is in all rows already.
        if not any(is_balanced(rule) for rule in self.base.rules):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SacplanWarning)  # the sentence below says what is assumed
            worst = self.recorded(self.batch, self.seq, routing="worst")
        step = self._step(next(iter(self.makes)))
        whole = [one if step is None else with_optimizer(one, step) for one in (worst, self.base)]
        where = "the step as it is"
        if self.devices > 1:
            whole, where = [one.on_ranks(FSDP2(self.devices)) for one in whole], "a rank of FSDP2"
        peak, balanced = (one.peak_bytes for one in whole)
        more = f"{format_difference(peak, balanced)} more" if peak > balanced else "no more"
        self.remarks.append(
            f"routing is taken to be balanced. If all tokens go to the same experts, {where} needs "
            f'{format_bytes(peak)}, {more}: routing="worst" (--routing worst) counts that'
        )

    def _verdict(self, name: str, rows: list[FitRow]) -> Verdict:
        best = recommended(rows)
        # With a budget nothing is said about the rest of the device. On a GPU without one, ``outside`` says what it is.
        left = self.given.budget is None and not self.counts_segments
        return Verdict(
            model=name,
            parameters=sum(p.numel() for p in self.model.parameters()),
            batch=self.batch,
            seq=self.seq,
            optimizer=rows[0].optimizer,
            device=self.spec.name,
            memory_bytes=self.spec.memory_bytes,
            budget_bytes=self.budget_bytes,
            budget=None if self.given == OF_DEVICE else f"{self.budget_bytes}B",
            headroom_bytes=self.spec.memory_bytes - self.budget_bytes if left else None,
            outside=outside_allocator(self.spec, int(self.devices > 1)) if self.counts_segments else (),
            rows=tuple(rows),
            recommended=best,
            larger_devices=() if best is not None or self.devices > 1 else self._larger_devices(rows),
            computed=(*self.notes, _COMPUTED),
            remarks=tuple(f"{said[0].upper()}{said[1:]}." for said in self.remarks),
            accumulation_steps=self.accumulation_steps,
            devices=self.devices,
            compiled=f", compile={self.compile!r}" if self.compile else "",
        )

    def _larger_devices(self, rows: list[FitRow]) -> tuple[str, ...]:
        """Return the known GPUs that hold the smallest row, the smallest first. They have other kernels: a guess."""
        from sacplan.device.devices import devices

        smallest = min(rows, key=lambda row: row.peak_bytes)
        needs = smallest.peak_bytes
        if self.spec.kind == "cuda":
            found = self._found(smallest.optimizer, self._way(smallest)).made
            needs = self._reserved_at(self.base, self.batch, self.seq, smallest.optimizer, found)
        named = [resolve_device(name) for name in devices().index]
        able = [spec for spec in named if spec.kind != "cpu" and OF_DEVICE.room(spec).n_bytes >= needs]
        return tuple(spec.name for spec in sorted(able, key=lambda spec: spec.memory_bytes))
