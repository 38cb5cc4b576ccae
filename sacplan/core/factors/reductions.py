"""Reductions, and what looks along whole dimensions: scans, softmax, sorting."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from sacplan.core.factors.rule import Dims, Kind, Rule, RuleBuilder, register


def reduced_dims(call: RuleBuilder, rank: int) -> frozenset[int]:
    """Return the dimensions in the argument ``dim``; all if it names none."""
    given = call.arguments.get("dim")
    if given is None or given == []:
        return frozenset(range(rank))
    given = given if isinstance(given, Sequence) else [given]
    # A scalar may be reduced along 0 or -1, though it has no dimensions.
    return frozenset(d % max(rank, 1) for d in given)


def _reduction(call: RuleBuilder, kind: Kind) -> Rule:
    # ``kept`` is for outputs without the reduced dimensions, ``keepdim`` for those that keep them with size 1.
    shape = call.inputs[0].shape
    gone = reduced_dims(call, len(shape))
    dims = tuple(call.factor(n, kind if d in gone else Kind.PASS) for d, n in enumerate(shape))
    kept = [dims[d] for d in range(len(shape)) if d not in gone]
    keepdim = [() if d in gone else factors for d, factors in enumerate(dims)]
    outputs = [tuple(keepdim if len(o.shape) == len(shape) else kept) for o in call.outputs]
    return call.rule([dims], outputs)


def _by_kind(kind: Kind) -> Callable[[RuleBuilder], Rule]:
    def formula(call: RuleBuilder) -> Rule:
        return _reduction(call, kind)

    return formula


register("sum", "nansum", "count_nonzero")(_by_kind(Kind.SUM))
# Reductions whose slices can be put together by one more reduction of the same kind.
register("mean")(_by_kind(Kind.MEAN))
register("amax", "any", "max.default")(_by_kind(Kind.MAX))
register("amin", "all", "min.default")(_by_kind(Kind.MIN))
# Reductions that would need more than the results of slices: a position, a count, a second moment, a median.
register(
    "aminmax argmax argmin logsumexp max.dim median.dim min.dim nanmedian.dim prod std std_mean var var_mean"
)(_by_kind(Kind.BLOCK))


@register("linalg_vector_norm")
def _vector_norm(call: RuleBuilder) -> Rule:
    # Of the norms, only those that are a maximum or a minimum can be put together from the norms of slices.
    return _reduction(call, {math.inf: Kind.MAX, -math.inf: Kind.MIN}.get(call["ord"], Kind.BLOCK))


def blocked_at(call: RuleBuilder, shape: Sequence[int], whole: Collection[int]) -> Dims:
    """Make factors of a shape, of which the dimensions ``whole`` must not be sliced."""
    return tuple(call.factor(n, Kind.BLOCK if d in whole else Kind.PASS) for d, n in enumerate(shape))


def along(whole: Callable[[RuleBuilder, int], Collection[int]]) -> Callable[[RuleBuilder], Rule]:
    """Return the formula of ops from one tensor to another of the same rank.

    Args:
        whole: from a call and the rank to the dimensions that must be whole.
    """

    def formula(call: RuleBuilder) -> Rule:
        shape, out_shape = call.inputs[0].shape, call.outputs[0].shape
        dims = blocked_at(call, shape, whole(call, len(shape)))
        return call.rule([dims], [call.of_length(dims, shape, out_shape)])

    return formula


# Transforms between real and complex numbers store about half of the last dimension.
register("_fft_c2c", "_fft_r2c", "_fft_c2r")(along(reduced_dims))


@register(
    """_log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data argsort cat chunk cummax
    cummin cumprod cumsum glu glu_backward kthvalue logcumsumexp narrow select.int select_backward select_copy.int
    select_scatter slice_scatter sort split.Tensor split_with_sizes stack topk unbind.int unbind_copy.int unsafe_split
    unsafe_split_with_sizes"""
)
def along_a_dimension(call: RuleBuilder) -> Rule:
    """All tensors have the same dimensions, but for the one that the op works along: it may be shorter, or missing."""
    shape = max((tuple(t.shape) for t in (*call.inputs, *call.outputs)), key=len)
    dim = call["dim"] % max(len(shape), 1)
    dims = blocked_at(call, shape, [dim])
    others = shape[:dim] + shape[dim + 1 :]

    def dims_of(t: Any) -> Dims:
        if len(t.shape) == len(shape):
            return call.of_length(dims, shape, t.shape)
        if tuple(t.shape) == others:
            return (*dims[:dim], *dims[dim + 1 :])
        return call.blocked(t.shape)  # an empty tensor of one dimension, which ``cat`` ignores

    outputs = [dims_of(o) for o in call.outputs]
    if "input_sizes" in call.arguments:
        call.resize_all("input_sizes", outputs[0])
    return call.rule([dims_of(t) for t in call.inputs], outputs)
