"""The cost model: the FLOPs and bytes of an op, and its time on a device.

On a CPU the time of an op is that of the plain roofline (Williams et al., "Roofline", CACM 2009), each operand moved
once:

    milliseconds = 1e3 * max(FLOPs / (peak * compute_efficiency), bytes / (bandwidth * bandwidth_efficiency))
                   + 1e-3 * kernel_launch_us

On a CUDA device an op is one kernel or more, of several kinds, and its time is the sum of theirs. ``op_kernels.py``
says which kernels an op launches and how many bytes each of them really moves; ``kernel_rates.py`` says how fast they
run, and where these figures come from. One elementwise kernel, or one large matrix product, has the roofline's time.

All other figures are those of the :class:`DeviceSpec`. FLOPs come from the formulas of ``torch.utils.flop_counter`` (a
multiply-add is two, causal attention counts in full) and are compared with peaks in FLOP/s. Only matrix products,
convolutions and attention have a formula, as there; all the other ops are bound by bandwidth, instructions or latency.

Times of ops add up: they are what the device takes, launches included. Where the CPU cannot issue ops as fast as the
device runs them, as in eager mode with small tensors, a step takes longer than the sum.

Known simplifications: caches are modelled only where a kernel reads its own operand again; on a CPU recurrent layers
(oneDNN) count no FLOPs; fp32 attention follows the same TF32 switch as matrix products.

Private PyTorch API, tried on 2.11 and 2.13: the ``OpOverload`` schema.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sacplan.device import index_kernels, row_kernels  # noqa: F401  (each registers its rules)
from sacplan.device.devices import DeviceSpec
from sacplan.device.host_step import copy_ms, update_and_copy_ms
from sacplan.device.kernel_rates import speeds_of
from sacplan.device.op_kernels import Call, Kernel, kernels_of, tensor_bytes
from sacplan.torch_compat.calls import Call as AnyCall
from sacplan.torch_compat.host_memory import TO_DEVICE, TO_HOST
from sacplan.torch_compat.ops import aten_names

# Ops that launch no kernel: they look at metadata, or only allocate. Views are recognized by their schema.
_FREE = aten_names("""
    empty empty_like empty_strided empty_permuted empty_quantized new_empty new_empty_strided _unsafe_view detach_
    lift_fresh resize_ set_ is_same_size is_pinned _has_compatible_shallow_copy_type _version sym_size sym_stride
    sym_numel sym_storage_offset record_stream _assert_tensor_metadata _nested_tensor_size
    _local_scalar_dense
""")
_FREE_NAMESPACES = ("prim", "profiler", "inductor")
# Products whose first argument is the summand.
_WITH_SUMMAND = aten_names("addmm addmm_ baddbmm baddbmm_ addbmm")


@functools.cache
def is_free(func: torch._ops.OpOverload) -> bool:
    """Whether an op launches no kernel: a view, a metadata query, a bare allocation."""
    schema = func._schema
    views = bool(schema.returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return schema.name in _FREE or func.namespace in _FREE_NAMESPACES or (views and not writes)


# ---------------------------------------------------------------------------------------------------------
# Time


def tf32_allowed(backend: Any = torch.backends.cuda.matmul) -> bool:
    """Whether float32 matrix products, or convolutions with ``torch.backends.cudnn``, may run as TF32."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # old and new switches mixed: torch refuses to say
        return bool(backend.fp32_precision == "tf32")


def _matrix_dtype(call: Call) -> torch.dtype:
    """Return the type that the matrix units work on: that of the first matrix operand."""
    operands = call.args[1:] if call.func._schema.name in _WITH_SUMMAND else call.args
    return next((arg.dtype for arg in operands if isinstance(arg, torch.Tensor)), torch.float32)


_FROM_HOST, _GRADIENT_TO_HOST = "sacplan::from_host_", "sacplan::gradient_to_host"


class CostModel:
    """FLOPs and time of ops on one device, cached by op, shapes, strides and dtypes.

    Args:
        spec: the device.
        tf32: whether float32 matrix products run as TF32; default: torch's switches, read once, here.

    Not safe to share between threads that call it at the same time.
    """

    def __init__(self, spec: DeviceSpec, *, tf32: bool | None = None) -> None:
        self.spec = spec
        self._tf32 = tf32_allowed() if tf32 is None else tf32
        self._conv_tf32 = tf32_allowed(torch.backends.cudnn) if tf32 is None else tf32
        self._known: dict[Any, tuple[int, float]] = {}
        # By kind of kernel: how fast it moves bytes and goes through elements.
        self._speeds = speeds_of(spec) if spec.kind == "cuda" else {}

    def cost(self, call: Call) -> tuple[int, float]:
        """Return (FLOPs, milliseconds) of one call of an op."""
        if is_free(call.func):
            return 0, 0.0
        # The output is in the key: where its size depends on data, equal arguments may give outputs of several sizes.
        key = op_key(call, signature(call.returned), _repeats(call.args))
        if key not in self._known:
            self._known[key] = self._compute(call)
        return self._known[key]

    def _compute(self, call: Call) -> tuple[int, float]:
        func, args, flops = call.func, call.args, call.flops
        call.tf32 = self._runs_tf32(call)
        peak = self.spec.reached_flops(_matrix_dtype(call), tf32=call.tf32)
        if func._schema.name == _FROM_HOST:
            # The host's processor makes this update: no kernel and no FLOPs of the device.
            parameters, read_bytes = args
            updated = zip(map(tensor_bytes, parameters), read_bytes, strict=True)
            return 0, update_and_copy_ms(updated, self.spec)
        if func._schema.name == _GRADIENT_TO_HOST:
            return 0, copy_ms(tensor_bytes(args[0]), False, self.spec)
        if func in (TO_DEVICE, TO_HOST):
            return 0, copy_ms(tensor_bytes(call.returned), args[1], self.spec)
        if self.spec.kind == "cuda":
            return flops, sum(self.kernel_ms(kernel, peak) for kernel in kernels_of(call))
        memory_s = call.nbytes / (self.spec.bandwidth_bytes_per_s * self.spec.bandwidth_efficiency)
        return flops, max(flops / peak, memory_s) * 1e3 + self.spec.kernel_launch_us * 1e-3

    def _runs_tf32(self, call: Call) -> bool:
        allowed = self._conv_tf32 if "conv" in call.func._schema.name else self._tf32
        return allowed and "tf32" in self.spec.flops and _matrix_dtype(call) == torch.float32

    def kernel_ms(self, kernel: Kernel, flops_per_s: float = 0.0) -> float:
        """Return the milliseconds of one kernel on a CUDA device, launches included.

        Args:
            kernel: the kernel.
            flops_per_s: what large matrix products of its type reach; only read for a kernel that has FLOPs.
        """
        speed = self._speeds[kernel.kind]
        # Each multiprocessor has its share of the device; the one with the most work is waited for.
        elements = max(kernel.elements, kernel.block_elements * self.spec.sm_count)
        ms = max(kernel.nbytes / speed.bytes_per_ms, elements / speed.elements_per_ms)
        if kernel.flops:
            flops = max(kernel.flops, kernel.block_flops * self.spec.sm_count)
            ms = max(ms, 1e3 * flops / (flops_per_s * speed.matrix_share))
        return ms + kernel.launches * self.spec.kernel_launch_us * 1e-3


def fused_ms(spec: DeviceSpec, name: str, nbytes: int) -> float:
    """Return the milliseconds of a kernel that inductor made, launch included: it moves bytes, and sums some up."""
    if spec.kind == "cpu":
        bandwidth = spec.bandwidth_bytes_per_s * spec.bandwidth_efficiency
        return 1e3 * nbytes / bandwidth + spec.kernel_launch_us * 1e-3
    return CostModel(spec).kernel_ms(Kernel("pointwise" if "_poi_" in name else "reduction", nbytes))


def _repeats(args: Sequence[Any]) -> int:
    """Return how many tensor arguments repeat an earlier one: ``x * x`` reads one tensor, ``x * y`` two."""
    tensors = [id(arg) for arg in args if isinstance(arg, torch.Tensor)]
    return len(tensors) - len(set(tensors))


def _nonzeros(tensor: torch.Tensor) -> int:
    """Return the number of elements that a sparse tensor stores; 0 if it is not sparse, or on the meta device."""
    return tensor._nnz() if "sparse" in str(tensor.layout) and not tensor.is_meta else 0


def op_key(call: AnyCall, *more: Any) -> Any:
    """Return a key that is equal for the same op with equal shapes, strides, dtypes and other arguments."""
    key = (call.func, signature(call.args), signature(call.kwargs), *more)
    try:
        hash(key)
    except TypeError:  # an unhashable argument, such as a symbolic size, is told apart by its text
        return repr(key)
    return key


def signature(tree: Any) -> Any:
    """Return everything that a cost depends on, hashable.

    Shape, stride and dtype of tensors, the number of stored elements of sparse ones, other values as they are.
    """
    if isinstance(tree, torch.Tensor):
        if tree.layout is not torch.strided:
            return tree.shape, tree.layout, tree.dtype, _nonzeros(tree)
        return tree.shape, tree.stride(), tree.dtype
    if isinstance(tree, (list, tuple)):
        return tuple([signature(item) for item in tree])
    if isinstance(tree, Mapping):
        return tuple([(name, signature(item)) for name, item in tree.items()])
    return tree
