"""Process groups: a device mesh over the ranks that run, and a fake group for ranks that do not.

The fake group is the private ``"fake"`` backend of ``torch.testing._internal.distributed.fake_pg``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sacplan.core.arguments import checked
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec, device_around, resolve_device
from sacplan.errors import PlanError
from sacplan.torch_compat.distributed_modules import on_one_rank
from sacplan.torch_compat.local_tensors import forget_meshes
from sacplan.torch_compat.versions import torch_names


def is_running() -> bool:
    """Whether there is a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def this_rank() -> str:
    """Return in words which rank a step was recorded on."""
    return (
        f"rank {dist.get_rank()} of {dist.get_world_size()}, recorded as PyTorch runs it; what NCCL allocates for "
        "itself is not in the peak"
    )


def device_mesh_of(device: str, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return a device mesh of axes of these sizes and names, over all ranks of the default process group.

    Raises:
        PlanError: there is no group, or it has another number of ranks.
    """
    n = prod(sizes)
    if not is_running():
        raise PlanError(
            f"this plan is for a mesh of {n} ranks, and there is no process group: start {n} processes with "
            f"`torchrun --nproc-per-node {n}`, and call torch.distributed.init_process_group() first."
        )
    if dist.get_world_size() != n:
        raise PlanError(
            f"this plan is for a mesh of {n} ranks, and {dist.get_world_size()} run: start {n}, or plan for a mesh of "
            f"{dist.get_world_size()}."
        )
    return init_device_mesh(device, tuple(sizes), mesh_dim_names=tuple(names))


_MOST_RANKS = 2**20  # a mesh lists all of its ranks


@checked(PlanError, "device")
@contextmanager
def ranks(
    world_size: int, rank: int = 0, device: str | DeviceSpec | torch.device = DEFAULT_DEVICE
) -> Iterator[None]:
    """Let this process be one of many ranks, without the others.

        with sacplan.ranks(64, device="h100"):
            mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("dp", "tp"))
            for layer in model.layers:
                parallelize_module(layer, mesh["tp"], styles)
                fully_shard(layer, mesh=mesh["dp"])
            profile = sacplan.profile(model, batch, loss_fn, optimizer)

    Inside, code that spreads a model over ranks runs unchanged, and ``profile`` records this rank's step: the model
    is already sharded, and the batch is the one of this rank. The environment has the variables of ``torchrun``.
    Nothing is sent, so that values are not those of a real step: make the model on the meta device. Meshes are of CPUs
    here, whatever kind of device they are asked for.

    Args:
        world_size: the number of all ranks.
        rank: that of this process. If ranks differ (stages of a pipeline, shards of uneven size), record each, and take
            the one with the largest peak.
        device: what a rank runs on, the default of ``profile`` inside.

    Raises:
        PlanError: there is a process group already, or no such rank.
        DeviceError: an unknown device.
    """
    spec = resolve_device(device)
    if is_running():
        raise PlanError(
            "sacplan.ranks is for a process without ranks, and torch.distributed is initialized here: leave it out. A "
            "model that is sharded in a running job is profiled as it is."
        )
    if not 0 <= rank < world_size <= _MOST_RANKS:
        raise PlanError(
            f"rank {rank} of {world_size} ranks: ranks are numbered from 0 to world_size - 1, below {_MOST_RANKS}."
        )
    token = device_around.set(spec)
    node = min(world_size, spec.ranks_per_node)
    launched = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % node, "LOCAL_WORLD_SIZE": node}
    before = dict(os.environ)
    os.environ.update({name: str(number) for name, number in launched.items()})
    try:
        with pretended_ranks(world_size, rank):
            yield
    finally:
        for name in launched:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in launched if name in before})
        device_around.reset(token)


@contextmanager
def pretended_ranks(n: int, rank: int = 0) -> Iterator[None]:
    """Run inside of a fake process group, as one of its ranks, with meshes of CPUs. Nothing is sent.

    A process group that exists is used instead.

    Raises:
        PlanError: more ranks than a mesh can list.
    """
    if n > _MOST_RANKS:
        raise PlanError(f"{n} ranks: a mesh lists all of them, so that {_MOST_RANKS:,} are the most.")
    # A group that exists is used, and must not be destroyed.
    with on_one_rank():
        if is_running():
            yield
            return
        with torch_names():
            from torch.testing._internal.distributed.fake_pg import FakeStore

        forget_meshes()
        dist.init_process_group("fake", rank=rank, world_size=n, store=FakeStore())
        try:
            yield
        finally:
            dist.destroy_process_group()
            forget_meshes()
