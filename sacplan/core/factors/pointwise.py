"""Ops that compute each element of the output from one element of each input, inputs broadcast."""

from __future__ import annotations

from collections.abc import Sequence

from sacplan.core.factors.rule import Dims, Factors, Rule, RuleBuilder, register


def broadcast(dims: Dims, to: Sequence[int], shape: Sequence[int]) -> Dims | None:
    """Return the factors of a tensor that is broadcast to shape ``to`` with factors ``dims``; None if it is not."""
    missing = len(to) - len(shape)
    if missing < 0 or any(n not in (1, to[missing + i]) for i, n in enumerate(shape)):
        return None
    return tuple(dims[missing + i] if n != 1 else () for i, n in enumerate(shape))


# Ops that PyTorch tags as pointwise need not be named.
@register(
    "pointwise",
    """_conj _prelu_kernel _prelu_kernel_backward _to_copy alias clone complex contiguous copy detach
    detach_copy elu_backward empty_like fill floor_divide full_like gelu_backward
    hardshrink_backward hardsigmoid_backward hardswish hardswish_backward hardtanh_backward
    leaky_relu_backward lift_fresh log_sigmoid_backward log_sigmoid_forward logical_and logical_not
    logical_or masked_fill mish_backward nan_to_num native_dropout_backward ones_like polar
    rrelu_with_noise_backward rsub sigmoid_backward silu_backward softplus_backward
    softshrink_backward tanh_backward threshold_backward zero zeros_like""",
)
def pointwise(call: RuleBuilder) -> Rule | None:
    """One factor for each dimension of the output; a buffer that the device's kernel does not need may be empty."""
    # Each tensor must have the output's shape, or be broadcast to it as an input. An empty one is a placeholder (the
    # noise of an activation in evaluation). Any other shape means that the op is not what its tag says.
    shape = tuple(call.outputs[0].shape)
    dims = call.dims(shape)
    found = []
    for i, t in enumerate((*call.inputs, *call.outputs)):
        is_output = i >= len(call.inputs)
        if is_output and tuple(t.shape) == shape:
            found.append(dims)
        elif not is_output and (broadcasts := broadcast(dims, shape, t.shape)) is not None:
            found.append(broadcasts)
        elif 0 in t.shape:
            found.append(call.blocked(t.shape))
        else:
            return None
    return call.rule(found[: len(call.inputs)], found[len(call.inputs) :])


@register("scalar_tensor")
def _scalar(call: RuleBuilder) -> Rule:
    return call.rule([], [()])


@register("full ones zeros new_empty new_zeros new_ones new_full")
def _filled(call: RuleBuilder) -> Rule:
    """Make a new tensor. Of an input only type and device matter."""
    shape = call.outputs[0].shape
    dims = call.dims(shape)
    call.resize_all("size", dims)
    inputs = [dims if tuple(t.shape) == tuple(shape) else call.blocked(t.shape) for t in call.inputs]
    return call.rule(inputs, [dims])


@register("new_empty_strided")
def _strided(call: RuleBuilder) -> Rule | None:
    """Make a dense tensor, in any order of dimensions. A tensor with gaps has no slice with the same strides."""
    shape, strides = call.outputs[0].shape, call["stride"]
    rule = _filled(call)
    # From the innermost dimension outwards: ``inside`` has the factors of those passed, whose product each stride is.
    inside: Factors = ()
    expected = 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], shape[d], -d)):
        if shape[dim] != 1 and strides[dim] != expected:
            return None
        call.resize("stride", dim, inside)
        inside += rule.outputs[0][dim]
        expected *= shape[dim]
    return call.rule(rule.inputs, rule.outputs)
