"""The roofline: how many FLOPs and bytes an op takes, and how long that is on a device.

A kernel takes the longer of computing at the peak of its matrix type and of moving its operands once, each at
the share of the peak that the :class:`DeviceSpec` assumes, and a launch. FLOPs come from the formulas of
``torch.utils.flop_counter`` (a multiply-add is two, causal attention counts in full) and are compared with
peaks in FLOP/s. Only matrix products, convolutions and attention have a formula, as there; all the other ops
are bound by bandwidth, which is what they are on every device of the table.

Known simplifications: an operand given twice is read twice; caches are not modelled; recurrent layers on a
CPU (oneDNN) count no FLOPs; fp32 attention follows the same TF32 switch as matrix products.

Private PyTorch API, tried on 2.13: ``torch.utils.flop_counter.flop_registry`` and the ``OpOverload`` schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter

from sacplan._device.devices import DeviceSpec

aten = torch.ops.aten

# ---------------------------------------------------------------------------------------------------------
# FLOPs: torch's registry, and what it lacks

_Formula = Callable[[Sequence[Any], Mapping[str, Any], Any], int]
_EXTRA: dict[str, _Formula] = {}


def _formula(*names: str) -> Callable[[_Formula], _Formula]:
    def register(formula: _Formula) -> _Formula:
        for name in names:
            _EXTRA[f"aten::{name}"] = formula
        return formula

    return register


@_formula("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable")
def _attention(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    query, key, value = args[:3]
    return flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape)


@_formula(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def _attention_backward(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    grad_out, query, key, value = args[:4]
    return flop_counter.sdpa_backward_flop_count(grad_out.shape, query.shape, key.shape, value.shape)


@_formula("_grouped_mm", "_scaled_grouped_mm")
def _grouped_mm(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """[M, K] x [E, K, N], [E, M, K] x [K, N], [E, M, K] x [E, K, N], or [M, T] x [T, N] summed by group."""
    a, b = args[:2]
    if a.dim() == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1]
    # For a 3-D and a 2-D operand the columns are shared out over the groups.
    groups = a.shape[0] if b.dim() == 3 else 1
    return 2 * groups * a.shape[1] * a.shape[2] * b.shape[-1]


@_formula("_cudnn_rnn")
def _rnn(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """input [T, N, C] (or [N, T, C], or packed [rows, C]): each weight matrix times each step's rows."""
    rows = args[0].numel() // max(1, args[0].shape[-1])
    return 2 * rows * sum(w.numel() for w in args[1] if w.dim() == 2)


@_formula("_cudnn_rnn_backward")
def _rnn_backward(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    return 2 * _rnn(args, kwargs, out)


def op_flops(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of one op, as ``FlopCounterMode`` counts them; 0 for ops that no formula knows."""
    formula = flop_counter.flop_registry.get(func._overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    extra = _EXTRA.get(func._schema.name)
    return 0 if extra is None else int(extra(args, kwargs, out))


# ---------------------------------------------------------------------------------------------------------
# Bytes

# Make no kernel: they look, or only allocate. Views are found by their schema.
_FREE = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "empty_quantized",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
        "detach_",
        "lift_fresh",
        "resize_",
        "set_",
        "is_same_size",
        "is_pinned",
        "_has_compatible_shallow_copy_type",
        "_version",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "record_stream",
        "_assert_tensor_metadata",
        "_nested_tensor_size",
    )
)
_FREE_NAMESPACES = frozenset(("prim", "profiler", "inductor"))

# Write their first argument without having read it.
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in (
        "zero_",
        "fill_",
        "copy_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "random_",
        "exponential_",
        "_foreach_zero_",
        "_foreach_copy_",
    )
)

# Read of their first argument no more than they write.
_GATHERS = frozenset(
    f"aten::{name}" for name in ("embedding", "index", "_unsafe_index", "index_select", "gather", "take")
)

# The index of a matrix operand where it is not the first argument.
_MATRIX_ARG = {"aten::addmm": 1, "aten::baddbmm": 1, "aten::addbmm": 1}


@dataclass(frozen=True, slots=True)
class _OpTraits:
    """What an op's schema says, looked up once per op."""

    free: bool
    counts_flops: bool
    overwrites: bool
    gathers: bool
    matrix_arg: int
    mutated: tuple[int | str, ...]


def _traits(func: torch._ops.OpOverload) -> _OpTraits:
    schema = func._schema
    name = schema.name
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    views = bool(schema.returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    return _OpTraits(
        free=name in _FREE or name.split("::")[0] in _FREE_NAMESPACES or (views and not any(writes)),
        counts_flops=func._overloadpacket in flop_counter.flop_registry or name in _EXTRA,
        overwrites=name in _OVERWRITES,
        gathers=name in _GATHERS,
        matrix_arg=_MATRIX_ARG.get(name, 0),
        mutated=tuple(
            a.name if a.kwarg_only else i
            for i, (a, write) in enumerate(zip(schema.arguments, writes, strict=True))
            if write
        ),
    )


_TRAITS: dict[torch._ops.OpOverload, _OpTraits] = {}


def _traits_of(func: torch._ops.OpOverload) -> _OpTraits:
    traits = _TRAITS.get(func)
    if traits is None:
        traits = _TRAITS[func] = _traits(func)
    return traits


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        yield from _tensors(list(tree.values()))


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the elements of a strided tensor take; an expanded dimension counts once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    shape = tensor.shape
    if 0 in shape:
        return 0
    elements = prod(size for size, stride in zip(shape, tensor.stride(), strict=True) if stride != 0)
    return elements * tensor.element_size()


def op_bytes(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Bytes that one op reads and writes; 0 for views, metadata queries and bare allocations."""
    traits = _traits_of(func)
    if traits.free:
        return 0
    written = sum(_tensor_bytes(t) for t in _tensors(out))
    if not written:
        for where in traits.mutated:
            if isinstance(where, str):
                written += sum(_tensor_bytes(t) for t in _tensors(kwargs.get(where)))
            elif where < len(args):
                written += sum(_tensor_bytes(t) for t in _tensors(args[where]))
    read = 0
    for i, arg in enumerate(args):
        if i == 0 and traits.overwrites:
            continue
        nbytes = sum(_tensor_bytes(t) for t in _tensors(arg))
        read += min(nbytes, written) if i == 0 and traits.gathers else nbytes
    outs = [where for where in traits.mutated if isinstance(where, str)]
    read += sum(_tensor_bytes(t) for name, v in kwargs.items() if name not in outs for t in _tensors(v))
    return read + written


# ---------------------------------------------------------------------------------------------------------
# Time


def tf32_allowed() -> bool:
    """Whether float32 matrix products may run as TF32, by torch's switches."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:  # old and new switches mixed: torch refuses to say
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "ieee") == "tf32"


def _conv_tf32_allowed() -> bool:
    """Convolutions have a switch of their own, which is on by default."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return getattr(torch.backends.cudnn, "fp32_precision", "tf32") == "tf32"


def _matrix_dtype(traits: _OpTraits, args: Sequence[Any]) -> torch.dtype:
    """The type that the matrix units work on: that of the first matrix operand."""
    for arg in args[traits.matrix_arg :]:
        if isinstance(arg, torch.Tensor):
            return arg.dtype
    return torch.float32


def _roofline_ms(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    traits: _OpTraits,
    flops: int,
    nbytes: int,
    spec: DeviceSpec,
    tf32: bool,
    conv_tf32: bool,
) -> float:
    compute_s = 0.0
    if flops:
        allowed = conv_tf32 if "conv" in func._schema.name else tf32
        peak = spec.peak_flops(_matrix_dtype(traits, args), tf32=allowed)
        compute_s = flops / (peak * spec.compute_efficiency)
    memory_s = nbytes / (spec.bandwidth_bytes_per_s * spec.bandwidth_efficiency)
    return max(compute_s, memory_s) * 1e3 + spec.kernel_launch_us * 1e-3


def op_time_ms(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, spec: DeviceSpec
) -> float:
    """Milliseconds that one op takes on ``spec``; 0 for views, metadata queries and bare allocations.

    For many ops use :class:`CostModel`, which remembers.
    """
    return CostModel(spec).cost(func, args, kwargs, out)[1]


class CostModel:
    """FLOPs and time of ops on one device, remembered by op, shapes, strides and dtypes.

    Args:
        spec: the device.
        tf32: whether float32 matrix products run as TF32; default: torch's switches, read once, here.

    Not safe to share between threads that call it at the same time.
    """

    def __init__(self, spec: DeviceSpec, *, tf32: bool | None = None) -> None:
        self.spec = spec
        self._tf32 = tf32_allowed() if tf32 is None else tf32
        self._conv_tf32 = _conv_tf32_allowed() if tf32 is None else tf32
        self._known: dict[Any, tuple[int, float]] = {}

    def cost(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[int, float]:
        """(FLOPs, milliseconds) of one call of ``func`` that returned ``out``."""
        traits = _TRAITS.get(func) or _traits_of(func)
        if traits.free:
            return 0, 0.0
        key = (func, _signature(args), _signature(kwargs) if kwargs else None, _signature(out))
        try:
            known = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed: a symbolic size, a generator's state
            return self._compute(func, args, kwargs, out, traits)
        if known is None:
            known = self._known[key] = self._compute(func, args, kwargs, out, traits)
        return known

    def _compute(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        traits: _OpTraits,
    ) -> tuple[int, float]:
        flops = op_flops(func, args, kwargs, out) if traits.counts_flops else 0
        nbytes = op_bytes(func, args, kwargs, out)
        time = _roofline_ms(func, args, traits, flops, nbytes, self.spec, self._tf32, self._conv_tf32)
        return flops, time


def _signature(tree: Any) -> Any:
    """Whatever the cost depends on, hashable: shape, stride and dtype of tensors, other values themselves."""
    if isinstance(tree, torch.Tensor):
        if tree.layout is not torch.strided:
            return tree.shape, tree.layout, tree.dtype
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, (list, tuple)):
        return tuple([_signature(item) for item in tree])
    if isinstance(tree, Mapping):
        return tuple([(name, _signature(item)) for name, item in tree.items()])
    return tree
