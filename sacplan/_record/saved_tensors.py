"""What autograd keeps, told apart from what code holds, by a trick that only a recorder can afford.

The pack hook gives autograd an empty handle instead of the tensor. Every storage then dies when nobody *else*
holds it, the handle's own end is the end of autograd's hold, and unpacking makes a fresh tensor whose life is
that of the tensor autograd would have handed out. Under FakeTensorMode nothing was ever computed, so nothing is
lost; on real tensors the handle keeps a clone (``"clone"``), and ``"observe"`` leaves autograd alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch

from sacplan._program.program import Event
from sacplan._record.fake_data import DataRules
from sacplan._torch.local_tensors import Wrapping, arrived, stands_for_another, wrapping_of
from sacplan._torch.private import (
    active_fake_mode,
    autograd_sequence_number,
    fake_empty_strided,
    is_plain,
    storage_key,
    without_torch_functions,
)

SavedMode = Literal["virtual", "clone", "observe"]

_PACK, _RELEASE, _UNPACK, _DROP = map(int, (Event.PACK, Event.RELEASE, Event.UNPACK, Event.DROP))


class _SavedTensor:
    """What autograd keeps instead of a tensor; its end is autograd's letting go."""

    __slots__ = ("__weakref__", "clone", "dtype", "index", "offset", "rules", "size", "stride", "value")

    def __init__(self, index: int, tensor: torch.Tensor, clone: torch.Tensor | None) -> None:
        self.index = index
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.clone = clone
        self.value: torch.Tensor | None = None  # what a fake tensor holds, where it is known
        self.rules: dict[str, None] = {}  # that it rests on


class _SavedLocalTensor(NamedTuple):
    """For a tensor that stands for its local part, the handle of which autograd keeps."""

    local: _SavedTensor
    wrapping: Wrapping


class SavedTensors:
    """The hooks of one recorder, and what they note.

    Args:
        how: see the module's docstring.
        ids: storage key to storage, shared with the recorder; so are ``events`` and ``offsets``.
        offsets: storage key to the place in the recorded storage where a tensor begins that was unpacked; absent
            where that is 0.
        tensor_index: the index of a tensor on a recorded storage.
        events: pairs (``Event``, index).
        initial: storages that are alive anyway (parameters, the batch) and need no handle.
        paused: context in which the recorder takes no note of ops.
        unpacks: called before a tensor is unpacked.
        rules: what knows values of fake tensors; a tensor that is unpacked keeps them.

    Attributes:
        handle_storages, handle_tensors, instance_handles: as in ``Program``.
        handle_numbers: autograd's next sequence number when it took the tensor.
    """

    def __init__(
        self,
        how: SavedMode,
        *,
        ids: dict[int, int],
        offsets: dict[int, int],
        tensor_index: Callable[[torch.Tensor, int], int],
        events: list[tuple[int, int]],
        initial: Collection[int],
        paused: Callable[[], AbstractContextManager[None]],
        unpacks: Callable[[], object],
        rules: DataRules | None,
    ) -> None:
        self.handle_storages: list[int] = []
        self.handle_tensors: list[int] = []
        self.handle_numbers: list[int] = []
        self.instance_handles: list[int] = []
        self._how = how
        self._ids = ids
        self._offsets = offsets
        self._tensor_index = tensor_index
        self._events = events
        self._initial = initial
        self._paused = paused
        self._unpacks = unpacks
        self._rules = rules
        self._handle_refs: dict[int, weakref.ref[Any]] = {}
        self._instance_refs: dict[int, weakref.ref[Any]] = {}
        self._clones: weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor] = (
            weakref.WeakValueDictionary()
        )
        self._hooks: Any = None

    def __enter__(self) -> SavedTensors:
        if self._how != "observe":
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(exc_type, exc_value, traceback)
            self._hooks = None
        self._clones.clear()

    @without_torch_functions
    def _pack(self, tensor: torch.Tensor) -> Any:
        if not is_plain(tensor):
            if not stands_for_another(tensor):
                return tensor
            packed = self._pack(arrived(tensor))
            return (
                _SavedLocalTensor(packed, wrapping_of(tensor)) if isinstance(packed, _SavedTensor) else tensor
            )
        storage = self._ids.get(storage_key(tensor.untyped_storage()))
        if storage is None or storage in self._initial:
            return tensor
        index = len(self.handle_storages)
        handle = _SavedTensor(index, tensor, self._clone(tensor, storage) if self._how == "clone" else None)
        if self._rules is not None and self._rules.knows(tensor):
            handle.value, handle.rules = self._rules.value(tensor), self._rules.rules_of([tensor])
        self.handle_storages.append(storage)
        self.handle_tensors.append(self._tensor_index(tensor, storage))
        self.handle_numbers.append(autograd_sequence_number())
        self._events.append((_PACK, index))

        def released(_: Any) -> None:
            self._events.append((_RELEASE, index))
            self._handle_refs.pop(index, None)

        self._handle_refs[index] = weakref.ref(handle, released)
        return handle

    def _clone(self, tensor: torch.Tensor, storage: int) -> torch.Tensor:
        """A copy of the part of the storage that the tensor spans, shared by handles on the same part."""
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        span = reach + 1 if tensor.numel() else 0
        key = (storage, tensor._version, tensor.dtype, tensor.storage_offset(), span)
        copy = self._clones.get(key)
        if copy is None:
            with torch.no_grad(), self._paused():
                copy = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()).clone()
            self._clones[key] = copy
        return copy

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _SavedLocalTensor):
            return packed.wrapping.around(self._unpack(packed.local))
        if not isinstance(packed, _SavedTensor):
            tensor: torch.Tensor = packed
            return tensor
        self._unpacks()
        out = self._twin_of(packed)
        instance = len(self.instance_handles)
        self.instance_handles.append(packed.index)
        self._events.append((_UNPACK, instance))
        storage = out.untyped_storage()
        key = storage_key(storage)

        def dropped(_: Any) -> None:
            self._events.append((_DROP, instance))
            self._instance_refs.pop(instance, None)
            self._ids.pop(key, None)
            self._offsets.pop(key, None)

        self._instance_refs[instance] = weakref.ref(storage, dropped)
        self._ids[key] = self.handle_storages[packed.index]
        if packed.offset:
            self._offsets[key] = packed.offset
        return out

    def _twin_of(self, handle: _SavedTensor) -> torch.Tensor:
        mode = active_fake_mode()
        if handle.clone is None and handle.value is None and mode is not None:
            return fake_empty_strided(mode, handle.size, handle.stride, handle.dtype)
        with self._paused():
            if handle.clone is not None:
                return torch.as_strided(handle.clone.clone(), handle.size, handle.stride, 0)
            if handle.value is None or self._rules is None:
                return torch.empty_strided(handle.size, handle.stride, dtype=handle.dtype)
            return self._rules.as_fake_like(
                handle.size, handle.stride, handle.dtype, handle.value, handle.rules
            )
