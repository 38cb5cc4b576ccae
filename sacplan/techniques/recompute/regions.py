"""Regions of the forward pass and their options: the choices that recomputation has.

    regions = Regions(program, costs).joined(1)
    regions[3].ops(regions[3].options[-1])  # the ops that run again if the region discards all that it can

A *region* is a part of the forward pass (``partition.py``) with options. An option is a set of the region's ops that
run again, an exact point of the region's closure problem (``closure.py``). So options decide tensor by tensor.

Neighbouring regions can be joined into one. The options of a joined region may also discard what passes from one
neighbour to the next (a residual stream) and run all of them again from the beginning: that is how a step gets down to
its smallest peak.

Regions that repeat give the same problem, which is solved once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from sacplan.core.pins import NO_PINS, Pins
from sacplan.core.program import Phase, Program
from sacplan.techniques.base.regions import Option, Region, connected
from sacplan.techniques.recompute import closure
from sacplan.techniques.recompute.in_place_groups import Group, discardable, in_place_groups
from sacplan.techniques.recompute.partition import OpGroup, join, most_joined, partition, unit_around

_VERTICES, _FEWEST = 24, 4  # of a region's hull: at most, and still where there are very many ops
# An option takes time in proportion to the ops of its region: these limits keep planning linear in the step's size.
_EFFORT = 6000  # ops of all options of one kind of region; only the hull and points near it may exceed this
_COLUMNS = 1500  # options of all regions together, about, beyond the hull
_BETWEEN = 8  # options between two vertices of a region's hull, at most
_DISTINCT = 6000  # ops of one region of each kind, summed over kinds; above this, regions have fewer options


@dataclass(eq=False)
class Regions:
    """Regions of one program under one objective; problems that repeat are solved once.

    Args:
        program: the step.
        costs: what running each op again costs.
        early: storages that the backward pass has asked for by the time of the peak. Discarding these need not
            lower the peak, so options that keep them are offered as well.
        pins: what no option discards, and which modules no option makes a unit.

    Where there are many regions, one fills the gaps between the options of another, so options on and near the hull
    are enough. The fewer regions there are, the more options are added that differ from those in one tensor.
    """

    program: Program
    costs: Sequence[float]
    early: frozenset[int] = frozenset()
    pins: Pins = NO_PINS

    def __post_init__(self) -> None:
        self._kinds: dict[tuple[closure.ClosureProblem, closure.ClosureProblem | None], int] = {}
        self._solved: dict[tuple[int, _Effort], tuple[Option, ...]] = {}
        self._unit_of_group: dict[tuple[int, ...], str] = {}
        self._components: dict[Hashable, tuple[tuple[tuple[int, ...], ...], ...]] = {}
        self._savers: dict[int, set[int]] = defaultdict(set)  # storage to the ops that autograd keeps it for
        program = self.program
        for storage, op in zip(program.handle_storages, program.handle_ops, strict=True):
            self._savers[storage].add(op)
        self._saving_scopes: dict[int, set[int]] = defaultdict(set)
        for storage, scope in zip(program.handle_storages, program.liveness.handle_scopes, strict=True):
            self._saving_scopes[storage].add(scope)
        # No group with one of these ops may be discarded.
        self._kept = self.pins.kept_ops | self._across_widest_units()
        self._parts, self._split = partition(program, self.pins)

    @property
    def longest_run(self) -> int:
        """The number of neighbouring regions that can be joined at most."""
        return most_joined(self._parts)

    def joined(self, size: int) -> tuple[Region, ...]:
        """Return the regions, with up to ``size`` neighbours joined; 1 leaves them as they are."""
        parts = [
            replace(part, members=in_place_groups(self.program, part.members))
            for part in join(self.program, self._parts, size)
        ]
        problems = [self._problem(part) for part in parts]
        kinds = [self._kinds.setdefault(problem, len(self._kinds)) for problem in problems]
        effort = _Effort.of(
            len(parts), [problem for problem, _ in dict(zip(kinds, problems, strict=True)).values()]
        )
        regions = []
        for part, kind, (problem, late) in zip(parts, kinds, problems, strict=True):
            # Equal problems have one kind, so each distinct one is solved once for each effort.
            if (kind, effort) not in self._solved:
                self._solved[kind, effort] = _options(problem, late, effort)
            options = self._solved[kind, effort]
            units = self._units(part, options)
            wide = tuple(not self._split.isdisjoint(fqns) for fqns in units)
            regions.append(Region(part.unit, part.members, kind, options, units, wide))
        return tuple(regions)

    def _units(self, part: OpGroup, options: tuple[Option, ...]) -> tuple[tuple[str, ...], ...]:
        """Return, for each option, the modules that have to be units.

        One for each connected group of the option's ops: the smallest module, not a leaf, that runs the group and
        everything that saves its outputs. A recipe must be recorded and its handles packed within one call of the unit.
        """
        # A module that was not split, or whose calls share decisions, is the unit of all options that discard anything.
        if not part.once or (part.unit not in self._split and len(self.program.calls[part.unit]) == 1):
            return tuple((part.unit,) if option.members else () for option in options)
        ops = sorted(op for group in part.members for op in group)
        return tuple(
            tuple(dict.fromkeys(self._unit_of(tuple(ops[i] for i in group)) for group in groups))
            for groups in self._connected(part, ops, options)
        )

    def _connected(
        self, part: OpGroup, ops: Sequence[int], options: tuple[Option, ...]
    ) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return for each option its ops in connected components, where one op reads what another made.

        Ops are indices into ``ops``, the ops of the part. Layers that are alike share the answer.
        """
        place = {op: i for i, op in enumerate(ops)}
        members = tuple(tuple(place[op] for op in group) for group in part.members)
        reads = tuple(
            (i, place[maker])
            for i, op in enumerate(ops)
            for s in self.program.ops[op].reads
            if (maker := self.program.writer.get(s)) in place and maker is not None
        )
        key = members, reads, tuple(option.members for option in options)
        if key not in self._components:
            self._components[key] = tuple(
                _components(sorted(i for member in option.members for i in members[member]), reads)
                for option in options
            )
        return self._components[key]

    def _unit_of(self, group: tuple[int, ...]) -> str:
        """Return the unit for ops that run again together; remembered, since many options have the same groups."""
        if group not in self._unit_of_group:
            program = self.program
            ops = [program.ops[op] for op in group]
            scopes = {op.scope for op in ops}.union(
                *(self._saving_scopes[s] for op in ops for s in op.writes)
            )
            # All of them have the same widest unit, or the group would be kept (``_across_widest_units``).
            widest_unit = self.pins.widest_unit(next(iter(scopes)))
            self._unit_of_group[group] = unit_around(program, scopes, widest_unit)
        return self._unit_of_group[group]

    def _across_widest_units(self) -> set[int]:
        """Return the forward ops whose output is used outside of the widest unit that may hold them.

        "Used" means saved by autograd, or read by an op that may itself run again. Ops with such outputs are kept: no
        unit could record the op and also see the tensor being saved.
        """
        program, pins = self.program, self.pins
        kept: set[int] = set()
        if pins.widest_units is not None:
            widest_unit: Callable[[int], object] = pins.widest_unit
        elif len(program.outermost_modules) > 1:  # the loss calls parts of the model, not the model
            widest_unit = program.outermost_module
        else:
            return kept  # nothing restricts how wide a unit may be
        for s, op in program.writer.items():
            if program.ops[op].phase != Phase.FORWARD or op in pins.kept_ops:
                continue
            # A reader that is never discarded leaves no node, so it may be anywhere.
            users = {program.ops[i].scope for i in self.program.readers.get(s, ()) if i not in pins.kept_ops}
            users.update(self._saving_scopes.get(s, ()))
            own = widest_unit(program.ops[op].scope)
            if any(widest_unit(scope) != own for scope in users):
                kept.add(op)
        return kept

    def _may_be_discarded(self, part: OpGroup, group: tuple[int, ...]) -> bool:
        """Whether the ops themselves and the pins allow a group of a part's ops to be discarded."""
        program, pins = self.program, self.pins
        # Kept by a pin, by a border between units, or by what the ops are (``discardable``).
        if not self._kept.isdisjoint(group) or not discardable(program, group):
            return False
        if pins.widest_units is None:
            return True  # no pin restricts which modules may be units
        if not part.once:
            # The unit is the part's own module, for all its calls.
            return pins.may_be_a_unit(program, part.unit)
        # A part with ``once`` is of one call, and a unit does the same in all of its calls: so it must have only one.
        widest_units = {pins.widest_unit(program.ops[i].scope) for i in group}
        return len(widest_units) == 1 and all(
            len(program.calls[program.scopes[r].fqn]) == 1 for r in widest_units
        )

    def _problem(self, part: OpGroup) -> tuple[closure.ClosureProblem, closure.ClosureProblem | None]:
        """Return the problem of a part, and, if it differs, the one in which early storages cost nothing."""
        program, ops = self.program, self.program.ops
        inside = {op for group in part.members for op in group}

        def may_go(group: Group) -> bool:
            # What another region reads is kept: that region's recipes would hold what this region counts as freed.
            written = (s for i in group for s in ops[i].writes)
            return self._may_be_discarded(part, group) and all(
                program.readers.get(s, inside) <= inside for s in written
            )

        touched = {s for i in inside for s in (*ops[i].reads, *ops[i].writes)}
        saved = {s for s in touched if not inside.isdisjoint(self._savers[s])}
        # A storage that autograd also keeps for an op of another part is there whatever this part does.
        elsewhere = {s for s in touched if not inside.issuperset(self._savers[s])}
        problem, place = closure_problem(program, part.members, self.costs, may_go, saved, elsewhere)
        early = problem.free.union(place[s] for s in saved & self.early)
        # If all that is saved is early, nothing can be chosen, and the kind is that of a part without early storages.
        differs = early != problem.free and not problem.saved <= early
        return problem, replace(problem, free=early) if differs else None


def _components(gone: Sequence[int], reads: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return the connected components of ops, given the pairs (reader, maker) among all ops of the part."""
    inside = set(gone)
    return tuple(map(tuple, connected(gone, (pair for pair in reads if inside.issuperset(pair)))))


def closure_problem(
    program: Program,
    groups: Sequence[Group],
    costs: Sequence[float],
    discardable: Callable[[Group], bool],
    saved: Collection[int],
    saved_elsewhere: Collection[int],
) -> tuple[closure.ClosureProblem, dict[int, int]]:
    """Return the closure problem of some groups of ops, and the index in it of each storage.

    Args:
        program: the step.
        groups: ops that are discarded together; each group is one op of the problem.
        costs: by op, what running it again costs.
        discardable: whether a group may be discarded.
        saved: storages that autograd keeps on account of these ops.
        saved_elsewhere: storages that autograd keeps on account of other ops. These cost nothing here, nor do
            storages that something other than autograd holds.
    """
    ops, place = program.ops, dict[int, int]()

    def index(storage: int) -> int:
        return place.setdefault(storage, len(place))

    closure_ops = tuple(
        closure.ClosureOp(
            cost_ms=sum(costs[i] for i in group),
            reads=tuple(dict.fromkeys(index(s) for i in group for s in ops[i].reads)),
            writes=tuple(index(s) for i in group for s in ops[i].writes),
            discardable=discardable(group),
        )
        for group in groups
    )
    asked = frozenset(map(index, saved))
    held = program.liveness.outlives_forward
    problem = closure.ClosureProblem(
        ops=closure_ops,
        storage_bytes=tuple(program.storage_bytes[s] for s in place),
        saved=asked,
        free=frozenset(at for s, at in place.items() if s in held or s in saved_elsewhere),
    )
    return problem, place


@dataclass(frozen=True, slots=True)
class _Effort:
    """How many options to look for, for each region.

    Attributes:
        vertices: vertices of its hull, at most.
        between: options between two vertices, at most.
        more: further options, about; each differs in one tensor from one of the above.
    """

    vertices: int
    between: int
    more: int

    @staticmethod
    def of(n_regions: int, distinct: Sequence[closure.ClosureProblem]) -> _Effort:
        """Return the effort for ``n_regions`` regions with these distinct problems.

        The time goes with the ops of all options together, which stay within a multiple of the ops of the regions.
        """
        n_ops = sum(len(problem.ops) for problem in distinct)
        share = math.sqrt(min(1.0, _DISTINCT / max(1, n_ops)))
        vertices = max(_FEWEST, round(share * _VERTICES))
        return _Effort(vertices, round(share * _BETWEEN), _COLUMNS // max(1, n_regions))


def _options(
    problem: closure.ClosureProblem, late: closure.ClosureProblem | None, effort: _Effort
) -> tuple[Option, ...]:
    """Return a region's options: the hull and points near it, and others that differ from these in one tensor."""
    if not problem.saved:
        return (Option(0.0, 0, (), "recompute"),)
    points = list(closure.tradeoff(problem, effort.vertices, effort.between))
    if late is not None:
        late_points = closure.tradeoff(late, effort.vertices, effort.between)
        # In ``late``, early storages are free. The sets are chosen so, but priced as in ``problem``.
        points += [closure.evaluate(problem, point.discarded) for point in late_points]
    distinct = tuple({point.discarded: point for point in points}.values())
    # Each option costs time in proportion to the ops of the problem, so large problems get fewer.
    most = len(distinct) + min(effort.more, max(0, _EFFORT // len(problem.ops) - len(distinct)))
    points = list(closure.with_neighbours(problem, distinct, most))
    return tuple(
        Option(p.recompute_ms, p.kept_bytes, tuple(sorted(p.discarded)), "recompute") for p in points
    )
