"""The storages that a unit's call saves: who holds them, and who wants to know when they are asked for.

A recorder that finds marks at an op (``RecordedUnit``) tells them, and they may take away what is held. The holders
then give back what a :class:`Stand` returns in the place of their tensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sacplan._executor.tensors import View


class Holder(Protocol):
    """Something that holds a tensor on a storage until the backward pass: a handle of autograd, or a recipe."""

    def let_go(self, version: int) -> bool:
        """Let go of the tensor unless it was written since: the version now, and when it was taken, must be this one.

        Return whether it did.
        """
        ...


class Stand(Protocol):
    """Something that has the contents of a storage in another place."""

    def take(self, view: View) -> torch.Tensor:
        """Return a view of the contents on the device."""
        ...


class SavedStorage:
    """A storage of which a unit's call has saved tensors. It lives as long as one of its holders, or the call.

    Attributes:
        storage: as long as it is alive.
        holders: who holds a tensor on it.
        stand: what has its contents, where something else has them.
        is_away: whether holders have let go of it.
        on_ask: what is called when autograd first asks for one of the tensors.
    """

    __slots__ = ("__weakref__", "_alive", "holders", "is_away", "on_ask", "stand", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = weakref.ref(storage)
        self.holders: list[weakref.ref[Any]] = []
        self._alive = 0
        self.stand: Stand | None = None
        self.is_away = False
        self.on_ask: list[Callable[[], None]] = []

    def add(self, holder: Holder) -> None:
        """Note that something holds a tensor on it."""
        self._alive += 1
        self.holders.append(weakref.ref(holder, functools.partial(_released, weakref.ref(self))))

    def asked(self) -> None:
        """Call those who wait for the first time that autograd asks for one of the tensors."""
        waiting, self.on_ask = self.on_ask, []
        for one in waiting:
            one()

    def let_go(self, version: int) -> None:
        """Have all holders let go of their tensors whose storage still has the contents of this version."""
        for ref in self.holders:
            holder: Holder | None = ref()
            if holder is not None and holder.let_go(version):
                self.is_away = True


def _released(ref: weakref.ref[SavedStorage], _: Any) -> None:
    """Free the copy with the last of the holders: the call, too, knows the storage, and may go on for long."""
    saved = ref()
    if saved is None:
        return  # it went with its holder
    saved._alive -= 1
    if not saved._alive:
        saved.stand = None


SavedOf = Callable[[torch.Tensor], SavedStorage]


class Mark(Protocol):
    """Something to do when an op of a unit has run."""

    def ran(self, tensors: Sequence[torch.Tensor], saved_of: SavedOf) -> None:
        """Act on an op.

        Args:
            tensors: those of its arguments, and behind these those of its outputs.
            saved_of: gives what the call has saved on the storage of a tensor.
        """
        ...
