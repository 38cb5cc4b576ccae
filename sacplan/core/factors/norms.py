"""Layer norm, RMS norm, group norm, batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sacplan.core.factors.rule import Dims, Factors, Kind, Rule, RuleBuilder, register


def _normalized(call: RuleBuilder, shape: Sequence[int]) -> tuple[Dims, Dims]:
    """Make factors of the leading dimensions, and of those that are normalized."""
    n_leading = len(shape) - len(call["normalized_shape"])
    return call.dims(shape[:n_leading]), call.blocked(shape[n_leading:])


@register("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: RuleBuilder) -> Rule:
    x, *weights = call.inputs
    leading, normalized = _normalized(call, x.shape)
    whole, statistics = leading + normalized, leading + ((),) * len(normalized)
    return call.rule(
        [whole, *(normalized for _ in weights)], [whole, *(statistics for _ in call.outputs[1:])]
    )


@register("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: RuleBuilder) -> Rule:
    # Gradients of scale and shift are sums over leading dimensions; statistics have size 1 in normalized ones.
    leading, normalized = _normalized(call, call["input"].shape)
    by_name = dict.fromkeys(("grad_out", "input"), leading + normalized)
    by_name |= dict.fromkeys(("mean", "rstd"), leading + ((),) * len(normalized))
    inputs = [by_name.get(name, normalized) for name, _ in call.named_inputs]
    # ``output_mask``: input, scale, shift (RMS norm has no shift).
    wanted = [i for i, is_wanted in enumerate(call["output_mask"]) if is_wanted]
    for output, i in enumerate(wanted):
        if i > 0:
            call.becomes([f for factors in leading for f in factors], Kind.SUM, output)
    return call.rule(inputs, [normalized if i > 0 else leading + normalized for i in wanted])


@register("native_group_norm", "native_group_norm_backward")
def _group_norm(call: RuleBuilder) -> Rule:
    """Samples and groups can be sliced; the channels within a group, and pixels, cannot.

    Statistics are over the channels of one group and all pixels of one sample.
    """
    x = call["input"]
    batch, groups = call.factor(x.shape[0]), call.factor(call["group"])
    channels = groups + call.factor(x.shape[1] // call["group"], Kind.BLOCK)
    whole = (batch, channels, *call.blocked(x.shape[2:]))

    def dims_of(t: Any) -> Dims:
        if len(t.shape) == 1:  # weight or bias
            return (channels,)
        # Statistics have two dimensions. So has an input without pixels: its shape tells.
        return (batch, groups) if len(t.shape) == 2 and tuple(t.shape) != tuple(x.shape) else whole

    statistics = {"mean", "rstd"}
    call.resize("N", None, batch)
    call.resize("C", None, groups)
    call.resize("group", None, groups)
    inputs = [(batch, groups) if name in statistics else dims_of(t) for name, t in call.named_inputs]
    if call.name == "native_group_norm":
        return call.rule(inputs, [whole, (batch, groups), (batch, groups)])
    # The backward op sums the gradients of weight and bias over the samples.
    for output, o in enumerate(call.outputs):
        if len(o.shape) == 1:
            call.becomes(batch, Kind.SUM, output)
    return call.rule(inputs, [dims_of(o) for o in call.outputs])


@register(
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "miopen_batch_norm",
)
def _batch_norm(call: RuleBuilder) -> Rule:
    """Channels pass; samples and pixels pass only if the op does not train."""
    # In training the statistics of a channel are over all samples and pixels, so these must be whole.
    trains = bool(call.arguments.get("training", False))
    x = call["input"]
    other = Kind.BLOCK if trains else Kind.PASS
    channels = call.factor(x.shape[1])
    whole = (call.factor(x.shape[0], other), channels, *call.dims(x.shape[2:], other))
    inputs = [whole if name == "input" else (channels,) for name, _ in call.named_inputs]
    statistics = [  # empty where nothing trains
        (channels,) if tuple(o.shape) == (x.shape[1],) else call.blocked(o.shape) for o in call.outputs[1:3]
    ]
    statistics += [_reserved(call, o, channels) for o in call.outputs[3:]]
    return call.rule(inputs, [whole, *statistics])


def _reserved(call: RuleBuilder, t: Any, channels: Factors) -> Dims:
    """Block the channels if a library keeps a reserve for its backward kernel: the reserve is of all channels."""
    if t.shape[0]:
        call.becomes(channels, Kind.BLOCK)
    return call.blocked(t.shape)


@register("native_batch_norm_backward", "cudnn_batch_norm_backward", "miopen_batch_norm_backward")
def _batch_norm_backward(call: RuleBuilder) -> Rule:
    """Kernels of libraries have neither ``train`` nor ``output_mask``: they train, and return all gradients."""
    trains = bool(call.arguments.get("train", True))
    x = call["input"]
    other = Kind.BLOCK if trains else Kind.PASS
    channels = call.factor(x.shape[1])
    batch, pixels = call.factor(x.shape[0], other), call.dims(x.shape[2:], other)
    whole = (batch, channels, *pixels)
    wanted = [i for i, is_wanted in enumerate(call.arguments.get("output_mask", (True,) * 3)) if is_wanted]
    for output, i in enumerate(wanted):
        # Gradients of scale and shift are sums over samples and pixels, so those of slices add up.
        if i and not trains:
            call.becomes([f for factors in (batch, *pixels) for f in factors], Kind.SUM, output)

    def dims_of(t: Any) -> Dims:
        if len(t.shape) > 1:
            return whole
        if t is call.arguments.get("reserveSpace"):
            return _reserved(call, t, channels)
        return (channels,) if tuple(t.shape) == (x.shape[1],) else call.blocked(t.shape)

    return call.rule([dims_of(t) for t in call.inputs], [(channels,) if i else whole for i in wanted])
