"""Marks at ops of a unit: a copy out begins, computation waits for one, or a copy back is ordered."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sacplan.errors import SacplanWarning
from sacplan.techniques.offload.executor.parcels import Parcel
from sacplan.techniques.runtime.saved import SavedOf, SavedStorage
from sacplan.torch_compat.private import is_plain


class Board:
    """The storages that have been sent in the forward pass that runs, by the number of their decision."""

    def __init__(self) -> None:
        self._sent: dict[int, weakref.ref[SavedStorage]] = {}
        self._told_of_hooks = False

    def __reduce__(self) -> Any:
        return Board, ()  # a copy of the model begins with an empty board

    def enter(self, number: int, saved: SavedStorage) -> None:
        """Note that a storage has been sent."""
        self._sent[number] = weakref.ref(saved)

    def look_up(self, number: int) -> SavedStorage | None:
        """Return the storage that was sent last for a decision; None if nobody holds it any more."""
        ref = self._sent.get(number)
        return None if ref is None else ref()

    def note_hooks(self, unit: str) -> None:
        """Warn once (``SacplanWarning``) that nothing is copied, since other hooks hold what autograd saves."""
        if self._told_of_hooks:
            return
        self._told_of_hooks = True
        where = f"unit {unit!r} of the plan" if unit else "the model, which is one unit of the plan,"
        warnings.warn(
            f"{where} runs inside of saved-tensor hooks (torch.utils.checkpoint, save_on_cpu, saved_tensors_hooks). "
            "They hold what autograd saves there, so the plan copies nothing of it to the host, and the step may take "
            "more memory than planned. Leave them out; or make the profile of a step with them, and plan again.",
            SacplanWarning,
            stacklevel=2,
        )


@dataclass(frozen=True, slots=True)
class Send:
    """The mark at which a copy out begins."""

    board: Board
    number: int
    tensor: int
    unit: str

    def ran(self, tensors: Sequence[torch.Tensor], saved_of: SavedOf) -> None:
        """Begin to copy the tensor to the host. Where that cannot be done in this step, it stays on the device."""
        # Another step than the planned one may have fewer tensors here, or a subclass that is more than its storage.
        tensor = tensors[self.tensor] if self.tensor < len(tensors) else None
        if tensor is None or not is_plain(tensor) or tensor.is_inference():
            return
        storage = tensor.untyped_storage()
        # A copy goes by elements: it would miss the last bytes of a storage that is no whole number of elements.
        if not storage.nbytes() or storage.nbytes() % tensor.element_size():
            return
        saved = saved_of(tensor)
        # The hooks of somebody else hold the tensor anyway, so a copy would free nothing.
        if saved.for_others:
            self.board.note_hooks(self.unit)
        # Another decision may have copied the same storage already: one copy is enough.
        elif saved.stand is None:
            saved.stand = Parcel(tensor)
            self.board.enter(self.number, saved)


@dataclass(frozen=True, slots=True)
class LetGo:
    """The mark at which computation waits for a copy out, and the memory on the device is let go of."""

    board: Board
    number: int

    def ran(self, tensors: Sequence[torch.Tensor], saved_of: SavedOf) -> None:
        """Let go of what is held, unless nothing was sent."""
        saved = self.board.look_up(self.number)
        if saved is None or not isinstance(saved.stand, Parcel) or saved.is_away:
            return  # nothing was sent, or nobody holds it any more; or it is gone already
        storage = saved.storage()
        if storage is not None and saved.stand.has_all_of(storage):
            saved.stand.await_out(storage)
            saved.let_go(saved.stand.version)


@dataclass(frozen=True, slots=True)
class Fetch:
    """The mark at an op of which autograd will ask for a tensor: a copy back begins when it first does."""

    board: Board
    number: int
    tensor: int

    def ran(self, tensors: Sequence[torch.Tensor], saved_of: SavedOf) -> None:
        """Have the copy back begin when the tensor is asked for; if it cannot be watched, the copy begins on need."""
        saved = self.board.look_up(self.number)
        tensor = tensors[self.tensor] if self.tensor < len(tensors) else None
        if saved is not None and tensor is not None and is_plain(tensor):
            saved_of(tensor).on_ask.append(partial(_fetch, weakref.ref(saved)))


def _fetch(ref: weakref.ref[SavedStorage]) -> None:
    """Begin the copy back of a storage that is away."""
    # The storage may have been needed and released before, as in a backward pass through a part of the graph.
    saved = ref()
    if saved is not None and saved.is_away and isinstance(saved.stand, Parcel):
        saved.stand.fetch()
