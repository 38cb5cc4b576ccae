"""Which redistributed copies are kept for a next use: the last one on each axis of the mesh.

So query, key and value projections share one gathered input. The planner follows the same rule with tensors of the
program as the executor does with real ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

CopyT = TypeVar("CopyT")


class Copies(Generic[CopyT]):
    """Copies by what they were made of: each stays until another redistribution on one of its axes."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[frozenset[int], CopyT]] = {}

    def find(self, key: Hashable) -> CopyT | None:
        """The copy, if it is still there."""
        found = self._kept.get(key)
        return None if found is None else found[1]

    def make_room(self, axes: Sequence[int]) -> list[CopyT]:
        """Before a redistribution on these axes: forget, and return, the copies on any of them."""
        gone = [key for key, (own, _) in self._kept.items() if not own.isdisjoint(axes)]
        return [self._kept.pop(key)[1] for key in gone]

    def keep(self, key: Hashable, axes: Sequence[int], copy: CopyT) -> None:
        """After it: this is the copy."""
        self._kept[key] = frozenset(axes), copy

    def clear(self) -> list[CopyT]:
        """Forget all, and return them: the forward or the backward pass is over."""
        copies = [copy for _, copy in self._kept.values()]
        self._kept.clear()
        return copies
