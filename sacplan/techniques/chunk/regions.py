"""Which stretches of ops could run in slices, and about how much memory each would take.

For each op, and each axis of its first output:

1. The ops up to that op are cut, within a window, backwards from what is asked for (``_cuts``). An op that cannot make
   what is asked of it in slices runs before the loop.
2. Each of these ops may be the first one of the loop. The ops from there on that are connected with the last one are
   a stretch (``_members``).
3. Its memory is estimated. Outside of the loop it follows from the recording: what is alive at each op, less what the
   loop never makes as a whole. Inside it is ``fixed + by_length * length of a slice`` at each op (``_loop``),
   without what the allocator rounds up. ``stretches.py`` has exact figures.

This is a heuristic search. The window and the number of ops at which a stretch may end are bounded, and only the first
output of an op is asked for, so the best stretch may not be among the candidates.

Layers repeat, so an op whose surroundings were seen before gets the candidates that were found there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sacplan.core.elements import ROOT_SCOPE
from sacplan.core.factors.axes import Axis
from sacplan.core.pins import NO_PINS, Pins
from sacplan.core.program import Program
from sacplan.core.replayed_calls import dtype_of
from sacplan.device.devices import DeviceSpec
from sacplan.techniques.base.regions import connected
from sacplan.techniques.chunk.dataflow import Dataflow
from sacplan.techniques.chunk.flow import (
    FactorCut,
    FlowOp,
    Window,
    axes_of,
    cuts,
    splits_of,
    window_of,
)
from sacplan.torch_compat.private import is_dense

_WINDOW = 160  # ops that a stretch reaches back at most
_REPEATED = 24  # ops in a row that are like earlier ones: layers repeat
_PERIODS = 1.6  # layers, where they repeat
_BEYOND = 40  # ops after the loop at which Python may still hold what the stretch would have made
_ENDS = 4_000  # that are tried: what is done for a program without repeated layers is bounded
_ROUNDING = 1e-6  # absorbs rounding errors in the coefficients of ``lines``, which are floats


@dataclass(slots=True, eq=False)
class Shape:
    """A stretch, with op numbers relative to its last op.

    Attributes:
        members: ops of the loop.
        axis: what is sliced of the first output of the last op.
        exits: (op, output) of each result that is needed after the loop.
        lines: ``(fixed, by_length)`` of each op of the loop: while it runs, tensors of the loop take
            ``fixed + by_length * length of a slice`` bytes.
        slice_ms: the time that each further slice costs; ``loop_ms``: the time that the loop costs once.
        exact: by number of slices that was rehearsed, the bytes that the loop makes at its peak.
        ratio: the largest factor by which an estimate of these bytes was too low; other estimates are scaled by it.
    """

    members: tuple[int, ...]
    axis: Axis
    exits: tuple[tuple[int, int], ...]
    lines: frozenset[tuple[float, float]]
    slice_ms: float
    loop_ms: float
    exact: dict[int, int] = field(default_factory=dict)
    ratio: float = 1.0

    def inside(self, slices: int) -> float:
        """Return the bytes that the loop makes at its peak with so many slices: rehearsed, or else estimated."""
        if slices in self.exact:
            return self.exact[slices]
        length = -(-self.axis.size // slices)
        return self.ratio * max(fixed + by_length * length for fixed, by_length in self.lines)

    def learn(self, slices: int, inside: int) -> bool:
        """Note what the loop makes at its peak, to correct the estimates; return whether that was not known."""
        known = self.exact.get(slices) == inside
        self.ratio = max(self.ratio, inside / max(1.0, self.inside(slices) / self.ratio))
        self.exact[slices] = inside
        return not known

    def fewest_slices(self, room: int) -> int:
        """Return the fewest slices with which the loop makes no more than ``room`` bytes; 0 if there is no such number.

        Each op of the loop bounds the length of a slice: ``ratio * (fixed + by_length * length) <= room``. The tightest
        bound counts. A rehearsed number of slices that fits is taken if it is smaller.
        """
        length, unscaled_room = self.axis.size, room / self.ratio
        for fixed, by_length in self.lines:
            if by_length > 0:
                length = min(length, math.floor((unscaled_room - fixed) / by_length + _ROUNDING))
            elif unscaled_room - fixed < -_ROUNDING:
                length = 0
        fits = [slices for slices, inside in self.exact.items() if inside <= room]
        if length >= 1:
            fits.append(-(-self.axis.size // length))
        return min(fits, default=0)

    def extra_ms(self, slices: int) -> float:
        """Return about how much time a number of slices costs."""
        return self.loop_ms + (slices - 1) * self.slice_ms


class Candidate(NamedTuple):
    """A stretch at one place of a program.

    Attributes:
        shape: the stretch; shared by all places where layers repeat.
        start, end, until: the first op; the last one, where the loop runs; and the last one at which it changes memory.
            In the plain step Python may hold results for a while after the loop, which the stretch never makes.
        outside: the most that is alive at an op from ``start`` to ``until`` that is not in the loop.
        base: bytes that are alive during the loop, without what it makes.
    """

    shape: Shape
    start: int
    end: int
    until: int
    outside: int
    base: int

    def least_peak(self) -> int:
        """Return the peak with the smallest slices."""
        shape = self.shape
        inside = min([shape.inside(shape.axis.size), *shape.exact.values()])
        return max(self.outside, self.base + math.ceil(inside))


def candidates(flow: Dataflow, spec: DeviceSpec, pins: Pins = NO_PINS) -> list[Candidate]:
    """Return stretches of a program that could lower its peak, in no particular order."""
    return list(_Finder(flow, spec, pins).find())


class _Finder:
    """Finds candidates.

    Attributes:
        live, total: by op, bytes alive while it runs, without and with its workspace.
        splits: see ``splits_of``.
        surroundings, windows: see ``_surroundings`` and ``_windows``.
    """

    def __init__(self, flow: Dataflow, spec: DeviceSpec, pins: Pins) -> None:
        self.flow, self.pins = flow, pins
        self.program: Program = flow.program
        self.total = self.program.liveness.at_op
        self.live = self.total - np.array([op.workspace_bytes for op in self.program.ops], dtype=np.int64)
        self.launch_ms = spec.kernel_launch_us * 1e-3
        self.ms_per_byte = 1e3 / (spec.bandwidth_bytes_per_s * spec.bandwidth_efficiency)
        self.bytes = [math.prod(t.shape) * dtype_of(t).itemsize for t in self.program.tensors]
        self.surroundings = self._surroundings()
        self.windows = self._windows()
        self.splits = splits_of(rule for rule in flow.rules if rule is not None)
        self._units: dict[frozenset[int], bool] = {}

    def find(self) -> Iterator[Candidate]:
        """Yield candidates, beginning where most is alive, so that the bound on ends leaves out the least useful."""
        flow = self.flow
        if not flow.n_ops:
            return
        # By kind, the ops at which a stretch could end: they compute into memory of their own, and have a rule.
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for end in range(flow.n_ops):
            if flow.computes[end] and flow.rules[end] is not None and self.program.ops[end].writes:
                first = max(0, end - self.windows[end])
                key = (end - first, *self.surroundings[first : end + _BEYOND])
                by_kind[key].append(end)
        for ends in sorted(by_kind.values(), key=lambda ends: -self._worth(ends))[:_ENDS]:
            for op_cuts, members, axis in self._stretches(ends[0]):
                yield from self._candidates(op_cuts, members, axis, ends)

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

        def near(distance: int) -> int:
            return min(distance, _WINDOW + _BEYOND)

        def used(i: int, t: int) -> tuple[Any, ...]:
            last = flow.last_op[flow.storage[t]]
            return _layout(tensors[t]), near(last - i), last == flow.n_ops

        known: dict[Any, int] = {}
        found = []
        for i, op in enumerate(self.program.ops):
            made = (near(i - flow.producer[t]) if flow.producer[t] >= 0 else -1 for t in op.inputs)
            read = (tuple(near(c - i) for c in flow.consumers[t]) for t in op.outputs)
            what = op.name, op.arguments, op.replaces >= 0, op.workspace_bytes, *made, *read
            key = (*what, *(used(i, t) for t in (*op.inputs, *op.outputs)))
            found.append(known.setdefault(key, len(known)))
        return found

    def _windows(self) -> list[int]:
        """Return by op how far back a stretch that ends there may reach: somewhat over a layer, if layers repeat."""
        found = []
        seen: dict[tuple[int, ...], int] = {}
        for end in range(self.flow.n_ops):
            here = tuple(self.surroundings[max(0, end + 1 - _REPEATED) : end + 1])
            period = end - seen.get(here, -_WINDOW)  # not seen before: the whole window
            seen[here] = end
            found.append(min(_WINDOW, max(2 * _REPEATED, int(period * _PERIODS))))
        return found

    # --- stretches ---

    def _stretches(self, end: int) -> Iterator[tuple[dict[int, FactorCut], tuple[int, ...], Axis]]:
        """Yield stretches that end with an op: the cuts by op, the ops of the loop, and the last op's sliced axis."""
        flow = self.flow
        rule = flow.rules[end]
        assert rule is not None
        seen: set[Any] = set()
        for axis in axes_of(rule, self.splits):
            op_cuts = self._cuts(end, axis)
            for start in sorted(i for i in op_cuts if flow.computes[i]):
                members = self._members(op_cuts, start, end)
                if members and (axis, members) not in seen:
                    seen.add((axis, members))
                    yield op_cuts, members, axis

    def _cuts(self, end: int, axis: Axis) -> dict[int, FactorCut]:
        """Return the cuts of the ops up to ``end`` if its first output is asked for in slices along an axis."""
        flow = self.flow
        # Views that nothing up to ``end`` computes from are left out.
        ops = [i for i in range(max(0, end - self.windows[end]), end + 1) if flow.first_use[i] <= end]
        found = cuts(
            [FlowOp(flow.rules[i], flow.inputs[i], flow.outputs[i]) for i in ops],
            {flow.outputs[end][0]: [Window(axis)]},
        )
        return {ops[at]: cut for at, cut in found.items()}

    def _members(self, op_cuts: dict[int, FactorCut], start: int, end: int) -> tuple[int, ...]:
        """Return the ops of the loop if it begins at ``start``, without views of what it does not make."""
        flow = self.flow
        members: list[int] = []
        made: set[int] = set()
        for i in sorted(op_cuts):
            if i < start:
                continue
            # A view of an input is taken outside of the loop.
            if not flow.computes[i] and not any(t in made for t in flow.inputs[i]):
                continue
            members.append(i)
            made.update(flow.outputs[i])
        return self._connected(members, end)

    def _connected(self, members: Sequence[int], end: int) -> tuple[int, ...]:
        """Return the members that are connected with the last op: its axis does not say how others are cut."""
        flow = self.flow
        maker = {t: i for i in members for t in flow.outputs[i]}
        pairs = ((maker[t], i) for i in members for t in flow.inputs[i] if t in maker)
        return next(tuple(group) for group in connected(members, pairs) if end in group)

    def _candidates(
        self, op_cuts: dict[int, FactorCut], members: tuple[int, ...], axis: Axis, ends: Sequence[int]
    ) -> Iterator[Candidate]:
        """Yield a stretch at each of some ops that are alike, wherever it lowers the most that is alive there.

        If Python holds results after the loop, two candidates: one ends with the loop, so that another stretch may
        follow at once; the other also counts what is saved after the loop.
        """
        flow, program, start, end = self.flow, self.program, members[0], members[-1]
        exits = self._exits(members, end)
        # Nothing is read after the loop, or an exit has no buffer; no module to name the stretch by; or inputs change.
        if not exits or not self._has_unit(members) or not self._inputs_stay(members, end):
            return
        made = {s for i in members for s in program.ops[i].writes}
        read = {flow.storage[t] for t in flow.inputs_of(members)}
        kept = {flow.origin[flow.storage[flow.outputs[op][output]]] for op, output in exits}
        lost = [s for s in made if flow.origin[s] not in kept]
        # The last op at which Python holds what the loop never makes as a whole: up to it, these bytes are saved.
        held_until = max((flow.last_op[s] for s in lost), default=end)
        held_until = min(held_until, end + _BEYOND, flow.n_ops - 1)
        relative = tuple((op - end, output) for op, output in exits)
        shape = Shape(tuple(i - end for i in members), axis, relative, *self._loop(op_cuts, members, exits))
        # Judged by slices of one element, the most that slicing can do.
        inside = shape.inside(axis.size)
        for until in dict.fromkeys((end, max(end, held_until))):
            # By op, how many more bytes are alive while it runs; fewer, if negative.
            change = np.zeros(until - start + 1, dtype=np.int64)
            for s in lost:
                first, last = max(program.writer[s], start), min(flow.last_op[s], until)
                # Never allocated as a whole: less at each op at which it was alive.
                change[first - start : last - start + 1] -= program.storage_bytes[s]
            for s in read:
                last = flow.last_op[s]
                if last < end and s not in made:
                    # The loop runs at the end, so an input that was freed before is held until then.
                    change[max(last + 1, start) - start : end - start + 1] += program.storage_bytes[s]
            others = np.array([i not in members for i in range(start, until + 1)])
            for shift in (other - end for other in ends):
                first, last = start + shift, until + shift
                if first < 0 or last >= flow.n_ops or not self._has_unit([i + shift for i in members]):
                    continue
                live, total = self.live[first : last + 1], self.total[first : last + 1]
                outside = int(np.where(others, total + change, 0).max())
                base = int(live[end - start] + change[end - start])
                if max(outside, base + inside) < total.max():
                    yield Candidate(shape, first, end + shift, last, outside, base)

    def _exits(self, members: Sequence[int], end: int) -> list[tuple[int, int]] | None:
        """Return what is read after the loop: the op that makes each, and which of its outputs.

        Args:
            members: the ops of the loop.
            end: the last of them, in whose place the loop runs.

        Returns:
            None if the executor could not allocate a buffer for one of them.
        """
        flow, program = self.flow, self.program
        inside = set(members)
        found = []
        for i in members:
            op = program.ops[i]
            if op.replaces >= 0 and program.writer.get(op.replaces) not in inside:
                return None  # it overwrites in place what ops outside of the loop made
            for s in op.writes:
                if not flow.read_after(s, end):
                    continue
                first = flow.origin[s]  # the version before ops wrote to it in place
                maker = program.writer.get(first)
                if maker not in inside:
                    return None  # the memory is there before the loop
                made = flow.outputs[maker]
                output = [flow.storage[t] for t in made].index(first)
                tensor = program.tensors[made[output]]
                if not is_dense(tensor.shape, tensor.stride) or tensor.offset:
                    return None  # the executor makes a buffer by shape and strides alone
                found.append((maker, output))
        return found

    def _inputs_stay(self, members: Sequence[int], end: int) -> bool:
        """Whether no op in between overwrites what the loop reads."""
        inside, program = set(members), self.program
        inputs = {self.flow.storage[t] for t in self.flow.inputs_of(members)}
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

    def _loop(
        self, op_cuts: dict[int, FactorCut], members: Sequence[int], exits: Sequence[tuple[int, int]]
    ) -> tuple[frozenset[tuple[float, float]], float, float]:
        """Return ``lines``, ``slice_ms`` and ``loop_ms`` of a shape.

        Bytes are those of tensors that the loop makes, from their op to their last use in a slice, of workspaces, and
        of slices of inputs that are copies: those along an axis that is not the outermost in memory. The time of a
        slice is that of launches, and of operands that it reads whole.
        """
        flow, program = self.flow, self.program
        size = op_cuts[members[-1]].axis.size
        made = {t for i in members for t in flow.outputs[i]}
        last_use: dict[int, int] = {}
        for i in members:
            for t in (*flow.inputs[i], *flow.outputs[i]):
                last_use[flow.origin[flow.storage[t]]] = i
        lines = set()
        slice_ms = len(exits) * self.launch_ms
        alive: dict[int, tuple[float, float]] = {}
        for i in members:
            rule, cut = flow.rules[i], op_cuts[i]
            assert rule is not None
            read_whole = 0
            for t, dims in zip(flow.inputs[i], rule.inputs, strict=True):
                window = window_of(dims, rule.sizes, cut)
                if window is None:
                    read_whole += self.bytes[t]
                elif t not in made and window.axis.outer > 1:
                    alive.setdefault(flow.origin[flow.storage[t]], (0.0, self.bytes[t] / size))  # a copy
            if flow.computes[i]:
                for t, dims in zip(flow.outputs[i], rule.outputs, strict=True):
                    sliced = window_of(dims, rule.sizes, cut) is not None
                    n_bytes = (0.0, self.bytes[t] / size) if sliced else (float(self.bytes[t]), 0.0)
                    alive.setdefault(flow.origin[flow.storage[t]], n_bytes)
                by_length = sum(b for _, b in alive.values()) + program.ops[i].workspace_bytes / size
                lines.add((sum(a for a, _ in alive.values()), by_length))
                slice_ms += self.launch_ms + read_whole * self.ms_per_byte
            for s in [s for s in alive if last_use[s] == i]:
                del alive[s]
        copied = sum(self.bytes[flow.outputs[op][output]] for op, output in exits)
        loop_ms = len(exits) * self.launch_ms + 2 * copied * self.ms_per_byte
        return frozenset(lines), slice_ms, loop_ms


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride, tensor.offset


def unit_scope(program: Program, scopes: Iterable[int], pins: Pins = NO_PINS) -> int:
    """Return the smallest call around some module calls whose module is called once; ``ROOT_SCOPE`` if there is none.

    A call site does not say in which call of a module it is, so a stretch cannot be named by a module that is called
    several times; nor by one that ``pins`` keep from being a unit.
    """
    scope = program.common_scope(scopes)
    while scope != ROOT_SCOPE and len(program.calls.get(program.scopes[scope].fqn, ())) != 1:
        scope = program.scopes[scope].parent
    if scope != ROOT_SCOPE and pins and not pins.may_be_a_unit(program, program.scopes[scope].fqn):
        return ROOT_SCOPE
    return scope
