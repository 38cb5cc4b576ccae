"""The step of one rank, made of the whole model's: against ``fully_shard`` on one rank whose collectives do nothing.

torch's fake process group lets one process be rank 0 of eight: all buffers are allocated, nothing is sent.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sacplan
from sacplan._device.devices import resolve_device
from sacplan._device.links import Link
from sacplan._profile.tracing import trace_step
from sacplan._program.program import Event, Phase, Program, StorageKind
from sacplan._ranks.ddp import FIRST_BUCKET_BYTES, buckets_of, replicated
from sacplan._ranks.fully_shard import sharded
from sacplan._ranks.options import FullyShardOptions
from sacplan._ranks.ranks import Ranks
from sacplan._ranks.shards import Parameter, resolve_units
from sacplan._ranks.unit_limits import narrowed, sharded_units, too_wide
from sacplan._recompute.rewrite import discarded_ops, recomputed
from sacplan._shard.costs import Costs
from sacplan._shard.mesh import Mesh
from sacplan.errors import TraceError
from tests.support.ranks import (
    CPU,
    OPTIMIZER,
    RANKS,
    RankMemory,
    cross_entropy_in_two,
    fully_sharded,
    of_one_rank,
    optimizer_of,
)
from tests.support.steps import mean_square
from tests.zoo import language_models as models
from tests.zoo.language_models import Tied
from tests.zoo.layers import FromFunction, HeavyLayers, Shared, Towers, Unlike

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # a linear layer's output is a view
]


def lm() -> nn.Module:
    return models.LM(layers=3, dim=32, heads=4, vocab=64)


def odd_lm() -> nn.Module:
    """No dimension is a multiple of the ranks, and one bias is shorter than there are ranks."""
    return nn.Sequential(models.LM(layers=2, dim=36, heads=4, vocab=67), nn.Linear(67, 5))


def adapted_lm() -> nn.Module:
    """Only the norms of the layers are trained."""
    model = lm()
    for name, p in model.named_parameters():
        p.requires_grad_(".norm" in name)
    return model


def tokens() -> torch.Tensor:
    return models.tokens(4, 32, 64)


def in_bfloat16(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Autocast keeps a copy of each gathered weight until its context ends, and autograd keeps it longer."""
    with torch.autocast("cpu", torch.bfloat16):
        return models.cross_entropy(model, batch)


Case = tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., torch.Tensor], list[str], bool | None]

CASES: dict[str, Case] = {
    "layers": (lm, tokens, models.cross_entropy, ["layers.*", ""], None),
    "padded": (odd_lm, tokens, mean_square, ["0.layers.*", ""], None),
    "nested": (lm, tokens, models.cross_entropy, ["layers.*", "layers.*.mlp", ""], None),
    "one unit": (lm, tokens, models.cross_entropy, [""], None),
    "all that has parameters": (
        lm,
        tokens,
        models.cross_entropy,
        ["embed", "layers.*", "norm", "head"],
        None,
    ),
    "some modules only": (lm, tokens, models.cross_entropy, ["layers.*"], None),
    "kept after forward": (lm, tokens, models.cross_entropy, ["layers.*", ""], False),
    "root not kept": (lm, tokens, models.cross_entropy, ["layers.*", ""], True),
    "parameters outweigh": (HeavyLayers, lambda: torch.randn(16, 64), mean_square, ["layers.*", ""], None),
    "called three times": (Shared, lambda: torch.randn(2, 16, 16), mean_square, ["layer", "other", ""], None),
    "two towers": (
        Towers,
        lambda: (torch.randn(64, 32), torch.randn(64, 32)),
        mean_square,
        ["left.*", "right.*", ""],
        None,
    ),
    "frozen": (adapted_lm, tokens, models.cross_entropy, ["layers.*", ""], None),
    "autocast": (lm, tokens, in_bfloat16, ["layers.*", ""], None),
    "two backward passes": (lm, tokens, cross_entropy_in_two, ["layers.*", ""], None),
}


def profiled(model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor]) -> sacplan.Profile:
    return sacplan.profile(model, batch, loss_fn=loss_fn, optimizer=optimizer_of, device="cpu")


@functools.cache
def whole_of(
    make: Callable[[], nn.Module], batch_of: Callable[[], Any], loss_fn: Callable[..., torch.Tensor]
) -> sacplan.Profile:
    """The step of one process, of a model that no test changes; most cases have the same one."""
    return profiled(make(), batch_of(), loss_fn)


@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_rank_is_the_allocators(name: str, mesh: Any) -> None:
    make, batch_of, loss_fn, units, reshard = CASES[name]
    model, batch = make(), batch_of()
    whole = whole_of(make, batch_of, loss_fn)
    options = FullyShardOptions(reshard_after_forward=reshard)
    patch = sharded(whole.program, whole.fingerprint.parameters, CPU, RANKS, units, options)
    predicted = whole.program.with_(patch).renumbered().footprint.peak_bytes
    measured = RankMemory(
        fully_sharded(model, mesh, resolve_units(units, whole.program), reshard), batch, loss_fn
    ).peak_bytes()
    assert predicted == measured
    assert abs(predicted - whole.peak_bytes) > 1000  # it is another peak than the whole model's


@pytest.mark.parametrize("name", ["Adamax", "Adadelta", "ASGD", "NAdam", "RMSprop", "SGD"])
def test_state_of_other_optimizers_is_in_shards(
    name: str, mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On parameters that eight ranks do not divide."""
    settings = {"SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}}
    optimizer = functools.partial(getattr(torch.optim, name), **settings.get(name, {}))
    monkeypatch.setattr("tests.support.ranks.OPTIMIZER", optimizer)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(61, 61), nn.GELU())))
    batch, units = torch.randn(16, 61), ["?", ""]
    whole = profiled(model, batch, mean_square)
    rank = of_one_rank(whole, RANKS, units)
    assert any(kind == StorageKind.OPTIMIZER_STATE for kind in rank.program.storage_kinds)
    sharded_model = fully_sharded(model, mesh, resolve_units(units, whole.program))
    assert rank.peak_bytes == RankMemory(sharded_model, batch, mean_square).peak_bytes()


def test_collectives_come_in_the_order_of_fully_shard(mesh: Any) -> None:
    """The order in which units gather, copy out and reduce, from the names that FSDP gives the profiler."""
    model, batch = lm(), tokens()
    whole = whole_of(lm, tokens, models.cross_entropy)
    units = ["layers.*", ""]
    program = of_one_rank(whole, RANKS, units).program
    memory = RankMemory(
        fully_sharded(model, mesh, resolve_units(units, whole.program)), batch, models.cross_entropy
    )
    memory.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        memory.step()
    names = {"all_gather": "all_gather", "all_gather_copy_out": "copy_out", "post_backward_reduce": "reduce"}
    seen = []
    for event in sorted(profiler.events(), key=lambda e: e.time_range.start):
        what, _, unit = event.name.removeprefix("FSDP::").partition(" ")
        if event.name.startswith("FSDP::") and what in names:
            seen.append((names[what], unit.strip("()")))
    ours = {
        "fsdp.all_gather_copy_in.default": "all_gather",
        "fsdp.split_with_sizes_copy.default": "copy_out",
        "c10d._reduce_scatter_base_.default": "reduce",
    }
    found = [(ours[op.name], program.scopes[op.scope].fqn) for op in program.ops if op.name in ours]
    assert [what for what, _ in found] == [what for what, _ in seen]
    # What is gathered ahead is named after the unit that it is for.
    assert found == seen


def test_shards_gradients_and_state_add_up() -> None:
    """The sizes of what is there before and after the step, worked out by hand."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))  # rows 6, 6, 3, 3 over 4 ranks: 2, 2, 1, 1
    batch = torch.randn(2, 5)
    whole = profiled(model, batch, mean_square)
    program = of_one_rank(whole, 4, ["0", ""]).program
    shards = 4 * (2 * 5 + 2 + 1 * 6 + 1)

    def bytes_of(kind: StorageKind, storages: Any) -> int:
        return sum(program.storage_bytes[s] for s in storages if program.storage_kinds[s] == kind)

    assert bytes_of(StorageKind.PARAMETER, program.initial) == shards
    state = [s for s, kind in enumerate(program.storage_kinds) if kind == StorageKind.OPTIMIZER_STATE]
    assert (
        bytes_of(StorageKind.OPTIMIZER_STATE, state) == 2 * shards + 4 * 4
    )  # and a step count for each parameter
    alive = set(program.initial)
    for code, arg in program.events:
        if code == Event.OP:
            alive.update(program.ops[arg].writes)
        elif code == Event.ALLOC:
            alive.add(arg)
        elif code == Event.FREE:
            assert arg in alive  # nothing is freed twice
            alive.remove(arg)
    assert bytes_of(StorageKind.GRADIENT, alive) == shards
    assert bytes_of(StorageKind.PARAMETER, alive) == shards  # what was gathered is gone
    assert program.parameter_bytes[""] == shards
    assert program.parameter_bytes["1"] == 4 * (6 + 1)


def test_the_model_does_not_notice() -> None:
    """What modules run, and the names of call sites by which a plan speaks of it, are those of the whole step."""
    whole = whole_of(lm, tokens, models.cross_entropy)
    before = copy.deepcopy(whole.program)
    rank = of_one_rank(whole, RANKS, ["layers.*", ""])
    assert whole.program == before
    assert rank.program.flops == whole.program.flops
    computed = sum(
        op.time_ms for op in rank.program.ops if op.phase != Phase.OPTIMIZER and not _moves(op.name)
    )
    assert computed == pytest.approx(
        sum(op.time_ms for op in whole.program.ops if op.phase != Phase.OPTIMIZER)
    )
    for fqn, calls in whole.program.calls.items():
        sites = [s for s in rank.program.sites(rank.program.calls[fqn][0]).values() if "fsdp." not in s[0]]
        assert sites == list(whole.program.sites(calls[0]).values())


def test_saved_and_loaded(tmp_path: Path) -> None:
    rank = of_one_rank(whole_of(lm, tokens, models.cross_entropy), RANKS, ["layers.*", ""])
    rank.save(tmp_path / "rank.json")
    assert sacplan.Profile.load(tmp_path / "rank.json").peak_bytes == rank.peak_bytes


@pytest.mark.parametrize("name", ["layers", "padded", "frozen", "two backward passes"])
def test_a_planned_step_of_a_rank_has_the_planned_peak(name: str, mesh: Any) -> None:
    """Measured with the plan applied, before ``fully_shard``; and traced with the plan applied, then sharded."""
    make, batch_of, loss_fn, units, _ = CASES[name]
    model, batch = make(), batch_of()
    whole = whole_of(make, batch_of, loss_fn)
    plan = sacplan.plan(of_one_rank(whole, RANKS, units), "smallest", solver="greedy")
    assert plan.peak_bytes < plan.baseline_peak_bytes
    traced = trace_step(
        model, batch, loss_fn, optimizer_of, "cpu", "cost-model", "fake",
        prepare=lambda fake: sacplan.apply(fake, plan), saved="observe",
    )  # fmt: skip
    assert of_one_rank(traced, RANKS, units).peak_bytes == plan.peak_bytes
    with sacplan.apply(model, plan, check=False):
        memory = RankMemory(fully_sharded(model, mesh, resolve_units(units, whole.program)), batch, loss_fn)
        measured = memory.peak_bytes()
    assert measured == plan.peak_bytes


# --- times --------------------------------------------------------------------------------------------------


def h100_with(gb_per_s: float) -> sacplan.DeviceSpec:
    """Links without latency."""
    link = Link("link", gb_per_s * 1e9, 0.0)
    return replace(resolve_device("h100"), inner_link=link, kernel_launch_us=0.0, matmul_workspace_bytes=0)


def on_h100(gb_per_s: float, units: list[str] | None) -> tuple[Program, Program, Costs]:
    """The whole step of a model of equal layers, and that of one rank of eight."""
    spec = h100_with(gb_per_s)
    model = HeavyLayers(layers=4, dim=256, dropout=0.0)
    whole = sacplan.profile(model, torch.randn(4096, 256), mean_square, device=spec)
    return whole.program, of_one_rank(whole, RANKS, units).program, Costs.of(Mesh.of(RANKS), spec)


def exposed(program: Program, name: str) -> list[float]:
    return [op.time_ms for op in program.ops if op.name == name]


LAYER_BYTES = 4 * (2 * 256 * 1024 + 1024 + 256)
"""Of a layer's parameters: the ranks divide all of them."""

HEAD_BYTES = 4 * RANKS * (2 * 256 + 2)
"""Of the head's, padded: ten rows over eight ranks."""


def test_fast_links_leave_what_has_nothing_to_hide_behind() -> None:
    """By hand: the root, which has the head, gathers and then the first layer does; they are reduced last."""
    whole, rank, costs = on_h100(1e5, ["layers.*", ""])
    layer, head = (costs.collective_ms("all_gather", n, 0) for n in (LAYER_BYTES, HEAD_BYTES))
    gathers = exposed(rank, "fsdp.all_gather_copy_in.default")
    assert gathers == [pytest.approx(head), pytest.approx(layer)] + [0.0] * 7  # the root keeps its own
    reduces = exposed(rank, "c10d._reduce_scatter_base_.default")
    assert reduces == [0.0] * 3 + [pytest.approx(head), pytest.approx(layer)]
    moved = sum(op.time_ms for op in rank.ops if _moves(op.name))
    assert rank.step_ms == pytest.approx(whole.step_ms + moved)


def test_slow_links_are_busy_all_the_time() -> None:
    """Then a step takes all its collectives, and computation once at most."""
    whole, rank, costs = on_h100(0.1, ["layers.*", ""])
    busy = costs.collective_ms("all_gather", 3 * 4 * LAYER_BYTES + 2 * HEAD_BYTES, 0)
    copies = sum(
        exposed(rank, "fsdp.chunk_cat.default") + exposed(rank, "fsdp.split_with_sizes_copy.default")
    )
    assert busy > 10 * (whole.step_ms + copies)
    assert busy < rank.step_ms < busy + whole.step_ms + copies


def test_cpus_wait_for_each_collective() -> None:
    whole = whole_of(lm, tokens, models.cross_entropy)
    rank = of_one_rank(whole, RANKS, ["layers.*", ""]).program
    assert all(ms > 0 for ms in exposed(rank, "fsdp.all_gather_copy_in.default"))
    assert all(ms > 0 for ms in exposed(rank, "c10d._reduce_scatter_base_.default"))


def test_the_optimizer_works_on_shards() -> None:
    """Its ops are bound by memory."""
    spec = h100_with(100)
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 2048, bias=False))
    whole = sacplan.profile(model, torch.randn(8, 2048), mean_square, OPTIMIZER, device=spec)
    times = [
        sum(op.time_ms for op in program.ops if op.phase == Phase.OPTIMIZER)
        for program in (whole.program, of_one_rank(whole, RANKS, ["0", "2"]).program)
    ]
    assert times[1] == pytest.approx(times[0] / RANKS, rel=1e-3)


def test_a_bucket_is_reduced_behind_the_rest_of_the_backward_pass() -> None:
    """By hand: the first bucket is full after the last linear layer but one, the second at the end."""
    for gb_per_s in (1e5, 20, 0.1):
        whole, rank, costs = on_h100(gb_per_s, None)
        reduces = [i for i, op in enumerate(rank.ops) if op.name == "c10d.allreduce_.default"]
        head, down = 4 * (10 * 256 + 10), 4 * (256 * 1024 + 256)
        sizes = [head + down, 4 * LAYER_BYTES - down]
        assert len(reduces) == len(sizes)
        backward = [i for i, op in enumerate(rank.ops) if op.phase == Phase.BACKWARD]
        assert not any(rank.ops[i].time_ms for i in backward if i > reduces[1])
        assert rank.ops[reduces[0] - 1].outputs  # the op that made the last gradient of the bucket
        rest = sum(rank.ops[i].time_ms for i in range(reduces[0] + 1, reduces[1]))
        copies = [costs.copy_ms(n_bytes) for n_bytes in sizes]
        first, second = (costs.collective_ms("all_reduce", n_bytes, 0) for n_bytes in sizes)
        # Computation after the first one starts: the rest, and the copy into the second bucket.
        computed = rest + copies[1]
        end = max(first, computed) + second
        waited = sum(rank.ops[i].time_ms for i in reduces) - 2 * sum(copies)
        # What is copied out of the first bucket hides some of the second's reduction.
        hidden = min(copies[0], max(0.0, end - max(first, computed)))
        assert waited == pytest.approx(end - computed - hidden)
        assert rank.step_ms == pytest.approx(whole.step_ms + waited + 2 * sum(copies))


# --- which modules may be units -----------------------------------------------------------------------------


def _widest_units(program: Program, ops: Sequence[int]) -> set[str]:
    """The widest modules around some ops that may be units; each op has one."""
    calls = program.outermost_calls(too_wide(program))
    return {
        program.scopes[calls[program.ops[op].scope]].fqn for op in ops if calls[program.ops[op].scope] >= 0
    }


def test_what_leaves_a_unit_is_kept() -> None:
    """Nothing that may run again is read, or kept by autograd, outside of the widest unit around it."""
    whole = whole_of(lm, tokens, models.cross_entropy).program
    program = of_one_rank(whole_of(lm, tokens, models.cross_entropy), RANKS, ["layers.*", ""]).program
    assert sharded_units(whole) == frozenset()
    assert sharded_units(program) == {"", "layers.0", "layers.1", "layers.2"}
    assert too_wide(program) == {""}
    again = [i for i, op in enumerate(program.ops) if op.recomputable]
    assert 0 < len(again) < sum(op.recomputable for op in whole.ops)
    assert _widest_units(program, again) == {"layers.0", "layers.1", "layers.2"}
    added = [
        op.recomputable
        for op in program.ops
        if op.name == "aten.add.Tensor"
        and op.phase == Phase.FORWARD
        and _fqn(program, op.scope) == "layers.1"
    ]
    assert added[-2:] == [True, False]  # the residual stream within the layer, and the layer's output


def test_nested_units_limit_to_the_inner_ones() -> None:
    program = of_one_rank(
        whole_of(lm, tokens, models.cross_entropy), RANKS, ["layers.*", "layers.*.mlp", ""]
    ).program
    assert too_wide(program) == {"", "layers.0", "layers.1", "layers.2"}
    again = [i for i, op in enumerate(program.ops) if op.recomputable]
    assert _widest_units(program, again) == {f"layers.{i}.mlp" for i in range(3)}


def test_a_unit_that_is_too_wide_is_taken_apart() -> None:
    """The same ops are discarded, by the modules inside that may be units; the replay does not change."""
    whole = profiled(Unlike(), torch.randn(256, 32), mean_square)
    program = of_one_rank(whole, RANKS, ["a", "b", ""]).program
    sites = program.sites(program.calls[""][0])
    wide = {"": {site: 1 for op, site in sites.items() if program.ops[op].recomputable}}
    narrow = narrowed(program, wide)
    assert set(narrow) == {"a", "b"}
    assert sum(map(len, narrow.values())) == len(wide[""])
    assert discarded_ops(program, narrow) == discarded_ops(program, wide)
    assert recomputed(program, narrow).footprint.peak_bytes == recomputed(program, wide).footprint.peak_bytes
    assert recomputed(program, narrow).footprint.again == recomputed(program, wide).footprint.again != ()
    assert narrowed(program, narrow) == narrow
    assert narrowed(whole.program, wide) == wide


def test_one_unit_around_everything_limits_nothing() -> None:
    whole = profiled(Unlike(), torch.randn(8, 32), mean_square)
    program = of_one_rank(whole, RANKS, [""]).program
    assert too_wide(program) == frozenset()
    inside = [op.recomputable for op in whole.program.ops if op.scope >= 0]
    assert [op.recomputable for op in program.ops if op.scope >= 0 and not _moves(op.name)] == inside


def _moves(name: str) -> bool:
    """Whether an op is one that a rank has, and the whole model has not."""
    return name.startswith(("fsdp.", "c10d."))


def _fqn(program: Program, scope: int) -> str:
    return program.scopes[scope].fqn if scope >= 0 else "the loss"


# --- patterns and errors -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> sacplan.Profile:
    return whole_of(lm, tokens, models.cross_entropy)


def test_patterns(whole: sacplan.Profile) -> None:
    r = whole.program
    layers = ("layers.0", "layers.1", "layers.2")
    assert resolve_units(["layers.*", ""], r) == ("", *layers)
    assert resolve_units(["layers*"], r) == layers  # the list itself is never called
    assert resolve_units(["layers.*", "*.mlp"], r) == (
        "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "layers.2", "layers.2.mlp",
    )  # fmt: skip
    assert resolve_units(["*"], r) == ("",)
    assert resolve_units(["head", "layers.[02]"], r) == ("layers.0", "layers.2", "head")


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["layer.*"], r"no module matches 'layer\.\*'; near names are .*'layers\.0'"),
        (["mlp"], r"no module matches 'mlp'; near names are .*'layers\.0\.mlp'"),
        (["layers"], r"'layers' matches 'layers', but no module of that name is called.*'layers\.\*'"),
        ([], "the units of FSDP2 are .*; give a list of patterns"),
        (["layers.0.mlp.3"], "none of the units 'layers.0.mlp.3' has a parameter"),
    ],
)
def test_units_that_there_are_not(whole: sacplan.Profile, units: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        of_one_rank(whole, RANKS, units)


@pytest.mark.parametrize(
    ("world_size", "units", "message"),
    [
        (0, None, "0 ranks: give an int"),
        (True, None, "True ranks"),
        (2.0, None, "2.0 ranks"),
        (1, [""], "FSDP2 of 1 rank: nothing is sharded"),
        (8, "layers.*", r"the units of FSDP2 are the string 'layers\.\*'; give a list"),
    ],
)
def test_ranks_that_do_not_make_sense(world_size: Any, units: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Ranks.of(world_size, units)


def test_one_rank_is_the_whole(whole: sacplan.Profile) -> None:
    assert Ranks.of().program(whole.program, whole.fingerprint.parameters, CPU) is whole.program
    assert Ranks.of().assumptions == ()


def test_ranks_as_json() -> None:
    for ranks in (Ranks.of(), Ranks.of(4), Ranks.of(8, ["layers.*", ""])):
        assert msgspec.convert(msgspec.to_builtins(ranks), Ranks) == ranks


def scaled() -> nn.Module:
    """Has a scalar parameter, and parameters of two types."""
    return FromFunction(
        lambda self, x: x * self.scale + self.low.float(),
        scale=nn.Parameter(torch.tensor(1.0)),
        low=nn.Parameter(torch.ones(8, dtype=torch.bfloat16)),
    )


def test_a_parameter_used_outside_of_its_unit() -> None:
    tied = profiled(Tied(), tokens(), models.cross_entropy)
    with pytest.raises(
        TraceError, match=r"'embed\.weight' belongs to the unit 'embed' and is used in 'head'"
    ):
        of_one_rank(tied, RANKS, ["embed", ""])
    assert of_one_rank(tied, RANKS, [""]).peak_bytes > 0


def test_parameters_that_cannot_be_sharded() -> None:
    with pytest.raises(TraceError, match=r"'scale' is a scalar.*of shape \(1,\)"):
        of_one_rank(profiled(scaled(), torch.randn(4, 8), mean_square), RANKS, [""])
    model = scaled()
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(TraceError, match=r"torch\.bfloat16 and torch\.float32"):
        of_one_rank(profiled(model, torch.randn(4, 8), mean_square), RANKS, [""])


def test_a_recording_of_another_model(whole: sacplan.Profile) -> None:
    other = profiled(models.LM(layers=3, dim=64, heads=4, vocab=64), tokens(), models.cross_entropy)
    with pytest.raises(TraceError, match="Is the recording of this model"):
        Ranks.of(2).program(whole.program, other.fingerprint.parameters, CPU)
    with pytest.raises(TraceError, match="storages of parameters and the model"):
        Ranks.of(2).program(whole.program, other.fingerprint.parameters[1:], CPU)


# --- DistributedDataParallel --------------------------------------------------------------------------------


def test_buckets() -> None:
    """The first bucket is closed at 1 MiB, the others at the cap, each with the parameter that reaches it."""
    mib = 2**20

    def parameter(mib_: int, dtype: str = "torch.uint8", trainable: bool = True) -> Parameter:
        return Parameter("p", 0, (mib_ * mib,), dtype, trainable)

    def bucket_bytes(parameters: list[Parameter]) -> list[int]:
        return [sum(p.n_bytes for p in bucket) for bucket in buckets_of(parameters, 25 * mib)]

    sizes = [parameter(n) for n in (3, 1, 20, 10, 16, 2)]
    assert bucket_bytes(sizes) == [n * mib for n in (2, 26, 24)]
    assert FIRST_BUCKET_BYTES == dist._DEFAULT_FIRST_BUCKET_BYTES == mib
    mixed = [parameter(1), parameter(4, trainable=False), parameter(2, "torch.int8")]
    assert sorted(bucket_bytes(mixed)) == [mib, 2 * mib]


def test_replicas_hold_gradients_twice(whole: sacplan.Profile) -> None:
    rank = of_one_rank(whole, 2, None)
    trained = sum(p.numel() * p.element_size() for p in lm().parameters())
    assert rank.peak_bytes == whole.peak_bytes + trained
    with pytest.raises(TraceError, match="bucket_cap_mb"):
        replicated(whole.program, whole.fingerprint.parameters, CPU, 2, bucket_cap_mb=0)


@pytest.mark.parametrize("units", [["a", "b", ""], None])
def test_the_road_from_profile_to_a_verified_plan(units: list[str] | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Unlike(), torch.randn(256, 32)
    whole = sacplan.profile(model, batch, device="cpu", optimizer=OPTIMIZER)
    ranks = sacplan.DDP(4) if units is None else sacplan.FSDP2(4, units)
    profile = sacplan.profile(model, batch, device="cpu", optimizer=OPTIMIZER, ranks=ranks)
    assert profile.program == of_one_rank(whole, 4, units).program
    assert profile.assumptions
    for solver in ("best", "rotor"):
        plan = sacplan.plan(profile, "smallest", solver=solver)
        assert plan.peak_bytes < profile.peak_bytes
        if units is not None:
            assert set(plan.units) <= {"a", "b"}  # no unit around both
        plan.save(tmp_path / "plan.json")
        loaded = sacplan.Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        assert sacplan.verify(model, batch, loaded, optimizer=OPTIMIZER).peak_bytes == plan.peak_bytes
    with pytest.raises(sacplan.PlanError, match="one of 4 ranks"):
        sacplan.verify(model, batch, plan, optimizer=OPTIMIZER, run="real")
