"""Saved tensors: tell the storages that autograd keeps from those that code holds.

Both keep a storage alive, and PyTorch does not say which of them does. So the pack hook gives autograd an empty handle
instead of the tensor. Then:

- a storage dies (``FREE``) when code lets go of it, whatever autograd saved;
- the end of the handle (``RELEASE``) is the moment at which autograd lets go;
- the unpack hook returns a fresh tensor on a storage of its own. This storage dies (``DROP``) when the tensor that
  autograd would have handed out would have died.

A custom function may keep a parameter as an attribute of its node instead (``ctx.weight = weight``), as those of
bitsandbytes do, and no hook sees that. A plan can take the parameter from the node and put it back, so it has a handle
as well, from the function's first op to the end of its backward.

Only a recorder can afford this, since the values are lost. Under FakeTensorMode there are none (``"virtual"``). On real
tensors the handle keeps a clone (``"clone"``), which is not recorded. ``"observe"`` leaves autograd alone.

An object can only tell its end through a weak reference, so handles and unpacked storages are watched by weak
references that this module keeps. Their callbacks write the events.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from sacplan.core.program import Event
from sacplan.record.fake_data import DataRules
from sacplan.record.storages import Storages
from sacplan.record.tensor_table import TensorTable
from sacplan.torch_compat.autograd import autograd_sequence_number, running_custom_function
from sacplan.torch_compat.fake_tensors import active_fake_mode, fake_empty_strided
from sacplan.torch_compat.local_tensors import Wrapping, local_part, stands_for_another, wrapping_of
from sacplan.torch_compat.private import is_plain, storage_key, without_torch_functions

SavedMode = Literal["virtual", "clone", "observe"]

_PACK, _RELEASE, _UNPACK, _DROP = map(int, (Event.PACK, Event.RELEASE, Event.UNPACK, Event.DROP))


class _SavedTensor:
    """The handle that autograd keeps instead of a tensor."""

    def __init__(self, index: int, tensor: torch.Tensor, clone: torch.Tensor | None) -> None:
        self.index = index
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.clone = clone
        self.value: torch.Tensor | None = None  # what a fake tensor holds, where it is known
        self.rules: dict[str, None] = {}  # the rules of ``fake_data.py`` that this value rests on


class _SavedLocalTensor(NamedTuple):
    """The handle of a DTensor: that of its local part, and how to wrap it again."""

    local: _SavedTensor
    wrapping: Wrapping


@dataclass(eq=False)
class SavedTensors:
    """The saved-tensor hooks of one recorder, and the handles and instances that they have seen.

    Args:
        how: see the module's docstring.
        storages, tensors, events: the recorder's. Storages that are alive anyway (``initial``: parameters, the batch)
            need no handle.
        paused: context in which the recorder takes no note of ops.
        unpacks: called before a tensor is unpacked.
        rules: what knows values of fake tensors; a tensor that is unpacked keeps them.

    Attributes:
        handle_storages, handle_tensors, instance_handles: as in ``Program``.
        handle_numbers: autograd's next sequence number when it saved the tensor: it tells the op that did.
        of_nodes: op of the forward pass to handles on what the node of this op keeps as attributes.
    """

    how: SavedMode
    storages: Storages
    tensors: TensorTable
    events: list[tuple[int, int]]
    paused: Callable[[], AbstractContextManager[None]]
    unpacks: Callable[[], object]
    rules: DataRules | None
    handle_storages: list[int] = field(default_factory=list)
    handle_tensors: list[int] = field(default_factory=list)
    handle_numbers: list[int] = field(default_factory=list)
    instance_handles: list[int] = field(default_factory=list)
    of_nodes: dict[int, list[int]] = field(default_factory=dict)
    _of_running: list[int] = field(default_factory=list)
    _handle_refs: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    _instance_refs: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    _clones: MutableMapping[Any, torch.Tensor] = field(default_factory=weakref.WeakValueDictionary)
    _hooks: Any = None

    def __enter__(self) -> SavedTensors:
        if self.how != "observe":
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(exc_type, exc_value, traceback)
            self._hooks = None
        self.node_runs(-1)
        self._clones.clear()

    def node_runs(self, op: int) -> None:
        """Note that the node which ``op`` made begins to run, and that the one before is done; -1: no op is known."""
        for instance in self._of_running:
            self.events += ((_DROP, instance), (_RELEASE, self.instance_handles[instance]))
        self._of_running = []
        node: Any = running_custom_function()
        if op < 0 or node is None or self.how != "virtual":
            return
        for t in tree_leaves(vars(node)):
            if isinstance(t, torch.Tensor) and is_plain(t) and self._may_leave(t):
                storage = self.storages.ids[storage_key(t.untyped_storage())]
                handle = self._new_handle(t, storage, node._sequence_nr() + 1)
                self.of_nodes.setdefault(op, []).append(handle)
                self._of_running.append(self._new_instance(handle))

    def _new_handle(self, tensor: torch.Tensor, storage: int, number: int) -> int:
        self.handle_storages.append(storage)
        self.handle_tensors.append(self.tensors.index(tensor, storage))
        self.handle_numbers.append(number)
        return len(self.handle_storages) - 1

    def _new_instance(self, handle: int) -> int:
        self.instance_handles.append(handle)
        self.events.append((_UNPACK, instance := len(self.instance_handles) - 1))
        return instance

    @without_torch_functions
    def _pack(self, tensor: torch.Tensor) -> Any:
        if not is_plain(tensor):
            if not stands_for_another(tensor):
                return tensor  # a wrapper that we know nothing of: autograd keeps it as it is, as code would
            # The storage is that of the local part. A collective may still be on its way to it: wait as the plain step
            # does when it reads the tensor.
            packed = self._pack(local_part(tensor, waits=True))
            return (
                _SavedLocalTensor(packed, wrapping_of(tensor)) if isinstance(packed, _SavedTensor) else tensor
            )
        # Without a handle autograd holds the tensor itself, and its storage dies when code and autograd have let go.
        storage = self.storages.ids.get(storage_key(tensor.untyped_storage()))
        if storage is None or (storage in self.storages.initial and not self._may_leave(tensor)):
            return tensor  # not of this step, or alive to its end in any case: nothing to tell apart
        index = len(self.handle_storages)
        # The handle must hold neither the tensor nor its storage, or ``FREE`` would wait for autograd.
        handle = _SavedTensor(index, tensor, self._clone(tensor, storage) if self.how == "clone" else None)
        if self.rules is not None and self.rules.knows(tensor):
            handle.value, handle.rules = self.rules.value(tensor), self.rules.rules_of([tensor])
        self._new_handle(tensor, storage, autograd_sequence_number())
        self.events.append((_PACK, index))

        def released(_: Any) -> None:
            self.events.append((_RELEASE, index))
            self._handle_refs.pop(index, None)

        self._handle_refs[index] = weakref.ref(handle, released)
        return handle

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        """Whether a plan may move the storage to the host for a while: a parameter's. These are never cloned."""
        return self.how == "virtual" and self.storages.is_fixed(tensor.untyped_storage())

    def _clone(self, tensor: torch.Tensor, storage: int) -> torch.Tensor:
        """Return a copy of the part of the storage that the tensor spans; handles on the same part share one.

        The version is in the key: an in-place write between two packs makes another value.
        """
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        span = reach + 1 if tensor.numel() else 0
        key = (storage, tensor._version, tensor.dtype, tensor.storage_offset(), span)
        copy = self._clones.get(key)
        if copy is None:
            with torch.no_grad(), self.paused():
                copy = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()).clone()
            self._clones[key] = copy
        return copy

    def _unpack(self, packed: Any) -> torch.Tensor:
        # The three things that ``_pack`` returns, in turn.
        if isinstance(packed, _SavedLocalTensor):
            return packed.wrapping(self._unpack(packed.local))
        if not isinstance(packed, _SavedTensor):
            tensor: torch.Tensor = packed  # ``_pack`` returned the tensor itself
            return tensor
        # First, since numbers that the node before has kept are freed before this tensor counts.
        self.unpacks()
        out = self._twin_of(packed)
        instance = self._new_instance(packed.index)
        storage = out.untyped_storage()
        key = storage_key(storage)

        def dropped(_: Any) -> None:
            self.events.append((_DROP, instance))
            self._instance_refs.pop(instance, None)
            self.storages.ids.pop(key, None)
            self.tensors.offsets.pop(key, None)

        self._instance_refs[instance] = weakref.ref(storage, dropped)
        # Ops that read the fresh tensor read the recorded storage.
        self.storages.ids[key] = self.handle_storages[packed.index]
        if packed.offset:
            self.tensors.offsets[key] = packed.offset
        return out

    def _twin_of(self, handle: _SavedTensor) -> torch.Tensor:
        """Return a fresh tensor in the layout of the one that was packed."""
        mode = active_fake_mode()
        if handle.clone is None and handle.value is None and mode is not None:
            # The common case, in a quick way: no dispatch mode sees this tensor.
            return fake_empty_strided(mode, handle.size, handle.stride, handle.dtype)
        # Paused, since the tensors made here are none of the step's.
        with self.paused():
            if handle.clone is not None:
                # A copy for each unpacking: every instance has a storage of its own, whose end is its ``DROP``.
                return torch.as_strided(handle.clone.clone(), handle.size, handle.stride, 0)
            if handle.value is None or self.rules is None:
                return torch.empty_strided(handle.size, handle.stride, dtype=handle.dtype)
            return self.rules.as_fake_like(
                handle.size, handle.stride, handle.dtype, handle.value, handle.rules
            )
