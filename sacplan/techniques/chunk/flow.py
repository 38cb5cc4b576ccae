"""Which slices of all tensors of a loop follow from slices of one of them.

A factor rule says how the dimensions of an op's tensors belong together. So if one tensor is cut along an axis, the ops
that make and read it are cut along a factor; these ops cut their other tensors, and so on. The walk follows this in
both directions until nothing is new. Its invariants:

- A tensor that an op of the loop makes has one axis, along which it is cut for all that read it.
- An op is cut along one factor.
- Nothing in the loop reads a tensor of which the loop has made only a part (a partial sum), or needs all of one that
  the loop cuts.
- A tensor from outside may be cut in several ways, or be read whole, by different ops.

The result is the smallest set that holds these, and does not depend on the order of the walk. Which conflict is found
first does. A conflict names the op that should rather run before the loop, as the walk sees it. That is a heuristic:
taking this op out is not the only way, and perhaps not the best.

The planner walks through a recorded program (``dataflow.py``), the executor through the ops that it has collected
(``executor/collected.py``), all of which are needed and compute something: views are ops like all others.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from sacplan.core.factors.axes import Axis, FactorAxis, from_factor, into_factor
from sacplan.core.factors.rule import Dims, Rule


class FlowGraph:
    """Ops and tensors, by number. Ops are numbered in the order in which they run.

    Args:
        rules, inputs, outputs: by op.
        n_tensors: how many tensors there are.

    Attributes:
        rules, inputs, outputs: see above.
        producer: by tensor, the op that returned it; -1: it comes from outside.
        computed_by: by tensor, the op that computes it: of a view, the one that made what is viewed; or -1.
        consumers: by tensor, the ops that read it.
    """

    def __init__(
        self,
        rules: Sequence[Rule | None],
        inputs: Sequence[tuple[int, ...]],
        outputs: Sequence[tuple[int, ...]],
        n_tensors: int,
    ) -> None:
        self.rules, self.inputs, self.outputs = list(rules), inputs, outputs
        consumers: list[dict[int, None]] = [{} for _ in range(n_tensors)]
        self.producer = [-1] * n_tensors
        for i, (read, made) in enumerate(zip(inputs, outputs, strict=True)):
            for t in read:
                consumers[t][i] = None
            for t in made:
                if self.producer[t] < 0:
                    self.producer[t] = i
        self.consumers = list(map(tuple, consumers))
        self.computed_by = self.producer

    def readers(self, tensor: int, end: int) -> Sequence[int]:
        """Return the ops up to ``end`` that need a tensor, or a view of it, to compute something up to there."""
        return self.consumers[tensor]


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


def factor_flow(
    graph: FlowGraph, tensor: int, axis: Axis, start: int, end: int, whole: Collection[int] = frozenset()
) -> FactorFlow:
    """Cut a tensor along an axis, and with it what ops between ``start`` and ``end`` need and give for that.

    Args:
        graph: the ops.
        tensor, axis: what is cut; an op from ``start`` to ``end`` makes it.
        start, end: the first and the last op that may be in the loop.
        whole: ops that run before the loop.

    Raises:
        Conflict: it cannot be.
    """
    return _FlowWalk(graph, start, end, whole).walk(tensor, axis)


class _FlowWalk:
    """The walk.

    Attributes:
        read_whole: tensors of the loop that some op of it needs whole. That is only possible for those that turn out
            not to be made in the loop.
        queue: tensors that are cut, and whose makers and readers do not know it yet.
    """

    def __init__(self, graph: FlowGraph, start: int, end: int, whole: Collection[int]) -> None:
        self.graph, self.start, self.end, self.whole = graph, start, end, whole
        self.flow = FactorFlow()
        self.read_whole: set[int] = set()
        self.queue: list[int] = []
        self.seed = -1

    def walk(self, tensor: int, axis: Axis) -> FactorFlow:
        graph, flow = self.graph, self.flow
        self.seed = tensor
        flow.axes[tensor] = axis
        self.queue.append(tensor)
        while self.queue:
            self._spread(self.queue.pop())
        # Only now it is known which ops the loop has.
        for t in self.read_whole:
            if graph.producer[t] in flow.within:
                raise Conflict(graph.producer[t])
        for op in self.whole:
            for t in graph.inputs[op]:
                if graph.producer[t] in flow.within:
                    raise Conflict(graph.producer[t])  # what runs before the loop reads what the loop makes
        last = max(flow.within)
        # A partial sum is complete only after the loop. Making its reader run before is no help, since it needs
        # the sum; -1 says so.
        for t in flow.partial:
            if graph.readers(t, last):
                raise Conflict(-1)
        return flow

    def _is_inside(self, tensor: int) -> bool:
        """Whether the loop would make a tensor: not what ops before it make, nor views of that."""
        graph = self.graph
        op = graph.computed_by[tensor]
        return (
            self.start <= op <= self.end and op not in self.whole and graph.producer[tensor] not in self.whole
        )

    def _spread(self, tensor: int) -> None:
        """From a tensor that is cut to the op that makes it, and to those that read it."""
        graph = self.graph
        axis, maker = self.flow.axes[tensor], graph.producer[tensor]
        rule = graph.rules[maker]
        # Without a rule, or where the axis is no factor of it, the maker sees whole tensors only.
        if rule is None:
            raise Conflict(maker)
        within = axis_in(rule.outputs[graph.outputs[maker].index(tensor)], rule.sizes, axis)
        if within is None:
            raise Conflict(maker)
        self._cut(maker, rule, within, backward=True)
        for reader in graph.readers(tensor, self.end):
            # A reader that cannot take slices wants the tensor whole: its maker would run before the loop.
            if reader < self.start or reader in self.whole:
                raise Conflict(maker)
            rule = graph.rules[reader]
            if rule is None:
                raise Conflict(maker)
            for position, t in enumerate(graph.inputs[reader]):
                if t == tensor:
                    within = axis_in(rule.inputs[position], rule.sizes, axis)
                    if within is None:
                        raise Conflict(maker)
                    self._cut(reader, rule, within, backward=False)

    def _cut(self, op: int, rule: Rule, within: FactorAxis, *, backward: bool) -> None:
        """Cut an op. ``backward``: since what it makes is cut, not what it reads."""
        known = self.flow.within.get(op)
        if known is not None:
            # Two factors of one op. Going backward the op itself can run before the loop; going forward it
            # reads what the loop makes, and so cannot.
            if known != within:
                raise Conflict(op if backward else -1)
            return
        graph = self.graph
        self.flow.within[op] = within
        for t, dims in zip(graph.inputs[op], rule.inputs, strict=True):
            # From outside: it may be cut in several ways, or read whole.
            if not self._is_inside(t):
                continue
            axis = axis_of(dims, rule.sizes, within)
            if axis is None:
                self.read_whole.add(t)
                if t in self.flow.axes:
                    raise Conflict(graph.producer[t])
            else:
                self._assign(t, axis)
        for position, (t, dims) in enumerate(zip(graph.outputs[op], rule.outputs, strict=True)):
            axis = axis_of(dims, rule.sizes, within)
            if not rule.kind(within.factor, position).makes_the_whole:
                raise Conflict(op)  # its slices do not add up to what it gives for the whole
            if axis is not None:
                self._assign(t, axis)
            else:
                self.flow.partial.add(t)

    def _assign(self, tensor: int, axis: Axis) -> None:
        known = self.flow.axes.get(tensor)
        if tensor in self.read_whole or (known is not None and known != axis):
            # The first result cannot be made before the loop: it is what the loop is for.
            raise Conflict(self.graph.producer[tensor] if tensor != self.seed else -1)
        if known is None:
            self.flow.axes[tensor] = axis
            self.queue.append(tensor)


def parts_of(axis: Axis, sizes: Sequence[int]) -> Iterator[Axis]:
    """Yield the parts of an axis whose size is a product of sizes, those of size 1 left out."""
    before, after = axis.outer, axis.size * axis.inner
    for size in sizes:
        after //= max(1, size)
        if size > 1:
            yield Axis(axis.dim, before, size, after)
        before *= size


@functools.lru_cache(maxsize=1 << 16)
def axis_in(dims: Dims, sizes: tuple[int, ...], axis: Axis) -> FactorAxis | None:
    """``into_factor``, remembered."""
    return into_factor(dims, sizes, axis)


@functools.lru_cache(maxsize=1 << 16)
def axis_of(dims: Dims, sizes: tuple[int, ...], within: FactorAxis) -> Axis | None:
    """``from_factor``, remembered."""
    return from_factor(dims, sizes, within)
