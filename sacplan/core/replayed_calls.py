"""Make the calls of recorded ops again, from their arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from sacplan.core.elements import Tensor


class Opaque(Exception):
    """Raised for an argument that JSON has no form for, such as a generator."""


def call_with(arguments: str, tensors: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of ``Op.arguments``, with these tensors in their places.

    Devices become the CPU, as in a fake step.

    Raises:
        Opaque: an argument cannot be made again.
    """
    args, kwargs = json.loads(arguments)
    return _decoded(args, tensors), {name: _decoded(value, tensors) for name, value in kwargs.items()}


def _decoded(value: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    # A tag of ``arguments_of`` is an object with one key. Any other object is a mapping that the op itself was given.
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "tensor":
            return tensors[inner]
        if kind in ("dtype", "layout", "memory_format"):
            return getattr(torch, inner)
        if kind == "device":
            return torch.device("cpu")
        if kind == "complex":
            return complex(*inner)
        if kind == "object":
            raise Opaque(f"one of its arguments is a {inner}, which a recording does not hold")
    return {key: _decoded(item, tensors) for key, item in value.items()}


def dtype_of(tensor: Tensor) -> torch.dtype:
    """Return the type of a recorded tensor."""
    # For programs from files, ``ProfileFile`` has made sure that torch has the type.
    found: torch.dtype = getattr(torch, tensor.dtype)
    return found
