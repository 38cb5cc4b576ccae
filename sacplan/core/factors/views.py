"""Ops that move elements: views, and copies that join, cut, repeat or pad."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sacplan.core.factors.pointwise import pointwise
from sacplan.core.factors.reductions import along, blocked_at
from sacplan.core.factors.rule import Dims, Factors, Kind, Rule, RuleBuilder, register, register_both_ways

# --- other sizes for the same elements


def _common_factors(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Return the coarsest common factors as (size, dimension before, dimension after); None if there are none.

    Both shapes have the same number of elements, and no size 1 or 0.
    """
    # Walk both shapes from the slowest dimension. Each turn splits off the smaller of the two remainders, which must
    # divide the larger: (6, 4) and (4, 6) share none, (6, 4) and (2, 12) share 2, 3 and 4.
    found = []
    i = j = 0
    left, right = list(before), list(after)
    while i < len(left):
        size = min(left[i], right[j])
        if left[i] % size or right[j] % size:
            return None
        found.append((size, i, j))
        left[i] //= size
        right[j] //= size
        i += left[i] == 1
        j += right[j] == 1
    return found


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of dimensions of two shapes with as many elements each. Sizes of 1 are left out.

    A view can move elements between dimensions only within such a run, so each run is factored by itself.
    """
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    found, i, j = [], 0, 0
    while i < len(left):
        first_i, first_j = i, j
        i, j = i + 1, j + 1
        # Whichever shape has fewer elements in the run takes its next dimension.
        while (n_left := math.prod(before[d] for d in left[first_i:i])) != (
            n_right := math.prod(after[d] for d in right[first_j:j])
        ):
            if n_left < n_right:
                i += 1
            else:
                j += 1
        found.append((left[first_i:i], right[first_j:j]))
    return found


@register("view.default", "_unsafe_view", "reshape", "view_copy.default")
def _view(call: RuleBuilder) -> Rule | None:
    """Sizes split into the factors that both shapes share; where they share none, dimensions must be whole."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    if math.prod(before) != math.prod(after):
        return None  # only in a damaged recording
    if math.prod(before) == 0:
        return call.rule([call.blocked(before)], [call.blocked(after)])
    # Only runs without common factors are blocked: other runs of the same view may still be sliced.
    dims: list[Factors] = [()] * len(before)
    new_dims: list[Factors] = [()] * len(after)
    for old, new in _groups(before, after):
        common = _common_factors([before[d] for d in old], [after[d] for d in new])
        if common is None:
            for d in old:
                dims[d] = call.factor(before[d], Kind.BLOCK)
            for d in new:
                new_dims[d] = call.factor(after[d], Kind.BLOCK)
            continue
        for size, i, j in common:
            factor = call.factor(size)
            dims[old[i]] += factor
            new_dims[new[j]] += factor
    call.resize_all("size" if "size" in call.arguments else "shape", tuple(new_dims))
    return call.rule([tuple(dims)], [tuple(new_dims)])


@register("view.dtype")
def _view_as_type(call: RuleBuilder) -> Rule | None:
    return pointwise(call) if tuple(call.inputs[0].shape) == tuple(call.outputs[0].shape) else None


@register_both_ways("view_as_real", "view_as_complex")
def _view_as_real(call: RuleBuilder, x: Any, pairs: Any) -> tuple[Dims, Dims]:
    dims = call.dims(x.shape)
    return dims, (*dims, call.factor(2, Kind.BLOCK))


@register("expand", "expand_copy")
def _expand(call: RuleBuilder) -> Rule:
    x, out = call.inputs[0], call.outputs[0]
    dims = call.dims(out.shape)
    # Along new dimensions and those of size 1 all slices read the same input.
    new = len(out.shape) - len(x.shape)
    call.resize_all("size", dims)
    return call.rule([tuple(dims[new + d] if n != 1 else () for d, n in enumerate(x.shape))], [dims])


@register("repeat")
def _repeat(call: RuleBuilder) -> Rule:
    # A dimension of the output is (times, size): a slice of either factor is a repeat of a slice or fewer repeats.
    x, repeats = call.inputs[0], call["repeats"]
    dims = call.dims(x.shape)
    times = tuple(call.factor(n) for n in repeats)
    padded = ((),) * (len(repeats) - len(dims)) + dims
    call.resize_all("repeats", times)
    return call.rule([dims], [tuple(outer + inner for outer, inner in zip(times, padded, strict=True))])


# --- the same dimensions in another order


@register("permute", "permute_copy")
def _permute(call: RuleBuilder) -> Rule:
    dims = call.dims(call.inputs[0].shape)
    return call.rule([dims], [tuple(dims[d] for d in call["dims"])])


@register("transpose.int", "t", "transpose_copy.int", "t_copy", "adjoint", "mT")
def _transpose(call: RuleBuilder) -> Rule:
    dims = call.dims(call.inputs[0].shape)
    rank = len(dims)
    swapped = list(dims)
    # ``t`` names no dimensions: it swaps the two of a matrix, and leaves a vector as it is.
    if rank > 1:
        i, j = call.arguments.get("dim0", -2) % rank, call.arguments.get("dim1", -1) % rank
        swapped[i], swapped[j] = dims[j], dims[i]
    return call.rule([dims], [tuple(swapped)])


@register("unsqueeze", "unsqueeze_copy")
def _unsqueeze(call: RuleBuilder) -> Rule:
    dims = call.dims(call.inputs[0].shape)
    at = call["dim"] % (len(dims) + 1)
    return call.rule([dims], [(*dims[:at], (), *dims[at:])])


@register("squeeze", "squeeze_copy")
def _squeeze(call: RuleBuilder) -> Rule:
    """Dimensions of size 1 go; others that ``dim`` names (all of them without ``dim``) must be whole."""
    # A named dimension of another size stays, but a slice of it with length 1 would be squeezed away.
    shape = call.inputs[0].shape
    given = call.arguments.get("dim")
    given = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    gone = frozenset(d % max(len(shape), 1) for d in given)
    dims = blocked_at(call, shape, gone)
    return call.rule([dims], [tuple(f for d, f in enumerate(dims) if d not in gone or shape[d] != 1)])


# --- parts of a dimension


@register_both_ways("slice.Tensor slice_copy.Tensor", "slice_backward")
def _slice(call: RuleBuilder, x: Any, part: Any) -> tuple[Dims, Dims]:
    dim = call["dim"] % len(x.shape)
    if x.shape[dim] != part.shape[dim]:
        dims = blocked_at(call, x.shape, [dim])
        return dims, call.of_length(dims, x.shape, part.shape)
    # The whole dimension: a view of everything, as ``x[:]`` leaves it. An ``end`` that is the size shrinks with a
    # slice; a larger one, which stands for "to the end", stays.
    dims = call.dims(x.shape)
    if call["end"] == x.shape[dim]:
        call.resize("end", None, dims[dim])
    return dims, dims


@register_both_ways("unfold", "unfold_backward")
def _unfold(call: RuleBuilder, x: Any, windows: Any) -> tuple[Dims, Dims]:
    if not x.shape:
        return (), call.blocked(windows.shape)
    dim = call["dimension" if "dimension" in call.arguments else "dim"] % len(x.shape)
    dims = blocked_at(call, x.shape, [dim])
    at, along = call.blocked((windows.shape[dim], windows.shape[-1]))
    return dims, (*dims[:dim], at, *dims[dim + 1 :], along)


# --- joined, moved, padded, masked by position


# Without dimensions, the flattened tensor is rolled, while a flip moves nothing.
register("roll")(along(lambda call, rank: {d % rank for d in call["dims"] or range(rank)}))
register("flip")(along(lambda call, rank: {d % rank for d in call["dims"]}))
# What stays depends on row and column numbers, which a slice would count from its own beginning.
register("tril", "triu")(along(lambda call, rank: (rank - 1, rank - 2)))
# The argument has pairs, from the last dimension on.
register("constant_pad_nd")(
    along(lambda call, rank: [rank - 1 - i // 2 for i, n in enumerate(call["pad"]) if n])
)


@register_both_ways("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(call: RuleBuilder, x: Any, shuffled: Any) -> tuple[Dims, Dims]:
    """From (..., channels r r, height, width) to (..., channels, height r, width r)."""
    *front, channels, height, width = x.shape
    r = shuffled.shape[-1] // width
    before = call.dims(front)
    c, h, w = call.dims((channels // (r * r), height, width))
    # The blocks must be whole, since their side is an argument of the op and stays as it is.
    down, across = call.blocked((r, r))
    return (*before, c + down + across, h, w), (*before, c, h + down, w + across)
