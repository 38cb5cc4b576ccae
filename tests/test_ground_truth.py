"""Predicted peaks against the CPU allocator itself: the profiler's allocation events of a real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import sacplan
from sacplan._measure import measured_step
from sacplan._step import Step, default_loss, preserved_state
from tests.models import LM, bit_equal, grads_of

Case = tuple[nn.Module, dict[str, torch.Tensor]]


def _words(vocab: int, *shape: int) -> torch.Tensor:
    return torch.randint(5, vocab, shape)


def gpt2() -> Case:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=192, n_head=4, vocab_size=4000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    x = _words(4000, 8, 128)
    return transformers.GPT2LMHeadModel(config), {"input_ids": x, "labels": x}


def bert() -> Case:
    config = transformers.BertConfig(
        num_hidden_layers=4, hidden_size=192, num_attention_heads=4, intermediate_size=768, vocab_size=4000
    )
    x = _words(4000, 8, 128)
    return transformers.BertForMaskedLM(config), {"input_ids": x, "labels": x}


def t5() -> Case:
    config = transformers.T5Config(
        num_layers=3, d_model=192, d_ff=768, num_heads=4, d_kv=48, vocab_size=4000, decoder_start_token_id=0
    )
    x = _words(4000, 8, 128)
    return transformers.T5ForConditionalGeneration(config), {"input_ids": x, "labels": x}


def resnet() -> Case:
    config = transformers.ResNetConfig(
        depths=[2, 2, 2], layer_type="basic", hidden_sizes=[32, 64, 128], embedding_size=32, num_labels=10
    )
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": torch.randn(8, 3, 96, 96),
        "labels": torch.randint(0, 10, (8,)),
    }


@pytest.mark.parametrize(
    ("make", "unplanned_tolerance", "planned_tolerance"),
    [(gpt2, 0.005, 0.01), (bert, 0.005, 0.01), (t5, 0.005, 0.01), (resnet, 0.03, 0.03)],
)
def test_predicted_peaks_and_bit_equal_gradients(
    make: Callable[[], Case], unplanned_tolerance: float, planned_tolerance: float
) -> None:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    profile = sacplan.profile(model, batch, device="cpu")
    with preserved_state(model, None):
        measured = measured_step(Step(model, batch, default_loss, None), batch.values()).peak_bytes
    assert profile.peak_bytes == pytest.approx(measured, rel=unplanned_tolerance)

    plain = grads_of(model, batch, default_loss)
    smallest = sacplan.plan_smallest(profile).peak_bytes
    for share in (0.05, 0.3, 0.7):
        budget = int(smallest + share * (profile.peak_bytes - smallest))
        plan = sacplan.plan(profile, f"{budget}B")
        assert plan.units
        seen = sacplan.verify(model, batch, plan, run="real")
        assert plan.peak_bytes == pytest.approx(seen.peak_bytes, rel=planned_tolerance)
        if make is not resnet:  # a convolution's workspace is measured, and differs a little from run to run
            assert seen.within_budget
        with sacplan.apply(model, plan):
            assert bit_equal(plain, grads_of(model, batch, default_loss))


def test_loss_outside_of_the_model_with_a_large_vocabulary() -> None:
    """Where PyTorch's prototype is 54 % too low: logits, log-softmax and their gradients are the peak."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch)
        return F.cross_entropy(logits.float().flatten(0, 1), batch.flatten())

    model, batch = LM(layers=2, vocab=128_000), _words(128_000, 2, 64)
    profile = sacplan.profile(model, batch, loss_fn=loss_fn, device="cpu")
    with preserved_state(model, None):
        measured = measured_step(Step(model, batch, loss_fn, None), [batch]).peak_bytes
    assert profile.peak_bytes == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_the_optimizers_state_and_step_count(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model, batch = LM(vocab=2000), _words(2000, 2, 16)
    profile = sacplan.profile(model, batch, optimizer=optimizer, device="cpu")
    before = [p.detach().clone() for p in model.parameters()]
    plan = sacplan.plan(profile, "100%")
    seen = sacplan.verify(model, batch, plan, optimizer=optimizer, run="real")
    assert profile.peak_bytes == pytest.approx(seen.peak_bytes, rel=0.005)
    assert bit_equal(before, list(model.parameters()))  # verify put everything back
