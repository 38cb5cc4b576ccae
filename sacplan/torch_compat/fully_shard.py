"""The private functions of FSDP2 that a recording calls (torch 2.6 to 2.13)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sacplan.torch_compat.versions import torch_names


def apply_to_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return a nested value with ``fn`` applied to its tensors, in the containers that FSDP2 looks into."""
    with torch_names():
        from torch.distributed.utils import _apply_to_tensors  # fails without torch.distributed

    return _apply_to_tensors(fn, value)
