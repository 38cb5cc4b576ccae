"""Redistributed copies that are kept for their next use: the last one on each axis of the mesh.

So query, key and value projections share one gathered input, and memory holds at most one copy for each axis. The
planner keeps copies of the program's tensors by this rule, and the executor copies of real ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

CopyT = TypeVar("CopyT")


class Copies(Generic[CopyT]):
    """Copies by their source. Each stays until another redistribution on one of its axes."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[frozenset[int], CopyT]] = {}

    def find(self, key: Hashable) -> CopyT | None:
        """Return the copy, if it is still kept."""
        found = self._kept.get(key)
        return None if found is None else found[1]

    def make_room(self, axes: Sequence[int]) -> list[CopyT]:
        """Forget and return the copies on any of these axes, before a redistribution on them."""
        gone = [key for key, (own, _) in self._kept.items() if not own.isdisjoint(axes)]
        return [self._kept.pop(key)[1] for key in gone]

    def keep(self, key: Hashable, axes: Sequence[int], copy: CopyT) -> None:
        """Keep the copy that a redistribution on these axes has made."""
        self._kept[key] = frozenset(axes), copy

    def clear(self) -> list[CopyT]:
        """Forget and return all copies, when the forward or the backward pass is over."""
        copies = [copy for _, copy in self._kept.values()]
        self._kept.clear()
        return copies
