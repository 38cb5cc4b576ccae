"""Ops that are linear in an argument: where that is partial, a sum over ranks, their outputs are partial, too.

The tables name, for each op, the arguments that may be partial together while all others are replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch

from sacplan.torch_compat.calls import Call

Together: TypeAlias = tuple[tuple[str, ...], ...]
"""Names of the arguments that may be summands together, in each of several ways."""


def _on_self(names: str) -> dict[str, Together]:
    """Return entries for ops, separated by white space, whose first argument may be partial."""
    return dict.fromkeys(names.split(), (("self",),))


# Each element that these return is one of an argument, or of several lists: they pass maxima and minima, too.
_MOVES = _on_self(
    """_reshape_alias _unsafe_view alias alias_copy clone contiguous detach detach_copy diagonal diagonal_copy expand
    expand_copy flip index.Tensor index_select lift_fresh gather narrow permute permute_copy pixel_shuffle
    pixel_unshuffle repeat reshape roll select.int select_copy.int slice.Tensor slice_copy.Tensor split.Tensor
    split_with_sizes squeeze squeeze_copy t t_copy take transpose.int transpose_copy.int unbind.int unfold
    unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy view.default view_copy.default
    _to_copy"""
) | {
    "cat": (("tensors",),),
    "stack": (("tensors",),),
    "embedding": (("weight",),),
    "copy": (("self", "src"),),
}

_LINEAR = _on_self(
    """_adaptive_avg_pool2d _adaptive_avg_pool3d _conj avg_pool2d avg_pool3d col2im constant_pad_nd cumsum div.Scalar
    div.Tensor im2col masked_fill mean mul.Scalar neg sum tril triu view_as_complex view_as_real zero"""
) | {
    "add.Tensor": (("self", "other"),),
    "sub.Tensor": (("self", "other"),),
    "rsub.Tensor": (("self", "other"),),
    "lerp.Scalar": (("self", "end"),),
    "where.self": (("self", "other"),),
    "scatter_add": (("self", "src"),),
    "scatter.src": (("self", "src"),),
    "slice_scatter": (("self", "src"),),
    "select_scatter": (("self", "src"),),
    "index_add": (("self", "source"),),
    "index_put": (("self", "values"),),
    "_unsafe_index_put": (("self", "values"),),
    "mul.Tensor": (("self",), ("other",)),
    "mm": (("self",), ("mat2",)),
    "bmm": (("self",), ("mat2",)),
    "mv": (("self",), ("vec",)),
    "dot": (("self",), ("tensor",)),
    "addmm": (("self", "mat1"), ("self", "mat2")),
    "baddbmm": (("self", "batch1"), ("self", "batch2")),
    "addmv": (("self", "mat"), ("self", "vec")),
    "addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "addcdiv": (("self", "tensor1"),),
    "convolution": (("input", "bias"), ("weight", "bias")),
}  # fmt: skip

# Arguments that must be zero: else each rank would add the same once more.
_ZERO = {"constant_pad_nd": "value", "masked_fill": "value"}


@functools.cache
def _names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    """Return the names under which a table may have an op; one that writes in place has that of its twin."""
    name = str(func._schema.name).partition("::")[2]
    # Dunder names, such as ``__and__``, are no writes in place.
    plain = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return (f"{plain}.{func._overloadname}", plain)


def _together(func: torch._ops.OpOverload, call: Call) -> tuple[Together, bool]:
    """Return the arguments that may be partial together, and whether they may be maxima as well."""
    # Nothing is known about custom ops. An ``out=`` argument would be written by each rank with its summand.
    if func.namespace not in ("aten", "prims") or any(a.is_out for a in func._schema.arguments):
        return (), False
    for name in _names(func):
        if name in _MOVES:
            return _MOVES[name], True
        if name in _LINEAR:
            zero = _ZERO.get(name)
            return (_LINEAR[name] if zero is None or call[zero] == 0 else ()), False
    return (), False


def dtype_of(t: Any) -> torch.dtype:
    """Return the dtype of a tensor, or of a description that names it."""
    found = t.dtype if isinstance(t.dtype, torch.dtype) else getattr(torch, t.dtype)
    assert isinstance(found, torch.dtype)
    return found


def may_be_partial(t: Any) -> bool:
    """Whether a tensor may be one summand on each rank."""
    dtype = dtype_of(t)
    return dtype.is_floating_point or dtype.is_complex


def passed_on(func: torch._ops.OpOverload, call: Call) -> Iterator[tuple[frozenset[int], bool]]:
    """Yield the positions of tensor arguments that may be partial together, and whether also as maxima.

    Casts to a type of less precision are left out: a sum is rounded once, not every summand.
    """
    together, moves = _together(func, call)
    for names in together:
        found = frozenset(i for i, (name, _) in enumerate(call.named_inputs) if name in names)
        given = {name for name in names if call.arguments.get(name) is not None}
        if not given or given != {call.named_inputs[i][0] for i in found}:
            continue  # a number cannot be a summand
        summands = [call.inputs[i] for i in found]
        # Only floats have summands. ``promote_types`` gives back the output's type if that can hold every
        # summand.
        if all(map(may_be_partial, (*summands, *call.outputs))) and all(
            torch.promote_types(dtype_of(t), dtype_of(o)) == dtype_of(o)
            for t in summands
            for o in call.outputs
        ):
            yield found, moves
