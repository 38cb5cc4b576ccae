"""The arguments and results of a dispatched op: the tensors in them, and the call as JSON (see ``Op.call``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sacplan.torch_compat.ops import tensors_in
from sacplan.torch_compat.private import is_plain, strided_parts

_NAMED = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def plain_tensors(*values: Any) -> list[torch.Tensor]:
    """Return the tensors that have a storage: plain ones, the local parts of others, the parts of sparse ones."""
    found: list[torch.Tensor] = []
    for t in tensors_in(values):
        if is_plain(t):
            found.append(t)
        else:
            found.extend(part for part in strided_parts(t) if is_plain(part))
    return found


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return ``[args, kwargs]`` of a call as JSON; a plain tensor is its place among the op's inputs."""
    place = 0

    def as_json(value: Any) -> Any:
        nonlocal place
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, torch.Tensor) and is_plain(value):
            place += 1
            return {"tensor": place - 1}
        if isinstance(value, (tuple, list)):
            return [as_json(item) for item in value]
        if isinstance(value, dict):
            return {str(key): as_json(item) for key, item in value.items()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        # Types, layouts and the like can be restored from their names.
        for kind, name in _NAMED.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        # Any other object by its class alone: enough for a message on what a recording does not hold.
        return {"object": f"{type(value).__module__}.{type(value).__qualname__}"}

    return json.dumps([as_json(tuple(args)), as_json(dict(kwargs))], separators=(",", ":"))
