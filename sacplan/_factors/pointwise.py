"""Ops that compute each element of the output from one element of each input, inputs broadcast."""

from __future__ import annotations

from collections.abc import Sequence

from sacplan._factors.rule import Call, Dims, Kind, Rule, register


def broadcast(dims: Dims, to: Sequence[int], shape: Sequence[int]) -> Dims | None:
    """The factors of a tensor that is broadcast to a shape with factors ``dims``; None if it is not."""
    missing = len(to) - len(shape)
    if missing < 0 or any(n not in (1, to[missing + i]) for i, n in enumerate(shape)):
        return None
    return tuple(dims[missing + i] if n != 1 else () for i, n in enumerate(shape))


# Those that PyTorch tags as pointwise need not be named.
@register(
    "pointwise",
    """_conj _prelu_kernel complex floor_divide hardshrink_backward hardswish polar rsub _prelu_kernel_backward _to_copy alias clone contiguous copy detach detach_copy elu_backward
    empty_like fill full_like gelu_backward hardsigmoid_backward hardswish_backward
    hardtanh_backward leaky_relu_backward lift_fresh log_sigmoid_backward log_sigmoid_forward
    logical_and logical_not logical_or masked_fill mish_backward nan_to_num native_dropout_backward
    ones_like rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward
    softshrink_backward tanh_backward threshold_backward zero zeros_like""",
)
def pointwise(call: Call) -> Rule | None:
    """One factor for each dimension of the output."""
    shape = call.outputs[0].shape
    if any(tuple(o.shape) != tuple(shape) for o in call.outputs):
        return None
    dims = call.dims(shape)
    inputs = []
    for t in call.inputs:
        found = broadcast(dims, shape, t.shape)
        if found is None:
            return None
        inputs.append(found)
    return call.rule(inputs, [dims] * len(call.outputs))


@register("scalar_tensor")
def _scalar(call: Call) -> Rule:
    return call.rule([], [()])


@register("isin", "bucketize")
def _looked_up(call: Call) -> Rule | None:
    """Elements are looked up one by one in a second tensor, which is needed whole."""
    if len(call.inputs) != 2 or tuple(call.outputs[0].shape) != tuple(call.inputs[0].shape):
        return None
    dims = call.dims(call.outputs[0].shape)
    return call.rule([dims, call.blocked(call.inputs[1].shape)], [dims])


@register("full", "ones", "zeros", "new_empty", "new_zeros", "new_ones", "new_full")
def _filled(call: Call) -> Rule:
    """A new tensor; of an input, only type and device matter."""
    shape = call.outputs[0].shape
    dims = call.dims(shape)
    call.resize_all("size", dims)
    inputs = [dims if tuple(t.shape) == tuple(shape) else call.dims(t.shape, Kind.BLOCK) for t in call.inputs]
    return call.rule(inputs, [dims])
