"""The step of one rank, as it is recorded: against ``fully_shard`` on one rank whose collectives do nothing.

torch's fake process group lets one process be rank 0 of eight: all buffers are allocated, nothing is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sacplan
from sacplan.core.program import Phase, Program, StorageKind
from sacplan.distributed.ranks.ranks import Ranks
from sacplan.distributed.ranks.unit_limits import narrowed, too_wide
from sacplan.distributed.ranks.units import units_of
from sacplan.errors import TraceError
from sacplan.techniques.recompute.rewrite import discarded_ops, recomputed
from tests.support.ranks import (
    OPTIMIZER,
    RANKS,
    RankMemory,
    cross_entropy_in_two,
    fully_sharded,
    optimizer_of,
)
from tests.support.slow import slow_after
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


def profiled(
    model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor], **how: Any
) -> sacplan.Profile:
    return sacplan.profile(model, batch, loss_fn, optimizer_of, "cpu", **how)


@functools.cache
def rank_of_lm(*units: str) -> sacplan.Profile:
    return profiled(lm(), tokens(), models.cross_entropy, ranks=sacplan.FSDP2(RANKS, units))


@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_rank_is_the_allocators(name: str, mesh: Any) -> None:
    make, batch_of, loss_fn, units, reshard = CASES[name]
    model, batch = make(), batch_of()
    ranks = sacplan.FSDP2(RANKS, units, reshard_after_forward=reshard)
    predicted = profiled(model, batch, loss_fn, ranks=ranks).peak_bytes
    measured = RankMemory(fully_sharded(model, mesh, units, reshard), batch, loss_fn).peak_bytes()
    assert predicted == measured


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
    rank = profiled(model, batch, mean_square, ranks=sacplan.FSDP2(RANKS, units))
    assert any(kind == StorageKind.OPTIMIZER_STATE for kind in rank.program.storage_kinds)
    assert rank.peak_bytes == RankMemory(fully_sharded(model, mesh, units), batch, mean_square).peak_bytes()


def test_the_parts_of_rank_0_are_there() -> None:
    """As many ranks as there may be: nothing is made of the parts of the others."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3))
    program = profiled(model, torch.randn(2, 5), mean_square, ranks=sacplan.FSDP2(2**20, [""])).program
    assert program.parameter_bytes[""] == 4 * (5 + 1 + 6 + 1)


def test_saved_and_loaded(tmp_path: Path) -> None:
    rank = rank_of_lm("layers.*", "")
    rank.save(tmp_path / "rank.json")
    assert sacplan.Profile.load(tmp_path / "rank.json").peak_bytes == rank.peak_bytes


@pytest.mark.parametrize("name", slow_after(2, ["padded", "two backward passes", "layers", "frozen"]))
def test_a_planned_step_of_a_rank_has_the_planned_peak(name: str, mesh: Any) -> None:
    """Measured with the plan applied, before ``fully_shard``; and recorded so."""
    make, batch_of, loss_fn, units, _ = CASES[name]
    model, batch = make(), batch_of()
    profile = profiled(model, batch, loss_fn, ranks=sacplan.FSDP2(RANKS, units))
    plan = sacplan.plan(profile, "smallest", solver="greedy")
    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert sacplan.verify(model, batch, plan, loss_fn, optimizer_of).peak_bytes == plan.peak_bytes
    with sacplan.apply(model, plan, check=False):
        measured = RankMemory(fully_sharded(model, mesh, units), batch, loss_fn).peak_bytes()
    assert measured == plan.peak_bytes


def _widest_units(program: Program) -> set[str]:
    """The widest modules around ops that may run again; each op has one."""
    calls = program.outermost_calls(too_wide(program))
    scopes = {calls[op.scope] for op in program.ops if op.recomputable}
    return {program.scopes[scope].fqn for scope in scopes if scope >= 0}


def test_what_leaves_a_unit_is_kept() -> None:
    """Nothing that may run again is read, or kept by autograd, outside of the widest unit around it."""
    program = rank_of_lm("layers.*", "").program
    assert program.gathering == {"", "layers.0", "layers.1", "layers.2"}
    assert too_wide(program) == {""}
    assert _widest_units(program) == {"layers.0", "layers.1", "layers.2"}
    layer = [op for op in program.ops if (op.phase, _fqn(program, op.scope)) == (Phase.FORWARD, "layers.1")]
    added = [op.recomputable for op in layer if op.name == "aten.add.Tensor"]
    assert added[-2:] == [True, False]  # the residual stream within the layer, and the layer's output


def test_nested_units_limit_to_the_inner_ones() -> None:
    program = rank_of_lm("layers.*", "layers.*.mlp", "").program
    assert too_wide(program) == {"", "layers.0", "layers.1", "layers.2"}
    assert _widest_units(program) == {f"layers.{i}.mlp" for i in range(3)}


def test_a_unit_that_is_too_wide_is_taken_apart() -> None:
    """The same ops are discarded, by the modules inside that may be units; the replay does not change."""
    program = profiled(
        Unlike(), torch.randn(256, 32), mean_square, ranks=sacplan.FSDP2(8, ["a", "b", ""])
    ).program
    sites = program.sites(program.calls[""][0])
    wide = {"": {site: 1 for op, site in sites.items() if program.ops[op].recomputable}}
    narrow = narrowed(program, wide)
    assert set(narrow) == {"a", "b"}
    assert sum(map(len, narrow.values())) == len(wide[""])
    assert discarded_ops(program, narrow) == discarded_ops(program, wide)
    assert recomputed(program, narrow).footprint.peak_bytes == recomputed(program, wide).footprint.peak_bytes
    assert recomputed(program, narrow).footprint.again == recomputed(program, wide).footprint.again != ()
    assert narrowed(program, narrow) == narrow


def _fqn(program: Program, scope: int) -> str:
    return program.scopes[scope].fqn if scope >= 0 else "the loss"


# --- patterns and errors -----------------------------------------------------------------------------------


def test_patterns() -> None:
    model = lm()
    layers = ("layers.0", "layers.1", "layers.2")
    assert units_of(model, ["layers.*", ""]) == ("", *layers)
    assert units_of(model, ["layers*"]) == layers  # the list itself is never called
    assert units_of(model, ["layers.*", "*.mlp"]) == (
        "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "layers.2", "layers.2.mlp",
    )  # fmt: skip
    assert units_of(model, ["*"]) == ("",)
    assert units_of(model, ["head", "layers.[02]"]) == ("layers.0", "layers.2", "head")


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["layer.*"], r"no module matches 'layer\.\*'; near names are .*'layers\.0'"),
        (["mlp"], r"no module matches 'mlp'; near names are .*'layers\.0\.mlp'"),
        (["layers"], r"no module matches 'layers'; near names are"),
        ([], "the units of FSDP2 are .*; give a list of patterns"),
    ],
)
def test_units_that_there_are_not(units: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        profiled(lm(), tokens(), models.cross_entropy, ranks=sacplan.FSDP2(RANKS, units))


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


def test_one_rank_has_no_assumptions() -> None:
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
    with pytest.raises(TraceError, match=r"does not run on dp 8 as PyTorch spreads it"):
        profiled(Tied(), tokens(), models.cross_entropy, ranks=sacplan.FSDP2(RANKS, ["embed", ""]))
    assert profiled(Tied(), tokens(), models.cross_entropy, ranks=sacplan.FSDP2(RANKS, [""])).peak_bytes > 0


def test_parameters_that_cannot_be_sharded() -> None:
    step: Any = (torch.randn(4, 8), mean_square)
    with pytest.raises(TraceError, match=r"scalar"):
        profiled(scaled(), *step, ranks=sacplan.FSDP2(RANKS, [""]))
    model = scaled()
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(TraceError, match=r"uniform original parameter dtype"):
        profiled(model, *step, ranks=sacplan.FSDP2(RANKS, [""]))


# --- DistributedDataParallel --------------------------------------------------------------------------------


def test_replicas_hold_gradients_twice() -> None:
    whole, rank = (
        profiled(lm(), tokens(), models.cross_entropy, ranks=ranks) for ranks in (None, sacplan.DDP(2))
    )
    trained = sum(p.numel() * p.element_size() for p in lm().parameters())
    assert rank.peak_bytes == whole.peak_bytes + trained


@pytest.mark.parametrize("units", [["a", "b", ""], None])
def test_the_road_from_profile_to_a_verified_plan(units: list[str] | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Unlike(), torch.randn(256, 32)
    ranks = sacplan.DDP(4) if units is None else sacplan.FSDP2(4, units)
    profile = sacplan.profile(model, batch, device="cpu", optimizer=OPTIMIZER, ranks=ranks)
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
    with pytest.raises(sacplan.errors.PlanError, match="one of 4 ranks"):
        sacplan.verify(model, batch, plan, optimizer=OPTIMIZER, run="real")
