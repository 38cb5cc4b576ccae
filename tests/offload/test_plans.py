"""Plans that offload: predicted peaks are those of the fake step and of the measured one, and bits stay the same."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import sacplan
from tests.zoo import language_models as models

BOTH = ("recompute", "offload")
GPU = "h100 without workspaces"


@cache
def step(device: str) -> tuple[models.LM, torch.Tensor, sacplan.Profile]:
    torch.manual_seed(0)
    model, batch = models.LM(layers=4, vocab=32), torch.randint(0, 32, (8, 64))
    return model, batch, sacplan.profile(model, batch, models.cross_entropy, device=device)


@cache
def planned(device: str, share: str, techniques: tuple[str, ...] = BOTH) -> sacplan.Plan:
    return sacplan.plan(step(device)[2], share, techniques=techniques)


def test_the_prediction_is_the_fake_step_of_a_gpu() -> None:
    model, batch, _ = step(GPU)
    for share in ("70%", "45%"):
        plan = planned(GPU, share)
        assert plan.offloaded
        assert sacplan.verify(model, batch, plan, models.cross_entropy).peak_bytes == plan.peak_bytes


@pytest.mark.slow
def test_the_hosts_memory_is_a_limit() -> None:
    profile, free = step(GPU)[2], planned(GPU, "45%")
    tight = sacplan.plan(profile, "45%", techniques=BOTH, host_budget=f"{free.host_bytes // 2}B")
    assert tight.host_bytes <= free.host_bytes // 2
    assert tight.recompute_ms + tight.added_ms > free.recompute_ms + free.added_ms
    with pytest.raises(sacplan.InfeasibleBudget):
        sacplan.plan(profile, "45%", techniques=("offload",), host_budget="64KiB")


def test_a_plan_file_and_the_words_of_a_plan(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = planned("cpu", "45%")
    plan.save(tmp_path / "plan.json")
    assert sacplan.Plan.load(tmp_path / "plan.json") == plan
    assert "on the host" in str(plan)
