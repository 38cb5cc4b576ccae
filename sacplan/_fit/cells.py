"""The forward pass in pieces that are chosen for independently, and what each of them can do.

A *cell* is a set of forward ops: a module that repeats along the model (a layer) or is small enough to look at
as a whole, together with what the modules around it run after it (before the first one: before it). Every op
that a module of the model runs is in one cell. A cell's options are sets of its ops that run again, exact
points of its closure problem (``closure.py``), so they say which tensors of which module are kept, alike or
different from cell to cell.

Several neighbours can be joined to one cell. Its options may also discard what passes from one to the next (a
residual stream) and run the whole piece again from its beginning: that is how a step gets down to its
smallest peak.

Cells that repeat give the same problem, which is solved once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sacplan._fit import closure
from sacplan._fit.tied import discardable, tied
from sacplan._plan.pins import NO_PINS, Pins
from sacplan._trace.recording import ROOT_SCOPE, CallSite, Event, Phase, Recording

LARGEST_CELL = 400
"""Modules with more op call sites than this are split into their children."""

SMALL_CELL = 150
"""Up to here, a module is looked at as a whole unless its own children repeat."""

LARGEST_JOINED = 800
"""Neighbours are not joined to cells of more ops than this."""

_VERTICES = 24  # of a cell's hull, at most
_EFFORT = 6000  # ops that all options of one kind of cell may have together, beyond the hull
_COLUMNS = 1500  # options of all cells together, about, beyond the hull
_BETWEEN = 8  # options between two vertices of a cell's hull, at most

_MIN_SHARE = 0.5  # of a module's ops that its repeated children must have for it to be split


@dataclass(frozen=True, slots=True)
class Option:
    """What a cell does: which of its members run again.

    Attributes:
        cost: of running them, in the unit of the objective (ms for time).
        kept_bytes: what is held from forward to backward on the cell's account.
        members: indices into ``Cell.members``.
    """

    cost: float
    kept_bytes: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Some forward ops and what can be chosen for them.

    Attributes:
        unit: fqn of the smallest module that runs them all.
        members: groups of op indices; a group is one call site in all calls of the unit, and is kept or
            discarded as one.
        kind: equal for cells whose problems are equal.
        options: by rising cost; the first keeps everything.
        units: by option, the modules that have to be units for it.
        wide: by option, whether one of these is around more than this cell's modules.
    """

    unit: str
    members: tuple[tuple[int, ...], ...]
    kind: int
    options: tuple[Option, ...]
    units: tuple[tuple[str, ...], ...]
    wide: tuple[bool, ...]

    def ops(self, option: Option) -> frozenset[int]:
        """The recorded ops that run again with an option."""
        return frozenset(op for member in option.members for op in self.members[member])

    def only(self, options: Sequence[int]) -> Cell:
        """The cell with some of its options."""
        return replace(
            self,
            options=tuple(self.options[o] for o in options),
            units=tuple(self.units[o] for o in options),
            wide=tuple(self.wide[o] for o in options),
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A cell before it has options.

    ``once``: its ops run in one call of its unit, so a neighbour of the same ``family`` may be joined.
    """

    unit: str
    members: tuple[tuple[int, ...], ...]
    once: bool
    family: str = ""


class Cells:
    """Cells of one recording under one objective; problems that repeat are solved once.

    Args:
        recording: the step.
        costs: what running each op again costs.
        early: storages that the backward pass has asked for by the time that most is alive: to discard these
            need not lower the peak, so options that keep them are offered as well.
        pins: what no option discards, and which modules no option makes a unit.

    Many cells make up for each other's gaps, so the options on and near the hull are enough. The fewer there
    are, the more options are offered that differ from these in one tensor.
    """

    def __init__(
        self,
        recording: Recording,
        costs: Sequence[float],
        early: frozenset[int] = frozenset(),
        pins: Pins = NO_PINS,
    ) -> None:
        self.recording = recording
        self._pins = pins
        self.costs = costs
        self._early = early
        self._kinds: dict[closure.ClosureProblem, int] = {}
        self._solved: dict[tuple[int, int], tuple[Option, ...]] = {}
        self._handles = _handles_by_op(recording)
        self._readers: dict[int, set[int]] = defaultdict(set)
        for i, op in enumerate(recording.ops):
            if op.phase == Phase.FORWARD:
                for s in op.reads:
                    self._readers[s].add(i)
        self._packed: dict[int, set[int]] = defaultdict(set)
        for storage, scope in zip(recording.handle_storages, recording.handle_scopes, strict=True):
            self._packed[storage].add(scope)
        self._kept = pins.kept_ops | self._across_regions()
        self._pieces, self._split = _pieces(recording, pins)

    @property
    def longest_run(self) -> int:
        """How many cells can be joined at most."""
        return max((len(run) for run in _runs(self._pieces)), default=1)

    def joined(self, size: int) -> tuple[Cell, ...]:
        """The cells, with up to ``size`` neighbours made into one; 1 leaves them as they are."""
        pieces = _join(self.recording, self._pieces, size)
        more = _COLUMNS // max(1, len(pieces))
        cells = []
        for piece in pieces:
            piece = replace(piece, members=tied(self.recording, piece.members))
            problem, late = self._problem(piece)
            kind = self._kinds.setdefault(problem, len(self._kinds))
            if (kind, more) not in self._solved:
                self._solved[kind, more] = _options(problem, late, more)
            options = self._solved[kind, more]
            units = tuple(self._units(piece, option) for option in options)
            wide = tuple(not self._split.isdisjoint(found) for found in units)
            cells.append(Cell(piece.unit, piece.members, kind, options, units, wide))
        return tuple(cells)

    def _units(self, piece: _Piece, option: Option) -> tuple[str, ...]:
        """The smallest modules, not leaves, that run what hangs together in an option, and all that saves it."""
        if not option.members:
            return ()
        if not piece.once or (piece.unit not in self._split and len(self.recording.calls[piece.unit]) == 1):
            return (piece.unit,)
        recording = self.recording
        gone = sorted(op for member in option.members for op in piece.members[member])
        found: dict[str, None] = {}
        for group in _hanging_together(recording, gone):
            ops = [recording.ops[op] for op in group]
            scopes = {op.scope for op in ops}.union(*(self._packed[s] for op in ops for s in op.writes))
            # What may be discarded is read and saved in its own region alone, so the group does not leave it.
            region = self._pins.region(next(iter(scopes)))
            found[_unit_around(recording, scopes, region)] = None
        return tuple(found)

    def _across_regions(self) -> set[int]:
        """Ops whose outputs are saved, or read by what may run again, where no unit can be around both."""
        recording, pins = self.recording, self._pins
        found: set[int] = set()
        if pins.regions is None:
            return found
        for s, op in recording.writer.items():
            if recording.ops[op].phase != Phase.FORWARD or op in pins.kept_ops:
                continue
            users = {recording.ops[i].scope for i in self._readers.get(s, ()) if i not in pins.kept_ops}
            users.update(self._packed.get(s, ()))
            region = pins.region(recording.ops[op].scope)
            if any(pins.region(scope) != region for scope in users):
                found.add(op)
        return found

    def _may_be_discarded(self, piece: _Piece, group: tuple[int, ...]) -> bool:
        """Whether ops of a piece may be discarded together, as far as they themselves and the pins are concerned."""
        recording, pins = self.recording, self._pins
        if not self._kept.isdisjoint(group) or not discardable(recording, group):
            return False
        if pins.regions is None:
            return True
        if not piece.once:
            return pins.may_be_a_unit(recording, piece.unit)
        # A unit that is called several times does the same in each of its calls; a piece says what one call does.
        regions = {pins.region(recording.ops[i].scope) for i in group}
        return len(regions) == 1 and all(len(recording.calls[recording.scopes[r].fqn]) == 1 for r in regions)

    def _problem(self, piece: _Piece) -> tuple[closure.ClosureProblem, closure.ClosureProblem | None]:
        """The problem of a piece, and where it makes a difference the one in which early storages cost nothing."""
        recording, ops = self.recording, self.recording.ops
        members = piece.members
        inside = {op for group in members for op in group}
        local: dict[int, int] = {}

        def index(storage: int) -> int:
            return local.setdefault(storage, len(local))

        def leaves(storage: int) -> bool:
            """Whether another cell reads it: its recipes would hold what this one thinks is gone."""
            return not self._readers.get(storage, inside) <= inside

        closure_ops = tuple(
            closure.ClosureOp(
                cost_ms=sum(self.costs[i] for i in group),
                reads=tuple(dict.fromkeys(index(s) for i in group for s in ops[i].reads)),
                writes=tuple(index(s) for i in group for s in ops[i].writes),
                discardable=self._may_be_discarded(piece, group)
                and not any(leaves(s) for i in group for s in ops[i].writes),
            )
            for group in members
        )
        saved: set[int] = set()
        free = recording.outlives_forward
        taken_elsewhere: set[int] = set()
        for storage in local:
            for op in self._handles.get(storage, ()):
                (saved if op in inside else taken_elsewhere).add(storage)
        problem = closure.ClosureProblem(
            ops=closure_ops,
            storage_bytes=tuple(recording.storage_bytes[s] for s in local),
            saved=frozenset(local[s] for s in saved),
            free=frozenset(at for s, at in local.items() if s in free or s in taken_elsewhere),
        )
        early = problem.free.union(local[s] for s in saved & self._early)
        return problem, replace(problem, free=early) if early != problem.free else None


def _options(
    problem: closure.ClosureProblem, late: closure.ClosureProblem | None, more: int
) -> tuple[Option, ...]:
    """What a cell can do: the hull and points near it, and up to ``more`` that differ from these in one tensor."""
    if not problem.saved:
        return (Option(0.0, 0, ()),)
    points = list(closure.tradeoff(problem, _VERTICES, _BETWEEN))
    if late is not None:
        points += [
            closure.evaluate(problem, p.discarded) for p in closure.tradeoff(late, _VERTICES, _BETWEEN)
        ]
    distinct = tuple({point.discarded: point for point in points}.values())
    most = len(distinct) + min(more, max(0, _EFFORT // len(problem.ops) - len(distinct)))
    points = list(closure.with_neighbours(problem, distinct, most))
    return tuple(Option(p.recompute_ms, p.kept_bytes, tuple(sorted(p.discarded))) for p in points)


# --- which ops belong together -----------------------------------------------------------------------------


def _handles_by_op(recording: Recording) -> dict[int, list[int]]:
    """Storage to the ops for whose backward autograd keeps it.

    A pack event lies beside the op that it belongs to: before it for an input, after it for an output. The
    module call tells the two apart at a module's edge, where alone it matters.
    """
    found: dict[int, list[int]] = defaultdict(list)
    ops, scopes = recording.ops, recording.handle_scopes
    last = -1
    for code, arg in recording.events:
        if code == Event.OP:
            last = arg
        elif code == Event.PACK:
            after = last + 1 if last + 1 < len(ops) else last
            here = last if last >= 0 and ops[last].scope == scopes[arg] else after
            found[recording.handle_storages[arg]].append(here)
    return found


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
        if n_members > LARGEST_CELL or self._repeats(inner, n_members):
            return True
        if n_members <= SMALL_CELL:
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


def _pieces(recording: Recording, pins: Pins) -> tuple[list[_Piece], frozenset[str]]:
    """Every forward op that a module runs, in one piece each, in the order of execution; and the split modules."""
    tree = _Tree(recording, pins)
    owned: set[int] = set()
    whole: list[_Piece] = []  # modules
    rest: list[_Piece] = []  # what modules that are split run themselves

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
            rest.append(_Piece(fqn, members, once))
        elif once or not tree.called_once_around(fqn):
            whole.append(_Piece(fqn, members, once, fqn.rpartition(".")[0]))
        else:  # a shared layer: each of its calls is a cell
            for ops in tree.calls(fqn):
                ops = [op for op in ops if op not in owned]
                if ops:
                    whole.append(_Piece(_unit_of(recording, ops), tuple((op,) for op in ops), True, fqn))
        owned.update(op for group in members for op in group)

    for root in tree.roots:
        visit(root)
    return _attached(recording, whole, rest), frozenset(piece.unit for piece in rest)


def _attached(recording: Recording, whole: list[_Piece], rest: list[_Piece]) -> list[_Piece]:
    """Ops outside of the pieces go to the piece before them, those before the first to the first."""
    whole = sorted(whole, key=lambda piece: piece.members[0][0])
    single = [piece for piece in whole if piece.once]
    starts = [piece.members[0][0] for piece in single]
    added: dict[int, list[int]] = defaultdict(list)
    left: list[_Piece] = []
    for piece in rest:
        if not piece.members:
            continue
        if not (piece.once and single):
            for start in range(0, len(piece.members), LARGEST_CELL):
                left.append(_Piece(piece.unit, piece.members[start : start + LARGEST_CELL], False))
            continue
        for (op,) in piece.members:
            added[max(0, bisect_right(starts, op) - 1)].append(op)
    found = [piece for piece in whole if not piece.once] + left
    for i, piece in enumerate(single):
        ops = sorted([*(op for (op,) in piece.members), *added[i]])
        if added[i]:
            piece = _Piece(_unit_of(recording, ops), tuple((op,) for op in ops), True, piece.family)
        found.append(piece)
    return sorted(found, key=lambda piece: piece.members[0][0])


def _hanging_together(recording: Recording, ops: Sequence[int]) -> list[list[int]]:
    """Groups of ops of which one reads, directly or not, what another made."""
    maker = {s: op for op in ops for s in recording.ops[op].writes}
    leader = {op: op for op in ops}

    def find(op: int) -> int:
        while leader[op] != op:
            leader[op] = op = leader[leader[op]]
        return op

    for op in ops:
        for s in recording.ops[op].reads:
            if s in maker:
                leader[find(op)] = find(maker[s])
    groups: dict[int, list[int]] = defaultdict(list)
    for op in ops:
        groups[find(op)].append(op)
    return list(groups.values())


def _unit_of(recording: Recording, ops: Iterable[int]) -> str:
    """The smallest module that is called once and runs all these ops."""
    return _unit_around(recording, {recording.ops[op].scope for op in ops})


def _unit_around(recording: Recording, scopes: Iterable[int], region: int = ROOT_SCOPE) -> str:
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


def _runs(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Neighbours that can be joined."""
    runs: list[list[_Piece]] = []
    for piece in pieces:
        if piece.once:
            if not runs or runs[-1][-1].family != piece.family:
                runs.append([])
            runs[-1].append(piece)
    return runs


def _join(recording: Recording, pieces: Sequence[_Piece], size: int) -> list[_Piece]:
    """Runs of ``size`` neighbours as one."""
    joined = [piece for piece in pieces if not piece.once]
    for run in _runs(pieces):
        part: list[_Piece] = []
        for piece in run:
            n_ops = sum(len(p.members) for p in part) + len(piece.members)
            if part and (len(part) == size or n_ops > LARGEST_JOINED):
                joined.append(_merged(recording, part))
                part = []
            part.append(piece)
        joined.append(_merged(recording, part))
    return sorted(joined, key=lambda piece: piece.members[0][0])


def _merged(recording: Recording, part: Sequence[_Piece]) -> _Piece:
    if len(part) == 1:
        return part[0]
    ops = sorted(op for piece in part for (op,) in piece.members)
    return _Piece(_unit_of(recording, ops), tuple((op,) for op in ops), True, part[0].family)
