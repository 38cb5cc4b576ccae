"""A wider choice of techniques costs no more than one that it contains, and holds every budget that this one holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import combinations, permutations

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.plans import budget_at, plan_or_least
from benchmarks.models.cases import Case
from sacplan.device.links import Link
from sacplan.techniques.registry import TECHNIQUES
from tests.support.steps import mean_square
from tests.zoo.convnets import ConvGRU, Inverted
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FeedForward, Residual, Uneven

# The link is slow for an H100, so that offloading may hold a budget at a high price.
DEVICE = dataclasses.replace(
    sacplan.DeviceSpec.of("h100 without workspaces"), host_link=Link("slow", 6e9, 2.5e-6)
)


def _convolutions(channels: int) -> nn.Module:
    return Residual(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
    )


MODELS: dict[str, Callable[[], Case]] = {
    "convolutions": lambda: Case(
        nn.Sequential(*(_convolutions(32) for _ in range(6))), torch.randn(16, 32, 64, 64), mean_square
    ),
    # Rotor recomputes less for the smallest peak than copies would take.
    "feed-forward": lambda: Case(
        nn.Sequential(*(FeedForward(128) for _ in range(4))), torch.randn(4096, 128), mean_square
    ),
    "language model": lambda: Case(LM(layers=2, dim=64, vocab=1000), tokens(8, 128, 1000), cross_entropy),
    "inverted": lambda: Case(
        nn.Sequential(*(Inverted(16) for _ in range(3))), torch.randn(16, 16, 32, 32), mean_square
    ),
    "uneven": lambda: Case(Uneven(), torch.randn(64, 512, 32), mean_square),
    "recurrence": lambda: Case(ConvGRU(), torch.randn(64, 8, 128), mean_square),
}


def _cost_ms(profile: sacplan.Profile, budget_bytes: int, techniques: tuple[str, ...]) -> float:
    """Return what a plan adds to the step; infinity if none holds the budget."""
    plan, _ = plan_or_least(profile, budget_bytes, techniques=techniques)
    return float("inf") if plan is None else plan.recompute_ms + plan.added_ms


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_more_techniques_cost_no_more(name: str) -> None:
    with torch.device("meta"):
        case = MODELS[name]()
    profile = sacplan.profile(case.model, case.batch, case.loss_fn, device=DEVICE)
    choices = [choice for n in range(1, len(TECHNIQUES) + 1) for choice in combinations(TECHNIQUES, n)]
    smallest = {choice: sacplan.plan(profile, "smallest", techniques=choice).peak_bytes for choice in choices}
    middle = budget_at(0.4, smallest[("recompute",)], profile.peak_bytes)
    costs = {
        budget: {choice: _cost_ms(profile, budget, choice) for choice in choices}
        for budget in {*smallest.values(), middle}
    }
    for narrow, wide in permutations(choices, 2):
        if set(narrow) < set(wide):
            assert smallest[wide] <= smallest[narrow]
            for budget, cost in costs.items():
                # The same ops may be added up in another order.
                assert cost[wide] <= cost[narrow] * (1 + 1e-12), (budget, narrow, wide)
    for choice in choices:
        assert costs[smallest[choice]][choice] < float("inf")
