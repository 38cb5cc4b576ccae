"""Which attention kernel a CUDA device takes, and ``scaled_dot_product_attention`` run as that kernel.

:func:`attention_backend` decides. Each fused kernel has one function, marked with ``@_fused("name")``, that says
whether the kernel can run a call. The conditions are those of PyTorch's
``aten/src/ATen/native/transformers/{attention.cpp,cuda/sdp_utils.cpp}``; cuDNN's on dropout is from pull request
#174245. What differs between releases is a condition on ``call.version``.

Private PyTorch API, tried on 2.11 and 2.13: ``torch._C._get_sdp_priority_order``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from sacplan.device.devices import DeviceSpec, torch_version
from sacplan.device.overrides import HALF_TYPES, override
from sacplan.errors import DeviceError
from sacplan.torch_compat.ops import RuleTable

aten = torch.ops.aten

Backend = Literal["flash", "efficient", "cudnn", "math"]
ALL_BACKENDS: tuple[Backend, ...] = ("flash", "efficient", "math", "cudnn")
"""PyTorch's order of preference where cuDNN is not promoted."""
_PROMOTED: tuple[Backend, ...] = ("cudnn", "flash", "efficient", "math")
"""PyTorch's order where cuDNN is promoted (``priority_order`` in ``sdp_utils.cpp``)."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention, as far as the choice of a kernel depends on it.

    Attributes:
        query: shape [B, H, Sq, D]; key and value have [B, Hk, Sk, D] and [B, Hk, Sk, Dv]. Shapes of other
            ranks go to math (from torch 2.14 on, 3-D ones are fused).
        mask_dim: rank of the mask; None without a mask. The mask's sizes do not matter.
        unit_last_stride: whether query, key, value and mask have stride 1 in their last dimension.
        version: of torch, (major, minor).
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask_dim: int | None = None
    mask_requires_grad: bool = False
    is_causal: bool = False
    dropout_p: float = 0.0
    enable_gqa: bool = False
    needs_grad: bool = True
    deterministic: bool = False
    unit_last_stride: bool = True
    version: tuple[int, int] = field(default_factory=torch_version)

    @property
    def same_heads(self) -> bool:
        """Whether query, key and value have the same number of heads."""
        return self.query[1] == self.key[1] == self.value[1]

    @property
    def dims(self) -> tuple[int, int]:
        """Head sizes of query and value."""
        return self.query[3], self.value[3]


def cudnn_promoted(spec: DeviceSpec, version: tuple[int, int]) -> bool:
    """Whether cuDNN attention comes first, given the cuDNN in that release's PyPI wheel.

    The threshold is cuDNN 9.15, which the wheels reach from 2.11 on. If you have another cuDNN, set the order with
    ``torch.nn.attention.sdpa_kernel(set_priority=True)``.
    """
    sm = spec.capability
    if sm is None:
        return False  # no cuDNN attention: a CPU, or ROCm
    if version < (2, 14):
        return sm in ((9, 0), (10, 0), (10, 3))
    return sm[0] in (9, 10)


def attention_backend(
    spec: DeviceSpec,
    call: AttentionCall,
    *,
    priority: Sequence[Backend] | None = None,
    enabled: Sequence[Backend] = ALL_BACKENDS,
) -> Backend:
    """Return the kernel that ``F.scaled_dot_product_attention`` takes on ``spec``: a function of the arguments alone.

    Args:
        spec: the device.
        call: shapes, types and options of the call.
        priority: order of preference; default: torch's, with cuDNN first where it is promoted.
        enabled: what the user allows (``torch.nn.attention.sdpa_kernel``).

    Raises:
        DeviceError: no enabled backend can run this call; torch would raise too.
    """
    if priority is None:
        promoted = cudnn_promoted(spec, call.version)
        priority = _PROMOTED if promoted else ALL_BACKENDS
    # From 2.14 torch adds a batch dimension itself. Before, 3-D operands fail ``_fusable`` and go to math.
    if len(call.query) == len(call.key) == len(call.value) == 3 and call.version >= (2, 14):
        call = replace(call, query=(1, *call.query), key=(1, *call.key), value=(1, *call.value))
    # The first enabled backend that can run the call, as ``select_sdp_backend`` does. Math takes every call, so it ends
    # the search wherever it stands in the order.
    fusable = _fusable(call)
    for backend in priority:
        if backend in enabled and (backend == "math" or (fusable and _fused[backend](spec, call))):
            return backend
    # Only reached where the user has switched math off.
    raise DeviceError(
        f"scaled_dot_product_attention on {spec.name}: none of the enabled backends {list(enabled)} runs "
        f"query {list(call.query)}, key {list(call.key)}, value {list(call.value)} of {call.dtype}"
        f"{', mask' if call.mask_dim is not None else ''}{', causal' if call.is_causal else ''}. Enable 'math' "
        "(torch.nn.attention.sdpa_kernel)."
    )


def _fusable(call: AttentionCall) -> bool:
    """Whether a call meets the conditions that all fused kernels share (``sdp_utils_cpp.h``).

    Four dimensions, one batch size, nothing empty, stride 1 in the last dimension, and one number of heads or groups.
    """
    # The checks below take position 1 for the heads, as it is in four dimensions.
    if not len(call.query) == len(call.key) == len(call.value) == 4:
        return False
    heads_q, heads_k, heads_v = call.query[1], call.key[1], call.value[1]
    # Without ``enable_gqa`` fewer heads of keys would have to be broadcast, which no fused kernel does.
    grouped = call.enable_gqa and heads_k == heads_v and heads_k > 0 and heads_q % heads_k == 0
    return (
        call.query[0] == call.key[0] == call.value[0]
        and 0 not in (*call.query, *call.key, *call.value)
        and call.unit_last_stride
        and (call.same_heads or grouped)
    )


_fused: RuleTable[Callable[[DeviceSpec, AttentionCall], bool]] = RuleTable()
"""By backend: whether it can run a call that is ``_fusable``."""


def _ampere_on(spec: DeviceSpec) -> bool:
    # ROCm devices (no capability) run flash and efficient attention through AOTriton, and have no cuDNN.
    return spec.capability is None or (8, 0) <= spec.capability <= (12, 1)


@_fused("flash")
def _flash_runs(spec: DeviceSpec, call: AttentionCall) -> bool:
    sm = spec.capability
    dim, dim_v = call.dims
    # On these chips flash attention's backward kernel raises for large heads, so torch refuses them where a gradient
    # is wanted (``check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120``). Heads above 224 are
    # refused only with dropout.
    small_sm = sm is not None and ((8, 6) <= sm <= (8, 9) or sm[0] == 12)
    too_large = 192 < dim <= 224 or (dim > 224 and call.dropout_p > 0.0)
    # The kernel has one head size for all operands. It takes no mask, and aligns a causal mask to the last key, while
    # torch's ``is_causal`` aligns it to the first: the two agree only if there are as many queries as keys. AOTriton
    # (no capability) allows larger heads. ``attention`` pads head sizes to a multiple of 8, so there is no check here.
    return (
        _ampere_on(spec)
        and call.dtype in HALF_TYPES
        and call.mask_dim is None
        and dim == call.key[3] == dim_v
        and dim <= (512 if sm is None else 256)
        and not (call.is_causal and call.query[2] != call.key[2])
        and not (small_sm and call.needs_grad and too_large)
    )


@_fused("efficient")
def _efficient_runs(spec: DeviceSpec, call: AttentionCall) -> bool:
    sm, ampere_on = spec.capability, _ampere_on(spec)
    # ``minimum_gemm_alignment``: tensor cores load 128 bits at a time, that is 8 half or 4 float32 elements. Volta and
    # Turing have tensor cores for half types only. Older chips load single elements.
    if call.dtype in HALF_TYPES:
        alignment = 8 if ampere_on or (sm is not None and sm[0] == 7) else 1
    else:
        alignment = 4 if ampere_on else 1
    types = (*HALF_TYPES, torch.float32) if ampere_on else (torch.float16, torch.float32)
    # Unlike flash attention, it takes a mask, float32, and values whose head size is not that of the queries. It takes
    # grouped heads from 2.14 on, and not on ROCm.
    return (
        call.dtype in types
        and (sm is None or (5, 0) <= sm <= (12, 1))
        and all(dim % alignment == 0 for dim in call.dims)
        and (call.same_heads or (call.version >= (2, 14) and sm is not None))
    )


@_fused("cudnn")
def _cudnn_runs(spec: DeviceSpec, call: AttentionCall) -> bool:
    """Whether cuDNN can run the call. As in ``check_cudnn_tensor_shapes``, not a single key, nor dropout on one query.

    Dropout that is not a multiple of 1/16 is refused since #174245, merged after 2.11 was cut; before, it is rounded.
    """
    # The kernel has no gradient for the mask, and its backward pass is not deterministic.
    return (
        spec.capability is not None
        and _ampere_on(spec)
        and call.dtype in HALF_TYPES
        and all(dim % 8 == 0 for dim in call.dims)
        and _cudnn_takes_dims(spec.capability, call)
        and call.mask_dim in (None, 2, 4)
        and not (call.mask_dim is not None and call.mask_requires_grad)
        and not call.deterministic
        and call.key[2] > 1
        and not (call.query[2] == 1 and call.dropout_p > 0.0)
        and (call.version < (2, 12) or (call.dropout_p * 16).is_integer())
    )


def _cudnn_takes_dims(sm: tuple[int, int], call: AttentionCall) -> bool:
    # From 2.15 Hopper and Blackwell have forward kernels for all heads up to 256. The backward pass has only
    # three cases (``check_cudnn_d256_bprop_head_dim``).
    if call.version >= (2, 15) and (sm == (9, 0) or sm[0] == 10):
        if call.needs_grad:
            return max(call.dims) <= 128 or call.dims in ((192, 128), (256, 256))
        return max(call.dims) <= 256
    # Before, Blackwell has one pair of sizes beyond 128 (DeepSeek's), and Hopper all up to 256. Others end at 128.
    if sm[0] == 10 and call.dims == (192, 128):
        return True
    return max(call.dims) <= (256 if sm == (9, 0) else 128)


def _enabled_backends() -> list[Backend]:
    flags: Any = torch.backends.cuda
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
    """Return the order set by ``sdpa_kernel(..., set_priority=True)``; None if it is torch's default."""
    names = [_SDP_NAMES[i] for i in torch._C._get_sdp_priority_order() if i in _SDP_NAMES]
    # Torch promotes cuDNN at the first call of attention on a GPU. Until then the plain order means that nobody has set
    # one, and ``attention_backend`` chooses the order of the device that is emulated. With this variable torch never
    # promotes cuDNN, so the plain order holds for every device.
    if names == list(ALL_BACKENDS):
        deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
        return names if deprioritized else None
    # On a machine with a GPU, this is also the order that torch sets at that first call for the GPU that is here. An
    # equal order that the user has set cannot be told from it, and is ignored.
    if names == list(_PROMOTED) and torch.cuda.is_available():
        return None
    return names


class Arguments(NamedTuple):
    """The arguments of ``F.scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def call(self) -> AttentionCall | None:
        """Return the call as the choice of a kernel sees it; None if no fused kernel can take it.

        That is so with a mask in addition to ``is_causal``, and with operands of several types.
        """
        query, key, value, mask = self[:4]
        if (self.is_causal and mask is not None) or not query.dtype == key.dtype == value.dtype:
            return None
        strided = (query, key, value) if mask is None else (query, key, value, mask)
        return AttentionCall(
            tuple(query.shape),
            tuple(key.shape),
            tuple(value.shape),
            query.dtype,
            mask_dim=None if mask is None else mask.dim(),
            mask_requires_grad=mask is not None and mask.requires_grad,
            is_causal=self.is_causal,
            dropout_p=self.dropout_p,
            enable_gqa=self.enable_gqa,
            needs_grad=self.needs_grad,
            deterministic=torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled(),
            unit_last_stride=all(t.dim() > 0 and (t.stride(-1) == 1 or t.shape[-1] == 1) for t in strided),
        )

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass will follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self[:3])


@override(aten.scaled_dot_product_attention.default)
def attention(spec: DeviceSpec, *args: Any, **kwargs: Any) -> Any:
    """Run ``F.scaled_dot_product_attention`` as CUDA does, by the fused op that ``attention_backend`` names or as math.

    On fake CPU tensors PyTorch would take the CPU's flash kernel, which saves other tensors. So this function does
    what ``scaled_dot_product_attention`` in ``attention.cpp`` does around the fused ops: makes the mask additive, pads
    head sizes for flash attention, and aligns and expands the mask for efficient attention.
    """
    arguments = Arguments(*args, **kwargs)
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa = arguments
    needs_grad = arguments.needs_grad
    backend: Backend = "math"
    if (call := arguments.call()) is not None:
        backend = attention_backend(spec, call, priority=_user_priority(), enabled=_enabled_backends())
    if mask is not None and mask.dtype == torch.bool:
        # As convert_boolean_attn_mask: at the mask's own size, expanded later.
        minus_inf = torch.scalar_tensor(float("-inf"), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, 0.0, minus_inf)
    # Math is a composite of plain ops, each of which shows what it keeps for the backward pass. Math takes operands of
    # any rank, so this comes before the batch dimension is added.
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
        # Before padding: the default scale is that of the head size given, not of the padded one.
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
    """Pad the bias so that rows start at multiples of 8 elements, as ``preprocess_mask`` in ``attention.cpp`` does.

    The padding counts: the padded bias is saved for the backward pass. As in torch, a width that is a multiple of 8
    already gets 8 more columns if another stride is not aligned.
    """
    # All rows start at aligned addresses already: the mask is used, and saved, without a copy.
    if bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    columns = bias.shape[-1]
    return F.pad(bias, (0, 8 - columns % 8))[..., :columns]
