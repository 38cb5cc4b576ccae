"""DTensors: their specs and placements, and the metadata of a rank's pieces in distributed checkpoints."""

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
    """Return the ``DTensorSpec`` of these global shape and strides."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta)


def shard(dim: int, factor: int) -> Any:
    """Return the placement that shards ``dim``; with a ``factor``, each of that many pieces is sharded by itself."""
    return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)


def replicate() -> Any:
    """Return the placement of a tensor that is whole on each rank."""
    return Replicate()


def partial(reduce: str) -> Any:
    """Return the placement of a tensor of which each rank has a term, to be reduced by ``reduce``."""
    return Partial(reduce)


def placement_parts(placement: Any) -> tuple[str, int, int, str]:
    """Return (kind, dim, factor, reduce) of a placement, with kind ``"R"``, ``"S"`` or ``"P"``.

    Raises:
        TypeError: it is none of them.
    """
    if isinstance(placement, Replicate):
        return ("R", -1, 1, "")
    if isinstance(placement, _StridedShard):
        return ("S", placement.dim, int(placement.split_factor), "")
    if isinstance(placement, Shard):
        return ("S", placement.dim, 1, "")
    # Subclasses, such as ``_MaskPartial``, have state beside the name of their reduction.
    if type(placement) is Partial:
        return ("P", -1, 1, placement.reduce_op)
    raise TypeError(f"placement {placement!r} of a DTensor")


def checkpoint_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    """Describe one rectangular piece of a tensor for ``torch.distributed.checkpoint``."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def checkpoint_write_item(fqn: str, chunk: ChunkStorageMetadata, piece: torch.Tensor, size: Any) -> WriteItem:
    """Describe the piece of a tensor that a rank saves."""
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), torch.Size(size))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def new_dtensor(kind: type, local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> Any:
    """Make a DTensor of a local tensor, or a tensor of a subclass, without checking the spec."""
    return torch.Tensor._dtensor__new__(kind, local, spec, requires_grad=requires_grad)


__all__ = ["DTensor"]
