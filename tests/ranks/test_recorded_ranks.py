"""Ranks as people write them, recorded in ``sacplan.ranks``: against the allocator of real gloo ranks, to the byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import sacplan
from sacplan.core.program import Phase
from sacplan.device.devices import resolve_device
from sacplan.device.links import Link
from sacplan.errors import PlanError, TraceError
from tests.support.processes import gloo, needs_gloo, run_ranks
from tests.support.ranks import OPTIMIZER, RankMemory, levels, patient_collectives
from tests.support.steps import bit_equal
from tests.zoo.language_models import cross_entropy as loss_fn
from tests.zoo.parallel import SplitLM, parallel_lm

pytestmark = needs_gloo


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return SplitLM(layers=2, dim=32, vocab=64)


def tokens(rank: int = 0) -> torch.Tensor:
    return torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(rank))


def in_parts() -> AbstractContextManager[None]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def fully_sharded(model: nn.Module, mesh: Any, **how: Any) -> nn.Module:
    """As torchtitan does it: each layer, the last one kept gathered, and the rest."""
    from torch.distributed.fsdp import fully_shard

    *layers, last = model.layers  # type: ignore[misc]
    for layer in layers:
        fully_shard(layer, mesh=mesh, **how)
    fully_shard(last, mesh=mesh, **{**how, "reshard_after_forward": False})
    return fully_shard(model, mesh=mesh, **how)


def uneven(model: nn.Module, mesh: Any) -> nn.Module:
    """Layers with 65 rows, of which two ranks have 33 and 32."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.up, layer.down = nn.Linear(32, 65), nn.Linear(65, 32)
    return fully_sharded(model, mesh)


def compiled_layers(model: nn.Module, mesh: Any) -> nn.Module:
    """As torchtitan does it: each layer is compiled by itself, and sharded."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager", fullgraph=True)
    return fully_sharded(model, mesh)


def in_bfloat16(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return fully_sharded(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def replicas(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def replicas_in_place(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


def gradients_in_buckets(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def in_one_graph(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, static_graph=True)


def with_unused(model: nn.Module, mesh: Any) -> nn.Module:
    """A layer that no step uses."""
    model.never = nn.Linear(40, 50)
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def compressed(model: nn.Module, mesh: Any) -> nn.Module:
    """Reduced in float16, in one bucket: gloo's threads hold what they reduce for a while, as NCCL's streams do not."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


HOOK_STATES: list[Any] = []
"""Of ``low_rank``; the last one is that of the model that runs."""


def low_rank(model: nn.Module, mesh: Any) -> nn.Module:
    """Gradients as products of thin matrices: from the third step on, the hook keeps these, and what they lack."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    wrapped = nn.parallel.DistributedDataParallel(model)
    HOOK_STATES.append(PowerSGDState(None, start_powerSGD_iter=2))
    wrapped.register_comm_hook(HOOK_STATES[-1], powerSGD_hook)
    return wrapped


def kept_by_hook() -> int:
    state = HOOK_STATES[-1]
    kept = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
    return sum(t.nbytes for tensors in kept for t in tensors.values())


class Exchanged(nn.Module):
    """A layer that runs on what all ranks send each other, as experts do that are spread over ranks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

        group: Any = dist.group.WORLD
        return exchange(self.layer(exchange(x, None, None, group)), None, None, group)


def exchanged(model: nn.Module, mesh: Any) -> nn.Module:
    model.layers[0] = Exchanged(model.layers[0])  # type: ignore[index,operator]
    return model


def over_both_axes(model: nn.Module, mesh: Any) -> nn.Module:
    """Tensors over the last axis, shards over the others: the first has replicas if there are three."""
    parallel_lm(model, mesh["tp"])
    return fully_sharded(model, mesh["replicate", "shard"] if mesh.ndim == 3 else mesh["dp"])


@dataclass(frozen=True)
class Case:
    """How a model is spread, and what each rank runs around a step."""

    spread: Callable[[nn.Module, Any], nn.Module]
    mesh: dict[str, int] = field(default_factory=lambda: {"dp": 2})
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    same_batch: bool = False  # on all ranks
    buckets: bool = False  # there are buckets of gradients between steps, which no tensor of Python refers to
    marks: int = 0  # bytes a parameter that say which are used, in C++ too
    kept: Callable[[], int] | None = None  # bytes that a hook keeps, once some steps have run

    def made(self) -> tuple[nn.Module, Any]:
        names = tuple(self.mesh)
        mesh = dist.device_mesh.init_device_mesh("cpu", tuple(self.mesh.values()), mesh_dim_names=names)
        model = language_model()
        return model, self.spread(model, mesh)


TENSORS = {"mesh": {"tp": 2}, "around": in_parts, "same_batch": True}

CASES = {
    "fully_shard": Case(fully_sharded),
    "one rank": Case(fully_sharded, {"dp": 1}),
    "compiled": Case(compiled_layers),
    "bfloat16": Case(in_bfloat16),
    "DDP": Case(replicas, buckets=True),
    "replicate": Case(replicas_in_place, buckets=True),
    "gradients in buckets": Case(gradients_in_buckets, buckets=True),
    "static graph": Case(
        in_one_graph, buckets=True, marks=8, kept=lambda: 0
    ),  # its buckets are made again late
    "unused": Case(with_unused, buckets=True, marks=8),
    "compressed": Case(compressed, buckets=True),
    "low rank": Case(low_rank, buckets=True, kept=kept_by_hook),
    "experts": Case(exchanged),
    "tensors": Case(lambda m, mesh: parallel_lm(m, mesh, head=False), {"tp": 2}, same_batch=True),
    "tensors and loss": Case(parallel_lm, **TENSORS),  # type: ignore[arg-type]
    "replicas of shards": Case(fully_sharded, {"replicate": 2, "shard": 2}),
    "shards of tensors": Case(over_both_axes, {"dp": 2, "tp": 2}, in_parts, same_batch=True),
    "replicas of shards of tensors": Case(
        over_both_axes, {"replicate": 2, "shard": 2, "tp": 2}, in_parts, same_batch=True
    ),
}


def profiled(called: nn.Module, rank: int = 0) -> sacplan.Profile:
    return sacplan.profile(called, tokens(rank), loss_fn, OPTIMIZER)


def values_of(model: nn.Module, called: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    loss = loss_fn(called, batch)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    values = [getattr(t, "_local_tensor", t).clone() for t in found]
    model.zero_grad(set_to_none=True)
    return values


def check(name: str, directory: Path) -> None:
    case, rank = CASES[name], dist.get_rank()
    batch = tokens(0 if case.same_batch else rank)
    plan = sacplan.Plan.load(directory / f"{name}.json")
    expected: list[torch.Tensor] = []
    for predicted in (plan.baseline_peak_bytes, plan.peak_bytes):
        model, called = case.made()
        held = sum(p.nbytes + case.marks for p in model.parameters()) if case.buckets else 0
        if predicted == plan.peak_bytes:
            handle = sacplan.apply(model, plan)
        found = values_of(model, called, batch)
        memory = RankMemory(called, batch, loss_fn)
        if case.kept is not None:
            for _ in range(3):
                memory.step()
            held += case.kept()
        with patient_collectives():
            measured = memory.peak_bytes(held)
        assert measured == predicted, f"{name}: {measured - predicted:+} bytes of {predicted}"
        if not expected:
            expected = found
            # A model in a running job is profiled as it is, by one rank alone.
            if rank == 0 and name in ("fully_shard", "shards of tensors"):
                assert sacplan.profile(called, batch, loss_fn, OPTIMIZER, "cpu").peak_bytes == predicted
        else:
            assert bit_equal(found, expected), name
            assert not handle.differences


def on_rank(rank: int, ranks: int, names: Sequence[str], directory: str) -> None:
    with gloo(rank, ranks, directory):
        for name in names:
            with CASES[name].around():
                check(name, Path(directory))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ("fully_shard", "DDP", "tensors and loss", "unused", "compressed", "low rank", "experts")),
        (1, ("one rank",)),
        (2, ("compiled",)),
        pytest.param(
            2,
            ("static graph", "bfloat16", "replicate", "gradients in buckets", "tensors"),
            marks=pytest.mark.exhaustive,
        ),
        (4, ("replicas of shards", "shards of tensors")),
        pytest.param(8, ("replicas of shards of tensors",), marks=pytest.mark.exhaustive),
    ],
)
def test_recorded_ranks_are_the_real_ones(ranks: int, names: Sequence[str], tmp_path: Path) -> None:
    for name in names:
        with sacplan.ranks(ranks, device="cpu"), CASES[name].around():
            _, called = CASES[name].made()
            plan = sacplan.plan(profiled(called), "85%", "greedy")
            assert plan.units, name
            if name == names[0]:
                seen = sacplan.verify(called, tokens(), plan, loss_fn, OPTIMIZER)
                assert seen.peak_bytes == plan.peak_bytes
            plan.save(tmp_path / f"{name}.json")
    run_ranks(on_rank, (ranks, names, str(tmp_path)), ranks)


def unchanged(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch reads annotations, and wants classes
    found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    found.set_result(bucket.buffer())
    return found


@pytest.mark.parametrize("name", ["DDP", "static graph"])
def test_buckets_that_are_made_again_take_the_place_of_those_before(name: str) -> None:
    """In the second step, with a static graph in the third: no step up to the fifth needs more than a later one.

    Allocations of PyTorch's own reducer, whose first buckets are made and freed while the profiler looks. A hook sends
    nothing, so that no thread holds a bucket for a while.
    """
    with sacplan.ranks(2, device="cpu"):
        predicted, model, batch = profiled(CASES[name].made()[1]).peak_bytes, language_model(), tokens()
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), batch))

        def steps() -> None:
            called = CASES[name].spread(model, None)
            called.register_comm_hook(None, unchanged)
            memory = RankMemory(called, batch, loss_fn)
            for _ in range(5):
                memory.optimizer.zero_grad(set_to_none=True)
                memory.step()

        assert held + max(levels(steps)) == predicted


def on_uneven_rank(rank: int, directory: str, predicted: Sequence[int]) -> None:
    with gloo(rank, 2, directory):
        _, called = Case(uneven).made()
        with patient_collectives():
            assert RankMemory(called, tokens(rank), loss_fn).peak_bytes() == predicted[rank]


@pytest.mark.slow
def test_of_uneven_shards_the_first_rank_has_the_most(tmp_path: Path) -> None:
    predicted = []
    for rank in (0, 1):
        with sacplan.ranks(2, rank, "cpu"):
            predicted.append(profiled(Case(uneven).made()[1], rank).peak_bytes)
    assert predicted[0] > predicted[1]
    run_ranks(on_uneven_rank, (str(tmp_path), predicted), 2)


def test_one_rank_runs_as_much_again_as_each_of_two() -> None:
    """``fully_shard`` copies its parameters there, and gathers nothing."""
    found = []
    for ranks in (1, 2):
        with sacplan.ranks(ranks, device="cpu"):
            _, called = Case(fully_sharded, {"dp": ranks}).made()
            found.append(sacplan.policy("full", profile=profiled(called), layers="layers.*").decisions)
    assert found[0] == found[1]
    assert any("mm" in site.op for decision in found[0] for site in decision.sites)


# --- in one process: what the recording says -------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "defaults": {},
    "kept after forward": {"reshard_after_forward": False},
    "shards of four": {"reshard_after_forward": 4},
}


@pytest.mark.parametrize(
    "name",
    [
        "defaults",
        *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for n in list(OPTIONS)[1:]),
    ],
)
def test_a_recorded_rank_is_planned_as_one_that_is_worked_out(name: str) -> None:
    """Two roads to the same step: from the whole step, and from a model on the meta device that is sharded."""
    from torch.distributed.fsdp import fully_shard

    units = ["layers.*", ""]
    whole = sacplan.profile(language_model(), tokens(), loss_fn, OPTIMIZER, "cpu")
    expected = sacplan.plan(whole, "85%", ranks=sacplan.FSDP2(8, units, **OPTIONS[name]))
    with sacplan.ranks(8, device="cpu"):
        mesh = dist.device_mesh.init_device_mesh("cuda", (8,))
        model = language_model().to("meta")
        for unit in (*model.layers, model):  # type: ignore[misc]
            fully_shard(unit, mesh=mesh, **OPTIONS[name])
        profile = profiled(model)
    found = sacplan.plan(profile, "85%")
    assert profile.peak_bytes == expected.baseline_peak_bytes
    for plan in (found, expected):
        seen = profile.footprint(plan)
        assert seen.peak_bytes == plan.peak_bytes == whole.on_ranks(expected.ranks).footprint(plan).peak_bytes
        assert plan.recompute_ms < 1.2 * expected.recompute_ms
    assert "rank 0 of 8, recorded as PyTorch runs it" in "; ".join(profile.assumptions)
    with pytest.raises(TraceError, match="profile of a rank already"):
        sacplan.plan(profile, "85%", ranks=sacplan.FSDP2(4, units))


@pytest.mark.slow
def test_layers_are_compiled_on_ranks_that_are_asked_for() -> None:
    """Two roads to the same step, as above, with each layer compiled by itself."""
    from torch.distributed.fsdp import fully_shard

    ranks = sacplan.FSDP2(2, ["layers.*", ""])
    how: Any = {"modules": ["layers.*"], "backend": "aot_eager"}
    found = sacplan.profile(language_model(), tokens(), loss_fn, OPTIMIZER, "cpu", ranks=ranks, compile=how)
    plan = sacplan.plan(found, "85%")
    assert plan.decisions
    assert sacplan.verify(language_model(), tokens(), plan, loss_fn, OPTIMIZER).peak_bytes == plan.peak_bytes
    with sacplan.ranks(2, device="cpu"):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        model = language_model()
        for unit in (*model.layers, model):  # type: ignore[misc]
            fully_shard(unit, mesh=mesh)
        for layer in model.layers:  # type: ignore[union-attr]
            layer.compile(backend="aot_eager")
        assert profiled(model).peak_bytes == found.peak_bytes


def test_the_environment_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    launched = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    with sacplan.ranks(16, rank=9, device="h100"):
        assert {name: os.environ[name] for name in launched} == launched
    assert os.environ["RANK"] == "7"
    assert "WORLD_SIZE" not in os.environ


def exposed_ms(gb_per_s: float) -> tuple[float, float]:
    """Time of a step of eight ranks, and what computation alone takes."""
    from torch.distributed.fsdp import fully_shard

    spec = replace(resolve_device("h100"), inner_link=Link("link", gb_per_s * 1e9, 0.0), kernel_launch_us=0.0)
    with sacplan.ranks(8, device=spec), torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
        for layer in (*model, model):
            fully_shard(layer)
        profile = sacplan.profile(model, torch.zeros(4096, 1024), lambda m, x: m(x).square().mean())
    ops = profile.program.ops
    return profile.step_ms, sum(op.time_ms for op in ops if "c10d" not in op.name)


def test_collectives_are_hidden_behind_computation_as_streams_allow() -> None:
    """By hand: 4 MiB a layer, gathered twice but for the last, and reduced once, over links of one speed."""
    gathered, parts = 4 * 1024 * 1025, 7 / 8
    step, _ = exposed_ms(1e-3)
    # Slow links are busy all the time.
    busy = 3 * 6 * gathered * parts / 1e6 * 1e3
    assert step == pytest.approx(busy, rel=0.1)
    step, computed = exposed_ms(50)
    one = gathered * parts / 50e9 * 1e3
    # Fast ones: only the first gather and the last reduction, and copies around it, have nothing to hide behind.
    assert step - computed == pytest.approx(2 * one, rel=0.1)


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class CausalHeads(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_the_ring_of_context_parallelism_is_recorded() -> None:
    """A CPU has no kernel for it: on a GPU each rank meets the keys of all ranks, in forward and in backward."""
    from torch.distributed.tensor.experimental import context_parallel

    model = nn.Sequential(nn.Linear(64, 64), nn.Unflatten(2, (4, 16)), Transposed(), CausalHeads())
    tokens = torch.randn(2, 512, 64)
    with sacplan.ranks(4, device="h100"):
        mesh = dist.device_mesh.init_device_mesh("cuda", (4,))
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            profile = sacplan.profile(model, tokens, lambda m, x: m(x).square().mean())
    ops = profile.program.ops
    for name in ("attention.default", "attention_backward.default"):
        assert sum(op.name.endswith(name) for op in ops) == 4
    assert any("all_to_all" in op.name for op in ops)
    # Copies that the ring makes are ops that can run again, though it runs below autograd.
    copies = [op for op in ops if op.phase is Phase.FORWARD and op.name == "aten.clone.default"]
    assert len(copies) >= 2
    assert all(op.recomputable for op in copies)


def test_norms_of_parts_of_a_sequence_run_in_fused_kernels_on_a_gpu() -> None:
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    with sacplan.ranks(4, device="h100"), torch.device("meta"):
        mesh = dist.device_mesh.init_device_mesh("cuda", (4,))
        model = parallelize_module(nn.Sequential(nn.RMSNorm(64)), mesh, {"0": SequenceParallel()})
        profile = sacplan.profile(model, torch.empty(2, 32, 64), lambda m, x: m(x).to_local().sum())
    names = [op.name for op in profile.program.ops if "norm" in op.name]
    assert names == ["aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default"]


def test_meshes_of_earlier_ranks_are_forgotten() -> None:
    """The pairs of tensors are the same ranks in each mesh, in groups of other names."""
    found = []
    for ranks, sizes in ((8, (4, 2)), (8, (2, 2, 2)), (2, (2,)), (8, (4, 2))):
        with sacplan.ranks(ranks, device="h100"), torch.device("meta"):
            names = ("pp", "dp", "tp")[-len(sizes) :]
            mesh = dist.device_mesh.init_device_mesh("cuda", sizes, mesh_dim_names=names)
            model = parallel_lm(language_model(), mesh["tp"], head=False)
            profile = sacplan.profile(model, tokens(), loss_fn)
        found.append((profile.peak_bytes, profile.step_ms))
    assert len(set(found)) == 1


def test_what_cannot_be_a_rank_is_an_error() -> None:
    with pytest.raises(PlanError, match="rank 8 of 8"), sacplan.ranks(8, rank=8):
        pass
    with (
        sacplan.ranks(2),
        pytest.raises(PlanError, match="initialized here: leave it out"),
        sacplan.ranks(2),
    ):
        pass
    assert not dist.is_initialized()


def test_a_frozen_unit_is_gathered_ahead_and_never_used() -> None:
    from torch.distributed.fsdp import fully_shard

    # On real ranks of CPUs, PyTorch 2.13 asks for an accelerator's stream here.
    with sacplan.ranks(2, device="cpu"):
        model = language_model()
        model.embed.requires_grad_(False)
        for unit in (model.embed, *model.layers, model):
            fully_shard(unit)
        ops = sacplan.profile(model, tokens(), loss_fn).program.ops
    backward = [op.name for op in ops if op.phase == Phase.BACKWARD]
    names = "c10d._allgather_base_.default", "fsdp.split_with_sizes_copy.default"
    assert [*map(backward.count, names)] == [3, 2]
