"""The buffer of a CUDA reduction that several blocks share: ``setReduceConfig`` in PyTorch's ``Reduce.cuh``.

The sum of a gradient over all rows, which is the gradient of a bias, has few results and many terms. So each result is
summed by several blocks of threads, which leave their partial sums in global memory: on an H100, 132 MiB for 3,072
results.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from sacplan.device.devices import DeviceSpec

_MAX_THREADS = 512
_WARP = 32
_MIN_VALUES, _MAX_VALUES = 16, 256
"""Values that a thread sums: fewer are not worth another block, and more are too many for one."""

_Dim = tuple[int, int, int]
"""Elements, stride of the output (0: summed over), stride of the input."""


def reduction_bytes(
    x: torch.Tensor, dims: Collection[int], accumulator_bytes: int, spec: DeviceSpec
) -> Sequence[int]:
    """Return the bytes of the buffer and of its semaphores; nothing if one block sums each result.

    Args:
        x: the input.
        dims: the dimensions that are summed over, none of them negative; none at all stands for all.
        accumulator_bytes: of one element of the accumulator.
    """
    if not x.numel():
        return ()
    iterated = _iterated(x, dims)
    n_summed = sum(not out for _, out, _ in iterated)
    n_inputs = n_outputs = 1
    for size, out, _ in iterated:
        n_inputs, n_outputs = (n_inputs, n_outputs * size) if out else (n_inputs * size, n_outputs)
    # Whether adjacent threads sum one result (``reduction_on_fastest_striding_dimension``), or several.
    along_rows = n_summed == len(iterated) or iterated[0][2] < iterated[n_summed][2]
    width, height = (n_inputs, n_outputs) if along_rows else (n_outputs, n_inputs)
    vector = 1
    if not along_rows and iterated[n_summed][2] == 1:
        vector = _vector(iterated, n_summed)
        width //= vector
    elif along_rows and iterated and iterated[0][2] == 1 and width > 128 and len(iterated) == 1:
        width //= 4
    block_width, block_height = _block(width, height, _MAX_THREADS // vector)
    step_in, step_out = (block_width, 1) if along_rows else (1, block_width)
    # The terms of a result are too few for several warps.
    if -(-n_inputs // step_in) < min(block_height * 16, _MAX_VALUES):
        return ()
    values = -(-n_inputs // (step_in * block_height))
    grid = -(-(n_outputs // vector) // step_out)
    most = spec.sm_count * (spec.threads_per_sm // (block_width * block_height))
    # The terms are too few for several blocks, or the results alone keep the GPU busy.
    if values < _MAX_VALUES or grid > most:
        return ()
    blocks = max(min(-(-most // grid), -(-values // _MIN_VALUES)), -(-values // _MAX_VALUES))
    if blocks == 1:
        return ()
    partial = accumulator_bytes * n_outputs * blocks * (1 if along_rows else block_width * vector)
    return partial, 4 * grid


def _iterated(x: torch.Tensor, dims: Collection[int]) -> list[_Dim]:
    """Return the dimensions as ``TensorIterator`` goes through them: those summed over first, then by stride.

    Neighbours that one stride can step over are joined, as its ``coalesce_dimensions`` does.
    """
    iterated: list[_Dim] = []
    out_stride = 1
    for dim in reversed(range(x.dim())):
        summed = dim in dims or not dims  # no dims: all are summed
        if x.shape[dim] > 1:
            iterated.append((x.shape[dim], 0 if summed else out_stride, x.stride(dim)))
        out_stride *= 1 if summed else x.shape[dim]
    iterated.sort(key=lambda each: (each[1] != 0, each[1], each[2]))
    joined = iterated[:1]
    for size, out, into in iterated[1:]:
        last_size, last_out, last_into = joined[-1]
        # The sizes are above 1, so a dimension that is summed over is never joined with one that is not.
        if (out, into) == (last_size * last_out, last_size * last_into):
            joined[-1] = (last_size * size, last_out, last_into)
        else:
            joined.append((size, out, into))
    return joined


def _vector(iterated: Sequence[_Dim], n_summed: int) -> int:
    """Return how many results a thread has next to each other (``get_output_vec_size``)."""
    vector = 4
    for i, (size, _, into) in enumerate(iterated):
        while (size if i == n_summed else into) % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    across, down = (most if n >= most else 1 << (n.bit_length() - 1) for n in (max(width, 1), max(height, 1)))
    rows = min(down, most // min(across, _WARP))
    return min(across, most // rows), rows
