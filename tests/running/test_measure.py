"""Steps that replace what was alive before: measured as in a loop, where nobody holds the old."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.record.state import preserved_state
from sacplan.record.step import Step, default_loss
from sacplan.running.measure import measured_step

SIDE = 32


class Carries(nn.Module):
    """Goes on from the state that the step before left, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE)
        self.state = torch.zeros(SIDE, SIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x + self.state).sigmoid()
        self.state = y.detach().clone()
        return y.exp().exp()


class Ranges(nn.Module):
    """Sets a buffer anew in each step."""

    low: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE)
        self.register_buffer("low", torch.zeros(SIDE, SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.low = self.low * 0.5 + y.detach() * 0.5
        return (y - self.low).sigmoid().exp()


@functools.lru_cache(maxsize=1)
def _table(rows: int, step: int) -> torch.Tensor:
    return torch.full((rows, SIDE), float(step))


class Caches(nn.Module):
    """Its cache has room for one entry, which no other step asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, SIDE)
        self.n_steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_steps += 1
        return (self.linear(x) + _table(len(x), self.n_steps)).sigmoid().exp()


@pytest.mark.parametrize("make", [Carries, Ranges, Caches])
def test_what_a_step_replaces_is_freed(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(SIDE, SIDE)
    step = Step(model, x, default_loss, None)
    step.run()
    profile = sacplan.profile(model, x, device="cpu", trace="real")
    with preserved_state(model, None):  # holds the old state, to put it back
        assert measured_step(step, [x]).peak_bytes == profile.peak_bytes
    assert measured_step(step, [x]).peak_bytes == profile.peak_bytes
    plan = sacplan.policy("none", profile=profile)
    assert sacplan.verify(model, x, plan, run="real").peak_bytes == profile.peak_bytes


def test_a_step_that_replaces_nothing_runs_once() -> None:
    model, x = Caches(), torch.randn(SIDE, SIDE)
    del model.n_steps
    model.forward = lambda x: model.linear(x).exp()  # type: ignore[method-assign]
    runs = 0

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return model(x).sum()

    with preserved_state(model, None):
        measured_step(Step(model, x, loss, None), [x])
    assert runs == 1
