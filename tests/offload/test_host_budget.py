"""One budget for all that a step takes of the host's memory: what waits there, and an optimizer's state."""

import functools

import pytest
import torch

import sacplan
from tests.zoo.language_models import LM, cross_entropy, tokens

TECHNIQUES = ("recompute", "offload")
pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")


@functools.cache
def profile() -> sacplan.Profile:
    with torch.device("meta"):
        model = LM(layers=2, dim=64, vocab=512)
    return sacplan.profile(
        model, tokens(8, 128, 512), cross_entropy, "adamw-offload-gradients", device="h100", trace="fake"
    )


@pytest.mark.slow
def test_the_optimizers_state_is_part_of_the_budget() -> None:
    step = profile()
    on_host = step.optimizer_host_bytes
    # Two moments, the parameters and their gradients; torchao leaves parameters below 4,096 elements on the device.
    large = sum(p.numel() for p in LM(layers=2, dim=64, vocab=512).parameters() if p.numel() >= 4096)
    assert on_host >= 4 * 4 * large
    free = sacplan.plan(step, "55%", techniques=TECHNIQUES)
    assert free.host_bytes
    held = sacplan.plan(step, "55%", techniques=TECHNIQUES, host_budget=f"{on_host + free.host_bytes}B")
    assert 0 < held.host_bytes <= free.host_bytes
    least = sacplan.plan(step, "55%", techniques=TECHNIQUES, host_budget=f"{on_host}B")
    assert least.host_bytes == 0
    half = sacplan.plan(step, "55%", techniques=TECHNIQUES, host_budget=f"{on_host + free.host_bytes // 2}B")
    assert 2 * half.host_bytes <= free.host_bytes
    assert half.recompute_ms + half.added_ms > free.recompute_ms + free.added_ms
    with pytest.raises(sacplan.InfeasibleBudget):
        sacplan.plan(step, "45%", techniques=("offload",), host_budget=f"{on_host}B")


def test_a_budget_below_what_the_optimizer_takes_is_refused() -> None:
    with pytest.raises(sacplan.errors.PlanError, match="without a plan the step takes"):
        sacplan.plan(
            profile(), "55%", techniques=TECHNIQUES, host_budget=f"{profile().optimizer_host_bytes - 1}B"
        )
