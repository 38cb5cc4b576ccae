"""What waits on the host in sixteen architectures: both peaks, and bits of each step.

Weights are trained, frozen, or in 8 or 4 bits; or they stay, and activations alone are copied.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.models import hf_models
from sacplan.integrations.hf.target import ModelOptions
from tests.support.denoisers import SMALL, small_denoiser
from tests.support.on_host import Int8, OnHost, nf4, optimizer_bytes, quantized
from tests.support.slow import slow_after
from tests.support.steps import bit_equal, peaks_of_steps

NAMES = (
    "llama", "gpt2", "bert", "vit", "t5", "mixtral", "whisper", "resnet", "mamba", "swin", "falcon", "convnext",
    "FLUX.1-dev", "stable-diffusion-3.5-large", "stable-diffusion-xl-base-1.0", "Wan2.1-T2V-14B-Diffusers",
)  # fmt: skip
QUANTIZED = {"8 bits": Int8, "4 bits": nf4}
KINDS = ("trained", "activations", "frozen", *QUANTIZED)
FAST = [("llama", "trained"), ("llama", "activations"), ("resnet", "activations")]
CASES = FAST + [(name, kind) for name in NAMES for kind in KINDS if (name, kind) not in FAST]
HOW = {"lr": 1e-3, "fused": True}
OPTIMIZERS = dict.fromkeys(KINDS, "adamw") | {"trained": "adamw-offload-gradients"}


def build(name: str, kind: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    if name in SMALL:
        made = small_denoiser(name, ModelOptions(dtype="float32"))
        model, batch, loss_fn = made.model, made.batch, made.loss_fn
    else:
        model, batch, loss_of = hf_models.build(name, "small", "cpu", dropout=0.0)
        loss_fn = loss_of or (lambda model, batch: model(**batch).loss)
    if kind not in ("trained", "activations"):  # norms and biases are trained
        for p in model.parameters():
            p.requires_grad_(p.dim() == 1)
    return quantized(model, QUANTIZED[kind]) if kind in QUANTIZED else model, batch, loss_fn


def optimizer_of(kind: str, model: nn.Module) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return OnHost(parameters, **HOW) if kind == "trained" else torch.optim.AdamW(parameters, **HOW)


def after_steps(model: nn.Module, batch: Any, loss_fn: Any, optimizer: Any) -> list[torch.Tensor]:
    """Return the losses of two steps, and the weights behind them."""
    losses = []
    torch.manual_seed(1)  # for dropout
    for _ in range(2):
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(t.clone() for t in model.state_dict().values())]


@pytest.mark.parametrize(("name", "kind"), slow_after(len(FAST), CASES))
def test_peaks_and_bits(name: str, kind: str) -> None:
    model, batch, loss_fn = build(name, kind)
    profile = sacplan.profile(model, batch, loss_fn, OPTIMIZERS[kind], device="cpu")
    techniques = ("offload",) if kind == "activations" else ("recompute", "offload")
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=techniques)
    assert plan.offloaded if kind == "activations" else plan.offloaded_weights
    assert kind != "activations" or not plan.offloaded_weights
    fake = sacplan.verify(model, batch, plan, loss_fn, OPTIMIZERS[kind])
    assert (fake.peak_bytes, fake.host_bytes) == (plan.peak_bytes, plan.host_bytes)
    wanted = after_steps(plain := copy.deepcopy(model), batch, loss_fn, optimizer_of(kind, plain))
    with sacplan.apply(model, plan) as handle:
        assert bit_equal(wanted, after_steps(model, batch, loss_fn, optimizer_of(kind, model)))
        assert not handle.differences

    def planned() -> tuple[Any, ...]:
        made, given, _ = build(name, kind)
        sacplan.apply(made, plan)
        return made, given, optimizer_of(kind, made)

    # A CPU has one memory, and the peaks of both parts may be at different times.
    both = max(one.live_bytes + one.host_bytes for one in profile.with_plan(plan).liveness.moments)
    of_optimizer = optimizer_bytes(model) if kind == "trained" else 0
    assert peaks_of_steps(planned, 3, loss_fn)[-1] == both + of_optimizer
