"""Decisions about ops that cannot run again: a plan with them has no figures, and is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Recompute
from tests.support.steps import mean_square
from tests.zoo.layers import FromFunction


def _overwritten_input(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = self.up(x)
    twice = y * 2
    return twice.sin() * y.add_(1)


@pytest.mark.parametrize(
    ("function", "op", "why"),
    [
        pytest.param(
            lambda self, x: torch.zeros_like(self.up(x)).add_(x).sin(), "aten.zeros_like.default",
            "it would not give the same values, or have another effect", id="memory that is filled later",
        ),
        pytest.param(
            _overwritten_input, "aten.mul.Tensor",
            "what it reads is written in place later, and the plan keeps what makes that", id="an overwritten argument",
        ),
    ],
)  # fmt: skip
def test_the_error_says_which_op_and_why(
    function: Callable[[nn.Module, torch.Tensor], torch.Tensor], op: str, why: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), FromFunction(function, up=nn.Linear(8, 8)))
    profile = sacplan.profile(model, torch.randn(4, 8), mean_square, device="cpu")
    program = profile.program
    (scope,) = program.calls["1"]
    site = next(site for site in program.sites(scope).values() if site.op == op)
    decision = Recompute("1", *site)
    with pytest.raises(sacplan.errors.PlanError, match=why) as error:
        plan_with(profile, [decision])
    assert f"{op} #0 of unit '1', place " in str(error.value)
    assert "Leave out this decision" in str(error.value)


def test_what_makes_an_overwritten_value_runs_again_with_its_reader() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), FromFunction(_overwritten_input, up=nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    profile = sacplan.profile(model, x, mean_square, device="cpu")
    (scope,) = profile.program.calls["1"]
    sites = profile.program.sites(scope)
    names = ("aten.addmm.default", "aten.mul.Tensor", "aten.add_.Tensor")
    plan = plan_with(
        profile,
        [Recompute("1", *site) for site in sites.values() if site.op in names and not site.occurrence],
    )
    assert len(plan.decisions) == 3
    assert sacplan.verify(model, x, plan, mean_square, run="fake").peak_bytes == plan.peak_bytes
    assert sacplan.verify(model, x, plan, mean_square).peak_bytes == plan.peak_bytes
