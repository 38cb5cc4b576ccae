"""The ops that CUDA runs in other kernels than a CPU, attention aside: what each is routed to.

``ROUTES`` are Python kernels for the dispatch key ``AutogradCPU``, one for each op whose choice of kernel
torch makes in C++ by looking at the device. All are CompositeImplicitAutograd in torch, so the original is
still there under that key. ``fakes()`` are fake implementations of kernels whose own meta formula looks at the
device, or is missing.

Sources: PyTorch's ``Dropout.cpp``, ``layer_norm.cpp``, ``layer_norm_kernel.cu``, ``SoftMax.cpp``,
``Normalization.cpp`` (``_select_batch_norm_backend``), ``RNN.cpp``.

Private PyTorch APIs, used on 2.13 and present in 2.11 to 2.15: ``torch._C._AutoDispatchBelowAutograd``,
``OpOverload._op_dk``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sacplan._device import cudnn_rnn
from sacplan._device.attention import routed_attention
from sacplan._device.devices import DeviceSpec

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)

Route = Callable[..., Any]
FakeKernel = Callable[..., Any]


def composite(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """torch's own C++ kernel. Not ``op.decompose``: for dropout that is a Python decomposition."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _dropout(spec: DeviceSpec, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0.0 < p < 1.0 and input.numel() > 0:
        # Whether a gradient is needed does not matter: the mask is made, and is gone at once if not.
        return aten.native_dropout.default(input, p, train)[0]
    return composite(aten.dropout.default, input, p, train)


class _FusedRMSNorm(torch.autograd.Function):
    """``aten._fused_rms_norm`` with CUDA's derivative formula; on a CPU the op is a composite."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, rstd = aten._fused_rms_norm.default(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape = shape
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        grad_input, grad_weight = aten._fused_rms_norm_backward.default(
            grad_out, input, ctx.shape, rstd, weight, wanted
        )
        return grad_input, None, grad_weight, None


def _rms_norm(
    spec: DeviceSpec,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    shape = list(normalized_shape)
    channels_last = (
        input.dim() in (4, 5)
        and not input.is_contiguous()
        and (
            input.is_contiguous(memory_format=torch.channels_last)
            if input.dim() == 4
            else input.is_contiguous(memory_format=torch.channels_last_3d)
        )
    )
    if (
        channels_last
        or input.is_complex()
        or (weight is not None and weight.dtype != input.dtype)
        or list(input.shape[input.dim() - len(shape) :]) != shape
    ):
        return composite(aten.rms_norm.default, input, shape, weight, eps)
    return _FusedRMSNorm.apply(input, shape, weight, eps)


def _softmax(
    spec: DeviceSpec, op: Any, fused: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return fused(input, dim, True)
    return composite(op, input, dim, dtype)


def _route_softmax(spec: DeviceSpec, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _softmax(spec, aten.softmax.int, aten._softmax.default, *args, **kwargs)


def _route_log_softmax(spec: DeviceSpec, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _softmax(spec, aten.log_softmax.int, aten._log_softmax.default, *args, **kwargs)


def takes_cudnn_batch_norm(
    spec: DeviceSpec,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    cudnn_enabled: bool = True,
) -> bool:
    """Whether batch norm over ``input`` [N, C, ...] goes to cuDNN, else to torch's own kernel."""
    return (
        spec.capability is not None
        and cudnn_enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and (running_mean is None) == (running_var is None)
        and (running_mean is not None or training)
        and input.dim() >= 3
        and input.shape[0] <= (880801 if training else 65535)
        and input.numel() < 2**31 - 1
    )


def _batch_norm(
    spec: DeviceSpec,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    given = (input, weight, bias, running_mean, running_var, training)
    # torch's fake gives the statistics [C] the input's type (CUDA: the weight's), and no reserve. That is what
    # cuDNN's plain kernels have; the fused ones for channels-last halves may have a bit for each element.
    if input.numel() and takes_cudnn_batch_norm(spec, *given, cudnn_enabled=cudnn_enabled):
        return aten.cudnn_batch_norm.default(*given, momentum, eps)[0]
    return composite(aten.batch_norm.default, *given, momentum, eps, cudnn_enabled)


def _rnn(mode: int) -> Route:
    def route(spec: DeviceSpec, *args: Any, **kwargs: Any) -> Any:
        return cudnn_rnn.run(spec, mode, *args, **kwargs)

    return route


# Registered while a device of kind "cuda" is active.
ROUTES: dict[str, tuple[torch._ops.OpOverload, Route]] = {
    "scaled_dot_product_attention": (aten.scaled_dot_product_attention.default, routed_attention),
    "dropout": (aten.dropout.default, _dropout),
    "rms_norm": (aten.rms_norm.default, _rms_norm),
    "softmax.int": (aten.softmax.int, _route_softmax),
    "log_softmax.int": (aten.log_softmax.int, _route_log_softmax),
    "batch_norm": (aten.batch_norm.default, _batch_norm),
    "rnn_relu.input": (aten.rnn_relu.input, _rnn(cudnn_rnn.RELU)),
    "rnn_tanh.input": (aten.rnn_tanh.input, _rnn(cudnn_rnn.TANH)),
    "lstm.input": (aten.lstm.input, _rnn(cudnn_rnn.LSTM)),
    "gru.input": (aten.gru.input, _rnn(cudnn_rnn.GRU)),
}


# ---------------------------------------------------------------------------------------------------------
# Fake implementations: (mode, func, *args) -> fake outputs, or NotImplemented for torch's own


def _layer_norm(mode: Any, func: Any, input: torch.Tensor, shape: Sequence[int], *rest: Any) -> Any:
    """[..., *shape] -> the same, with statistics [..., 1] in the accumulation type, as CUDA has them."""
    if input.dtype not in _HALF:
        return NotImplemented
    stats = [*input.shape[: input.dim() - len(shape)], *[1] * len(shape)]
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        input.new_empty(stats, dtype=torch.float32),
        input.new_empty(stats, dtype=torch.float32),
    )


FAKES: dict[torch._ops.OpOverload, FakeKernel] = {
    aten.native_layer_norm.default: _layer_norm,
    aten._cudnn_rnn.default: cudnn_rnn.fake_forward,
    aten._cudnn_rnn_backward.default: cudnn_rnn.fake_backward,
}
"""Used while a CUDA device is active; what they do not know is left to torch's own."""
