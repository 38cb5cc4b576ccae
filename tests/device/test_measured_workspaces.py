"""What kernels allocate inside is what an H100 allocated, with torch 2.11, CUDA 13.0 and cuDNN 9.19.

Measured op by op: the allocator's peak of ``requested_bytes`` during the op, less what was alive before or after.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sacplan.device.devices import resolve_device
from sacplan.device.reductions import reduction_bytes
from tests.device.test_kernels import inside

MIB = 2**20
aten = torch.ops.aten
H100 = resolve_device("h100")
BF16, F32 = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mib(func: Any, *args: Any, out: Any = None) -> float:
    return inside(func, *args, out=out, device="h100") / MIB


REDUCED = [
    ((8192, 768), (0,), aten.sum.dim_IntList, BF16, 48.0),
    ((8192, 3072), (0,), aten.sum.dim_IntList, BF16, 132.0),
    ((12544, 768), (0,), aten.sum.dim_IntList, BF16, 73.5),
    ((8192, 32000), (0,), aten.sum.dim_IntList, BF16, 140.625),
    ((4096, 768), (0,), aten.sum.dim_IntList, BF16, 24.0),
    ((4, 1024, 768), (0, 1), aten.sum.dim_IntList, BF16, 24.0),
    ((8, 96, 1536, 8), (2,), aten.sum.dim_IntList, F32, 72.0),
    ((16, 512, 768), (0,), aten.sum.dim_IntList, F32, 0.0),
    ((64, 1000), (0,), aten.sum.dim_IntList, BF16, 0.0),
    ((8192, 4096), (0,), aten.amax.default, BF16, 66.0),
    ((8192, 4096), (0,), aten.amax.default, F32, 132.0),
    ((8192, 4096), (0,), aten.var.correction, BF16, 528.0),
    ((8192, 777), (0,), aten.amax.default, F32, 2.087),
    ((8192, 1026), (0,), aten.var.correction, F32, 63.123),
]


@pytest.mark.parametrize(("shape", "dims", "op", "dtype", "measured"), REDUCED)
def test_reductions(
    shape: tuple[int, ...], dims: tuple[int, ...], op: Any, dtype: torch.dtype, measured: float
) -> None:
    assert mib(op, empty(*shape, dtype=dtype), list(dims)) == pytest.approx(measured, abs=0.002)


def test_a_reduction_of_nothing_and_to_one() -> None:
    assert reduction_bytes(empty(0, 8), (0,), 4, H100) == ()
    assert sum(reduction_bytes(empty(8192, 4096), (), 4, H100)) < MIB


CONVOLVED = [
    # input, weight, stride, padding, forward MiB, backward MiB
    ((64, 64, 56, 56), (64, 64, 3, 3), 1, 1, 49.07, 50.90),
    ((64, 512, 7, 7), (512, 512, 3, 3), 1, 1, 10.63, 10.63),
    ((64, 512, 14, 14), (512, 512, 3, 3), 2, 1, 19.81, 19.81),
    ((64, 2048, 7, 7), (512, 2048, 1, 1), 1, 0, 15.31, 15.31),
    ((64, 256, 14, 14), (1024, 256, 1, 1), 1, 0, 0.0, 32.63),
    ((64, 512, 28, 28), (128, 512, 1, 1), 1, 0, 0.0, 16.0),
    ((64, 64, 56, 56), (256, 64, 1, 1), 1, 0, 0.0, 4.0),
    ((64, 1024, 14, 14), (2048, 1024, 1, 1), 2, 0, 36.75, 36.75),
    ((64, 3, 224, 224), (64, 3, 7, 7), 2, 3, 147.05, 152.89),
    ((64, 3, 224, 224), (768, 3, 16, 16), 16, 0, 70.375, 70.375 + 18),
    ((8, 768, 3000), (768, 768, 3), 2, 1, 56.110, 56.108),
    ((8, 1, 16000), (512, 1, 10), 5, 5, 27.039, 28.913),
]


@pytest.mark.parametrize(("x", "weight", "stride", "padding", "forward", "backward"), CONVOLVED)
def test_convolutions_of_half_types(
    x: tuple[int, ...], weight: tuple[int, ...], stride: int, padding: int, forward: float, backward: float
) -> None:
    dims = len(x) - 2
    rest = ([stride] * dims, [padding] * dims, [1] * dims, False, [0] * dims, 1)
    call = empty(*x), empty(*weight), None, *rest
    out = aten.convolution.default(*call)
    assert mib(aten.convolution.default, *call, out=out) == pytest.approx(forward, abs=0.01)
    found = mib(aten.convolution_backward.default, out, *call, [True, True, False])
    # The gradient of a weight is made in parts, whose number cuDNN chooses: they are not predicted.
    assert found <= backward + 0.01
    assert found == pytest.approx(backward, rel=0.21)


def test_convolutions_in_channels_last() -> None:
    shapes = (8, 3, 224, 224), (768, 3, 16, 16)
    x, weight = (empty(*shape).to(memory_format=torch.channels_last) for shape in shapes)
    rest = ([16, 16], [0, 0], [1, 1], False, [0, 0], 1)
    found = mib(aten.convolution.default, x, weight, None, *rest)
    assert found == pytest.approx(9.125, abs=0.001)  # three channels, as eight


@pytest.mark.parametrize(
    ("shape", "kv_heads", "measured"),
    [((8, 12, 1024, 64), 12, 24.375), ((8, 12, 1024, 64), 4, 48.375), ((4, 12, 1024, 64), 4, 24.188)],
)
def test_the_backward_pass_of_cudnn_attention(
    shape: tuple[int, int, int, int], kv_heads: int, measured: float
) -> None:
    q, kv = empty(*shape), empty(shape[0], kv_heads, *shape[2:])
    out, logsumexp = empty(*shape), empty(*shape[:3], 1, dtype=F32)
    args = (out, q, kv, kv, out, logsumexp, *[None] * 5, 0, 0, 0.0, False)
    found = mib(aten._scaled_dot_product_cudnn_attention_backward.default, *args)
    assert found == pytest.approx(measured, abs=0.002)


def test_norms_and_embeddings_copy_what_is_not_contiguous() -> None:
    x = empty(64, 768, 196).transpose(1, 2)
    w = empty(768)
    for op, args in (
        (aten.native_layer_norm.default, (x, [768], w, w, 1e-5)),
        (aten._fused_rms_norm.default, (x, [768], w, None)),
    ):
        assert mib(op, *args) == pytest.approx(18.375)
        assert mib(op, x.contiguous(), *args[1:]) == 0
    indices = torch.empty(32, 256, dtype=torch.long, device="meta")
    grad = empty(256, 32, 768).transpose(0, 1)
    found = mib(aten.embedding_dense_backward.default, grad, indices, 32000, -1, False)
    assert found == pytest.approx(38.782, abs=0.01)
