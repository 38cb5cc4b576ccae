"""Collectives that wait for their result. They are functional ones, ops that dispatch modes see."""

from __future__ import annotations

from typing import Any

import torch

from sacplan.torch_compat.versions import torch_names

with torch_names():
    import torch.distributed._functional_collectives as _collectives  # noqa: F401 (registers the ops)

    _ops: Any = torch.ops._c10d_functional
    _wait = _ops.wait_tensor


def arrived(sent: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a collective and return it."""
    there: torch.Tensor = _wait(sent)
    return there
