"""``sac_milp`` with choices "reachable": subtrees of the module tree become the choices of a ``Problem``.

Units never nest: a plan is an antichain of the module tree. A small subtree has few antichains that no other one
dominates, so these are the options of one choice, and equal subtrees (repeated layers) are choices of one kind. They
are enumerated bottom-up: the antichains of a module are the combinations of those of its children, and the module
itself. Dropping dominated ones loses no optimum: another is as cheap and frees as much at every moment.

A module around too many ways (the model, an encoder) is a choice of its own, next to the choices of the subtrees in it.
To keep these from nesting there are rows of a resource "nesting". For n subtrees of one kind under the same modules,
each uses 1, a module around them uses n, and the limit is n. So either the subtrees are taken, or one of the modules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sacplan.classic.tree import Discard, TreePlan, Unit, UnitTree
from sacplan.solvers.problem import DEVICE_MEMORY, Choice, Picks, Problem, ResourceRow

# A tree has up to exponentially many antichains. Beyond these limits they are not enumerated, and the module becomes a
# choice of its own.
_LARGEST = 12  # units of a subtree
_MOST_OPTIONS = 300  # of a subtree
_MOST_COMBINED = 6000  # ways of two subtrees together


@dataclass(frozen=True, slots=True)
class _Way:
    """An antichain of a subtree, with an option for each of its units.

    Attributes:
        ms: its recompute time.
        taken: pairs (place of the unit in the subtree, option).
        freed: at n, the bytes freed once the first n units of the subtree have ended.
    """

    ms: float
    taken: tuple[tuple[int, int], ...]
    freed: npt.NDArray[np.int64]

    def __add__(self, other: _Way) -> _Way:
        return _Way(self.ms + other.ms, self.taken + other.taken, self.freed + other.freed)


@dataclass(frozen=True, slots=True)
class _Subtree:
    """A choice: some units, the ways to take them, and the units around them, which are choices of their own."""

    kind: Hashable
    units: Sequence[int]
    ways: Sequence[_Way]
    around: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TreeProblem:
    """The problem of a tree, and the units that its options stand for.

    Attributes:
        problem: device memory by row of the tree, and nesting.
        subtrees: by choice, the one that it stands for; its options are the subtree's ways.
    """

    tree: UnitTree
    problem: Problem
    subtrees: Sequence[_Subtree]

    def plan(self, picks: Picks) -> TreePlan:
        """Return the discards of the units for a solver's picks."""
        plan: dict[int, Discard] = {}
        for choice, way in picks.items():
            subtree = self.subtrees[choice]
            for place, option in subtree.ways[way].taken:
                unit = subtree.units[place]
                plan[unit] = self.tree.units[unit].options[option]
        return plan


def tree_problem(tree: UnitTree, budget_bytes: int) -> TreeProblem:
    """Return the problem of finding the cheapest plan for a tree under a budget."""
    subtrees = _subtrees(tree)
    nesting, sizes = _nesting(subtrees)
    # Rows of memory come first, then those of nesting.
    base = np.concatenate([tree.base, np.zeros_like(sizes)])
    limits = np.concatenate([np.full_like(tree.base, budget_bytes), sizes])
    choices = []
    for subtree, nests in zip(subtrees, nesting, strict=True):
        freed = np.array([way.freed for way in subtree.ways])
        # ``searchsorted``: by row, how many units of the subtree have ended, and so how much is freed.
        uses = np.zeros((len(subtree.ways), len(base)), dtype=np.int64)
        uses[:, : len(tree.base)] = -freed[:, np.searchsorted(subtree.units, tree.n_units)]
        # From option 1 on: option 0 takes no unit, and what is not taken cannot nest.
        uses[1:, len(tree.base) :] = nests
        choices.append(Choice(subtree.kind, np.array([way.ms for way in subtree.ways]), uses, -freed[:, -1]))
    # A row holds from the number of ended units that it stands for up to that of the next row.
    ends = [*tree.n_units[1:].tolist(), len(tree.units) + 1]
    rows = [ResourceRow(DEVICE_MEMORY, *units) for units in zip(tree.n_units.tolist(), ends, strict=True)]
    rows += [ResourceRow("nesting", 0, len(tree.units))] * len(sizes)
    return TreeProblem(tree, Problem(tuple(rows), base, limits, tuple(choices)), subtrees)


def _nesting(subtrees: Sequence[_Subtree]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return what each subtree uses of the rows of nesting, and their limits: see the module's docstring."""
    choice_of = {unit: c for c, subtree in enumerate(subtrees) for unit in subtree.units}
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for c, subtree in enumerate(subtrees):
        # A subtree without a module around it needs no row: nothing can nest with it.
        if subtree.around:
            groups[subtree.kind].append(c)
    uses = np.zeros((len(subtrees), len(groups)), dtype=np.int64)
    for row, group in enumerate(groups.values()):
        uses[group, row] = 1
        uses[[choice_of[unit] for unit in subtrees[group[0]].around], row] = len(group)
    return uses, np.array([len(group) for group in groups.values()], dtype=np.int64)


def _subtrees(tree: UnitTree) -> list[_Subtree]:
    """Return the largest subtrees whose ways can be enumerated, and each unit above them as a choice of its own."""
    units = tree.units
    children: dict[int, list[int]] = defaultdict(list)
    for i, unit in enumerate(units):
        children[unit.above[0] if unit.above else -1].append(i)
    known: dict[Hashable, tuple[int, list[_Way] | None]] = {}
    subtrees: list[_Subtree] = []

    def members(unit: int) -> list[int]:
        return sorted([unit, *(m for child in children[unit] for m in members(child))])

    def visit(unit: int, around: tuple[int, ...]) -> None:
        inside = members(unit)
        # Subtrees of one shape have the same ways, which are enumerated once.
        shape = tuple((units[i].options, *_parent(units[i], inside)) for i in inside)
        if shape not in known:
            place = {i: k for k, i in enumerate(inside)}
            small = len(inside) <= _LARGEST
            known[shape] = len(known), _ways(units, children, place, unit) if small else None
        number, ways = known[shape]
        if ways is not None:
            subtrees.append(_Subtree((number, around), inside, ways, around))
            return
        # Too large, or too many ways: the module is a choice of its own, and so is each subtree in it.
        subtrees.append(_Subtree((unit,), [unit], [_nothing(1), *_own(units[unit], 0, 1)], around))
        for child in children[unit]:
            visit(child, (*around, unit))

    for root in children[-1]:
        visit(root, ())
    return subtrees


def _parent(unit: Unit, inside: Sequence[int]) -> tuple[int, ...]:
    """Return the place of a unit's parent among the units of a subtree; nothing for the top."""
    return tuple(inside.index(above) for above in unit.above[:1] if above in inside)


def _nothing(size: int) -> _Way:
    return _Way(0.0, (), np.zeros(size + 1, dtype=np.int64))


def _own(unit: Unit, place: int, size: int) -> list[_Way]:
    """Return the ways to take one unit of a subtree."""
    # What a unit discards is free from the end of its forward on.
    ended = np.arange(size + 1) > place
    return [
        _Way(option.ms, ((place, o),), np.where(ended, option.freed, 0))
        for o, option in enumerate(unit.options)
    ]


def _ways(
    units: Sequence[Unit],
    children: dict[int, list[int]],
    place: dict[int, int],
    top: int,
) -> list[_Way] | None:
    """Return the undominated antichains of a subtree; the first takes no unit. None if there are too many."""

    def at(unit: int) -> list[_Way] | None:
        combined: list[_Way] | None = [_nothing(len(place))]
        for child in children[unit]:
            inner = at(child)
            # Too many to combine: the module becomes a choice of its own, and its children are visited one by
            # one.
            if combined is None or inner is None or len(inner) * len(combined) > _MOST_COMBINED:
                return None
            combined = _undominated([a + b for a in combined for b in inner])
        if combined is None:
            return None
        # Either ways of the children together, or the module itself: an antichain has not both.
        return _undominated([*combined, *_own(units[unit], place[unit], len(place))])

    ways = at(top)
    return None if ways is None else [_nothing(len(place)), *(way for way in ways if way.taken)]


def _undominated(ways: list[_Way]) -> list[_Way] | None:
    """Return the ways that no other one dominates in time and in bytes at every moment, by rising time.

    None if they are too many. Sorted by time, a way can be dominated only by one before it. Quadratic in the ways.
    """
    freed = np.array([way.freed for way in ways])
    keep: list[int] = []
    for i in sorted(range(len(ways)), key=lambda i: (ways[i].ms, -int(freed[i].sum()), i)):
        if not keep or not (freed[keep] >= freed[i]).all(axis=1).any():
            keep.append(i)
            if len(keep) > _MOST_OPTIONS:
                return None
    return [ways[i] for i in keep]
