"""The arguments of an op as JSON, with tensors by their place among the op's inputs (see ``Op.call``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sacplan._torch.private import is_plain

_NAMED = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def arguments_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """``[args, kwargs]`` of a call."""
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
        for kind, name in _NAMED.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        return {"object": f"{type(value).__module__}.{type(value).__qualname__}"}

    return json.dumps([as_json(tuple(args)), as_json(dict(kwargs))], separators=(",", ":"))
