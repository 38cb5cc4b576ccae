"""Recorded ops as calls that can be made again: the overload by its name, the arguments from JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sacplan._program.program import Op

_NAMED: dict[str, Callable[[str], Any]] = {
    "dtype": lambda name: getattr(torch, name),
    "device": lambda name: torch.device("cpu" if name.startswith(("meta", "cuda")) else name),
    "layout": lambda name: getattr(torch, name),
    "memory_format": lambda name: getattr(torch, name),
}


@functools.cache
def overload(name: str) -> torch._ops.OpOverload | None:
    """The op of a name such as ``"aten.mm.default"``; None where this process has none."""
    namespace, _, rest = name.partition(".")
    packet, _, overload_name = rest.rpartition(".")
    if not packet:
        return None
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload_name, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def arguments(op: Op, tensor: Callable[[int], Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a recorded op.

    Args:
        op: the op.
        tensor: from a tensor of the program to what stands for it.

    Raises:
        ValueError: an argument that a recording does not hold, such as a generator.
    """

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(each) for each in item]
        if not isinstance(item, dict):
            return item
        if len(item) == 1:
            ((key, content),) = item.items()
            if key == "tensor":
                return tensor(op.inputs[content])
            if key in _NAMED:
                return _NAMED[key](content)
            if key == "complex":
                return complex(*content)
            if key == "object":
                raise ValueError(f"an argument of {op.name} is a {content}, which a recording does not hold")
        return {key: value(each) for key, each in item.items()}

    args, kwargs = op.call
    return value(args), {name: value(each) for name, each in kwargs.items()}
