"""Kernels of ops that work on rows: reductions, softmax, losses, norms, scans, attention."""

from __future__ import annotations

import torch

from sacplan.device.flops import ATTENTION
from sacplan.device.op_kernels import Call, Kernel, kernels, tensor_bytes
from sacplan.torch_compat.ops import aten_names
from sacplan.torch_compat.private import suggested_memory_format

# ---------------------------------------------------------------------------------------------------------
# Reductions (Reduce.cuh) and scans (ScanUtils.cuh)


@kernels(*aten_names("""
    sum mean prod amax amin aminmax max min argmax argmin any all norm linalg_vector_norm logsumexp var std var_mean
    std_mean nansum count_nonzero median nanmedian mode
"""))  # fmt: skip
def _reduction(call: Call) -> tuple[Kernel, ...]:
    """Most reductions read once. ``max(a, b)`` of two tensors has a reduction's name, and is elementwise."""
    largest = max((t.numel() for t in call.reads), default=0)
    kind = "pointwise" if any(t.numel() == largest for t in call.writes) else "reduction"
    return (Kernel(kind, call.nbytes),)


@kernels(*aten_names("cumsum cumsum_ cumprod cumprod_ cummax cummin logcumsumexp"))
def _scan(call: Call) -> tuple[Kernel, ...]:
    return (Kernel("scan", call.nbytes),)


# ---------------------------------------------------------------------------------------------------------
# Softmax (SoftMax.cu, PersistentSoftmax.cuh)

_WARP_ROW = 1024
"""Elements of a row that one warp holds in registers."""
_SHARED_ROW_BYTES = 48 * 1024
"""Bytes of a row that a block holds in shared memory (``sharedMemPerBlock``)."""
_CACHED_ROW_BYTES = 64 * 1024
"""Bytes of a row up to which all rows at work fit the L2 cache, so that reading one again costs little."""


def _row(tensor: torch.Tensor, dim: int) -> tuple[int, int, int]:
    """Return the elements and the bytes of a row along a dimension, and the number of rows."""
    length = tensor.shape[dim] if tensor.dim() else 1
    return length, length * tensor.element_size(), tensor.numel() // max(length, 1)


@kernels("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax")
def _softmax(call: Call) -> tuple[Kernel, ...]:
    """One block a row. A row that fits is read once; else three times: for the maximum, the sum and the result."""
    x = call.args[0]
    length, nbytes, rows = _row(x, call.args[1])
    reads = 1 if max(nbytes, length * call.writes[0].element_size()) <= _CACHED_ROW_BYTES else 3
    moved = reads * tensor_bytes(x) + call.written_bytes
    return (Kernel("softmax", moved, rows if length > _WARP_ROW else 0),)


@kernels("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def _softmax_backward(call: Call) -> tuple[Kernel, ...]:
    """The sum of the gradient over the row, then the result, for which the gradient is read again if it does not fit.

    The gradient of softmax needs the sum of gradient times output: a kernel of its own makes that product first.
    """
    grad, output = call.args[:2]
    length, nbytes, rows = _row(output, call.args[2])
    again = 0 if length <= _WARP_ROW or nbytes <= _SHARED_ROW_BYTES else tensor_bytes(grad)
    moved = tensor_bytes(grad) + tensor_bytes(output) + call.written_bytes
    last = Kernel("softmax_backward", moved + again, rows if length > _WARP_ROW else 0)
    if call.func._schema.name == "aten::_log_softmax_backward_data":
        return (last,)
    return Kernel("pointwise", tensor_bytes(grad) + 2 * tensor_bytes(output)), last


# ---------------------------------------------------------------------------------------------------------
# Losses (NLLLoss.cu)


@kernels("aten::nll_loss_forward")
def _nll_loss(call: Call) -> tuple[Kernel, ...]:
    """A reduced loss is made by one block of 32 threads, which walks over all rows; any other is a gather."""
    target, reduction = call.args[1], call.args[3]
    if reduction == 0 or call.args[0].dim() == 1:
        return (Kernel("gather", 3 * call.written_bytes, target.numel()),)
    return (Kernel("nll", elements=target.numel()),)


@kernels("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def _nll_loss_backward(call: Call) -> tuple[Kernel, ...]:
    """The gradient is filled with zeros; then one element of each row is written."""
    rows = call.args[2].numel()
    return Kernel("pointwise", call.written_bytes), Kernel("gather", 64 * rows, rows)


# ---------------------------------------------------------------------------------------------------------
# Norms (layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cu)


@kernels("aten::native_layer_norm", "aten::_fused_rms_norm")
def _layer_norm(call: Call) -> tuple[Kernel, ...]:
    """One block a row, which reads the row for its moments and again, from a cache, for the result."""
    return (Kernel("norm", call.nbytes),)


@kernels("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward")
def _layer_norm_backward(call: Call) -> tuple[Kernel, ...]:
    """Two kernels that read gradient and input: for the input's gradient, and for those of weight and bias."""
    grad, x = tensor_bytes(call.args[0]), tensor_bytes(call.args[1])
    mask = call["output_mask"]
    launched = [Kernel("norm_backward", grad + 2 * x)] if mask[0] else []
    if any(mask[1:]):
        launched.append(Kernel("norm_backward", grad + x))
    return tuple(launched)


@kernels("aten::native_group_norm")
def _group_norm(call: Call) -> tuple[Kernel, ...]:
    """Moments, one block a group; scale and shift of each channel; then elementwise, with both of them broadcast."""
    x = call.args[0]
    nbytes, elements = tensor_bytes(x), x.numel()
    return Kernel("moments", nbytes, elements), Kernel("pointwise"), Kernel("strided", 2 * nbytes, elements)


@kernels("aten::native_group_norm_backward")
def _group_norm_backward(call: Call) -> tuple[Kernel, ...]:
    """Sums of each channel, one block for each; those of each group; the input's gradient; those of weight and bias.

    The last one has a thread for each channel, which walks over the batch.
    """
    x, batch = call.args[1], call.args[5]
    nbytes, elements = tensor_bytes(x), x.numel()
    return (
        Kernel("moments", 2 * nbytes, elements),
        Kernel("pointwise"),
        Kernel("strided", 3 * nbytes, elements),
        Kernel("batch_walk", elements=batch),
    )


@kernels(
    *aten_names(
        "native_batch_norm _native_batch_norm_legit _batch_norm_with_update batch_norm cudnn_batch_norm"
    )
)
def _batch_norm(call: Call) -> tuple[Kernel, ...]:
    """In training, moments of each channel first; then elementwise.

    PyTorch's own kernel has one block for a channel, unless the tensor is channels last (``Normalization.cuh``). cuDNN
    has more.
    """
    x = call.args[0]
    nbytes = tensor_bytes(x)
    if not call.arguments.get("training", True):
        return (Kernel("pointwise", nbytes + call.written_bytes),)
    moments = _moments_of_channels(call, x, nbytes, passes=1) or Kernel("reduction", nbytes)
    return moments, Kernel("norm", nbytes + call.written_bytes)


@kernels(*aten_names("native_batch_norm_backward batch_norm_backward cudnn_batch_norm_backward"))
def _batch_norm_backward(call: Call) -> tuple[Kernel, ...]:
    """Two sums for each channel, from gradient and input; then the input's gradient, from both again.

    PyTorch's own kernel does both in the one block of a channel, see ``_batch_norm``.
    """
    nbytes = tensor_bytes(call.args[0])
    if whole := _moments_of_channels(call, call.args[1], 5 * nbytes, passes=2):
        return (whole,)
    return Kernel("reduction", 2 * nbytes), Kernel("norm_backward", 3 * nbytes)


def _moments_of_channels(call: Call, x: torch.Tensor, nbytes: int, *, passes: int) -> Kernel | None:
    """Return the kernel of PyTorch that walks over each channel with one block; None where another kernel runs."""
    if "cudnn" in call.func._schema.name or x.dim() < 3 or x.stride(1) == 1 or not x.is_contiguous():
        return None
    return Kernel("moments", nbytes, passes * x.numel(), block_elements=passes * x.numel() / x.shape[1])


# ---------------------------------------------------------------------------------------------------------
# Attention (transformers/cuda/attention.cu and attention_backward.cu)

_QUERY_TILE = 128
"""Queries that one block works on."""
# What the softmax of one score takes in addition to its products, which grow with the head, in FLOPs of the matrix
# units. FlashAttention-2 (Dao, 2023), figure 5: 190 TFLOP/s on an A100 with heads of 64, 228 with 128. It takes twice
# as much in the backward pass. In FlashAttention-3's figures for an H100 this kernel has 85 and 150; cuDNN loses a
# third there with heads of 64, which is left out: no published step shows it.
_SOFTMAX_FLOPS = 128


@kernels(*ATTENTION)
def _attention(call: Call) -> tuple[Kernel, ...]:
    return (_attention_kernel(call, backward=False),)


@kernels(*(f"{name}_backward" for name in ATTENTION))
def _attention_backward(call: Call) -> tuple[Kernel, ...]:
    """The row sums of gradient times output; the gradients of keys and values; the query's gradient, from float32."""
    query, grad = call["query"], call.args[0]
    return (
        Kernel("pointwise", 2 * tensor_bytes(grad)),
        _attention_kernel(call, backward=True),
        Kernel("pointwise", 4 * query.numel() + tensor_bytes(query)),
    )


def _attention_kernel(call: Call, *, backward: bool) -> Kernel:
    """Return the kernel of a call. Under a causal mask blocks above the diagonal are left out, about half of all."""
    query, key = call["query"], call["key"]
    kind = next((k for k in ("cudnn", "efficient") if k in call.name), "flash") + "_attention"
    share = 0.5 + 0.5 / max(1, key.shape[-2] / _QUERY_TILE) if call["is_causal"] else 1.0
    flops = call.flops * share
    if "flash" in kind:
        # In addition to 10 (backward) or 4 FLOPs for each element of a head.
        softmax = _SOFTMAX_FLOPS * (2 / 10 if backward else 1 / 4)
        flops *= (1 + softmax / query.shape[-1]) / (1 + softmax / 128)  # rates are those of heads of 128
    # A block works on some queries, in the backward pass on some keys, of one head.
    length = key.shape[-2] if backward else query.shape[-2]
    blocks = query.shape[0] * query.shape[1] * -(-length // _QUERY_TILE)
    kind += "_backward" if backward else ""
    return Kernel(kind, call.nbytes, flops=flops, block_flops=flops / max(1, blocks))


# ---------------------------------------------------------------------------------------------------------
# Convolutions and recurrent layers (cuDNN)

_GROUP_WIDTHS = (4, 8, 16, 32)
"""Channels of a group for which there are kernels of grouped convolutions on matrix units."""


@kernels("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward")
def _recurrent(call: Call) -> tuple[Kernel, ...]:
    launches = 2 if call.func._schema.name.endswith("backward") else 1
    return (Kernel("convolution", call.nbytes, flops=call.flops, launches=launches),)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def in_channels_last(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether images [N, C, H, W] are convolved in channels last: if input or filters suggest it (``ConvUtils.h``)."""
    return input.dim() == 4 and torch.channels_last in map(suggested_memory_format, (input, weight))


@kernels("aten::convolution", "aten::convolution_backward", "aten::cudnn_convolution")
def _convolution(call: Call) -> tuple[Kernel, ...]:
    """One kernel in the forward pass; one for each gradient in the backward pass, and a sum for the bias's.

    Matrix units take channels last; other tensors are transposed before and after ("Data and Filter Formats" in the
    guide of cuDNN; with TF32, profiles show ``nchwToNhwcKernel<float, ...>``). If one operand is in channels last,
    PyTorch copies the others (``Convolution.cpp``). Without matrix units, float32 convolutions of 3 x 3 are Winograd's:
    a tile of 2 x 2 results takes 16 products for 36 (Lavin and Gray, 2015). Depthwise convolutions of contiguous
    tensors are PyTorch's own.
    """
    a = call.arguments
    x, weight = a["input"] if "input" in a else a["self"], a["weight"]
    backward = "output_mask" in a
    y, mask = (a["grad_output"], a["output_mask"]) if backward else (call.writes[0], (True, False, False))
    n = sum(mask[:2])  # kernels: the output, or the gradients of input and weight
    depthwise = weight.shape[1] == 1 and a["groups"] > 1
    kind = "convolution"
    if depthwise:
        kind = "depthwise_backward" if backward else "pointwise"
    elif a["groups"] > 1 and weight.shape[1] in _GROUP_WIDTHS:
        kind = "grouped_convolution"
    elif a["groups"] > 1:
        kind = "padded_convolution_backward" if backward else "padded_convolution"
    moved = sum(map(tensor_bytes, (x, weight, y)))
    flops = 0 if depthwise else call.flops / max(1, n)
    on_matrix_units = x.element_size() == 2 or call.tf32
    channels_last = x.stride(1) == 1 or in_channels_last(x, weight)
    if kind == "convolution" and x.dtype == torch.float32 and not (on_matrix_units or channels_last):
        filters = [*weight.shape[2:], *a["stride"], *a["dilation"]]
        flops *= 16 / 36 if filters == [3, 3, 1, 1, 1, 1] else 1
    launched = [Kernel(kind, moved, flops=flops)] * n
    if mask[2]:
        launched.append(Kernel("reduction", tensor_bytes(y)))
    if in_channels_last(x, weight):
        read = (x, weight, y) if backward else (x, weight)
        launched += [Kernel("strided", 2 * tensor_bytes(t)) for t in read if not _is_channels_last(t)]
    elif on_matrix_units and not channels_last and not depthwise:
        launched.append(Kernel("strided", 2 * (tensor_bytes(y) + n * tensor_bytes(x)), launches=1 + n))
    return tuple(launched)
