"""What makes a DTensor: its description, and how PyTorch names the parts of a tensor that a rank has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sacplan._torch.versions import torch_names

with torch_names():
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard


def dtensor_spec(
    device_mesh: Any, placements: Sequence[Any], shape: Any, stride: Any, dtype: torch.dtype
) -> DTensorSpec:
    """The description of a DTensor with these global shape and strides."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta)


def shard(dim: int, factor: int) -> Any:
    """A cut dimension; ``factor``: pieces of which each rank has a part."""
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def replicate() -> Any:
    """Whole on each rank."""
    return Replicate()


def partial(reduce: str) -> Any:
    """A summand on each rank."""
    return Partial(reduce)


def placement_parts(placement: Any) -> tuple[str, int, int, str]:
    """(kind, dim, factor, reduce) of a DTensor's placement: ``"R"``, ``"S"`` or ``"P"``; as they are made above.

    Raises:
        TypeError: it is none of them.
    """
    if isinstance(placement, Replicate):
        return ("R", -1, 1, "")
    if isinstance(placement, _StridedShard):
        return ("S", placement.dim, int(placement.split_factor), "")
    if isinstance(placement, Shard):
        return ("S", placement.dim, 1, "")
    if type(placement) is Partial:
        return ("P", -1, 1, placement.reduce_op)
    raise TypeError(f"placement {placement!r} of a DTensor")


def checkpoint_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    """One rectangular piece of a tensor, for ``torch.distributed.checkpoint``."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def checkpoint_write_item(fqn: str, chunk: ChunkStorageMetadata, piece: torch.Tensor, size: Any) -> WriteItem:
    """The piece of a tensor that a rank saves."""
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), torch.Size(size))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def new_dtensor(kind: type, local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> Any:
    """A DTensor, or one of a subclass."""
    return torch.Tensor._dtensor__new__(kind, local, spec, requires_grad=requires_grad)


__all__ = ["DTensor"]
