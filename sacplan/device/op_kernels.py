"""The kernels of one op on a CUDA device: their kind, and how many bytes they really move.

    kernels_of(aten.native_layer_norm_backward.default, args, kwargs, out)
    # (Kernel("norm_backward", 5 * x.nbytes, ...), Kernel("pointwise"))

An op is not always one kernel that moves each operand once. The gradient of a layer norm is two kernels, and the second
reads everything again. A softmax reads a row again if it does not fit shared memory. An elementwise op computes offsets
for each element as soon as one operand is broadcast. Each rule here states this for a family of ops, and names the file
of ``aten/src/ATen/native/cuda`` that it was read from (torch 2.4 to 2.13).

A rule gets a :class:`Call` and returns kernels:

    @kernels("aten::cumsum", "aten::cumprod")
    def _scan(call):
        return (Kernel("scan", call.nbytes),)

Ops without a rule are matrix products if they have a formula for FLOPs, else elementwise. ``kernel_rates.py`` says how
fast each kind is; the rules for ops on rows and on indices are in ``row_kernels.py`` and ``index_kernels.py``.

Known simplifications: caches are modelled only where a rule says so; an op that is fed by the one before it may find
its input in the L2 cache, which is faster. Uncoalesced reads of a true transpose count as strided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from sacplan.device.flops import op_flops
from sacplan.torch_compat.calls import Call as AnyCall
from sacplan.torch_compat.ops import RuleTable, aten_names, op_traits, tensors_in
from sacplan.torch_compat.private import is_dense


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of an op, launched once or more.

    Attributes:
        kind: see ``KINDS`` in ``kernel_rates.py``.
        nbytes: read and written.
        elements: handled one by one, for kinds that have a rate; rows, for kinds that have a time for each.
        flops: of matrix units, padding included.
        block_flops: FLOPs that one multiprocessor does at least.
        block_elements: elements that one multiprocessor handles at least.
        launches: how often it is launched.
    """

    kind: str
    nbytes: float = 0
    elements: float = 0
    flops: float = 0
    block_flops: float = 0
    block_elements: float = 0
    launches: int = 1


@dataclass(eq=False)
class Call(AnyCall):
    """One call of an op, with what it reads and writes.

    Attributes:
        tf32: whether matrix units take its float32 operands, as TF32.
    """

    tf32: bool = False

    @cached_property
    def flops(self) -> int:
        """FLOPs by the op's formula; 0 without one."""
        return op_flops(self)

    @cached_property
    def writes(self) -> list[torch.Tensor]:
        """The tensors that it writes."""
        # An op that writes in place may return nothing (``_foreach_add_``): what it wrote is among its arguments.
        written = op_traits(self.func).written(self.args, self.kwargs)
        return tensors_in(self.returned) or tensors_in(written)

    @cached_property
    def reads(self) -> list[torch.Tensor]:
        """The tensors that it reads, each once, even if it is given twice."""
        given = tensors_in(self.args[1:] if self.func._schema.name in OVERWRITES else self.args)
        outs = op_traits(self.func).written_names
        given += [t for key, value in self.kwargs.items() if key not in outs for t in tensors_in(value)]
        return list({id(t): t for t in given}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all operands, each moved once; of a table in which it looks up rows, as many as it writes."""
        read = list(map(tensor_bytes, self.reads))
        if self.func._schema.name in _GATHERS:
            read[0] = min(read[0], self.written_bytes)
        return sum(read) + self.written_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes of the operands that are written."""
        return sum(map(tensor_bytes, self.writes))


OVERWRITES = aten_names(
    "zero_ fill_ copy_ normal_ uniform_ bernoulli_ random_ exponential_ _foreach_zero_ _foreach_copy_"
)
"""Ops that write their first argument without reading it."""


_GATHERS = aten_names("embedding index _unsafe_index index_select gather take")


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements. A dimension of stride 0 (expanded) counts once: it is read once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    shape = tensor.shape
    if 0 in shape:  # whatever the strides: the product below would leave out an empty dimension of stride 0
        return 0
    elements = prod(size for size, stride in zip(shape, tensor.stride(), strict=True) if stride != 0)
    return elements * tensor.element_size()


Rule = Callable[[Call], tuple[Kernel, ...]]
kernels: RuleTable[Rule] = RuleTable()
"""Rules by schema name."""


_FOREACH = ("aten::_foreach", "aten::_fused", "aten::_amp_foreach")


def kernels_of(call: Call) -> tuple[Kernel, ...]:
    """Return the kernels of a call."""
    name = call.func._schema.name
    rule = kernels.get(name)
    if rule is not None:
        return rule(call)
    if name.startswith(_FOREACH) and isinstance(call.args[0], (list, tuple)):
        return _foreach(call)
    if call.flops:
        return _matrix_product(call)
    return (elementwise(call),)


# ---------------------------------------------------------------------------------------------------------
# Elementwise ops (TensorIterator, CUDALoops.cuh)


def elementwise(call: Call) -> Kernel:
    """Return the kernel that TensorIterator would launch.

    ``gpu_kernel_impl`` takes the vectorized kernel where all operands lie alike and without gaps, and nothing has to be
    cast; the unrolled one where something has to be cast; and one that computes the offsets of each element where the
    operands do not lie alike.
    """
    operands = [*call.reads, *call.writes]
    elements = max((t.numel() for t in operands), default=0)
    # An operand that is one value for all elements does not count: its offsets take no division.
    many = [t for t in operands if not _is_one_value(t)]
    if many and not lie_alike(many, elements):
        return Kernel("strided", call.nbytes, elements)
    return Kernel("cast" if _casts(call) else "pointwise", call.nbytes, elements)


def lie_alike(operands: Sequence[torch.Tensor], elements: int) -> bool:
    """Whether one flat loop visits the elements of all operands: same sizes, same strides, no gaps."""
    if not operands or any(t.layout is not torch.strided for t in operands):
        return True
    if any(t.numel() != elements for t in operands):
        return False
    if all(t.is_contiguous() for t in operands):
        return True
    first = operands[0]
    return is_dense(first.shape, first.stride()) and all(
        _laid_out(t) == _laid_out(first) for t in operands[1:]
    )


def _is_one_value(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 or (tensor.layout is torch.strided and not any(tensor.stride()))


def _laid_out(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return sizes and strides of the dimensions, without those of size 1, whose strides mean nothing."""
    return [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1]


_VECTORIZED_CASTS = {(torch.float32, torch.bfloat16), (torch.float32, torch.float16)}
"""(from, to): these have a kernel of their own (``Copy.cu``), so that nothing is cast on the way."""


def _casts(call: Call) -> bool:
    """Whether elements have another type in memory than in registers.

    Masks are read and comparisons are written as bool, which needs no cast.
    """
    types = {t.dtype for t in (*call.reads, *call.writes)} - {torch.bool}
    if len(types) < 2:
        return False
    if call.func._schema.name in _COPIES and len(call.reads) == 1:
        return (call.reads[0].dtype, call.writes[0].dtype) not in _VECTORIZED_CASTS
    return True


_COPIES = aten_names("_to_copy copy_ copy clone contiguous")


@kernels("aten::zero_", "aten::fill_", "aten::zeros", "aten::full", "aten::ones", "aten::zeros_like", "aten::ones_like",
         "aten::full_like", "aten::new_zeros", "aten::new_ones", "aten::new_full", "aten::arange")  # fmt: skip
def _fill(call: Call) -> tuple[Kernel, ...]:
    return (Kernel("pointwise", call.written_bytes),)


@kernels(*aten_names("""
    randn rand randint randperm normal normal_ uniform_ bernoulli bernoulli_ random_ exponential_ randn_like rand_like
    randint_like native_dropout rrelu_with_noise multinomial
"""))  # fmt: skip
def _random(call: Call) -> tuple[Kernel, ...]:
    """Random numbers take instructions: ten rounds of Philox for four of them (``DistributionTemplates.h``).

    ``randn_like`` takes the sizes of its argument, and does not read it.
    """
    elements = max((t.numel() for t in call.writes), default=0)
    like = call.func._schema.name.endswith("_like")
    return (Kernel("random", call.written_bytes if like else call.nbytes, elements),)


# ---------------------------------------------------------------------------------------------------------
# Lists of tensors (MultiTensorApply.cuh)

_TENSORS_AT_ONCE = (110, 64, 48, 36, 30)
"""Tensors in one launch, by the number of lists (``depth_to_max_tensors``)."""
_ELEMENTS_AT_ONCE = 320 * 65536
"""Elements in one launch: blocks times the elements of a block (``depth_to_max_blocks``, ``kChunkSize``)."""


def _foreach(call: Call) -> tuple[Kernel, ...]:
    """Return the kernel of a foreach or a fused op, launched as often as its lists need."""
    lists = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, (list, tuple)) and a]
    lists = [a for a in lists if isinstance(a[0], torch.Tensor)]
    tensors = max(map(len, lists), default=1)
    elements = max((sum(t.numel() for t in a) for a in lists), default=0)
    # An op that is not in place returns one list more.
    depth = min(len(lists) + (call.returned is not None), len(_TENSORS_AT_ONCE))
    at_once = _TENSORS_AT_ONCE[max(depth, 1) - 1]
    launches = max(-(-tensors // at_once), -(-elements // _ELEMENTS_AT_ONCE), 1)
    return (Kernel("foreach", call.nbytes, launches=launches),)


# ---------------------------------------------------------------------------------------------------------
# Matrix units

_TILE = 128
"""Rows and columns of the result that one multiprocessor makes at a time, in the kernels of large products."""
_LEAST_TILE = 64
"""Rows and columns are padded to multiples of this."""
_SPLIT = 512
"""A product with a small result is split along the inner dimension, into parts of about this length (split-K)."""
_PRODUCTS = aten_names("mm addmm addmm_ bmm baddbmm baddbmm_")
_TRANSPOSED = 1.4
"""How much longer products in TF32 take if an operand does not lie along the inner dimension, as in gradients of linear
layers: ``ldmatrix`` transposes elements of 16 bits only (PTX ISA). Fitted to one step, of BERT-large with 512 tokens
on an A100 (``benchmarks/data/steps.jsonl``)."""


def _matrix_product(call: Call) -> tuple[Kernel, ...]:
    """Return one kernel whose FLOPs count padding.

    Where there are fewer tiles than multiprocessors, it takes as long as one tile does: ``block_flops``.
    """
    out = next(iter(call.writes), None)
    if out is None or out.dim() < 2 or not out.numel() or out.layout is not torch.strided:
        return (Kernel("matmul", call.nbytes, flops=call.flops),)
    rows, columns = out.shape[-2:]
    return (_tiled(call, call.nbytes, rows, columns, call.flops / (2 * out.numel())),)


def _tiled(call: Call, nbytes: float, rows: int, columns: int, inner: float) -> Kernel:
    padded = _up(rows, _LEAST_TILE) * _up(columns, _LEAST_TILE) / (rows * columns)
    if call.tf32 and call.func._schema.name in _PRODUCTS:
        left, right = [a for a in call.args if isinstance(a, torch.Tensor)][-2:]
        padded *= _TRANSPOSED if left.stride(-1) != 1 or right.stride(-2) != 1 else 1
    per_tile = 2 * _TILE * _TILE * min(inner, _SPLIT)
    return Kernel("matmul", nbytes, flops=call.flops * padded, block_flops=per_tile)


@kernels("bitsandbytes::gemm_4bit")
def _product_4bit(call: Call) -> tuple[Kernel, ...]:
    """Return the kernels of ``_dequant_linear_fallback``: scales and weight are dequantized, then multiplied.

    See ``kernel_workspaces.py`` for when that runs. bitsandbytes 0.50, ``backends/cuda/ops.py``.
    """
    activations, packed = call.args[0], call.args[1]
    weight = call["shapeB"][0] * call["shapeB"][1]
    dequantized = weight * activations.element_size()
    kernels_found = [Kernel("pointwise", tensor_bytes(packed) + dequantized, weight)]
    scales = call["absmax_8bit"]
    if scales is not None:  # one kernel dequantizes them to float32, and one adds the offset
        kernels_found += [Kernel("pointwise", n_bytes * scales.numel()) for n_bytes in (1 + 4, 4 + 4)]
    moved = tensor_bytes(activations) + dequantized + call.written_bytes
    inner = activations.shape[-1]
    return *kernels_found, _tiled(call, moved, activations.numel() // inner, call["shapeB"][0], inner)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
