"""Residual sums across the edge of a region: the gradient of a tensor outside is computed in the entry's loop.

The program that a plan is made of is compared with a fake step of the executor, and with the allocator's events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from tests.support.slow import slow_after
from tests.support.steps import grads_of, mean_square
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


@pytest.mark.slow
@pytest.mark.parametrize("others", [(), (3,), (2, 3), (1, 2, 3)])
def test_a_sum_around_the_module_that_the_rest_begins_with(others: tuple[int, ...]) -> None:
    """The gradient of the residual waits for the entry's node, and modules before it see ordinary gradients."""
    torch.manual_seed(0)
    chunks = [Chunk("layers.4", "rest", 16, 1), *(Chunk(f"layers.{k}", "module", 8, 1) for k in others)]
    check(Uneven(), torch.randn(4, 64, 32), chunks)


@pytest.mark.parametrize(
    ("span", "units"),
    [
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


def inner(function: Callable[..., torch.Tensor], norm: nn.Module | None = None) -> nn.Module:
    """A module in which others, beside it, read what enters."""
    return FromFunction(
        function, up=nn.Linear(32, 32), norm=norm or nn.LayerNorm(32), p=nn.Parameter(torch.randn(32))
    )


def around(
    function: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    module: nn.Module,
    before: nn.Module | None = None,
) -> nn.Module:
    outer = FromFunction(lambda self, x: function(self.inner, x), inner=module)
    return nn.Sequential(before or Residual(nn.Linear(32, 32)), outer)


HEADS = FromFunction(lambda self, x: self.up(x).view(4, 64, 2, 16), up=nn.Linear(32, 32))


BESIDE: dict[str, tuple[Any, nn.Module]] = {
    "a difference": (lambda f, x: x - f(x), inner(lambda self, x: self.up(self.norm(x)))),
    "a view of the sum's gradient, back and forth": (lambda f, x: x + f(x).view_as(x), HEADS),
    "rows": (lambda f, x: x + f(x).view_as(x), inner(lambda self, x: self.up(x.flatten(0, 1)))),
    "both are parts of one gradient": (lambda f, x: torch.cat([x, f(x)], 2), nn.Linear(32, 32)),
    "beside each other": (lambda f, x: torch.cat([x, f(x)]), nn.Linear(32, 32)),
    "parts inside": (lambda f, x: f(x).sin(), inner(lambda self, x: torch.cat([x, self.up(x)], 2))),
}


@pytest.mark.parametrize("name", slow_after(4, BESIDE))
def test_what_reads_the_input_beside_the_module(name: str) -> None:
    torch.manual_seed(0)
    check(around(*BESIDE[name]), torch.randn(4, 64, 32), [Chunk("1.inner", "rest", 16, 1)])


HANDED_ON: dict[str, Callable[..., torch.Tensor]] = {
    "a sum": lambda self, x: x + self.up(x).sin(),
    "with a parameter": lambda self, x: x - self.p,
    "a view": lambda self, x: x.view(4, 64, 2, 16) - self.p[:16],
    "another order": lambda self, x: (x.transpose(0, 1) - self.p).transpose(0, 1),
    "a part": lambda self, x: torch.cat([x, self.up(x)], 2)[..., 32:],
}


@pytest.mark.parametrize("name", slow_after(2, HANDED_ON))
def test_a_gradient_that_is_handed_on_in_the_module_and_beside_it_is_refused(name: str) -> None:
    """Both may be one tensor, or views of one: which is the module's cannot be told."""
    torch.manual_seed(0)
    model = around(lambda f, x: x + f(x).reshape_as(x), inner(HANDED_ON[name]))
    profile = sacplan.profile(model, torch.randn(4, 64, 32), mean_square, device="cpu")
    with pytest.raises(
        sacplan.errors.PlanError, match="hands a gradient on to its input as it is, and others read"
    ):
        plan_with(profile, [Chunk("1.inner", "rest", 16, 1)])


def test_gradients_are_those_of_the_plain_step() -> None:
    torch.manual_seed(0)
    model, x = Uneven().double(), torch.randn(4, 64, 32, dtype=torch.float64)
    plain = grads_of(model, x, mean_square)
    profile = sacplan.profile(model, x, mean_square, device="cpu")
    chunks = [Chunk("layers.4", "rest", 16, 1), Chunk("layers.3", "module", 8, 1)]
    with sacplan.apply(model, plan_with(profile, chunks)):
        torch.testing.assert_close(grads_of(model, x, mean_square), plain, rtol=1e-12, atol=1e-14)
