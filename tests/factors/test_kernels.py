"""Factor rules of ops that have kernels for GPUs alone: by a reference in their place, and by their shapes on meta."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from sacplan.core.factors.axes import FactorAxis, from_factor, take
from sacplan.core.factors.rule import rule_of
from sacplan.torch_compat.calls import flat_tensors
from tests.support.slices import OpCall, assert_slices_make_the_whole, run_slice, sliceable

aten = torch.ops.aten
B, H, Q, K, D = 2, 3, 5, 7, 8


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, bias, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def gradients(grad: torch.Tensor, *inputs: Any, causal: bool) -> list[torch.Tensor]:
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        out = attention(*leaves, causal=causal)
        return list(torch.autograd.grad(out, [t for t in leaves if t is not None], grad))


def efficient_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, sums: Any, seed: Any, offset: Any, p: Any, mask: Any,
    causal: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    return gradients(grad, q, k, v, bias, causal=causal)


def flash_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, first: Any, last: Any, max_q: int, max_k: int, p: Any,
    causal: bool, seed: Any, offset: Any,
) -> list[torch.Tensor]:  # fmt: skip
    assert max_q == q.shape[2]
    assert max_k == k.shape[2]
    return gradients(grad, q, k, v, None, causal=causal)


def seeds() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_call(*bias: int) -> OpCall:
    q, k, v, out = normal(B, H, Q, D), normal(B, H, K, D), normal(B, H, K, D), normal(B, H, Q, D)
    args = (normal(B, H, Q, D), q, k, v, normal(*bias), out, normal(B, H, 32), *seeds(), 0.0, [True] * 4)
    return OpCall(aten._scaled_dot_product_efficient_attention_backward.default, args, {}, efficient_backward)


def flash_call(groups: int, *, causal: bool) -> OpCall:
    q, k, v, out = normal(B, 6, Q, D), normal(B, groups, K, D), normal(B, groups, K, D), normal(B, 6, Q, D)
    nothing = torch.empty(0, dtype=torch.int64)
    args = (
        normal(B, 6, Q, D), q, k, v, out, normal(B, 6, Q), nothing, nothing, Q, K, 0.0, causal, *seeds(),
    )  # fmt: skip
    return OpCall(aten._scaled_dot_product_flash_attention_backward.default, args, {}, flash_backward)


def grouped(x: torch.Tensor, y: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """What ``_grouped_mm`` computes, one group after the other."""
    ends = [0, *offs.tolist()]
    pieces = [slice(a, b) for a, b in itertools.pairwise(ends)]
    if x.dim() == y.dim():
        return torch.stack([x[:, piece] @ y[piece] for piece in pieces])
    if x.dim() == 2:
        return torch.cat([x[piece] @ y[i] for i, piece in enumerate(pieces)])
    return torch.cat([x[i] @ y[:, piece] for i, piece in enumerate(pieces)], 1)


def grouped_call(x: torch.Tensor, y: torch.Tensor, *ends: int) -> OpCall:
    return OpCall(aten._grouped_mm.default, (x, y, torch.tensor(ends, dtype=torch.int32)), {}, grouped)


@pytest.mark.parametrize(
    ("make", "factors"),
    [
        (lambda: efficient_call(B, H, Q, K), 2),
        (lambda: efficient_call(1, H, 1, K), 2),
        (lambda: efficient_call(1, 1, Q, 1), 2),
        (lambda: flash_call(6, causal=False), 3),
        (lambda: flash_call(2, causal=False), 3),
        (lambda: flash_call(2, causal=True), 2),
        (lambda: grouped_call(normal(7, 4), normal(2, 4, 3), 5, 7), 2),
        (lambda: grouped_call(normal(2, 3, 4), normal(4, 7), 5, 7), 2),
        (lambda: grouped_call(normal(3, 7), normal(7, 4), 5, 7), 2),
    ],
)
def test_slices_of_a_reference(make: Callable[[], OpCall], factors: int) -> None:
    torch.manual_seed(0)
    assert assert_slices_make_the_whole(make(), lambda size: ((1, size, 1), [1, size])) == factors


def _kernel_calls() -> list[OpCall]:
    q, k, v = torch.empty(B, H, 64, D), torch.empty(B, H, K, D), torch.empty(B, H, K, D)
    bias, seed = torch.empty(B, 1, 64, K), torch.empty((), dtype=torch.int64)
    n, w, batch = torch.empty(0), torch.empty(3), torch.empty(4, 3, 5, 5)
    found = [
        OpCall(aten._scaled_dot_product_efficient_attention.default, (q, k, v, bias, False), {}),
        OpCall(aten._scaled_dot_product_efficient_attention.default, (q, k, v, None, True), {}),
        OpCall(aten._scaled_dot_product_flash_attention.default, (q, k, v), {}),
        OpCall(aten._scaled_dot_product_cudnn_attention.default, (q, k, v, bias, True), {}),
        OpCall(
            aten._scaled_dot_product_flash_attention_backward.default,
            (q, q, k, v, q, torch.empty(B, H, 64), n, n, 64, K, 0.0, False, seed, seed),
            {},
        ),
        OpCall(
            aten._scaled_dot_product_efficient_attention_backward.default,
            (q, q, k, v, bias, q, torch.empty(B, H, 64), seed, seed, 0.0, [True] * 4),
            {},
        ),
        OpCall(
            aten._scaled_dot_product_cudnn_attention_backward.default,
            (q, q, k, v, q, torch.empty(B, H, 64, 1), seed, seed, bias, n, n, 64, K, 0.0, False),
            {},
        ),
        OpCall(aten.cudnn_batch_norm.default, (batch, w, w, w, w, True, 0.1, 1e-5), {}),
        OpCall(
            aten.cudnn_batch_norm_backward.default, (batch, batch, w, w, w, w, w, 1e-5, n.to(torch.uint8)), {}
        ),
        OpCall(aten._fused_rms_norm.default, (q, [D], torch.empty(D), 1e-5), {}),
        OpCall(
            aten._fused_rms_norm_backward.default,
            (q, q, [D], torch.empty(B, H, 64, 1), torch.empty(D), [True] * 2),
            {},
        ),
    ]
    return [_on_meta(call) for call in found]


def _on_meta(call: OpCall) -> OpCall:
    args = tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, call.args)
    return OpCall(call.func, args, call.kwargs)


@pytest.mark.parametrize("call", _kernel_calls(), ids=lambda call: str(call.func))
def test_shapes_of_slices(call: OpCall) -> None:
    """A slice returns what the whole has in that slice, in shape."""
    whole = list(flat_tensors(call.func(*call.args)))
    rule = rule_of(call.func, call.args, {}, whole)
    assert rule is not None
    assert sliceable(rule)
    for factor in sliceable(rule):
        within = FactorAxis(factor, 1, rule.sizes[factor], 1)
        for part, t, dims in zip(run_slice(call, rule, within, 0, 1), whole, rule.outputs, strict=True):
            axis = from_factor(dims, rule.sizes, within)
            assert part.shape == (t if axis is None else take(t, axis, 0, 1)).shape
