"""Plans of one rank, on real ranks: gloo processes on the CPU, with dropout on, against each rank's allocator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import in_one_place
from sacplan.distributed.ranks.ranks import units_of
from sacplan.techniques.registry import rewritten
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.support.ranks import (
    RankMemory,
    fully_sharded,
    levels,
    optimizer_of,
    patient_collectives,
)
from tests.support.steps import bit_equal, mean_square
from tests.zoo import language_models as models
from tests.zoo.layers import Adapted, HeavyLayers

pytestmark = needs_gloo

UNITS = ["layers.*", ""]
BUDGET = "75%"

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "gpt": models.cross_entropy, "replicas": models.cross_entropy, "mlp": mean_square, "lora": mean_square
}  # fmt: skip


def how_of(name: str) -> dict[str, Any]:
    """What is said to ``fully_shard`` beside the modules; ``name`` begins with that of the model."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    how: dict[str, Any] = {}
    if "offloaded" in name:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # without a GPU nothing can be pinned
    if "mixed" in name:
        how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "shards of two" in name:
        how["reshard_after_forward"] = 2
    return how


def model_and_batch(name: str, rank: int) -> tuple[nn.Module, torch.Tensor]:
    """The same model on every rank, and another batch of the same shape."""
    torch.manual_seed(0)
    gpt = name.startswith(("gpt", "replicas"))
    model = models.LM(layers=2, dim=32, heads=4, vocab=64) if gpt else HeavyLayers(3, 66)
    if name.startswith("lora"):
        # Of each layer only the adapter is trained; the head is trained, too.
        for layer in model.layers:
            layer[0].requires_grad_(False)
            layer[3] = Adapted(layer[3], layer[3].in_features, layer[3].out_features)
    torch.manual_seed(10 + rank)
    return model, models.tokens(4, 32, 64) if gpt else torch.randn(1024, 66)


def gradients_of(model: nn.Module, called: nn.Module, batch: Any, loss_fn: Any) -> list[torch.Tensor]:
    """Losses of two steps and the gradients of the second, gathered from all ranks."""
    optimizer = optimizer_of(list(model.parameters()))
    torch.manual_seed(5 + dist.get_rank())  # each rank drops others
    values = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(called, batch)
        loss.backward()
        values.append(loss.detach())
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        optimizer.step()
    values.extend(grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in grads)
    return values


def kind_of(name: str) -> str:
    """The model that the name begins with."""
    return name.partition(",")[0]


Made = tuple[int, Path, tuple[str, ...], int]
"""The peak of a rank without a plan, the file of its plan, the modules that are sharded, and the peak with the plan.

That one has both memories: what waits on the host is on a CPU in the memory that is measured.
"""


def planned(name: str, ranks: int, directory: Path) -> Made:
    """Plan for one rank, without any process group, and save the plan for the ranks."""
    units = None if name == "replicas" else UNITS
    model, batch = model_and_batch(name, rank=0)
    step: dict[str, Any] = {"loss_fn": LOSSES[kind_of(name)], "optimizer": optimizer_of, "device": "cpu"}
    mesh = {"replicate": 2, "shard": ranks // 2} if "replicas" in name else {"shard": ranks}
    spread = sacplan.DDP(ranks) if units is None else sacplan.FSDP2(mesh, units, **how_of(name))
    profile = sacplan.profile(model, batch, **step, ranks=spread)
    away = "activations away" in name
    plan = sacplan.plan(profile, BUDGET, techniques=("recompute", "offload") if away else None)
    assert plan.units
    assert bool(plan.offloaded) == away
    sharded = () if units is None else units_of(model, units)
    assert units is None or set(plan.units) <= set(sharded) - {""}
    file = directory / f"{name}.json"
    plan.save(file)
    peak_bytes = plan.peak_bytes
    if away:
        peak_bytes = in_one_place(rewritten(profile.program, plan.decisions, profile.spec))
    return profile.peak_bytes, file, sharded, peak_bytes


def check_fully_sharded(name: str, rank: int, made: Made, orders: Sequence[str]) -> None:
    peak_bytes, file, units, planned_bytes = made
    plan = sacplan.Plan.load(file)
    ranks, names = (dist.get_world_size(),), ("replicate", "shard")
    if "replicas" in name:
        ranks = (2, ranks[0] // 2)
    mesh = dist.device_mesh.init_device_mesh("cpu", ranks, mesh_dim_names=names[-len(ranks) :])
    base, batch = model_and_batch(name, rank)
    loss_fn, how = LOSSES[kind_of(name)], how_of(name)
    arguments = how.get("reshard_after_forward"), how.get("mp_policy"), how.get("offload_policy")
    plain = fully_sharded(copy.deepcopy(base), mesh, units, *arguments)
    keys = list(plain.state_dict())
    expected = gradients_of(plain, plain, batch, loss_fn)
    check_peak(plain, batch, loss_fn, peak_bytes, f"{name}, no plan")
    for order in orders:
        what = f"{name}, {order}"
        model = copy.deepcopy(base)
        if order == "plan first":
            sacplan.apply(model, plan)
        fully_sharded(model, mesh, units, *arguments)
        if order == "plan last":
            sacplan.apply(model, plan)
        assert list(model.state_dict()) == keys, what
        assert [n for n, _ in model.named_parameters()] == keys, what
        assert bit_equal(gradients_of(model, model, batch, loss_fn), expected), what
        check_peak(model, batch, loss_fn, planned_bytes, what)


def check_replicated(name: str, rank: int, made: Made) -> None:
    peak_bytes, file, _, planned_bytes = made
    plan = sacplan.Plan.load(file)
    base, batch = model_and_batch(name, rank)
    loss_fn = LOSSES[name]
    found = []
    for expected in (peak_bytes, planned_bytes):
        model = copy.deepcopy(base)
        if found:
            sacplan.apply(model, plan)
        wrapped = nn.parallel.DistributedDataParallel(model)
        found.append(gradients_of(model, wrapped, batch, loss_fn))
        check_peak(wrapped, batch, loss_fn, expected, name, bucket_bytes_of(model))
    assert bit_equal(*found)


def check_peak(
    model: nn.Module, batch: Any, loss_fn: Any, predicted: int, what: str, held_bytes: int = 0
) -> None:
    """The first rank has the largest shards: its peak is the predicted one. No rank has more."""
    with patient_collectives():
        measured = RankMemory(model, batch, loss_fn).peak_bytes(held_bytes)
    assert measured <= predicted, f"{what}: predicted {predicted}, measured {measured}"
    if dist.get_rank() == 0:
        assert measured == predicted, f"{what}: {measured - predicted:+} bytes of {predicted}"


def bucket_bytes_of(model: nn.Module) -> int:
    """What a DistributedDataParallel over a model like this one allocates and holds.

    Without the broadcast of parameters: where a thread of gloo is the last to let go of its buffer, the profiler does
    not see that the buffer ends.
    """
    wrapped: list[nn.Module] = []
    twin = copy.deepcopy(model)
    return levels(lambda: wrapped.append(nn.parallel.DistributedDataParallel(twin, init_sync=False)))[-1]


def on_rank(rank: int, ranks: int, directory: str, made: dict[str, Made]) -> None:
    with gloo(rank, ranks, directory):
        for name, found in made.items():
            if name == "replicas":
                check_replicated(name, rank, found)
            else:
                both = name in ("gpt", "mlp, mixed")
                check_fully_sharded(
                    name, rank, found, ("plan first", "plan last") if both else ("plan first",)
                )


CASES = {
    # Replicas; float32 shards, units that compute in bfloat16, and reductions in float32; frozen layers with low-rank
    # adapters, and shards on the CPU; tensors that wait on the host between forward and backward.
    2: (
        ("replicas", "mlp, mixed", "lora, mixed, offloaded", "gpt, mixed, activations away"),
        (
            "gpt", "mlp", "gpt, mixed", "lora", "lora, mixed", "mlp, mixed, offloaded", "gpt, activations away",
            "mlp, activations away",
        ),
    ),
    # Two groups of two ranks with the same shards; and units that keep shards of two ranks after their forward. Shards
    # of four ranks are padded.
    4: (("gpt, mixed, replicas", "mlp, mixed, shards of two"), ("mlp", "mlp, replicas")),
}  # fmt: skip
"""By how many ranks: what CI runs on them, and what else there is. Processes that are started once learn once."""


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("ranks", "names"),
    [pytest.param(ranks, first, id=f"{ranks} ranks") for ranks, (first, _) in CASES.items()]
    + [
        pytest.param(ranks, others, id=f"{ranks} ranks, others", marks=pytest.mark.exhaustive)
        for ranks, (_, others) in CASES.items()
    ],
)
def test_plans_of_a_rank(ranks: int, names: tuple[str, ...], tmp_path: Path) -> None:
    """Peaks are as predicted with and without a plan, bits and keys the same, in both orders of use."""
    made = {name: planned(name, ranks, tmp_path) for name in names}
    run_ranks(on_rank, (ranks, str(tmp_path), made), ranks)
