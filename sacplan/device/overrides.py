"""The ops that CUDA runs in other kernels than a CPU, and what emulates each of them.

To add one, decorate a function, here or in a module that ``kernels.py`` imports:

    @override(aten.dropout.default)             # a Python kernel for the dispatch key AutogradCPU
    def _dropout(spec, input, p, train): ...

    @fake_kernel(aten.native_layer_norm.default)  # fake outputs, where torch's own meta formula is another device's
    def _layer_norm(mode, func, input, shape, *rest): ...

An override gets the active :class:`DeviceSpec` and the op's arguments. Every overridden op is
CompositeImplicitAutograd in torch, so the original is still there: ``run_composite`` calls it. A fake kernel may
return NotImplemented for torch's own. Both are used only while a device of kind ``"cuda"`` is active. Attention
and recurrent layers have modules of their own, ``attention.py`` and ``cudnn_rnn.py``.

Sources: PyTorch's ``Dropout.cpp``, ``layer_norm.cpp``, ``layer_norm_kernel.cu``, ``SoftMax.cpp``,
``Normalization.cpp`` (``_select_batch_norm_backend``).

Private PyTorch API, tried on 2.11 and 2.13: ``torch._C._AutoDispatchBelowAutograd``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sacplan.device.devices import DeviceSpec
from sacplan.torch_compat.fake_kernels import FakeKernel
from sacplan.torch_compat.ops import RuleTable, run_composite

aten = torch.ops.aten

HALF_TYPES = (torch.float16, torch.bfloat16)

override: RuleTable[Callable[..., Any]] = RuleTable()
"""(spec, *args, **kwargs) -> outputs, by ``OpOverload``."""
fake_kernel: RuleTable[FakeKernel] = RuleTable()
"""(mode, func, *args, **kwargs) -> fake outputs or NotImplemented, by ``OpOverload``."""


# On a CPU dropout is a composite that keeps its noise in the input's type. CUDA keeps a mask of one byte an element
# (``Dropout.cpp``). Without a mask (p is 0 or 1, evaluation, no elements), both run the composite.
@override(aten.dropout.default)
def _dropout(spec: DeviceSpec, input: torch.Tensor, p: float, train: bool) -> Any:
    if train and 0.0 < p < 1.0 and input.numel() > 0:
        # The mask is made whether or not a gradient is needed; without one it is freed at once.
        return aten.native_dropout.default(input, p, train)[0]
    return run_composite(aten.dropout.default, input, p, train)


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
        # At autograd's key the composite kernel would take the op apart before the fake mode sees it.
        with torch._C._AutoDispatchBelowAutograd():
            out: torch.Tensor
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


@override(aten.rms_norm.default)
def _rms_norm(
    spec: DeviceSpec,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    # The conditions of ``rms_norm_symint`` in ``layer_norm.cpp`` for the composite, which keeps several float32
    # tensors of the input's size where the fused kernel keeps the input and one number per row.
    # The last condition is an error of the call: the composite raises torch's own.
    shape = list(normalized_shape)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(input.dim())
    if (
        (last is not None and not input.is_contiguous() and input.is_contiguous(memory_format=last))
        or input.is_complex()
        or (weight is not None and weight.dtype != input.dtype)
        or list(input.shape[input.dim() - len(shape) :]) != shape
    ):
        return run_composite(aten.rms_norm.default, input, shape, weight, eps)
    fused: Any = _FusedRMSNorm
    return fused.apply(input, shape, weight, eps)


def _softmax(op: Any, fused: Any, spec: DeviceSpec, input: torch.Tensor, dim: int, dtype: Any = None) -> Any:
    # CUDA casts float16 inside the kernel (``half_to_float``, ``SoftMax.cpp``). Any other cast
    # comes first, in the composite, and makes a copy.
    if input.dtype == torch.float16 and dtype == torch.float32:
        return fused(input, dim, True)
    return run_composite(op, input, dim, dtype)


override[aten.softmax.int] = functools.partial(_softmax, aten.softmax.int, aten._softmax.default)
override[aten.log_softmax.int] = functools.partial(_softmax, aten.log_softmax.int, aten._log_softmax.default)


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
    # The conditions of ``_select_batch_norm_backend``, in this order:
    # - a CUDA device (not ROCm) on which the user has left cuDNN on;
    # - scale and shift, without which cuDNN has no kernel;
    # - no bfloat16, and float16 only with float32 parameters;
    # - running statistics both or neither, and neither only in training, where the batch has its own;
    # - "spatial" mode, that is at least one dimension after the channels; [N, C] runs in torch's kernel;
    # - batch sizes and element counts that cuDNN's kernels can index.
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


@override(aten.batch_norm.default)
def _batch_norm(spec: DeviceSpec, *args: Any) -> Any:
    *given, momentum, eps, cudnn_enabled = args
    # torch's fake kernel gives the statistics [C] the input's type (CUDA: the weight's), and no reserve. cuDNN's
    # plain kernels have none either; the fused ones for channels-last half types may keep a bit per element.
    # An empty input has a path of its own in the composite.
    if cudnn_enabled and given[0].numel() and takes_cudnn_batch_norm(spec, *given):
        return aten.cudnn_batch_norm.default(*given, momentum, eps)[0]
    return run_composite(aten.batch_norm.default, *args)


@fake_kernel(aten.native_layer_norm.default)
def _layer_norm(mode: Any, func: Any, input: torch.Tensor, shape: Sequence[int], *rest: Any) -> Any:
    """Make fake output, mean and rstd: statistics [..., 1] in the accumulation type, for an input [..., *shape]."""
    # In float32 and float64 the accumulation type is the input's: torch's own formula is right.
    if input.dtype not in HALF_TYPES:
        return NotImplemented
    stats = [*input.shape[: input.dim() - len(shape)], *[1] * len(shape)]
    return (
        torch.empty_like(input, memory_format=torch.contiguous_format),
        input.new_empty(stats, dtype=torch.float32),
        input.new_empty(stats, dtype=torch.float32),
    )
