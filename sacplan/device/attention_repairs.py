"""Calls of attention that no fused kernel runs, changed so that one does.

``repaired`` is for a step that is recorded for a CUDA device: inside, each call that would run as separate ops
("math") is changed as little as a fused kernel needs, and what was in its way is noted. All changes but that of the
type leave the result as it is.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from sacplan.device.attention import Arguments, AttentionCall, attention, attention_backend, in_place_of_math
from sacplan.device.devices import DeviceSpec

_ALIGNMENT = 8  # elements: a head size that all types take is a multiple of it
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@dataclass(frozen=True)
class Repair:
    """A change of a call.

    Attributes:
        because: what is in the way of fused kernels.
        code: what mends it; q, k and v are query, key and value, and out is the output.
        call: how the choice of a kernel sees the changed call.
        arguments: of the changed call.
        output: makes that of the call as it was.
    """

    because: str
    code: str
    call: AttentionCall
    arguments: Callable[[Arguments], Arguments] = lambda given: given
    output: Callable[[torch.Tensor], torch.Tensor] = lambda out: out


@contextlib.contextmanager
def repaired(found: dict[str, str]) -> Iterator[None]:
    """Run calls fused inside where a change allows it; ``found`` maps what was in the way to the code that mends it."""

    def run(spec: DeviceSpec, given: Arguments, call: AttentionCall) -> torch.Tensor | None:
        repairs = repairs_of(spec, call)
        if repairs is None:
            return None  # nothing helps: the call runs as math
        found.update({repair.because: repair.code for repair in repairs})
        for repair in repairs:
            given = repair.arguments(given)
        # Without math among the backends a repair that does not help is an error, and no endless recursion.
        with sdpa_kernel(_FUSED):
            out: torch.Tensor = attention(spec, *given[:6], scale=given.scale, enable_gqa=given.enable_gqa)
        # In reverse: each change is undone on the tensor that it led to, the type first and the batch dimension last.
        for repair in reversed(repairs):
            out = repair.output(out)
        return out

    token = in_place_of_math.set(run)
    try:
        yield
    finally:
        in_place_of_math.reset(token)


def repairs_of(spec: DeviceSpec, call: AttentionCall) -> tuple[Repair, ...] | None:
    """Return the fewest changes with which a fused kernel runs the call; None if no combination of them helps.

    Tries all subsets of the five changes, smaller ones first. A change that finds nothing to do rules its subset out.
    The cast to a half type comes last: it is chosen only where no other subset of the same size suffices.
    """
    # With every backend allowed a fused kernel runs it, so the user has switched those off.
    if _is_fused(spec, call):
        return (Repair("fused kernels are switched off", "with torch.nn.attention.sdpa_kernel([...])", call),)
    for n in range(1, len(_REPAIRS) + 1):
        for makers in itertools.combinations(_REPAIRS, n):
            # Each change is made of the call as the one before has left it.
            changed, repairs = call, []
            for make in makers:
                if (repair := make(spec, changed)) is not None:
                    repairs.append(repair)
                    changed = repair.call
            # With fewer than n this subset is a smaller one, which has been tried.
            if len(repairs) == n and _is_fused(spec, changed):
                return tuple(repairs)
    return None


def _is_fused(spec: DeviceSpec, call: AttentionCall) -> bool:
    return attention_backend(spec, call) != "math"


def _four_dimensions(_: DeviceSpec, call: AttentionCall) -> Repair | None:
    shapes = (call.query, call.key, call.value)
    if any(len(shape) != 3 for shape in shapes):
        return None
    query, key, value = ((1, *shape) for shape in shapes)
    return Repair(
        "query, key and value have 3 dimensions",
        "q, k, v = (t.unsqueeze(0) for t in (q, k, v))",
        replace(call, query=query, key=key, value=value),
        lambda given: _each(given, lambda t: t.unsqueeze(0)),
        lambda out: out.squeeze(0),
    )


def _repeated_heads(_: DeviceSpec, call: AttentionCall) -> Repair | None:
    if not call.enable_gqa or len(call.query) != 4 or call.same_heads:
        return None
    heads, fewer = call.query[1], call.key[1]
    # Heads that do not divide evenly are an error of the call itself, which math reports.
    if call.value[1] != fewer or not fewer or heads % fewer:
        return None
    n = heads // fewer

    def repeated(given: Arguments) -> Arguments:
        key, value = (t.repeat_interleave(n, dim=1) for t in (given.key, given.value))
        return given._replace(key=key, value=value, enable_gqa=False)

    return Repair(
        f"key and value have fewer heads ({fewer}) than the query ({heads})",
        f"k, v = (t.repeat_interleave({n}, dim=1) for t in (k, v))  # and no enable_gqa",
        replace(
            call,
            key=(call.key[0], heads, *call.key[2:]),
            value=(call.value[0], heads, *call.value[2:]),
            enable_gqa=False,
        ),
        repeated,
    )


def _padded_heads(_: DeviceSpec, call: AttentionCall) -> Repair | None:
    dim, dim_v = call.query[-1], call.value[-1]
    if not (dim % _ALIGNMENT or dim_v % _ALIGNMENT):
        return None
    more, more_v = -dim % _ALIGNMENT, -dim_v % _ALIGNMENT

    def padded(given: Arguments) -> Arguments:
        # Zeros add nothing to the scores, but a scale taken from the padded size would be another one.
        query, key = (F.pad(t, (0, more)) for t in (given.query, given.key))
        scale = dim**-0.5 if given.scale is None else given.scale
        return given._replace(query=query, key=key, value=F.pad(given.value, (0, more_v)), scale=scale)

    return Repair(
        f"the head size ({dim if dim % _ALIGNMENT else dim_v}) is not a multiple of {_ALIGNMENT}",
        f"q, k, v = F.pad(q, (0, {more})), F.pad(k, (0, {more})), F.pad(v, (0, {more_v}))  "
        f"# scale={dim}**-0.5, out[..., :{dim_v}]",
        replace(
            call,
            query=(*call.query[:-1], dim + more),
            key=(*call.key[:-1], dim + more),
            value=(*call.value[:-1], dim_v + more_v),
        ),
        padded,
        lambda out: out[..., :dim_v],
    )


def _contiguous(_: DeviceSpec, call: AttentionCall) -> Repair | None:
    if call.unit_last_stride:
        return None

    def contiguous(given: Arguments) -> Arguments:
        mask = None if given.attn_mask is None else given.attn_mask.contiguous()
        return _each(given, torch.Tensor.contiguous)._replace(attn_mask=mask)

    return Repair(
        "elements of the last dimension are not side by side",
        "q, k, v = (t.contiguous() for t in (q, k, v))  # and the mask",
        replace(call, unit_last_stride=True),
        contiguous,
    )


def _half_precision(spec: DeviceSpec, call: AttentionCall) -> Repair | None:
    dtype, before = torch.bfloat16 if spec.has_bfloat16 else torch.float16, call.dtype
    if before == dtype:
        return None

    def cast(given: Arguments) -> Arguments:
        mask = given.attn_mask
        # A boolean mask is made additive later, in the query's type.
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return _each(given, lambda t: t.to(dtype))._replace(attn_mask=mask)

    return Repair(
        f"it runs in {str(before).removeprefix('torch.')}",
        f"q, k, v = (t.to({dtype}) for t in (q, k, v))  # other values: less precise",
        replace(call, dtype=dtype),
        cast,
        lambda out: out.to(before),
    )


_REPAIRS = (_four_dimensions, _repeated_heads, _padded_heads, _contiguous, _half_precision)
"""Each gives a change, or None where there is nothing to change. The one that changes the result is the last."""


def _each(given: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    return given._replace(query=change(given.query), key=change(given.key), value=change(given.value))
