"""Which slice of each tensor a slice of one tensor needs and gives: a factor flows through ops.

Ops and the values between them are numbered. A value that an op of the loop makes has one axis, along which it is cut
everywhere. A value that comes from outside may be cut in several ways, or be read whole, by different ops.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sacplan._factors.axes import Axis, FactorAxis, from_factor, into_factor
from sacplan._factors.rule import Dims, Kind, Rule

COMBINED = frozenset((Kind.PASS, Kind.SUM, Kind.MAX, Kind.MIN, Kind.MEAN))
"""What the loop puts together from slices."""


class Ops(Protocol):
    """Ops with the values that they read and make; in the order in which they run.

    Attributes:
        rules: by op; None where it must see whole tensors.
        inputs, outputs: by op, values.
        producer: by value, the op that makes it, or -1.
        computed_by: by value, the op that computes it: of a view, the one that made what is viewed; or -1.
    """

    @property
    def rules(self) -> Sequence[Rule | None]:
        """See above."""

    @property
    def inputs(self) -> Sequence[Sequence[int]]:
        """See above."""

    @property
    def outputs(self) -> Sequence[Sequence[int]]:
        """See above."""

    @property
    def producer(self) -> Sequence[int]:
        """See above."""

    @property
    def computed_by(self) -> Sequence[int]:
        """See above."""

    def readers(self, value: int, end: int) -> Sequence[int]:
        """The ops up to ``end`` that need a value, or a view of it, to compute something up to there."""

    def may_write(self, op: int) -> bool:
        """Whether an op leaves alone what is not its own, or writes in place what the loop makes."""


class Conflict(Exception):
    """A factor cannot flow so. ``op``: the one that should run whole, before the loop; -1: none would help."""

    def __init__(self, op: int) -> None:
        super().__init__(op)
        self.op = op


@dataclass(slots=True)
class Flow:
    """How a factor flows.

    Attributes:
        within: by op of the loop, the factor that is sliced and the part of it.
        axes: by value that the loop makes, the axis along which it is cut.
        partial: values that are not cut: each slice gives a part of them, and how parts are put together; ``PASS``:
            each gives all of it.
    """

    within: dict[int, FactorAxis] = field(default_factory=dict)
    axes: dict[int, Axis] = field(default_factory=dict)
    partial: dict[int, Kind] = field(default_factory=dict)


def flow_from(
    ops: Ops, value: int, axis: Axis, start: int, end: int, whole: Collection[int] = frozenset()
) -> Flow:
    """Cut a value along an axis, and with it what ops between ``start`` and ``end`` need and give for that.

    Args:
        ops: the ops.
        value, axis: what is cut; an op from ``start`` to ``end`` makes it.
        start, end: the first and the last op that may be in the loop.
        whole: ops that run before the loop.

    Raises:
        Conflict: it cannot be.
    """
    return _Flowing(ops, start, end, whole).run(value, axis)


class _Flowing:
    def __init__(self, ops: Ops, start: int, end: int, whole: Collection[int]) -> None:
        self.ops, self.start, self.end, self.plain = ops, start, end, whole
        self.flow = Flow()
        self.read_whole: set[int] = set()
        self.queue: list[int] = []
        self.seed = -1

    def run(self, value: int, axis: Axis) -> Flow:
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
        if not ops.may_write(op):
            raise Conflict(op)
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
            if kind not in COMBINED:
                raise Conflict(op)
            if axis is not None:
                self._assign(v, axis)
            else:
                self.flow.partial[v] = kind

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
