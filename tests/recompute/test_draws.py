"""A random op runs again on the numbers that it drew, or is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from sacplan.errors import RecipeError
from sacplan.techniques.recompute.executor.draws import Draw

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(torch.ones_like(x), 0.5, True),
    "native_dropout": lambda x: torch.native_dropout(torch.ones_like(x), 0.3, True)[0],
    "all_dropped": lambda x: torch.native_dropout(torch.ones_like(x), 1.0, True)[0],
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_of": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "rand_like": lambda x: torch.rand_like(x),
    "rand_like_double": lambda x: torch.rand_like(x, dtype=torch.double).float(),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randint_like_low": lambda x: torch.randint_like(x, 2, 5),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "normal": lambda x: torch.normal(x.detach(), 0.5),
    "poisson": lambda x: torch.poisson(x.detach().abs()),
    "multinomial": lambda x: torch.multinomial(x.detach().abs(), x.shape[1]).float(),
    "rrelu": lambda x: F.rrelu(x.detach(), training=True),
}


class Noisy(nn.Module):
    """Multiplies by random numbers, and keeps a copy of them out of the plan's sight."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(33))
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = self.draw(x)
        self.seen = noise.detach().clone()
        return (x * self.weight * noise).sin()

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """The weight's gradient with the numbers that were seen, computed without a plan."""
        weight = self.weight.detach().clone().requires_grad_()
        (x * weight * self.seen).sin().sum().backward()
        assert weight.grad is not None
        return weight.grad


def planned(draw: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Noisy, torch.Tensor]:
    torch.manual_seed(0)
    model, x = nn.Sequential(Noisy(draw)), torch.rand(40, 33) + 0.5
    profile = sacplan.profile(model, x, lambda m, b: m(b).sum(), device="cpu", trace="real")
    plan = sacplan.policy("full", profile=profile, layers="0")
    assert plan.discarded
    sacplan.apply(model, plan)
    noisy = model[0]
    assert isinstance(noisy, Noisy)
    return noisy, x


def gradient(model: Noisy, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(x).sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("kind", DRAWS)
def test_the_same_numbers_are_drawn_again_and_no_others(kind: str) -> None:
    model, x = planned(DRAWS[kind])
    for seed in range(3):
        torch.manual_seed(seed)
        model.draw(x)
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(gradient(model, x), model.expected(x))
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("early", [True, False])
def test_what_another_thread_draws_beside_an_op_is_an_error_in_the_backward_pass(
    early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = planned(lambda x: torch.rand_like(x))
    place = "__init__" if early else "end"
    plain = getattr(Draw, place)

    def mixed_up(self: Draw, *args: Any) -> None:
        if early:
            plain(self, *args)
        torch.rand(3)  # drawn by another thread
        if not early:
            plain(self, *args)

    monkeypatch.setattr(Draw, place, mixed_up)
    with pytest.raises(RecipeError, match="another thread drew"):
        gradient(model, x)


def test_the_generator_is_left_as_it_was_found() -> None:
    model, x = planned(DRAWS["dropout"])
    loss = model(x).sum()
    states: list[torch.Tensor] = []
    model.weight.register_hook(lambda _: states.append(torch.get_rng_state()))
    before = torch.get_rng_state()
    loss.backward()
    assert all(torch.equal(state, before) for state in states)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["rand_like", "native_dropout"])
def test_the_states_of_the_generator_are_counted(kind: str) -> None:
    """Of a step whose tensors are smaller than a state, so that states make its peak."""
    model, x = nn.Sequential(Noisy(DRAWS[kind])), torch.rand(4, 33)
    profile = sacplan.profile(model, x, lambda m, b: m(b).sum(), device="cpu")
    plan = sacplan.policy("full", profile=profile, layers="0")
    for run in ("fake", "real"):
        checked = sacplan.verify(model, x, plan, lambda m, b: m(b).sum(), run=run)
        assert checked.peak_bytes == checked.predicted_peak_bytes


def test_a_plan_with_random_ops_is_copied() -> None:
    model, x = planned(DRAWS["bernoulli"])
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    first = gradient(model, x)
    torch.manual_seed(3)
    assert torch.equal(gradient(other, x), first)
