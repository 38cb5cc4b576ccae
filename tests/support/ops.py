"""What runs: the ops that reach the kernels, by name or whatever a test notes of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from sacplan.device.op_kernels import Call


def name_of(call: Call) -> str:
    """``relu_`` for ``aten::relu_``: without the overload."""
    return str(call.func._schema.name).partition("::")[2]


class Ops(TorchDispatchMode):
    """Ops in the order in which they run; ``noted`` has what a test wants to know of each."""

    def __init__(self, note: Callable[[Call], Any] = name_of) -> None:
        super().__init__()
        self.noted: list[Any] = []
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.noted.append(self.note(Call(func, args, kwargs or {}, out)))
        return out
