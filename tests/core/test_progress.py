"""Long calls say what begins, to whoever listens."""

from __future__ import annotations

import torch
from torch import nn

import sacplan
from sacplan.core.progress import stages_go_to


def test_a_listener_hears_each_stage() -> None:
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)]
    profile = sacplan.profile(nn.Sequential(*layers), torch.randn(256, 8), device="cpu")
    heard: list[str] = []
    with stages_go_to(heard.append):
        sacplan.frontier(profile, 2, ["greedy"], policies=False)
        found = sacplan.max_batch(
            nn.Linear(8, 8), lambda n: torch.randn(n, 8), "1MiB", device="cpu", at_most=4
        )
        sacplan.layouts(profile, devices=2)
    assert sum(one.startswith("greedy at ") for one in heard) == 2
    assert sum(one.startswith("batch ") for one in heard) == len(found.points)
    assert any(one.startswith("mesh ") for one in heard)
    n = len(heard)
    sacplan.frontier(profile, 2, ["greedy"], policies=False)
    assert len(heard) == n
