"""A choice of the search as a sharding: the layouts of parameters, and places for the ops that would not follow.

A plan does not list a strategy for each op. Given the layouts of its inputs, each op runs by one rule (``choose.py``),
on real ranks as in the program of a rank. So most of a choice follows from the layouts of the parameters. To find the
rest, the forward pass is gone through op by op, with the layouts that the rule brings about:

1. Ask the rule how the op runs from the layouts that its inputs have now.
2. If it wants other inputs than the strategy of the search, add a place, which asks for those of the strategy. The
   rule then takes a strategy with these inputs, though its outputs may differ from what the search counted on.
3. Go on with the layouts of the outputs that the rule gives.

Places are kept by module, op and occurrence. Repeated layers that want the same become one place with a pattern. The
backward pass and ops outside of modules cannot be asked for anything, so what they do there is left to the rule: the
program of a rank, which is made next, says what it costs.
"""

from __future__ import annotations

from collections import Counter

from sacplan._placing.evaluation import ClassChoices, Evaluation
from sacplan._placing.graph import PlacedCall, StrategyGraph
from sacplan._program.elements import by_pattern, pattern_of
from sacplan._program.program import ROOT_SCOPE, Event, Op, Phase
from sacplan._shard.choose import CallSharding, choose
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import REPLICATED, Placements, format_layout
from sacplan._shard.places import CallPattern
from sacplan._shard.sharding import Sharding, cut_homes

_Site = tuple[str, str, int]
"""Module, op, occurrence, as in ``CallPattern``."""


def sharding_of(evaluation: Evaluation, choice: ClassChoices) -> Sharding:
    """Return the sharding under which ops run as in a choice, as far as the forward pass decides it."""
    return Sharding.of(evaluation.mesh, homes_of(evaluation, choice), _Forward(evaluation, choice).places())


def homes_of(evaluation: Evaluation, choice: ClassChoices) -> dict[str, Placements]:
    """Return the layouts of the parameters that a choice shards, by name or pattern (``cut_homes``)."""
    homes: dict[str, Placements] = {}
    for c in evaluation.graph.classes:
        if c.is_parameter:
            home = tuple(s.outputs[0] for s in evaluation.strategies(choice, c.index))
            homes.update((p.name, home) for p in c.parameters)
    return cut_homes(homes)


class _Forward:
    """Goes through the forward pass with the rule by which ops run."""

    def __init__(self, evaluation: Evaluation, choice: ClassChoices) -> None:
        self.evaluation = evaluation
        self.choice = choice
        self.graph: StrategyGraph = evaluation.graph
        self.mesh: Mesh = evaluation.mesh
        self._whole: Placements = (REPLICATED,) * len(self.mesh.axes)
        self._layouts: dict[int, Placements] = {}  # of tensors of the program
        self._weights: set[int] = set()
        self._wanted: dict[_Site, tuple[Placements, ...]] = {}
        self._asked: dict[_Site, tuple[Placements, ...]] = {}
        self._known: dict[object, CallSharding] = {}

    def places(self) -> list[CallPattern]:
        """Return the places, one for all equal layers where these want the same."""
        program = self.graph.program
        ran: Counter[tuple[int, str]] = Counter()
        for code, arg in program.events:
            op = program.ops[arg] if code == Event.OP else None
            # Ops without a call in the graph depend on no parameter: nothing is placed, so there is nothing
            # to ask for. They do not count as occurrences either (see ``CallPattern.occurrence``).
            if op is None or op.phase != Phase.FORWARD or arg not in self.graph.call_of:
                continue
            self._run(arg, op, ran[op.scope, op.name])
            ran[op.scope, op.name] += 1

        def pattern(site: _Site) -> _Site:
            unit, name, occurrence = site
            return pattern_of(unit), name, occurrence

        # ``_wanted`` has all calls, also those that need no place: a pattern may stand only for calls that
        # want the same, so one layer that follows by itself must not want something else.
        found = by_pattern(self._asked, self._wanted, pattern)
        return [CallPattern(*site, tuple(map(format_layout, inputs))) for site, inputs in found.items()]

    def _layout(self, tensor: int) -> Placements:
        if tensor not in self._layouts:
            storage = self.graph.program.tensors[tensor].storage
            # A tensor that no op of the walk has made: a parameter, or one that every rank has all of.
            home = self.graph.homes.get(storage)
            if home is None:
                return self._whole
            self._weights.add(tensor)
            strategies = self.evaluation.strategies(self.choice, home)
            self._layouts[tensor] = tuple(s.outputs[0] for s in strategies)
        return self._layouts[tensor]

    def _run(self, index: int, op: Op, occurrence: int) -> None:
        call = self.graph.calls[self.graph.call_of[index]]
        have = tuple(map(self._layout, op.inputs))
        weights = tuple(t in self._weights for t in op.inputs)
        # First without a place. Only where the rule differs from the search is a place worth its line in the
        # plan.
        ran = self._chosen(call, have, weights, None)
        c = self.graph.class_of.get(index)
        # Views have no class: they follow. Outside of modules there is no name to ask by.
        if c is not None and op.scope != ROOT_SCOPE:
            strategies = self.evaluation.strategies(self.choice, c)
            want = tuple(tuple(s.inputs[i] for s in strategies) for i in range(len(have)))
            site = (self.graph.program.scopes[op.scope].fqn, op.name, occurrence)
            self._wanted.setdefault(site, want)
            # What is written in place cannot be moved first, so a place cannot ask for it.
            movable = all(have[i] == want[i] for i in self.evaluation.written(c))
            # A second call from one site, as of a shared module, gets what the place asks for, wanted or not.
            if site in self._asked or (ran.inputs != want and movable):
                asked = self._asked.setdefault(site, want)
                ran = self._chosen(call, have, weights, asked)
        # Those of the rule, not of the search: later ops see on a rank what these brought about.
        self._layouts.update(zip(op.outputs, ran.outputs, strict=True))
        if all(weights):
            self._weights.update(op.outputs)

    def _chosen(
        self,
        call: PlacedCall,
        have: tuple[Placements, ...],
        weights: tuple[bool, ...],
        asked: tuple[Placements, ...] | None,
    ) -> CallSharding:
        key = (id(call), have, weights, asked)
        if key not in self._known:
            assert call.call is not None  # the search replicates the inputs of an op without one
            self._known[key] = choose(call.call, have, self.mesh, asked, weights)
        return self._known[key]
