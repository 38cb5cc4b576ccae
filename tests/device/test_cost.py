"""FLOPs, bytes and time of single ops and of a transformer layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from sacplan.device.cost import CostModel
from sacplan.device.devices import resolve_device
from sacplan.device.flops import op_flops
from sacplan.device.kernels import fake_device
from sacplan.device.op_kernels import Call
from tests.support.ops import Ops

aten = torch.ops.aten
H100 = resolve_device("h100")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_layer_flops_equal_flop_counter(device: str, dtype: torch.dtype) -> None:
    with fake_device(device):
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, 0.1, "gelu", batch_first=True, norm_first=True, dtype=dtype
        )
        x = torch.randn(2, 32, 64, dtype=dtype, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        with Ops(CostModel(resolve_device(device)).cost) as costs:
            layer(x).sum().backward()
    assert counter.get_total_flops() == sum(flops for flops, _ in costs.noted) > 0
    assert sum(ms for _, ms in costs.noted) > 0


def test_convolution_flops_equal_flop_counter() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, groups=1), nn.ConvTranspose2d(8, 4, 3))
        x = torch.randn(2, 3, 17, 17, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            net(x).sum().backward()
        with Ops(CostModel(H100).cost) as costs:
            net(x).sum().backward()
    assert counter.get_total_flops() == sum(flops for flops, _ in costs.noted) > 0


@pytest.mark.parametrize("heads_k", [4, 2])
def test_cpu_flash_attention_counts(heads_k: int) -> None:
    q = torch.randn(2, 4, 16, 8, requires_grad=True)
    k, v = (torch.randn(2, heads_k, 16, 8, requires_grad=True) for _ in range(2))
    with Ops(lambda call: (str(call.func), op_flops(call))) as seen:
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads_k != 4).sum().backward()
    by_name = {name: flops for name, flops in seen.noted if flops}
    matmul = 2 * 2 * 4 * 16 * 16 * 8
    assert by_name == {
        "aten._scaled_dot_product_flash_attention_for_cpu.default": 2 * matmul,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": 5 * matmul,
    }


def test_grouped_mm_flops() -> None:
    a, b = torch.empty(12, 8), torch.empty(3, 8, 5)
    assert op_flops(Call(aten._grouped_mm.default, (a, b), {}, torch.empty(12, 5))) == 2 * 12 * 8 * 5
    assert op_flops(Call(aten._grouped_mm.default, (a.t(), torch.empty(12, 5)), {}, b)) == 2 * 12 * 8 * 5


def test_matmul_time_is_the_roofline() -> None:
    n = 8192
    a = torch.empty(n, n, dtype=torch.bfloat16, device="meta")
    flops = 2 * n**3
    assert op_flops(Call(aten.mm.default, (a, a), {}, a)) == flops
    launch = H100.kernel_launch_us * 1e-3
    want = flops / (989.5e12 * H100.compute_efficiency * H100.sustained_share) * 1e3 + launch
    assert CostModel(H100).cost(Call(aten.mm.default, (a, a), {}, a))[1] == pytest.approx(want)

    f = a.float()
    for tf32, peak in ((False, 67e12), (True, 494.5e12)):
        _, ms = CostModel(H100, tf32=tf32).cost(Call(aten.mm.default, (f, f.t()), {}, f))
        assert ms == pytest.approx(
            flops / (peak * H100.compute_efficiency * H100.sustained_share) * 1e3 + launch
        )


def test_tf32_follows_torch() -> None:
    f = torch.empty(4096, 4096, device="meta")
    slow = CostModel(H100).cost(Call(aten.mm.default, (f, f), {}, f))[1]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        fast = CostModel(H100).cost(Call(aten.mm.default, (f, f), {}, f))[1]
    finally:
        torch.set_float32_matmul_precision(before)
    assert fast < slow / 4


def test_peak_is_that_of_the_matrix_operands() -> None:
    bias = torch.empty(4096, device="meta")
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    _, mixed = CostModel(H100, tf32=False).cost(Call(aten.addmm.default, (bias, a, a), {}, a))
    _, plain = CostModel(H100, tf32=False).cost(Call(aten.mm.default, (a, a), {}, a))
    assert mixed == pytest.approx(plain, rel=1e-3)


def test_bytes() -> None:
    x = torch.empty(100, 10)
    row = torch.empty(10).expand(100, 10)
    assert Call(aten.add.Tensor, (x, x), {}, x).nbytes == 2 * 4000
    assert Call(aten.add.Tensor, (x, row), {}, x).nbytes == 2 * 4000 + 40
    assert Call(aten.zero_.default, (x,), {}, x).nbytes == 4000
    assert Call(aten.copy_.default, (x, x.half()), {}, x).nbytes == 4000 + 2000
    assert Call(aten.gt.Scalar, (x, 0), {}, x > 0).nbytes == 4000 + 1000
    table, index = torch.empty(10_000, 10), torch.zeros(7, dtype=torch.long)
    assert Call(aten.embedding.default, (table, index), {}, torch.empty(7, 10)).nbytes == 280 + 56 + 280
    assert Call(aten._foreach_add_.Scalar, ([x, x.clone()], 1.0), {}, None).nbytes == 2 * 8000
    assert Call(aten.sum.default, (torch.empty(0),), {}, torch.empty(())).nbytes == 4


def test_views_and_queries_are_free() -> None:
    x = torch.empty(4, 4)
    for func, args, out in (
        (aten.view.default, (x, [16]), x.view(16)),
        (aten._unsafe_view.default, (x, [16]), x.view(16)),
        (aten.t.default, (x,), x.t()),
        (aten.detach.default, (x,), x.detach()),
        (aten.empty.memory_format, ([4],), torch.empty(4)),
        (aten.empty_like.default, (x,), x),
        (aten.split.Tensor, (x, 2), x.split(2)),
        (torch.ops.prim.device.default, (x,), x.device),
    ):
        assert CostModel(H100).cost(Call(func, args, {}, out)) == (0, 0.0), func
    assert CostModel(H100).cost(Call(aten.clone.default, (x,), {}, x))[1] > 0
    assert CostModel(H100).cost(Call(aten.add_.Tensor, (x, x), {}, x))[1] > 0


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_grouped_convolutions_count_one_filter(groups: int, transposed: bool) -> None:
    """Each gradient has as many FLOPs as the forward pass, whatever the groups."""
    x, make = torch.empty(2, 8, 6, 6, device="meta"), nn.ConvTranspose2d if transposed else nn.Conv2d
    weight = make(8, 16, 3, groups=groups, device="meta").weight
    geometry = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
    y = aten.convolution.default(x, weight, None, *geometry)
    forward = op_flops(Call(aten.convolution.default, (x, weight, None, *geometry), {}, y))
    for mask in ([True, True, False], [False, True, True], [True, False, False]):
        args = (y, x, weight, [16], *geometry, mask)
        out = aten.convolution_backward.default(*args)
        assert op_flops(Call(aten.convolution_backward.default, args, {}, out)) == forward * sum(mask[:2])
