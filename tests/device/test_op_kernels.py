"""The kernels of ops on a CUDA device: kinds, bytes and passes; and times that grow with sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sacplan.device.cost import CostModel
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.flops import op_flops
from sacplan.device.kernel_rates import KINDS
from sacplan.device.op_kernels import Call, Kernel, kernels_of

aten = torch.ops.aten
H100, CPU = resolve_device("h100"), resolve_device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels(func: Any, *args: Any, **kwargs: Any) -> tuple[Kernel, ...]:
    out = func(*args, **kwargs)
    found = kernels_of(Call(func, args, kwargs, out))
    assert {k.kind for k in found} <= KINDS.keys()
    return found


def kinds(func: Any, *args: Any, **kwargs: Any) -> list[str]:
    return [k.kind for k in kernels(func, *args, **kwargs)]


X = meta(64, 4096)
NBYTES = X.nbytes


def test_attention() -> None:
    q = meta(2, 8, 4096, 128, dtype=BF16)
    op = aten._scaled_dot_product_flash_attention.default
    (full,), (causal,) = kernels(op, q, q, q), kernels(op, q, q, q, 0.0, True)
    assert full.kind == "flash_attention"
    assert full.flops == 4 * 2 * 8 * 4096**2 * 128
    assert 0.5 < causal.flops / full.flops < 0.52
    out = op(q, q, q)
    args = (q, q, q, q, out[0], out[1], *out[2:6], 0.0, False, *out[6:8])
    backward = kernels(aten._scaled_dot_product_flash_attention_backward.default, *args)
    assert [k.kind for k in backward] == ["pointwise", "flash_attention_backward", "pointwise"]
    assert backward[1].flops == 5 / 2 * full.flops
    # FlashAttention-2's paper, figure 5: 190 TFLOP/s with heads of 64, and 228 with heads of 128.
    small = meta(2, 16, 4096, 64, dtype=BF16)
    assert kernels(op, small, small, small)[0].flops / full.flops == pytest.approx(228 / 190, rel=0.01)
    efficient = aten._scaled_dot_product_efficient_attention.default
    assert kinds(efficient, q, q, q, None, True) == ["efficient_attention"]


def test_batch_norm_of_pytorch_has_one_block_for_a_channel() -> None:
    x, scale = meta(12, 64, 56, 56, dtype=BF16), meta(64)
    moments, rest = kernels(aten.native_batch_norm.default, x, scale, scale, scale, scale, True, 0.1, 1e-5)
    assert (moments.kind, moments.block_elements, rest.kind) == ("moments", 12 * 56 * 56, "norm")
    cost = CostModel(H100)
    launch, walked = 1e-3 * H100.kernel_launch_us, cost.kernel_ms(moments)
    spread = cost.kernel_ms(replace(moments, block_elements=0))
    assert (walked - launch) / (spread - launch) == pytest.approx(132 / 64)  # 64 of 132 multiprocessors work
    last = x.contiguous(memory_format=torch.channels_last)
    args = (scale, scale, scale, scale, True, 0.1, 1e-5)
    assert kinds(aten.native_batch_norm.default, last, *args) == ["reduction", "norm"]
    assert kinds(aten.cudnn_batch_norm.default, x, *args) == ["reduction", "norm"]


def test_float32_on_matrix_units_and_without_them() -> None:
    images, filters = meta(8, 64, 56, 56), meta(64, 64, 3, 3)
    last = images.contiguous(memory_format=torch.channels_last)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    last_filters = filters.contiguous(memory_format=torch.channels_last)

    def found(x: torch.Tensor, stride: int, tf32: bool, w: torch.Tensor = filters) -> tuple[list[str], float]:
        args = (x, w, None, [stride, stride], *geometry[1:])
        call = Call(aten.convolution.default, args, {}, aten.convolution.default(*args), tf32=tf32)
        kernels = kernels_of(call)
        return [k.kind for k in kernels], call.flops / kernels[0].flops

    assert found(images, 1, tf32=True) == (["convolution", "strided"], 1)
    assert found(last, 1, True, last_filters) == found(last, 1, False, last_filters) == (["convolution"], 1)
    assert found(images, 1, tf32=False) == (["convolution"], pytest.approx(2.25))  # F(2 x 2, 3 x 3)
    assert found(images, 2, tf32=False) == (["convolution"], 1)


def test_a_convolution_in_channels_last_copies_the_operands_that_are_not() -> None:
    images, filters = (meta(*shape, dtype=BF16) for shape in ((8, 64, 56, 56), (64, 64, 3, 3)))
    last, last_filters = (t.contiguous(memory_format=torch.channels_last) for t in (images, filters))
    geometry = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def copied(x: torch.Tensor, w: torch.Tensor, *grad: torch.Tensor) -> list[int]:
        op = aten.convolution_backward.default if grad else aten.convolution.default
        found = kernels(op, *grad, x, w, *geometry, *([[True, True, False]] if grad else []))
        return [k.nbytes for k in found if k.kind == "strided"]

    assert copied(last, last_filters) == copied(last, last_filters, last) == []
    assert copied(images, last_filters, last) == [2 * images.nbytes]
    assert copied(last, filters, images) == [2 * filters.nbytes, 2 * images.nbytes]


def test_products_in_tf32_are_faster_along_the_inner_dimension() -> None:
    a, half = meta(1024, 1024), meta(1024, 1024, dtype=BF16)

    def times(x: torch.Tensor, spec: DeviceSpec) -> list[float]:
        pairs = (
            (x, x.t()),
            (x, x),
            (x.t(), x),
        )  # a linear layer, the gradients of its input and of its weight
        return [CostModel(spec, tf32=True).cost(Call(aten.mm.default, p, {}, x))[1] for p in pairs]

    forward, of_input, of_weight = times(a, H100)
    assert forward < of_input == of_weight
    assert len({*times(half, H100)}) == len({*times(a, resolve_device("v100"))}) == 1


# --- times ----------------------------------------------------------------------------------------------

OPS = {
    "add": lambda n, m: (aten.add.Tensor, (meta(n, m), meta(n, m))),
    "bias": lambda n, m: (aten.add.Tensor, (meta(n, m), meta(m))),
    "sum": lambda n, m: (aten.sum.dim_IntList, (meta(n, m), [-1])),
    "mm": lambda n, m: (aten.mm.default, (meta(n, m), meta(m, 256))),
    "layer norm": lambda n, m: (aten.native_layer_norm.default, (meta(n, m), [m], meta(m), meta(m), 1e-5)),
    "softmax": lambda n, m: (aten._softmax.default, (meta(n, m), -1, False)),
    "embedding": lambda n, m: (aten.embedding.default, (meta(100, m), torch.empty(n, dtype=torch.long, device="meta"))),
    "cumsum": lambda n, m: (aten.cumsum.default, (meta(n, m), -1)),
}  # fmt: skip


def ms(spec: DeviceSpec, name: str, n: int, m: int) -> float:
    func, args = OPS[name](n, m)
    return CostModel(spec, tf32=False).cost(Call(func, args, {}, func(*args)))[1]


@given(
    st.sampled_from(sorted(OPS)),
    st.integers(1, 5000),
    st.integers(2, 5000),
    st.integers(0, 5000),
    st.sampled_from(["h100", "a100-80gb", "rtx-4090", "mi300x"]),
)
def test_time_grows_with_the_number_of_rows(
    name: str, rows: int, columns: int, more: int, device: str
) -> None:
    spec = resolve_device(device)
    assert ms(spec, name, rows + more, columns) >= ms(spec, name, rows, columns)


@pytest.mark.parametrize("name", sorted(OPS))
def test_on_a_cpu_time_is_the_plain_roofline(name: str) -> None:
    func, args = OPS[name](300, 700)
    out = func(*args)
    flops = op_flops(Call(func, args, {}, out))
    compute_s = flops / (CPU.flops["float32"] * CPU.compute_efficiency)
    memory_s = Call(func, args, {}, out).nbytes / (CPU.bandwidth_bytes_per_s * CPU.bandwidth_efficiency)
    want = max(compute_s, memory_s) * 1e3 + CPU.kernel_launch_us * 1e-3
    assert CostModel(CPU).cost(Call(func, args, {}, out)) == (flops, want)


def test_a_spec_of_the_users_own_needs_few_figures() -> None:
    spec = DeviceSpec(
        name="mine", kind="cuda", memory_bytes=2**34, bandwidth_bytes_per_s=1e12, flops={"float32": 2e13}
    )
    add = CostModel(spec).cost(Call(aten.add.Tensor, (X, meta(64, 4096)), {}, X))[1]
    assert add == pytest.approx(3 * NBYTES / (1e12 * 0.8) * 1e3 + 3e-3)
