"""Small steps of all kinds of ops: what strategies are tested on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.placed import Recorded
from tests.support.slices import OpCall


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def below(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(n, shape)


def ignored(n: int, *shape: int) -> torch.Tensor:
    """Labels, of which some are left out, unevenly over the batch."""
    found = below(n, *shape)
    found.view(-1)[:3] = -100
    return found


def calls_of(fn: Callable[[], Any]) -> list[OpCall]:
    """The ops of a forward pass."""
    with Recorded() as seen:
        fn()
    return list(seen.calls.values())


STEPS: dict[str, Callable[[], Any]] = {}


def step(fn: Callable[[], Any]) -> Callable[[], Any]:
    STEPS[fn.__name__] = fn
    return fn


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


@step
def linear_with_bias() -> Any:
    return F.linear(leaf(4, 4, 16), leaf(8, 16), leaf(8))


@step
def linear_without_bias() -> Any:
    return F.linear(leaf(4, 4, 16), leaf(8, 16))


@step
def products() -> Any:
    a, b = leaf(4, 6, 8), leaf(4, 8, 2)
    return (
        a @ b,
        torch.baddbmm(leaf(4, 6, 2), a, b),
        torch.addmm(leaf(6, 2), a[0], b[0], beta=0.5, alpha=2.0),
        a[0] @ b[0][:, 0],
        torch.addmv(leaf(6), a[0], b[0][:, 1]),
        torch.einsum("bij,bjk->bik", a, b),
        a[0, 0].dot(b[0, :, 0]),
    )


@step
def embedding() -> Any:
    return F.embedding(below(12, 4, 6), leaf(12, 8)), F.embedding(below(12, 4, 6), leaf(12, 8), padding_idx=3)


@step
def layer_norm() -> Any:
    return F.layer_norm(leaf(4, 6, 8), (8,), leaf(8), leaf(8)), F.layer_norm(leaf(4, 6, 8), (6, 8))


@step
def rms_norm() -> Any:
    return F.rms_norm(leaf(4, 6, 8), (8,), leaf(8))


@step
def group_norm() -> Any:
    return F.group_norm(leaf(4, 8, 4, 4), 4, leaf(8), leaf(8))


@step
def softmax() -> Any:
    a = leaf(4, 6, 8)
    return F.softmax(a, -1), F.log_softmax(a, 1)


@step
def attention() -> Any:
    q, k, v = leaf(2, 4, 8, 8), leaf(2, 4, 6, 8), leaf(2, 4, 6, 8)
    return F.scaled_dot_product_attention(q, k, v)


@step
def causal_attention() -> Any:
    q, k, v = leaf(2, 4, 8, 8), leaf(2, 4, 8, 8), leaf(2, 4, 8, 8)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@step
def masked_attention() -> Any:
    q, k, v = leaf(2, 4, 8, 8), leaf(2, 4, 6, 8), leaf(2, 4, 6, 8)
    return F.scaled_dot_product_attention(q, k, v, torch.randn(2, 1, 8, 6) > -1)


@step
def attention_by_products() -> Any:
    q, k, v = leaf(2, 4, 8, 8), leaf(2, 4, 6, 8), leaf(2, 4, 6, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, torch.randn(8, 6))


@step
def grouped_attention() -> Any:
    q, k, v = leaf(2, 8, 6, 8), leaf(2, 4, 6, 8), leaf(2, 4, 6, 8)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@step
def convolution() -> Any:
    a = leaf(4, 4, 8, 8)
    return (
        F.conv2d(a, leaf(8, 4, 3, 3), leaf(8), padding=1),
        F.conv2d(a, leaf(8, 4, 1, 1)),
        F.conv2d(a, leaf(8, 2, 3, 3), leaf(8), groups=2),
        F.conv_transpose2d(a, leaf(4, 6, 2, 2), leaf(6), stride=2),
    )


@step
def batch_norm() -> Any:
    return F.batch_norm(leaf(4, 8, 4, 4), torch.zeros(8), torch.ones(8), leaf(8), leaf(8), training=True)


@step
def batch_norm_in_evaluation() -> Any:
    return F.batch_norm(leaf(4, 8, 4, 4), torch.randn(8), torch.ones(8), leaf(8), leaf(8), training=False)


@step
def pooling() -> Any:
    a = leaf(4, 4, 8, 8)
    return (
        F.max_pool2d(a, 2),
        F.avg_pool2d(a, 2),
        F.adaptive_avg_pool2d(a, 2),
        F.interpolate(a, scale_factor=2.0),
    )


@step
def views() -> Any:
    a = leaf(4, 6, 8)
    return (
        a.view(24, 8),
        a.view(4, 6, 2, 4),
        a.view(4, 48).view(8, 24),
        a.permute(2, 0, 1).clone(),
        a.transpose(0, 1).reshape(6, 32),
        a.unsqueeze(1).expand(4, 6, 6, 8),
        *a.split(2, 1),
        *a.chunk(2, -1),
        *a.unbind(0),
        a[:, 2:4],
        a[1],
        a.flatten(),
        a.repeat(2, 1, 1),
    )


@step
def joins() -> Any:
    a, b = leaf(4, 6, 8), leaf(4, 2, 8)
    return torch.cat([a, b], 1), torch.stack([a, a * 2]), F.pad(a, (0, 2)), a.roll(1, 0), a.flip(1), a.tril()


@step
def elements() -> Any:
    a, b = leaf(4, 6, 8), leaf(6, 1)
    return (
        a + b, a - b, a * b, a / b.exp(), 2.0 - a, a + 1.0, a / 3.0, -a, a.exp(), F.gelu(a), F.silu(a), F.relu(a),
        torch.tanh(a), a.sigmoid(), a.pow(2), torch.where(a > 0, a, b), a.masked_fill(a > 1, 0.0),
        a.masked_fill(a > 1, 2.0), torch.addcmul(a, a, b), a.clamp(min=0.1), a.rsqrt().nan_to_num(), a.lerp(b, 0.3),
    )  # fmt: skip


@step
def in_place() -> Any:
    a, b = leaf(4, 6, 8), leaf(4, 6, 8)
    c = a * 2
    c.add_(b)
    c.mul_(2.0).sub_(b, alpha=0.5)
    d = torch.zeros(4, 6, 8).copy_(b)
    d.relu_()
    e = torch.zeros(4, 6, 8).index_add(0, below(4, 3), a[:3])
    return c, d, e, torch.zeros(4, 6, 8).scatter_add_(1, below(6, 4, 6, 8), a)


@step
def reductions() -> Any:
    a = leaf(4, 6, 8)
    return (
        a.sum(), a.sum(1), a.sum((0, 2), keepdim=True), a.mean(), a.mean(-1, keepdim=True), a.amax(1), a.amin((0, 1)),
        a.max(2).values, a.max(), a.var(1), a.logsumexp(2), a.norm(), a.cumsum(1), a.sort(1).values, a.topk(2).values,
        a.prod(0), a.std(),
    )  # fmt: skip


@step
def lookups() -> Any:
    a = leaf(4, 6, 8)
    return (
        a.gather(1, below(6, 4, 2, 8)),
        a.index_select(1, below(6, 4)),
        a[:, below(6, 4)],
        a[below(4, 6), below(6, 6)],
    )


@step
def cross_entropy() -> Any:
    scores = leaf(8, 6)
    return (
        F.cross_entropy(scores, below(6, 8)),
        F.cross_entropy(scores, ignored(6, 8)),
        F.cross_entropy(scores, ignored(6, 8), weight=torch.rand(6)),
        F.cross_entropy(scores, ignored(6, 8), reduction="sum"),
        F.cross_entropy(scores, ignored(6, 8), reduction="none"),
        F.cross_entropy(scores, below(6, 8), label_smoothing=0.1),
        F.cross_entropy(leaf(4, 6, 4), ignored(6, 4, 4)),
    )


@step
def other_losses() -> Any:
    a, b = leaf(8, 6), leaf(8, 6)
    return (
        F.mse_loss(a, b), F.mse_loss(a, b, reduction="sum"), F.smooth_l1_loss(a, b), F.huber_loss(a, b),
        F.binary_cross_entropy(a.sigmoid(), torch.rand(8, 6)), F.soft_margin_loss(a, x(8, 6).sign()),
        F.binary_cross_entropy_with_logits(a, torch.rand(8, 6)), F.kl_div(a, b.softmax(1), reduction="batchmean"),
        F.l1_loss(a, b), F.mse_loss(a, b, reduction="none"),
    )  # fmt: skip
