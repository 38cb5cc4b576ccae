"""In-place writes and batch norm in a recording, and planned for: told apart in versions, made again, bit-equal."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sacplan
from sacplan.record.step import Step
from sacplan.running.measure import measured_step
from sacplan.techniques.recompute.rewrite import recomputed
from tests.support.steps import assert_carried_out, bit_equal, grads_of, mean_square
from tests.zoo.layers import FromFunction

aten = torch.ops.aten


class ConvNet(nn.Module):
    """Convolution, batch norm and activation, in place or not."""

    def __init__(self, inplace: bool, activation: str = "relu") -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, padding=1, bias=False) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))
        self.inplace, self.activation = inplace, getattr(F, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.activation(norm(conv(x)), inplace=self.inplace)
        return x.mean()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def convnet(inplace: bool = True, activation: str = "relu") -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return ConvNet(inplace, activation), torch.randn(4, 3, 16, 16)


@pytest.mark.parametrize("activation", ["relu", "silu", "hardswish"])
@pytest.mark.parametrize("inplace", [False, True])
def test_convnets_can_discard_batch_norms_and_what_is_written_in_place(
    activation: str, inplace: bool
) -> None:
    model, batch = convnet(inplace, activation)
    profile = sacplan.profile(model, batch, device="cpu")
    plan = sacplan.plan(profile, "smallest")
    again = {profile.program.ops[i].name for i in recomputed(profile.program, plan.discarded).footprint.again}
    assert "aten.native_batch_norm.default" in again
    assert plan.peak_bytes < 0.8 * profile.peak_bytes
    assert_carried_out(model, batch, plan, loss)
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    with sacplan.apply(other, plan):
        for m in (one, one, one, other, other, other):
            m(batch).backward()
    assert bit_equal(list(one.buffers()), list(other.buffers()))  # statistics were updated once a step
    assert all(b == 3 for name, b in other.named_buffers() if "num_batches" in name)


def test_frozen_batch_norm_runs_again_with_its_statistics() -> None:
    model, batch = convnet()
    model.eval()
    profile = sacplan.profile(model, batch, device="cpu")
    plan = sacplan.plan(profile, "smallest")
    assert any(decision.op == "aten.native_batch_norm.default" for decision in plan.decisions)
    expected = grads_of(model, batch, loss)
    with sacplan.apply(model, plan):
        assert bit_equal(expected, grads_of(model, batch, loss))
        total = model(batch)
        model.norms[0].running_mean.add_(1)
        with pytest.raises(sacplan.errors.RecipeError, match="written in place since"):
            total.backward()


def test_the_same_plan_compiled() -> None:
    model, batch = convnet()
    plan = sacplan.plan(sacplan.profile(model, batch, device="cpu"), "smallest", "milp")  # nothing twice
    names = {decision.op for decision in plan.decisions}
    assert names >= {"aten.native_batch_norm.default", "aten.relu_.default"}
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    sacplan.apply(other, plan)
    torch._dynamo.reset()
    for m in (one, other):
        torch.compile(m, backend="aot_eager", fullgraph=True)(batch).backward()
    assert bit_equal([p.grad for p in one.parameters()], [p.grad for p in other.parameters()])
    assert bit_equal(list(one.buffers()), list(other.buffers()))


# --- through views ----------------------------------------------------------------------------------------------------


def scanned(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A scan in log(n) steps, each of which writes to a part of the clone."""
    y = x.clone()
    for i in (1, 2, 4):
        y[:, i:].add_(a[:, i:] * y[:, :-i].clone())
    y.t()[0].mul_(0.5)
    y.view(-1)[3:].tanh_()
    return y


class Scan(torch.autograd.Function):
    """Saves what it has written in place, as mambapy's ``pscan`` does."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = scanned(a, x)
        ctx.save_for_backward(a, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, y = ctx.saved_tensors
        return grads[0] * y, grads[0] * a


@pytest.mark.parametrize("scan", [Scan.apply, scanned], ids=["custom function", "autograd"])
def test_what_is_written_through_views_is_made_again(scan: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    layer = lambda: FromFunction(  # noqa: E731
        lambda self, x: x + self.down(scan(self.gate(x).sigmoid(), self.up(x))),
        gate=nn.Linear(8, 32), up=nn.Linear(8, 32), down=nn.Linear(32, 8),
    )  # fmt: skip
    model, batch = nn.Sequential(layer(), layer(), layer()), torch.randn(64, 8)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    plan = sacplan.plan(profile, "smallest")
    again = {site.op for sites in plan.discarded.values() for site in sites}
    assert {"aten.clone.default", "aten.add_.Tensor", "aten.tanh_.default"} <= again
    assert_carried_out(model, batch, plan)
    # As small as checkpointing by hand, which runs each layer again.
    for part in model:
        part.forward = functools.partial(
            checkpoint, part.forward, use_reentrant=False, preserve_rng_state=False
        )
    assert plan.peak_bytes <= measured_step(Step(model, batch, mean_square, None), [batch]).peak_bytes


def rotated(x: torch.Tensor) -> torch.Tensor:
    one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty_like(x)
    out[..., 0::2] = one * 0.5 - other * 0.2
    out[..., 1::2] = one * 0.3 + other * 0.7
    return out


def in_parts(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[:, :8] = x[:, 8:16]
    out[:, 8:] = x[:, :24] * 2
    return out


def half(x: torch.Tensor) -> torch.Tensor:
    """Every other element is what lay in memory; it is not read."""
    out = torch.empty_like(x)
    out[:, 0::2] = x[:, 1::2]
    return out[:, 0::2]


def backwards(x: torch.Tensor) -> torch.Tensor:
    """Elements are written that a slice of rows and columns does not tell."""
    out = torch.empty_like(x)
    out.view(-1).as_strided((16, 32), (1, 16)).copy_(x[:16])
    out[16:] = x[16:]
    return out


FACTORIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten.empty_like.default": torch.empty_like,
    "aten.zeros_like.default": torch.zeros_like,
    "aten.new_empty.default": lambda x: x.new_empty(x.shape),
    "aten.new_zeros.default": lambda x: x.new_zeros(x.shape),
}


def halves(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(x: torch.Tensor) -> torch.Tensor:
        out = FACTORIES[name](x)
        out[:, :16] = x[:, 16:] * 2
        out[:, 16:] = x[:, :16]
        return out

    return fill


@pytest.mark.parametrize(
    ("fill", "made_again"), [(rotated, True), (in_parts, True), (half, False), (backwards, False)]
)
def test_empty_memory_is_made_again_where_all_of_it_is_filled(
    fill: Callable[..., torch.Tensor], made_again: bool
) -> None:
    assert (made_again_by(fill) & FACTORIES.keys() == {"aten.empty_like.default"}) is made_again


@pytest.mark.parametrize("name", FACTORIES)
def test_memory_of_every_factory_is_made_again(name: str) -> None:
    assert name in made_again_by(halves(name))


def made_again_by(fill: Callable[..., torch.Tensor]) -> set[str]:
    """Return the ops that a model of layers runs again, whose peaks and bits are found right on the way."""
    torch.manual_seed(0)
    layer = lambda: FromFunction(  # noqa: E731
        lambda self, x: x + self.down(fill(self.up(x)).sin()),
        up=nn.Linear(8, 32), down=nn.Linear(16 if fill is half else 32, 8),
    )  # fmt: skip
    model, batch = nn.Sequential(layer(), layer(), layer()), torch.randn(64, 8)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    plan = sacplan.policy("full", profile=profile)
    again = {site.op for sites in plan.discarded.values() for site in sites}
    assert_carried_out(model, batch, plan)
    return again
