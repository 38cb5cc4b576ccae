"""Partition the forward pass into parts: groups of ops that are looked at together when choosing what runs again.

    parts, split = partition(program, pins)
    join(program, parts, 2)  # pairs of neighbours as one

A part is a module that repeats along the model (a layer), or one that is small enough to be looked at as a whole. The
ops that modules around parts run themselves go to the part before them, or to the first part. Every forward op that a
module of the model runs is in exactly one part, but for those with which ``fully_shard`` gathers parameters.
``regions.py`` has the choices for a part.

Four stages:

1. Walk down the module tree. A module is split into its children if it is large or its children repeat
   (``_CallTree.splits``); otherwise it is a part.
2. Attach the ops that split modules run themselves (``_attached``).
3. Cut what is too large and has no modules to be split into, such as an unrolled recurrence, into windows. A window
   ends where few bytes cross: in a recurrence, between two steps (``_windows``).
4. Join neighbours where there are more parts than ``MOST_PARTS``.

The sizes are bounds on the work that follows: a part has at most ``LARGEST_PART`` call sites, so the choices grow
linearly with the step. The split is a heuristic. An option cannot discard a tensor that another part reads, so where
the borders lie decides which plans exist; joined regions make up for that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sacplan.core.pins import Pins
from sacplan.core.program import ROOT_SCOPE, Phase, Program
from sacplan.distributed.ranks.unit_limits import gathering_ops

# The time of a region's options grows with the square of its ops.
LARGEST_PART = 400
"""Modules with more op call sites than this are split into their children, or into windows."""

SMALL_PART = 150
"""Modules with no more op call sites than this are looked at as a whole unless their own children repeat."""

LARGEST_JOINED = 800
"""Neighbours are not joined to parts of more ops than this."""

MOST_PARTS = 256
"""Neighbours of one family are joined from the start where there are more parts than this."""

_WINDOWS = 128  # of one part, at most, unless they would be larger than half of ``LARGEST_PART``
_SMALLEST_WINDOW = 24  # ops

_MIN_SHARE = 0.5  # of a module's ops that its repeated children must have for it to be split


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Some forward ops that are looked at together.

    Attributes:
        unit: fqn of the smallest module that runs them all.
        members: groups of op indices; a group is one call site in all calls of the unit.
        once: whether the ops run in one call of the unit, so that each is a group of its own.
        family: equal for neighbours that may be joined: the layers of one stack, or the windows of one part. None: not
            to be joined.
    """

    unit: str
    members: tuple[tuple[int, ...], ...]
    once: bool
    family: str | None = None


class _CallTree:
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
        self.roots = program.outermost_modules
        # Modules around calls of a module that the loss function also calls directly.
        shared = [
            call for root in self.roots if root not in program.leaf_fqns for call in program.calls[root]
        ]
        self._around_roots = {program.scopes[a].fqn for call in shared for a in program.ancestors(call)}

    def members(self, fqn: str) -> tuple[tuple[int, ...], ...]:
        """Return the forward ops of a module, one group for each call site."""
        gathering = gathering_ops(self.program)
        return tuple(ops for ops in self.program.call_sites(fqn).values() if gathering.isdisjoint(ops))

    def calls(self, fqn: str) -> list[list[int]]:
        """Return the forward ops of each call of a module."""
        ops, gathering = self.program.ops, gathering_ops(self.program)
        return [
            [op for op in self.program.sites(scope) if ops[op].phase == Phase.FORWARD and op not in gathering]
            for scope in self.program.calls[fqn]
        ]

    def called_once_around(self, fqn: str) -> bool:
        """Whether all calls of a module are in one call of another module, and that module may be a unit."""
        around = self.program.common_scope(self.program.calls[fqn])
        return around != ROOT_SCOPE and self._pins.may_be_discarded_in(around)

    def is_barred(self, fqn: str) -> bool:
        """Whether pins forbid a module as a unit, but allow units in it: then it has to be split."""
        return self._pins.units_in(self.program, fqn) not in ([fqn], [])

    def is_leaf(self, fqn: str) -> bool:
        return fqn in self.program.leaf_fqns or fqn not in self.children

    def splits(self, fqn: str, n_members: int) -> bool:
        """Whether a module is split into its children.

        That is so if it is large, or if children of one kind follow each other (a stack of layers). Or if it is not
        small, and most of it is one child that is split: a wrapper around the model. Or if a module in it is also
        called outside of it: only a unit inside that module is in all of these calls.
        """
        inner = [child for child in self.children.get(fqn, ()) if not self.is_leaf(child)]
        if not inner:
            return False  # there is nothing to split into; if it is too large, it is cut into windows
        if n_members > LARGEST_PART or fqn in self._around_roots or self._repeats(inner, n_members):
            return True
        if n_members <= SMALL_PART:
            return False
        sizes = {child: len(self.members(child)) for child in inner}
        return any(
            size >= _MIN_SHARE * n_members and self.splits(child, size) for child, size in sizes.items()
        )

    def _repeats(self, inner: Sequence[str], n_members: int) -> bool:
        """Whether most ops of a module are those of children of one kind, each run on the output of the one before.

        Parallel children, such as the branches of a block, are no stack: they are looked at together.
        """
        ops = self.program.ops
        kinds: dict[tuple[str, ...], list[tuple[tuple[int, ...], ...]]] = defaultdict(list)
        for child in inner:
            members = self.members(child)
            kinds[tuple(ops[group[0]].name for group in members)].append(members)
        # Children of one kind run the same ops in the same order; the kind with the most ops is the stack, if
        # there is one.
        same = max(kinds.values(), key=lambda group: sum(map(len, group)))
        share = sum(map(len, same)) / max(1, n_members)
        if len(same) < 2 or share < _MIN_SHARE:
            return False
        first, second = ({op for group in members for op in group} for members in same[:2])
        return self.program.depends(second, first)


def partition(program: Program, pins: Pins) -> tuple[list[OpGroup], frozenset[str]]:
    """Return the parts in the order of execution, and the modules that were split."""
    tree = _CallTree(program, pins)
    owned: set[int] = set()
    whole: list[OpGroup] = []  # modules
    rest: list[OpGroup] = []  # what modules that are split run themselves

    def visit(fqn: str) -> None:
        # A module that several parents share belongs to the one that is visited first.
        members = tuple(group for group in tree.members(fqn) if owned.isdisjoint(group))
        if not members:
            return
        once = len(program.calls[fqn]) == 1
        barred = tree.is_barred(fqn)
        if barred or tree.splits(fqn, len(members)):
            # Ops of leaves count as run by the module itself, unless pins force the split: then leaves may be
            # units where their parent may not.
            for child in tree.children[fqn]:
                if barred or not tree.is_leaf(child):
                    visit(child)
            members = tuple(group for group in members if owned.isdisjoint(group))
            rest.append(OpGroup(fqn, members, once, "" if once else None))
        elif once or not tree.called_once_around(fqn):
            # Not joined, since no unit can be around several of them: modules that are called several times, and
            # those that only the loss function calls in turn.
            alone = not once or (fqn in tree.roots and len(tree.roots) > 1)
            whole.append(OpGroup(fqn, members, once, None if alone else fqn.rpartition(".")[0]))
        else:  # a shared layer: each of its calls is a part
            for ops in tree.calls(fqn):
                ops = [op for op in ops if op not in owned]
                if ops:
                    whole.append(OpGroup(_unit_of(program, ops), tuple((op,) for op in ops), True, fqn))
        owned.update(op for group in members for op in group)

    for root in tree.roots:
        visit(root)
    parts = [window for part in _attached(program, whole, rest) for window in _windows(program, part)]
    # Only as many neighbours as needed; 1 leaves the parts unchanged.
    at_once = -(-len(parts) // MOST_PARTS)
    return join(program, parts, at_once), frozenset(part.unit for part in rest)


def _attached(program: Program, whole: list[OpGroup], rest: list[OpGroup]) -> list[OpGroup]:
    """Return the parts, with each op outside of them attached to the part before, or the first one, of its root module.

    Modules that run several times, and those in whose root nothing runs once, keep such ops as parts of their own.
    """
    whole = sorted(whole, key=lambda part: part.members[0][0])
    single = [part for part in whole if part.once]
    numbers: dict[str | None, list[int]] = defaultdict(list)  # by root, its single parts
    for i, part in enumerate(single):
        numbers[_root_of(program, part)].append(i)
    added: dict[int, list[int]] = defaultdict(list)
    unattached: list[OpGroup] = []
    for part in rest:
        if not part.members:
            continue
        near = numbers[_root_of(program, part)]
        # A part of a module that runs several times has members of several ops each, which cannot be taken
        # apart. Without a part nearby there is nothing to attach it to.
        if not (part.once and near):
            unattached.append(replace(part, once=False, family=None))
            continue
        starts = [single[i].members[0][0] for i in near]
        for (op,) in part.members:
            added[near[max(0, bisect_right(starts, op) - 1)]].append(op)
    parts = [part for part in whole if not part.once] + unattached
    for i, part in enumerate(single):
        # With ops of other modules the unit is wider: the smallest module around all of them.
        ops = sorted([*(op for (op,) in part.members), *added[i]])
        if added[i]:
            part = OpGroup(_unit_of(program, ops), tuple((op,) for op in ops), True, part.family)
        parts.append(part)
    return sorted(parts, key=lambda part: part.members[0][0])


def _root_of(program: Program, part: OpGroup) -> str | None:
    """Return the outermost module in which a part runs."""
    return program.outermost_module(program.ops[part.members[0][0]].scope)


def _unit_of(program: Program, ops: Iterable[int]) -> str:
    """Return the smallest module that is called once and runs all these ops."""
    return unit_around(program, {program.ops[op].scope for op in ops})


def unit_around(program: Program, scopes: Iterable[int], widest_unit: int = ROOT_SCOPE) -> str:
    """Return the smallest module that these calls are in (or are), that is called once and is no leaf.

    ``widest_unit`` and the outermost module end the search, whatever they are.
    """
    scope = program.common_scope(scopes)
    while True:
        fqn = program.scopes[scope].fqn
        parent = program.scopes[scope].parent
        if parent == ROOT_SCOPE or (fqn not in program.leaf_fqns and len(program.calls[fqn]) == 1):
            return fqn
        if scope == widest_unit:
            return fqn
        scope = parent


def _windows(program: Program, part: OpGroup) -> list[OpGroup]:
    """Return the part, cut into windows if it is too large.

    Of all positions that make a window large enough and not too large, it ends at the one that the fewest bytes cross:
    in a recurrence, the first one between two steps.
    """
    count = len(part.members)
    if count <= LARGEST_PART:
        return [part]
    crossing = _crossing_bytes(program, part)
    # The ends of the part are no cuts. Of positions in a row with equal bytes, only the first may be one: right after
    # the op that makes what crosses.
    crossing[[0, -1]] = crossing.max()
    crossing[1:][crossing[1:] == crossing[:-1]] = crossing.max()
    size = min(LARGEST_PART // 2, max(_SMALLEST_WINDOW, -(-count // _WINDOWS)))
    cuts = [0]
    while count - cuts[-1] > size:
        first = cuts[-1] + size
        cuts.append(first + int(crossing[first : cuts[-1] + LARGEST_PART + 1].argmin()))
    family = part.unit if part.family is None else part.family
    windows = [replace(part, members=part.members[a:b], family=family) for a, b in pairwise((*cuts, count))]
    if not part.once:
        return windows
    return [replace(w, unit=_unit_of(program, (op for (op,) in w.members))) for w in windows]


def _crossing_bytes(program: Program, part: OpGroup) -> npt.NDArray[np.int64]:
    """Return, for each position between members, the bytes that the part makes before it and reads after it.

    A storage with a reader farther away than a window can reach crosses some cut in any case, so it does not count.
    One pass notes where each storage begins and ceases to cross; a running sum does the rest.
    """
    made_at: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for at, group in enumerate(part.members):
        for op in map(program.ops.__getitem__, group):
            # Reads before writes: what an op reads and writes in place was made before the op.
            last_read.update((s, at) for s in op.reads if s in made_at)
            made_at.update((s, at) for s in op.writes if s not in made_at)
    change = np.zeros(len(part.members) + 1, dtype=np.int64)
    for s, at in last_read.items():
        # A storage crosses every position from right after its maker to right before its last reader.
        if made_at[s] < at <= made_at[s] + LARGEST_PART:
            change[made_at[s] + 1] += program.storage_bytes[s]
            change[at + 1] -= program.storage_bytes[s]
    return np.cumsum(change)


def most_joined(parts: Sequence[OpGroup]) -> int:
    """Return how many neighbours can be joined at most."""
    return max(map(len, _neighbours(parts, len(parts))), default=1)


def join(program: Program, parts: Sequence[OpGroup], size: int) -> list[OpGroup]:
    """Return the parts with ``size`` neighbours joined; fewer if they had more than ``LARGEST_JOINED`` call sites."""
    joined = [part for part in parts if part.family is None]
    joined += [_merged(program, group) for group in _neighbours(parts, size)]
    return sorted(joined, key=lambda part: part.members[0][0])


def _neighbours(parts: Sequence[OpGroup], size: int) -> list[list[OpGroup]]:
    """Return the neighbours that become one part, each group as long as it may be, from the first part on."""
    groups: list[list[OpGroup]] = []
    before: object = None
    n_ops = 0
    for part in parts:
        # A part that is not to be joined does not end a group either.
        if part.family is None:
            continue
        alike = (part.family, None if part.once else part.unit)
        n_ops += len(part.members)
        if alike != before or len(groups[-1]) == size or n_ops > LARGEST_JOINED:
            groups.append([])
            n_ops = len(part.members)
        groups[-1].append(part)
        before = alike
    return groups


def _merged(program: Program, group: Sequence[OpGroup]) -> OpGroup:
    if len(group) == 1:
        return group[0]
    members = tuple(sorted(member for part in group for member in part.members))
    first = group[0]
    if not first.once:
        return replace(first, members=members)
    return OpGroup(_unit_of(program, (op for (op,) in members)), members, True, first.family)
