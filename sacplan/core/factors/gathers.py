"""Ops that look up or add at given positions: embeddings, gather and scatter, indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sacplan.core.factors.pointwise import broadcast
from sacplan.core.factors.reductions import blocked_at
from sacplan.core.factors.rule import Dims, Factors, Kind, Rule, RuleBuilder, register


@register("embedding")
def _embedding(call: RuleBuilder) -> Rule:
    # Any index may ask for any row of the table, so its rows must be whole; columns and indices pass.
    weight, indices = call.inputs
    rows, row = call.dims(indices.shape), call.dims(weight.shape[1:])
    return call.rule([(call.factor(weight.shape[0], Kind.BLOCK), *row), rows], [rows + row])


@register("embedding_dense_backward")
def _embedding_backward(call: RuleBuilder) -> Rule:
    # Rows add up over indices. Scaled by frequency they do not: a slice would count its own occurrences only.
    grad, indices = call.inputs
    rows = call.dims(indices.shape, Kind.BLOCK if call["scale_grad_by_freq"] else Kind.SUM)
    row = call.dims(grad.shape[len(indices.shape) :])
    return call.rule([rows + row, rows], [(call.factor(call["num_weights"], Kind.BLOCK), *row)])


@register("gather")
def _gather(call: RuleBuilder) -> Rule:
    """Dimensions pass where input and indices have the same size. The gathered one passes in the indices alone."""
    x, indices = call.inputs
    if len(x.shape) != len(indices.shape):  # one of them has no dimensions
        return call.rule([call.blocked(x.shape), call.blocked(indices.shape)], [call.blocked(indices.shape)])
    dim = call["dim"] % max(len(x.shape), 1)
    dims = list(call.dims(indices.shape))
    source = list(dims)
    for d, (n, of_indices) in enumerate(zip(x.shape, indices.shape, strict=True)):
        if d == dim or n != of_indices:
            source[d] = call.factor(n, Kind.BLOCK)
        if d != dim and n != of_indices:
            call.becomes(dims[d], Kind.BLOCK)
    return call.rule([tuple(source), tuple(dims)], [tuple(dims)])


@register("scatter", "scatter_add", "scatter_reduce.two")
def _scatter(call: RuleBuilder) -> Rule:
    """Slice the dimensions in which input, indices and values have the same size, but not the scattered one."""
    # Any slice of the indices may write anywhere along the scattered dimension. Where sizes differ, a slice of the
    # indices does not belong to the same slice of the input.
    x, *others = call.inputs
    rank = len(x.shape)
    others = [t for t in others if len(t.shape) == rank]
    whole = {call["dim"] % max(rank, 1)}
    whole |= {d for t in others for d in range(rank) if t.shape[d] != x.shape[d]}
    dims = blocked_at(call, x.shape, whole)

    def dims_of(t: Any) -> Dims:
        if len(t.shape) != rank:
            return call.blocked(t.shape)
        return call.of_length(dims, x.shape, t.shape)

    return call.rule([dims_of(t) for t in call.inputs], [dims])


@register("index_select")
def _index_select(call: RuleBuilder) -> Rule:
    x, indices = call.inputs
    if not x.shape:
        return call.rule([(), call.blocked(indices.shape)], [()])
    dim = call["dim"] % len(x.shape)
    dims = blocked_at(call, x.shape, [dim])
    chosen = call.factor(indices.shape[0] if indices.shape else 1)
    return call.rule([dims, (chosen,) if indices.shape else ()], [(*dims[:dim], chosen, *dims[dim + 1 :])])


@register("index_add", "index_copy", "index_fill")
def _index_add(call: RuleBuilder) -> Rule:
    x = call["self"]
    dim = call["dim"] % max(len(x.shape), 1)
    dims = blocked_at(call, x.shape, [dim])

    def dims_of(name: str, t: Any) -> Dims:
        if name == "self":
            return dims
        if name == "source" and x.shape and len(t.shape) == len(x.shape):
            return call.of_length(dims, x.shape, t.shape)
        return call.blocked(t.shape)

    return call.rule([dims_of(name, t) for name, t in call.named_inputs], [dims])


def _is_mask(t: Any) -> bool:
    return str(t.dtype).removeprefix("torch.") in ("bool", "uint8")


class _Indexed:
    """Factors of a tensor that is indexed by tensors, and of the result."""

    def __init__(self, call: RuleBuilder, x: Any, indices: Sequence[Any], kind: Kind) -> None:
        # ``at``: the dimensions that are indexed, any part of which an index may ask for. Indices are broadcast against
        # each other, and their common shape takes the place of these dimensions.
        at = [d for d, i in enumerate(indices) if i is not None]
        self.found_shape = torch.broadcast_shapes(*(tuple(indices[d].shape) for d in at))
        positions = call.dims(self.found_shape, kind)
        self.x: Dims = blocked_at(call, x.shape, at)
        self.indices = [_aligned(positions, self.found_shape, indices[d].shape) for d in at]
        kept = [d for d in range(len(x.shape)) if d not in at]
        # In the result, the shape of the indices stands where they do, or first if they do not stand together.
        first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
        before = [d for d in kept if d < first]
        self.shape = (
            *(x.shape[d] for d in before),
            *self.found_shape,
            *(x.shape[d] for d in kept if d >= first),
        )
        self.found: Dims = (
            *(self.x[d] for d in before),
            *positions,
            *(self.x[d] for d in kept if d >= first),
        )


def _aligned(dims: Dims, to: Sequence[int], shape: Sequence[int]) -> tuple[Factors, ...]:
    found = broadcast(dims, to, shape)
    assert found is not None  # the shapes were broadcast
    return found


def _can_be_followed(indices: Sequence[Any]) -> bool:
    given = [i for i in indices if i is not None]
    return bool(given) and not any(map(_is_mask, given))  # how many a mask chooses depends on the data


@register("index.Tensor", "_unsafe_index.Tensor")
def _index(call: RuleBuilder) -> Rule | None:
    x, indices = call["self"], call["indices"]
    if not _can_be_followed(indices):
        return None
    indexed = _Indexed(call, x, indices, Kind.PASS)
    return call.rule([indexed.x, *indexed.indices], [indexed.found])


@register("index_put", "_unsafe_index_put", "_index_put_impl_")
def _index_put(call: RuleBuilder) -> Rule | None:
    x, indices, values = call["self"], call["indices"], call["values"]
    if not _can_be_followed(indices):
        return None
    indexed = _Indexed(call, x, indices, Kind.BLOCK)
    given = broadcast(indexed.found, indexed.shape, values.shape)
    if given is None:  # more dimensions than are found, all of size 1: rare, and left alone
        return None
    return call.rule([indexed.x, *indexed.indices, given], [indexed.x])
