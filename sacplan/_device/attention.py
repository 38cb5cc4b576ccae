"""Which attention kernel a CUDA device takes, and ``scaled_dot_product_attention`` routed to it.

:func:`attention_backend` is the one table; its conditions are those of PyTorch's
``aten/src/ATen/native/transformers/{attention.cpp,cuda/sdp_utils.cpp}``; cuDNN's dropout is of pull request
#174245.

Private PyTorch API, used on 2.13 and present in 2.11 to 2.15: ``torch._C._get_sdp_priority_order``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from sacplan._device.devices import DeviceSpec, torch_version
from sacplan.errors import DeviceError

aten = torch.ops.aten

Backend = Literal["flash", "efficient", "cudnn", "math"]
ALL_BACKENDS: tuple[Backend, ...] = ("flash", "efficient", "math", "cudnn")
"""torch's own order of preference, before cuDNN is promoted."""

_HALF = (torch.float16, torch.bfloat16)


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


def routed_attention(
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
    """``F.scaled_dot_product_attention`` as CUDA runs it: the fused op that the table names, or math."""
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
