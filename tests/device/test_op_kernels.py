"""The kernels of ops on a CUDA device: kinds, bytes and passes; and times that grow with sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sacplan._device.cost import CostModel, op_bytes, op_flops
from sacplan._device.devices import DeviceSpec, resolve_device
from sacplan._device.kernel_rates import KINDS, KernelRates
from sacplan._device.op_kernels import Call, Kernel, kernels_of

aten = torch.ops.aten
H100, CPU = resolve_device("h100"), resolve_device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels(func: Any, *args: Any, **kwargs: Any) -> tuple[Kernel, ...]:
    out = func(*args, **kwargs)
    found = kernels_of(Call(func, args, kwargs, out, op_flops(func, args, kwargs, out)))
    assert {k.kind for k in found} <= KINDS.keys()
    return found


def kinds(func: Any, *args: Any, **kwargs: Any) -> list[str]:
    return [k.kind for k in kernels(func, *args, **kwargs)]


X = meta(64, 4096)
HALF = X.to(BF16)
NBYTES = X.nbytes


# --- elementwise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("func", "args", "kind", "nbytes"),
    [
        (aten.add.Tensor, (X, meta(64, 4096)), "pointwise", 3 * NBYTES),
        (aten.mul.Tensor, (X, X), "pointwise", 2 * NBYTES),
        (aten.add_.Tensor, (X, meta(64, 4096)), "pointwise", 3 * NBYTES),
        (aten.add.Tensor, (X, meta(4096)), "strided", 2 * NBYTES + 4 * 4096),
        (aten.add.Tensor, (X.t(), meta(4096, 64)), "strided", 3 * NBYTES),
        (aten.add.Tensor, (X.t(), meta(64, 4096).t()), "pointwise", 3 * NBYTES),
        (aten.silu.default, (X[:, ::2],), "strided", 3 * NBYTES // 2),
        # One value for all elements needs no offsets.
        (aten.mul.Tensor, (X, meta()), "pointwise", 2 * NBYTES + 4),
        (aten.mul.Tensor, (X, meta().expand(64, 4096)), "pointwise", 2 * NBYTES + 4),
        (aten.gt.Scalar, (X, 0), "pointwise", NBYTES + NBYTES // 4),
        (aten.add.Tensor, (X, HALF), "cast", 2 * NBYTES + NBYTES // 2),
    ],
)
def test_elementwise(func: Any, args: tuple[Any, ...], kind: str, nbytes: int) -> None:
    (kernel,) = kernels(func, *args)
    if func is aten.silu.default:  # its output is dense
        nbytes = NBYTES
    assert (kernel.kind, kernel.nbytes) == (kind, nbytes)


def test_casts_to_half_precision_are_vectorized() -> None:
    assert kinds(aten._to_copy.default, X, dtype=BF16) == ["pointwise"]
    assert kinds(aten._to_copy.default, HALF, dtype=F32) == ["cast"]
    assert kinds(aten.copy_.default, HALF, X) == ["pointwise"]


def test_an_operand_given_twice_is_read_once() -> None:
    model, other = CostModel(H100), meta(64, 4096)
    twice = model.cost(aten.mul.Tensor, (X, X), {}, other)[1]
    assert twice < model.cost(aten.mul.Tensor, (X, other), {}, other)[1]
    assert twice == model.cost(aten.mul.Tensor, (other, other), {}, X)[1]
    # On a CPU times stay those of the plain roofline.
    assert op_bytes(aten.mul.Tensor, (X, X), {}, X) == 3 * NBYTES


def test_fills_random_numbers_and_lists() -> None:
    assert kernels(aten.zeros_like.default, X) == (Kernel("pointwise", NBYTES),)
    assert kernels(aten.randn_like.default, X) == (Kernel("random", NBYTES, X.numel()),)
    (dropout,) = kernels(aten.native_dropout.default, X, 0.1, True)
    assert dropout == Kernel("random", 2 * NBYTES + X.numel(), X.numel())
    lists = [[meta(1000) for _ in range(200)] for _ in range(2)]
    (add,) = kernels(aten._foreach_add.List, *lists)
    assert (add.kind, add.nbytes, add.launches) == ("foreach", 3 * 200 * 4000, -(-200 // 48))
    one = [[meta(65536 * 1000)]] * 2
    (add_,) = kernels(aten._foreach_add_.List, *one)
    assert add_.launches == -(-1000 // 320)


# --- rows -----------------------------------------------------------------------------------------------


def test_softmax_reads_a_long_row_three_times() -> None:
    for columns, dtype, reads in ((512, F32, 1), (16_384, F32, 1), (16_400, F32, 3), (32_768, BF16, 1)):
        x = meta(8, columns, dtype=dtype)
        (kernel,) = kernels(aten._log_softmax.default, x, -1, False)
        assert kernel == Kernel("softmax", (reads + 1) * x.nbytes, 8 if columns > 1024 else 0)


def test_gradients_of_softmax() -> None:
    for columns, passes in ((512, 3), (12_288, 3), (16_384, 4)):
        x = meta(8, columns)
        (log,) = kernels(aten._log_softmax_backward_data.default, x, meta(8, columns), -1, F32)
        assert log.nbytes == passes * x.nbytes
        product, rest = kernels(aten._softmax_backward_data.default, x, meta(8, columns), -1, F32)
        assert product == Kernel("pointwise", 3 * x.nbytes)
        assert rest == log


def test_losses() -> None:
    scores, target = meta(1024, 8), torch.empty(1024, dtype=torch.long, device="meta")
    assert kernels(aten.nll_loss_forward.default, scores, target, None, 1, -100) == (
        Kernel("nll", elements=1024),
    )
    assert kinds(aten.nll_loss_forward.default, scores, target, None, 0, -100) == ["gather"]
    args = (meta(), scores, target, None, 1, -100, meta())
    fill, _ = kernels(aten.nll_loss_backward.default, *args)
    assert fill == Kernel("pointwise", scores.nbytes)


def test_the_gradient_of_a_layer_norm_is_two_kernels_that_read_everything() -> None:
    w, moments = meta(4096), meta(64, 1)
    assert kernels(aten.native_layer_norm.default, X, [4096], w, w, 1e-5)[0].nbytes >= 2 * NBYTES
    args = (meta(64, 4096), X, [4096], moments, moments, w, w)
    backward = aten.native_layer_norm_backward.default
    assert kernels(backward, *args, [True, True, True]) == (
        Kernel("norm_backward", 3 * NBYTES),
        Kernel("norm_backward", 2 * NBYTES),
    )
    assert kernels(backward, *args, [True, False, False]) == (Kernel("norm_backward", 3 * NBYTES),)


def test_other_norms() -> None:
    x, w = meta(16, 8, 100), meta(8)
    moments, _, last = kernels(aten.native_group_norm.default, x, w, w, 16, 8, 100, 2, 1e-5)
    assert moments == Kernel("moments", x.nbytes, x.numel())
    assert last == Kernel("strided", 2 * x.nbytes, x.numel())
    mean = meta(16, 2)
    args = (x, meta(16, 8, 100), mean, mean, w, 16, 8, 100, 2, [True, True, True])
    found = kernels(aten.native_group_norm_backward.default, *args)
    assert [k.kind for k in found] == ["moments", "pointwise", "strided", "batch_walk"]
    assert found[-1].elements == 16
    batch = aten.native_batch_norm.default
    assert kinds(batch, x, w, w, meta(8), meta(8), True, 0.1, 1e-5) == ["reduction", "norm"]
    assert kinds(batch, x, w, w, meta(8), meta(8), False, 0.1, 1e-5) == ["norm"]


def test_reductions_and_scans() -> None:
    assert kernels(aten.sum.dim_IntList, X, [-1]) == (Kernel("reduction", NBYTES + 64 * 4),)
    assert kinds(aten.amax.default, X, [0]) == ["reduction"]
    assert kinds(aten.max.other, X, meta(64, 4096)) == ["pointwise"]
    assert kernels(aten.cumsum.default, X, -1) == (Kernel("scan", 2 * NBYTES),)


# --- indices --------------------------------------------------------------------------------------------


def test_gathers_and_scatters() -> None:
    table, ids = meta(10_000, 64), torch.empty(4096, dtype=torch.long, device="meta")
    rows = 4096 * 64
    (found,) = kernels(aten.embedding.default, table, ids)
    assert found == Kernel("gather", 2 * 4 * rows + ids.nbytes, rows)
    assert kinds(aten.index_select.default, table, 0, ids) == ["gather"]
    index = ids.view(4096, 1).expand(4096, 64)
    assert kinds(aten.scatter_add.default, table, 0, index, meta(4096, 64)) == ["pointwise", "gather"]
    assert kinds(aten.scatter_add_.default, table, 0, index, meta(4096, 64)) == ["gather"]
    source = meta(4096, 64)
    assert kinds(aten.index_put_.default, table, [ids], source, False) == ["gather"]
    assert kinds(aten.index_put_.default, table, [ids], source, True) == ["index_sort", "sort", "gather"]


def test_the_gradient_of_an_embedding() -> None:
    ids, backward = (
        torch.empty(16_384, dtype=torch.long, device="meta"),
        aten.embedding_dense_backward.default,
    )
    found = kernels(backward, meta(16_384, 64), ids, 1024, -1, False)
    assert [k.kind for k in found] == ["pointwise", "index_sort", "sort", "strided", "gather"]
    # All 1,024 words occur, 16 times each: two partial sums of a word, in the mean.
    assert found[-1].elements / 64 == pytest.approx(2 * 1024, rel=0.06)
    rare = kernels(backward, meta(16_384, 64), ids, 10**7, -1, False)
    assert rare[-1].elements / 64 == pytest.approx(16_384, rel=0.01)
    assert kinds(backward, meta(64, 64), ids[:64], 1024, -1, False) == ["pointwise", "gather"]


def test_sorts_and_cat() -> None:
    assert kinds(aten.sort.default, X) == ["sort"]
    assert kinds(aten.sort.default, meta(4, 8192)) == ["sort", "sort"]
    assert kinds(aten.topk.default, X, 8) == ["reduction", "sort"]
    assert kernels(aten.cat.default, [X, X.clone()]) == (Kernel("strided", 4 * NBYTES, 2 * X.numel()),)


# --- matrix units ---------------------------------------------------------------------------------------


def test_products_count_padding_and_idle_multiprocessors() -> None:
    (large,) = kernels(aten.mm.default, meta(4096, 4096), meta(4096, 4096))
    assert large.flops == 2 * 4096**3
    (odd,) = kernels(aten.mm.default, meta(65, 512), meta(512, 64))
    assert odd.flops == 2 * 128 * 64 * 512
    model = CostModel(H100, tf32=False)
    small = model.cost(aten.mm.default, (meta(64, 512), meta(512, 64)), {}, meta(64, 64))[1]
    wide = model.cost(aten.mm.default, (meta(64, 512), meta(512, 640)), {}, meta(64, 640))[1]
    assert small == wide  # neither has a tile for each multiprocessor


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
    efficient = aten._scaled_dot_product_efficient_attention.default
    assert kinds(efficient, q, q, q, None, True) == ["efficient_attention"]


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
    return CostModel(spec, tf32=False).cost(func, args, {}, func(*args))[1]


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


@given(st.sampled_from(sorted(OPS)), st.integers(1, 4096), st.integers(2, 4096), st.floats(0.1, 1.0))
def test_efficiencies_scale_what_they_bound(name: str, rows: int, columns: int, share: float) -> None:
    """Half of a device's bandwidth and peaks is twice the time at most, besides launches."""
    slower = replace(
        H100,
        bandwidth_efficiency=H100.bandwidth_efficiency * share,
        compute_efficiency=H100.compute_efficiency * share,
        kernel_launch_us=0.0,
    )
    fast = replace(H100, kernel_launch_us=0.0)
    before, after = ms(fast, name, rows, columns), ms(slower, name, rows, columns)
    assert before <= after <= before / share * (1 + 1e-9)


@given(st.integers(1, 2**22), st.integers(1, 2**22))
def test_times_of_kernels_add_up(first: int, second: int) -> None:
    """Work done in two launches takes a launch more than in one."""
    model = CostModel(H100)
    apart = model.kernel_ms(Kernel("norm", first)) + model.kernel_ms(Kernel("norm", second))
    assert apart == pytest.approx(model.kernel_ms(Kernel("norm", first + second)) + 3e-3)


@pytest.mark.parametrize("name", sorted(OPS))
def test_on_a_cpu_time_is_the_plain_roofline(name: str) -> None:
    func, args = OPS[name](300, 700)
    out = func(*args)
    flops = op_flops(func, args, {}, out)
    compute_s = flops / (CPU.flops["float32"] * CPU.compute_efficiency)
    memory_s = op_bytes(func, args, {}, out) / (CPU.bandwidth_bytes_per_s * CPU.bandwidth_efficiency)
    want = max(compute_s, memory_s) * 1e3 + CPU.kernel_launch_us * 1e-3
    assert CostModel(CPU).cost(func, args, {}, out) == (flops, want)


def test_a_spec_of_the_users_own_needs_no_rates() -> None:
    spec = DeviceSpec(
        name="mine", kind="cuda", memory_bytes=2**34, bandwidth_bytes_per_s=1e12, flops={"float32": 2e13}
    )
    assert spec.rates == KernelRates()
    add = CostModel(spec).cost(aten.add.Tensor, (X, meta(64, 4096)), {}, X)[1]
    assert add == pytest.approx(3 * NBYTES / (1e12 * 0.8) * 1e3 + 3e-3)
    assert ms(replace(spec, rates=KernelRates(norm=0.1)), "layer norm", 4096, 4096) > ms(
        spec, "layer norm", 4096, 4096
    )
