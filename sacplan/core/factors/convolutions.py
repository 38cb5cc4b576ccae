"""Convolutions, pooling, resampling: samples and channels pass, pixels where nothing looks at their neighbours."""

from __future__ import annotations

import re
from typing import Any

from sacplan.core.factors.rule import Dims, Factors, Kind, Rule, RuleBuilder, register, register_both_ways


class _Convolution:
    """The factors of one call: channels are groups times those of one group."""

    def __init__(self, call: RuleBuilder, n_in: int, n_out: int) -> None:
        # A 1x1 convolution with stride 1 and no padding looks at each pixel alone: pixels then pass. Otherwise a slice
        # of the picture would need its neighbours (a halo), which no rule provides.
        groups = call["groups"]
        x, weight = call["input"], call["weight"]
        self.batch = call.factor(x.shape[0])
        self.groups = call.factor(groups)
        self.c_in, self.c_out = call.factor(n_in // groups), call.factor(n_out // groups)
        window = weight.shape[2:]
        self.by_pixel = (
            all(n == 1 for n in (*window, *call["stride"])) and not any((*call["padding"], *call["output_padding"]))
        )  # fmt: skip
        kind = Kind.PASS if self.by_pixel else Kind.BLOCK
        self.pixels: Dims = call.dims(x.shape[2:], kind)
        first, second = (self.c_in, self.c_out) if call["transposed"] else (self.c_out, self.c_in)
        self.weight: Dims = (self.groups + first, second, *call.blocked(window))
        self.input: Dims = (self.batch, self.groups + self.c_in, *self.pixels)
        self.channels: Factors = self.groups + self.c_out
        call.resize("groups", None, self.groups)

    def output(self, call: RuleBuilder, pixels: tuple[int, ...]) -> Dims:
        """Return the factors of the convolution's output."""
        found = self.pixels if self.by_pixel else call.blocked(pixels)
        return (self.batch, self.channels, *found)


@register("convolution")
def _convolution(call: RuleBuilder) -> Rule:
    x, out = call["input"], call.outputs[0]
    conv = _Convolution(call, x.shape[1], out.shape[1])
    has_bias = call["bias"] is not None
    call.becomes(conv.c_in, Kind.BLOCK if has_bias else Kind.SUM)  # else every slice would add the bias
    bias = [(conv.channels,)] if has_bias else []
    return call.rule([conv.input, conv.weight, *bias], [conv.output(call, tuple(out.shape[2:]))])


@register("convolution_backward")
def _convolution_backward(call: RuleBuilder) -> Rule:
    grad, x = call["grad_output"], call["input"]
    conv = _Convolution(call, x.shape[1], grad.shape[1])
    pixels = [f for factors in conv.pixels for f in factors] if conv.by_pixel else []
    wanted = [i for i, is_wanted in enumerate(call["output_mask"]) if is_wanted]
    # Gradients of input, weight and bias. That of the input is a sum over output channels; the other two are sums over
    # samples and, where pixels pass, over pixels.
    for output, i in enumerate(wanted):
        call.becomes((conv.c_out, (), ())[i], Kind.SUM, output)
        if i:
            call.becomes([*conv.batch, *pixels], Kind.SUM, output)
    if call["bias_sizes"]:
        call.resize("bias_sizes", 0, conv.channels)
    outputs = [(conv.input, conv.weight, (conv.channels,))[i] for i in wanted]
    return call.rule([conv.output(call, tuple(grad.shape[2:])), conv.input, conv.weight], outputs)


@register_both_ways("im2col", "col2im")
def _im2col(call: RuleBuilder, x: Any, copied: Any) -> tuple[Dims, Dims]:
    """Copy windows: (samples, channels, height, width) to (samples, channels x window, windows).

    The dimension of samples may be missing.
    """
    planes = call.dims(x.shape[:-2])
    window, windows = call.blocked((copied.shape[-2] // x.shape[-3], copied.shape[-1]))
    return planes + call.blocked(x.shape[-2:]), (*planes[:-1], planes[-1] + window, windows)


@register("grid_sampler_2d", "grid_sampler_3d")
def _grid_sampler(call: RuleBuilder) -> Rule:
    """Each place of the grid is looked up in the whole picture."""
    x, grid = call.inputs
    batch, channels = call.dims(x.shape[:2])
    places = call.dims(grid.shape[1:-1])
    inputs = [
        (batch, channels, *call.blocked(x.shape[2:])),
        (batch, *places, call.factor(grid.shape[-1], Kind.BLOCK)),
    ]
    return call.rule(inputs, [(batch, channels, *places)])


_RESAMPLED = [f"upsample_{how}" for how in (
    "nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d",
)]  # fmt: skip
_RESAMPLED += ["_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"]
_RESAMPLED += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]
_POOLS = [
    "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
]  # fmt: skip


@register(*_POOLS, *_RESAMPLED, *(f"{name}_backward" for name in (*_POOLS, *_RESAMPLED)))
def _by_plane(call: RuleBuilder) -> Rule:
    """Samples and channels pass; pixels must be whole."""
    match = re.search(r"(\d)d", call.name)
    assert match is not None  # all names above say it
    pixels = int(match[1])
    planes = call.dims(call.outputs[0].shape[:-pixels])
    if "input_size" in call.arguments:
        for i, factors in enumerate(planes):
            call.resize("input_size", i, factors)
    inputs = [planes + call.blocked(t.shape[-pixels:]) for t in call.inputs]
    return call.rule(inputs, [planes + call.blocked(o.shape[-pixels:]) for o in call.outputs])
