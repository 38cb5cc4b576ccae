"""Residual sums across the edge of a region: the gradient of a tensor outside is computed in the entry's loop.

The program that a plan is made of is compared with a fake step of the executor, and with the allocator's events.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan._program.decisions import Chunk
from tests.support.steps import mean_square
from tests.zoo.layers import FromFunction, Residual, Uneven


def check(model: nn.Module, x: torch.Tensor, chunks: list[Chunk]) -> None:
    profile = sacplan.profile(model, x, mean_square, device="cpu")
    plan = plan_with(profile, chunks)
    fake = sacplan.verify(model, x, plan, mean_square, run="fake")
    assert not fake.differences
    assert fake.peak_bytes == plan.peak_bytes
    # Each op runs as often as planned: a loop more would show.
    assert fake.step_ms == pytest.approx(profile.step_ms + plan.recompute_ms + plan.added_ms)
    assert sacplan.verify(model, x, plan, mean_square).peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("others", [(), (3,), (2, 3), (1, 2, 3)])
def test_a_sum_around_the_module_that_the_rest_begins_with(others: tuple[int, ...]) -> None:
    """The gradient of the residual waits for the entry's node, and modules before it see ordinary gradients."""
    torch.manual_seed(0)
    chunks = [Chunk("layers.4", "rest", 16, 1), *(Chunk(f"layers.{k}", "module", 8, 1) for k in others)]
    check(Uneven(), torch.randn(4, 64, 32), chunks)


@pytest.mark.parametrize(
    ("span", "units"),
    [
        ("module", ("layers.0",)),
        ("module", ("layers.0", "layers.2")),
        ("module", ("layers.0.0",)),
        ("backward", ("layers.0.0", "layers.2.0")),
    ],
)
def test_formulas_in_slices_compute_no_gradient_for_the_batch(span: Any, units: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    check(Uneven(), torch.randn(4, 64, 32), [Chunk(unit, span, 8, 1) for unit in units])


def test_a_sum_with_what_did_not_enter() -> None:
    """The rest begins behind a norm in a branch, and the residual goes past both."""
    torch.manual_seed(0)
    branch = FromFunction(
        lambda self, x: x + self.up(self.norm(x)), up=nn.Linear(32, 32), norm=nn.LayerNorm(32)
    )
    model = nn.Sequential(Residual(nn.Linear(32, 32)), branch)
    check(model, torch.randn(4, 64, 32), [Chunk("1.up", "rest", 16, 1)])


def test_a_sum_inside_and_one_around_are_refused() -> None:
    """Which of the gradients are added up in the loop cannot be told."""
    torch.manual_seed(0)
    inner = FromFunction(lambda self, x: x + self.up(x).sin(), up=nn.Linear(32, 32))
    outer = FromFunction(lambda self, x: x + self.inner(x), inner=inner)
    model = nn.Sequential(Residual(nn.Linear(32, 32)), outer)
    profile = sacplan.profile(model, torch.randn(4, 64, 32), mean_square, device="cpu")
    with pytest.raises(sacplan.PlanError, match="adds its input to something, and so do others"):
        plan_with(profile, [Chunk("1.inner", "rest", 16, 1)])


def test_gradients_are_those_of_the_plain_step() -> None:
    torch.manual_seed(0)
    model, x = Uneven().double(), torch.randn(4, 64, 32, dtype=torch.float64)
    mean_square(model, x).backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    profile = sacplan.profile(model, x, mean_square, device="cpu")
    chunks = [Chunk("layers.4", "rest", 16, 1), Chunk("layers.3", "module", 8, 1)]
    with sacplan.apply(model, plan_with(profile, chunks)):
        mean_square(model, x).backward()
    for p, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-14)
