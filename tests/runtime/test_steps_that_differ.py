"""Steps that do not run what was recorded: a cache that is filled, a batch that is padded, a branch that is taken."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from benchmarks.harness.steps import real_step
from benchmarks.models import hf_models
from tests.support.steps import bit_equal, grads_of
from tests.support.steps import mean_square as loss_of
from tests.zoo.language_models import TokenModel
from tests.zoo.layers import FromFunction

DIM = 32


class Rope(nn.Module):
    """Cosines and sines that the first forward makes, as in many code bases."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inverse = 1 / 10000 ** (torch.arange(0, dim, 2) / dim)
        self.cos: torch.Tensor | None = None

    def forward(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cos is None or self.cos.shape[0] < length:
            angles = torch.arange(length).float()[:, None] * self.inverse[None]
            angles = torch.cat([angles, angles], -1)
            self.cos, self.sin = angles.cos(), angles.sin()
        return self.cos[:length], self.sin[:length]


class WindowedBlock(nn.Module):
    """Attention with rotary positions, in windows of eight: other lengths are padded."""

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.rope = rope
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.gate, self.up, self.down = nn.Linear(DIM, 96), nn.Linear(DIM, 96), nn.Linear(96, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        pad = -length % 8
        if pad:
            y = F.pad(y, (0, 0, 0, pad))
            y = y * (torch.arange(length + pad) < length).float()[None, :, None]
        cos, sin = self.rope(8)
        q, k, v = self.qkv(y).view(batch, -1, 8, 3, DIM).unbind(3)
        q, k = q * cos + q.flip(-1) * sin, k * cos + k.flip(-1) * sin
        a = (q @ k.transpose(-1, -2) * DIM**-0.5).softmax(-1)
        x = x + self.out((a @ v).reshape(batch, -1, DIM)[:, :length])
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def padded(*, share: bool) -> nn.Module:
    ropes = [Rope(DIM)] * 3 if share else [Rope(DIM) for _ in range(3)]
    return TokenModel(map(WindowedBlock, ropes), DIM, 64)


def inner_gradient(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    """The engine adds up two gradients inside of the forward pass."""
    h = self.inside(x)
    with torch.enable_grad():
        z = h.detach().requires_grad_()
        (slope,) = torch.autograd.grad((z.sin() * z).sum(), z)
    return x + self.out((torch.cat([h * slope.tanh()] * 4, -1) + 0.5).cos())


def ids(rows: int = 8, length: int = 64) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def same_bits(one: nn.Module, other: nn.Module, batch: torch.Tensor) -> bool:
    return bit_equal(grads_of(one, batch, loss_of), grads_of(other, batch, loss_of))


def peak_of(model: nn.Module, batch: torch.Tensor) -> int:
    model.zero_grad()
    return real_step(model, batch, loss_of).peak_bytes


# --- the profile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", ["fake", "real"])
@pytest.mark.parametrize("share", [False, True])
def test_a_profile_is_of_a_step_that_finds_its_caches_filled(share: bool, trace: str) -> None:
    model = padded(share=share)
    profile = sacplan.profile(model, ids(), loss_of, device="cpu", trace=trace)
    assert model.layers[0].rope.cos is None
    loss_of(model, ids()).backward()
    assert peak_of(model, ids()) == profile.peak_bytes
    assert "aten.arange.default" not in {op.name for op in profile.program.ops}


def test_only_a_step_that_leaves_something_behind_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from sacplan.record import steady_step as module

    record, runs = module._record, []
    monkeypatch.setattr(module, "_record", lambda *args: runs.append(1) or record(*args))

    def counts(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.step
        return self.inner(x).sin()

    for step, expected in ((0, 1), (1, 2)):
        runs.clear()
        model = FromFunction(counts, inner=nn.Linear(DIM, DIM), calls=0, step=step)
        sacplan.profile(model, torch.ones(2, DIM), loss_of, device="cpu")
        assert len(runs) == expected


def test_steps_that_never_settle_are_said() -> None:
    def grows(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            x = self.inner(x).sin()
        return x

    model = FromFunction(grows, inner=nn.Linear(DIM, DIM), calls=0)
    with pytest.warns(sacplan.SacplanWarning, match="ran other ops than the one before"):
        sacplan.profile(model, torch.ones(2, DIM), loss_of, device="cpu")


# --- budgets ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the step is not the one")
@pytest.mark.parametrize("share", [0.4, 0.55, 0.7])
def test_padded_batches_keep_the_budget(share: float) -> None:
    model = padded(share=False)
    plan = sacplan.plan(sacplan.profile(model, ids(), loss_of, device="cpu"), f"{share:.0%}")
    plain = copy.deepcopy(model)
    sacplan.apply(model, plan)
    for batch in (ids(), ids(), ids(8, 63), ids(8, 60), ids(7), ids(5, 57)):
        assert same_bits(plain, model, batch)
        assert peak_of(model, batch) <= plan.budget_bytes


@pytest.mark.parametrize("trace", ["fake", "real"])
def test_a_gradient_inside_of_the_forward_pass_moves_no_decision(trace: str) -> None:
    parts = ({"inside": nn.Linear(DIM, DIM), "out": nn.Linear(4 * DIM, DIM)} for _ in range(3))
    model = nn.Sequential(*(FromFunction(inner_gradient, **own) for own in parts))
    x = torch.randn(256, DIM)
    plan = sacplan.plan(sacplan.profile(model, x, loss_of, device="cpu", trace=trace), "75%")
    plain = copy.deepcopy(model)
    handle = sacplan.apply(model, plan)
    for _ in range(2):
        assert same_bits(plain, model, x)
    assert peak_of(model, x) == plan.peak_bytes
    assert handle.differences == ()


def test_calls_of_a_unit_that_run_a_module_once_and_twice_are_both_as_recorded() -> None:
    """What the one is known to do says nothing of where the other leaves it."""

    def repeats(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.lin(x) for _ in range(self.times)]).exp().sum(0)

    def both(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        for self.unit.times in (1, 2, 3, 1):
            x = self.unit(x).tanh()
        return x

    model = FromFunction(both, unit=FromFunction(repeats, lin=nn.Linear(DIM, DIM), times=1))
    x = torch.randn(64, DIM)
    plan = sacplan.policy("full", profile=sacplan.profile(model, x, loss_of, device="cpu"), layers="unit")
    plain = copy.deepcopy(model)
    handle = sacplan.apply(model, plan)
    for _ in range(3):
        assert same_bits(plain, model, x)
    assert handle.differences == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gpt2", "llama", "bert", "t5", "bart", "albert", "mixtral", "vit", "swin", "xlnet"],
)
@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
def test_a_smaller_last_batch_needs_no_more_memory(name: str) -> None:
    model, batch, loss_fn = hf_models.build(name, "small", device="cpu")
    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    smallest = sacplan.plan(profile, "smallest")
    middle = (smallest.peak_bytes + profile.peak_bytes) // 2
    for plan in (smallest, sacplan.plan(profile, f"{middle}B")):
        with sacplan.apply(model, plan):
            smaller = {key: value[:-1] for key, value in batch.items()}
            full, last = (real_step(model, b, loss_fn).peak_bytes for b in (batch, smaller))
        assert last <= full <= plan.peak_bytes


class SquareInPlace(torch.autograd.Function):
    """Its backward pass reuses the memory of what it saved, which is its own to give away."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        found: torch.Tensor = x.mul_(2).mul_(grad)
        return found


@pytest.mark.filterwarnings("ignore:the step is not the one")
def test_a_custom_function_that_was_not_recorded_may_overwrite_what_it_saved() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).sin()
        w = (y * 3.0).cos()
        return w + (SquareInPlace.apply(y) if self.warm else y**2)

    model = nn.Sequential(FromFunction(forward, first=nn.Linear(DIM, DIM), warm=False))
    x = torch.randn(16, DIM)
    profile = sacplan.profile(model, x, loss_of, device="cpu")
    plain = copy.deepcopy(model)
    sacplan.apply(model, sacplan.policy("full", profile=profile, layers="0"))
    assert same_bits(plain, model, x)
    plain[0].warm = model[0].warm = True
    for _ in range(3):
        assert same_bits(plain, model, x)


# --- what is said -----------------------------------------------------------------------------------------


def test_a_step_that_differs_is_said_once_and_by_name() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sin()
        return self.second(x.cos() if self.cold else x.exp()).tanh()

    def branch() -> nn.Module:
        return FromFunction(forward, first=nn.Linear(DIM, DIM), second=nn.Linear(DIM, DIM), cold=False)

    model = nn.Sequential(branch(), branch())
    x = torch.randn(64, DIM)
    plan = sacplan.plan(sacplan.profile(model, x, loss_of, device="cpu"), "smallest")
    model[1].cold = True
    seen = sacplan.verify(model, x, plan, loss_of)
    (difference,) = seen.differences
    assert "ran aten.cos.default(2) where the recorded step ran aten.exp.default(2)" in str(difference)
    assert str(difference) in repr(seen)
    handle = sacplan.apply(model, plan)
    loss_of(model, x).backward()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            loss_of(model, x).backward()
    assert ["ran aten.cos.default(2) where the recorded step" in str(one.message) for one in said] == [True]
    assert handle.differences == (difference,)
    model[1].cold = False
    handle.forget_differences()
    loss_of(model, x).backward()
    assert handle.differences == ()


def _nothing(model: nn.Module) -> None:
    """A step as it was recorded."""


def _without_rope(model: nn.Module) -> None:
    for block in model.layers:
        block.rope.cos = None


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
@pytest.mark.parametrize("change", [_nothing, _without_rope])
def test_a_cache_that_is_emptied_again_costs_what_it_takes(change: Callable[[nn.Module], None]) -> None:
    model = padded(share=False)
    plan = sacplan.plan(sacplan.profile(model, ids(), loss_of, device="cpu"), "50%")
    with sacplan.apply(model, plan):
        for _ in range(2):
            loss_of(model, ids()).backward()
        change(model)
        caches = 3 * 2 * 8 * DIM * 4
        assert peak_of(model, ids()) <= plan.peak_bytes + 2 * caches
