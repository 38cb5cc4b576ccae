"""The ops of a recorded step as a factor flows through them: rules, who makes what, who reads it.

``Dataflow.flow`` says which slice of each tensor a slice of one tensor needs and gives. A tensor that an op of the loop
makes has one axis, along which it is cut everywhere. One that comes from outside may be cut in several ways, or be read
whole, by different ops.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

import sacplan._factors  # noqa: F401  (registers the rules)
from sacplan._factors.axes import Axis, FactorAxis, from_factor, into_factor
from sacplan._factors.rule import Dims, Rule, rule_of
from sacplan._program.calls import Opaque, call_with, dtype_of
from sacplan._program.derived import derived
from sacplan._program.elements import Event, Op, Tensor
from sacplan._program.program import Program
from sacplan._torch.ops import is_alias, op_named


@dataclass(frozen=True, slots=True)
class ShapeAndDtype:
    """What a rule looks at."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=1 << 14)
def _rule(
    name: str, arguments: str, inputs: tuple[ShapeAndDtype, ...], outputs: tuple[ShapeAndDtype, ...]
) -> Rule | None:
    func = op_named(name)
    if func is None:
        return None
    try:
        args, kwargs = call_with(arguments, inputs)
    except Opaque:
        return None
    rule = rule_of(func, args, kwargs, list(outputs))
    if rule is not None and (len(rule.inputs), len(rule.outputs)) != (len(inputs), len(outputs)):
        return None  # it takes tensors that were not recorded, such as wrapped ones
    return rule


def rule_of_op(program: Program, op: Op) -> Rule | None:
    """The factors of a recorded op; None if it must see whole tensors."""

    def layouts(tensors: Sequence[int]) -> tuple[ShapeAndDtype, ...]:
        return tuple(ShapeAndDtype(t.shape, dtype_of(t)) for t in map(program.tensors.__getitem__, tensors))

    return _rule(op.name, op.arguments, layouts(op.inputs), layouts(op.outputs))


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Conflict(Exception):
    """A factor cannot flow so. ``op``: the one that should run whole, before the loop; -1: none would help."""

    def __init__(self, op: int) -> None:
        super().__init__(op)
        self.op = op


@dataclass(slots=True)
class FactorFlow:
    """How a factor flows.

    Attributes:
        within: by op of the loop, the factor that is sliced and the part of it.
        axes: by tensor that the loop makes, the axis along which it is cut.
        partial: tensors that are not cut: each slice gives a part of them, or all.
    """

    within: dict[int, FactorAxis] = field(default_factory=dict)
    axes: dict[int, Axis] = field(default_factory=dict)
    partial: set[int] = field(default_factory=set)


class Dataflow:
    """The forward ops of a program.

    Args:
        program: the program.
        pinned: ops that must see whole tensors.

    Attributes:
        rules, inputs, outputs: by op. An op that returns the tensor that it is given has no inputs and outputs.
        producer: by tensor, the op that made it; -1: it was there, or it is on memory that was written in place.
        computed_by: by tensor, the op that computes it: of a view, the one that made what is viewed; or -1.
        consumers: by tensor, the ops that read it.
        computes: by op, whether it is no view.
        storage: by tensor.
        maker: by storage, the op that allocated it or made this version of it; -1: none.
        origin: by storage, the one whose memory it is a version of.
        readers_of: by storage, the ops that read it, in order.
        last_op: by storage, the last op at which it is alive; ``n_ops`` if it outlives the step.
        live: by op, bytes alive while it runs, its workspace left out.
        workspace: by op.
    """

    def __init__(self, program: Program, pinned: Collection[int] = ()) -> None:
        self.program = program
        ops, tensors = program.ops, program.tensors
        self.n_ops = len(ops)
        n_storages = len(program.storage_bytes)
        self.storage = [t.storage for t in tensors]
        self.computes = [not is_alias(op.name) for op in ops]
        self.rules: list[Rule | None] = [
            None if i in pinned else rule_of_op(program, op) for i, op in enumerate(ops)
        ]
        self.inputs: list[tuple[int, ...]] = []
        self.outputs: list[tuple[int, ...]] = []
        self.producer = [-1] * len(tensors)
        consumers: list[list[int]] = [[] for _ in tensors]
        self.maker = [-1] * n_storages
        self.origin = list(range(n_storages))
        readers: list[list[int]] = [[] for _ in range(n_storages)]
        viewed: set[int] = set()
        for i, op in enumerate(ops):
            inputs, outputs = op.inputs, op.outputs
            if outputs and set(outputs) <= set(inputs) and not op.mutates:
                inputs = outputs = ()
            self.inputs.append(inputs)
            self.outputs.append(outputs)
            for s in op.writes:
                self.maker[s] = i
            if op.replaces >= 0:
                self.origin[op.writes[0]] = self.origin[op.replaces]
                if op.replaces in viewed:
                    self.rules[i] = None
            for t in inputs:
                consumers[t].append(i)
                if self.producer[t] < 0 and self.maker[self.storage[t]] >= 0:
                    self.rules[i] = None  # it reads through a view what was written since
            for t in outputs:
                if self.producer[t] < 0:
                    self.producer[t] = i
                if not self.computes[i]:
                    viewed.add(self.storage[t])
            for s in op.reads:
                readers[s].append(i)
            if op.mutates or len({self.storage[t] for t in outputs}) < len(outputs) * self.computes[i]:
                self.rules[i] = None
        self.consumers = [tuple(dict.fromkeys(c)) for c in consumers]
        self.readers_of = readers
        self.computed_by = [
            self.maker[s] if self.producer[t] >= 0 else -1 for t, s in enumerate(self.storage)
        ]
        self._first_use = self._first_uses()
        self.workspace = [op.workspace_bytes for op in ops]
        self._fill_memory()

    def _first_uses(self) -> list[int]:
        """By op, the first op that computes something from what it gives: itself, unless it is a view."""
        found = list(range(self.n_ops))
        for i in range(self.n_ops - 1, -1, -1):
            if not self.computes[i]:
                found[i] = min(
                    (found[c] for t in self.outputs[i] for c in self.consumers[t] if c > i),
                    default=self.n_ops,
                )
        return found

    def _fill_memory(self) -> None:
        program = self.program
        at_op = program.liveness.at_op.tolist()
        self.live = [total - workspace for total, workspace in zip(at_op, self.workspace, strict=True)]
        self.last_op = [self.n_ops] * len(program.storage_bytes)
        now = -1
        for code, arg in program.events:
            if code == Event.OP:
                now = arg
            elif code == Event.FREE:
                self.last_op[arg] = now
        for i, op in enumerate(program.ops):
            if op.replaces >= 0:
                self.last_op[op.replaces] = i - 1  # its bytes are those of the new version from then on
        self.initial = frozenset(program.initial)

    def readers(self, tensor: int, end: int) -> Sequence[int]:
        """The ops up to ``end`` that need a tensor, or a view of it, to compute something up to there."""
        return [c for c in self.consumers[tensor] if c <= end and self._first_use[c] <= end]

    def flow(
        self, tensor: int, axis: Axis, start: int, end: int, whole: Collection[int] = frozenset()
    ) -> FactorFlow:
        """Cut a tensor along an axis, and with it what ops between ``start`` and ``end`` need and give for that.

        Args:
            tensor, axis: what is cut; an op from ``start`` to ``end`` makes it.
            start, end: the first and the last op that may be in the loop.
            whole: ops that run before the loop.

        Raises:
            Conflict: it cannot be.
        """
        return _Flowing(self, start, end, whole).run(tensor, axis)

    def read_after(self, storage: int, op: int) -> bool:
        """Whether a storage is needed after an op."""
        readers = self.readers_of[storage]
        return self.last_op[storage] == self.n_ops or bisect_right(readers, op) < len(readers)

    @functools.cached_property
    def splits(self) -> dict[int, set[tuple[int, ...]]]:
        """By size, the products that a dimension of that size is somewhere: of batch and sequence, for example."""
        found: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for rule in dict.fromkeys(rule for rule in self.rules if rule is not None):
            for dims in (*rule.inputs, *rule.outputs):
                for factors in dims:
                    if len(factors) > 1:
                        sizes = tuple(rule.sizes[f] for f in factors)
                        found[functools.reduce(int.__mul__, sizes)].add(sizes)
        return found


@derived
def dataflow(program: Program) -> Dataflow:
    """Of a program, made once."""
    return Dataflow(program)


class _Flowing:
    """A factor that flows from one tensor to the ops that make and read it, and on to what these read and make."""

    def __init__(self, ops: Dataflow, start: int, end: int, whole: Collection[int]) -> None:
        self.ops, self.start, self.end, self.plain = ops, start, end, whole
        self.flow = FactorFlow()
        self.read_whole: set[int] = set()
        self.queue: list[int] = []
        self.seed = -1

    def run(self, value: int, axis: Axis) -> FactorFlow:
        ops, flow = self.ops, self.flow
        self.seed = value
        flow.axes[value] = axis
        self.queue.append(value)
        while self.queue:
            self._spread(self.queue.pop())
        for v in self.read_whole:
            if ops.producer[v] in flow.within:
                raise Conflict(ops.producer[v])
        for op in self.plain:
            for v in ops.inputs[op]:
                if ops.producer[v] in flow.within:
                    raise Conflict(ops.producer[v])
        last = max(flow.within)
        for v in flow.partial:
            if ops.readers(v, last):
                raise Conflict(-1)
        return flow

    def _is_inside(self, value: int) -> bool:
        """Whether the loop would make a value."""
        op = self.ops.computed_by[value]
        return (
            self.start <= op <= self.end
            and op not in self.plain
            and self.ops.producer[value] not in self.plain
        )

    def _spread(self, value: int) -> None:
        """From a value that is cut to the op that makes it, and to those that read it."""
        ops = self.ops
        axis, maker = self.flow.axes[value], ops.producer[value]
        rule = ops.rules[maker]
        if rule is None:
            raise Conflict(maker)
        within = axis_in(rule.outputs[ops.outputs[maker].index(value)], rule.sizes, axis)
        if within is None:
            raise Conflict(maker)
        self._carry(maker, rule, within, backward=True)
        for reader in ops.readers(value, self.end):
            if reader < self.start or reader in self.plain:
                raise Conflict(maker)
            rule = ops.rules[reader]
            if rule is None:
                raise Conflict(maker)
            for position, v in enumerate(ops.inputs[reader]):
                if v == value:
                    within = axis_in(rule.inputs[position], rule.sizes, axis)
                    if within is None:
                        raise Conflict(maker)
                    self._carry(reader, rule, within, backward=False)

    def _carry(self, op: int, rule: Rule, within: FactorAxis, *, backward: bool) -> None:
        known = self.flow.within.get(op)
        if known is not None:
            if known != within:
                raise Conflict(op if backward else -1)
            return
        ops = self.ops
        self.flow.within[op] = within
        for v, dims in zip(ops.inputs[op], rule.inputs, strict=True):
            if not self._is_inside(v):
                continue
            axis = axis_of(dims, rule.sizes, within)
            if axis is None:
                self.read_whole.add(v)
                if v in self.flow.axes:
                    raise Conflict(ops.producer[v])
            else:
                self._assign(v, axis)
        for position, (v, dims) in enumerate(zip(ops.outputs[op], rule.outputs, strict=True)):
            kind = rule.kind(within.factor, position)
            axis = axis_of(dims, rule.sizes, within)
            if not kind.makes_the_whole:
                raise Conflict(op)
            if axis is not None:
                self._assign(v, axis)
            else:
                self.flow.partial.add(v)

    def _assign(self, value: int, axis: Axis) -> None:
        known = self.flow.axes.get(value)
        if value in self.read_whole or (known is not None and known != axis):
            raise Conflict(self.ops.producer[value] if value != self.seed else -1)
        if known is None:
            self.flow.axes[value] = axis
            self.queue.append(value)


@functools.lru_cache(maxsize=1 << 16)
def axis_in(dims: Dims, sizes: tuple[int, ...], axis: Axis) -> FactorAxis | None:
    """``into_factor``, remembered."""
    return into_factor(dims, sizes, axis)


@functools.lru_cache(maxsize=1 << 16)
def axis_of(dims: Dims, sizes: tuple[int, ...], within: FactorAxis) -> Axis | None:
    """``from_factor``, remembered."""
    return from_factor(dims, sizes, within)
