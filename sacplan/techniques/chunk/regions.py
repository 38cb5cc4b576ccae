"""Which stretches of ops could run in slices, and about how much memory each would take.

For each op near a place where much is alive, and each axis of its first output:

1. The factor flows from there to earlier ops (``flow.py``), within a window. An op that is in the way runs before the
   loop, and the flow is tried again (``_flow``); or the window begins behind it (``_flows``).
2. Each op of the flow may be the first one of the loop. The ops from there on that are connected with the last one are
   a stretch (``_members``).
3. Its memory is estimated. Outside of the loop it follows from the recording: what is alive at each op, less what the
   loop never makes as a whole. Inside it is ``fixed + by_length * length of a slice`` at each op (``_loop_bytes``),
   without what the allocator rounds up. ``body.py`` has exact figures.

This is a heuristic search. The window, the number of conflicts, of starts and of flows in all are bounded, and only the
first output of an op is cut, so the best stretch may not be among the candidates.

Layers repeat, so an op whose surroundings were seen before gets the candidates that were found there.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sacplan.core.calls import dtype_of
from sacplan.core.elements import ROOT_SCOPE
from sacplan.core.factors.axes import Axis
from sacplan.core.pins import NO_PINS, Pins
from sacplan.core.program import Program
from sacplan.device.devices import DeviceSpec
from sacplan.techniques.chunk.dataflow import Dataflow, is_dense
from sacplan.techniques.chunk.flow import Conflict, FactorFlow, axis_of, factor_flow, parts_of

_WINDOW = 160  # ops that a stretch reaches back at most
_REPEATED = 24  # ops in a row that are like earlier ones: layers repeat
_PERIODS = 1.6  # layers, where they repeat
_BEYOND = 40  # ops after the loop at which Python may still hold what the stretch would have made
_CONFLICTS = 12  # ops that are made to run before the loop, of one stretch
_STARTS = 8
_FLOWS = 32_000  # attempts in all: what is done for a program without repeated layers is bounded
_ROUNDING = 1e-6
_HOT = 0.1  # share of what the step takes above which memory is worth saving


class StretchOutput(NamedTuple):
    """Something that is needed after a stretch: an output of one of its ops, and the last version of its storage."""

    op: int
    output: int
    storage: int


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """A stretch, with op numbers relative to its last op.

    Attributes:
        start, until: the first op; the last one at which the stretch changes memory. In the plain step Python may hold
            results for a while after the loop, which the stretch never makes.
        members: ops of the loop.
        axis: what is sliced of the first output of the last op.
        exits: (op, output) of each result that is needed after the loop.
        others: by op from ``start`` to ``until``, whether it still runs by itself.
        change: by op from ``start`` to ``until``, how many more bytes are alive while it runs (or fewer, below 0).
        fixed, by_length: by op of the loop, bytes that are alive beside those outside: a constant, and a part for each
            element in the length of a slice.
        slice_ms: the time that each further slice costs; ``loop_ms``: the time that the loop costs once.
    """

    start: int
    until: int
    members: tuple[int, ...]
    axis: Axis
    exits: tuple[tuple[int, int], ...]
    others: npt.NDArray[np.bool_]
    change: npt.NDArray[np.int64]
    fixed: npt.NDArray[np.float64]
    by_length: npt.NDArray[np.float64]
    slice_ms: float
    loop_ms: float


@dataclass(slots=True, eq=False)
class Candidates:
    """A stretch, at each place of a program where it is found.

    Attributes:
        shape: the stretch.
        ends: by place, its last op, where the loop runs.
        outside: by place, the most that is alive at an op from ``start`` to ``until`` that is not in the loop.
        base: by place, bytes that are alive during the loop beside what it makes.
        exact: by number of slices that was recorded, the bytes that the loop makes at its peak.
        ratio: the largest factor by which an estimate of that was too low; others are scaled by it.
    """

    shape: Shape
    ends: npt.NDArray[np.int64]
    outside: npt.NDArray[np.int64]
    base: npt.NDArray[np.int64]
    exact: dict[int, int] = field(default_factory=dict)
    ratio: float = 1.0
    _least: npt.NDArray[np.int64] | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """The most slices that it can be cut into."""
        return self.shape.axis.size

    def inside(self, slices: int) -> float:
        """Return the bytes that the loop makes at its peak with so many slices: recorded, or else estimated."""
        if slices in self.exact:
            return self.exact[slices]
        length = -(-self.size // slices)
        return self.ratio * float((self.shape.fixed + self.shape.by_length * length).max())

    def learn(self, slices: int, inside: int) -> None:
        """Note what the loop was recorded to make at its peak, and correct the estimates for other numbers."""
        self.ratio = max(self.ratio, inside / max(1.0, self.inside(slices) / self.ratio))
        self.exact[slices] = inside
        self._least = None

    def fewest_slices(self, budget: int) -> npt.NDArray[np.int64]:
        """Return by place the fewest slices that stay within a budget; 0 where that is not possible.

        With ``room = budget - base``, each op of the loop bounds the length of a slice: ``ratio * (fixed + by_length *
        length) <= room``. The tightest bound counts. A recorded number of slices that fits is taken if it is smaller.
        """
        room = (budget - self.base).astype(np.float64)
        shape = self.shape
        left = room[:, None] / self.ratio - shape.fixed
        cut = shape.by_length > 0
        longest = np.floor(left[:, cut] / shape.by_length[cut] + _ROUNDING)
        length = np.minimum(float(self.size), longest.min(axis=1, initial=float(self.size)))
        length[(left[:, ~cut] < -_ROUNDING).any(axis=1)] = 0
        fits = (length >= 1) & (self.outside <= budget)
        slices = np.where(fits, -(-self.size // np.maximum(1, length)), 0).astype(np.int64)
        for known, inside in self.exact.items():
            may = (self.outside <= budget) & (inside <= room) & ((slices == 0) | (known < slices))
            slices[may] = known
        return slices

    def least_peak(self) -> npt.NDArray[np.int64]:
        """Return by place the peak with the smallest slices; kept until something is learned."""
        if self._least is None:
            inside = min([self.inside(self.size), *self.exact.values()])
            self._least = np.maximum(self.outside, self.base + int(np.ceil(inside)))
        return self._least

    def extra_ms(self, slices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return about how much time numbers of slices cost."""
        return np.asarray(self.shape.loop_ms + (slices - 1) * self.shape.slice_ms, dtype=np.float64)


def candidates(flow: Dataflow, spec: DeviceSpec, pins: Pins = NO_PINS) -> list[Candidates]:
    """Return stretches of a program that could lower its peak, in no particular order."""
    return _Finder(flow, spec, pins).find()


class _Finder:
    """Finds candidates.

    Attributes:
        live, total: by op, bytes alive while it runs, without and with its workspace.
        surroundings, windows: see ``_surroundings`` and ``_windows``.
        flows_left: attempts that are left.
    """

    def __init__(self, flow: Dataflow, spec: DeviceSpec, pins: Pins) -> None:
        self.flow, self.pins = flow, pins
        self.program: Program = flow.program
        self.live = np.array(flow.live, dtype=np.int64)
        self.total = self.live + np.array(flow.workspace, dtype=np.int64)
        self.launch_ms = spec.kernel_launch_us * 1e-3
        self.ms_per_byte = 1e3 / (spec.bandwidth_bytes_per_s * spec.bandwidth_efficiency)
        self.bytes = [
            int(np.prod(t.shape, dtype=np.int64)) * dtype_of(t).itemsize for t in self.program.tensors
        ]
        self.surroundings = self._surroundings()
        self.windows = self._windows()
        self.flows_left = _FLOWS
        self._units: dict[frozenset[int], bool] = {}
        scopes = {op.scope for op in self.program.ops}
        self.all_have_units = not pins and unit_scope(self.program, scopes) != ROOT_SCOPE

    def find(self) -> list[Candidates]:
        """Find them, beginning where most is alive, so that the bound on attempts ends the least useful."""
        flow = self.flow
        if not flow.n_ops:
            return []
        floor = self.program.liveness.initial_bytes
        hot = np.flatnonzero(self.total > floor + _HOT * (int(self.total.max()) - floor)).tolist()
        # By kind, the ops at which a stretch could end: they compute into memory of their own, have a rule, and
        # much is alive in their window.
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for end in range(flow.n_ops):
            if flow.computes[end] and flow.rules[end] is not None and self.program.ops[end].writes:
                window = self.windows[end]
                at = bisect.bisect_right(hot, end)
                if at and hot[at - 1] >= end - window:
                    first = max(0, end - window)
                    key = (end - first, end - hot[at - 1], *self.surroundings[first : end + _BEYOND])
                    by_kind[key].append(end)
        found = []
        for ends in sorted(by_kind.values(), key=lambda ends: -self._worth(ends)):
            if self.flows_left <= 0:
                break
            last_hot = hot[bisect.bisect_right(hot, ends[0]) - 1]
            for shape in self._shapes(ends[0], last_hot):
                placed = self._placed(shape, ends)
                if len(placed.ends):
                    found.append(placed)
        return found

    def _worth(self, ends: Sequence[int]) -> int:
        """Return the most that is alive in the window of the first of some ops that are alike."""
        return int(self.total[max(0, ends[0] - self.windows[ends[0]]) : ends[0] + 1].max())

    # --- repeated layers ---

    def _surroundings(self) -> list[int]:
        """Return by op a number that is the same for ops that do the same to tensors that are used in the same way.

        Distances to makers and readers count, up to the reach of a stretch. So if a run of numbers repeats, candidates
        that end there do, too.
        """
        flow, tensors = self.flow, self.program.tensors
        far = _WINDOW + _BEYOND

        def near(distance: int) -> int:
            return min(distance, far)

        known: dict[Any, int] = {}
        found = []
        for i, op in enumerate(self.program.ops):
            key = (
                op.name,
                op.arguments,
                tuple(
                    (
                        near(i - flow.producer[t]) if flow.producer[t] >= 0 else -1,
                        _layout(tensors[t]),
                        near(flow.last_op[flow.storage[t]] - i),
                    )
                    for t in op.inputs
                ),
                tuple(
                    (
                        _layout(tensors[t]),
                        tuple(near(c - i) for c in flow.consumers[t]),
                        near(flow.last_op[flow.storage[t]] - i),
                        flow.last_op[flow.storage[t]] == flow.n_ops,
                    )
                    for t in op.outputs
                ),
                op.replaces >= 0,
                op.workspace_bytes,
            )
            found.append(known.setdefault(key, len(known)))
        return found

    def _windows(self) -> list[int]:
        """Return by op how far back a stretch that ends there may reach: somewhat over a layer, if layers repeat."""
        found = []
        seen: dict[tuple[int, ...], int] = {}
        for end in range(self.flow.n_ops):
            here = tuple(self.surroundings[max(0, end + 1 - _REPEATED) : end + 1])
            period = end - seen.get(here, -_WINDOW)
            seen[here] = end
            found.append(min(_WINDOW, max(2 * _REPEATED, int(period * _PERIODS))))
        return found

    # --- shapes ---

    def _shapes(self, end: int, last_hot: int) -> Iterator[Shape]:
        flow = self.flow
        seed = flow.outputs[end][0]
        rule = flow.rules[end]
        assert rule is not None
        seen: set[Any] = set()
        for axis in self._axes(rule, seed):
            for found in self._flows(end, seed, axis):
                # A loop that begins behind the last hot op lowers nothing.
                starts = sorted(i for i in found.within if flow.computes[i] and i <= last_hot)
                for start in starts:
                    members = self._members(found, start, end)
                    if not members or (axis, members) in seen:
                        continue
                    seen.add((axis, members))
                    yield from self._finished(found, members, end, axis)

    def _axes(self, rule: Any, seed: int) -> Iterator[Axis]:
        """Yield the axes of an op's first output: its factors, and parts of these that other ops see (``splits``)."""
        for dim, factors in enumerate(rule.outputs[0]):
            sizes = [rule.sizes[f] for f in factors]
            for axis in parts_of(Axis(dim, 1, math.prod(sizes), 1), sizes):
                yield axis
                for split in self.flow.splits.get(axis.size, ()):
                    yield from parts_of(axis, split)

    def _flows(self, end: int, seed: int, axis: Axis) -> Iterator[FactorFlow]:
        """Yield flows from as far back as may be, then from behind the first op that was in the way, and so on."""
        start = max(0, end - self.windows[end])
        for _ in range(_STARTS):
            found, obstacles = self._flow(end, seed, axis, start)
            if found is not None:
                yield found
            later = [op for op in obstacles if start <= op < end]
            if not later:
                return
            start = min(later) + 1

    def _flow(self, end: int, seed: int, axis: Axis, start: int) -> tuple[FactorFlow | None, set[int]]:
        """Let the factor flow, and make each op that is in the way run before the loop, until it flows.

        Returns:
            The flow, or None if an op is in the way for which that is no help; and the ops that run before.
        """
        whole: set[int] = set()
        for _ in range(_CONFLICTS):
            self.flows_left -= 1
            try:
                return factor_flow(self.flow, seed, axis, start, end, whole), whole
            except Conflict as conflict:
                if conflict.op < 0 or conflict.op in whole or conflict.op == end:
                    break
                whole.add(conflict.op)
        return None, whole

    def _members(self, found: FactorFlow, start: int, end: int) -> tuple[int, ...]:
        """Return the ops of the loop if it begins at ``start``, without views of what it does not make."""
        flow = self.flow
        members: list[int] = []
        made: set[int] = set()
        for i in sorted(found.within):
            if i < start:
                continue
            # A view of an input is taken outside of the loop.
            if not flow.computes[i] and not any(t in made for t in flow.inputs[i]):
                continue
            members.append(i)
            made.update(flow.outputs[i])
        return self._connected(members, end)

    def _connected(self, members: Sequence[int], end: int) -> tuple[int, ...]:
        """Return those that are connected with the last op: the axis of that one does not say how others are cut."""
        flow = self.flow
        maker = {t: i for i in members for t in flow.outputs[i]}
        beside: dict[int, list[int]] = defaultdict(list)
        for i in members:
            for t in flow.inputs[i]:
                if t in maker:
                    beside[i].append(maker[t])
                    beside[maker[t]].append(i)
        reached, queue = {end}, [end]
        while queue:
            for i in beside[queue.pop()]:
                if i not in reached:
                    reached.add(i)
                    queue.append(i)
        return tuple(sorted(reached))

    def _finished(self, found: FactorFlow, members: tuple[int, ...], end: int, axis: Axis) -> Iterator[Shape]:
        """Yield the shape of a stretch, twice if Python holds results after the loop.

        The one that ends with the loop may be followed by another stretch at once. The other also counts what is saved
        after the loop.
        """
        exits = self._exits(members, end)
        # Nothing is needed of it, or an exit has no place; no module call to name it by; or its inputs change.
        if not exits or not self._has_unit(members) or not self._inputs_stay(members, end):
            return
        inside = set(members)
        made = {s for i in members for s in self.program.ops[i].writes}
        kept = {self.flow.origin[e.storage] for e in exits}
        lost = [s for s in made if self.flow.origin[s] not in kept]
        # How long Python holds what the loop never makes as a whole: its bytes are saved up to there.
        held = max((self.flow.last_op[s] for s in lost), default=end)
        held = min(held, end + _BEYOND, self.flow.n_ops - 1)
        fixed, by_length = self._loop_bytes(found, members, lost)
        slice_ms, loop_ms = self._times(found, members, exits)
        for until in dict.fromkeys((end, max(end, held))):
            start = members[0]
            change = np.zeros(until - start + 1, dtype=np.int64)
            for s in lost:
                first, last = max(self.flow.maker[s], start), min(self.flow.last_op[s], until)
                # Never allocated as a whole: less at each op at which it was alive.
                change[first - start : last - start + 1] -= self.program.storage_bytes[s]
            for s in self._input_storages(members):
                last = self.flow.last_op[s]
                if last < end and s not in made:
                    # The loop runs at the end, so an input that was freed before is held until then.
                    change[max(last + 1, start) - start : end - start + 1] += self.program.storage_bytes[s]
            others = np.array([i not in inside for i in range(start, until + 1)])
            yield Shape(
                start - end,
                until - end,
                tuple(i - end for i in members),
                axis,
                tuple((e.op - end, e.output) for e in exits),
                others,
                change,
                fixed,
                by_length,
                slice_ms,
                loop_ms,
            )

    def _exits(self, members: Sequence[int], end: int) -> list[StretchOutput] | None:
        """Return what is needed after the loop; None if some of that cannot have a buffer."""
        flow, program = self.flow, self.program
        inside = set(members)
        found = []
        for i in members:
            op = program.ops[i]
            if op.replaces >= 0 and flow.maker[op.replaces] not in inside:
                return None  # it overwrites in place what others made
            for s in op.writes:
                if not flow.read_after(s, end):
                    continue
                root = flow.maker[flow.origin[s]]
                if root not in inside:
                    return None  # the memory is there before the loop
                position = next(
                    q for q, t in enumerate(flow.outputs[root]) if flow.storage[t] == flow.origin[s]
                )
                tensor = program.tensors[flow.outputs[root][position]]
                if not is_dense(tensor) or tensor.offset:
                    return None  # the executor makes a buffer by shape and strides alone
                found.append(StretchOutput(root, position, s))
        return found

    def _input_storages(self, members: Sequence[int]) -> set[int]:
        flow = self.flow
        made = {t for i in members for t in flow.outputs[i]}
        return {flow.storage[t] for i in members for t in flow.inputs[i] if t not in made}

    def _inputs_stay(self, members: Sequence[int], end: int) -> bool:
        """Whether no op in between overwrites what the loop reads."""
        inside, program = set(members), self.program
        inputs = self._input_storages(members)
        for i in range(members[0], end):
            if i not in inside:
                op = program.ops[i]
                if not inputs.isdisjoint(op.mutates) or op.replaces in inputs:
                    return False
        return True

    def _has_unit(self, members: Sequence[int]) -> bool:
        scopes = frozenset(self.program.ops[i].scope for i in members)
        if scopes not in self._units:
            self._units[scopes] = unit_scope(self.program, scopes, self.pins) != ROOT_SCOPE
        return self._units[scopes]

    def _loop_bytes(
        self, found: FactorFlow, members: Sequence[int], lost: Sequence[int]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return by op of the loop that computes what is alive beside what is outside: constant, and by length.

        Counted are tensors that the loop makes, from their op to their last use in a slice, workspaces, and slices of
        inputs that are copies: those along an axis that is not the outermost in memory.
        """
        flow, program = self.flow, self.program
        size = next(iter(found.within.values())).size
        made = {t for i in members for t in flow.outputs[i]}
        last: dict[Any, int] = {}
        for i in members:
            for t in (*flow.inputs[i], *flow.outputs[i]):
                last[flow.origin[flow.storage[t]]] = i
        fixed, by_length = [], []
        alive: dict[int, tuple[float, float]] = {}
        for i in members:
            rule, within = flow.rules[i], found.within[i]
            assert rule is not None
            for t, dims in zip(flow.inputs[i], rule.inputs, strict=True):
                s = flow.origin[flow.storage[t]]
                if t not in made and s not in alive:
                    axis = axis_of(dims, rule.sizes, within)
                    if axis is not None and axis.outer > 1:
                        alive[s] = 0.0, self.bytes[t] / size  # a copy
            for t in flow.outputs[i]:
                s = flow.origin[flow.storage[t]]
                if s not in alive and flow.computes[i]:
                    cut = t in found.axes
                    alive[s] = (0.0, self.bytes[t] / size) if cut else (float(self.bytes[t]), 0.0)
            if flow.computes[i]:
                fixed.append(sum(a for a, _ in alive.values()))
                by_length.append(sum(b for _, b in alive.values()) + program.ops[i].workspace_bytes / size)
            for s in [s for s in alive if last[s] == i]:
                del alive[s]
        return np.array(fixed), np.array(by_length)

    def _times(
        self, found: FactorFlow, members: Sequence[int], exits: Sequence[StretchOutput]
    ) -> tuple[float, float]:
        """Return the time of each further slice (launches, operands that it reads whole), and of the loop once."""
        flow = self.flow
        slice_ms = len(exits) * self.launch_ms
        for i in members:
            if flow.computes[i]:
                rule, within = flow.rules[i], found.within[i]
                assert rule is not None
                again = sum(
                    self.bytes[t]
                    for t, dims in zip(flow.inputs[i], rule.inputs, strict=True)
                    if axis_of(dims, rule.sizes, within) is None
                )
                slice_ms += self.launch_ms + again * self.ms_per_byte
        copied = sum(self.bytes[flow.outputs[e.op][e.output]] for e in exits)
        return slice_ms, len(exits) * self.launch_ms + 2 * copied * self.ms_per_byte

    # --- placed ---

    def _placed(self, shape: Shape, ends: Sequence[int]) -> Candidates:
        """Place a shape at ops that are alike, wherever it lowers the most that is alive there."""
        last = self.flow.n_ops - 1 - shape.until
        at = np.array(
            [
                end
                for end in ends
                if -shape.start <= end <= last
                and (self.all_have_units or self._has_unit([end + i for i in shape.members]))
            ],
            dtype=np.int64,
        )
        span = at[:, None] + np.arange(shape.start, shape.until + 1)
        held = self.live[span] + shape.change
        others = np.where(shape.others, held + self.total[span] - self.live[span], 0)
        outside, base = others.max(axis=1, initial=0), held[:, -shape.start]
        inside = float((shape.fixed + shape.by_length).max())
        # Judged by slices of one element, the most that slicing can do.
        helps = np.maximum(outside, base + inside) < self.total[span].max(axis=1, initial=0)
        return Candidates(shape, at[helps], outside[helps], base[helps])


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride, tensor.offset


def unit_scope(program: Program, scopes: Iterable[int], pins: Pins = NO_PINS) -> int:
    """Return the smallest module call around some ops whose module is called once in the step; -1 if there is none.

    A call site does not say in which call of a module it is, so a stretch cannot be named by a module that is called
    several times.
    """
    scope = program.common_scope(scopes)
    while scope != ROOT_SCOPE and len(program.calls.get(program.scopes[scope].fqn, ())) != 1:
        scope = program.scopes[scope].parent
    if scope != ROOT_SCOPE and pins and not pins.may_be_a_unit(program, program.scopes[scope].fqn):
        return ROOT_SCOPE
    return scope
