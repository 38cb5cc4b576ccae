"""The storages of a step that is recorded: how large each is, what it is for, and when it is gone.

A storage is recognised by the address of its C++ object (``storage_key``), which is unique while the object lives. A
weak reference tells the end of that life. Its callback removes the address, since the next storage may get the same
one, and writes ``FREE``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sacplan.core.program import Event, Phase, StorageKind
from sacplan.device.devices import DeviceSpec
from sacplan.record.call_arguments import plain_tensors
from sacplan.torch_compat.fake_tensors import FakeTensor
from sacplan.torch_compat.host_memory import is_for_host
from sacplan.torch_compat.local_tensors import local_part
from sacplan.torch_compat.ops import tensors_in
from sacplan.torch_compat.private import counts_writes_of, is_plain, storage_key, without_torch_functions

_ALLOC, _FREE, _RESIZE = int(Event.ALLOC), int(Event.FREE), int(Event.RESIZE)


class Storages:
    """All storages that a recorder has seen.

    Args:
        spec: whose allocators round sizes up.
        events: the recorder's.
        phase: tells the phase that runs now.

    Attributes:
        ids: storage key to storage, for those that are alive. Tensors that autograd unpacks are entered under the
            storage that was packed.
        nbytes, kinds, born: by storage, its rounded size (the largest, if it is resized), what it is for (None: not
            known by name), and the phase in which it was first seen.
        resizes: as in ``Program``.
        initial: storages that were alive when the record began, in the order in which they were found.
        is_recording: whether changes are events of the step.
        is_fake: whether the step runs under FakeTensorMode.
        on_host: storages of shards in the host's memory, and of what is computed with them there. They count 0 bytes.
    """

    def __init__(self, spec: DeviceSpec, events: list[tuple[int, int]], phase: Callable[[], Phase]) -> None:
        self.ids: dict[int, int] = {}
        self.nbytes: list[int] = []
        self.kinds: list[StorageKind | None] = []
        self.born: list[Phase] = []
        self.initial: dict[int, None] = {}
        self.on_host: set[int] = set()
        self.resizes: list[tuple[int, int, int]] = []
        self.is_recording = False
        self.is_fake = False
        self._events = events
        self._phase = phase
        self._rounded = spec.round_up
        self._host_bytes = spec.host_bytes
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._makers_output: dict[int, weakref.ref[torch.Tensor]] = {}  # storage to what its maker returned
        self._names: dict[int, set[str]] = {}  # of parameters and buffers, by key
        self._raw: dict[int, int] = {}  # bytes now, as torch says them
        self._lent: set[int] = set()  # on memory that PyTorch did not allocate, such as an array's
        self._real: set[int] = set()  # storages of real tensors that a fake step was seen to read

    @without_torch_functions
    def bytes_of(self, value: Any) -> int:
        """Return the rounded bytes of the tensors in a value; of a DTensor its local part counts."""
        parts = map(local_part, tensors_in(value))
        return sum(self._rounded(t.numel() * t.element_size()) for t in parts)

    def restart(self) -> None:
        """Begin a new record: what is alive now is what the step begins with."""
        for index, _, now in self.resizes:
            self.nbytes[index] = now
        self.resizes.clear()
        self.initial.clear()  # in place: the saved-tensor hooks look into it
        self.initial.update(dict.fromkeys(sorted(set(self.ids.values()))))

    # --- what is there before the step -------------------------------------------------------

    def track(self, tensor: torch.Tensor, kind: StorageKind, *, initial: bool = False) -> None:
        """Count a tensor that no op was seen to make, and say what it is for.

        ``initial`` says that it was there when the step began, though it is only tracked now. A kind that is known
        already stays: a parameter may also be in the batch.
        """
        for storage in (part.untyped_storage() for part in plain_tensors(tensor)):
            known = self.ids.get(storage_key(storage))
            # Tracked for the first time: one that appears in the step gets an event, one from before is ``initial``.
            if known is None:
                index = self.add(storage, kind)
                if self.is_recording and not initial:
                    self._events.append((_ALLOC, index))
                else:
                    self.initial[index] = None
            elif self.kinds[known] is None:
                self.kinds[known] = kind

    def name_fixed(self, tensor: torch.Tensor, name: str, *, alone: bool) -> None:
        """Note a name of a parameter or buffer; ``alone``: the device does not change it, so it may be ``fixed``."""
        if is_plain(tensor):
            storage = tensor.untyped_storage()
            names = self._names.setdefault(storage_key(storage), set())
            filled = tensor.numel() * tensor.element_size() == storage.nbytes()
            names.update((name,) if alone and filled else ("", name))  # two: never ``fixed``

    def is_fixed(self, storage: Any) -> bool:
        """Whether a storage is filled by a single parameter, which the device does not change."""
        return len(self._names.get(storage_key(storage), ())) == 1

    @property
    def fixed(self) -> dict[int, str]:
        """By storage for which ``is_fixed`` holds, and that was there before the step, its parameter's name."""
        named = ((self.ids.get(key), names) for key, names in self._names.items())
        return {at: next(iter(names)) for at, names in named if at in self.initial and len(names) == 1}

    def leave_on_host(self, tensor: torch.Tensor, *, shard: bool = False) -> None:
        """Count a tensor that is not in the device's memory as 0 bytes; ``shard``: ops on it run on the host."""
        index = self.known(local_part(tensor))
        self.nbytes[index] = 0
        if shard:
            self.on_host.add(index)

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a shard on the host, or was computed there."""
        return self.ids.get(storage_key(local_part(tensor).untyped_storage())) in self.on_host

    def host_bytes_of(self, tensors: Sequence[torch.Tensor], storages: Sequence[int]) -> int:
        """Return the bytes that an op uses on the host; 0 if its largest tensor is on the device."""
        if self.on_host.isdisjoint(storages):
            return 0
        _, runs_there = max((t.numel(), s in self.on_host) for t, s in zip(tensors, storages, strict=True))
        return sum(self._raw[s] for s in self.on_host.intersection(storages)) if runs_there else 0

    def track_alive(self, storages: Iterable[weakref.ref[Any]]) -> None:
        """Count storages as alive from the start, if they are still alive."""
        for storage in filter(None, (ref() for ref in storages)):
            if storage_key(storage) not in self.ids:
                self.initial[self.add(storage, StorageKind.OTHER)] = None

    def left_behind(self) -> list[weakref.ref[Any]]:
        """Storages that ops of the step made and that are still alive, such as those in a module's cache.

        Gradients and the optimizer's state are expected to stay and are left out.
        """
        expected = (StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)
        return [
            ref
            for index, ref in self._alive.items()
            if index in self._makers_output
            and index not in self.initial
            and self.kinds[index] not in expected
            and ref() is not None
        ]

    def gradients_left(self) -> list[weakref.ref[Any]]:
        """Living storages of gradients, and those that no op made: buckets, which are there before the step."""
        return [
            ref
            for index, ref in self._alive.items()
            if self.kinds[index] is StorageKind.GRADIENT
            or (self.kinds[index] is None and index not in self._makers_output and self.nbytes[index])
        ]

    # --- while it runs -----------------------------------------------------------------------

    def known(self, tensor: torch.Tensor) -> int:
        """Return the storage of a tensor whose storage has been seen."""
        return self.ids[storage_key(tensor.untyped_storage())]

    def of(self, tensor: torch.Tensor) -> int:
        """Return the storage of a tensor, entered if it is met for the first time."""
        storage = tensor.untyped_storage()
        index = self.ids.get(storage_key(storage))
        if index is None:  # it is there although no op was seen to make it
            index = self.add(storage, None)
            self._events.append((_ALLOC, index))
            # Memory that the step borrows from an array (``torch.from_numpy``) and gives back is not PyTorch's, whose
            # allocators make storages that can be resized: once the storage is freed it counts as 0 bytes. If it stays
            # alive it was there before, as far as anybody can tell.
            if not self.is_fake and not storage.resizable():
                self._lent.add(index)
        return index

    def taken(self, inputs: Sequence[torch.Tensor], *, lifts: bool) -> tuple[list[int], bool]:
        """Return the storages of an op's inputs, and whether it lifts a constant that lies on borrowed memory.

        Args:
            lifts: whether the op is ``lift_fresh``. It gets a constant that was made outside of the fake mode. A plain
                step goes on with that one; the fake step replaces it by a tensor with a storage of its own. So of the
                two only the second counts, or none if the constant's memory is borrowed.
        """
        storages: list[int] = []
        lent = False
        for t in inputs:
            # A new number means that ``of`` has just entered the storage: this op is the first to show it.
            n_known = len(self.nbytes)
            at = self.of(t)
            storages.append(at)
            if at == n_known and lifts and self.is_fake:
                self.nbytes[at] = 0
                if not t.untyped_storage().resizable():
                    lent = True
        return storages, lent

    def made(
        self, outputs: Sequence[torch.Tensor], lent: bool, on_host: bool
    ) -> tuple[list[int], dict[int, None]]:
        """Return the storages of an op's outputs, and those of them that are new.

        New ones have no ``ALLOC``: the event ``OP`` allocates what the op writes. ``lent``: they lie on memory that is
        not PyTorch's, or on none; ``on_host``: on the host's.
        """
        storages: list[int] = []
        writes: dict[int, None] = {}
        for t in outputs:
            storage = t.untyped_storage()
            at = self.ids.get(storage_key(storage))
            if at is None:
                at = self.add(storage, None)
                self._makers_output[at] = weakref.ref(t)
                writes[at] = None
                if lent or on_host:
                    self.nbytes[at] = 0
                if on_host:
                    self.on_host.add(at)
            storages.append(at)
        return storages, writes

    def add(self, storage: Any, kind: StorageKind | None) -> int:
        """Enter a storage without an event, and wait for its end."""
        key = storage_key(storage)
        raw = storage.nbytes()
        # In a real step autograd infers shapes of its zero tensors on the meta device, so those count 0 bytes.
        nbytes = self._rounded(raw) if self.is_fake or storage.device.type != "meta" else 0
        if is_for_host(storage):
            nbytes, kind = self._host_bytes(raw), StorageKind.HOST
        index = self.ids[key] = self.add_unseen(nbytes, kind)
        self._raw[index] = raw

        # Runs when the storage's Python object goes. The key must go with it, since the next C++ object may get the
        # same address, and would be taken for this storage.
        def freed(_: Any) -> None:
            self.ids.pop(key, None)
            self._alive.pop(index, None)
            if index in self._lent:
                self.nbytes[index] = 0
            if self.is_recording:
                self._events.append((_FREE, index))

        self._alive[index] = weakref.ref(storage, freed)
        return index

    def resized(self, storage: Any) -> None:
        """Note that a storage may have another size than before."""
        index, n_bytes = self.ids.get(storage_key(storage), -1), storage.nbytes()
        ref = self._alive.get(index)
        # Only of the storage itself, not of one that counts as it, such as that of a tensor that autograd has unpacked.
        if ref is None or ref() is not storage or n_bytes == self._raw[index]:
            return
        size = self._host_bytes if self.kinds[index] is StorageKind.HOST else self._rounded
        before, after = size(self._raw[index]), size(n_bytes)
        self._raw[index] = n_bytes
        if before and not self.nbytes[index]:
            return  # not in the device's memory
        self.nbytes[index] = max(self.nbytes[index], after)
        if self.is_recording:
            self._events.append((_RESIZE, len(self.resizes)))
            self.resizes.append((index, before, after))

    def add_unseen(self, nbytes: int, kind: StorageKind | None) -> int:
        """Enter a storage that PyTorch makes without showing it: the caller tells when it ends."""
        self.nbytes.append(nbytes)
        self.kinds.append(kind)
        self.born.append(self._phase() if self.is_recording else Phase.FORWARD)
        return len(self.nbytes) - 1

    def is_as_made(self, tensor: Any, storages: Sequence[int]) -> bool:
        """Whether a tensor is what the maker of the first of these storages returned, or a view of that.

        An alias will not do: it may have a version counter of its own, as ``x.data`` has.
        """
        made = self._makers_output.get(storages[0]) if storages else None
        return made is not None and counts_writes_of(made(), tensor)

    # --- real tensors in a fake step ---------------------------------------------------------

    def know_copies(
        self, func: Any, taken: Sequence[torch.Tensor], storages: Sequence[int], out: Any
    ) -> None:
        """Note real tensors among the arguments of a fake step, such as a loss function's own.

        FakeTensorMode runs the op on a fake copy (``validate_and_convert_non_fake_tensors`` in
        ``torch/_subclasses/fake_tensor.py``), so a view of a real tensor lies on the storage of the copy. In a plain
        step that is the real tensor's storage, and it is entered as such.
        """
        real = [s for t, s in zip(taken, storages, strict=True) if not isinstance(t, FakeTensor)]
        self._real.update(real)
        # Any op but a view makes a new storage in a plain step, too.
        if not real or not isinstance(func, torch._ops.OpOverload) or not func.is_view:
            return
        for t in plain_tensors(out):
            storage = t.untyped_storage()
            key = storage_key(storage)
            if key not in self.ids:
                self.ids[key] = real[0]
                weakref.finalize(storage, self.ids.pop, key, None)

    def real_from_the_start(self) -> set[int]:
        """Real tensors that a fake step read, that are still alive, and that nobody had tracked.

        No op of a fake step makes a real tensor, so these were there before the step.
        """
        return {s for s in self._real if s in self._alive and s not in self.initial}
