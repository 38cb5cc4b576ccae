"""Writes in place that follow each other: the old version and the new one take the same memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sacplan
from tests.support.steps import bit_equal, grads_of, mean_square
from tests.zoo.layers import FromFunction


def masked(h: torch.Tensor) -> torch.Tensor:
    """Attention as people write it by hand."""
    mask = torch.ones(len(h), len(h), dtype=torch.bool).triu(1)
    return (h @ h.t()).masked_fill_(mask, -1e9).softmax(-1) @ h


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "alpha dropout": nn.AlphaDropout(0.2),
    # Three writes to one tensor, as in ``AlphaDropout``, and no random numbers.
    "noise": lambda h: h * torch.ones_like(h).add(1).mul_(2).add_(1),
    "masked": masked,
    "relu": lambda h: (h.tanh() + 0.1).relu_(),
}


def blocks(inner: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    def block() -> nn.Module:
        return FromFunction(
            lambda self, x: self.down(inner(self.up(x)).sin()), up=nn.Linear(16, 64), down=nn.Linear(64, 16)
        )

    return nn.Sequential(*(block() for _ in range(3)))


@pytest.mark.parametrize("name", CASES)
def test_copies_may_end_behind_a_write_of_another_layer(name: str) -> None:
    torch.manual_seed(0)
    model, batch = blocks(CASES[name]), torch.randn(32, 16)
    plain = grads_of(model, batch, mean_square)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=("recompute", "offload"))
    assert plan.offloaded
    assert sacplan.verify(model, batch, plan, mean_square).peak_bytes == plan.peak_bytes
    with sacplan.apply(model, plan):
        assert bit_equal(plain, grads_of(model, batch, mean_square))


def written_view(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    """Autograd keeps what ``exp`` returned; a view of it is written, and nobody differentiates that branch."""
    h = self.up(x)
    kept = h.tanh().exp()
    kept.view(12, 2, 4)[:, 1].add_(1.0)
    aside = (kept * kept).detach()
    return h.sin() + aside


def test_a_handle_from_before_a_write_keeps_the_memory() -> None:
    model, batch = (
        nn.Sequential(*(FromFunction(written_view, up=nn.Linear(8, 8)) for _ in range(3))),
        torch.randn(12, 8),
    )
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=("offload",))
    assert plan.offloaded
    assert sacplan.verify(model, batch, plan, mean_square).peak_bytes == plan.peak_bytes
