"""Follow the storages that ops read and make, as long as they live: under a mode, without a recording."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from sacplan.torch_compat.local_tensors import Watching, is_deferred
from sacplan.torch_compat.ops import tensors_in
from sacplan.torch_compat.private import storage_key, strided_parts


class AliveStorages(Watching):
    """A mode that follows the storages of ops.

    Attributes:
        bytes, peak_bytes: bytes of the storages that are alive now, and their maximum so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = 0
        # By key, a weak reference, and whether an op made the storage. The first ``note`` of a storage decides.
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = {}

    @property
    def not_made(self) -> tuple[torch.UntypedStorage, ...]:
        """The living storages that no op has made."""
        found = (ref() for ref, made in self._known.values() if not made)
        return tuple(storage for storage in found if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A tensor subclass handles the op itself and comes back with its inner tensors.
        if is_deferred(types):
            return NotImplemented
        # Inputs before the op runs, outputs after it: an output that is a view of an input is known by then,
        # and does not count as made.
        self.note(tensors_in((args, kwargs or {})))
        out = func(*args, **(kwargs or {}))
        self.note(tensors_in(out), made=True)
        return out

    def note(self, tensors: Iterable[torch.Tensor], *, made: bool = False) -> None:
        """Follow the storages of tensors from here on; ``made``: an op made those that are new."""
        for storage in (part.untyped_storage() for t in tensors for part in strided_parts(t)):
            key, nbytes = storage_key(storage), storage.nbytes()
            if key not in self._known:
                # A key is an address, which another storage may get as soon as this one is gone, so the entry must
                # go at once.
                gone = functools.partial(self._forget, key, nbytes)
                self._known[key] = weakref.ref(storage, gone), made
                self.bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _forget(self, key: int, nbytes: int, _: Any) -> None:
        del self._known[key]
        self.bytes -= nbytes
