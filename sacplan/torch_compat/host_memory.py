"""Copies of tensors on the host: their memory, and how a recorder tells it from that of the device.

A step that is recorded on a CPU, or with fake tensors, has all its tensors in one place. So code that takes memory on
the host notes it here, and the recorder asks. With a ``CPUOffloadPolicy`` this is ``fully_shard``, whose copies between
host and device are the ops ``sacplan::to_device`` and ``sacplan::to_host`` inside of ``Copying``.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sacplan.torch_compat.private import storage_key

_LIBRARY = torch.library.Library("sacplan", "FRAGMENT")
_LIBRARY.define("to_device(Tensor shard, bool waits) -> Tensor")
_LIBRARY.define("to_host(Tensor shard, bool waits) -> Tensor")
for _name in ("to_device", "to_host"):
    _LIBRARY.impl(_name, lambda shard, waits: torch.empty_like(shard), "Meta")

TO_DEVICE, TO_HOST = torch.ops.sacplan.to_device.default, torch.ops.sacplan.to_host.default
"""Copies of shards between host and device; ``waits``: the host waits for the copy."""


# By thread, so that what another thread allocates in the meantime does not count as the host's.
class _Making(threading.local):
    for_host = False


_making = _Making()


_on_host: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def is_for_host(storage: Any) -> bool:
    """Whether a storage counts as the host's: it was noted, or ``empty_on_host`` makes it now."""
    return _making.for_host or _on_host.get(storage_key(storage)) is storage


def note_on_host(storage: Any) -> None:
    """Note that a storage is on the host, for a recorder that begins later."""
    _on_host[storage_key(storage)] = storage


def empty_on_host(like: torch.Tensor) -> torch.Tensor:
    """Return memory on the host for a copy of a tensor: pinned for one on a GPU, so that copies can overlap."""
    _making.for_host = True
    try:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)
    finally:
        _making.for_host = False


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device that a model runs on: that of its parameters which a plan does not leave on the host."""
    devices = dict.fromkeys(p.device for p in model.parameters())
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


class Copying(TorchFunctionMode):
    """Inside, for a function of ``fully_shard``, moving a shard is a copy op, and each tensor counts as pinned.

    Args:
        copy: ``TO_DEVICE`` or ``TO_HOST``; None: the device is the host, and nothing moves.
        pinned: whether the host goes on while a copy with ``non_blocking=True`` runs.
    """

    def __init__(self, copy: Any, *, pinned: bool) -> None:
        super().__init__()
        self._copy, self._pinned = copy, pinned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.is_pinned:
            return True
        if func is torch.Tensor.to and "non_blocking" in kwargs and self._copy is not None:
            return self._copy(args[0], not (self._pinned and kwargs["non_blocking"]))
        return func(*args, **kwargs)
