"""What the plain step writes in place and a step under a dispatch mode does not: against the CPU's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from sacplan.core.program import Phase, StorageKind
from sacplan.record.state import preserved_state
from sacplan.record.step import Step, default_loss
from sacplan.running.measure import measured_step
from tests.zoo.layers import FromFunction

N = 128


def computing(fn: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> FromFunction:
    """``fn`` of an activation [N, N], which comes from a product, so that gradients flow into it."""
    return FromFunction(
        lambda self, x: fn(self, x * self.w),
        w=nn.Parameter(torch.rand(N, N) + 0.5),
        b=nn.Parameter(torch.rand(N)),
        index=torch.arange(N) % 7,
    )


class Doubled(torch.autograd.Function):
    """Its backward adds in Python, which the plain step does out of place too."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.sin() + grad.cos()


def _hooked(m, h):
    h.register_hook(lambda grad: grad.exp() + grad)
    return h.sin() + h.cos()


def _scan(m, h):
    state = h[0]
    for k in range(8):
        state = state * h[:, k] + h[k]
    return state


def _projections(m, x):
    """Three linear layers on one 3-D input: their gradients are views of products."""
    return F.linear(x, m.w).exp() * F.linear(x, m.w, m.b).exp() * F.linear(x, m.w).sin()


FUNCTIONS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    # sums of the engine: in place from the second gradient on
    "two": lambda m, h: h.sin() + h.cos(),
    "five": lambda m, h: h.sin() + h.cos() + h.exp() + h.tanh() + h.sigmoid(),
    "square": lambda m, h: (h * h).exp(),
    "residual": lambda m, h: (h + (h + h.sin()).cos()).exp(),
    "loop": lambda m, h: [h := h.sin() + h * m.w for _ in range(4)][-1],
    "scan": _scan,
    "selects": lambda m, h: sum(h[k].exp() for k in range(6)),
    # out of place in the plain step too: the first gradient is shared, expanded, or not dense
    "shared": lambda m, h: (h + h).sin() + h.cos(),
    "expanded": lambda m, h: h.exp() + h.sum(),
    "transposed": lambda m, h: (h.t().exp() + h.sin()).cos(),
    "projections": lambda m, h: _projections(m, h.view(4, N // 4, N).sin()),
    "tied": lambda m, h: h @ m.w.t() + (h @ m.w),
    "broadcast": lambda m, h: (h + m.b).exp() * m.b,
    # in Python code
    "custom": lambda m, h: Doubled.apply(h) + h.sin(),
    "hooked": _hooked,
    # formulas that fill zeros
    "index": lambda m, h: h[m.index].exp() + h.sin(),
    "gather": lambda m, h: h.gather(1, m.index.expand(N, N)).exp(),
    "take_along": lambda m, h: torch.take_along_dim(h, m.index.expand(N, N), 1).exp(),
    "index_select": lambda m, h: h.index_select(0, m.index).exp(),
    "topk": lambda m, h: h.topk(8)[0].exp(),
    "sort": lambda m, h: h.sort()[0].exp(),
    "max": lambda m, h: h.max(1)[0].exp(),
    "take": lambda m, h: h.take(m.index).exp(),
    "atan2": lambda m, h: torch.atan2(h, h.exp()),
    "index_put": lambda m, h: h.index_put((m.index,), h.exp(), accumulate=True),
    "masked_fill": lambda m, h: h.masked_fill(h > 0.5, 0.0).exp() + h,
    # and what models have
    "normalize": lambda m, h: F.normalize(h).exp(),
    "norms": lambda m, h: F.layer_norm(h, (N,), m.b, m.b) + h * torch.rsqrt(h.pow(2).mean(-1, True) + 1),
    "attention": lambda m, h: F.scaled_dot_product_attention(
        *(h.view(1, 4, N // 4, N),) * 3, attn_mask=torch.zeros(N // 4, N // 4), dropout_p=0.1
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_peak_is_that_of_the_plain_step(name):
    torch.manual_seed(0)
    model, x = computing(FUNCTIONS[name]), torch.rand(N, N)
    fake = sacplan.profile(model, x, device="cpu")
    real = sacplan.profile(model, x, device="cpu", trace="real")
    with preserved_state(model, None):
        measured = measured_step(Step(model, x, default_loss, None), [x])
    # A scalar here and there is all that may be missed.
    assert fake.peak_bytes == pytest.approx(measured.peak_bytes, abs=64)
    assert real.peak_bytes == pytest.approx(measured.peak_bytes, abs=64)
    assert [op.name for op in fake.program.ops] == [op.name for op in real.program.ops]


def test_a_gradient_that_is_a_sum_is_still_counted_as_a_gradient():
    program = sacplan.profile(computing(FUNCTIONS["loop"]), torch.rand(N, N), device="cpu").program
    sums = [op for op in program.ops if op.phase == Phase.BACKWARD and op.name == "aten.add_.Tensor"]
    gradients = [op.mutates for op in sums if program.storage_kinds[op.mutates[0]] == StorageKind.GRADIENT]
    assert len(gradients) == 4  # the weight is used five times
    assert len(set(gradients)) == 1
