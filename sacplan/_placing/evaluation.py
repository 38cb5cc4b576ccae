"""The cost model of the search: the time of a step on one rank, and the peak of what is alive there.

A choice gives each class a strategy on each axis of the mesh. With C the classes, F the flows (a value and those who
use it in one phase) and two halves h of the step, forward and backward:

    time   =  sum over C of compute  +  sum over F of local copies  +  sum over visible F of collectives
              +  sum over h of max(0, hidden collectives of h - compute of h)
    live_m =  sum over holds that span moment m of bytes * share  +  copies that the op of m reads
              +  the gradient that is moved at m
    peak   =  max over m of live_m

- A flow moves its value once to each layout that any of its users wants, and not at all where it lies so.
- Hidden are flows that a rank can run beside computation: gathers of parameters, and reductions of gradients
  (``StrategyGraph.is_hidden``). They cost what is left of them when the computation of their half is over.
- The share of a layout is the part of a tensor that one rank has.

``axis_program.py`` states the same formulas linearly for one axis, and what it finds is evaluated here. The model is
not the last word: copies are alive during one op only, and overlap is counted by halves. The program of one rank
(``_shard/program.py``) gives the figures of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from sacplan._device.cost import CostModel
from sacplan._placing.graph import GRADIENT, StrategyGraph, ValueUse
from sacplan._placing.options import AxisOptions, written
from sacplan._program.program import Phase
from sacplan._shard.costs import Costs, after
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import REPLICATED, Placements, fits, local_shape
from sacplan._shard.strategies import AxisStrategy
from sacplan._torch.calls import Call

ClassChoices: TypeAlias = list[list[int]]
"""By axis and class, the index of its strategy."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The cost of a choice.

    Attributes:
        ms: time of a step on one rank; infinite where a value cannot get the layout that it must have.
        peak_bytes: the most that is alive on one rank.
        moment: when that is: a position among the ops of the step.
    """

    ms: float
    peak_bytes: int
    moment: int


def half_of(phase: int) -> int:
    """Return the half of the step that a phase is in: 0 forward, 1 backward. Gradients are moved in the second."""
    return 0 if phase == Phase.FORWARD else 1


class Evaluation:
    """The costs of choices for a graph on a mesh.

    Args:
        graph: the step.
        costs: of moving tensors on the mesh, and its device.
        options: by axis, the strategies of the classes.
    """

    def __init__(self, graph: StrategyGraph, costs: Costs, options: Sequence[AxisOptions]) -> None:
        self.graph = graph
        self.costs = costs
        self.mesh: Mesh = costs.mesh
        self.options = tuple(options)
        self._model = CostModel(costs.spec)
        self._class_ms = [sum(graph.program.ops[i].time_ms for i in c.ops) for c in graph.classes]
        self._computed: dict[tuple[int, tuple[Placements, ...], tuple[Placements, ...]], float] = {}
        self._moved: dict[tuple[int, Placements, Placements], float] = {}
        self._copied: dict[tuple[int, Placements, Placements], float] = {}
        self._written = [() if c.call is None else written(c.call) for c in graph.classes]
        holds = graph.holds
        self._values = np.array([-1 if h.value is None else h.value for h in holds], dtype=np.int64)
        self._bytes = np.array([h.n_bytes for h in holds], dtype=np.float64)
        self._starts = np.array([h.start for h in holds], dtype=np.int64)
        self._ends = np.array([h.end for h in holds], dtype=np.int64)

    # --- layouts -------------------------------------------------------------------------------------

    def replicated(self) -> ClassChoices:
        """Return the choice in which every rank does everything."""
        return [[0] * len(self.graph.classes) for _ in self.options]

    def strategies(self, choice: ClassChoices, c: int) -> tuple[AxisStrategy, ...]:
        """Return the strategies of a class, by axis."""
        return tuple(o.strategies[c][picks[c]] for o, picks in zip(self.options, choice, strict=True))

    def layout(self, choice: ClassChoices, value: int) -> Placements:
        """Return the layout of a value."""
        found = self.graph.values[value]
        return self.followed(
            value, [s.outputs[found.output] for s in self.strategies(choice, found.producer)]
        )

    def followed(self, value: int, base: Sequence[object]) -> Placements:
        """Return the layout of a value from the placements of the output that it follows, by axis."""
        found = []
        for options, placement in zip(self.options, base, strict=True):
            where = options.placement(value, placement)  # type: ignore[arg-type]
            assert where is not None  # strategies that cannot be followed are not offered
            found.append(where)
        return tuple(found)

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the shape of an unsharded value."""
        return tuple(self._tensor(value)[0])

    def n_bytes(self, value: int) -> int:
        """Return the bytes of an unsharded value."""
        shape, dtype = self._tensor(value)
        return math.prod(shape) * dtype.itemsize

    def _tensor(self, value: int) -> tuple[tuple[int, ...], torch.dtype]:
        found = self.graph.values[value]
        # An output has the shape of its class. A value that follows one, such as a view, has that of the
        # call's result.
        if found.parent < 0:
            producer = self.graph.classes[found.producer]
            return producer.shapes[found.output], producer.dtypes[found.output]
        t = self.graph.calls[found.call].outputs[found.result]
        return tuple(t.shape), t.dtype

    def share(self, layout: Placements) -> float:
        """Return the part of a tensor that one rank has."""
        return 1 / math.prod(n for p, n in zip(layout, self.mesh.ranks, strict=True) if p.is_cut)

    def is_valid(self, c: int, strategies: Sequence[AxisStrategy]) -> bool:
        """Whether the cuts of several axes go together in the tensors of a class, and in all that follow them."""
        subject = self.graph.classes[c]
        # Inputs first, then all values that follow the outputs: a view may split a dimension so that two
        # cuts, each of which fits alone, do not fit together.
        if subject.call is not None:
            for i, t in enumerate(subject.call.inputs):
                if not fits(t.shape, tuple(s.inputs[i] for s in strategies), self.mesh.ranks):
                    return False
        return all(
            fits(self.shape(v), self.followed(v, [s.outputs[self.graph.values[v].output] for s in strategies]),
                 self.mesh.ranks)
            for v in self._values_of[c]
        )  # fmt: skip

    @cached_property
    def _values_of(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.graph.classes]
        for v, value in enumerate(self.graph.values):
            found[value.producer].append(v)
        return found

    def written(self, c: int) -> tuple[int, ...]:
        """Return the arguments that the ops of a class write in place."""
        return self._written[c]

    # --- time ----------------------------------------------------------------------------------------

    def class_ms(self, c: int, strategies: Sequence[AxisStrategy]) -> float:
        """Return the time of the ops of a class on one rank; of a class of parameters, that of their optimizer.

        Optimizers are bound by memory, so their time is proportional to the share. Other ops are asked for their
        cost on local shapes, see ``_part``.
        """
        subject = self.graph.classes[c]
        if subject.call is None:
            home = tuple(s.outputs[0] for s in strategies)
            return self.graph.optimizer_ms.get(c, 0.0) * self.share(home)
        inputs = tuple(zip(*(s.inputs for s in strategies), strict=True))
        outputs = tuple(zip(*(s.outputs for s in strategies), strict=True))
        key = (c, inputs, outputs)
        if key not in self._computed:
            self._computed[key] = self._class_ms[c] * self._part(c, inputs, outputs)
        return self._computed[key] + self._reduced_ms(c, strategies)

    def _part(self, c: int, inputs: Sequence[Placements], outputs: Sequence[Placements]) -> float:
        """Return the time of a call on local tensors over that on unsharded ones, by the cost model.

        A ratio, so that measured times of the recording are kept. 1 where the call cannot be made again.
        """
        call = self.graph.classes[c].call
        assert call is not None
        # The op is not known in this process, or takes no time: there is no ratio to take.
        if call.call is None or not self._class_ms[c]:
            return 1.0
        whole = self._ms(call.call)
        local = call.on(
            [self._local(t, p) for t, p in zip(call.inputs, inputs, strict=True)],
            [self._local(t, p) for t, p in zip(call.outputs, outputs, strict=True)],
        )
        assert local is not None
        part = self._ms(local)
        return part / whole if whole else 1.0

    def _ms(self, call: Call) -> float:
        _, ms = self._model.cost(call.func, call.args, call.kwargs, call.returned)
        return ms

    def _local(self, t: torch.Tensor, layout: Placements) -> torch.Tensor:
        # Replicated and partial tensors have the full shape on each rank.
        if all(p.kind != "S" for p in layout):
            return t
        # The cost model reads shapes. The strides of the full tensor are kept since they say which dimension
        # is contiguous.
        return t.new_empty_strided(local_shape(t.shape, layout, self.mesh.ranks), t.stride())

    def _reduced_ms(self, c: int, strategies: Sequence[AxisStrategy]) -> float:
        """Return the time of collectives inside of the calls of a class, such as that of a norm."""
        count = self.graph.classes[c].count
        return sum(
            count * self.costs.collective_ms("all_reduce", strategy.inside_bytes, axis)
            for axis, strategy in enumerate(strategies)
            if strategy.inside_bytes
        )

    def moved_ms(self, value: int, source: Placements, target: Placements) -> float:
        """Return the time of one redistribution of a value."""
        if source == target:
            return 0.0
        key = (value, source, target)
        if key not in self._moved:
            self._moved[key] = self.costs.redistribution_ms(
                self.n_bytes(value), self.shape(value), source, target
            )
        return self._moved[key]

    def copied_ms(self, value: int, source: Placements, target: Placements) -> float:
        """Return the time of copies on each rank beside the collectives of a redistribution.

        Collectives take parts that lie one after the other in memory. Those of a cut along dimension 0 do; others
        are copied before or after.
        """
        key = (value, source, target)
        if key not in self._copied:
            # No path: ``moved_ms`` is infinite already, so the copies need no value.
            path, ms, here = self.costs.redistribution_path(self.shape(value), source, target), 0.0, source
            for step in path or ():
                # ``p.outer > 1``: a cut inside of dimension 0 does not lie in one piece either.
                if step.collective is not None and any(
                    p.is_cut and (p.dim > 0 or p.outer > 1) for p in (step.source, step.target)
                ):
                    others = math.prod(
                        n for i, n in enumerate(self.mesh.ranks) if i != step.axis and here[i].is_cut
                    )
                    ms += self.costs.copy_ms(self.n_bytes(value) / others)
                here = after(here, step)
            self._copied[key] = ms
        return self._copied[key]

    def target(self, strategies: Sequence[AxisStrategy], flow: ValueUse, position: int) -> Placements:
        """Return the layout that a user wants of an argument; of a gradient, that of its parameter."""
        if flow.phase == GRADIENT:
            return tuple(s.outputs[0] for s in strategies)
        return tuple(s.inputs[position] for s in strategies)

    def ms(self, choice: ClassChoices) -> float:
        """Return the time of a step on one rank, by the formula above."""
        total = self.graph.rest_ms
        computed, beside = [0.0, 0.0], [0.0, 0.0]
        for c, subject in enumerate(self.graph.classes):
            ms = self.class_ms(c, self.strategies(choice, c))
            total += ms
            if not subject.is_parameter:
                computed[half_of(subject.phase)] += ms
        for flow, count in self.graph.flows.items():
            source = self.layout(choice, flow.value)
            users = sorted(flow.users)
            # Once for each distinct layout, however many users want it (see the formula).
            wanted = dict.fromkeys(
                self.target(self.strategies(choice, u.user), flow, u.position) for u in users
            )
            ms = count * sum(self.moved_ms(flow.value, source, target) for target in wanted)
            total += count * sum(self.copied_ms(flow.value, source, target) for target in wanted)
            if self.graph.is_hidden(flow):
                beside[half_of(flow.phase)] += ms
            else:
                total += ms
        return total + sum(max(0.0, b - c) for b, c in zip(beside, computed, strict=True))

    # --- memory --------------------------------------------------------------------------------------

    def rounded(self, n_bytes: np.ndarray) -> np.ndarray:
        """Return sizes as the device's allocator rounds them."""
        unit = max(1, self.costs.spec.allocation_round_bytes)
        return np.ceil(n_bytes / unit) * unit

    def temporary_bytes(self, choice: ClassChoices, c: int, inputs: Sequence[int | None]) -> float:
        """Return the bytes of the redistributed arguments of an op, which are alive while it runs."""
        strategies = self.strategies(choice, c)
        copies = {}
        for i, v in enumerate(inputs):
            if v is not None:
                target = tuple(s.inputs[i] for s in strategies)
                if target != self.layout(choice, v):
                    copies[v, target] = self.n_bytes(v) * self.share(target)
        return sum(copies.values())

    def live(self, choice: ClassChoices) -> np.ndarray:
        """Return the bytes alive on one rank, by moment."""
        graph = self.graph
        # A hold without a value has the index -1: the share 1.0 at the end.
        shares = np.array([self.share(self.layout(choice, v)) for v in range(len(graph.values))] + [1.0])
        sizes = self.rounded(self._bytes * shares[self._values])
        # Differences at the beginnings and ends of holds; their running sum is what is alive.
        change = np.zeros(graph.moments + 1)
        np.add.at(change, self._starts, sizes)
        np.add.at(change, self._ends, -sizes)
        live = np.cumsum(change)[:-1]
        for (c, inputs), moments in graph.at.items():
            if copies := self.temporary_bytes(choice, c, inputs):
                live[moments] += copies
        for move in graph.gradient_moves:
            source = self.layout(choice, move.value)
            # The hold of the gradient has its layout after the move from this moment on. The one before is
            # alive as well.
            if source != self.layout(choice, move.home):
                live[move.moment] += self.n_bytes(move.value) * self.share(source)
        return live

    def figures(self, choice: ClassChoices) -> Figures:
        """Return time and peak of a choice."""
        live = self.live(choice)
        moment = int(live.argmax()) if len(live) else -1
        return Figures(self.ms(choice), round(live[moment]) if len(live) else 0, moment)

    def is_possible(self, choice: ClassChoices) -> bool:
        """Whether a choice can run: the cuts of all axes go together, and what cannot be moved is where it must be."""
        for c, subject in enumerate(self.graph.classes):
            strategies = self.strategies(choice, c)
            if not self.is_valid(c, strategies):
                return False
            for row in dict.fromkeys(subject.inputs):
                have = [self._whole if v is None else self.layout(choice, v) for v in row]
                want = [tuple(s.inputs[i] for s in strategies) for i in range(len(row))]
                if any(have[i] != want[i] for i in self.written(c)):
                    return False  # a copy would be written, and not the tensor
                if subject.follows and not self._follows(have, want):
                    return False  # no place can ask for this
        return math.isfinite(self.ms(choice))

    @property
    def _whole(self) -> Placements:
        return (REPLICATED,) * len(self.mesh.axes)

    @staticmethod
    def _follows(have: Sequence[Placements], want: Sequence[Placements]) -> bool:
        """Whether an op that nothing is asked of may run so: on each axis a cut or a sum must come from an input."""
        for here, there in zip(zip(*have, strict=True), zip(*want, strict=True), strict=True):
            if any(t.is_partial and not h.is_partial for h, t in zip(here, there, strict=True)):
                return False
            cuts = [(h, t) for h, t in zip(here, there, strict=True) if t.is_cut]
            if cuts and not any(h.is_cut for h, _ in cuts):
                return False
        return True
