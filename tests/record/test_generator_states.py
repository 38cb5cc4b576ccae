"""States of the CPU's generator that a step takes and keeps: they lie in the memory of a CPU, and no op makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sacplan
from tests.support.steps import mean_square
from tests.zoo.layers import FromFunction

X = torch.ones(16, 8)


def _listed(self: Any, x: torch.Tensor) -> torch.Tensor:
    states = []
    for layer in self.layers:
        states.append(torch.get_rng_state())
        x = layer(x).tanh()
    x.register_hook(lambda grad, states=states: None)  # alive as long as the graph is
    return x


def _forked(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        with torch.random.fork_rng(devices=[]):
            x = layer(x).tanh()
    return x


def _checkpointed(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = layer(x)
        x = checkpoint(lambda t: torch.tanh(t).exp().sin(), x, use_reentrant=False)
    return x


def _net(function: Any) -> nn.Module:
    torch.manual_seed(0)
    return FromFunction(function, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))


@pytest.mark.parametrize("function", [_listed, _forked, _checkpointed])
def test_states_count_as_long_as_they_live(function: Any) -> None:
    net = _net(function)
    fake = sacplan.profile(net, X, mean_square, device="cpu")
    real = sacplan.profile(net, X, mean_square, device="cpu", trace="real")
    plan = sacplan.plan(fake, "100%")
    measured = sacplan.verify(net, X, plan, mean_square, run="real")
    assert fake.peak_bytes == real.peak_bytes == measured.peak_bytes


def test_a_plan_holds_its_budget_beside_them() -> None:
    net = _net(_checkpointed)
    plan = sacplan.plan(sacplan.profile(net, X, mean_square, device="cpu"), "smallest")
    measured = sacplan.verify(net, X, plan, mean_square, run="real")
    assert measured.peak_bytes == plan.peak_bytes == sacplan.verify(net, X, plan, mean_square).peak_bytes


def test_on_a_gpu_they_are_on_the_host() -> None:
    peaks = [sacplan.profile(_net(f), X, mean_square, device="h100").peak_bytes for f in (_listed, _forked)]
    assert peaks[0] == peaks[1]


def test_what_takes_states_is_put_back() -> None:
    before = torch.get_rng_state, torch.random.get_rng_state
    sacplan.profile(_net(_forked), X, mean_square, device="cpu")
    assert (torch.get_rng_state, torch.random.get_rng_state) == before
