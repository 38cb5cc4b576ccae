"""Copies of weights and activations share a slow link: a larger budget costs no more, and N blocks by hand no less."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch

import sacplan
from benchmarks.harness.plans import budget_at
from benchmarks.swapping import TECHNIQUES, best_within, ways_by_hand
from sacplan.device.links import Link
from tests.offload.test_weights import Net
from tests.support.slow import slow_after
from tests.support.steps import mean_square

CASES = {
    "ten blocks": (10, 512, 3e9),
    "few tokens": (6, 256, 8e9),
    "many tokens": (6, 1024, 8e9),
    "a slow link": (6, 256, 3e9),
}


@pytest.mark.parametrize("case", slow_after(1, list(CASES)))
def test_a_larger_budget_costs_no_more_and_no_blocks_by_hand_cost_less(case: str) -> None:
    blocks, tokens, bandwidth = CASES[case]
    spec = sacplan.DeviceSpec.of("h100 without workspaces")
    device = dataclasses.replace(spec, host_link=Link("slow", bandwidth, 2.5e-6))
    with torch.device("meta"):
        model, batch = Net(blocks=blocks, width=512), torch.zeros(2, tokens, dtype=torch.long)
    profile = sacplan.profile(model, batch, mean_square, torch.optim.SGD, device=device)
    smallest = sacplan.plan(profile, "smallest", techniques=TECHNIQUES).peak_bytes
    costs, by_hand = [], ways_by_hand(profile)
    for share in range(8):
        budget = budget_at(share / 8, smallest, profile.peak_bytes)
        plan = sacplan.plan(profile, f"{budget}B", techniques=TECHNIQUES)
        costs.append(plan.recompute_ms + plan.added_ms)
        hand = best_within(by_hand, budget)
        assert hand is None or costs[-1] <= hand["longer_ms"] * (1 + 1e-9)
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(costs))
