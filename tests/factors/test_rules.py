"""Factor rules against the ops themselves: what is computed in slices and put together is the whole."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._decomp import get_decompositions

from sacplan.core.elements import Tensor
from sacplan.core.factors.axes import FactorAxis
from sacplan.core.factors.rule import _FORMULAS, Kind, formula_of, register, rule_of
from tests.support.slices import (
    OpCall,
    assert_slices_make_the_whole,
    calls_of_the_database,
    insides,
    run_in_slices,
)

aten = torch.ops.aten
DECOMPOSED = get_decompositions([aten._fused_rms_norm_backward.default])  # has no kernel for the CPU


class Draw:
    """Random arguments."""

    def __init__(self, data: st.DataObject) -> None:
        self.draw = data.draw

    def size(self, most: int = 5) -> int:
        return self.draw(st.integers(1, most))

    def sizes(self, n: int | None = None) -> list[int]:
        return [self.size() for _ in range(n or self.draw(st.integers(1, 4)))]

    def dim(self, shape: Sequence[int]) -> int:
        return self.draw(st.integers(-len(shape), len(shape) - 1))

    def dims(self, shape: Sequence[int]) -> list[int]:
        return sorted(self.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def broadcast(self, shape: Sequence[int]) -> torch.Tensor:
        """A tensor that broadcasts to a shape."""
        kept = shape[self.draw(st.integers(0, len(shape))) :]
        return normal(*(self.one_of(1, n) for n in kept))

    def maybe(self, t: torch.Tensor) -> torch.Tensor | None:
        return self.one_of(None, t)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape) + 0.1


def integers(below: int, *shape: int) -> torch.Tensor:
    return torch.randint(below, shape)


Sample = Callable[[Draw], tuple[Any, ...]]
SAMPLES: dict[str, tuple[Any, Sample]] = {}


def sample(*ops: Any) -> Callable[[Sample], Sample]:
    """A decorator: arguments of these ops; keyword arguments in a dict at the end."""

    def add(make: Sample) -> Sample:
        SAMPLES.update({str(op): (op, make) for op in ops})
        return make

    return add


def shaped(make: Callable[[Draw, list[int]], tuple[Any, ...]], n: int | None = None) -> Sample:
    """Arguments that begin with a shape, of ``n`` dimensions if that is given."""
    return lambda d: make(d, d.sizes(n))


def call_of(op: Any, given: tuple[Any, ...]) -> OpCall:
    kwargs = given[-1] if given and isinstance(given[-1], dict) else {}
    return OpCall(op, given[: len(given) - bool(kwargs)], kwargs, DECOMPOSED.get(op))


# --- pointwise

sample(
    aten.exp.default, aten.clone.default, aten.relu_.default, aten.zeros_like.default, aten._to_copy.default
)(lambda d: (normal(*d.sizes()),))
sample(aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.copy_.default, aten.lt.Tensor)(
    shaped(lambda d, shape: (normal(*shape), d.broadcast(shape)))
)
sample(aten.addcmul.default)(
    shaped(lambda d, shape: (normal(*shape), d.broadcast(shape), d.broadcast(shape), {"value": 0.5}))
)
sample(aten.where.self)(shaped(lambda d, shape: (d.broadcast(shape) > 0, normal(*shape), d.broadcast(shape))))
sample(aten.masked_fill.Scalar)(shaped(lambda d, shape: (normal(*shape), d.broadcast(shape) > 0, -1.0)))
sample(aten.div.Tensor_mode)(
    shaped(lambda d, shape: (normal(*shape), positive(*shape), {"rounding_mode": "floor"}))
)
sample(aten.tanh_backward.default, aten.sigmoid_backward.default, aten.gelu_backward.default)(
    shaped(lambda d, shape: (normal(*shape), normal(*shape)))
)
sample(aten.native_dropout_backward.default)(
    shaped(lambda d, shape: (normal(*shape), normal(*shape) > 0, 2.0))
)
sample(aten.isin.Tensor_Tensor)(shaped(lambda d, shape: (integers(9, *shape), integers(9, *shape))))
sample(aten.full.default)(lambda d: (d.sizes(), 2.5))
sample(aten.new_zeros.default)(shaped(lambda d, shape: (normal(*d.one_of(shape, d.sizes())), shape)))
sample(aten.scalar_tensor.default)(lambda d: (2.5,))


# --- views

sample(aten.view.dtype)(lambda d: (normal(*d.sizes()), torch.int32))
sample(aten.view_as_real.default)(lambda d: (torch.complex(normal(3, 2), normal(3, 2)),))
sample(aten.select_scatter.default)(
    shaped(lambda d, shape: (normal(*shape), normal(shape[0], shape[2]), 1, -1), 3)
)


@sample(aten.slice_scatter.default)
def _(d: Draw) -> Any:
    n, m = d.sizes(2)
    return normal(n, 6, m), normal(n, 2, m), 1, 2, 4


@sample(aten.pixel_unshuffle.default)
def _(d: Draw) -> Any:
    n, c, h, w = d.sizes(4)
    return normal(n, c, 3 * h, 3 * w), 3


def _other_shape(d: Draw, shape: Sequence[int]) -> list[int]:
    """Another shape with as many elements: sizes split, merged, and split elsewhere."""
    sizes = list(shape)
    for _ in range(d.size(4)):
        at = d.draw(st.integers(0, len(sizes) - 1))
        if d.one_of(True, False) and at + 1 < len(sizes):
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        else:
            n = sizes[at]
            part = d.one_of(*(i for i in range(1, n + 1) if n % i == 0))
            sizes[at : at + 1] = [part, n // part]
    return sizes


@sample(aten.view.default, aten._unsafe_view.default)
def _(d: Draw) -> Any:
    shape = d.sizes()
    other = _other_shape(d, shape)
    if d.one_of(True, False):
        other[d.dim(other)] = -1
    return normal(*shape), other


@sample(aten.expand.default)
def _(d: Draw) -> Any:
    shape = d.sizes()
    kept = d.broadcast(shape)
    new = len(shape) - kept.dim()
    return kept, [
        d.one_of(n, -1) if i >= new and kept.shape[i - new] == n else n for i, n in enumerate(shape)
    ]


sample(aten.repeat.default)(shaped(lambda d, shape: (normal(*shape), d.sizes(d.one_of(2, 3))), 2))
sample(aten.permute.default)(
    shaped(lambda d, shape: (normal(*shape), d.draw(st.permutations(range(len(shape))))))
)
sample(aten.transpose.int)(shaped(lambda d, shape: (normal(*shape), d.dim(shape), d.dim(shape))))
sample(aten.t.default)(lambda d: (normal(*d.sizes(d.one_of(1, 2))),))
sample(aten.unsqueeze.default, aten.squeeze.dim, aten.unbind.int)(
    shaped(lambda d, shape: (normal(*shape), d.dim(shape)))
)
sample(aten.squeeze.default, aten.view_as_complex.default)(lambda d: (normal(*d.sizes(2), 2),))
sample(aten.select.int)(shaped(lambda d, shape: (normal(*shape), d.dim(shape), -1)))


@sample(aten.slice.Tensor)
def _(d: Draw) -> Any:
    shape = d.sizes()
    dim = d.dim(shape)
    n = shape[dim]
    return (
        normal(*shape),
        dim,
        *d.one_of((0, n), (0, n + 3), (0, None), (0, max(1, n - 1)), (n - 1, n), (0, n, 2)),
    )


@sample(aten.slice_backward.default)
def _(d: Draw) -> Any:
    shape = d.sizes()
    dim = d.dim(shape)
    start, stop = d.one_of((0, shape[dim]), (0, 1), (shape[dim] - 1, shape[dim]))
    given = list(shape)
    given[dim] = stop - start
    return normal(*given), shape, dim, start, stop, 1


@sample(aten.select_backward.default)
def _(d: Draw) -> Any:
    shape = d.sizes()
    dim = d.draw(st.integers(0, len(shape) - 1))
    return normal(*shape[:dim], *shape[dim + 1 :]), shape, dim, 0


sample(aten.split.Tensor)(shaped(lambda d, shape: (normal(*shape), d.size(), d.dim(shape))))


@sample(aten.split_with_sizes.default)
def _(d: Draw) -> Any:
    shape = [5, *d.sizes(2)]
    return normal(*shape), [2, 3], 0


sample(aten.cat.default, aten.stack.default)(
    shaped(lambda d, shape: ([normal(*shape) for _ in range(d.size(3))], d.dim(shape)))
)


@sample(aten.roll.default)
def _(d: Draw) -> Any:
    shape = d.sizes()
    dims = d.dims(shape)
    return normal(*shape), [1 for _ in dims], dims


sample(aten.flip.default)(shaped(lambda d, shape: (normal(*shape), d.dims(shape))))
sample(aten.tril.default)(lambda d: (normal(*d.sizes(3)),))
sample(aten.constant_pad_nd.default)(
    lambda d: (normal(*d.sizes(3)), d.one_of([1, 0], [0, 0, 2, 1], [0, 0, 0, 0, 0, 2]), 1.0)
)
sample(aten.diagonal_backward.default)(lambda d: (normal(2, 3), (3, 4, 2), 0, 0, 1))
sample(aten.diagonal.default)(lambda d: (normal(*d.sizes(3)), 0, 0, d.one_of(1, 2, -1)))
sample(aten.unfold.default)(lambda d: (normal(6, *d.sizes(2)), 0, 3, d.size(2)))


@sample(aten.unfold_backward.default)
def _(d: Draw) -> Any:
    n = d.size()
    return normal(4, n, 3), [6, n], 0, 3, 1


@sample(aten.pixel_shuffle.default)
def _(d: Draw) -> Any:
    n, c, h, w = d.sizes(4)
    return normal(n, 4 * c, h, w), 2


# --- reductions and scans

sample(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default)(
    shaped(lambda d, shape: (normal(*shape), d.dims(shape), d.one_of(True, False)))
)
sample(aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.prod.default)(
    lambda d: (normal(*d.sizes()),)
)
sample(aten.any.default, aten.all.default)(lambda d: (normal(*d.sizes()) > -1,))
sample(aten.any.dim, aten.all.dim)(shaped(lambda d, shape: (normal(*shape) > -1, d.dim(shape))))
sample(aten.max.dim, aten.argmax.default, aten.cumsum.default, aten.sort.default)(
    shaped(lambda d, shape: (torch.randperm(math.prod(shape)).view(shape), d.dim(shape)))
)
sample(aten.var_mean.correction)(
    shaped(
        lambda d, shape: (normal(*shape), d.dims(shape), {"correction": 0, "keepdim": d.one_of(True, False)})
    )
)
sample(aten.linalg_vector_norm.default)(
    shaped(
        lambda d, shape: (
            normal(*shape),
            d.one_of(2, math.inf, -math.inf),
            d.dims(shape),
            d.one_of(True, False),
        )
    )
)
sample(aten._softmax.default, aten._log_softmax.default)(
    shaped(lambda d, shape: (normal(*shape), d.dim(shape), False))
)
sample(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)(
    shaped(lambda d, shape: (normal(*shape), normal(*shape), d.dim(shape), torch.float32))
)
sample(aten.topk.default)(lambda d: (torch.randperm(30).view(2, 3, 5), d.size(2), d.dim([2, 3, 5])))
sample(aten.glu.default)(lambda d: (normal(4, 2, 6), d.dim([4, 2, 6])))
sample(aten.glu_backward.default)(lambda d: (normal(4, 1, 6), normal(4, 2, 6), -2))
sample(aten._fft_r2c.default)(
    shaped(lambda d, shape: (normal(*shape), d.dims(shape), 0, d.one_of(True, False)))
)


# --- products


@sample(aten.mm.default)
def _(d: Draw) -> Any:
    i, j, k = d.sizes(3)
    return normal(i, k), normal(k, j)


@sample(aten.bmm.default)
def _(d: Draw) -> Any:
    b, i, j, k = d.sizes(4)
    return normal(b, i, k), normal(b, k, j)


@sample(aten.addmm.default)
def _(d: Draw) -> Any:
    i, j, k = d.sizes(3)
    return d.broadcast([i, j]), normal(i, k), normal(k, j), {"beta": 0.5}


@sample(aten.baddbmm.default)
def _(d: Draw) -> Any:
    b, i, j, k = d.sizes(4)
    return d.broadcast([b, i, j]), normal(b, i, k), normal(b, k, j), {"alpha": 0.5}


@sample(aten.addmv.default)
def _(d: Draw) -> Any:
    i, k = d.sizes(2)
    return d.broadcast([i]), normal(i, k), normal(k)


@sample(aten.mv.default)
def _(d: Draw) -> Any:
    i, k = d.sizes(2)
    return normal(i, k), normal(k)


@sample(aten.dot.default)
def _(d: Draw) -> Any:
    k = d.size()
    return normal(k), normal(k)


# --- norms


@sample(aten.native_layer_norm.default)
def _(d: Draw) -> Any:
    shape = d.sizes(3)
    row = shape[d.one_of(1, 2) :]
    return normal(*shape), row, d.maybe(normal(*row)), d.maybe(normal(*row)), 1e-5


@sample(aten.native_layer_norm_backward.default)
def _(d: Draw) -> Any:
    shape = d.sizes(3)
    row = shape[2:]
    x, weight, bias = normal(*shape), normal(*row), normal(*row)
    _, mean, rstd = aten.native_layer_norm(x, row, weight, bias, 1e-5)
    return normal(*shape), x, row, mean, rstd, weight, bias, d.one_of([True] * 3, [True, False, False])


sample(aten._fused_rms_norm.default)(
    shaped(lambda d, shape: (normal(*shape), shape[2:], d.maybe(normal(*shape[2:])), 1e-5), 3)
)


@sample(aten._fused_rms_norm_backward.default)
def _(d: Draw) -> Any:
    shape = d.sizes(3)
    x, weight = normal(*shape), normal(shape[2])
    _, rstd = aten._fused_rms_norm(x, shape[2:], weight, 1e-5)
    return normal(*shape), x, shape[2:], rstd, weight, d.one_of([True, True], [True, False])


def _weight(d: Draw) -> tuple[torch.Tensor, torch.Tensor, int]:
    shape, dim = d.sizes(3), d.one_of(0, 2)
    norms = [n if i == dim else 1 for i, n in enumerate(shape)]
    return normal(*shape), normal(*norms), dim


sample(aten._weight_norm_interface.default)(lambda d: _weight(d))


@sample(aten._weight_norm_interface_backward.default)
def _(d: Draw) -> Any:
    v, g, dim = _weight(d)
    w, norms = aten._weight_norm_interface(v, g, dim)
    return torch.randn_like(w), v, g, norms, dim


def _grouped(d: Draw) -> tuple[int, int, int, int, int]:
    n, groups, channels, h, w = d.sizes(5)
    return n, groups, groups * channels, h, w


@sample(aten.native_group_norm.default)
def _(d: Draw) -> Any:
    n, groups, c, h, w = _grouped(d)
    return normal(n, c, h, w), d.maybe(normal(c)), d.maybe(normal(c)), n, c, h * w, groups, 1e-5


@sample(aten.native_group_norm_backward.default)
def _(d: Draw) -> Any:
    n, groups, c, h, w = _grouped(d)
    x, weight = normal(n, c, h, w), normal(c)
    _, mean, rstd = aten.native_group_norm(x, weight, weight, n, c, h * w, groups, 1e-5)
    return normal(n, c, h, w), x, mean, rstd, weight, n, c, h * w, groups, [True, True, True]


@sample(aten.native_batch_norm.default)
def _(d: Draw) -> Any:
    n, c, h, w = (1 + m for m in d.sizes(4))
    statistics = normal(c), positive(c)
    return normal(n, c, h, w), d.maybe(normal(c)), normal(c), *statistics, d.one_of(True, False), 0.1, 1e-5


@sample(aten.native_batch_norm_backward.default)
def _(d: Draw) -> Any:
    n, c, h, w = (1 + m for m in d.sizes(4))
    x, weight, mean, var = normal(n, c, h, w), normal(c), normal(c), positive(c)
    trains = d.one_of(True, False)
    _, saved, inverse = aten.native_batch_norm(x, weight, weight, mean, var, trains, 0.0, 1e-5)
    return normal(n, c, h, w), x, weight, mean, var, saved, inverse, trains, 1e-5, [True, True, True]


# --- gathers

sample(aten.embedding.default)(lambda d: (normal(7, d.size()), integers(7, *d.sizes(2))))
sample(aten.embedding_dense_backward.default)(
    shaped(
        lambda d, shape: (
            normal(*shape, d.size()),
            integers(7, *shape),
            7,
            d.one_of(-1, 2),
            d.one_of(True, False),
        ),
        2,
    )
)


@sample(aten.gather.default)
def _(d: Draw) -> Any:
    shape = d.sizes(3)
    dim = d.dim(shape)
    of_indices = [max(1, n - d.one_of(0, 1)) for n in shape]
    return normal(*shape), dim, integers(shape[dim], *of_indices)


@sample(aten.scatter.src, aten.scatter_add.default)
def _(d: Draw) -> Any:
    shape = d.sizes(3)
    dim = d.dim(shape)
    of_indices = [max(1, n - d.one_of(0, 1)) for n in shape]
    of_indices[dim] = 1
    return normal(*shape), dim, integers(shape[dim], *of_indices), normal(*shape)


sample(aten.take.default)(lambda d: (normal(3, 4), integers(12, *d.sizes())))


@sample(aten.index_select.default)
def _(d: Draw) -> Any:
    shape = d.sizes()
    dim = d.dim(shape)
    return normal(*shape), dim, integers(shape[dim], d.size())


@sample(aten.index_add.default)
def _(d: Draw) -> Any:
    shape = d.sizes()
    dim = d.dim(shape)
    source = list(shape)
    source[dim] = d.size()
    return normal(*shape), dim, integers(shape[dim], source[dim]), normal(*source)


def _indices(d: Draw, shape: Sequence[int]) -> list[torch.Tensor | None]:
    found = d.sizes(2)
    used = d.dims(shape)
    return [
        integers(n, *(d.one_of(1, m) for m in found[d.one_of(0, 1) :])) if i in used else None
        for i, n in enumerate(shape)
    ]


sample(aten.index.Tensor)(shaped(lambda d, shape: (normal(*shape), _indices(d, shape)), 3))


@sample(aten.index_put.default)
def _(d: Draw) -> Any:
    shape = d.sizes(3)
    indices = _indices(d, shape)
    values = torch.zeros_like(normal(*shape)[tuple(slice(None) if i is None else i for i in indices)])
    return normal(*shape), indices, d.broadcast(values.shape), True


# --- attention


def _attention(d: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool]:
    b, h, q, k, e = d.sizes(5)
    query, key, value = normal(b, h, q, 4 * e), normal(b, h, k, 4 * e), normal(b, h, k, 4 * e)
    causal = d.one_of(True, False)
    shapes = itertools.product((1, b), (1, h), (1, q), (k,))
    mask = None if causal else d.maybe(normal(*d.one_of(*sorted(set(shapes)))))
    return query, key, value, mask, causal


@sample(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _(d: Draw) -> Any:
    query, key, value, mask, causal = _attention(d)
    return query, key, value, 0.0, causal, {"attn_mask": mask}


@sample(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _(d: Draw) -> Any:
    query, key, value, mask, causal = _attention(d)
    if mask is not None:
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask
    )
    return normal(*out.shape), query, key, value, out, sums, 0.0, causal, {"attn_mask": mask}


@sample(aten._scaled_dot_product_attention_math.default)
def _(d: Draw) -> Any:
    query, key, value, mask, causal = _attention(d)
    return query, key, value, mask, 0.0, causal


# --- convolutions and pools


def _convolution(d: Draw) -> dict[str, Any]:
    n, groups, c_in, c_out = d.sizes(4)
    transposed, window = d.one_of(True, False), d.one_of(1, 3)
    first, second = (groups * c_in, c_out) if transposed else (groups * c_out, c_in)
    return {
        "input": normal(n, groups * c_in, 5, 4),
        "weight": normal(first, second, window, window),
        "bias": d.maybe(normal(groups * c_out)),
        "stride": [d.size(2)] * 2,
        "padding": [d.one_of(0, window // 2)] * 2,
        "dilation": [1, 1],
        "transposed": transposed,
        "output_padding": [0, 0],
        "groups": groups,
    }


sample(aten.convolution.default)(lambda d: tuple(_convolution(d).values()))


@sample(aten.convolution_backward.default)
def _(d: Draw) -> Any:
    given = _convolution(d)
    out = aten.convolution.default(*given.values())
    given["bias"] = [out.shape[1]]
    x, weight, *rest = given.values()
    return (
        torch.randn_like(out),
        x,
        weight,
        *rest,
        d.one_of([True] * 3, [True, False, False], [False, True, True]),
    )


sample(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default)(
    lambda d: (normal(*d.sizes(d.one_of(1, 2)), 6, 6), [2, 2], [2, 2])
)
sample(aten._adaptive_avg_pool2d.default)(lambda d: (normal(*d.sizes(2), 6, 6), [2, 3]))
sample(aten.upsample_nearest2d.default)(lambda d: (normal(*d.sizes(2), 3, 3), [6, 6]))


@sample(aten.upsample_nearest2d_backward.default)
def _(d: Draw) -> Any:
    planes = d.sizes(2)
    return normal(*planes, 6, 6), [6, 6], [*planes, 3, 3]


sample(aten.im2col.default)(lambda d: (normal(*d.sizes(2), 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]))


@sample(aten.col2im.default)
def _(d: Draw) -> Any:
    n, c = d.sizes(2)
    return normal(n, 4 * c, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]


@sample(aten.grid_sampler_2d.default)
def _(d: Draw) -> Any:
    n, c, h, w = d.sizes(4)
    return normal(n, c, 4, 4), normal(n, h, w, 2), 0, 0, False


# --- losses


def _scores(d: Draw, *rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    targets = integers(6, *rows)
    targets[torch.rand(rows) < 0.3] = -100
    targets.view(-1)[0] = 1
    return normal(rows[0], 6, *rows[1:]), targets, d.maybe(positive(6))


sample(aten.nll_loss_forward.default)(lambda d: (*_scores(d, d.size()), d.one_of(0, 1, 2), -100))
sample(aten.nll_loss2d_forward.default)(lambda d: (*_scores(d, *d.sizes(3)), d.one_of(0, 1, 2), -100))


@sample(aten.nll_loss_backward.default)
def _(d: Draw) -> Any:
    scores, targets, weight = _scores(d, d.size())
    reduction = d.one_of(0, 1, 2)
    out, total = aten.nll_loss_forward(scores, targets, weight, reduction, -100)
    return torch.randn_like(out), scores, targets, weight, reduction, -100, total


sample(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)(
    shaped(lambda d, shape: (normal(*shape), normal(*shape), d.one_of(0, 1, 2)))
)


@sample(aten.mse_loss_backward.default)
def _(d: Draw) -> Any:
    shape, reduction = d.sizes(), d.one_of(0, 1, 2)
    return normal(*(() if reduction else shape)), normal(*shape), normal(*shape), reduction


@sample(aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)
def _(d: Draw) -> Any:
    shape, reduction = d.sizes(), d.one_of(0, 1, 2)
    return normal(*(() if reduction else shape)), normal(*shape), normal(*shape), reduction, 0.5


sample(aten.binary_cross_entropy_with_logits.default)(
    shaped(
        lambda d, shape: (
            normal(*shape),
            positive(*shape),
            None,
            d.maybe(positive(shape[-1])),
            d.one_of(0, 1, 2),
        )
    )
)


@pytest.mark.parametrize("name", SAMPLES)
@given(data=st.data())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_slices_make_the_whole(name: str, data: st.DataObject) -> None:
    """Every factor, cut unevenly, also where what is cut lies inside a dimension."""
    torch.manual_seed(0)
    op, make = SAMPLES[name]
    call = call_of(op, make(Draw(data)))

    def cut(size: int) -> tuple[tuple[int, int, int], list[int]]:
        inside = data.draw(st.sampled_from(list(insides(size))))
        ends = data.draw(st.sets(st.integers(1, inside[1] - 1), min_size=1, max_size=2))
        return inside, [*sorted(ends), inside[1]]

    assert_slices_make_the_whole(call, cut)


# Sizes are primes, which name the dimensions; 4 = 2 x 2 where there are groups.
PASSES: list[tuple[Any, tuple[Any, ...], str]] = [
    (aten.mm.default, (normal(2, 3), normal(3, 5)), "2 3 5"),
    (aten.addmm.default, (normal(5), normal(2, 3), normal(3, 5)), "2 5"),
    (aten.add.Tensor, (normal(2, 3), normal(3)), "2 3"),
    (aten.view.default, (normal(2, 3, 5), [6, 5]), "2 3 5"),
    (aten.view.default, (normal(2, 15, 7), [2, 5, 3, 7]), "2 3 5 7"),
    (aten.view.default, (normal(2, 6, 10), [2, 4, 15]), "2"),
    (aten.repeat.default, (normal(2, 3), [5, 1, 7]), "2 3 5 7"),
    (aten.split.Tensor, (normal(2, 3, 5), 2, 1), "2 5"),
    (aten.cat.default, ([normal(2, 3), normal(2, 5)], 1), "2"),
    (aten._softmax.default, (normal(2, 3, 5), -1, False), "2 3"),
    (aten.sum.dim_IntList, (normal(2, 3, 5), [1]), "2 3 5"),
    (aten.max.dim, (normal(2, 3, 5), 1), "2 5"),
    (aten.native_layer_norm.default, (normal(2, 3, 5), [5], None, None, 1e-5), "2 3"),
    (aten.native_group_norm.default, (normal(3, 4, 5, 7), None, None, 3, 4, 35, 2, 1e-5), "2 3"),
    (aten.embedding.default, (normal(11, 3), integers(11, 2, 5)), "2 3 5"),
    (aten.embedding_dense_backward.default, (normal(2, 5, 3), integers(11, 2, 5), 11, -1, False), "2 3 5"),
    (aten.index.Tensor, (normal(7, 11, 3), [None, integers(11, 2, 5)]), "2 3 5 7"),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (normal(2, 3, 5, 8), normal(2, 3, 7, 8), normal(2, 3, 7, 8)),
        "2 3 5",
    ),
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (normal(2, 3, 5, 8), normal(2, 3, 5, 8), normal(2, 3, 5, 8), 0.0, True),
        "2 3",  # a causal mask says by position what a query may see
    ),
    (
        aten.convolution.default,
        (normal(2, 3, 8, 8), normal(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        "2 3 5",
    ),
    (
        aten.convolution.default,
        (normal(2, 3, 7, 11), normal(5, 3, 1, 1), normal(5), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        "2 5 7 11",
    ),
    (aten.nll_loss_forward.default, (normal(5, 7), integers(7, 5), None, 1, -100), "5"),
    (aten.mse_loss_backward.default, (normal(), normal(2, 3), normal(2, 3), 1), ""),
    (aten.mse_loss_backward.default, (normal(), normal(2, 3), normal(2, 3), 2), "2 3"),
    (aten.squeeze.default, (normal(1, 3),), ""),
]


@pytest.mark.parametrize(("op", "args", "sizes"), PASSES)
def test_what_may_be_sliced(op: Any, args: tuple[Any, ...], sizes: str) -> None:
    rule = rule_of(op, args, {}, op(*args))
    assert rule is not None
    assert sorted(rule.sizes[f] for f in rule.sliceable) == [int(size) for size in sizes.split()]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.native_dropout.default, (normal(4), 0.5, True)),
        (aten.bernoulli.default, (positive(4).clamp(max=1),)),
        (aten.randn_like.default, (normal(4),)),
        (
            aten._scaled_dot_product_attention_math.default,
            (*(normal(1, 1, 4, 8) for _ in range(3)), None, 0.5),
        ),
        (aten.masked_select.default, (normal(4), normal(4) > 0)),
        (aten.index.Tensor, (normal(4), [normal(4) > 0])),
        (aten.linalg_inv_ex.default, (torch.eye(4),)),
        (aten.view.dtype, (normal(4, 2), torch.int16)),
    ],
)
def test_no_rule(op: Any, args: tuple[Any, ...]) -> None:
    """Random numbers, sizes that depend on data, and what no formula knows."""
    assert rule_of(op, args, {}, op(*args)) is None


def test_descriptions_of_tensors_do() -> None:
    """Values are not looked at, and types may be names, as in recorded programs."""
    described = Tensor(0, "float32", (4, 6), (6, 1), 0)
    indices = Tensor(1, "int64", (3,), (1,), 0)
    found = rule_of(
        aten.index.Tensor, [described, [None, indices]], {}, [Tensor(2, "float32", (4, 3), (3, 1), 0)]
    )
    assert found is not None
    assert found.sizes[found.outputs[0][1][0]] == 3
    mask = Tensor(1, "bool", (6,), (1,), 0)
    assert rule_of(aten.index.Tensor, [described, [None, mask]], {}, [described]) is None


def test_an_op_has_one_formula() -> None:
    with pytest.raises(ValueError, match="mm has a formula"):
        register("mm")(lambda call: None)


def test_every_formula_is_tried() -> None:
    """Above, or where a kernel is missing on the CPU, in ``tests/factors/test_kernels.py``."""
    tried = {formula_of(op) for op, _ in SAMPLES.values()}
    missing = {name for name, formula in _FORMULAS.items() if formula not in tried}
    assert missing == {
        "_grouped_mm",
        "new_empty_strided",
    }  # the second: nothing to compare; see the axes' tests


def test_every_formula_is_of_an_op() -> None:
    for name in _FORMULAS.keys() - {"pointwise"}:
        packet, _, overload = name.partition(".")
        assert hasattr(aten, packet), name
        assert not overload or overload in getattr(aten, packet).overloads(), name


def test_rows_of_a_mean_are_added_by_weight() -> None:
    """Slices sum, so that one without any target adds 0, not not-a-number."""
    scores, targets = normal(4, 5), torch.tensor([1, -100, 2, 0])
    args = (scores, targets, None, 1, -100)
    rule = rule_of(aten.nll_loss_forward.default, args, {}, aten.nll_loss_forward(*args))
    assert rule is not None
    (rows,) = rule.sliceable
    assert (rule.kind(rows, 0), rule.kind(rows, 1)) == (Kind.WEIGHTED_MEAN, Kind.SUM)
    call = OpCall(aten.nll_loss_forward.default, args, {})
    loss, weight = run_in_slices(call, rule, FactorAxis(rows, 1, 4, 1), [1, 2, 3, 4])
    torch.testing.assert_close(loss, torch.nn.functional.nll_loss(scores, targets))
    assert weight == 3


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ops_of_the_database() -> None:
    """Every op that runs, forward or backward, on PyTorch's own samples."""
    calls = list(calls_of_the_database(samples_of_each=10))
    cuts = random.Random(0)

    def cut(size: int) -> tuple[tuple[int, int, int], list[int]]:
        inside = cuts.choice([(1, size, 1), *insides(size)])
        return inside, [*sorted({cuts.randint(1, inside[1] - 1)}), inside[1]]

    sliced = Counter(
        str(call.func) for call in calls for _ in range(assert_slices_make_the_whole(call, cut, 1e-3))
    )
    assert len(sliced) > 300
