"""``CPUOffloadPolicy`` as people write it, recorded in ``sacplan.ranks``: what is on the device, and what on the host.

No GPU is needed to measure it: a CPU stands in for one, on which ``Tensor.to`` copies whatever ``fully_shard`` moves
between host and device. What is allocated for a copy to the host is left out. So is oneDNN, whose products of half
types take workspaces on CPUs that have instructions for them: they are the CPU's, and no part of a GPU's step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import sacplan
from sacplan.core.program import Phase
from sacplan.device.devices import resolve_device
from tests.support.ranks import RANKS, fully_sharded, levels
from tests.support.slow import slow_after
from tests.support.steps import mean_square
from tests.zoo.layers import HeavyLayers

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
"""Reduced in the same type: a CPU has no kernel that casts what it copies into a reduce-scatter."""

REDUCED = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)

GPU = dataclasses.replace(
    resolve_device("h100"), name="exact", allocation_round_bytes=1, matmul_workspace_bytes=0
)
"""Copies of a GPU, and an allocator that does not round: neither does that of a CPU."""


def sharded(
    offload: Any, policy: Any = None, reshard: Any = None, shape: tuple[int, ...] = (RANKS,)
) -> nn.Module:
    """Eight ranks divide all dimensions: a CPU has no kernel for padding."""
    model = HeavyLayers(dropout=0.0)
    model.head = nn.Linear(64, 16)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    units = ("", *(f"layers.{i}" for i in range(len(model.layers))))
    return fully_sharded(model, mesh, units, reshard, policy, offload)


def recorded(
    offload: Any, optimizer: Any = torch.optim.AdamW, device: Any = GPU, rows: int = 16, **options: Any
) -> sacplan.Profile:
    with sacplan.ranks(RANKS, device=device):
        steps = options.pop("accumulation_steps", None)
        return sacplan.profile(
            sharded(offload, **options),
            torch.randn(rows, 64),
            mean_square,
            optimizer,
            accumulation_steps=steps,
        )


def _copies(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if "non_blocking" not in kwargs:
        return _TO(tensor, *args, **kwargs)
    if tensor.untyped_storage() in _on_host:
        return tensor.clone()
    with torch.profiler.record_function("gloo: the host's memory is not counted"):
        return tensor.clone()


_TO = torch.Tensor.to


class _Shards:
    """The storages of shards."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()

    def __contains__(self, storage: Any) -> bool:
        return storage.data_ptr() in self.addresses


_on_host = _Shards()


@pytest.mark.parametrize(
    ("policy", "reshard", "shape"),
    slow_after(
        2,
        [
            (None, 2, (2, 4)),
            (MIXED, None, (8,)),
            *itertools.product((None, MIXED, REDUCED), (None, 2), ((8,), (2, 4))),
        ],
    ),
)
def test_the_peak_of_the_device(policy: Any, reshard: Any, shape: tuple[int, ...], monkeypatch: Any) -> None:
    predicted = recorded(CPUOffloadPolicy(), policy=policy, reshard=reshard, shape=shape).peak_bytes
    batch = torch.randn(16, 64)
    with sacplan.ranks(RANKS), torch.backends.mkldnn.flags(enabled=False):
        model = sharded(CPUOffloadPolicy(pin_memory=False), policy, reshard, shape)
        optimizer = torch.optim.AdamW(model.parameters())
        _on_host.addresses = {p._local_tensor.untyped_storage().data_ptr() for p in model.parameters()}  # type: ignore[attr-defined]
        monkeypatch.setattr(torch.Tensor, "to", _copies)
        for _ in range(3):
            optimizer.zero_grad()
            measured = batch.nbytes + max(levels(lambda: mean_square(model, batch).backward()))
            optimizer.step()
    assert predicted == measured


@pytest.mark.parametrize("pinned", [True, False])
def test_bytes_of_the_host(pinned: bool) -> None:
    """By hand: pinned memory comes in powers of two, the optimizer's state is not pinned, and has a counter."""
    with sacplan.ranks(RANKS):
        shards = [p._local_tensor.nbytes for p in sharded(None).parameters()]  # type: ignore[attr-defined]
    taken = [2 ** (n - 1).bit_length() for n in shards] if pinned else shards
    policy = CPUOffloadPolicy(pin_memory=pinned)
    assert recorded(policy).host_bytes == 2 * sum(taken) + 2 * sum(shards) + 4 * len(shards)
    assert recorded(policy, None).host_bytes == 2 * sum(taken)
    assert recorded(None).host_bytes == 0


def test_the_device_keeps_no_shards() -> None:
    """In the optimizer's step only the loss and the batch are left, with gradients of earlier micro-steps too."""
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    for steps in (1, 2):
        program = recorded(CPUOffloadPolicy(), momentum, accumulation_steps=steps).program
        moments = [m for m in program.liveness.moments if m.op >= 0]
        last = [m.live_bytes for m in moments if program.ops[m.op].phase == Phase.OPTIMIZER]
        assert set(last) == {4 + 16 * 64 * 4}


def test_a_plan_is_verified() -> None:
    plan = sacplan.plan(recorded(CPUOffloadPolicy(), device="h100"), "smallest")
    assert plan.units
    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert plan.host_bytes == 0
    with pytest.raises(sacplan.InfeasibleBudget):
        sacplan.plan(recorded(CPUOffloadPolicy(), device="h100"), "10%")
    with sacplan.ranks(RANKS, device="h100"):
        seen = sacplan.verify(
            sharded(CPUOffloadPolicy()), torch.randn(16, 64), plan, mean_square, torch.optim.AdamW
        )
    assert seen.peak_bytes == plan.peak_bytes


def test_copies_of_pinned_memory_run_behind_computation() -> None:
    """In a step that is large enough not to wait for the CPU."""
    plain, pinned, waits = (
        recorded(offload, None, "h100", rows=2**17).step_ms
        for offload in (None, CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False))
    )
    assert plain < pinned < waits


def test_a_cpu_has_one_memory() -> None:
    """There nothing is copied, and nothing pinned."""
    pinned, plain = recorded(CPUOffloadPolicy(), device="cpu"), recorded(None, device="cpu")
    assert pinned.peak_bytes == plain.peak_bytes
