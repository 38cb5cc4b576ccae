"""Modules of layers in slices, beside recomputation: rewrites against fake steps, one rehearsal for all layers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk, Decision
from sacplan.core.program import CallSite, Program
from sacplan.planning import search
from sacplan.planning.request import Request
from sacplan.techniques.chunk.chunk_entry import CannotChunk
from sacplan.techniques.chunk.entries import loss_chunks, module_chunks, offer_of
from sacplan.techniques.chunk.rest import training_chunk
from sacplan.techniques.registry import rewritten
from tests.support.chunks import close, step
from tests.support.plans import discarding
from tests.support.steps import assert_predicted, bit_equal, grads_of, mean_square
from tests.zoo.language_models import TokenModel
from tests.zoo.language_models import cross_entropy as loss_fn
from tests.zoo.layers import FeedForward, FromFunction, GatedMLP, Residual

BOTH = ("recompute", "chunk")
WIDE = 12
VOCAB = 64


def gated_layer(dim: int) -> nn.Module:
    """Its MLP is wide enough to make the peak."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(self.norm1(x)))
        return x + self.mlp(self.norm2(x))

    return FromFunction(
        forward, norm1=nn.LayerNorm(dim), norm2=nn.LayerNorm(dim), mix=nn.Linear(dim, dim),
        mlp=GatedMLP(dim, WIDE * dim),
    )  # fmt: skip


def gated_layers(n: int = 2) -> nn.Module:
    return TokenModel((gated_layer(32) for _ in range(n)), 32, VOCAB)


def make_case() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return gated_layers(), torch.randint(0, VOCAB, (2, 96))


@pytest.fixture
def case() -> tuple[nn.Module, torch.Tensor]:
    return make_case()


@functools.cache
def profile_on(device: str = "cpu") -> sacplan.Profile:
    return sacplan.profile(*make_case(), loss_fn, device=device)


@functools.cache
def smallest_of_both() -> sacplan.Plan:
    return sacplan.plan(profile_on(), "smallest", techniques=BOTH)


def mlps(slices: int) -> list[Chunk]:
    return [Chunk(f"layers.{i}.mlp", "module", slices, 1) for i in range(2)]


@pytest.mark.parametrize(("slices", "device"), [(1, "cpu"), (3, "h100"), (7, "cpu")])
def test_the_rewritten_step_is_the_fake_one(
    case: tuple[nn.Module, torch.Tensor], slices: int, device: str
) -> None:
    profile = profile_on(device)
    assert_is_the_fake_step(profile, *case, [*mlps(slices), Chunk("head", "rest", 4, 1)])


def assert_is_the_fake_step(
    profile: sacplan.Profile, model: nn.Module, batch: torch.Tensor, decisions: Sequence[Decision]
) -> None:
    expected = plan_with(profile, decisions)
    seen = sacplan.verify(model, batch, expected, loss_fn)
    assert not seen.differences
    assert expected.peak_bytes == seen.peak_bytes
    assert expected.planned_ms == pytest.approx(seen.step_ms)
    assert seen.recompute_flops == profile.with_plan(expected).flops - profile.program.flops


def test_effects_add_up_with_those_of_recomputation() -> None:
    """What the solver's numbers say of each chunk is the peak of the rewritten program."""
    profile = profile_on()
    asked = Request(techniques=BOTH).planner(profile)
    scope = profile.program.calls["layers.1.mlp"][0]
    chunks = module_chunks(profile.program, scope, profile.spec)
    assert [each[0].unit for each in chunks] == [f"layers.{i}.mlp" for i in range(2)]
    loss = loss_chunks(profile.program, profile.spec).chunks
    offers = tuple(offer_of(asked.basis.recorded, each) for each in (loss, *chunks))
    effects = replace(asked.basis, offers=offers).context.effects(1)
    tried = 0
    for i, region in enumerate(effects.regions):
        for o, option in enumerate(region.options):
            if option.decision is not None:
                program = rewritten(profile.program, [option.decision], profile.spec)
                assert program.footprint.peak_bytes == effects.problem.peak({i: o})
                tried += 1
    assert tried >= 8


@pytest.mark.slow
def test_slices_of_layers_reach_what_recomputation_and_the_loss_do_not(
    case: tuple[nn.Module, torch.Tensor],
) -> None:
    model, batch = case
    profile = profile_on()
    alone = sacplan.plan(profile, "smallest")
    smallest = smallest_of_both()
    assert {chunk.span for chunk in smallest.chunks} >= {"module"}
    assert smallest.peak_bytes < 0.8 * alone.peak_bytes
    assert_predicted(model, batch, smallest, loss_fn)


def test_gradients_of_a_plan_with_both(case: tuple[nn.Module, torch.Tensor]) -> None:
    """Recipes around a chunk, and inside of the same layer."""
    model, batch = case
    plan = smallest_of_both()
    assert plan.discarded
    assert plan.gradients == "close"

    expected = step(model, batch, loss_fn)
    with sacplan.apply(model, plan) as handle:
        for _ in range(2):  # a product of fewer rows may run in another kernel
            close(step(model, batch, loss_fn), expected, near=("",), rtol=2e-6)
        assert not handle.differences


@pytest.mark.parametrize(
    ("unit", "why"),
    [("layers.1", "goes through its last op as it is"), ("embed", "no floating-point activation")],
)
def test_modules_that_cannot_run_in_slices(unit: str, why: str) -> None:
    profile = profile_on()
    with pytest.raises(CannotChunk, match=why):
        training_chunk(profile.program, Chunk(unit, "module", 4, 1), profile.spec)


def autocast_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean_square(model, x)


@functools.cache
def of_residual_layers() -> tuple[nn.Module, torch.Tensor, sacplan.Profile]:
    torch.manual_seed(0)
    layers = (Residual(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
    model = nn.Sequential(nn.Embedding(VOCAB, 16), *layers, nn.LayerNorm(16))
    batch = torch.randint(0, VOCAB, (2, 48))
    return model, batch, sacplan.profile(model, batch, autocast_loss, device="cpu")


def test_residual_layers_beside_each_other_under_autocast() -> None:
    """What comes in and what a layer makes are added up in place, and so is that sum, which is the layer's own."""
    model, batch, profile = of_residual_layers()
    # Of different numbers of slices, so each is rehearsed by itself: none is taken over from the other layer.
    plan = plan_with(profile, [Chunk("2", "module", 6, 1), Chunk("1", "module", 4, 1)])
    assert_predicted(model, batch, plan, autocast_loss)


def test_chunks_that_do_not_go_together_are_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the recorded step they may not, where the search puts them together with what is settled."""
    _, _, profile = of_residual_layers()
    proposed = []

    def refused(program: Program, decisions: Sequence[Any], device: Any) -> str:
        proposed.append({one.unit for one in decisions})
        return "they do not" if proposed[-1] >= {"1", "2"} else ""

    monkeypatch.setattr(search, "why_not", refused)
    found = sacplan.plan(profile, "smallest", "greedy", techniques=("chunk",))
    assert {"1", "2"} in [units & {"1", "2"} for units in proposed]
    assert not {chunk.unit for chunk in found.chunks} >= {"1", "2"}


def residual_net() -> nn.Module:
    """Under autocast all of a layer runs in slices: the sum's gradient is cast for one of its inputs."""
    torch.manual_seed(0)
    return TokenModel((FeedForward(32, dropout=0.0) for _ in range(2)), 32, VOCAB)


def under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_fn(model, x)


@functools.cache
def of_residual_net() -> sacplan.Profile:
    return sacplan.profile(residual_net(), torch.randint(0, VOCAB, (4, 96)), under_autocast, device="cpu")


def plan_of_both(profile: sacplan.Profile, *chunks: Chunk) -> sacplan.Plan:
    """Layers in slices, and of each the cast of a weight discarded that only the backward pass reads."""
    cast = CallSite("aten._to_copy.default", 1, "down")
    sites = {chunk.unit: [] for chunk in chunks} | {f"layers.{i}": [cast] for i in range(2)}
    sliced = rewritten(profile.program, chunks, profile.spec)
    plan = discarding(sacplan.policy("none", profile=profile), sites, replace(profile, recorded=sliced))
    decisions = (*chunks, *plan.decisions)
    peak_bytes = rewritten(profile.program, decisions, profile.spec).footprint.peak_bytes
    return msgspec.structs.replace(plan, decisions=decisions, peak_bytes=peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("slices", [2, 4])
def test_a_layer_in_slices_that_discards_casts_takes_what_is_predicted(slices: int) -> None:
    batch = torch.randint(0, VOCAB, (4, 96))
    profile = sacplan.profile(residual_net(), batch, under_autocast, device="cpu")
    layers = [Chunk(f"layers.{i}", "module", slices, 1) for i in range(2)]
    for chunks in ([layers[0]], layers, [*layers, Chunk("head", "rest", 16, 1)]):
        plan = plan_of_both(profile, *chunks)
        assert_predicted(residual_net(), batch, plan, under_autocast)


def test_layers_of_a_list_are_alike() -> None:
    profile = of_residual_net()
    found = module_chunks(profile.program, profile.program.calls["layers.1"][0], profile.spec)
    assert [each[0].unit for each in found] == ["layers.0", "layers.1"]


def test_a_handle_on_a_module_with_both_is_removed() -> None:
    """One stand-in lies over the other; copies have both, and shallow ones none."""
    model, batch = residual_net(), torch.randint(0, VOCAB, (4, 96))
    plan = plan_of_both(of_residual_net(), Chunk("layers.0", "module", 2, 1))
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    handle = sacplan.apply(model, plan)
    assert handle.units.count("layers.0") == 2

    twin, shallow = copy.deepcopy(model), copy.copy(model.layers[0])
    over = twin.layers[0].forward
    assert over.module is over.replaced.module is twin.layers[0]
    assert "forward" not in shallow.__dict__

    assert bit_equal(*(grads_of(net, batch, under_autocast) for net in (model, twin)))
    handle.remove()
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    sacplan.apply(model, plan).remove()

    handle = sacplan.apply(model, plan)
    model.layers[0].forward = lambda x: x
    with pytest.raises(sacplan.errors.PlanError, match="was replaced after the plan was applied"):
        handle.remove()


# --- how much is rehearsed


def pooled(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    """Two modules of one name and one number of ops, of which one reads a parameter and no activation."""
    return self.head(self.block["norm"](x * 2) + self.pool["norm"](self.query))


def test_modules_of_one_name_need_not_be_alike() -> None:
    parts = {name: nn.ModuleDict({"norm": nn.Linear(8, 8)}) for name in ("block", "pool")}
    model = FromFunction(pooled, **parts, query=nn.Parameter(torch.randn(64, 8)), head=nn.Linear(8, 8))
    profile = sacplan.profile(model, torch.randn(64, 8), mean_square, device="cpu")
    program = profile.program
    (found,) = module_chunks(program, program.calls["block.norm"][0], profile.spec)
    assert found[0].unit == "block.norm"
