"""The tensors that autograd has saved, while their storages are replaced under them.

A tensor may be reduced after autograd has saved it. The executor then swaps the values of the saved tensor
(``executor/placed.py``), so autograd holds the sum and no longer the summands. In the program one handle is held from
its ``PACK`` to its ``RELEASE``. It is split in two: a new handle on the old storage up to the moment of the swap, and
the recorded handle on the new storage from there on.

A saved view holds what it is a view of as far as autograd knows (``PlacedTensor.holds_base``). Where the view lies on
other memory on a rank, another new handle keeps its base.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from sacplan._program.program import Event, Tensor
from sacplan._shard.placements import Placements
from sacplan._shard.rank.draft import RankDraft, Written
from sacplan._shard.rank.storages import RankStorages
from sacplan._shard.rank.tensors import PlacedTensors
from sacplan._shard.views import Views

_PACK, _RELEASE = int(Event.PACK), int(Event.RELEASE)


class _Saved(NamedTuple):
    """A tensor as it was when a handle on it was packed last."""

    layout: Placements
    local: Tensor
    handles: list[int]  # all handles of the tensor: the same list for each


class RankSavedTensors:
    """Follows the handles on placed tensors.

    Args:
        draft: the step as it is written.
        placed: the layouts of tensors.
        storages: which of them were replaced.
        views: of the recorded step.
    """

    def __init__(self, draft: RankDraft, placed: PlacedTensors, storages: RankStorages, views: Views) -> None:
        self._draft, self._placed, self._storages, self._views = draft, placed, storages, views
        self._handle_storages = draft.builder.handle_storages
        self._handles: dict[int, list[int]] = defaultdict(list)  # by tensor, those of what it is now
        self._saved: dict[int, _Saved] = {}  # by handle
        self._packed_at: dict[int, Written] = {}  # by handle, its last PACK, while it is held
        self._bases: dict[int, int] = {}  # by handle, the one on what its tensor is a view of

    def pack(self, handle: int) -> None:
        """Write that autograd saves a tensor."""
        tensor = self._draft.program.handle_tensors[handle]
        written = self._draft.write(_PACK, handle)
        if tensor not in self._placed.layouts:  # plain: as it was recorded
            return
        self._handles[tensor].append(handle)
        self._pack_now(tensor, handle, written)

    def _pack_now(self, tensor: int, handle: int, written: Written) -> None:
        self._handle_storages[handle] = self._placed.storage(tensor)
        self._saved[handle] = _Saved(
            self._placed.layouts[tensor], self._placed.local(tensor), self._handles[tensor]
        )
        self._packed_at[handle] = written
        self._pack_base(tensor, handle)

    def _pack_base(self, tensor: int, handle: int) -> None:
        """Save what a view is a view of, too, if the view lies on other memory than that.

        No plan may discard the base: the view would still hold it.
        """
        saved = self._handle_storages[handle]
        base = self._storages.now(self._draft.program.tensors[tensor].storage)
        is_view = self._storages.has_views(saved) or tensor in self._views
        # The view is on its base's memory, whose handle holds both; or the base is held already; or it is no
        # view for autograd.
        if saved == base or handle in self._bases or not is_view:
            return
        self._bases[handle] = self._new_handle(handle, base)
        self._draft.write(_PACK, self._bases[handle])
        self._draft.forbid_recomputation(base)

    def _new_handle(self, like: int, storage: int) -> int:
        builder = self._draft.builder
        return builder.new_handle(storage, builder.handle_ops[like])

    def unpack(self, handle: int) -> None:
        """Go back to the tensor that a handle was packed for.

        Equal views of one tensor are the same tensor of the program, so it may stand for another view by now.
        """
        # Otherwise the handle is on a plain tensor.
        if handle in self._saved:
            tensor = self._draft.program.handle_tensors[handle]
            layout, local, self._handles[tensor] = self._saved[handle]
            self._placed.set(tensor, layout, local)

    def release(self, handle: int) -> None:
        """Write that autograd lets go of a tensor, and of what it is a view of."""
        self._draft.write(_RELEASE, handle)
        self._packed_at.pop(handle, None)
        if handle in self._bases:
            self._draft.write(_RELEASE, self._bases.pop(handle))

    def is_made_anew(self, tensor: int) -> None:
        """Note that an op makes a tensor again: handles that were packed before are on another one."""
        self._handles.pop(tensor, None)

    def is_replaced(self, tensor: int, old: int) -> None:
        """Split the handles that are held on a tensor which has left a storage, see above.

        Recipes for the old storage do not make the new one, so neither may be discarded.
        """
        for handle in self._handles.get(tensor, ()):
            # One that is released needs no change, nor one that was packed for another version.
            if self._handle_storages[handle] != old or handle not in self._packed_at:
                continue
            before = self._new_handle(handle, old)
            # The new handle takes over the recorded PACK; the recorded handle begins at the swap, where the
            # new one ends.
            self._draft.amend(self._packed_at[handle], _PACK, before)
            self._draft.write(_RELEASE, before)
            self._pack_now(tensor, handle, self._draft.write(_PACK, handle))
            self._draft.forbid_recomputation(old)
            self._draft.forbid_recomputation(self._handle_storages[handle])
