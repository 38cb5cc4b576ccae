"""Which storages are alive, and when each dies."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """Weak references to every storage that an op makes; those of the model's own tensors do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.refs: list[weakref.ref[Any]] = []
        own = [
            *model.parameters(),
            *model.buffers(),
            *(p.grad for p in model.parameters() if p.grad is not None),
        ]
        self.own = {t.untyped_storage()._cdata for t in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.refs.append(weakref.ref(t.untyped_storage()))
        return out

    @property
    def alive(self) -> int:
        return len({s._cdata for r in self.refs if (s := r()) is not None} - self.own)


@contextlib.contextmanager
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
