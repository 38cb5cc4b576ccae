"""Modules inside modules: the frame of each call holds what it was called with, and no plan can free that."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sacplan
from tests.support.chunks import allocations
from tests.support.steps import mean_square


class NestedCalls(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer, self.next = nn.Linear(32, 32), NestedCalls(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x if self.next is None else self.next(x)


def test_the_smallest_plan_is_near_what_a_forward_pass_without_gradients_holds() -> None:
    model, batch = NestedCalls(20), torch.randn(1024, 32)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    with torch.no_grad():
        _, added = allocations(lambda: mean_square(model, batch))
    held = added + sum(each.nbytes for each in (batch, *model.parameters()))
    assert held <= sacplan.plan(profile, "smallest").peak_bytes <= 1.05 * held
