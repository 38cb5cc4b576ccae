"""The fields of a program, recorded or rewritten. ``program.py`` has everything that follows from them."""

from __future__ import annotations

from functools import cached_property

import msgspec

from sacplan.core.elements import Event, Events, Op, Scope, StorageKind, Tensor
from sacplan.core.files import Count, MaybeIndex, Name

_PACKS = (int(Event.PACK), int(Event.RELEASE))
_UNPACKS = (int(Event.UNPACK), int(Event.DROP))


class Recording(msgspec.Struct, frozen=True, dict=True, weakref=True, forbid_unknown_fields=True):
    """One step.

    Attributes:
        storage_bytes: size of each storage as the device's allocator rounds it; the largest size of a resized one.
        storage_kinds: the purpose of each.
        initial: storages alive when the step began.
        tensors: the views of storages that ops take and return, and that autograd keeps.
        ops, scopes: see ``Op`` and ``Scope``.
        events: pairs (``Event``, index), in order.
        handle_storages: for each handle, the storage that autograd keeps.
        handle_tensors: for each handle, the tensor; -1 where none is recorded.
        handle_ops: for each handle, the forward op for whose gradient autograd keeps it (of a custom
            ``autograd.Function``, its first op); -1 where no op was seen.
        instance_handles: for each unpacked instance, its handle.
        backward_order: scopes in the order in which their backward began.
        leaf_fqns: modules without children.
        parameter_bytes: module to the bytes of its parameters, those of its children included.
        gradients: storage of a parameter to the tensor that is its gradient when the backward pass is over.
        on_dtensors: the innermost modules whose forward ran ops on DTensors, of which the program has the local ops;
            ``""`` if some ran outside of all.
        resizes: for each ``RESIZE``, the storage, and its bytes before and after (``Tensor.resize_``, an ``out=`` that
            was too small, ``UntypedStorage.resize_``).
        streams: for storages that are allocated on another stream than the default one, its number from 1 on.
        gathering: modules on which ``fully_shard`` was called, and that gather parameters.
        fixed: storage to the first name of a parameter that no op of the device changes: it is frozen, or an optimizer
            updates it on the host and keeps its gradient there. It fills the storage, with no other parameter or
            buffer on it.
    """

    storage_bytes: tuple[Count, ...]
    storage_kinds: tuple[StorageKind, ...]
    initial: tuple[Count, ...]
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    scopes: tuple[Scope, ...]
    events: Events
    handle_storages: tuple[Count, ...]
    handle_tensors: tuple[MaybeIndex, ...]
    handle_ops: tuple[MaybeIndex, ...]
    instance_handles: tuple[Count, ...]
    backward_order: tuple[Count, ...]
    leaf_fqns: frozenset[str] = frozenset()
    parameter_bytes: dict[str, Count] = {}
    gradients: dict[Count, Count] = {}
    on_dtensors: frozenset[str] = frozenset()
    resizes: tuple[tuple[Count, Count, Count], ...] = ()
    streams: dict[Count, Count] = {}
    gathering: frozenset[str] = frozenset()
    fixed: dict[Count, Name] = {}

    @cached_property
    def writer(self) -> dict[int, int]:
        """By storage, the op that made it; storages that no op made are absent."""
        return {s: i for i, op in enumerate(self.ops) for s in op.writes}

    @cached_property
    def largest_tensors(self) -> list[tuple[int, int]]:
        """By storage, bytes and index of its largest tensor without a stride of 0; (0, -1) if it has none."""
        found = [(0, -1)] * len(self.storage_bytes)
        for i, tensor in enumerate(self.tensors):
            size = tensor.n_bytes if 0 not in tensor.stride else 0
            if size > found[tensor.storage][0]:
                found[tensor.storage] = size, i
        return found

    @cached_property
    def inside_bytes(self) -> tuple[int, ...]:
        """By op, the bytes alive while it runs beyond its arguments and outputs: its workspace.

        It may be negative. An op that writes in place is recorded as making a new version (``Op.replaces`` is the old
        one). Both count as alive, but are the same memory, so the old one is taken off.
        """
        return tuple(
            op.workspace_bytes - (self.storage_bytes[op.replaces] if op.replaces >= 0 else 0)
            for op in self.ops
        )

    @cached_property
    def instance_storages(self) -> tuple[int, ...]:
        """By unpacked instance, the storage of its handle."""
        return tuple(map(self.handle_storages.__getitem__, self.instance_handles))

    @cached_property
    def first_bytes(self) -> tuple[int, ...]:
        """Size of each storage before the first ``RESIZE``."""
        first = {s: before for s, before, _ in reversed(self.resizes)}
        sizes = self.storage_bytes
        # The common case makes no second tuple.
        return tuple(first.get(s, n) for s, n in enumerate(sizes)) if first else sizes

    @cached_property
    def on_host(self) -> frozenset[int]:
        """Storages in the memory of the host; none in a recorded step without a plan."""
        kinds = self.storage_kinds
        return frozenset(s for s, kind in enumerate(kinds) if kind == StorageKind.HOST)

    @cached_property
    def device_bytes(self) -> tuple[int, ...]:
        """``first_bytes`` in the device's memory: 0 for a storage in the memory of the host."""
        if not self.on_host:
            return self.first_bytes
        return tuple(0 if s in self.on_host else n for s, n in enumerate(self.first_bytes))

    def storage_of(self, code: int, arg: int) -> int:
        """Return the storage of an event that is neither an op nor a module call."""
        if code in _PACKS:
            return self.handle_storages[arg]
        if code in _UNPACKS:
            return self.handle_storages[self.instance_handles[arg]]
        # An allocation and a free name the storage itself.
        return self.resizes[arg][0] if code == Event.RESIZE else arg
