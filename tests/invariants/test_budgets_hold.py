"""A plan keeps its budget, a larger budget costs no more, and the smallest budget that an error names can be kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import sacplan
from sacplan.techniques.recompute.rewrite import recomputed
from tests.zoo.language_models import LM, cross_entropy, tokens

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    with torch.device("meta"):
        model = LM(layers=4, dim=128, vocab=1000)
    return sacplan.profile(model, tokens(8, 128, 1000), loss_fn=cross_entropy, device="h100")


@pytest.mark.parametrize("solver", ["best", "milp", "greedy"])
def test_plans_hold_and_are_monotone(profile: sacplan.Profile, solver: str) -> None:
    smallest = sacplan.plan(profile, "smallest", solver).peak_bytes
    last_ms = float("inf")
    for i in range(9):
        budget = smallest + (profile.peak_bytes - smallest) * i // 8
        plan = sacplan.plan(profile, f"{budget}B", solver)
        assert plan.peak_bytes <= budget
        assert plan.peak_bytes == recomputed(profile.program, plan.discarded).footprint.peak_bytes
        if solver == "best":
            assert plan.recompute_ms <= last_ms * (1 + 1e-9)
        last_ms = plan.recompute_ms
    assert plan.recompute_ms == 0
    assert plan.status == "unplanned"


@pytest.mark.parametrize("solver", [sacplan.Milp(), sacplan.Greedy()])
def test_the_smallest_budget_that_is_named_holds(profile: sacplan.Profile, solver) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(sacplan.InfeasibleBudget) as info:
        sacplan.plan(profile, "1KiB", solver=solver)
    smallest = info.value.smallest_feasible_bytes
    assert sacplan.plan(profile, f"{smallest}B", solver=solver).peak_bytes <= smallest


def _perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))
    )


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3)


def _convolutions() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(5)))


SWEPT: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, object]]] = {
    "language model": lambda: (LM(layers=3, dim=64, vocab=300), tokens(4, 64, 300), cross_entropy),
    "encoder": lambda: (_encoder(), torch.randn(8, 32, 64, requires_grad=True), None),
    "perceptron": lambda: (_perceptron(), torch.randn(512, 64), None),
    "convolutions": lambda: (_convolutions(), torch.randn(4, 8, 32, 32), None),
}


@pytest.mark.parametrize("name", SWEPT)
def test_peaks_and_costs_are_monotone_in_the_budget(name: str) -> None:
    torch.manual_seed(0)
    model, x, loss_fn = SWEPT[name]()
    profile = sacplan.profile(model, x, loss_fn=loss_fn, device="h100")  # type: ignore[arg-type]
    smallest = sacplan.plan(profile, "smallest").peak_bytes
    assert smallest < 0.9 * profile.peak_bytes
    plans = []
    for i in range(20):
        budget = smallest + (profile.peak_bytes - smallest) * i // 19
        plans.append(sacplan.plan(profile, f"{budget}B"))
        assert plans[-1].peak_bytes <= budget
    peaks, costs = [p.peak_bytes for p in plans], [p.recompute_ms for p in plans]
    assert peaks == sorted(peaks)
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(costs))
