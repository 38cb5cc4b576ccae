"""The forward pass in pieces: which ops are looked at together when it is chosen what runs again.

    pieces, split = pieces_of(recording, pins)
    join(recording, pieces, 2)  # pairs of neighbours as one

A piece is a module that repeats along the model (a layer) or is small enough to be looked at as a whole, together with
what the modules around it run after it (before the first one: before it). Every forward op that a module of the model
runs is in one piece. What can be chosen for a piece is in ``cells.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sacplan._plan.pins import Pins
from sacplan._trace.recording import ROOT_SCOPE, CallSite, Phase, Recording

LARGEST_PIECE = 400
"""Modules with more op call sites than this are split into their children."""

SMALL_PIECE = 150
"""Up to here, a module is looked at as a whole unless its own children repeat."""

LARGEST_JOINED = 800
"""Neighbours are not joined to pieces of more ops than this."""

_MIN_SHARE = 0.5  # of a module's ops that its repeated children must have for it to be split


@dataclass(frozen=True, slots=True)
class Piece:
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
    """The calls of a recording as a tree of modules."""

    def __init__(self, recording: Recording, pins: Pins) -> None:
        self.recording = recording
        self._pins = pins
        children: dict[str, dict[str, None]] = defaultdict(dict)
        for scope in recording.scopes:
            parent = recording.scopes[scope.parent].fqn if scope.parent != ROOT_SCOPE else None
            if parent is not None and parent != scope.fqn:
                children[parent][scope.fqn] = None
        self.children = {fqn: tuple(found) for fqn, found in children.items()}
        self.roots = tuple(dict.fromkeys(s.fqn for s in recording.scopes if s.parent == ROOT_SCOPE))

    def members(self, fqn: str) -> tuple[tuple[int, ...], ...]:
        """The forward ops of a module, one group for each call site."""
        ops = self.recording.ops
        groups: dict[CallSite, list[int]] = {}
        for scope in self.recording.calls.get(fqn, ()):
            for op, site in self.recording.sites(scope).items():
                if ops[op].phase == Phase.FORWARD:
                    groups.setdefault(site, []).append(op)
        return tuple(map(tuple, groups.values()))

    def calls(self, fqn: str) -> list[list[int]]:
        """The forward ops of each call of a module."""
        ops = self.recording.ops
        return [
            [op for op in self.recording.sites(scope) if ops[op].phase == Phase.FORWARD]
            for scope in self.recording.calls[fqn]
        ]

    def called_once_around(self, fqn: str) -> bool:
        """Whether all calls of a module are in one call of another, which may be a unit."""
        around = self.recording.common_scope(self.recording.calls[fqn])
        return around != ROOT_SCOPE and self._pins.may_be_discarded_in(around)

    def is_barred(self, fqn: str) -> bool:
        """Whether pins forbid it as a unit, but not all that is in it."""
        recording, pins = self.recording, self._pins
        if pins.may_be_a_unit(recording, fqn):
            return False
        inside = {scope for scope in range(len(recording.scopes)) if pins.region(scope) == scope}
        return any(call in recording.ancestors(scope) for call in recording.calls[fqn] for scope in inside)

    def is_leaf(self, fqn: str) -> bool:
        return fqn in self.recording.leaf_fqns or fqn not in self.children

    def splits(self, fqn: str, n_members: int) -> bool:
        """Whether a module is looked at in parts: it is large, or the same kind of child follows on itself.

        Or it is not small, and most of it is a child of which that is true.
        """
        inner = [child for child in self.children.get(fqn, ()) if not self.is_leaf(child)]
        if not inner:
            return False
        if n_members > LARGEST_PIECE or self._repeats(inner, n_members):
            return True
        if n_members <= SMALL_PIECE:
            return False
        sizes = {child: len(self.members(child)) for child in inner}
        return any(
            size >= _MIN_SHARE * n_members and self.splits(child, size) for child, size in sizes.items()
        )

    def _repeats(self, inner: Sequence[str], n_members: int) -> bool:
        ops = self.recording.ops
        kinds: dict[tuple[str, ...], list[tuple[tuple[int, ...], ...]]] = defaultdict(list)
        for child in inner:
            members = self.members(child)
            kinds[tuple(ops[group[0]].name for group in members)].append(members)
        same = max(kinds.values(), key=lambda group: sum(map(len, group)))
        share = sum(map(len, same)) / max(1, n_members)
        return len(same) > 1 and share >= _MIN_SHARE and self._follows(same[0], same[1])

    def _follows(self, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> bool:
        """Whether what the second reads depends on what the first made."""
        ops = self.recording.ops
        made = {s for group in first for op in group for s in ops[op].writes}
        wanted = {op for group in second for op in group}
        for op in range(min(group[0] for group in first), max(wanted) + 1):
            if made.intersection(ops[op].reads):
                if op in wanted:
                    return True
                made.update(ops[op].writes)
        return False


def pieces_of(recording: Recording, pins: Pins) -> tuple[list[Piece], frozenset[str]]:
    """Every forward op that a module runs, in one piece each, in the order of execution; and the split modules."""
    tree = _Tree(recording, pins)
    owned: set[int] = set()
    whole: list[Piece] = []  # modules
    rest: list[Piece] = []  # what modules that are split run themselves

    def visit(fqn: str) -> None:
        members = tuple(group for group in tree.members(fqn) if owned.isdisjoint(group))
        if not members:
            return
        once = len(recording.calls[fqn]) == 1
        barred = tree.is_barred(fqn)
        if barred or tree.splits(fqn, len(members)):
            for child in tree.children[fqn]:
                if barred or not tree.is_leaf(child):
                    visit(child)
            members = tuple(group for group in members if owned.isdisjoint(group))
            rest.append(Piece(fqn, members, once))
        elif once or not tree.called_once_around(fqn):
            whole.append(Piece(fqn, members, once, fqn.rpartition(".")[0]))
        else:  # a shared layer: each of its calls is a piece
            for ops in tree.calls(fqn):
                ops = [op for op in ops if op not in owned]
                if ops:
                    whole.append(Piece(_unit_of(recording, ops), tuple((op,) for op in ops), True, fqn))
        owned.update(op for group in members for op in group)

    for root in tree.roots:
        visit(root)
    return _attached(recording, whole, rest), frozenset(piece.unit for piece in rest)


def _attached(recording: Recording, whole: list[Piece], rest: list[Piece]) -> list[Piece]:
    """Ops outside of the pieces go to the piece before them, those before the first to the first."""
    whole = sorted(whole, key=lambda piece: piece.members[0][0])
    single = [piece for piece in whole if piece.once]
    starts = [piece.members[0][0] for piece in single]
    added: dict[int, list[int]] = defaultdict(list)
    left: list[Piece] = []
    for piece in rest:
        if not piece.members:
            continue
        if not (piece.once and single):
            for start in range(0, len(piece.members), LARGEST_PIECE):
                left.append(Piece(piece.unit, piece.members[start : start + LARGEST_PIECE], False))
            continue
        for (op,) in piece.members:
            added[max(0, bisect_right(starts, op) - 1)].append(op)
    found = [piece for piece in whole if not piece.once] + left
    for i, piece in enumerate(single):
        ops = sorted([*(op for (op,) in piece.members), *added[i]])
        if added[i]:
            piece = Piece(_unit_of(recording, ops), tuple((op,) for op in ops), True, piece.family)
        found.append(piece)
    return sorted(found, key=lambda piece: piece.members[0][0])


def _unit_of(recording: Recording, ops: Iterable[int]) -> str:
    """The smallest module that is called once and runs all these ops."""
    return unit_around(recording, {recording.ops[op].scope for op in ops})


def unit_around(recording: Recording, scopes: Iterable[int], region: int = ROOT_SCOPE) -> str:
    """The smallest module, no leaf and called once, that these module calls are in or are; at most ``region``."""
    scope = recording.common_scope(scopes)
    while True:
        fqn = recording.scopes[scope].fqn
        parent = recording.scopes[scope].parent
        if parent == ROOT_SCOPE or (fqn not in recording.leaf_fqns and len(recording.calls[fqn]) == 1):
            return fqn
        if scope == region:
            return fqn
        scope = parent


def runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Neighbours that can be joined."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        if piece.once:
            if not runs or runs[-1][-1].family != piece.family:
                runs.append([])
            runs[-1].append(piece)
    return runs


def join(recording: Recording, pieces: Sequence[Piece], size: int) -> list[Piece]:
    """Runs of ``size`` neighbours as one."""
    joined = [piece for piece in pieces if not piece.once]
    for run in runs(pieces):
        part: list[Piece] = []
        for piece in run:
            n_ops = sum(len(p.members) for p in part) + len(piece.members)
            if part and (len(part) == size or n_ops > LARGEST_JOINED):
                joined.append(_merged(recording, part))
                part = []
            part.append(piece)
        joined.append(_merged(recording, part))
    return sorted(joined, key=lambda piece: piece.members[0][0])


def _merged(recording: Recording, part: Sequence[Piece]) -> Piece:
    if len(part) == 1:
        return part[0]
    ops = sorted(op for piece in part for (op,) in piece.members)
    return Piece(_unit_of(recording, ops), tuple((op,) for op in ops), True, part[0].family)
