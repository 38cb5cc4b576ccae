"""Steps that launch Triton kernels: recorded on fakes without running them, and planned around.

Triton has no driver on a CPU. So its ``JITFunction`` is stood in for by one with the same interface whose kernels run
on NumPy arrays of the tensors: as in Triton, neither a dispatch mode nor a version counter sees what they write.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sacplan
from tests.support.steps import assert_carried_out, total


class JITFunction:
    """The interface of ``triton.runtime.jit.JITFunction``: ``kernel[grid](*args)`` calls ``run``."""

    def __init__(self, fn: Callable[..., None]) -> None:
        self.fn = fn

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        self.fn(*(a.detach().numpy() if isinstance(a, torch.Tensor) else a for a in args))


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@JITFunction
def rotate(x: Any) -> None:
    x[...] = np.roll(x, 1, -1)  # in place, as Liger's rotary embedding


@JITFunction
def rotate_back(x: Any) -> None:
    x[...] = np.roll(x, -1, -1)


@JITFunction
def square(x: Any, y: Any) -> None:
    y[...] = x * x


@JITFunction
def square_backward(dy: Any, x: Any) -> None:
    x[...] = 2 * x * dy  # over what was saved, as Liger's SwiGLU


class Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous().view_as(x)
        rotate[(1,)](x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        dy = dy.clone()
        rotate_back[(1,)](dy)
        return dy


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        square[(1,)](x, y)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        square_backward[(1,)](dy, x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + Rotated.apply(self.first(x).sin().exp()).cos().exp()[..., :32].sigmoid()
        return x + self.second(Squared.apply(self.first(x).tanh()).sin())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def test_a_plan_around_kernels_keeps_every_bit_and_its_peak() -> None:
    net, x = model(), torch.randn(128, 32)
    profile = sacplan.profile(net, x, total, device="cpu")
    plan = sacplan.plan(profile, "smallest")
    assert plan.peak_bytes < 0.9 * profile.peak_bytes
    assert_carried_out(net, x, plan, total)


@pytest.mark.parametrize("trace", ["fake", "real"])
def test_what_a_kernel_writes_may_not_run_again(trace: Any) -> None:
    net, x = model(), torch.randn(128, 32)
    profile = sacplan.profile(net, x, device="cpu", loss_fn=lambda m, b: m(b).sum(), trace=trace)
    program = profile.program
    launches = [op for op in program.ops if op.name.startswith("sacplan.triton_kernel")]
    assert len(launches) == 12
    assert any("12 launches of Triton kernels" in rule for rule in profile.assumptions)
    for launch in launches:
        for storage in launch.mutates:
            assert not any(op.recomputable for op in program.ops if storage in op.writes)
