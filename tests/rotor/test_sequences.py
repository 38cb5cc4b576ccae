"""Rotor's sequences as plans: applied, they give the same bits, within the budget, some ops more than once again."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import sacplan
from sacplan.techniques.recompute.rewrite import recomputed
from tests.support.slow import slow_after
from tests.support.steps import bit_equal, grads_of
from tests.zoo import convnets
from tests.zoo.language_models import LM, cross_entropy, tokens

MB = 2**20


def deep_mlp(layers: int = 12, dim: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(layers)))


@pytest.fixture(scope="module")
def gpt() -> tuple[nn.Module, torch.Tensor, sacplan.Profile]:
    torch.manual_seed(0)
    model, batch = LM(layers=6), tokens(8, 128)
    return model, batch, sacplan.profile(model, batch, device="cpu", loss_fn=cross_entropy)


@pytest.mark.parametrize("budget", slow_after(1, ["smallest", "80%", "50%"]))
def test_a_gpt_for_real(gpt: tuple[nn.Module, torch.Tensor, sacplan.Profile], budget: str) -> None:
    model, batch, profile = gpt
    plan = sacplan.plan(profile, budget, solver="rotor")
    seen = sacplan.verify(model, batch, plan, loss_fn=cross_entropy, run="real")
    assert seen.within_budget
    assert seen.peak_bytes <= plan.peak_bytes * 1.0005
    assert seen.recompute_flops == plan.recompute_flops
    expected = grads_of(model, batch, cross_entropy)
    with sacplan.apply(model, plan):
        assert bit_equal(expected, grads_of(model, batch, cross_entropy))
        assert bit_equal(expected, grads_of(model, batch, cross_entropy))  # by the schedule


@pytest.mark.slow
def test_a_large_convnet_on_a_fake_device() -> None:
    budget_bytes = 4000 * MB
    with torch.device("meta"):
        model, batch = convnets.resnet50(), torch.empty(128, 3, 224, 224)
    profile = sacplan.profile(model, batch, device="h100 without workspaces")
    assert profile.peak_bytes > 1.9 * budget_bytes
    plan = sacplan.plan(profile, f"{budget_bytes}B", solver="rotor")
    seen = sacplan.verify(model, batch, plan)
    assert seen.peak_bytes == plan.peak_bytes <= budget_bytes
    assert seen.recompute_flops == plan.recompute_flops


def test_stages_run_more_than_once_again() -> None:
    model, batch = deep_mlp(), torch.randn(256, 64)
    profile = sacplan.profile(model, batch, device="cpu")
    plan = sacplan.plan(profile, "smallest", solver="rotor")
    assert plan.peak_bytes < sacplan.plan(profile, "smallest", solver="milp").peak_bytes
    again = Counter(recomputed(profile.program, plan.discarded).footprint.again)
    assert max(again.values()) > 2
    with FlopCounterMode(display=False) as plain:
        expected = grads_of(model, batch, lambda m, x: m(x).sum())
    with sacplan.apply(model, plan), FlopCounterMode(display=False) as planned:
        assert bit_equal(expected, grads_of(model, batch, lambda m, x: m(x).sum()))
    assert planned.get_total_flops() - plain.get_total_flops() == plan.recompute_flops


def test_what_is_dropped_again_is_in_the_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    profile = sacplan.profile(deep_mlp(), torch.randn(256, 64), device="cpu")
    plan = sacplan.plan(profile, "smallest", solver="rotor")
    assert max(decision.times for decision in plan.decisions) > 1
    plan.save(tmp_path / "plan.json")
    loaded = sacplan.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert recomputed(profile.program, loaded.discarded).footprint.peak_bytes == plan.peak_bytes


def test_peaks_hold_and_budgets_are_used(gpt: tuple[nn.Module, torch.Tensor, sacplan.Profile]) -> None:
    _, _, profile = gpt
    smallest = sacplan.plan(profile, "smallest", solver="rotor").peak_bytes
    for share in range(1, 10):
        budget = smallest + (profile.peak_bytes - smallest) * share // 10
        plan = sacplan.plan(profile, f"{budget}B", solver="rotor")
        assert plan.peak_bytes <= budget
        assert plan.recompute_ms >= plan.lower_bound_ms
        assert plan.peak_bytes > budget - 0.1 * profile.peak_bytes


@pytest.mark.parametrize("budget", ["1%", "1B"])
def test_infeasible_budgets_name_one_that_works(
    gpt: tuple[nn.Module, torch.Tensor, sacplan.Profile], budget: str
) -> None:
    _, _, profile = gpt
    with pytest.raises(sacplan.InfeasibleBudget) as caught:
        sacplan.plan(profile, budget, solver="rotor")
    smallest = caught.value.smallest_feasible_bytes
    assert sacplan.plan(profile, f"{smallest}B", solver="rotor").peak_bytes <= smallest


def test_no_chain_is_an_error() -> None:
    def twice(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).sum() + model(batch * 2).sum()

    profile = sacplan.profile(deep_mlp(3), torch.randn(256, 64), device="cpu", loss_fn=twice)
    with pytest.raises(sacplan.errors.PlanError, match="called 2 times"):
        sacplan.plan(profile, "80%", solver="rotor")
    assert "rotor" not in set(sacplan.frontier(profile, points=2).solver)


def test_pins() -> None:
    model, batch = deep_mlp(), torch.randn(256, 64)
    profile = sacplan.profile(model, batch, device="cpu")
    plan = sacplan.plan(profile, "90%", solver="rotor", keep=["3"])
    kept = {i for i, op in enumerate(profile.program.ops) if profile.program.scopes[op.scope].fqn == "3.1"}
    assert kept.isdisjoint(recomputed(profile.program, plan.discarded).footprint.again)
    with pytest.raises(sacplan.errors.PlanError, match="never"):
        sacplan.plan(profile, "90%", solver="rotor", never=["3"])


def test_compiling_is_refused() -> None:
    model, batch = deep_mlp(), torch.randn(256, 64)
    plan = sacplan.plan(sacplan.profile(model, batch, device="cpu"), "smallest", solver="rotor")
    sacplan.apply(model, plan)
    with pytest.raises(Exception, match="more than once"):
        torch.compile(model, backend="aot_eager")(batch)
