"""A predicted peak is that of the fake step and of the measured one.

To the byte, on a CPU: of small models, of several of transformers, and of one with a vocabulary of 128,256 words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sacplan
from benchmarks.harness.budgets import steps_of
from benchmarks.models import chunk_models, hf_models
from benchmarks.models.cases import Case
from benchmarks.random_programs import make_program
from tests.support.recomputing import assert_peak_is_replayed, random_plan
from tests.support.slow import slow_after
from tests.support.steps import bit_equal
from tests.zoo.language_models import LM, cross_entropy, tokens


@pytest.mark.parametrize(
    ("techniques", "share"),
    [(("recompute",), "80%"), (("recompute", "chunk"), "60%")],
    ids=["recompute", "chunk"],
)
def test_the_prediction_is_the_fake_step_and_the_measured_one(
    techniques: tuple[str, ...], share: str
) -> None:
    torch.manual_seed(0)
    model, batch = LM(vocab=2000), tokens(8, 64, 2000)
    step: dict[str, Any] = {"loss_fn": cross_entropy, "optimizer": torch.optim.AdamW}
    profile = sacplan.profile(model, batch, **step, device="cpu")
    plan = sacplan.plan(profile, share, techniques=techniques)
    assert bool(plan.chunks) == ("chunk" in techniques)
    for run in ("fake", "real"):
        seen = sacplan.verify(model, batch, plan, **step, run=run)
        assert seen.peak_bytes == plan.peak_bytes
        assert seen.within_budget
        assert seen.recompute_flops == plan.recompute_flops


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt2", "t5", "resnet", "mixtral", "llama+lora", "llama+accumulation", "vocabulary-128k"]
)
def test_predicted_peaks_and_bit_equal_gradients(name: str) -> None:
    torch.manual_seed(0)
    if name == "vocabulary-128k":
        case = chunk_models.large_vocabulary()
    else:
        case = Case(*hf_models.build(name, "small", "cpu", dropout=0.1, copies=4))
    unplanned, *planned = steps_of(name, "", case)
    assert unplanned.predicted_bytes == unplanned.measured_bytes
    assert len(planned) == 3
    for row in planned:
        assert row.predicted_bytes == row.measured_bytes < unplanned.measured_bytes
        assert row.within_budget
        assert row.bit_equal


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_the_optimizers_state_and_step_count(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model, batch = LM(vocab=2000), tokens(2, 16, 2000)
    profile = sacplan.profile(model, batch, optimizer=optimizer, device="cpu")
    before = [p.detach().clone() for p in model.parameters()]
    plan = sacplan.plan(profile, "100%")
    seen = sacplan.verify(model, batch, plan, optimizer=optimizer, run="real")
    assert profile.peak_bytes == seen.peak_bytes
    assert bit_equal(before, list(model.parameters()))  # verify put everything back


@pytest.mark.parametrize("seed", slow_after(8, [1, 2, 5, 6, 8, 13, 16, 18, 20, 23, 24, 29, 31, 33, 36]))
def test_the_replayed_peak_is_that_of_the_step(seed: int) -> None:
    """Of programs that autograd itself does not refuse. With an optimizer two steps run, and the second one counts."""
    program = make_program(seed)
    x = program.batch(0)
    for optimizer in (None, torch.optim.SGD):
        profile = sacplan.profile(program.net, x, program.loss, optimizer, device="cpu")
        plan = random_plan(profile, seed, fitting=True)
        assert_peak_is_replayed(program.net, plan, x, program.loss, optimizer)
