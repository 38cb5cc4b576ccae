"""Random heads and losses: what a chunk is said to take is what a fake step with it takes, or there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sacplan
from sacplan.profiling.tracing import StepRequest, trace_step
from sacplan.techniques.chunk.entries import loss_chunks
from sacplan.techniques.chunk.executor.install import InstalledChunks
from sacplan.techniques.registry import rewritten
from tests.zoo.layers import FromFunction

WIDTH, CLASSES = 8, 60

# By name, what a head may do with its input beside products; all but the last work token by token.
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "softmax": lambda h: h.softmax(-1),
    "scale": lambda h: h * 0.5,
    "cap": lambda h: 5 * torch.tanh(h / 5),
    "centre": lambda h: h - h.mean(-1, keepdim=True),
    "norm": lambda h: F.layer_norm(h, h.shape[-1:]),
    "twice": lambda h: torch.cat([h, h.relu()], -1).chunk(2, -1)[1] + h,
    "move": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
    "across": lambda h: h - h.mean(1, keepdim=True),
}


def model_of(ops: list[str]) -> nn.Module:
    def head(self: FromFunction, h: torch.Tensor) -> torch.Tensor:
        h = self.inner(h)
        for name in ops:
            h = OPS[name](h)
        return self.out(h)

    torch.manual_seed(0)
    return FromFunction(
        lambda self, x: self.head(self.body(x).tanh()),
        body=nn.Linear(WIDTH, WIDTH),
        head=FromFunction(head, inner=nn.Linear(WIDTH, WIDTH), out=nn.Linear(WIDTH, CLASSES)),
    )


def labels(logits: torch.Tensor) -> torch.Tensor:
    return (torch.arange(logits.shape[:-1].numel()) % logits.shape[-1]).view(logits.shape[:-1])


def entropy(logits: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels(logits).flatten(), **how)


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": entropy,
    "sum": lambda z: entropy(z, reduction="sum") / 7,
    "smoothed": lambda z: entropy(z, label_smoothing=0.1),
    "shifted": lambda z: entropy(z[:, 1:]),
    "with z": lambda z: entropy(z) + 1e-3 * z.logsumexp(-1).square().mean(),
    "gathered": lambda z: -z.log_softmax(-1).gather(-1, labels(z)[..., None]).mean(),
    "weighted": lambda z: (entropy(z, reduction="none") * torch.linspace(0, 1, z[..., 0].numel())).sum(),
    "by sample": lambda z: entropy(z, reduction="none").view(z.shape[:-1]).mean(1).square().mean(),
    "largest": lambda z: z.amax(),
    "squares": lambda z: z.square().mean(),
}


def gradients(model: nn.Module, x: torch.Tensor, loss_fn: Any) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model, x)
    loss.backward()
    return [loss.detach() + 0, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "h100"])
@settings(max_examples=6, deadline=None)
@given(
    ops=st.lists(st.sampled_from(list(OPS)), max_size=3),
    loss=st.sampled_from(list(LOSSES)),
    rows=st.integers(1, 3),
    length=st.integers(2, 21),
)
def test_random_heads(device: str, ops: list[str], loss: str, rows: int, length: int) -> None:
    model, x = model_of(ops), torch.linspace(-1, 1, rows * length * WIDTH).view(rows, length, WIDTH).sin()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return LOSSES[loss](model(x))

    profile = sacplan.profile(model, x, loss_fn, device=device)
    found = loss_chunks(profile.program, profile.spec)
    if not found.chunks:
        return
    expected = gradients(model, x, loss_fn)
    for chunk in found.chunks[:3]:
        predicted = rewritten(profile.program, (chunk,), profile.spec)
        seen = trace_step(StepRequest(
            model, x, loss_fn, None, device, "cost-model", "fake",
            prepare=lambda fake, chunk=chunk: InstalledChunks(fake, [chunk]), saved="observe",
        ))  # fmt: skip
        assert predicted.footprint.peak_bytes == seen.peak_bytes, chunk
        assert predicted.step_ms == pytest.approx(seen.program.step_ms, rel=1e-9), chunk
        installed = InstalledChunks(model, [chunk])
        got = gradients(model, x, loss_fn)
        assert not installed.differences
        installed.remove()
        for a, b in zip(got, expected, strict=True):
            assert (a - b).norm() <= 2e-5 * b.norm() + 1e-7, chunk
