"""Process groups: a device mesh over the ranks that run, and a fake group for ranks that do not.

The latter is the private ``"fake"`` backend of ``torch.testing._internal.distributed.fake_pg``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sacplan._torch.versions import torch_names
from sacplan.errors import PlanError


def is_running() -> bool:
    """Whether there is a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def check_ranks(n: int) -> None:
    """Check that there is a default process group of so many ranks."""
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


def device_mesh_of(device: str, ranks: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """Return a device mesh over all ranks of the default process group.

    Raises:
        PlanError: there is no group, or it has another number of ranks.
    """
    check_ranks(prod(ranks))
    return init_device_mesh(device, tuple(ranks), mesh_dim_names=tuple(names))


@contextmanager
def pretended_ranks(n: int) -> Iterator[None]:
    """Run inside of a fake process group whose first rank is this process. Nothing is sent.

    One that is there is used as it is.
    """
    # The group that is there is used, and must not be destroyed.
    if is_running():
        yield
        return
    with torch_names():
        from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
