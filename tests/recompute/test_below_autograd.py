"""What a custom function computes with composite ops, which autograd does not take apart there, can be discarded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from tests.support.steps import mean_square
from tests.zoo.layers import FromFunction


class Heads(torch.autograd.Function):
    """Keeps a copy of its input that ``contiguous`` and ``flatten`` make."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        kept = x.unflatten(1, (8, 8)).transpose(1, 2).contiguous().flatten(1)
        ctx.save_for_backward(kept)
        return kept.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return (grad * kept.cos()).reshape(-1, 8, 8).transpose(1, 2).reshape(-1, 64)


@pytest.mark.parametrize("trace", ["fake", "real"])
def test_copies_below_autograd_run_again(trace: Any) -> None:
    torch.manual_seed(0)
    layers = [FromFunction(lambda self, x: Heads.apply(self.up(x)), up=nn.Linear(64, 64)) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.randn(256, 64)
    profile = sacplan.profile(model, x, mean_square, device="cpu", trace=trace)
    plan = sacplan.plan(profile, "smallest")
    # Each layer keeps a copy and what the next one reads; a plan keeps the latter alone, but for the last layer.
    assert profile.peak_bytes - plan.peak_bytes >= 3 * 256 * 64 * 4
    assert sacplan.verify(model, x, plan, mean_square).peak_bytes == plan.peak_bytes
    assert sacplan.verify(model, x, plan, mean_square, run="real").peak_bytes == plan.peak_bytes
    expected = copy.deepcopy(model)
    mean_square(expected, x).backward()
    with sacplan.apply(model, plan) as handle:
        mean_square(model, x).backward()
    assert not handle.differences
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
