"""Strides and storages of what kernels return, where torch's own fake kernels say something else.

Found by running PyTorch's op database on a CPU, forward and backward, for real and fake side by side
(``python -m benchmarks.op_metadata``; ``benchmarks/results/op_metadata.json``). There are three causes.

**Formulas in Python, in place of the function that makes the outputs.** A structured op has such a function in C++,
which is the same for every device, and works on the meta device too. Almost all have a formula registered over it, and
some of these differ: the mean of ``mse_loss`` lies in a storage as large as its input, since the function allocates the
unreduced loss, and then makes it a scalar; with operands of mixed layouts it is TensorIterator that decides the strides
of ``xlogy``. For these the function in C++ is asked. (Of ``nll_loss`` the formula is right, and slow: it
computes the loss, for each size of a loss in slices.)

**Strides of dimensions of size 1.** They move no element, so torch's formulas choose them at will. But kernels look at
them when they choose a memory format: an image [1, C, H, W] counts as channels last by the strides that a view or an
elementwise op left in its first dimension, and all that follows is laid out by that. Here every elementwise op, every
view and ``empty_like`` has the strides of C++ for such sizes: ``elementwise_kernels``.

**Formulas that were never right**, for ops that are not structured. Each has a rule below, which is read from code that
all devices run, or from a CPU's kernel; of other devices' kernels nothing is known.

``layouts.csv`` lists the ops with their rules, all but those of elementwise ops, which are the same for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sacplan.core.files import table_of
from sacplan.torch_compat.fake_kernels import (
    FakeKernel,
    elementwise_ops,
    is_structured,
    run_in_cpp,
    torchs_own_fake,
    viewed,
)
from sacplan.torch_compat.fake_tensors import FakeTensorMode, fake_empty_strided, meta_storage
from sacplan.torch_compat.ops import arguments_by_name, op_named, tensors_in
from sacplan.torch_compat.private import suggested_memory_format

aten = torch.ops.aten

Rule = Callable[..., Any]
"""(fake mode, torch's own outputs, the arguments of the op that ``layouts.csv`` names) -> outputs."""

_TABLE = table_of(Path(__file__).with_name("layouts.csv"))


@functools.cache
def kernels_for(devices: str) -> dict[Any, FakeKernel]:
    """Return the fake kernels for ``"all devices"`` or a ``"CPU"``, by op. Those for a CPU come before the others."""
    rows = {op_named(row["op"]): row for row in _TABLE if row["devices"] == devices}
    # ``op_named`` is None for an op of a library that torch was built without.
    return {op: _kernel(row["rule"], row["arguments"].split()) for op, row in rows.items() if op is not None}


def _kernel(rule: str, names: Sequence[str]) -> FakeKernel:
    def fake(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
        own = torchs_own_fake(mode, func, args, kwargs)
        given = arguments_by_name(func, args, kwargs)
        return _RULES[rule](mode, own, *(given.get(name) for name in names))

    return _INSTEAD.get(rule, fake)


@functools.cache
def elementwise_kernels() -> dict[Any, FakeKernel]:
    """Return the fake kernels of elementwise ops where a size is 1, by op. They come before all others."""
    result: dict[Any, FakeKernel] = {}
    for op in elementwise_ops():
        if is_structured(op):
            result[op] = _elementwise_in_cpp
        elif op not in (*kernels_for("all devices"), *kernels_for("CPU"), aten.clone.default):
            result[op] = _kernel_where_a_size_is_one
    return result


def _elementwise_in_cpp(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    operands = tensors_in((args, kwargs))
    # Without a size of 1 torch's own formula is right, but for plain operands C++ is several times as fast.
    # For copied operands see ``_copied_first``.
    if _are_plain(operands) or (any(1 in t.shape for t in operands) and not _copied_first(operands)):
        return run_in_cpp(mode, func, args, kwargs)
    return NotImplemented


def _kernel_where_a_size_is_one(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    operands = tensors_in((args, kwargs))
    if not any(1 in t.shape for t in operands) or _copied_first(operands):
        return NotImplemented
    own = torchs_own_fake(mode, func, args, kwargs)
    if _takes_a_number(func):  # the kernel makes the number an operand without dimensions
        operands.append(fake_empty_strided(mode, (), (), operands[0].dtype))
    # Several results, or more operands than ``_ITERATED`` has an op for: torch's strides stay.
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

    The copy's strides are not known here, so such calls are left to PyTorch.
    """
    mixed = len({t.dtype for t in operands}) > 1
    return mixed and any(s == 0 and n > 1 for t in operands for n, s in zip(t.shape, t.stride(), strict=True))


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are contiguous, of one floating type, and without a size of 1 or 0: their layout is their shape."""
    return (
        len({t.dtype for t in tensors}) == 1
        and tensors[0].is_floating_point()
        and all(t.is_contiguous() and t.shape and min(t.shape) > 1 for t in tensors)
    )


def rule_of(func: Any) -> str | None:
    """Which rule an op has on a CPU: ``"C++"``, ``"all devices"``, ``"CPU"`` or ``"sizes of 1"``; None if none."""
    for row in _TABLE:
        if op_named(row["op"]) is func:
            return "C++" if row["rule"] in _INSTEAD else row["devices"]
    return "sizes of 1" if func in elementwise_kernels() else None


# --- how outputs are laid out -----------------------------------------------------------------------------


def _laid_out(mode: FakeTensorMode, own: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return a tensor of the same size and type with these strides; ``own`` itself if it has them."""
    if own.stride() == tuple(stride):
        return own
    return fake_empty_strided(mode, own.shape, stride, own.dtype)


def _like(
    mode: FakeTensorMode,
    own: torch.Tensor,
    model: torch.Tensor,
    memory_format: torch.memory_format | None = torch.preserve_format,
) -> torch.Tensor:
    """Return ``own`` laid out as ``empty_like(model, memory_format=...)``."""
    empty = run_in_cpp(mode, aten.empty_like.default, (model,), {"memory_format": memory_format})
    return _laid_out(mode, own, empty.stride())


def _contiguous(mode: FakeTensorMode, own: Any) -> Any:
    """Lay out one output or several contiguously."""
    if isinstance(own, torch.Tensor):
        return _like(mode, own, own, torch.contiguous_format)
    return tuple(None if t is None else _contiguous(mode, t) for t in own)


def _as_iterated(mode: FakeTensorMode, own: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
    """Return ``own`` laid out as TensorIterator does for an elementwise op over up to three operands.

    The layout does not depend on the op, so a structured op with as many operands is asked.
    """
    op = _ITERATED[len(operands)]
    if len(operands) == 3:  # ``addcmul`` wants operands of one type
        operands = tuple(fake_empty_strided(mode, t.shape, t.stride(), torch.float32) for t in operands)
    return _laid_out(mode, own, run_in_cpp(mode, op, operands, {}).stride())


_ITERATED = {1: aten.sgn.default, 2: aten.add.Tensor, 3: aten.addcmul.default}
"""By number of operands, a structured elementwise op."""


def _in_larger_storage(mode: FakeTensorMode, own: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the same tensor at the beginning of a storage for ``elements``."""
    storage = meta_storage(elements * own.element_size())
    return fake_empty_strided(mode, own.shape, own.stride(), own.dtype, storage)


# --- rules -----------------------------------------------------------------------------------------------


def _in_cpp(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    return run_in_cpp(mode, func, args, kwargs)


def _view(mode: FakeTensorMode, _: Any, tensor: Any, size: Sequence[int]) -> Any:
    """Return the view with the strides of C++, by which kernels recognize channels last; also faster than torch's."""
    return viewed(mode, tensor, size)


# ``reduction`` of an unreduced loss. A reduced one is made of it by ``resize_``, which keeps the storage.
_UNREDUCED = 0


def _binary_cross_entropy(mode: FakeTensorMode, own: Any, input: Any, reduction: int) -> Any:
    return _like(mode, own, input) if reduction == _UNREDUCED else _resized(mode, own, input)


def _soft_margin_loss(mode: FakeTensorMode, own: Any, target: Any, reduction: int) -> Any:
    return own if reduction == _UNREDUCED else _resized(mode, own, target)


def _resized(mode: FakeTensorMode, own: Any, model: Any) -> Any:
    """Return ``own`` as resized from the size of ``model``, which keeps a storage that is large enough."""
    return _in_larger_storage(mode, own, max(model.numel(), own.numel()))


def _unary(mode: FakeTensorMode, own: Any, input: Any) -> Any:
    if 1 not in own.shape:
        return own
    return (_like if input.is_complex() else _as_iterated)(mode, own, input)


def _iterated_if_expanded(mode: FakeTensorMode, own: Any, input: Any, other: Any) -> Any:
    """Ignore an expanded operand, such as the gradient of a sum, as TensorIterator.cpp does. The fake formula does not.

    An operand of another type than the result is copied first, and then its strides count.
    """
    if not isinstance(input, torch.Tensor) or not isinstance(other, torch.Tensor):
        return own
    if input.dtype != other.dtype or not (0 in input.stride() or 0 in other.stride()):
        return own
    return _as_iterated(mode, own, input, other)


def _contiguous_if_complex(mode: FakeTensorMode, own: Any, input: Any) -> Any:
    return _contiguous(mode, own) if input.is_complex() else own


def _ldexp(mode: FakeTensorMode, own: Any, input: Any, other: Any) -> Any:
    """``input * 2**other``, of which the power is contiguous."""
    return _as_iterated(mode, own, input, run_in_cpp(mode, aten.pow.Scalar, (2.0, other), {}))


def _dense_format(t: torch.Tensor) -> torch.memory_format | None:
    """Return the memory format in which a tensor is contiguous, the usual one first; None if there is none."""
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    dims = {torch.channels_last: 4, torch.channels_last_3d: 5}
    for memory_format in formats:
        if dims.get(memory_format, t.dim()) == t.dim() and t.is_contiguous(memory_format=memory_format):
            return memory_format
    return None


def _batch_norm(mode: FakeTensorMode, own: Any, input: Any, *others: torch.Tensor | None) -> Any:
    """Lay out the output in the memory format of an input [N, C, ...] that has one, else contiguously."""
    # The kernel for a dense input takes contiguous parameters only. Any other call goes by the strides of the input.
    contiguous = all(t is None or t.is_contiguous() for t in others)
    memory_format = (_dense_format(input) if contiguous else None) or suggested_memory_format(input)
    return (_like(mode, own[0], input, memory_format), *own[1:])


def _batch_norm_backward(mode: FakeTensorMode, own: Any, input: Any, grad: Any) -> Any:
    if own[0] is None:  # no gradient of the input is wanted
        return own
    memory_format = suggested_memory_format(input)
    if _dense_format(grad) and suggested_memory_format(grad) == memory_format:
        memory_format = _dense_format(input) or memory_format
    return (_like(mode, own[0], input, memory_format), *own[1:])


def _group_norm(mode: FakeTensorMode, own: Any, input: Any) -> Any:
    """Lay out the first result, forward or backward, as a CPU does; torch 2.14's own fake kernel is that of a GPU."""
    return own if own[0] is None else (_in_its_format(mode, own[0], input), *own[1:])


def _in_its_format(mode: FakeTensorMode, own: Any, input: Any) -> Any:
    return _like(mode, own, own, suggested_memory_format(input))


def _whole_storage(mode: FakeTensorMode, own: Any, input: Any) -> Any:
    """Copy the input's whole storage (``clone_preserve_strides``), if the elements of the input do not overlap."""
    # Overlapping elements (an expanded input) are cloned densely instead, and torch's formula says so.
    if own.stride() != input.stride():
        return own
    storage = meta_storage(input.untyped_storage().nbytes())
    return fake_empty_strided(mode, own.shape, own.stride(), own.dtype, storage, int(input.storage_offset()))


def _embedding_bag(mode: FakeTensorMode, own: Any, indices: Any, offsets: Any) -> Any:
    """Enlarge the storages of the second result (bag of each index) and of the third (size of each bag) by an entry."""
    output, bag_of_index, bag_size, *rest = own
    # Only where a result has so many entries has the kernel allocated one more and cut it off.
    if bag_of_index.numel() == indices.numel() > 0:
        bag_of_index = _in_larger_storage(mode, bag_of_index, indices.numel() + 1)
    if bag_size.numel() == offsets.numel() - 1 > 0:
        bag_size = _in_larger_storage(mode, bag_size, offsets.numel())
    return (output, bag_of_index, bag_size, *rest)


def _itself(mode: FakeTensorMode, own: Any, tensor: Any) -> Any:
    """Return the argument, as the real op does that waits for a collective.

    Torch's Meta kernel returns a new tensor (``_wait_tensor_meta`` of ``torch.distributed._functional_collectives``),
    whose storage would count in addition to the collective's.
    """
    return tensor


_INSTEAD: dict[str, FakeKernel] = {"in C++": _in_cpp, "view": _view}
"""Rules in place of torch's own formula."""

_RULES: dict[str, Rule] = {
    "batch norm": _batch_norm,
    "batch norm backward": _batch_norm_backward,
    "binary cross entropy": _binary_cross_entropy,
    "contiguous": _contiguous,
    "contiguous if complex": _contiguous_if_complex,
    "embedding bag": _embedding_bag,
    "group norm": _group_norm,
    "in its format": _in_its_format,
    "iterated": _as_iterated,
    "iterated if expanded": _iterated_if_expanded,
    "itself": _itself,
    "ldexp": _ldexp,
    "like": _like,
    "resized": _resized,
    "soft margin loss": _soft_margin_loss,
    "unary": _unary,
    "whole storage": _whole_storage,
}
