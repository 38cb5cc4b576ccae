"""A case of ``fit``: a step with an optimizer, on one device or on a rank, which makes a row for each way to run it.

Recording and planning each row of a table by itself would take too long, so cases share work. On one device the step
is recorded without its optimizer, and an optimizer is recorded on the parameters alone and put after the step
(``optimizers.py``). Its state is alive during the whole step, and its own step has another peak:

    peak = max(peak of the step without optimizer + state, peak of the optimizer's step)

So everything that planning derives from the step serves all optimizers, and an optimizer only lowers the budget by its
state. The step of a rank is recorded with its optimizer, which then counts as a part of the step.

A compiled step is run with each plan, dry, and so are the sizes among which the largest is looked for: at another size
the compiler makes another program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from sacplan.core.decisions import Decision
from sacplan.core.derived import derived
from sacplan.core.liveness import bytes_at_ops
from sacplan.core.program import Phase, Program, StorageKind
from sacplan.core.progress import begins, is_known
from sacplan.device.device_memory import reserved_bytes
from sacplan.planning.candidate import Candidate
from sacplan.planning.limits import Limit, Room, Try, within
from sacplan.planning.make import asked_of, made_plan, outcome_of, smallest_plan
from sacplan.planning.plan import Plan
from sacplan.planning.planner import Planner
from sacplan.planning.request import Request
from sacplan.planning.search import NEAR
from sacplan.profiling.optimizers import OptimizerStep, program_with_optimizer, with_optimizer
from sacplan.profiling.profile import Profile
from sacplan.questions.batch_sizes import leaving_bytes
from sacplan.questions.largest import largest_within
from sacplan.questions.scaled import Sized, sized
from sacplan.questions.verdict import FitRow
from sacplan.questions.ways import AS_IT_IS, PLAN, Way
from sacplan.techniques.base.step import PlanStep

_Choice: TypeAlias = Candidate | Plan
"""What was found for a step: a plan for a compiled step, which is run with the plan; else a candidate."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a step takes with an optimizer and some decisions.

    Attributes:
        peak_bytes: Peak of the step.
        reserved_bytes: What the allocator reserves; None on a CPU, and if the tensors alone do not fit.
        expandable_bytes: What expandable segments would reserve, if that fits and ``reserved_bytes`` does not.
        step_ms: Time of the step.
    """

    peak_bytes: int
    reserved_bytes: int | None
    expandable_bytes: int | None
    step_ms: float


@dataclass(frozen=True, eq=False)
class SizeAxis:
    """Sizes of a step that differ in one number.

    Attributes:
        name: "batch" for samples, "sequence" for tokens.
        asked: The size that was asked for.
        sizes: Two sizes to record, from which all others are computed; None if there are no two.
        record: Records the step at a size.
        notes: A sentence is added here if the two recordings run different ops.
        unit: Sizes are tried in multiples of this.
        most: The largest size to try, in units.
    """

    name: Literal["batch", "sequence"]
    asked: int
    sizes: tuple[int, int] | None
    record: Callable[[int], Profile]
    notes: list[str]
    unit: int = 1
    most: int = 2**24

    @property
    def limit(self) -> int:
        """The largest size to try."""
        return self.unit * self.most

    @cached_property
    def steps(self) -> Sized | None:
        """The step at any size; None if it runs other ops at other sizes."""
        if self.sizes is None:
            return None
        first, second = self.sizes
        found = sized(self.sizes, (self.record(first), self.record(second)))
        note = f"Steps with another {self.name} run other ops, so the largest was not computed: use sacplan.max_batch."
        if found is None and note not in self.notes:
            self.notes.append(note)
        return found

    def peak_at(self, steps: Sized, made: _Choice, n: int, left: int) -> int:
        """Return the peak of the step at a size with a plan.

        Memory is linear in the batch, and at most quadratic in a sequence, because of attention scores. The polynomials
        ignore that the allocator rounds each storage. If the rounding of all storages together could decide whether the
        peak is within ``left`` bytes, the peak is computed from the program at that size.
        """
        peak = steps.peaks(made.decisions, 1 if self.name == "batch" else 2).at(n)
        first = steps.profiles[0]
        margin = len(first.recorded.storage_bytes) * first.spec.round_up(1)
        return peak if abs(peak - left) > margin else steps.at(n).footprint(made.decisions).peak_bytes


@dataclass(frozen=True, eq=False)
class Case:
    """A step with an optimizer. Plans are searched for when they are first needed, and kept.

    Attributes:
        name: Name of the optimizer.
        step: The step; without its optimizer if that is in ``optimizer``.
        optimizer: The optimizer's step, which is put after the step; None if there is none, or it is in ``step``.
        limit: What the step may take of the device.
        host_room_bytes: What the step may take of the host.
        fields: Further fields of the rows: what runs the step on several devices.
    """

    name: str
    step: Profile
    optimizer: OptimizerStep | None
    limit: Limit
    host_room_bytes: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    _ways: dict[str, Way] = field(default_factory=dict)
    _decided: dict[frozenset[Decision], Way] = field(default_factory=dict)
    _measured: dict[frozenset[Decision], _Measured] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)  # by axis, the largest that fits as it is

    @cached_property
    def room(self) -> Room:
        """The memory of the device that the step may take."""
        return self.limit.room(self.step.spec, self.step.ranks.communicators)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state that are not in ``step``."""
        return 0 if self.optimizer is None else self.optimizer.state_bytes

    @property
    def _behind_host_bytes(self) -> int:
        """Memory of the host that ``optimizer`` takes; 0 on a CPU, where this is in the peak."""
        return 0 if self.optimizer is None else self.optimizer.recorded.unplanned_host_bytes

    @property
    def host_bytes(self) -> int:
        """Memory of the host that step and optimizer take without a plan."""
        return self.step.unplanned_host_bytes + self._behind_host_bytes

    def _update_peak_bytes(self, way: Way) -> int:
        """Return the peak of the optimizer's own step, less the parameters that a plan may leave on the host."""
        return self._update_peak_with_all - leaving_bytes(self.step, way.techniques)

    @cached_property
    def _update_peak_with_all(self) -> int:
        program = self._program(self.smallest(AS_IT_IS))
        at_ops = zip(program.ops, bytes_at_ops(program), strict=True)
        return max((int(n) for op, n in at_ops if op.phase == Phase.OPTIMIZER), default=0)

    def may_fit(self, way: Way = AS_IT_IS) -> bool:
        """Whether a plan in this way could fit at some size: whether the memory that no plan reduces fits."""
        program = self.step.program
        # Storages of kind ``OTHER`` that are there before the step are taken for the batch, which may be smaller at
        # another size. What else is left at the end, parameters, buffers and gradients, is there at any size.
        others = (s for s in program.initial if program.storage_kinds[s] == StorageKind.OTHER)
        batch = sum(map(program.storage_bytes.__getitem__, others))
        leaving = leaving_bytes(self.step, way.techniques)
        constant = self.step.baseline.end_bytes - batch - leaving + self.state_bytes
        return max(constant, self._update_peak_bytes(way)) <= self.room.n_bytes

    def _program(self, made: _Choice, at: Profile | None = None) -> Program:
        """Return the step with its optimizer and a plan; ``at`` is the step at another size."""
        program = (at or self.step).with_plan(made if isinstance(made, Plan) else made.decisions)
        return program if self.optimizer is None else program_with_optimizer(program, self.optimizer)

    def _measure(self, made: _Choice) -> _Measured:
        """Return what the step takes, kept by decisions, since several ways may have the same plan."""
        key = frozenset(made.decisions)
        if key not in self._measured:
            program, room = self._program(made), self.room
            peak = program.footprint.peak_bytes
            # If the tensors alone do not fit, there is no need to play the allocator.
            plays = self.step.spec.kind == "cuda" and peak <= room.n_bytes
            reserved = reserved_bytes(program) if plays else None
            expandable = None
            if room.is_reserved and reserved is not None and reserved > room.n_bytes:
                found = reserved_bytes(program, expandable=True)
                expandable = found if found <= room.n_bytes else None
            step_ms = program.step_ms + self.step.waits_ms(program)
            self._measured[key] = _Measured(peak, reserved, expandable, step_ms)
        return self._measured[key]

    # --- one way

    def smallest(self, way: Way) -> _Choice:
        """Return what has the smallest peak in a way. Its decisions are also used at other sizes."""
        return _smallest(self.step, way)

    def found(self, way: Way) -> Try[_Choice]:
        """Return what ``plan`` finds in a way; if it finds nothing, what has the smallest peak."""

        def planned(budget_bytes: int) -> _Choice:
            left = budget_bytes - self.state_bytes
            # No plan helps if the optimizer's own step is over the budget.
            asked = way.long or self._update_peak_bytes(way) <= budget_bytes
            found = _cheapest(self.step, way, left) if asked else None
            return found or (_nearest if way.long else _smallest_for)(self.step, way, left)

        def takes(made: _Choice) -> tuple[int, int]:
            taken = self._measure(made)
            reserved = taken.reserved_bytes if self.room.is_reserved else None
            return taken.peak_bytes, taken.peak_bytes if reserved is None else reserved

        return within(self.room, planned, takes)

    def row(self, way: Way) -> FitRow:
        """Return the row of one way, at the asked size."""
        begins(f"{self.name}, {way.name}")
        # The plan may take what ``optimizer`` leaves of the host.
        left = max(1, self.step.unplanned_host_bytes, self.host_room_bytes - self._behind_host_bytes)
        way = self._ways[way.name] = way.within(left)
        found = self.found(way)
        made, taken = found.made, self._measure(found.made)
        host_bytes = self.host_bytes + made.host_bytes
        fits = found.needs <= self.room.n_bytes and host_bytes <= self.host_room_bytes
        # No times for a plan that only has the smallest peak, since they would mislead; nor for an optimizer with state
        # on the host, whose copies are not predicted.
        is_timed = (fits or not way.techniques) and not self._behind_host_bytes
        times: dict[str, Any] = self._times(made, taken) if is_timed else {}
        # Rows are made from the simplest way on, so ``same`` is the simplest way with these decisions, or this one.
        same = self._decided.setdefault(frozenset(made.decisions), way)
        row = FitRow(
            optimizer=self.name, way=way.name, techniques=way.techniques, room=self.room,
            peak_bytes=taken.peak_bytes, unplanned_peak_bytes=self._measure(self.smallest(AS_IT_IS)).peak_bytes,
            **times, reserved_bytes=taken.reserved_bytes, expandable_bytes=taken.expandable_bytes,
            same_as=None if same == way else same.name, host_bytes=host_bytes,
            host_room_bytes=self.host_room_bytes, plan=self._plan(way, found) if fits else None, **self.fields,
        )  # fmt: skip
        if row.same_as is None:
            is_known(f"{row.name}: {row.memory}, {'fits' if fits else f'does not fit, by {row.over}'}")
        return row

    def needs(self, row: FitRow) -> int:
        """Return the bytes that a device must have for a row: on a GPU the reserved ones, even if over the room."""
        if self.step.spec.kind != "cuda":
            return row.peak_bytes
        return reserved_bytes(self._program(self.found(self._ways[row.way]).made))

    def is_bound_by_optimizer(self, way: Way) -> bool:
        """Whether the peak that is found in a way is in the optimizer's step."""
        return self._program(self.found(way).made).footprint.peak_phase == Phase.OPTIMIZER

    def _times(self, made: _Choice, taken: _Measured) -> dict[str, float]:
        """Return the times of all micro-steps together. The recorded one is the last, with the optimizer's step.

        Ranks are taken to communicate in each micro-step: with ``no_sync``, all but the last would take less.
        """
        steps, step_ms = self.step.fingerprint.setup.accumulation_steps, taken.step_ms
        if steps > 1:
            whole = self.step if self.optimizer is None else with_optimizer(self.step, self.optimizer)
            step_ms = steps * (step_ms - whole.update_ms) + whole.update_ms
        return {
            "step_ms": step_ms,
            "recompute_ms": steps * made.recompute_ms,
            "added_ms": steps * made.added_ms,
        }

    def _plan(self, way: Way, found: Try[_Choice]) -> Plan | None:
        """Return the plan of a way; None for the step as it is, a step without its optimizer, and a compiled step."""
        if not way.techniques or self.optimizer is not None or isinstance(found.made, Plan):
            return None
        asked = replace(_request(way), limit=self.limit)
        planner = _planner(self.step, way, found.budget_bytes)
        budget_bytes = max(found.budget_bytes, found.peak_bytes)
        return made_plan(self.step, found.made, budget_bytes, **asked_of(asked, planner, found.made))

    # --- other sizes

    def largest(self, row: FitRow, axis: SizeAxis) -> int | None:
        """Return the largest size that fits in the way of a row, 0 if none does, or None if it cannot be computed."""
        # Nothing fits at any size; or not even one sample does.
        is_batch, is_one = axis.name == "batch", axis.name == "batch" and axis.asked == 1
        if not self.may_fit(self._ways[row.way]) or (is_one and not row.fits):
            return 0
        # The asked size fits, and no larger one may be tried: the model has no more positions. Not for a single token,
        # which has no length to compare with.
        if row.fits and 1 < axis.asked == axis.limit:
            return axis.asked
        made = [self.smallest(self._ways[row.way]), self.smallest(AS_IT_IS)]
        # A step of n samples takes at most n times as much as one of a single sample, so not even that fits.
        if is_batch and min(self._measure(one).peak_bytes for one in made) > axis.asked * self.room.n_bytes:
            return 0
        # What fits as it is fits in every way. The row of the step as it is comes first.
        known = min(max(self._sizes.get(axis.name, 0), axis.asked if row.fits else 0), axis.limit)
        if self.step.runs_compiled:
            return self._noted(row, axis, max(known, self._largest_run(axis, made[0])))
        # One sample fits: if two do not, no further batch has to be recorded.
        if is_one:
            two = axis.record(2)
            if all(self._program(one, two).footprint.peak_bytes > self.room.n_bytes for one in made):
                return 1
        if axis.steps is None:
            return None
        return self._noted(row, axis, self._largest(axis.steps, axis, made, known))

    def _noted(self, row: FitRow, axis: SizeAxis, found: int) -> int:
        if row.way == AS_IT_IS.name:
            self._sizes[axis.name] = found
        return found

    def _largest_run(self, axis: SizeAxis, made: _Choice) -> int:
        """Return the largest size that fits with the plan ``made``.

        Each size tried (about four) is compiled, recorded and dry-run with the plan.
        """

        def over(n: int) -> int:
            program = self._program(made, axis.record(n * axis.unit))
            return self.room.needs(program) - self.room.n_bytes

        return axis.unit * largest_within(over, axis.most, first=[axis.asked // axis.unit])

    def _largest(self, steps: Sized, axis: SizeAxis, made: list[_Choice], known: int) -> int:
        """Return the largest size that fits with any of some plans; no smaller one than ``known`` is looked for."""
        state = self.state_bytes

        def by_peak(budget_bytes: int) -> int:
            left = budget_bytes - state

            def over(n: int) -> int:
                return min(axis.peak_at(steps, one, n * axis.unit, left) for one in made) - left

            return max(known, axis.unit * largest_within(over, axis.most))

        def takes(n: int) -> tuple[int, int]:
            if n == known:
                return 0, 0
            # A plan made for the asked size may be worse here than the step as it is, which also wins between equals.
            peaks = [axis.peak_at(steps, one, n, self.room.n_bytes - state) for one in reversed(made)]
            best = made[::-1][peaks.index(min(peaks))]
            return min(peaks) + state, reserved_bytes(self._program(best, steps.at(n)))

        if known == axis.limit or not self.room.is_reserved:
            return by_peak(self.room.n_bytes) if known < axis.limit else known
        found = within(self.room, by_peak, takes)
        return found.made if found.needs <= self.room.n_bytes else known


# --- plans of a step, whatever optimizer is put after it


def _request(way: Way) -> Request:
    return Request(techniques=way.techniques, host_budget=way.host_budget)


@derived
def _smallest(step: Profile, way: Way, left: int = 0) -> _Choice:
    """Return what has roughly the smallest peak; with ``left`` bytes as a budget, the first that holds it."""
    begins(f"smallest peak: {way.name}")
    if not way.techniques:
        return Candidate(PlanStep(step.program, device=step.spec), (), "unplanned")
    if step.runs_compiled:
        return smallest_plan(_request(way), step)
    # With the quick solver: a peak that is a little smaller changes no row that fits.
    return replace(_request(way), solver="greedy").planner(step).smallest(left, quick=not way.long)


def _smallest_for(step: Profile, way: Way, left: int) -> _Choice:
    """Return what has the smallest peak; if that is only just over a budget, search again for the budget."""
    found = _smallest(step, way)
    is_close = isinstance(found, Candidate) and left < found.footprint.peak_bytes <= (1 + NEAR) * left
    return _smallest(step, way, left) if is_close else found


@derived
def _cheapest(step: Profile, way: Way, left: int) -> _Choice | None:
    """Return what ``plan`` finds for a budget; None if it finds nothing, or would have to search for long."""
    if not way.techniques:  # as it is: nothing to plan
        return None
    if step.runs_compiled:
        return outcome_of(replace(_request(way), limit=Limit.exactly(max(1, left))), step).plan
    return _planner(step, way, left).cheapest(left, quick=not way.long)


@derived
def _planner(step: Profile, way: Way, left: int) -> Planner:
    planner = _request(way).planner(step)
    # Take over the searches with fewer techniques from the planner of "plan", which was asked for the same budget.
    known = planner if way == PLAN else _planner(step, PLAN, left)
    is_wider = set(known.techniques) < set(planner.techniques)
    is_same = known.basis.recorded.key == planner.basis.recorded.key
    return planner.that_knows(known) if is_wider and is_same else planner


def _nearest(step: Profile, way: Way, left: int) -> _Choice:
    """Return what came nearest to a budget for which the long search of ``_cheapest`` found nothing."""
    return _planner(step, way, left).searches.nearest.smallest
