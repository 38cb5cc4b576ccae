"""The forward pass in parts: which ops are looked at together when choosing what runs again.

    parts, split = partition(program, pins)
    join(program, parts, 2)  # pairs of neighbours as one

A part is a module that repeats along the model (a layer) or is small enough to be looked at as a whole, together with
what the modules around it run after it (before the first one: before it). Every forward op that a module of the model
runs is in one part. What can be chosen for a part is in ``regions.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sacplan._program.program import ROOT_SCOPE, Phase, Program
from sacplan._recompute.pins import Pins

LARGEST_PART = 400
"""Modules with more op call sites than this are split into their children."""

SMALL_PART = 150
"""Up to here, a module is looked at as a whole unless its own children repeat."""

LARGEST_JOINED = 800
"""Neighbours are not joined to parts of more ops than this."""

_MIN_SHARE = 0.5  # of a module's ops that its repeated children must have for it to be split


@dataclass(frozen=True, slots=True)
class Part:
    """Some forward ops that are looked at together.

    Attributes:
        unit: fqn of the smallest module that runs them all.
        members: groups of op indices; a group is one call site in all calls of the unit.
        once: the ops run in one call of the unit, so that each is a group of its own and a neighbour of the same
            family may be joined.
        family: equal for the layers of one stack.
    """

    unit: str
    members: tuple[tuple[int, ...], ...]
    once: bool
    family: str = ""


class _Tree:
    """The module calls of a program as a tree of modules."""

    def __init__(self, program: Program, pins: Pins) -> None:
        self.program = program
        self._pins = pins
        children: dict[str, dict[str, None]] = defaultdict(dict)
        for scope in program.scopes:
            parent = program.scopes[scope.parent].fqn if scope.parent != ROOT_SCOPE else None
            if parent is not None and parent != scope.fqn:
                children[parent][scope.fqn] = None
        self.children = {fqn: tuple(found) for fqn, found in children.items()}
        self.roots = tuple(dict.fromkeys(s.fqn for s in program.scopes if s.parent == ROOT_SCOPE))

    def members(self, fqn: str) -> tuple[tuple[int, ...], ...]:
        """The forward ops of a module, one group for each call site."""
        return tuple(self.program.call_sites(fqn).values())

    def calls(self, fqn: str) -> list[list[int]]:
        """The forward ops of each call of a module."""
        ops = self.program.ops
        return [
            [op for op in self.program.sites(scope) if ops[op].phase == Phase.FORWARD]
            for scope in self.program.calls[fqn]
        ]

    def called_once_around(self, fqn: str) -> bool:
        """Whether all calls of a module are in one call of another, which may be a unit."""
        around = self.program.common_scope(self.program.calls[fqn])
        return around != ROOT_SCOPE and self._pins.may_be_discarded_in(around)

    def is_barred(self, fqn: str) -> bool:
        """Whether pins forbid it as a unit, but not all that is in it."""
        program, pins = self.program, self._pins
        if pins.may_be_a_unit(program, fqn):
            return False
        inside = {scope for scope in range(len(program.scopes)) if pins.widest_unit(scope) == scope}
        return any(call in program.ancestors(scope) for call in program.calls[fqn] for scope in inside)

    def is_leaf(self, fqn: str) -> bool:
        return fqn in self.program.leaf_fqns or fqn not in self.children

    def splits(self, fqn: str, n_members: int) -> bool:
        """Whether a module is looked at in parts: it is large, or the same kind of child follows on itself.

        Or it is not small, and most of it is a child of which that is true.
        """
        inner = [child for child in self.children.get(fqn, ()) if not self.is_leaf(child)]
        if not inner:
            return False
        if n_members > LARGEST_PART or self._repeats(inner, n_members):
            return True
        if n_members <= SMALL_PART:
            return False
        sizes = {child: len(self.members(child)) for child in inner}
        return any(
            size >= _MIN_SHARE * n_members and self.splits(child, size) for child, size in sizes.items()
        )

    def _repeats(self, inner: Sequence[str], n_members: int) -> bool:
        ops = self.program.ops
        kinds: dict[tuple[str, ...], list[tuple[tuple[int, ...], ...]]] = defaultdict(list)
        for child in inner:
            members = self.members(child)
            kinds[tuple(ops[group[0]].name for group in members)].append(members)
        same = max(kinds.values(), key=lambda group: sum(map(len, group)))
        share = sum(map(len, same)) / max(1, n_members)
        if len(same) < 2 or share < _MIN_SHARE:
            return False
        first, second = ({op for group in members for op in group} for members in same[:2])
        return self.program.depends(second, first)


def partition(program: Program, pins: Pins) -> tuple[list[Part], frozenset[str]]:
    """Every forward op that a module runs, in one part each, in the order of execution; and the split modules."""
    tree = _Tree(program, pins)
    owned: set[int] = set()
    whole: list[Part] = []  # modules
    rest: list[Part] = []  # what modules that are split run themselves

    def visit(fqn: str) -> None:
        members = tuple(group for group in tree.members(fqn) if owned.isdisjoint(group))
        if not members:
            return
        once = len(program.calls[fqn]) == 1
        barred = tree.is_barred(fqn)
        if barred or tree.splits(fqn, len(members)):
            for child in tree.children[fqn]:
                if barred or not tree.is_leaf(child):
                    visit(child)
            members = tuple(group for group in members if owned.isdisjoint(group))
            rest.append(Part(fqn, members, once))
        elif once or not tree.called_once_around(fqn):
            whole.append(Part(fqn, members, once, fqn.rpartition(".")[0]))
        else:  # a shared layer: each of its calls is a part
            for ops in tree.calls(fqn):
                ops = [op for op in ops if op not in owned]
                if ops:
                    whole.append(Part(_unit_of(program, ops), tuple((op,) for op in ops), True, fqn))
        owned.update(op for group in members for op in group)

    for root in tree.roots:
        visit(root)
    return _attached(program, whole, rest), frozenset(part.unit for part in rest)


def _attached(program: Program, whole: list[Part], rest: list[Part]) -> list[Part]:
    """Ops outside of the parts go to the part before them, those before the first to the first."""
    whole = sorted(whole, key=lambda part: part.members[0][0])
    single = [part for part in whole if part.once]
    starts = [part.members[0][0] for part in single]
    added: dict[int, list[int]] = defaultdict(list)
    left: list[Part] = []
    for part in rest:
        if not part.members:
            continue
        if not (part.once and single):
            starts_at = range(0, len(part.members), LARGEST_PART)
            left += [Part(part.unit, part.members[at : at + LARGEST_PART], False) for at in starts_at]
            continue
        for (op,) in part.members:
            added[max(0, bisect_right(starts, op) - 1)].append(op)
    found = [part for part in whole if not part.once] + left
    for i, part in enumerate(single):
        ops = sorted([*(op for (op,) in part.members), *added[i]])
        if added[i]:
            part = Part(_unit_of(program, ops), tuple((op,) for op in ops), True, part.family)
        found.append(part)
    return sorted(found, key=lambda part: part.members[0][0])


def _unit_of(program: Program, ops: Iterable[int]) -> str:
    """The smallest module that is called once and runs all these ops."""
    return unit_around(program, {program.ops[op].scope for op in ops})


def unit_around(program: Program, scopes: Iterable[int], widest_unit: int = ROOT_SCOPE) -> str:
    """The smallest module, no leaf and called once, that these module calls are in or are; at most ``widest_unit``."""
    scope = program.common_scope(scopes)
    while True:
        fqn = program.scopes[scope].fqn
        parent = program.scopes[scope].parent
        if parent == ROOT_SCOPE or (fqn not in program.leaf_fqns and len(program.calls[fqn]) == 1):
            return fqn
        if scope == widest_unit:
            return fqn
        scope = parent


def runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Neighbours that can be joined."""
    runs: list[list[Part]] = []
    for part in parts:
        if part.once:
            if not runs or runs[-1][-1].family != part.family:
                runs.append([])
            runs[-1].append(part)
    return runs


def join(program: Program, parts: Sequence[Part], size: int) -> list[Part]:
    """Runs of ``size`` neighbours as one."""
    joined = [part for part in parts if not part.once]
    for run in runs(parts):
        group: list[Part] = []
        for part in run:
            n_ops = sum(len(p.members) for p in group) + len(part.members)
            if group and (len(group) == size or n_ops > LARGEST_JOINED):
                joined.append(_merged(program, group))
                group = []
            group.append(part)
        joined.append(_merged(program, group))
    return sorted(joined, key=lambda part: part.members[0][0])


def _merged(program: Program, group: Sequence[Part]) -> Part:
    if len(group) == 1:
        return group[0]
    ops = sorted(op for part in group for (op,) in part.members)
    return Part(_unit_of(program, ops), tuple((op,) for op in ops), True, group[0].family)
