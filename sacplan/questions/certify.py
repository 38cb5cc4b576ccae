"""``certify``: whether every batch of a run fits a device, and not only the largest one.

    print(sacplan.certify(model, make_batch, lengths, "rtx-4090", batch=8))  # tokens of each sample
    print(sacplan.certify(model, make_batch, sizes, "rtx-4090", batch=8))  # height and width of each

A step can fit, and the run still run out of memory: the allocator reserves segments for the shapes that came first, and
batches of other shapes leave holes in them. So the whole run is played, from the start of the process:

1. *Draw.* The shapes of the batches that the loader makes of the samples, in their order (``lengths.py``).
2. *Record.* The step at two batch sizes and two values of each size, from which the step of any shape follows
   (``SizedStep``).
3. *Play.* Each step goes through the allocator, with what the steps before it have left there
   (``device_memory.TrainingRun``). Steps of one shape share one list of allocations, so that a step takes milliseconds.
   No step is left out: what the allocator does depends on all steps before. A play ends early only at the batch at
   which memory runs out. Evaluations are steps without gradients between those of training, and a plan does nothing in
   them. Checkpoints take no memory of a GPU: ``state_dict`` shares the tensors that are there.
4. *Plan.* If the run does not fit, its largest batch is planned for, and the run is played again with the plan. If the
   allocator then reserves too much, the budget is lowered by the excess (``limits.within``).

With ``buckets``, there are several plans, each made for the largest batch of a range of sizes, so that small batches
recompute less, or nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch

from sacplan.core.arguments import checked
from sacplan.core.progress import begins
from sacplan.device import caching_allocator as allocators
from sacplan.device.device_memory import Changes, TrainingRun, changes_of, expandable_segments
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec, resolve_device
from sacplan.errors import PlanError
from sacplan.planning.limits import Limit, Room, limit_of_device, within
from sacplan.planning.make import outcome_of, smallest_plan
from sacplan.planning.plan import Plan
from sacplan.planning.request import Request
from sacplan.profiling.profile import Profile
from sacplan.questions.batch_sizes import Recordings
from sacplan.questions.certificate import BatchAt, Certificate, Setting, ShapePlan, WholeRun
from sacplan.questions.largest import largest_within
from sacplan.questions.lengths import Drawing, Shape, fits_in, read_shapes, shape_of_batch
from sacplan.questions.scaled import SizedStep
from sacplan.record.longest import is_loader
from sacplan.record.step import LossFn, check_accumulation, loss_or_default
from sacplan.techniques.registry import TECHNIQUES, resolve_techniques

_TOKEN_STEPS = 64  # smaller budgets of tokens are tried in steps of 1/64 of the one that was asked for

_UNLIMITED = {"expandable": allocators.ExpandableAllocator, "none": allocators.NoAllocator}


@checked(PlanError, "model", "make_batch", "lengths", "evaluation", "optimizer", "budget")
def certify(
    model: torch.nn.Module,
    make_batch: Callable[..., Any],
    lengths: Any,
    device: str | DeviceSpec | torch.device = DEFAULT_DEVICE,
    loss_fn: LossFn | None = None,
    optimizer: Any = None,
    budget: float | str | None = None,
    *,
    batch: int | None = None,
    tokens: int | None = None,
    pad_to_multiple_of: int = 1,
    pack: int | None = None,
    seed: int | None = 0,
    epochs: int = 1,
    drop_last: bool = False,
    longest: int | None = None,
    shape_of: Callable[[Any], Sequence[int]] = shape_of_batch,
    accumulation_steps: int = 1,
    evaluation: Any = None,
    evaluation_batch: int | None = None,
    evaluate_every: int | None = None,
    buckets: int = 1,
    techniques: Sequence[str] | None = None,
) -> Certificate:
    """Say whether every batch of a run fits a device; if not, which is the first that does not, and what to do.

        lengths = [len(text) for text in tokenized]
        found = sacplan.certify(model, lambda n, seq: torch.zeros(n, seq, dtype=torch.long), lengths, batch=8)
        print(found)

    The run is played on the rules of torch's allocator, from the first step on, with its default settings and with
    expandable segments. The loop is taken to hold the batch of a step until the next one is there, and to drop
    gradients between two steps, as most do. The loss of the step before, a single number, is not counted.

    Args:
        model, device, loss_fn, optimizer: As for ``sacplan.profile``.
        make_batch: ``make_batch(n, seq)`` returns a batch of n samples of ``seq`` tokens each, with masks and labels.
            With several sizes it gets them all, such as ``make_batch(n, height, width)``.
        lengths: Tokens in each sample: a sequence, an array, a tensor, or a mapping of lengths to counts. Or several
            sizes of each, samples x sizes: height and width of images, or tokens, height and width, to the largest
            of which batches are padded. Or a ``DataLoader``, which is iterated: of its batches only the shapes are
            kept.
        budget: Limit for the peak of each step, as for ``max_batch``. Without one, what the allocator reserves has to
            fit the device.
        batch: Samples in a batch.
        tokens: Instead of ``batch``, the most tokens in a batch, padding included; pixels for images. A batch takes
            samples until the next one would be too much.
        pad_to_multiple_of: Batches are padded to their longest sample, rounded up to a multiple of this.
        pack: Instead of padding, samples are concatenated and cut into rows of so many tokens.
        seed: Samples come in the order of ``DataLoader(..., shuffle=True, generator=...)`` with a generator of this
            seed; None: in their own order.
        epochs: How often all samples come.
        drop_last: As for ``DataLoader``.
        longest: How many tokens the model has positions for, if there is a limit. Of several sizes, the first counts.
        shape_of: Returns the samples and sizes of a batch of a ``DataLoader``, as ``make_batch`` takes them. By
            default, those of its tensors that are samples x tokens, and samples x channels x height x width. For images
            whose patches are concatenated: ``lambda b: (*b["input_ids"].shape, len(b["pixel_values"]))``.
        accumulation_steps: As for ``profile``; batches are micro-batches. The optimizer steps after the last one, too.
        evaluation: Tokens in each sample of an evaluation, or a ``DataLoader``, as for ``lengths``. Batches are made by
            the same rules, in order. They run through ``loss_fn`` in eval mode, without gradients, while gradients
            and batch of the step before are still there. Outputs are not collected.
        evaluation_batch: Samples in a batch of the evaluation. Default: as in training.
        evaluate_every: Steps of the optimizer from one evaluation to the next.
        buckets: If the run needs a plan: how many plans there may be, each for a range of sizes.
        techniques: As for ``sacplan.plan``.

    Figures of shapes that were not recorded are computed, as for ``fit``. They are exact, except that kernels may pad
    lengths, that their workspaces need not be linear in the size, and that a model may run other ops at one size, such
    as vision transformers without interpolated positions. One more recording checks the figures. If strides do not
    divide heights and widths, and with convolutions on a CPU, each shape is recorded, which takes seconds. Not played:
    what lies outside of the allocator.

    Raises:
        PlanError: A length is below 1 or above ``longest``, or there is none; neither or both of ``batch`` and
            ``tokens``; ``buckets`` with ``tokens``; one of ``evaluation`` and ``evaluate_every`` without the other; or
            ``make_batch`` makes batches of one size.
        BudgetError: As for ``max_batch``.
        TraceError, DeviceError: As for ``profile``.
    """
    if not callable(make_batch) or isinstance(make_batch, torch.nn.Module):
        raise PlanError(
            f"make_batch must be a function of samples and tokens, not {type(make_batch).__name__}. For example "
            "make_batch=lambda n, seq: torch.zeros(n, seq, dtype=torch.long)."
        )
    if isinstance(buckets, bool) or buckets < 1 or (buckets > 1 and tokens is not None):
        raise PlanError(
            f"buckets={buckets!r}{f', tokens={tokens}' if tokens else ''}: the number of plans must be 1 or more, and "
            "1 with tokens=, since all batches are about as large then."
        )
    every = 1 if evaluate_every is None else evaluate_every
    if every < 1 or (evaluation is None) != (evaluate_every is None):
        raise PlanError(
            f"evaluate_every={evaluate_every!r}: give the lengths of an evaluation (evaluation=), and after how many "
            "steps it runs each time, 1 or more."
        )
    request = Request(techniques=None if techniques is None else resolve_techniques(techniques))
    hosted = ", ".join(name for name in request.techniques or () if TECHNIQUES[name].takes_host)
    if evaluation is not None and hosted:
        raise PlanError(f"evaluation= with techniques={hosted}: host copies are not played there. Drop one.")
    check_accumulation(accumulation_steps)
    rules = {
        "batch": batch, "tokens": tokens, "pad_to_multiple_of": pad_to_multiple_of, "pack": pack, "seed": seed,
    }  # fmt: skip
    shapes, drawing = read_shapes(lengths, longest, epochs, shape_of, **rules, drop_last=drop_last)
    between: list[Shape] = []
    if evaluation is not None:
        own = {} if evaluation_batch is None else {"batch": evaluation_batch, "tokens": None}
        rules = own if is_loader(evaluation) else {**rules, "seed": None, **own}
        between, _ = read_shapes(evaluation, longest, 1, shape_of, **rules)
    spec = resolve_device(device)
    limit = limit_of_device(budget, spec)
    how = {"loss_fn": loss_fn, "optimizer": optimizer, "accumulation_steps": accumulation_steps}
    loss = loss_or_default(loss_fn, "inference")
    inference = {"mode": "inference", "loss_fn": lambda model, batch: loss(model.eval(), batch)}
    steps, evaluations = (
        SizedStep(Recordings(model, make_batch, spec, options).at, set(all_of))
        for all_of, options in ((shapes, how), (between or shapes, inference))
    )
    return _Runs(
        type(model).__name__, steps, limit.room(spec), shapes, drawing, request, accumulation_steps,
        every, between, evaluations,
    ).certificate(buckets)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Step:
    """What is kept of a step of one shape with its plan, since a program takes megabytes.

    Attributes:
        changes: Its allocations and frees.
        peak_bytes: Its peak.
        cost: Its ms, its FLOPs, and the FLOPs of what runs a second time.
    """

    changes: Changes
    peak_bytes: int
    cost: tuple[float, int, int]


@dataclass(frozen=True)
class _Runs:
    """The runs of one model to compare: as it is, and with plans.

    Attributes:
        accumulation: Micro-steps in a step of the optimizer.
        every: Steps of the optimizer from one evaluation to the next.
        between, evaluations: The batches of an evaluation, and its steps.
    """

    model: str
    steps: SizedStep
    room: Room
    shapes: Sequence[Shape]
    drawing: Drawing | None
    request: Request
    accumulation: int = 1
    every: int = 1
    between: Sequence[Shape] = ()
    evaluations: SizedStep | None = None
    _known: dict[tuple[Any, ...], _Step] = field(default_factory=dict)

    @property
    def _settings(self) -> tuple[Setting, ...]:
        """The settings of the allocator to play, that of this process first."""
        if not self.room.is_reserved:
            return ("none",)
        first: tuple[Setting, ...] = ("default", "expandable")
        return (*(first[::-1] if expandable_segments() else first), "emptied")

    def _step(self, shape: Shape, plan: Plan | None, *, evaluation: bool = False) -> _Step:
        key = shape, evaluation, () if plan is None else plan.decisions
        if key not in self._known:
            step = (self.evaluations if evaluation and self.evaluations else self.steps).at(*shape)
            program = step.program if plan is None else step.with_plan(plan.decisions)
            found = program.footprint
            cost = program.step_ms + step.waits_ms(program), program.flops, found.recompute_flops
            self._known[key] = _Step(changes_of(program), found.peak_bytes, cost)
        return self._known[key]

    def _of(self, plans: Sequence[ShapePlan] = ()) -> Callable[[BatchAt], _Step]:
        """Return a function from a batch to its step, with the first plan for its shape if there is one."""

        @functools.cache
        def step(shape: Shape, evaluation: bool) -> _Step:
            plan = next((one.plan for one in plans if one.holds(shape) and not evaluation), None)
            return self._step(shape, plan, evaluation=evaluation)

        return lambda at: step(*at[1:])

    def _updates(self, index: int, n: int) -> bool:
        """Whether the optimizer steps after the batch with this index, of n batches."""
        return (index + 1) % self.accumulation == 0 or index + 1 == n

    def _schedule(self, shapes: Sequence[Shape]) -> Iterator[BatchAt]:
        """Yield the batches of training and those of the evaluations, in order."""
        for index, shape in enumerate(shapes):
            yield BatchAt(index, shape)
            if self._updates(index, len(shapes)) and (index // self.accumulation + 1) % self.every == 0:
                yield from (BatchAt(index, one, True) for one in self.between)

    # --- one run

    def _played(
        self, shapes: Sequence[Shape], steps: Callable[[BatchAt], _Step], setting: Setting, *, whole: bool = True
    ) -> WholeRun:  # fmt: skip
        """Play a run up to the batch at which memory runs out.

        Expandable segments are played without a limit, since what torch gives back of them is not simulated; so is the
        sum of the tensors. There, memory runs out at the first batch over the limit, and a ``whole`` run goes on.
        """
        room, reserves = self.room.n_bytes, setting != "none"
        allocator = _UNLIMITED[setting]() if setting in _UNLIMITED else allocators.CachingAllocator(room)
        run = TrainingRun(allocator)
        # The most allocated and the most reserved bytes, each with the first batch that has them.
        most = [(0, BatchAt(0, shapes[0]))] * 2
        breaks_at, needs, idle = None, 0, 0  # ``idle``: the most that is reserved when a batch is over
        for at in self._schedule(shapes):
            changes = steps(at).changes
            try:
                if at.evaluation:
                    peaks = run.evaluate(changes)
                else:
                    adds, updates = at.step % self.accumulation > 0, self._updates(at.step, len(shapes))
                    peaks = run.micro_step(changes, adds=adds, updates=updates)
            except allocators.OutOfDeviceMemory as error:
                breaks_at, needs = at, error.needs
                break
            took = max(peaks.max_memory_allocated, run.between_bytes), peaks.max_memory_reserved
            most = [max(one, (n, at), key=operator.itemgetter(0)) for one, n in zip(most, took, strict=True)]
            needs = most[reserves][0]
            if setting == "emptied":
                allocator.empty_cache()
                idle = max(idle, allocator.reserved_bytes)
            if breaks_at is None and needs > room:
                breaks_at = at
                if not whole:
                    break
        allocated, reserved = most
        reserved_bytes, reserved_at = reserved if reserves else (None, None)
        device_bytes = room + sum(one.n_bytes for one in self.room.outside)
        left = math.floor(100 * (room - (idle or needs)) / device_bytes) / 100
        return WholeRun(
            allocator=setting, limit_bytes=room, needs=needs, allocated_bytes=allocated[0], allocated_at=allocated[1],
            reserved_bytes=reserved_bytes, reserved_at=reserved_at, breaks_at=breaks_at, retries=allocator.retries,
            left_share=left if reserves and breaks_at is None else None,
        )  # fmt: skip

    def _rows(self, way: str, plans: Sequence[ShapePlan] = ()) -> list[WholeRun]:
        """Return the rows of a way with some plans, by setting of the allocator."""
        begins(f"playing {len(self.shapes)} steps: {way}")
        steps, played = self._of(plans), [*self._schedule(self.shapes)]
        costs = (zip(*(step_of(at).cost for at in played), strict=True) for step_of in (steps, self._of()))
        (run_ms, _, again), (plain_ms, flops, _) = (map(sum, columns) for columns in costs)
        # Every recorded step has the optimizer's step, but these batches of the run do not.
        without = len(self.shapes) + -len(self.shapes) // self.accumulation
        spared_ms = without * self._recorded.update_ms
        more: Any = {"way": way, "run_ms": run_ms - spared_ms, "added_ms": run_ms - plain_ms}
        more |= {"run_flops": flops, "recompute_flops": again}
        return [dataclasses.replace(self._played(self.shapes, steps, one), **more) for one in self._settings]

    # --- what to do

    @cached_property
    def _distinct(self) -> list[Shape]:
        return sorted(set(self.shapes), key=lambda shape: (shape[1:], shape[0]))

    def _plan(self, shape: Shape, budget_bytes: int) -> Plan:
        """Return the plan for a shape within a budget; if there is none, the plan with the smallest peak."""
        step = self.steps.recorded(*shape)
        asked = Request(Limit.exactly(budget_bytes), techniques=self.request.techniques)
        return outcome_of(asked, step).plan or smallest_plan(self.request, step)

    @property
    def _recorded(self) -> Profile:
        return self.steps.recorded(*self._largest_of(self._distinct))

    def _largest_of(self, shapes: Sequence[Shape]) -> Shape:
        return max(shapes, key=lambda shape: (self._step(shape, None).peak_bytes, shape))

    def _extent(self, shape: Shape) -> int:
        """Return a measure of the sizes of a batch: the peak with as many samples as the largest batch has."""
        return self._step((max(n for n, *_ in self._distinct), *shape[1:]), None).peak_bytes

    def _edges(self, buckets: int, budget_bytes: int) -> list[int]:
        """Return the largest extent of each bucket: the first needs no plan, the others have equal numbers of steps."""
        too_long = [self._extent(s) for s in self._distinct if self._step(s, None).peak_bytes > budget_bytes]
        lengths = sorted(map(self._extent, self.shapes))
        first = bisect_left(lengths, min(too_long, default=lengths[-1] + 1))
        n = buckets - (first > 0)
        ends = [first, *(first + -(-(len(lengths) - first) * k // n) for k in range(1, n + 1))]
        return sorted({lengths[end - 1] for end in ends if end})

    def _plans(self, buckets: int) -> list[ShapePlan] | None:
        """Return up to ``buckets`` plans with which the run fits; None if there are none."""
        begins("planning")

        def made(budget_bytes: int) -> list[ShapePlan]:
            edges = (
                self._edges(buckets, budget_bytes) if buckets > 1 else [max(map(self._extent, self.shapes))]
            )
            below, found = 0, []
            for edge in edges:
                inside = [one for one in self._distinct if below < self._extent(one) <= edge]
                # The sum is 1 for shapes that fit only in themselves.
                shapes = tuple(one for one in inside if sum(fits_in(one, other) for other in inside) == 1)
                plan = self._plan(self._largest_of(inside), budget_bytes)
                # ``apply`` chooses by the calls that a plan was made for.
                calls = (call for one in shapes for call in self.steps.at(*one).fingerprint.calls_or_batch)
                fingerprint = msgspec.structs.replace(plan.fingerprint, calls=tuple(dict.fromkeys(calls)))
                found.append(ShapePlan(shapes, msgspec.structs.replace(plan, fingerprint=fingerprint)))
                below = edge
            return found

        def takes(plans: list[ShapePlan]) -> tuple[int, int]:
            run = self._played(self.shapes, self._of(plans), self._settings[0], whole=False)
            return max(one.plan.peak_bytes for one in plans), run.needs

        found = within(self.room, made, takes)
        return found.made if found.needs <= self.room.n_bytes else None

    def _largest_size(self) -> int | None:
        """Return the largest batch, or budget of tokens, with which the run fits as it is; 0 if none does."""
        if (drawing := self.drawing) is None:
            return None
        begins("the largest size that fits")
        smallest, unit = 1, 1
        if drawing.tokens is not None:
            smallest, unit = drawing.largest, max(1, drawing.tokens // _TOKEN_STEPS)

        def over(n: int) -> int:
            if not n:  # an empty device
                return -self.room.n_bytes
            shapes = drawing.of_size(smallest + (n - 1) * unit).shapes()
            # Playing a run takes long, and is pointless if its largest step alone is over.
            needs = self._step(max(shapes, key=lambda s: (math.prod(s), s[1:])), None).peak_bytes
            if needs <= self.room.n_bytes:
                needs = self._played(shapes, self._of(), self._settings[0], whole=False).needs
            return needs - self.room.n_bytes

        limit = max(1, (drawing.size - smallest) // unit)
        # The search begins on the line from the limit to an empty device.
        found = largest_within(over, limit, first=[0, limit])
        return smallest + (found - 1) * unit if found else 0

    def certificate(self, buckets: int) -> Certificate:
        """Return the answer."""
        rows, plans, size = self._rows("as it is"), None, None
        if not rows[0].fits:
            size = self._largest_size()
            plans = self._plans(1)
        if plans is not None:
            rows += self._rows("one plan", plans)
            if buckets > 1 and (several := self._plans(buckets)) is not None:
                plans = several
                rows += self._rows(f"{len(plans)} plans", plans)
        batch, tokens = (self.drawing.batch, self.drawing.tokens) if self.drawing else (None, None)
        return Certificate(
            model=self.model, device=self._recorded.device, steps=len(self.shapes), shapes=len(self._distinct),
            batch=batch, tokens=tokens, rows=tuple(rows), largest=size, plans=tuple(plans or ()),
        )  # fmt: skip
