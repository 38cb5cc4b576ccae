"""The strategies that each class of a graph may take on one axis of a mesh, and the layouts of values that follow.

Strategies come from ``axis_strategies``. Two rules keep their number down and make each of them possible:

- An output may have a placement only if all views of it can follow on the same memory.
- An input may have a partial placement, or a cut inside of a dimension, only if a producer can leave it so. Both are
  rare: partial tensors come from products, and cuts inside of a dimension from views that merge or split dimensions.

Equal layers are one class, and read the outputs of the layer before: two passes over the classes are made, so that the
placements of those are known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sacplan._placing.graph import _SHAPED_LIKE, OpClass, PlacedCall, StrategyGraph
from sacplan._shard.placements import REPLICATED, Placement, cut
from sacplan._shard.strategies import AxisStrategy, axis_strategies


@dataclass(frozen=True, slots=True)
class StrategyOffer:
    """A strategy that a class could take.

    Attributes:
        axis: name of the axis of the mesh.
        subject: the class.
        strategy: of parameters one without inputs, whose output is their placement.
        made: by tensor argument, the placements in which producers may leave it; None if every rank has all of it.
        weights: by tensor argument, whether it is a parameter, or depends on parameters alone.
        nested: parts into which slower axes may have cut a dimension before.
    """

    axis: str
    subject: OpClass
    strategy: AxisStrategy
    made: tuple[frozenset[Placement] | None, ...]
    weights: tuple[bool, ...]
    nested: tuple[int, ...] = ()


Allowed: TypeAlias = Callable[[StrategyOffer], bool]


def everything(offer: StrategyOffer) -> bool:
    """Allow every strategy."""
    return True


class AxisOptions:
    """The strategies of each class on one axis.

    Args:
        graph: the step.
        axis: name of the axis.
        ranks: of the axis.
        nested: parts into which slower axes may have cut a dimension before (``axis_strategies``).
        allowed: whether a strategy is offered. Ops may always run replicated. Parameters of which no strategy is
            allowed are replicated.

    Attributes:
        strategies: by class.
    """

    def __init__(
        self,
        graph: StrategyGraph,
        axis: str,
        ranks: int,
        nested: Collection[int] = (),
        allowed: Allowed = everything,
    ) -> None:
        self.graph = graph
        self.axis = axis
        self.ranks = ranks
        self.nested = tuple(sorted(nested))
        self._allowed = allowed
        self._followed: dict[tuple[int, int, Placement], Placement | None] = {}
        self._offered: dict[Any, tuple[AxisStrategy, ...]] = {}
        self._followers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for v, value in enumerate(graph.values):
            if value.parent >= 0:
                self._followers[value.producer, value.output].append(v)
        self._outer = self._merged_sizes()
        self.strategies: list[tuple[AxisStrategy, ...]] = [()] * len(graph.classes)
        # A class of equal layers reads the outputs of the layer before, which may be its own or those of a later class.
        # The first pass knows the placements of earlier classes only, the second one those of all.
        for _ in range(2):
            for subject in graph.classes:
                self.strategies[subject.index] = self._of(subject)

    def placement(self, value: int, base: Placement) -> Placement | None:
        """Return the placement of a value, given that of the output it follows; None if it cannot follow."""
        found = self.graph.values[value]
        if found.parent < 0:
            return base
        parent = self.placement(found.parent, base)
        return None if parent is None else self._follow(found.call, found.result, parent)

    def _follow(self, call_index: int, result: int, placement: Placement) -> Placement | None:
        key = (call_index, result, placement)
        if key not in self._followed:
            self._followed[key] = self._after(self.graph.calls[call_index], result, placement)
        return self._followed[key]

    def _after(self, call: PlacedCall, result: int, placement: Placement) -> Placement | None:
        # Every op can leave a replicated tensor replicated.
        if placement == REPLICATED:
            return REPLICATED
        # It reads a shape and no values. Of summands, a new tensor cannot be one more summand.
        if call.name in _SHAPED_LIKE:
            same = call.inputs[0].shape == call.outputs[result].shape and not placement.is_partial
            return placement if same else REPLICATED
        # Any strategy of the op will do that takes all placed inputs in this placement.
        at = [i for i, placed in enumerate(call.placed) if placed]
        available = [{placement} if placed else set() for placed in call.placed]
        for strategy in self._strategies_of(call, available):
            if all(strategy.inputs[i] == placement for i in at):
                return strategy.outputs[result]
        return None

    def subset(self, allowed: Allowed) -> list[frozenset[int]]:
        """Return, by class, the strategies that a further restriction allows as well."""

        def both(offer: StrategyOffer) -> bool:
            return self._allowed(offer) and allowed(offer)

        fewer = AxisOptions(self.graph, self.axis, self.ranks, self.nested, both)
        found = []
        # By key and not by index: the restricted options are numbered anew.
        for subject, own, some in zip(self.graph.classes, self.strategies, fewer.strategies, strict=True):
            keys = {placed(subject, s) for s in some}
            found.append(frozenset(k for k, s in enumerate(own) if placed(subject, s) in keys))
        return found

    def _strategies_of(self, call: PlacedCall, available: list[set[Placement]]) -> tuple[AxisStrategy, ...]:
        whole = AxisStrategy((REPLICATED,) * len(call.inputs), (REPLICATED,) * len(call.outputs))
        # The op or an argument is not known here, so it can only run replicated.
        if call.call is None:
            return (whole,)
        key = (id(call), tuple(map(frozenset, available)))
        if key not in self._offered:
            self._offered[key] = axis_strategies(call.call, self.ranks, available, self.nested)
        return self._offered[key]

    # --- classes -------------------------------------------------------------------------------------

    def _of(self, subject: OpClass) -> tuple[AxisStrategy, ...]:
        made = [self._made({row[i] for row in subject.inputs}) for i in range(self._n_inputs(subject))]
        weights = tuple(
            all((v := row[i]) is None or v in self.graph.weights for row in subject.inputs)
            and any(row[i] is not None for row in subject.inputs)
            for i in range(len(made))
        )
        sets = tuple(None if m is None else frozenset(m) for m in made)
        offered = self._homes(subject) if subject.is_parameter else self._runs(subject, made)
        found: dict[Any, AxisStrategy] = {}
        for i, s in enumerate(offered):
            offer = StrategyOffer(self.axis, subject, s, sets, weights, self.nested)
            # The first strategy is the replicated one. With it a program always has a solution.
            always = i == 0 and not subject.is_parameter
            if always or (self._can_be_followed(subject, s) and self._allowed(offer)):
                # Strategies that differ only in plain inputs are one: each rank has all of these and takes
                # its part without cost.
                found.setdefault(placed(subject, s), s)
        return tuple(found.values()) or offered[:1]

    @staticmethod
    def _n_inputs(subject: OpClass) -> int:
        return 0 if subject.call is None else len(subject.call.inputs)

    def _made(self, values: Iterable[int | None]) -> set[Placement] | None:
        """Return the placements in which producers may leave these values; None if every rank has all of them."""
        found: set[Placement] = set()
        known = [v for v in values if v is not None]
        for v in known:
            value = self.graph.values[v]
            for strategy in self.strategies[value.producer]:
                placement = self.placement(v, strategy.outputs[value.output])
                if placement is not None:
                    found.add(placement)
        return found if known else None

    def _homes(self, subject: OpClass) -> tuple[AxisStrategy, ...]:
        found = [AxisStrategy((), (REPLICATED,))]
        for dim, size in enumerate(subject.shapes[0]):
            # Inside of what slower axes cut, and inside of each of the matrices that ops take apart later.
            for outer in (1, *sorted({*self.nested, *self._outer.get(size, ())} - {1})):
                if size and size % (outer * self.ranks) == 0:
                    found.append(AxisStrategy((), (cut(dim, outer),)))  # noqa: PERF401
        return tuple(found)

    def _runs(self, subject: OpClass, made: list[set[Placement] | None]) -> tuple[AxisStrategy, ...]:
        call = subject.call
        assert call is not None
        offered = self._strategies_of(call, [m or set() for m in made])
        return tuple(s for i, s in enumerate(offered) if i == 0 or self._has_inputs(call, s, made))

    def _has_inputs(
        self, call: PlacedCall, strategy: AxisStrategy, made: list[set[Placement] | None]
    ) -> bool:
        """Whether inputs can be placed so: a partial maximum, for example, must have been made as one."""
        return all(
            # A sum is always possible: a replicated tensor becomes summands by zeros on all ranks but one.
            # The same would be wrong for a maximum of negative numbers.
            not p.is_partial or (m is not None and (p in m or p.reduce == "sum"))
            for p, m in zip(strategy.inputs, made, strict=True)
        )

    def _can_be_followed(self, subject: OpClass, strategy: AxisStrategy) -> bool:
        return all(
            self.placement(v, p) is not None
            for output, p in enumerate(strategy.outputs)
            for v in self._followers.get((subject.index, output), ())
        )

    def _merged_sizes(self) -> Mapping[int, set[int]]:
        """Return, by size of a dimension, the numbers of outer parts at which ops that take it apart can be cut.

        A projection to queries, keys and values is cut inside of each of the three.
        """
        found: dict[int, set[int]] = defaultdict(set)
        for call in self.graph.calls:
            for strategy in self._strategies_of(call, [set() for _ in call.inputs]):
                for t, p in zip(call.inputs, strategy.inputs, strict=True):
                    if p.outer > 1 and p.outer not in self.nested:
                        found[t.shape[p.dim]].add(p.outer)
        return found


def placed(subject: OpClass, strategy: AxisStrategy) -> tuple[Any, ...]:
    """Return the key of a strategy in its class: the placements of the tensors that depend on parameters."""
    placed = (True,) * len(strategy.inputs) if subject.call is None else subject.call.placed
    return tuple(
        p for p, is_placed in zip(strategy.inputs, placed, strict=True) if is_placed
    ), strategy.outputs


def written(call: PlacedCall) -> tuple[int, ...]:
    """Return the tensor arguments that a call writes in place. These cannot be redistributed first."""
    return () if call.call is None else call.call.written
