"""``CPUOffloadPolicy``: storages on the host and on the GPU, and the time of copies between them.

No GPU is needed: a CPU stands in for one, on which ``Tensor.to`` copies whatever fully_shard moves between host and
device. Of both memories together the allocator's peak is then the predicted one, to the byte, if the storages that are
on the host count what they take there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

import sacplan
from sacplan._device.devices import resolve_device
from sacplan._program.program import Patch, Phase, StorageKind
from sacplan._ranks.fully_shard import _FullyShardRewriter
from sacplan._ranks.options import CPUOffload, FullyShardOptions
from sacplan._ranks.shards import owners, parameters_of, resolve_units
from sacplan.errors import TraceError
from tests.support.ranks import RANKS, RankMemory, fully_sharded
from tests.support.steps import mean_square
from tests.zoo.layers import HeavyLayers

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

UNITS = ["layers.*", ""]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GPU = dataclasses.replace(
    resolve_device("h100"), name="exact", allocation_round_bytes=1, matmul_workspace_bytes=0
)
"""Copies of a GPU, and an allocator that does not round: neither does that of a CPU."""


def model() -> nn.Module:
    """Eight ranks divide all dimensions: a CPU has no kernel for padding."""
    layers = HeavyLayers(dropout=0.0)
    layers.head = nn.Linear(64, 16)
    return layers


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, foreach=False)


def _copies(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to``, which copies where fully_shard moves a tensor between host and device."""
    # Not a mode: the backward pass runs without it.
    return tensor.clone() if "non_blocking" in kwargs else _TO(tensor, *args, **kwargs)


_TO = torch.Tensor.to


@pytest.mark.parametrize("policy", [None, MIXED, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)])
@pytest.mark.parametrize("reshard", [None, 2])
@pytest.mark.parametrize("shape", [None, (2, 4)])
def test_both_memories_together(
    policy: Any, reshard: int | None, shape: tuple[int, int] | None, mesh: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tests.support.ranks.optimizer_of", sgd)
    batch, over = torch.randn(16, 64), RANKS
    if shape is not None:
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        over = mesh
    ranks = sacplan.FSDP2(over, UNITS, policy, reshard, CPUOffloadPolicy())
    profile = sacplan.profile(model(), batch, mean_square, sgd, "cpu", ranks=ranks)
    whole, options = profile.recorded, profile.ranks.options
    units = resolve_units(UNITS, whole)
    owned = owners(
        parameters_of(whole, profile.fingerprint.local_parameters), units, whole, options.mp_policy
    )
    rewriter = _FullyShardRewriter(whole, GPU, RANKS, units, owned, options)
    rank = whole.with_(rewriter.patch())
    assert rewriter.host is not None
    both = rank.with_(Patch(events={}, resized=rewriter.host.n_bytes))
    sharded = fully_sharded(model(), mesh, units, reshard, policy, CPUOffloadPolicy(pin_memory=False))
    monkeypatch.setattr(torch.Tensor, "to", _copies)
    measured = RankMemory(sharded, batch, mean_square).peak_bytes()
    assert both.footprint.peak_bytes == measured


def spread(offload: Any = None, optimizer: Any = torch.optim.AdamW, **options: Any) -> sacplan.Profile:
    ranks = sacplan.FSDP2(RANKS, UNITS, offload_policy=offload, **options)
    return sacplan.profile(model(), torch.randn(16, 64), mean_square, optimizer, "h100", ranks=ranks)


def test_the_gpu_keeps_no_shards() -> None:
    profile = spread(CPUOffloadPolicy(), mp_policy=MIXED)
    program = profile.program
    kinds = (StorageKind.PARAMETER, StorageKind.OPTIMIZER_STATE)
    there = [s for s in program.initial if program.storage_kinds[s] in kinds]
    assert there
    assert not any(program.storage_bytes[s] for s in there)
    # In the optimizer's step only what is no shard is left: the loss, the batch, and the workspaces of cuBLAS.
    last = [m for m in program.liveness.moments if m.op >= 0 and program.ops[m.op].phase == Phase.OPTIMIZER]
    assert last
    assert {m.live_bytes - m.by_kind[StorageKind.OTHER] for m in last} == {512}
    assert profile.peak_bytes < spread(mp_policy=MIXED).peak_bytes


@pytest.mark.parametrize("pinned", [True, False])
def test_bytes_of_the_host(pinned: bool) -> None:
    """By hand: pinned memory comes in powers of two, the optimizer's state is not pinned."""
    shards = [p.numel() // RANKS * 4 for p in model().parameters()]
    taken = [2 ** (n - 1).bit_length() for n in shards] if pinned else shards
    steps = 4 * len(shards)  # a counter in float32 for each parameter
    found = spread(CPUOffloadPolicy(pin_memory=pinned)).host_bytes
    assert found - 2 * sum(taken) - 2 * sum(shards) in (0, steps)
    assert spread().host_bytes == 0
    assert spread(CPUOffloadPolicy(), None).host_bytes == 2 * sum(2 ** (n - 1).bit_length() for n in shards)


def test_copies_of_pinned_memory_run_behind_computation() -> None:
    plain, pinned, waits = (
        spread(offload, None).step_ms
        for offload in (None, CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False))
    )
    assert plain < pinned < waits


def test_a_plan_may_ask_for_it() -> None:
    profile = spread()
    plan = sacplan.plan(profile, "100%", ranks=sacplan.FSDP2(RANKS, UNITS, offload_policy=CPUOffloadPolicy()))
    assert plan.ranks == spread(CPUOffloadPolicy()).ranks
    assert "offload_policy=CPUOffloadPolicy()" in str(plan)
    moves_nothing = sacplan.FSDP2(RANKS, UNITS, offload_policy=OffloadPolicy())
    back = sacplan.plan(spread(CPUOffloadPolicy()), "100%", ranks=moves_nothing)
    assert back.peak_bytes == profile.peak_bytes


def test_policies() -> None:
    assert FullyShardOptions.of(offload_policy=OffloadPolicy()) == FullyShardOptions()
    assert CPUOffload.of(CPUOffloadPolicy(pin_memory=False)) == CPUOffload(False)
    with pytest.raises(
        TraceError, match=r"offload_policy is True; give torch.distributed.fsdp.CPUOffloadPolicy"
    ):
        spread(True)
