"""Twelve architectures: bits stay the same, and both peaks are those of the fake step, alone and with recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sacplan
from benchmarks.models import hf_models
from sacplan.profiling.tracing import StepRequest, trace_step
from tests.support.steps import bit_equal, grads_of

NAMES = (
    "llama", "gpt2", "bert", "vit", "t5", "mixtral", "mamba", "resnet", "whisper", "swin", "falcon", "convnext",
)  # fmt: skip
FAST = ("llama", "resnet")


def peaks_of_fake_step(plan: sacplan.Plan, model: Any, batch: Any, loss_fn: Any) -> tuple[int, int]:
    seen = trace_step(StepRequest(
        model, batch, loss_fn, None, "cpu", "cost-model", "fake",
        prepare=lambda fake: sacplan.apply(fake, plan), saved="observe",
    )).program.footprint  # fmt: skip
    return seen.peak_bytes, seen.host_peak_bytes


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
@pytest.mark.parametrize("techniques", [("offload",), ("recompute", "offload")], ids=["alone", "mixed"])
def test_bits_and_peaks(name: str, techniques: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, batch, loss_of = hf_models.build(name, "small", "cpu", dropout=0.0)
    loss_fn = loss_of or (lambda model, batch: model(**batch).loss)
    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    least = sacplan.plan(profile, "smallest", "greedy", techniques=techniques).peak_bytes
    budget = f"{(least + profile.peak_bytes) // 2}B"
    plan = sacplan.plan(profile, budget, "greedy", techniques=techniques)
    # Of Mamba, recomputing alone is cheaper at this budget, and then it is the plan.
    assert plan.offloaded or (name, len(techniques)) == ("mamba", 2)
    assert peaks_of_fake_step(plan, model, batch, loss_fn) == (plan.peak_bytes, plan.host_bytes)
    plain = grads_of(model, batch, loss_fn)
    with sacplan.apply(model, plan):
        assert bit_equal(plain, grads_of(model, batch, loss_fn))
