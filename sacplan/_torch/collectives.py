"""Collectives that wait for their result. They are functional ones, ops that dispatch modes see."""

from __future__ import annotations

from typing import Any

import torch

from sacplan._torch.versions import torch_names

with torch_names():
    import torch.distributed._functional_collectives as _collectives  # noqa: F401 (registers the ops)

    _ops: Any = torch.ops._c10d_functional
    _wait = _ops.wait_tensor


def arrived(sent: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a collective and return it."""
    there: torch.Tensor = _wait(sent)
    return there


def all_gather(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along dimension 0."""
    # Collectives send memory as it lies, so a view with gaps or another order is copied first.
    gathered: torch.Tensor = _wait(_ops.all_gather_into_tensor(x.contiguous(), ranks, group))
    return gathered


def reduce_scatter(x: torch.Tensor, reduce: str, ranks: int, group: str) -> torch.Tensor:
    """Reduce over ranks (``"sum"``, ``"max"``, ``"min"``) and return this rank's part along dimension 0."""
    part: torch.Tensor = _wait(_ops.reduce_scatter_tensor(x.contiguous(), reduce, ranks, group))
    return part


def all_reduce(x: torch.Tensor, reduce: str, group: str) -> torch.Tensor:
    """Reduce over ranks (``"sum"``, ``"max"``, ``"min"``) into a new tensor."""
    reduced: torch.Tensor = _wait(_ops.all_reduce(x.contiguous(), reduce, group))
    return reduced


def all_to_all(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Exchange equal parts along dimension 0: part j of rank i becomes part i of rank j."""
    sizes = [x.shape[0] // ranks] * ranks
    exchanged: torch.Tensor = _wait(_ops.all_to_all_single(x.contiguous(), sizes, sizes, group))
    return exchanged
