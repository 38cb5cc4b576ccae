"""Temporaries that a CUDA kernel allocates inside, where no dispatch mode sees them: formulas over shapes.

To add one, decorate a function with the names of its ops. It gets the arguments of the call by name and the
:class:`DeviceSpec`, and returns the bytes of each allocation that is alive at the kernel's peak:

    @workspace("aten::embedding_dense_backward")
    def _embedding_backward(a, spec):
        return (4 * a["indices"].numel() * a["indices"].element_size(),)

Sources: PyTorch's ``flash_attn/flash_api.cpp``, ``mem_eff_attention/kernel_forward.h``, ``attention_backward.cu``,
``Embedding.cu``, ``Indexing.cu``, ``layer_norm_kernel.cu``; ``backends/cuda/ops.py`` of bitsandbytes. What cuDNN
allocates is not published: convolutions and attention are as measured on an H100 with cuDNN 9.19; recurrent layers and
batch norm count as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sacplan.device.cublas import PRODUCTS, library_workspace_bytes, workspaces_stay
from sacplan.device.devices import DeviceSpec
from sacplan.device.reductions import reduction_bytes
from sacplan.device.row_kernels import in_channels_last
from sacplan.torch_compat.calls import Call
from sacplan.torch_compat.ops import RuleTable

Arguments = Mapping[str, Any]
OUTPUTS = "outputs"
"""Key of what the call returned, among the arguments of a formula."""

workspace: RuleTable[Callable[[Arguments, DeviceSpec], Sequence[int]]] = RuleTable()
"""By schema name."""


def kernel_workspace_bytes(call: Call, spec: DeviceSpec) -> int:
    """Return the bytes that the kernel of an op allocates for itself while it runs on ``spec``, without its outputs.

    Each allocation is rounded as the allocator does. 0 for ops without a formula and on a CPU.
    """
    if spec.kind != "cuda":
        return 0
    name = call.func._schema.name
    if (short := name.removeprefix("aten::")) in ACCUMULATOR_BYTES:
        a = call.arguments
        return reduction_workspace_bytes(short, a["x"] if "x" in a else a["self"], a.get("dim"), spec)
    formula = workspace.get(name)
    if formula is None:
        # cuBLAS: a workspace that stays (until torch 2.14) is counted once, in ``library_workspaces.py``.
        if name in PRODUCTS and not workspaces_stay():
            return spec.round_up(library_workspace_bytes(spec))
        return 0
    allocations = formula({**call.arguments, OUTPUTS: call.returned}, spec)
    return sum(spec.round_up(nbytes) for nbytes in allocations if nbytes > 0)


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _copy_to_bshd(tensor: torch.Tensor) -> int:
    """Return the bytes of the copy that a [B, H, S, D] tensor needs, 0 if it lies in memory as [B, S, H, D]."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.nbytes


@workspace("aten::_scaled_dot_product_flash_attention_backward")
def _flash_backward(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """``mha_bwd`` in ``flash_api.cpp``. All sums are in float32, with Sq rounded up to 128 rows and D to 32 or 64.

    - accumulator of dQ: 4 B Sq H D bytes; with deterministic algorithms one for each of ceil(SMs / (B H)) splits;
    - softmax_d, the row sums of dO * O: 4 B H Sq;
    - with grouped queries, dK and dV for all query heads: B Sk H D elements each, before they are added up by group;
    - copies of dO and O unless they lie in memory as [B, S, H, D].
    """
    grad_out, query, key, out = a["grad_out"], a["query"], a["key"], a["out"]
    batch, heads, seq_q, dim = query.shape
    heads_k, seq_k = key.shape[1], key.shape[2]
    rows = _ceil_to(seq_q, 128)
    splits = 1
    if torch.are_deterministic_algorithms_enabled():
        splits = -(-spec.sm_count // (batch * heads))
    accumulator = 4 * batch * rows * heads * _ceil_to(dim, 32 if dim <= 128 else 64) * splits
    expanded = query.element_size() * batch * seq_k * heads * dim if heads != heads_k else 0
    return (
        accumulator,
        4 * batch * heads * rows,
        expanded,
        expanded,
        _copy_to_bshd(grad_out),
        _copy_to_bshd(out),
    )


@workspace("aten::_scaled_dot_product_efficient_attention")
def _efficient_forward(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """Count the float32 accumulator of the output, 4 B Sq H Dv bytes, for half heads over 128 (``kernel_forward.h``).

    Smaller heads fit one block of keys and are accumulated in registers; a float32 output is its own accumulator.
    """
    query, value = a["query"], a["value"]
    # Without ``kNeedsOutputAccumulatorBuffer``: a float32 output, or an accumulator in registers.
    if query.element_size() == 4 or max(query.shape[-1], value.shape[-1]) <= 128:
        return ()
    batch, heads, seq_q, _ = query.shape
    return (4 * batch * seq_q * heads * value.shape[-1],)


@workspace("aten::_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """Count the workspace of ``kernel_backward.h``, delta, and a copy of grad_out (``attention_backward.cu``).

    The workspace has dQ in float32, with Sq and D rounded up to 64: 4 B H Sq D bytes. For half heads over 128 it has dK
    and dV, too. Delta, the row sums of dO * O, has 4 B H Sq bytes.
    """
    grad_out, query, key, value = a["grad_out_"], a["query"], a["key"], a["value"]
    batch, heads, seq_q, dim = query.shape
    dim_v = value.shape[-1]
    accumulators = 4 * batch * heads * _ceil_to(seq_q, 64) * _ceil_to(dim, 64)
    # ``kNeedsAccumGradK``: half outputs that do not fit the registers are summed in float32 outside of them.
    if query.element_size() == 2 and max(dim, dim_v) > 128:
        accumulators += (
            4 * batch * heads * _ceil_to(key.shape[2], 64) * (_ceil_to(dim, 64) + _ceil_to(dim_v, 64))
        )
    return (accumulators, 4 * batch * heads * seq_q, _copy_to_bshd(grad_out))


@workspace("aten::_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """As measured: dQ in float32 and the row sums; with grouped queries dK and dV for all query heads."""
    query, key = a["query"], a["key"]
    batch, heads, seq_q, dim = query.shape
    expanded = query.element_size() * batch * heads * key.shape[2] * dim if heads != key.shape[1] else 0
    return (4 * batch * heads * seq_q * dim, 4 * batch * heads * seq_q, expanded, expanded)


@workspace("aten::embedding_dense_backward")
def _embedding_backward(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """Above 3072 indices, the kernel that sorts (``EmbeddingBackwardKernel.cu``), with float32 partial rows.

    For n indices and V rows there are at most s = min(n, V) segments of equal indices, and at most p = n / 10 + s
    partial rows. Buffers of indices: those that are sorted, their order and the segments' offsets have n; two more s;
    the partial rows' offsets p. Up to 3072 indices another kernel runs, which needs nothing.
    """
    grad_out, indices, rows = a["grad_output"], a["indices"], a["num_weights"]
    count = indices.numel()
    if count <= 3072:
        return ()
    segments, size = min(count, rows), indices.element_size()
    partial_rows = count // 10 + segments
    buffers = (count, count, count, segments, segments, partial_rows)
    copy = 0 if grad_out.is_contiguous() else grad_out.nbytes
    return (*(size * n for n in buffers), 4 * partial_rows * grad_out.shape[-1], copy)


@workspace("aten::native_layer_norm", "aten::_fused_rms_norm")
def _norm(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """A copy of an input that is not contiguous (``layer_norm_kernel.cu``)."""
    return (0 if a["input"].is_contiguous() else a["input"].nbytes,)


@workspace("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward")
def _norm_backward(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """Copies of input and gradient where they are not contiguous."""
    return [t.nbytes for t in (a["grad_out"], a["input"]) if not t.is_contiguous()]


def _wide(x: torch.Tensor) -> int:
    return max(x.element_size(), 4)


ACCUMULATOR_BYTES: Mapping[str, Callable[[torch.Tensor], int]] = {
    **dict.fromkeys(("sum", "nansum", "mean", "linalg_vector_norm"), _wide),
    **dict.fromkeys(("amax", "amin"), torch.Tensor.element_size),
    # Mean, sum of squares and two counts (``WelfordOps`` in SharedReduceOps.h).
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), lambda x: 16),
}
"""Bytes of one accumulator, by reduction."""


def reduction_workspace_bytes(
    name: str, x: torch.Tensor, dims: Sequence[int] | None, spec: DeviceSpec
) -> int:
    """Return the bytes that blocks share to make one result (``reductions.py``); not linear in the input's size.

    Args:
        name: of the op, a key of ``ACCUMULATOR_BYTES``.
        x: the input.
        dims: the dimensions that are reduced; None or empty: all.
        spec: the device.
    """
    reduced = {dim % max(x.dim(), 1) for dim in dims or ()}
    return sum(map(spec.round_up, reduction_bytes(x, reduced, ACCUMULATOR_BYTES[name](x), spec)))


@workspace("aten::logsumexp", "aten::multinomial")
def _as_large_as_the_input(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """The exponentials of the input, or random numbers for each of its elements."""
    return (a["self"].nbytes,)


@workspace("aten::_softmax_backward_data")
def _softmax_backward(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """Gradient times output (``SoftMax.cu``). The gradient of log-softmax needs no such product."""
    return (a["grad_output"].nbytes,)


@workspace("aten::native_group_norm")
def _group_norm(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """With a weight or a bias, scale and shift of each channel of each sample in float32 (``group_norm_kernel.cu``)."""
    if a["weight"] is None and a["bias"] is None:
        return ()
    return (4 * a["N"] * a["C"],) * 2


@workspace("aten::native_group_norm_backward")
def _group_norm_backward(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """Two sums of each channel in float32, its scale if there is a weight, and two factors of each group."""
    channels, groups = 4 * a["N"] * a["C"], 4 * a["N"] * a["group"]
    return (*(channels,) * (2 if a["weight"] is None else 3), groups, groups)


@workspace("aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index_put")
def _index_put(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """With accumulate: four int64 buffers over the indices, to sort them (Indexing.cu; from memory)."""
    indices = [i for i in a["indices"] if isinstance(i, torch.Tensor)]
    # Without accumulate the last write wins, and nothing has to be sorted.
    if not a["accumulate"] or not indices:
        return ()
    return (4 * 8 * max(i.numel() for i in indices),)


_FUSED_ROWS = 4
"""Rows of activations up to which bitsandbytes never dequantizes a weight of its own accord."""


@workspace("bitsandbytes::gemm_4bit")
def _gemm_4bit(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """Count the dequantized weight, of the type of the activations, and with double quantization its scales twice.

    That is ``_dequant_linear_fallback`` in bitsandbytes' ``backends/cuda/ops.py`` (0.50): the scales are dequantized to
    float32, the offset is added out of place, and both stay until the product has run. Up to 4 rows a fused kernel
    runs, which needs nothing. From 5 to 512 rows (1,536 for small weights) measured thresholds of each architecture
    choose between the two; here the fallback is taken, which is an upper bound.
    """
    activations, scales = a["A"], a["absmax_8bit"]
    columns = activations.shape[-1]
    if columns % a["blocksize"] == 0 and activations.numel() // columns <= _FUSED_ROWS:
        return ()
    weight = a["shapeB"][0] * a["shapeB"][1] * activations.element_size()
    library = 0 if workspaces_stay() else library_workspace_bytes(spec)
    if scales is None:
        return (weight, library)
    return (4 * scales.numel(), 4 * scales.numel(), weight, library)


@workspace("aten::convolution", "aten::convolution_backward")
def _convolution(a: Arguments, spec: DeviceSpec) -> Sequence[int]:
    """Count copies of operands that are not in the memory format of the kernel, and cuDNN's own workspace."""
    tensors = [t for t in (a.get("grad_output"), a["input"], a["weight"]) if t is not None and t.dim() >= 3]
    last = in_channels_last(a["input"], a["weight"])
    memory_format = torch.channels_last if last else torch.contiguous_format
    copies = [t.nbytes for t in tensors if not t.is_contiguous(memory_format=memory_format)]
    return [*copies, *_cudnn_convolution(a, last)]


_WITHOUT_COPIES = {False: 4, True: 8}
"""cuDNN multiplies without copies if the pixels of an image are a multiple of this; keys: whether it goes backward."""


def _cudnn_convolution(a: Arguments, channels_last: bool) -> Sequence[int]:
    """Return the bytes of each workspace that cuDNN takes for a convolution of half types, as measured on an H100.

    Tensor cores want channels-last tensors with a multiple of 8 channels, and cuDNN copies what has another layout:
    input, output and weight. A 1x1 convolution of stride 1 needs no copies if its number of pixels is a multiple of
    ``_WITHOUT_COPIES``; its backward pass makes the weight's gradient in float32 for each image instead. Workspaces of
    other types and of depthwise convolutions are not known, and count as none.
    """
    x, weight, groups, backward = a["input"], a["weight"], a["groups"], "grad_output" in a
    batch, channels = x.shape[:2]
    is_depthwise = 1 < groups == channels
    if x.element_size() != 2 or is_depthwise:
        return ()
    area, pixels = weight.shape[2:].numel(), x.shape[2:].numel()
    padded = channels if groups > 1 else _ceil_to(channels, 8)
    copied = 2 * batch * padded * pixels
    weights = (
        2 * weight.numel() // weight.shape[1] * (padded // groups if not a["transposed"] else weight.shape[1])
    )
    if channels_last:
        return (copied, weights) if padded != channels else ()
    if area == 1 and set(a["stride"]) == {1} and pixels % _WITHOUT_COPIES[backward] == 0:
        return (4 * batch * weight.numel(),) if backward else ()
    out = a["grad_output"] if backward else a[OUTPUTS]
    return copied, out.nbytes, weights if area > 1 else 0
