"""``sac_milp``'s problem: subtrees of the module tree become choices, and what they discard lowers rows.

Units form an antichain, so a small subtree has few sensible ways to choose among its own units: those are its options,
and equal subtrees (repeated layers) are choices of one kind. A module around too many ways (the model, an encoder) is
a choice of its own beside the subtrees in it. That it is not taken together with any of those is a row of another
resource.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sacplan._classical.tree import Tree, TreePlan, Unit
from sacplan._solve.problem import DEVICE_MEMORY, Choice, Picks, Problem, Row

_NESTING = "nesting"
_MOST_OPTIONS = 300  # of a subtree
_MOST_COMBINED = 6000  # ways of two subtrees together


@dataclass(frozen=True, slots=True)
class _Way:
    """An antichain of a subtree: unit, as a place in the subtree, to its option.

    Attributes:
        ms: what it recomputes.
        taken: pairs (unit, option).
        freed: by the time that the first so many units of the subtree have ended.
    """

    ms: float
    taken: tuple[tuple[int, int], ...]
    freed: npt.NDArray[np.int64]

    def __add__(self, other: _Way) -> _Way:
        return _Way(self.ms + other.ms, self.taken + other.taken, self.freed + other.freed)


@dataclass(frozen=True, slots=True, eq=False)
class TreeProblem:
    """What a solver sees, and what its options stand for.

    Attributes:
        problem: device memory by row of the tree, and nesting.
        ways: by choice and option, pairs (unit, option of the unit).
    """

    tree: Tree
    problem: Problem
    ways: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]

    def plan(self, picks: Picks) -> TreePlan:
        """What the units do."""
        return {
            unit: self.tree.units[unit].options[option]
            for choice, way in picks.items()
            for unit, option in self.ways[choice][way]
        }


def tree_problem(tree: Tree, budget_bytes: int, *, largest_only: bool = False) -> TreeProblem:
    """The problem of a tree; ``largest_only`` offers each unit's largest discard alone."""
    units = tree.units
    options_of = [range(len(u.options) - 1 if largest_only else 0, len(u.options)) for u in units]
    children: dict[int, list[int]] = defaultdict(list)
    for i, unit in enumerate(units):
        children[unit.above[0] if unit.above else -1].append(i)
    known: dict[Hashable, tuple[int, list[_Way] | None]] = {}
    subtrees: list[tuple[list[int], Hashable, list[_Way]]] = []  # its units, kind, ways
    around: dict[int, list[int]] = {}  # a unit that is a choice of its own, to the choices inside of it

    def members(unit: int) -> list[int]:
        return sorted([unit, *(m for child in children[unit] for m in members(child))])

    def visit(unit: int) -> list[int]:
        """Adds the choices of a subtree, and says which they are."""
        inside = members(unit)
        key = tuple((units[i].options, *_parent(units[i], inside)) for i in inside)
        if key not in known:
            place = {i: k for k, i in enumerate(inside)}
            known[key] = len(known), _ways(units, options_of, children, place, unit)
        kind, ways = known[key]
        if ways is not None:
            subtrees.append((inside, kind, ways))
            return [len(subtrees) - 1]
        own = len(subtrees)
        alone = [_nothing(1), *_own(units[unit], options_of[unit], 0, 1)]
        subtrees.append(([unit], ("alone", unit), alone))
        around[own] = [choice for child in children[unit] for choice in visit(child)]
        return [own, *around[own]]

    for root in children[-1]:
        visit(root)

    choices, names = [], []
    for c, (inside, kind, ways) in enumerate(subtrees):
        by_then = np.searchsorted(inside, tree.n_units)
        freed = np.array([way.freed for way in ways])
        nesting = np.zeros((len(ways), len(around)), dtype=np.int64)
        for row, (own, below) in enumerate(around.items()):
            nesting[1:, row] = len(below) if c == own else c in below
        uses = np.hstack([-freed[:, by_then], nesting])
        choices.append(Choice(kind, np.array([way.ms for way in ways]), uses, -freed[:, -1]))
        names.append(tuple(tuple((inside[k], option) for k, option in way.taken) for way in ways))
    ends = [*tree.n_units[1:].tolist(), len(units) + 1]
    rows = [Row(DEVICE_MEMORY, start, end) for start, end in zip(tree.n_units.tolist(), ends, strict=True)]
    rows += [Row(_NESTING, 0, len(units)) for _ in around]
    base = np.concatenate([tree.base, np.zeros(len(around), dtype=np.int64)])
    limits = [budget_bytes] * len(tree.base) + [len(below) for below in around.values()]
    problem = Problem(tuple(rows), base, np.array(limits, dtype=np.int64), tuple(choices))
    return TreeProblem(tree, problem, tuple(names))


def _parent(unit: Unit, inside: Sequence[int]) -> tuple[int, ...]:
    """Its parent's place among the units of a subtree; nothing for the top."""
    return tuple(inside.index(above) for above in unit.above[:1] if above in inside)


def _nothing(size: int) -> _Way:
    return _Way(0.0, (), np.zeros(size + 1, dtype=np.int64))


def _own(unit: Unit, options: Sequence[int], place: int, size: int) -> list[_Way]:
    """The ways to take one unit of a subtree."""
    ended = np.arange(size + 1) > place
    return [
        _Way(unit.options[o].ms, ((place, o),), np.where(ended, unit.options[o].freed, 0)) for o in options
    ]


def _ways(
    units: Sequence[Unit],
    options_of: Sequence[Sequence[int]],
    children: dict[int, list[int]],
    place: dict[int, int],
    top: int,
) -> list[_Way] | None:
    """The undominated antichains of a subtree; the first takes no unit. None if there are too many."""

    def at(unit: int) -> list[_Way] | None:
        combined = [_nothing(len(place))]
        for child in children[unit]:
            inner = at(child)
            if inner is None or len(inner) * len(combined) > _MOST_COMBINED:
                return None
            combined = _pruned([a + b for a in combined for b in inner])
        combined = _pruned([*combined, *_own(units[unit], options_of[unit], place[unit], len(place))])
        return combined if len(combined) <= _MOST_OPTIONS else None

    found = at(top)
    return None if found is None else [_nothing(len(place)), *(way for way in found if way.taken)]


def _pruned(ways: list[_Way]) -> list[_Way]:
    """Without those that another way undercuts in time and in bytes at every moment; by rising time."""
    freed = np.array([way.freed for way in ways])
    keep: list[int] = []
    for i in sorted(range(len(ways)), key=lambda i: (ways[i].ms, -int(freed[i].sum()), i)):
        if not keep or not (freed[keep] >= freed[i]).all(axis=1).any():
            keep.append(i)
    return [ways[i] for i in keep]
