"""Collectives that wait for their result. They are functional ones, ops that dispatch modes see."""

from __future__ import annotations

import torch

from sacplan.torch_compat.versions import torch_names

with torch_names():
    import torch.distributed._functional_collectives as _collectives  # noqa: F401 (registers the ops)


def arrived(sent: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a collective and return it."""
    there: torch.Tensor = torch.ops._c10d_functional.wait_tensor(sent)
    return there
