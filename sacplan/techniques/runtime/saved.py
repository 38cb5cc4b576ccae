"""The storages that a unit's call saves: who holds them, and who wants to know when they are asked for.

A recorder tells the marks of an op (``RecordedUnit``) when it has run, and a mark may take away what is held. Holders
then return what a :class:`Stand` has in place of their tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from sacplan.techniques.runtime.tensors import View
from sacplan.torch_compat.private import storage_key


class Holder(Protocol):
    """Something that holds a tensor on a storage until the backward pass: a handle of autograd, or a recipe."""

    def let_go(self, version: int) -> bool:
        """Let go of the tensor if its version, now and when it was saved, is ``version``; return whether that is so."""
        ...


class Stand(Protocol):
    """Something that has the contents of a storage in another place."""

    def take(self, view: View) -> torch.Tensor:
        """Return a view of the contents on the device."""
        ...


class SavedStorage:
    """A storage of which a unit's call has saved tensors. It lives as long as one of its holders.

    Args:
        storage: the storage itself.
        awaited: the saved storages of the call that have no holder yet; this one is in the set until it has one.
        for_others: whether hooks around the unit hold what autograd saves, so that nothing can be taken away.

    Attributes:
        storage: the storage, as long as it is alive.
        holders: who holds a tensor on it.
        stand: what has its contents in another place; None if nothing has.
        is_away: whether any holder has let go of its tensor.
        on_ask: what is called when autograd first asks for one of the tensors.
    """

    def __init__(self, storage: Any, awaited: set[SavedStorage], for_others: bool = False) -> None:
        self.storage = weakref.ref(storage)
        self.for_others = for_others
        # Keeps this object alive until it has a holder.
        self._awaited = awaited
        awaited.add(self)
        self.holders: list[weakref.ref[Any]] = []
        self.stand: Stand | None = None
        self.is_away = False
        self.on_ask: list[Callable[[], None]] = []

    def add(self, holder: Holder) -> None:
        """Note that something holds a tensor on it."""
        self.holders.append(weakref.ref(holder))
        self._awaited.discard(self)

    def asked(self) -> None:
        """Call those who wait for the first time that autograd asks for one of the tensors."""
        # Emptied first, since what is called may ask for the tensor itself.
        waiting, self.on_ask = self.on_ask, []
        for callback in waiting:
            callback()

    def let_go(self, version: int) -> None:
        """Have all holders let go of their tensors whose storage still has the contents of this version."""
        # A holder that is gone has nothing to let go of, and one that saw another version keeps its own contents.
        for ref in self.holders:
            holder: Holder | None = ref()
            if holder is not None and holder.let_go(version):
                self.is_away = True
        self.holders = []


class SavedStorages:
    """The storages of which a call has saved tensors.

    An op may have a mark before autograd saves its tensor, so what nobody holds yet is kept alive here. From its first
    holder on it lives with its holders alone: code may drop part of a graph in the middle of a forward pass, and what
    stands for its tensors has to go with it.

    Attributes:
        for_others: see ``SavedStorage``.
    """

    def __init__(self) -> None:
        self.for_others = False
        self._known: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._awaited: set[SavedStorage] = set()

    def of(self, tensor: torch.Tensor) -> SavedStorage:
        """Return what the call has saved on the storage of a tensor."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        found = self._known.get(key)
        if found is None or found.storage() is not storage:  # else the address was reused
            found = self._known[key] = SavedStorage(storage, self._awaited, self.for_others)
        return found

    def end(self) -> None:
        """End the call: let go of what nobody has come to hold."""
        self._awaited.clear()


SavedOf = Callable[[torch.Tensor], SavedStorage]


class Mark(Protocol):
    """Something to do when an op of a unit has run."""

    def ran(self, tensors: Sequence[torch.Tensor], saved_of: SavedOf) -> None:
        """Act on an op that has just run.

        Args:
            tensors: those among the op's arguments, then those among its outputs.
            saved_of: gives what the call has saved on the storage of a tensor.
        """
        ...
