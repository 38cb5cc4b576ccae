"""Collectives between ranks that return their result when it is there. They are ops that dispatch modes see."""

from __future__ import annotations

from typing import Any

import torch

from sacplan._torch.versions import torch_names

with torch_names():
    import torch.distributed._functional_collectives as _collectives  # noqa: F401 (registers the ops)

    _ops: Any = torch.ops._c10d_functional
    _wait = _ops.wait_tensor


def arrived(sent: torch.Tensor) -> torch.Tensor:
    """What a collective sent, when it is there."""
    there: torch.Tensor = _wait(sent)
    return there


def all_gather(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """What all ranks have, one after the other along dimension 0."""
    gathered: torch.Tensor = _wait(_ops.all_gather_into_tensor(x.contiguous(), ranks, group))
    return gathered


def reduce_scatter(x: torch.Tensor, reduce: str, ranks: int, group: str) -> torch.Tensor:
    """This rank's part along dimension 0 of the sum (``"max"``, ``"min"``) over ranks."""
    part: torch.Tensor = _wait(_ops.reduce_scatter_tensor(x.contiguous(), reduce, ranks, group))
    return part


def all_reduce(x: torch.Tensor, reduce: str, group: str) -> torch.Tensor:
    """The sum (``"max"``, ``"min"``) over ranks, as a new tensor."""
    reduced: torch.Tensor = _wait(_ops.all_reduce(x.contiguous(), reduce, group))
    return reduced


def all_to_all(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """Along dimension 0, part j of rank i becomes part i of rank j; all parts are of one size."""
    sizes = [x.shape[0] // ranks] * ranks
    exchanged: torch.Tensor = _wait(_ops.all_to_all_single(x.contiguous(), sizes, sizes, group))
    return exchanged
