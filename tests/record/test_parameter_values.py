"""Branches on the values of parameters: a fake step takes those of the real step, or is an error, and never a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.errors import DataDependentError
from tests.support.steps import mean_square as loss
from tests.zoo.layers import FromFunction

X = torch.ones(32, 16)


class Branching(nn.Module):
    """Few ops where a condition on ``k`` is true, and several where it is not."""

    def __init__(self, condition: Callable[[Any], Any], value: Any, trained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.condition = condition
        self.k = nn.Parameter(torch.as_tensor(value), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.condition(self):
            return x * 2
        y = x.exp()
        return y.tanh() * x.sigmoid() + y


def _clamped(net: Any) -> Any:
    with torch.no_grad():
        net.k.clamp_(min=0.5)
    return torch.all(net.k < 0.1)


CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "all": lambda net: torch.all(-net.k > 0),
    "any": lambda net: (-net.k > 0).any(),
    "a bool": lambda net: -net.k > 0,
    "item": lambda net: (-net.k).item() > 0,
    "float": lambda net: float(-net.k) > 0,
    "close": lambda net: torch.isclose(net.k, torch.zeros(())).all(),
    "equal": lambda net: net.k == 0,
    "several ops": lambda net: (torch.sigmoid(net.k.double() * 3) + torch.arange(2)).sum() < 1,
    "in half precision": lambda net: net.k.to(torch.bfloat16).max() < 0,
    "a choice": lambda net: torch.stack([net.k, torch.tensor(2.0)]).argmax().item() == 0,
    "another layer's": lambda net: net.first.weight.abs().mean() > 10,
    "written in the step": _clamped,
}


def ops(profile: sacplan.Profile) -> list[str]:
    return [op.name for op in profile.recorded.ops]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", CONDITIONS)
def test_the_branch_is_that_of_a_real_step(name: str, trained: bool) -> None:
    net = Branching(CONDITIONS[name], 0.05, trained)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    fake = sacplan.profile(net, X, loss, device="cpu")
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not fake.rules
    real = sacplan.profile(net, X, loss, device="cpu", trace="real")
    assert ops(fake) == ops(real)
    assert fake.peak_bytes == real.peak_bytes


def test_the_other_branch_too() -> None:
    few, many = (Branching(CONDITIONS["all"], k) for k in (-1.0, 1.0))
    assert len(ops(sacplan.profile(few, X, loss))) < len(ops(sacplan.profile(many, X, loss)))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_of_an_optimizer_change_no_branch(make: Any) -> None:
    """Later steps are recorded as well where one leaves tensors behind; they begin with the parameters as they are."""
    net = Branching(CONDITIONS["all"], 1.0)
    net.register_forward_hook(lambda module, args, output: setattr(module, "last", output))
    fake = sacplan.profile(net, X, loss, make, "cpu")
    assert ops(fake) == ops(sacplan.profile(net, X, loss, make, "cpu", trace="real"))


@pytest.mark.parametrize("name", ["all", "any", "a bool", "item", "float", "close", "equal", "several ops"])
def test_without_values_it_is_an_error(name: str) -> None:
    net = Branching(CONDITIONS[name], 1.0).to("meta")
    with pytest.raises(DataDependentError, match=r"in <lambda>.* or forward|depends on parameters") as raised:
        sacplan.profile(net, X, loss)
    assert "give real parameters" in str(raised.value)
    assert 'trace="real"' in str(raised.value)


def test_activations_follow_the_rules_as_before() -> None:
    """What comes from the batch and the parameters is not computed, however small it is."""
    net = FromFunction(
        lambda self, x: self.first(x) * torch.all(self.first(x[:1]) > 0).item(), first=nn.Linear(16, 16)
    )
    with pytest.warns(sacplan.SacplanWarning, match="all elements"):
        assert sacplan.profile(net, X, loss).rules
