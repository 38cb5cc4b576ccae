"""Which kernels a device runs, emulated on fake CPU tensors, so that autograd keeps what it keeps there.

:func:`attention_backend` is the one table that says which attention kernel a CUDA device takes;
:func:`device_kernels` routes attention, dropout and the norms to the kernels that CUDA has;
:func:`fake_device` is that together with FakeTensorMode; :func:`kernel_workspace_bytes` gives the temporaries
that a kernel allocates inside, where no dispatch mode sees them.

How: Python kernels for the dispatch key ``AutogradCPU``. A function mode would miss the calls inside
``F.multi_head_attention_forward``, and the key ``CPU`` would lose autograd. The statistics of layer norm come
out of a meta formula that looks at the device, so they are given by a fake implementation. Group norm needs
none: its statistics have the input's type on both sides.

Sources: PyTorch's ``aten/src/ATen/native/transformers/{attention.cpp,cuda/sdp_utils.cpp}``, ``Dropout.cpp``,
``layer_norm.cpp``, ``layer_norm_kernel.cu``, ``group_norm.cpp``, ``flash_attn/flash_api.cpp``, and pull
request #174245 (cuDNN's dropout).

Known gaps, all of them small or not knowable without the device:

- autocast: CPU's cast lists are used; CUDA's differ (layer_norm, softmax, sum and others go up to float32);
- math attention: ``attn.add_(mask)`` becomes out-of-place under a dispatch mode (one score-sized temporary);
- batch norm: statistics and reserve of cuDNN; convolution, RNN and cuDNN forward workspaces count as 0;
- cuBLAS workspaces, which are the allocator's matter and not an op's;
- ``dropout_`` and feature dropout are composites on both sides and left alone; LSTM and GRU stay mkldnn;
- efficient attention's backward on float32 keeps one more product for a moment, about as large as its
  workspace; the partial sums of layer norm's backward;
- second derivatives through ``rms_norm``, ``torch.func`` transforms over it, and inference mode (which skips
  the autograd keys) are not routed.

Private PyTorch APIs, used on 2.13 and present in 2.11 to 2.15: ``torch._subclasses.FakeTensorMode``,
``torch._subclasses.fake_impls.op_implementations_dict``, ``torch._C._AutoDispatchBelowAutograd``,
``torch._C._get_sdp_priority_order``, ``Library._destroy``, ``OpOverload._op_dk``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch._refs  # registers torch's own fake layer norm, which must be there before it is replaced
import torch.nn.functional as F
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sacplan._trace.devices import DeviceSpec, resolve_device
from sacplan.errors import DeviceError

aten = torch.ops.aten

Backend = Literal["flash", "efficient", "cudnn", "math"]
ALL_BACKENDS: tuple[Backend, ...] = ("flash", "efficient", "math", "cudnn")
"""torch's own order of preference, before cuDNN is promoted."""

_HALF = (torch.float16, torch.bfloat16)


def torch_version() -> tuple[int, int]:
    """Major and minor of the torch that is running; its kernels are the ones that are emulated."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


# ---------------------------------------------------------------------------------------------------------
# Which attention kernel


def cudnn_promoted(spec: DeviceSpec, version: tuple[int, int]) -> bool:
    """Whether cuDNN attention comes first, with the cuDNN of that release's PyPI wheel.

    2.9 asks for cuDNN 9.9; from 2.10 the threshold is 9.15, which 2.10's wheel (9.10) does not reach. With
    another cuDNN set the order with ``torch.nn.attention.sdpa_kernel(set_priority=True)``.
    """
    sm = spec.capability
    if sm is None or version < (2, 9) or version == (2, 10):
        return False
    if version == (2, 9):
        return sm in ((9, 0), (10, 0))
    if version < (2, 14):
        return sm in ((9, 0), (10, 0), (10, 3))
    return sm[0] in (9, 10)


def attention_backend(
    spec: DeviceSpec,
    query_shape: Sequence[int],
    key_shape: Sequence[int],
    value_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    mask_dim: int | None = None,
    mask_requires_grad: bool = False,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    enable_gqa: bool = False,
    needs_grad: bool = True,
    deterministic: bool = False,
    unit_last_stride: bool = True,
    version: tuple[int, int] | None = None,
    priority: Sequence[Backend] | None = None,
    enabled: Sequence[Backend] = ALL_BACKENDS,
) -> Backend:
    """The kernel that ``F.scaled_dot_product_attention`` takes on ``spec``: a pure function of its arguments.

    Args:
        query_shape: [B, H, Sq, D]; key and value alike, [B, Hk, Sk, D] and [B, Hk, Sk, Dv]. Other ranks
            go to math (3-D ones are fused from torch 2.14).
        mask_dim: rank of the mask, None without one. Only whether there is one matters, and its rank.
        unit_last_stride: whether query, key, value and mask have stride 1 in their last dimension.
        version: of torch, (major, minor); default: the one that runs.
        priority: order of preference; default: torch's, with cuDNN first where it is promoted.
        enabled: what the user allows (``torch.nn.attention.sdpa_kernel``).

    Raises:
        DeviceError: nothing that is enabled can run this, where torch would raise too.
    """
    version = torch_version() if version is None else version
    if priority is None:
        priority = ("cudnn", "flash", "efficient", "math") if cudnn_promoted(spec, version) else ALL_BACKENDS
    fused = _fused_backends(
        spec,
        tuple(query_shape),
        tuple(key_shape),
        tuple(value_shape),
        dtype=dtype,
        mask_dim=mask_dim,
        mask_requires_grad=mask_requires_grad,
        is_causal=is_causal,
        dropout_p=dropout_p,
        enable_gqa=enable_gqa,
        needs_grad=needs_grad,
        deterministic=deterministic,
        unit_last_stride=unit_last_stride,
        version=version,
    )
    for backend in priority:
        if backend in enabled and (backend == "math" or backend in fused):
            return backend
    raise DeviceError(
        f"scaled_dot_product_attention on {spec.name}: none of the enabled backends {list(enabled)} runs "
        f"query {list(query_shape)}, key {list(key_shape)}, value {list(value_shape)} of {dtype}"
        f"{', mask' if mask_dim is not None else ''}{', causal' if is_causal else ''}. Enable 'math' "
        "(torch.nn.attention.sdpa_kernel)."
    )


def _fused_backends(
    spec: DeviceSpec,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    *,
    dtype: torch.dtype,
    mask_dim: int | None,
    mask_requires_grad: bool,
    is_causal: bool,
    dropout_p: float,
    enable_gqa: bool,
    needs_grad: bool,
    deterministic: bool,
    unit_last_stride: bool,
    version: tuple[int, int],
) -> set[Backend]:
    """The fused kernels that can run this; the conditions of ``sdp_utils.cpp``."""
    if len(query) == 3 and len(key) == 3 and len(value) == 3 and version >= (2, 14):
        query, key, value = (1, *query), (1, *key), (1, *value)
    if not len(query) == len(key) == len(value) == 4:
        return set()
    heads_q, heads_k, heads_v = query[1], key[1], value[1]
    seq_q, seq_k = query[2], key[2]
    same_heads = heads_q == heads_k == heads_v
    grouped = enable_gqa and heads_k == heads_v and heads_k > 0 and heads_q % heads_k == 0
    if (
        not query[0] == key[0] == value[0]
        or 0 in query
        or 0 in key
        or 0 in value
        or not unit_last_stride
        or not (same_heads or grouped)
    ):
        return set()

    # ROCm devices (no capability) run flash and efficient attention through AOTriton, and have no cuDNN.
    sm = spec.capability
    ampere_on = sm is None or (8, 0) <= sm <= (12, 1)
    dim, dim_v = query[3], value[3]
    result: set[Backend] = set()

    small_sm = sm is not None and ((8, 6) <= sm <= (8, 9) or sm[0] == 12)
    if (
        ampere_on
        and dtype in _HALF
        and mask_dim is None
        and dim == key[3] == dim_v
        and dim <= (512 if sm is None else 256)
        and not (is_causal and seq_q != seq_k)
        and not (small_sm and needs_grad and (192 < dim <= 224 or (dim > 224 and dropout_p > 0.0)))
    ):
        result.add("flash")

    half_alignment = 8 if ampere_on or (sm is not None and sm[0] == 7) else 1
    alignment = half_alignment if dtype in _HALF else (4 if ampere_on else 1)
    low = (torch.float16, torch.float32)
    if (
        dtype in ((*_HALF, torch.float32) if ampere_on else low)
        and (sm is None or (5, 0) <= sm <= (12, 1))
        and dim % alignment == 0
        and dim_v % alignment == 0
        and (same_heads or (version >= (2, 14) and sm is not None))
    ):
        result.add("efficient")

    # check_cudnn_tensor_shapes refuses one key, and dropout on one query. Dropout that is no multiple of 1/16
    # is refused since #174245, merged after 2.11 was cut; it would be rounded before.
    dims = (dim, dim_v)
    if version >= (2, 15) and sm is not None and (sm == (9, 0) or sm[0] == 10):
        cudnn_dims = max(dims) <= 256
        if needs_grad:
            cudnn_dims = max(dims) <= 128 or dims in ((192, 128), (256, 256))
    elif version >= (2, 11) and sm is not None and sm[0] == 10 and dims == (192, 128):
        cudnn_dims = True
    else:
        cudnn_dims = max(dims) <= (256 if sm == (9, 0) and version >= (2, 8) else 128)
    if (
        sm is not None
        and ampere_on
        and dtype in _HALF
        and dim % 8 == 0
        and dim_v % 8 == 0
        and cudnn_dims
        and mask_dim in (None, 2, 4)
        and not (mask_dim is not None and mask_requires_grad)
        and not deterministic
        and seq_k > 1
        and not (seq_q == 1 and dropout_p > 0.0)
        and (version < (2, 12) or (dropout_p * 16).is_integer())
    ):
        result.add("cudnn")
    return result


def _enabled_backends() -> list[Backend]:
    flags = torch.backends.cuda
    on: dict[Backend, bool] = {
        "flash": flags.flash_sdp_enabled(),
        "efficient": flags.mem_efficient_sdp_enabled(),
        "math": flags.math_sdp_enabled(),
        "cudnn": flags.cudnn_sdp_enabled(),
    }
    return [backend for backend, is_on in on.items() if is_on]


# Values of torch.nn.attention.SDPBackend.
_SDP_NAMES: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def _user_priority() -> list[Backend] | None:
    """The order set by ``sdpa_kernel(..., set_priority=True)``; None where it is torch's default."""
    try:
        order = torch._C._get_sdp_priority_order()
    except AttributeError:
        return None
    names = [_SDP_NAMES[i] for i in order if i in _SDP_NAMES]
    if names == list(ALL_BACKENDS):
        deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
        return names if deprioritized else None
    return names


# ---------------------------------------------------------------------------------------------------------
# The routed kernels: what CUDA's composites do, for AutogradCPU


def _composite(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """torch's own C++ kernel. Not ``op.decompose``: for dropout that is a Python decomposition."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _sdpa(
    spec: DeviceSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    mask = attn_mask
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    valid = not (is_causal and mask is not None) and query.dtype == key.dtype == value.dtype
    backend: Backend = "math"
    if valid:
        strided = (query, key, value) if mask is None else (query, key, value, mask)
        backend = attention_backend(
            spec,
            query.shape,
            key.shape,
            value.shape,
            dtype=query.dtype,
            mask_dim=None if mask is None else mask.dim(),
            mask_requires_grad=mask is not None and mask.requires_grad,
            is_causal=is_causal,
            dropout_p=dropout_p,
            enable_gqa=enable_gqa,
            needs_grad=needs_grad,
            deterministic=torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled(),
            unit_last_stride=all(t.dim() > 0 and (t.stride(-1) == 1 or t.shape[-1] == 1) for t in strided),
            priority=_user_priority(),
            enabled=_enabled_backends(),
        )
    if mask is not None and mask.dtype == torch.bool:
        # As convert_boolean_attn_mask: at the mask's own size, expanded later.
        minus_inf = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, 0.0, minus_inf)
    if backend == "math":
        out = aten._scaled_dot_product_attention_math.default(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
        return out[0]
    squeeze = query.dim() == 3
    if squeeze:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if backend == "flash":
        dim = query.shape[-1]
        scale = dim**-0.5 if scale is None else scale
        if dim % 8:
            query, key, value = (F.pad(t, (0, 8 - dim % 8)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
        out = out[..., :dim] if dim % 8 else out
    elif backend == "cudnn":
        out = aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, mask, needs_grad, dropout_p, is_causal, False, scale=scale
        )[0]
    else:
        if mask is not None:
            mask = _aligned(mask).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        out = aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    return out.squeeze(0) if squeeze else out


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """The bias with rows that start at multiples of 8 elements, as ``preprocess_mask`` pads it."""
    if bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    columns = bias.shape[-1]
    return F.pad(bias, (0, 8 - columns % 8))[..., :columns]


def _dropout(spec: DeviceSpec, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0.0 < p < 1.0 and input.numel() > 0:
        # Whether a gradient is needed does not matter: the mask is made, and is gone at once if not.
        return aten.native_dropout.default(input, p, train)[0]
    return _composite(aten.dropout.default, input, p, train)


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
        return _composite(aten.rms_norm.default, input, shape, weight, eps)
    return _FusedRMSNorm.apply(input, shape, weight, eps)


def _softmax(
    spec: DeviceSpec, op: Any, fused: Any, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return fused(input, dim, True)
    return _composite(op, input, dim, dtype)


def _route_softmax(spec: DeviceSpec, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _softmax(spec, aten.softmax.int, aten._softmax.default, *args, **kwargs)


def _route_log_softmax(spec: DeviceSpec, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _softmax(spec, aten.log_softmax.int, aten._log_softmax.default, *args, **kwargs)


# Registered while a device of kind "cuda" is active. All are CompositeImplicitAutograd in torch, so the
# original is still there under that key.
_ROUTES: dict[str, tuple[torch._ops.OpOverload, Callable[..., torch.Tensor]]] = {
    "scaled_dot_product_attention": (aten.scaled_dot_product_attention.default, _sdpa),
    "dropout": (aten.dropout.default, _dropout),
    "rms_norm": (aten.rms_norm.default, _rms_norm),
    "softmax.int": (aten.softmax.int, _route_softmax),
    "log_softmax.int": (aten.log_softmax.int, _route_log_softmax),
}


def _layer_norm_fake(previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """[..., *shape] -> the same, with statistics [..., 1] in the accumulation type, as CUDA has them."""

    def layer_norm(mode: Any, func: Any, input: torch.Tensor, shape: Sequence[int], *rest: Any) -> Any:
        if _active_cuda() is None or input.dtype not in _HALF:
            return NotImplemented if previous is None else previous(mode, func, input, shape, *rest)
        stats = [*input.shape[: input.dim() - len(shape)], *[1] * len(shape)]
        return (
            torch.empty_like(input, memory_format=torch.contiguous_format),
            input.new_empty(stats, dtype=torch.float32),
            input.new_empty(stats, dtype=torch.float32),
        )

    return layer_norm


# ---------------------------------------------------------------------------------------------------------
# Switching it on and off
#
# The registrations belong to the process, so they are made by the first context that is entered anywhere and
# taken back by the last one that is left. Which device is active belongs to the thread. A routed kernel that
# is called with real tensors, or in a thread without an active CUDA device, runs torch's own composite.

_local = threading.local()
_lock = threading.Lock()
_entered = 0
_library: torch.library.Library | None = None
_layer_norm_before: Callable[..., Any] | None = None


def _stack() -> list[DeviceSpec]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def active_device() -> DeviceSpec | None:
    """The device whose kernels are emulated in this thread just now; the innermost one, None outside."""
    stack = _stack()
    return stack[-1] if stack else None


def _active_cuda() -> DeviceSpec | None:
    spec = active_device()
    return spec if spec is not None and spec.kind == "cuda" else None


def _routed(original: torch._ops.OpOverload, kernel: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def route(*args: Any, **kwargs: Any) -> Any:
        spec = _active_cuda()
        if spec is None or not isinstance(args[0], FakeTensor):
            return _composite(original, *args, **kwargs)
        return kernel(spec, *args, **kwargs)

    return route


def _install() -> None:
    global _entered, _library, _layer_norm_before
    with _lock:
        _entered += 1
        if _entered > 1:
            return
        library = torch.library.Library("aten", "IMPL")
        try:
            for name, (original, kernel) in _ROUTES.items():
                library.impl(name, _routed(original, kernel), "AutogradCPU")
        except BaseException:
            library._destroy()
            _entered -= 1
            raise
        _library = library
        _layer_norm_before = fake_impls.op_implementations_dict.get(aten.native_layer_norm.default)
        fake_impls.op_implementations_dict[aten.native_layer_norm.default] = _layer_norm_fake(
            _layer_norm_before
        )


def _uninstall() -> None:
    global _entered, _library
    with _lock:
        _entered -= 1
        if _entered:
            return
        assert _library is not None
        _library._destroy()
        _library = None
        if _layer_norm_before is None:
            del fake_impls.op_implementations_dict[aten.native_layer_norm.default]
        else:
            fake_impls.op_implementations_dict[aten.native_layer_norm.default] = _layer_norm_before


@contextmanager
def device_kernels(device: str | DeviceSpec | torch.device = "h100") -> Iterator[DeviceSpec]:
    """Route fake CPU tensors to the kernels of ``device``, under a FakeTensorMode that is there already.

    On a device of kind ``"cpu"`` nothing is routed. Contexts nest: the inner device wins, and the outer one
    is back when it is left. Real tensors and other threads keep torch's own kernels.

    Raises:
        DeviceError: an unknown device; inside, attention that no enabled backend can run.
    """
    spec = resolve_device(device)
    routed = spec.kind == "cuda"
    if routed:
        _install()
    stack = _stack()
    stack.append(spec)
    # Fake results are cached per process by op and shape, and would outlive the change of kernels.
    FakeTensorMode.cache_clear()
    try:
        yield spec
    finally:
        stack.pop()
        if routed:
            _uninstall()
        FakeTensorMode.cache_clear()


@contextmanager
def fake_device(device: str | DeviceSpec | torch.device = "h100") -> Iterator[FakeTensorMode]:
    """FakeTensorMode on CPU tensors, with the kernels and the allocator's rounding of ``device``.

    .. code-block:: python

        with sacplan.fake_device("h100") as mode:
            model = Model()
            model(torch.randint(8192, (8, 1024))).sum().backward()   # nothing is computed

    Yields the mode (``mode.from_tensor`` makes fakes of real tensors, which are not accepted otherwise).
    Shapes are static. :func:`active_device` says which device it is. Choose the dtype where the model is
    made: torch cannot cast a fake module with ``.to(dtype)``.

    Raises:
        DeviceError: an unknown device.
    """
    spec = resolve_device(device)
    with FakeTensorMode(allow_non_fake_inputs=False, static_shapes=True) as mode, device_kernels(spec):
        yield mode


# ---------------------------------------------------------------------------------------------------------
# Temporaries inside kernels: a registry of formulas over shapes

Workspace = Callable[[Sequence[Any], DeviceSpec], Sequence[int]]
_WORKSPACES: dict[str, Workspace] = {}


def _workspace(*names: str) -> Callable[[Workspace], Workspace]:
    """Register a formula: (positional arguments, spec) -> bytes of each allocation that lives at once."""

    def register(formula: Workspace) -> Workspace:
        for name in names:
            _WORKSPACES[f"aten::{name}"] = formula
        return formula

    return register


def kernel_workspace_bytes(
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Any,
    spec: DeviceSpec,
) -> int:
    """Bytes that the kernel of ``func`` allocates for itself while it runs on ``spec``, outputs aside.

    Each allocation is rounded as the allocator does. 0 for ops without a formula and on a CPU.
    """
    if spec.kind != "cuda":
        return 0
    formula = _WORKSPACES.get(func._schema.name)
    if formula is None:
        return 0
    if kwargs:
        args = _positional(func, args, kwargs)
    return sum(spec.round_up(nbytes) for nbytes in formula(args, spec) if nbytes > 0)


def _positional(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    rest = func._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_to_bshd(tensor: torch.Tensor) -> int:
    """Bytes of the copy that a [B, H, S, D] tensor needs unless it lies in memory as [B, S, H, D]."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else _nbytes(tensor)


@_workspace("_scaled_dot_product_flash_attention_backward")
def _flash_backward(args: Sequence[Any], spec: DeviceSpec) -> Sequence[int]:
    """fp32 accumulator of dq, softmax_d, expanded dk and dv, copies into [B, S, H, D] (flash_api.cpp)."""
    grad_out, query, key, _value, out = args[:5]
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


@_workspace("_scaled_dot_product_efficient_attention")
def _efficient_forward(args: Sequence[Any], spec: DeviceSpec) -> Sequence[int]:
    """fp32 accumulator of the output where a head does not fit the block of keys (kernel_forward.h)."""
    query, _key, value = args[:3]
    if query.element_size() == 4 or max(query.shape[-1], value.shape[-1]) <= 128:
        return ()
    batch, heads, seq_q, _ = query.shape
    return (4 * batch * seq_q * heads * value.shape[-1],)


@_workspace("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(args: Sequence[Any], spec: DeviceSpec) -> Sequence[int]:
    """delta, a copy of grad_out, fp32 dq in blocks of 64, dk and dv for half heads over 128."""
    grad_out, query, key, value = args[:4]
    batch, heads, seq_q, dim = query.shape
    dim_v = value.shape[-1]
    workspace = 4 * batch * heads * _ceil_to(seq_q, 64) * _ceil_to(dim, 64)
    if query.element_size() == 2 and max(dim, dim_v) > 128:
        workspace += (
            4 * batch * heads * _ceil_to(key.shape[2], 64) * (_ceil_to(dim, 64) + _ceil_to(dim_v, 64))
        )
    return (workspace, 4 * batch * heads * seq_q, _copy_to_bshd(grad_out))


@_workspace("_scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(args: Sequence[Any], spec: DeviceSpec) -> Sequence[int]:
    """cuDNN does not say its workspace. Assumed: an fp32 dq and the row sums, as flash attention has them."""
    query = args[1]
    batch, heads, seq_q, dim = query.shape
    return (4 * batch * heads * seq_q * dim, 4 * batch * heads * seq_q)


@_workspace("embedding_dense_backward")
def _embedding_backward(args: Sequence[Any], spec: DeviceSpec) -> Sequence[int]:
    """Above 3072 indices: sorted and original indices with their buffers, fp32 partial rows."""
    grad_out, indices, rows = args[:3]
    count = indices.numel()
    if count <= 3072:
        return ()
    partial_rows = count // 10 + min(count, rows)
    return (4 * count * indices.element_size(), 4 * partial_rows * grad_out.shape[-1])


@_workspace("index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put")
def _index_put(args: Sequence[Any], spec: DeviceSpec) -> Sequence[int]:
    """With accumulate: four int64 buffers over the indices, to sort them (Indexing.cu; from memory)."""
    indices = [i for i in args[1] if isinstance(i, torch.Tensor)]
    accumulate = len(args) > 3 and bool(args[3])
    if not accumulate or not indices:
        return ()
    return (4 * 8 * max(i.numel() for i in indices),)
