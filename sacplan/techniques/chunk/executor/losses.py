"""Losses whose ops cannot run on slices as they are: they divide by something that belongs to the whole.

Each is put together of ops that can be sliced. Importing this module registers them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sacplan.techniques.chunk.executor.lazy import REWRITTEN, Lazy, defer, deferred
from sacplan.techniques.chunk.executor.values import DeferredOp, Held, Stage
from sacplan.techniques.runtime.tensors import history_free_aliases

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction

Rewrite = Callable[[Any, Sequence[Any]], Any]


def _rewrites(*ops: Any) -> Callable[[Rewrite], Rewrite]:
    def register(rewrite: Rewrite) -> Rewrite:
        REWRITTEN.update(dict.fromkeys(ops, rewrite))
        return rewrite

    return register


@_rewrites(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(func: Any, args: Sequence[Any]) -> tuple[Any, Any]:
    """Return the loss and the total weight. A mean is a sum over slices, divided by that weight after the loop.

    Without lazy scores, or with lazy targets, the weight that the kernel returns is used.
    """
    scores, targets, weight, reduction, ignored = args
    # For a mean, each slice sums: the division comes once, after the loop.
    slice_reduction = _SUM if reduction == _MEAN else reduction
    loss, total = deferred(func, (scores, targets, weight, slice_reduction, ignored), {})
    if not (isinstance(loss, Lazy) and isinstance(scores, Lazy)) or isinstance(targets, Lazy):
        return (defer(aten.div.Tensor, (loss, total), {}) if reduction == _MEAN else loss), total
    # Else a free node of its own makes the total weight before the loop, from the targets alone.
    held = [Held(t) for t in history_free_aliases([targets] if weight is None else [targets, weight])]
    node = DeferredOp(_total_weight, (reduction, ignored, scores.dtype, *held), {}, Stage.FREE)
    like = torch.empty((), dtype=scores.dtype, device="meta")
    value = node.new_output(loss.value.region, like, device=scores.device)
    value.region.note_scalar(value)
    total = Lazy(value)
    return (defer(aten.div.Tensor, (loss, total), {}) if reduction == _MEAN else loss), total


def _total_weight(
    reduction: int,
    ignored: int,
    dtype: torch.dtype,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    if reduction == _NONE:
        return torch.zeros((), dtype=dtype, device=targets.device)
    counted = targets != ignored
    if weight is None:
        return counted.sum().to(dtype)
    return weight[targets.clamp(0, weight.shape[0] - 1)].masked_fill_(~counted, 0).sum()


@_rewrites(aten.mse_loss_backward.default)
def _mse_backward(func: Any, args: Sequence[Any]) -> Any:
    """Return the gradient, multiplied in the order of the kernel so that bits are equal."""
    gradient, scores, targets, reduction = args
    difference = defer_any(aten.sub.Tensor, scores, targets)
    norm = 2.0 / math.prod(scores.shape) if reduction == _MEAN else 2.0
    return defer_any(aten.mul.Tensor, defer_any(aten.mul.Tensor, difference, norm), gradient)


@_rewrites(
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)
def _elementwise_backward(func: Any, args: Sequence[Any]) -> Any:
    """Take the gradient of a mean as that of a sum, with the incoming gradient divided by the number of elements."""
    arguments = list(args)
    at = next(i for i, a in enumerate(func._schema.arguments) if a.name == "reduction")
    if len(arguments) > at and arguments[at] != _MEAN:
        return deferred(func, args, {})
    if len(arguments) <= at:
        arguments.append(_MEAN)
    arguments[at] = _SUM
    arguments[0] = defer_any(aten.div.Tensor, args[0], math.prod(args[1].shape))
    return deferred(func, arguments, {})


def defer_any(func: Any, *args: Any) -> Any:
    """Defer an op if an argument is lazy, else run it."""
    return defer(func, args, {}) if any(isinstance(x, Lazy) for x in args) else func(*args)
