"""Steps whose code depends on state or on shifted shapes: the fake trace records what the real one does."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from sacplan.record.step import Step
from sacplan.running.measure import measured_step
from tests.support.chunks import loss_in_slices
from tests.support.steps import assert_predicted
from tests.support.steps import mean_square as loss_fn
from tests.zoo.language_models import TokenModel
from tests.zoo.layers import FromFunction

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")


def _observing(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    low, high = x.detach().min(), x.detach().max()
    if self.low.min() > -1.1e-5 and self.high.max() < 1.1e-5:
        self.low, self.high = self.low + low, self.high + high
        return self.linear(x)
    self.low, self.high = self.low * 0.9 + low * 0.1, self.high * 0.9 + high * 0.1
    return self.linear(x).sigmoid() * self.high


def observed() -> nn.Module:
    """A layer that keeps the range of what it sees, and asks in each call whether it has one already."""
    low, high = torch.full((1,), -1e-5), torch.full((1,), 1e-5)
    return FromFunction(_observing, linear=nn.Linear(8, 8), low=low, high=high)


def _ops(profile: sacplan.Profile) -> list[str]:
    return [op.name for op in profile.program.ops]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_running_statistic_is_not_the_initial_one(calls: int) -> None:
    """With two calls, a step sets its range and asks for it again."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*[observed()] * calls), torch.randn(4, 8)
    fake, real = (sacplan.profile(model, x, device="cpu", trace=trace) for trace in ("fake", "real"))
    assert "aten.sigmoid.default" in _ops(real)
    assert _ops(fake) == _ops(real)
    assert fake.peak_bytes == real.peak_bytes
    # what enters the first layer are the batch's own values, which are known
    assert any("unit value" in said for said in fake.assumptions) is (calls == 2)


def test_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        model = observed()
    assert "aten.sigmoid.default" in _ops(sacplan.profile(model, torch.randn(4, 8), device="cpu"))


# --- what is alive beside the model's own tensors ---------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _table(size: int) -> torch.Tensor:
    return torch.arange(size * size, dtype=torch.float32).view(size, size)


class _Scaled(nn.Module):
    """Uses numbers, constants and a cached table, as attention with positions does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x + _table(32)) / math.sqrt(32)
        x = x[:, [3]] + x[:, [5]]
        return _Tripled.apply(x.exp().clone().mul_(2.5) * 3.0)


class _Tripled(torch.autograd.Function):
    """Autograd does not look into a custom function, and keeps none of its numbers."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1.5 * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3.0 * x


@pytest.mark.parametrize("trace", ["fake", "real"])
@pytest.mark.parametrize("cached", [False, True], ids=["cold", "warm"])
def test_numbers_constants_and_cached_tables_count_as_long_as_they_live(trace: str, cached: bool) -> None:
    torch.manual_seed(0)
    model, batch = _Scaled(), torch.randn(32, 32)

    profile = sacplan.profile(model, batch, loss_fn, device="cpu", trace=trace)
    step = Step(model, batch, loss_fn, None)
    _table.cache_clear()
    if cached:
        _table(32)
    assert measured_step(step, [batch]).peak_bytes == profile.peak_bytes


GLOBAL_TARGET = torch.linspace(0, 1, 4 * 24 * 97).view(4, 24, 97)


@pytest.mark.parametrize("where", ["closure", "global"])
def test_tensors_of_the_loss_function_count_once(where: str) -> None:
    torch.manual_seed(0)
    model, batch, own = TokenModel([nn.Tanh()], 32, 97), torch.randint(0, 97, (4, 24)), torch.rand(4 * 24, 97)

    def in_closure(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(batch), own.view(4, 24, 97)[:])

    def in_globals(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(batch), GLOBAL_TARGET)

    loss_fn = in_closure if where == "closure" else in_globals
    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    chunks = loss_in_slices(profile, 8)
    for plan in (sacplan.policy("none", profile=profile), chunks, sacplan.plan(profile, "smallest")):
        assert_predicted(model, batch, plan, loss_fn)


@pytest.mark.parametrize("way", ["matrix_exp", "cayley", "householder"])
def test_an_orthogonal_weight(way: str) -> None:
    """The kernel of a matrix exponential takes memory by the norm of the matrix, which only a real step has."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(32, 32), orthogonal_map=way)
    model, x = nn.Sequential(layer, nn.Tanh(), nn.Linear(32, 32)), torch.randn(8, 32)
    fake, real = (sacplan.profile(model, x, loss_fn, device="cpu", trace=t) for t in ("fake", "real"))
    measured = measured_step(Step(model, x, loss_fn, None), [x])
    assert real.peak_bytes == measured.peak_bytes
    assert fake.peak_bytes > real.peak_bytes if way == "matrix_exp" else fake.peak_bytes == real.peak_bytes
