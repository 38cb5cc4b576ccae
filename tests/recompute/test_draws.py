"""A random op runs again on the numbers that it drew, also while other threads draw from the same generator."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from benchmarks.random_programs import drawing
from sacplan.errors import RecipeError
from sacplan.techniques.recompute.executor import draws
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


@pytest.mark.parametrize("kind", ["dropout", "rand_like", "normal", "native_dropout"])
def test_another_thread_that_draws_changes_no_gradient(kind: str) -> None:
    model, x = planned(DRAWS[kind])
    refused = 0
    with drawing():
        for _ in range(60):
            try:
                found = gradient(model, x)
            except RecipeError:
                refused += 1
            else:
                assert torch.equal(found, model.expected(x))
    assert refused <= 2


def test_a_draw_that_another_one_is_mixed_up_with_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place where another thread can come in between, one after the other."""
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    monkeypatch.setattr(draws, "_moves", {})
    monkeypatch.setattr(draws, "_mixed_up", set())
    rand_like, x = torch.ops.aten.rand_like.default, torch.empty(5, 7)
    for numbers in (0, 1, 8, 624, 1248):
        for early in (True, False):
            draw = Draw(torch.default_generator)
            if early:
                torch.rand(numbers)
            out = rand_like(x)
            if not early:
                torch.rand(numbers)
            assert draw.is_pinned(rand_like, (x,), {}) is (numbers == 0)
            same, again = draw.again(rand_like, (x,), {})
            assert same is (numbers == 0)
            assert torch.equal(again, out) is not (early and numbers > 0)


def test_an_undetected_mix_up_is_an_error_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = planned(lambda x: torch.rand_like(x))
    is_pinned = Draw.is_pinned

    def mixed_up(self: Draw, *args: Any) -> bool:
        torch.rand(3)  # drawn by another thread, say one that Python does not know
        return is_pinned(self, *args)

    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(Draw, "is_pinned", mixed_up)
    with pytest.raises(RecipeError, match="another thread drew"):
        gradient(model, x)


def test_threads_lose_no_numbers_to_a_recomputation() -> None:
    model, x = planned(DRAWS["dropout"])
    loss = model(x).sum()
    states: list[torch.Tensor] = []
    model.weight.register_hook(lambda _: states.append(torch.get_rng_state()))
    before = torch.get_rng_state()
    loss.backward()
    assert all(torch.equal(state, before) for state in states)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_plan_with_random_ops_is_copied() -> None:
    model, x = planned(DRAWS["bernoulli"])
    other = copy.deepcopy(model)
    torch.manual_seed(3)
    first = gradient(model, x)
    torch.manual_seed(3)
    assert torch.equal(gradient(other, x), first)
