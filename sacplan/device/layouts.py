"""Strides and storages of what kernels return, where torch's own fake kernels say something else.

Found by running PyTorch's op database on a CPU, forward and backward, for real and fake side by side
(``python -m benchmarks.op_metadata``; ``benchmarks/results/op_metadata.json``). There are three causes.

**Formulas in Python, in the place of the function that makes the outputs.** A structured op has such a function in C++,
which is the same for every device, and works on the meta device too. Almost all have a formula registered over it, and
some of these differ: the mean of ``mse_loss`` lies in a storage as large as its input, since the function allocates the
unreduced loss, and then makes it a scalar; with operands of mixed layouts it is TensorIterator that decides the strides
of ``xlogy``. For these the function in C++ is asked: ``_IN_CPP``. (Of ``nll_loss`` the formula is right, and slow: it
computes the loss, for each size of a loss in slices.)

**Strides of dimensions of size 1.** They move no element, so torch's formulas choose them at will. But kernels look at
them when they choose a memory format: an image [1, C, H, W] counts as channels last by the strides that a view or an
elementwise op left in its first dimension, and all that follows is laid out by that. Here every elementwise op, every
view and ``empty_like`` has the strides of C++ for such sizes: ``elementwise_kernels``.

**Formulas that were never right**, for ops that are not structured. Each has a rule below. A rule of ``on_all_devices``
is read from code that all devices run, one of ``on_cpu`` from a CPU's kernel: of the others nothing is known there.

**Formulas that are right and slow** have a quick answer here, the same as torch's own, where tensors are contiguous
(``quick_kernels``): torch derives the gradients of a norm op by op, which takes milliseconds for each size of a slice.

To add a rule, decorate a function that gets the fake mode, the arguments of the call by name, and what torch itself
answers; it returns what is to be returned instead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sacplan.torch_compat.fake_kernels import (
    FakeKernel,
    elementwise_ops,
    is_structured,
    run_in_cpp,
    torchs_own_fake,
    viewed,
)
from sacplan.torch_compat.fake_tensors import FakeTensorMode, fake_empty_strided, meta_storage
from sacplan.torch_compat.ops import RuleTable, arguments_by_name, op_named, tensors_in
from sacplan.torch_compat.private import suggested_memory_format

aten = torch.ops.aten

Rule = Callable[[FakeTensorMode, Mapping[str, Any], Any], Any]

on_all_devices: RuleTable[Rule] = RuleTable()
on_cpu: RuleTable[Rule] = RuleTable()
"""(fake mode, arguments by name, torch's own outputs) -> outputs, by ``OpOverload``."""


_IN_CPP = (
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.heaviside.default,
    aten.index_copy.default,
    aten.leaky_relu_backward.default,
    aten.linalg_vector_norm.default,
    aten.logaddexp.default,
    aten.logit_backward.default,
    aten.mse_loss.default,
    aten.mvlgamma.default,
    aten.nll_loss_backward.default,
    aten.nll_loss_forward.default,
    aten.pow.Scalar,
    aten.rot90.default,
    aten.smooth_l1_loss.default,
    aten.special_xlog1py.default,
    aten.threshold_backward.default,
    aten.xlogy.Tensor,
)


_VIEWS = (aten.view.default, aten._unsafe_view.default)


def _in_cpp(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    return run_in_cpp(mode, func, args, kwargs)


def _kernel(rule: Rule) -> FakeKernel:
    def fake(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        own = torchs_own_fake(mode, func, args, kwargs)
        return rule(mode, arguments_by_name(func, args, kwargs), own)

    return fake


@functools.cache
def shared_kernels() -> dict[Any, FakeKernel]:
    """Return the fake kernels for every device, by op."""
    structured: dict[Any, FakeKernel] = dict.fromkeys(_IN_CPP, _in_cpp)
    views: dict[Any, FakeKernel] = dict.fromkeys(_VIEWS, _view)
    return structured | views | {op: _kernel(rule) for op, rule in on_all_devices.items()}


@functools.cache
def cpu_kernels() -> dict[Any, FakeKernel]:
    """Return the fake kernels for CPUs, by op. They come before those for every device."""
    return {op: _kernel(rule) for op, rule in on_cpu.items()}


@functools.cache
def elementwise_kernels() -> dict[Any, FakeKernel]:
    """Return the fake kernels of elementwise ops where a size is 1, by op. They come before all others."""
    found: dict[Any, FakeKernel] = {}
    for op in elementwise_ops():
        if is_structured(op):
            found[op] = _elementwise_in_cpp
        elif op not in (*_IN_CPP, *_VIEWS, *on_all_devices, *on_cpu, aten.clone.default):
            found[op] = _kernel_where_a_size_is_one
    return found


def _elementwise_in_cpp(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    operands = list(tensors_in((args, kwargs)))
    # Without a size of 1 torch's own formula is right. Where it would say the same, C++ is still several times as fast.
    # For copied operands see ``_copied_first``.
    if _are_plain(*operands) or (any(1 in t.shape for t in operands) and not _copied_first(operands)):
        return run_in_cpp(mode, func, args, kwargs)
    return NotImplemented


def _kernel_where_a_size_is_one(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    operands = list(tensors_in((args, kwargs)))
    if not any(1 in t.shape for t in operands) or _copied_first(operands):
        return NotImplemented
    own = torchs_own_fake(mode, func, args, kwargs)
    if _takes_a_number(func):  # which the kernel makes an operand without dimensions
        operands.append(fake_empty_strided(mode, (), (), operands[0].dtype))
    # Several results, or more operands than any op that could be asked for the layout: torch's strides stay.
    if not isinstance(own, torch.Tensor) or not 1 <= len(operands) <= 3:
        return own
    return _as_iterated(mode, own, *operands)


@functools.cache
def _takes_a_number(func: Any) -> bool:
    """Whether an op is like ``add.Scalar``, which C++ computes as ``add.Tensor``."""
    structured = getattr(func.overloadpacket, "Tensor", None)
    return func._overloadname in ("Scalar", "Scalar_mode") and structured is not None


def _copied_first(operands: Sequence[torch.Tensor]) -> bool:
    """Whether TensorIterator may copy an expanded operand to another type. Then the strides of the copy decide.

    Those are not known here, so such calls are left to PyTorch.
    """
    mixed = len({t.dtype for t in operands}) > 1
    return mixed and any(s == 0 and n > 1 for t in operands for n, s in zip(t.shape, t.stride(), strict=True))


# --- formulas that are right and slow --------------------------------------------------------------------


def _are_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether all are contiguous, of one floating type, and without a size of 1 or 0: their layout is their shape."""
    given = [t for t in tensors if t is not None]
    return (
        len({t.dtype for t in given}) == 1
        and given[0].is_floating_point()
        and all(t.is_contiguous() and t.shape and min(t.shape) > 1 for t in given)
    )


def _new(mode: FakeTensorMode, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return fake_empty_strided(mode, shape, strides, dtype)


def _plain_product(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    return run_in_cpp(mode, func, args, kwargs) if _are_plain(*tensors_in(args)) else NotImplemented


def _product_into_itself(
    mode: FakeTensorMode, func: Any, self: Any, mat1: Any, mat2: Any, *, out: Any, **scales: Any
) -> Any:
    """Return ``out``, which is the summand, so that it has the size of the result."""
    if out is not self or not _are_plain(self, mat1, mat2) or not self.dim() == mat1.dim() == mat2.dim() == 2:
        return NotImplemented
    (rows, inner), (columns, width) = mat1.shape, mat2.shape
    return out if inner == columns and tuple(out.shape) == (rows, width) else NotImplemented


def _plain_layer_norm(
    mode: FakeTensorMode, func: Any, input: Any, shape: Any, weight: Any, bias: Any, eps: float
) -> Any:
    inner = tuple(input.shape[-len(shape) :])
    if not _are_plain(input, weight, bias) or not _have_shape(tuple(shape), inner, weight, bias):
        return NotImplemented  # torch's own says what is wrong, or promotes the types
    stats = (*input.shape[: -len(shape)], *(1,) * len(shape))
    return tuple(_new(mode, size, input.dtype) for size in (input.shape, stats, stats))


def _plain_layer_norm_backward(
    mode: FakeTensorMode,
    func: Any,
    grad_out: Any,
    input: Any,
    shape: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> Any:
    inner = tuple(input.shape[-len(shape) :])
    stats = (*input.shape[: -len(shape)], *(1,) * len(shape))
    if (
        not _are_plain(grad_out, input, weight, bias)
        or grad_out.shape != input.shape
        or not _have_shape(tuple(shape), inner, weight, bias)
        or not _have_shape(stats, stats, mean, rstd)
    ):
        return NotImplemented
    return tuple(
        _new(mode, t.shape, t.dtype) if wanted and t is not None else None
        for t, wanted in zip((input, weight, bias), output_mask, strict=True)
    )


def _have_shape(shape: tuple[int, ...], expected: tuple[int, ...], *tensors: torch.Tensor | None) -> bool:
    return shape == expected and all(t is None or tuple(t.shape) == shape for t in tensors)


def quick_kernels() -> dict[Any, FakeKernel]:
    """Return the fake kernels that give torch's own answers sooner, by op.

    They come before the other rules of this module. What is different on CUDA comes before them (``overrides.py``).
    """
    return {
        aten.addmm.default: _plain_product,
        aten.addmm.out: _product_into_itself,
        aten.native_layer_norm.default: _plain_layer_norm,
        aten.native_layer_norm_backward.default: _plain_layer_norm_backward,
    }


def rule_of(func: Any) -> str | None:
    """Which rule an op has on a CPU: ``"C++"``, ``"all devices"``, ``"CPU"`` or ``"sizes of 1"``; None if none."""
    tables: dict[str, Any] = {
        "CPU": on_cpu,
        "all devices": on_all_devices,
        "C++": (*_IN_CPP, *_VIEWS),
        "sizes of 1": elementwise_kernels(),
    }
    return next((name for name, ops in tables.items() if func in ops), None)


# --- how outputs are laid out -----------------------------------------------------------------------------


def _laid_out(mode: FakeTensorMode, own: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor of the same size and type with these strides; ``own`` itself if it has them."""
    if own.stride() == tuple(stride):
        return own
    return fake_empty_strided(mode, own.shape, stride, own.dtype)


def _like(mode: FakeTensorMode, own: torch.Tensor, model: torch.Tensor, memory_format: Any) -> torch.Tensor:
    """Return ``own`` laid out as ``empty_like(model, memory_format=...)``."""
    return _laid_out(mode, own, _empty_like_stride(mode, model, memory_format))


def _empty_like_stride(mode: FakeTensorMode, model: torch.Tensor, memory_format: Any) -> tuple[int, ...]:
    stride: tuple[int, ...] = run_in_cpp(
        mode, aten.empty_like.default, (model,), {"memory_format": memory_format}
    ).stride()
    return stride


def _contiguous(mode: FakeTensorMode, own: torch.Tensor) -> torch.Tensor:
    return _like(mode, own, own, torch.contiguous_format)


def _as_iterated(mode: FakeTensorMode, own: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Return ``own`` laid out as TensorIterator does for an elementwise op over up to three operands.

    The layout does not depend on the op, so a structured op with as many operands is asked.
    """
    op = _ITERATED[len(operands)]
    if len(operands) == 3:  # of one type, which this op wants
        operands = tuple(fake_empty_strided(mode, t.shape, t.stride(), torch.float32) for t in operands)
    return _laid_out(mode, own, run_in_cpp(mode, op, operands, {}).stride())


_ITERATED = {1: aten.sgn.default, 2: aten.add.Tensor, 3: aten.addcmul.default}
"""A structured elementwise op of so many operands."""


def _in_larger_storage(mode: FakeTensorMode, own: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the same tensor at the beginning of a storage for ``elements``."""
    storage = meta_storage(elements * own.element_size())
    return fake_empty_strided(mode, own.shape, own.stride(), own.dtype, storage)


# --- views: TensorUtils.cpp, computeStride -------------------------------------------------------------------


def _view(mode: FakeTensorMode, _: Any, tensor: Any, size: Sequence[int]) -> Any:
    """Kernels recognize channels last by these strides. Torch's own formula takes far longer, too."""
    return viewed(mode, tensor, size)


# --- factories: TensorFactories.cpp, empty_like ----------------------------------------------------------------


@on_all_devices(aten.empty_like.default)
def _empty_like(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    if 1 not in own.shape:
        return own
    return _laid_out(mode, own, _empty_like_stride(mode, a["self"], a["memory_format"]))


@on_all_devices(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)
def _made_by_empty_like(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _like(mode, own, a["self"], a["memory_format"]) if 1 in own.shape else own


# --- losses: Loss.cpp, Loss.cu ------------------------------------------------------------------------------
# Where they are reduced, the result is made of the unreduced loss by ``resize_``, which keeps the storage.

_UNREDUCED = 0


@on_all_devices(aten.binary_cross_entropy.default)
def _binary_cross_entropy(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    if a["reduction"] == _UNREDUCED:
        return _like(mode, own, a["self"], torch.preserve_format)
    return _in_larger_storage(mode, own, a["self"].numel())


@on_all_devices(aten.soft_margin_loss.default)
def _soft_margin_loss(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return own if a["reduction"] == _UNREDUCED else _in_larger_storage(mode, own, a["target"].numel())


@on_all_devices(aten.binary_cross_entropy_backward.default)
def _binary_cross_entropy_backward(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _like(mode, own, a["self"], torch.preserve_format)


@on_all_devices(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.normal.Tensor_Tensor,  # DistributionTemplates.h
    aten.masked_fill.Scalar,  # TensorAdvancedIndexing.cpp
    aten.masked_fill.Tensor,
    aten._unsafe_masked_index.default,
)
def _contiguous_output(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _contiguous(mode, own)


@on_cpu(aten.log_sigmoid_backward.default)  # Activation.cpp
def _like_gradient(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _like(mode, own, a["grad_output"], torch.preserve_format)


@on_cpu(aten.log_sigmoid_forward.default)  # Activation.cpp
def _contiguous_outputs(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return tuple(_contiguous(mode, t) for t in own)


# --- elementwise ops: Activation.cpp, BinaryOps.cpp ---------------------------------------------------------


@on_all_devices(aten.hardswish.default)
def _unary(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _as_iterated(mode, own, a["self"]) if 1 in own.shape else own


@on_all_devices(aten.abs.default)  # UnaryOps.cpp
def _abs(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return (_like_itself if a["self"].is_complex() else _unary)(mode, a, own)


@on_all_devices(aten._conj_physical.default)  # UnaryOps.cpp
def _like_itself(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _like(mode, own, a["self"], torch.preserve_format) if 1 in own.shape else own


@on_all_devices(aten.hardswish_backward.default, aten.hardtanh_backward.default)
def _of_gradient(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _as_iterated(mode, own, a["grad_output"], a["self"])


@on_all_devices(
    aten.floor_divide.default,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
)
def _binary(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _as_iterated(mode, own, a["self"], a["other"])


@on_all_devices(
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.gelu_backward.default,
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
)
def _with_an_expanded_operand(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    """Ignore an expanded operand, such as the gradient of a sum, as TensorIterator.cpp does. The fake formula does not.

    An operand of another type than the result is copied first, and then its strides count.
    """
    operands = [v for v in a.values() if isinstance(v, torch.Tensor)]
    expanded = any(0 in t.stride() for t in operands)
    # A number in the place of an operand, nothing expanded, or operands of two types: torch's formula is right.
    if len(operands) != 2 or not expanded or operands[0].dtype != operands[1].dtype:
        return own
    return _as_iterated(mode, own, *operands)


@on_cpu(aten.angle.default)  # UnaryOps.cpp
def _contiguous_unary(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _contiguous(mode, own) if a["self"].is_complex() else own


@on_all_devices(aten.ldexp.Tensor)
def _ldexp(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    """``self * 2**other``, of which the power is contiguous."""
    return _as_iterated(mode, own, a["self"], run_in_cpp(mode, aten.pow.Scalar, (2.0, a["other"]), {}))


@on_cpu(aten.native_dropout_backward.default)  # Dropout.cpp; CUDA has a kernel of its own
def _native_dropout_backward(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _as_iterated(mode, own, a["grad_output"], a["mask"])


# --- normalization: Normalization.cpp, layer_norm.cpp --------------------------------------------------------


def _dense_format(t: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format in which a tensor is contiguous, the usual one first; None if there is none."""
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    dims = {torch.channels_last: 4, torch.channels_last_3d: 5}
    for memory_format in formats:
        if dims.get(memory_format, t.dim()) == t.dim() and t.is_contiguous(memory_format=memory_format):
            return memory_format
    return None


@on_cpu(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_no_update.default,
)
def _batch_norm(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    """Lay out the output in the memory format of an input [N, C, ...] that has one, else contiguously."""
    input = a["input"]
    others = [a.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    # The kernel for a dense input takes contiguous parameters only. Any other call goes by the strides of the input.
    contiguous = all(t is None or t.is_contiguous() for t in others)
    memory_format = (_dense_format(input) if contiguous else None) or suggested_memory_format(input)
    return (_like(mode, own[0], input, memory_format), *own[1:])


@on_cpu(aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)
def _batch_norm_backward(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    if own[0] is None:  # no gradient of the input is wanted
        return own
    grad, input = a["grad_out"], a["input"]
    memory_format = suggested_memory_format(input)
    if _dense_format(grad) and suggested_memory_format(grad) == memory_format:
        memory_format = _dense_format(input) or memory_format
    return (_like(mode, own[0], input, memory_format), *own[1:])


@on_cpu(aten.native_group_norm.default)  # group_norm.cpp; torch 2.14's own fake kernel is that of a GPU
def _group_norm(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return (_like(mode, own[0], a["input"], suggested_memory_format(a["input"])), *own[1:])


@on_cpu(aten.native_group_norm_backward.default)
def _group_norm_backward(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return own if own[0] is None else _group_norm(mode, a, own)


@on_cpu(aten.native_layer_norm_backward.default)
def _layer_norm_backward(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return tuple(None if t is None else _contiguous(mode, t) for t in own)


# --- ops that keep the input's memory format on a CPU ---------------------------------------------------------


@on_cpu(
    aten.channel_shuffle.default,  # ChanelShuffle.cpp
    aten.max_unpool2d.default,  # MaxUnpooling.cpp
    aten.reflection_pad3d.default,  # ReflectionPad.cpp
    aten.replication_pad3d.default,  # ReplicationPadding.cpp
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def _in_format_of_input(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    return _like(mode, own, own, suggested_memory_format(a["self"]))


# --- copies of whole storages: TensorShape.cpp, clone_preserve_strides ----------------------------------------


@on_all_devices(
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
)
def _scatter(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    """Copy the input's whole storage, if the elements of the input do not overlap."""
    input = a["self"]
    # Overlapping elements (an expanded input) are cloned densely instead, and torch's formula says so.
    if own.stride() != input.stride():
        return own
    storage = meta_storage(input.untyped_storage().nbytes())
    return fake_empty_strided(mode, own.shape, own.stride(), own.dtype, storage, int(input.storage_offset()))


@on_all_devices(aten.col2im.default, aten.im2col.default)  # Col2Im.cpp, Im2Col.cpp, and .cu
def _columns(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    """Made by ``empty_like`` of the input and then resized, which keeps a storage that is large enough."""
    return _in_larger_storage(mode, own, max(a["self"].numel(), own.numel()))


@on_cpu(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)  # EmbeddingBag.cpp
def _embedding_bag(mode: FakeTensorMode, a: Mapping[str, Any], own: Any) -> Any:
    """Which bag each index is in, and the size of each bag; one more of each may be allocated than is returned."""
    output, bag_of_index, bag_size, *rest = own
    # Where a result has as many entries as these conditions say, the kernel has allocated one more and cut it off.
    indices, offsets = a["indices"].numel(), a["offsets"].numel()
    if bag_of_index.numel() == indices > 0:
        bag_of_index = _in_larger_storage(mode, bag_of_index, indices + 1)
    if bag_size.numel() == offsets - 1 > 0:
        bag_size = _in_larger_storage(mode, bag_size, offsets)
    return (output, bag_of_index, bag_size, *rest)


# --- collectives ----------------------------------------------------------------------------------------------


def _waited_for(mode: FakeTensorMode, args: Mapping[str, Any], own: Any) -> Any:
    """Return the tensor itself, as the real op does."""
    return args["tensor"]


# Torch's Meta kernel returns a new tensor (``_wait_tensor_meta`` in ``torch/distributed/_functional_collectives.py``),
# whose storage would count beside the collective's.
_WAIT = op_named("_c10d_functional.wait_tensor.default")
if _WAIT is not None:  # torch was built with collectives
    on_all_devices(_WAIT)(_waited_for)
