"""The kernel table, what the routed kernels save, and that nothing of it outlives its context."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from sacplan.device import attention
from sacplan.device.attention import AttentionCall, attention_backend, cudnn_promoted
from sacplan.device.cublas import library_workspace_bytes, workspaces_stay
from sacplan.device.devices import resolve_device
from sacplan.device.kernel_workspaces import kernel_workspace_bytes
from sacplan.device.kernels import active_device, device_kernels, fake_device
from sacplan.device.op_kernels import Call
from sacplan.errors import DeviceError
from tests.support.ops import Ops
from tests.support.threads import at_once

aten = torch.ops.aten
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPE = (2, 4, 128, 64)
Saved = Counter[tuple[tuple[int, ...], torch.dtype]]


def saved_by(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Saved]:
    saved: Saved = Counter()

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved[(tuple(t.shape), t.dtype)] += 1
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        out = run()
    return out, saved


def qkv(
    dtype: torch.dtype = BF16, shape: tuple[int, ...] = SHAPE, kv: tuple[int, ...] | None = None
) -> list[torch.Tensor]:
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in (shape, kv or shape, kv or shape)]


# --------------------------------------------------------------------------------------- which backend


BACKENDS = json.loads(Path(__file__).with_name("attention_backends.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("device", "dtype", "options", "want"), BACKENDS)
def test_attention_backend(device: str, dtype: str, options: dict[str, Any], want: str) -> None:
    """Release 2.13, unless ``version`` says another."""
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    q = options.pop("q", SHAPE)
    kv = options.pop("kv", q)
    options.setdefault("version", (2, 13))
    preferences = {name: options.pop(name) for name in ("priority", "enabled") if name in options}
    call = AttentionCall(q, kv, kv, getattr(torch, dtype), **options)
    assert attention_backend(resolve_device(device), call, **preferences) == want


# --------------------------------------------------------------------------------------- what is saved


def test_flash_saves() -> None:
    with fake_device("a100-80gb"):
        q, k, v = qkv()
        with Ops() as ops:
            out, saved = saved_by(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
            out.sum().backward()
    assert saved == {
        (SHAPE, BF16): 4,
        (SHAPE[:3], FP32): 1,
        ((2,), torch.uint64): 1,
        ((), torch.uint64): 1,
    }
    assert "_scaled_dot_product_flash_attention" in ops.noted
    assert "_scaled_dot_product_flash_attention_backward" in ops.noted
    assert q.grad is not None


def test_flash_pads_the_head_and_keeps_the_padded() -> None:
    with fake_device("a100-80gb"):
        q, k, v = qkv(shape=(2, 4, 128, 60))
        out, saved = saved_by(lambda: F.scaled_dot_product_attention(q, k, v))
        assert out.shape == (2, 4, 128, 60)
        assert saved[((2, 4, 128, 64), BF16)] == 4
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_efficient_saves(dtype: torch.dtype) -> None:
    with fake_device("a100-80gb"), sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        q, k, v = qkv(dtype, (2, 4, 40, 64))
        out, saved = saved_by(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True))
        out.sum().backward()
        assert out.transpose(1, 2).is_contiguous()
    assert saved == {((2, 4, 40, 64), dtype): 4, ((2, 4, 64), FP32): 1, ((), torch.int64): 2}


@pytest.mark.parametrize("columns", [40, 37])
def test_efficient_saves_the_mask_expanded_not_materialized(columns: int) -> None:
    with fake_device("a100-80gb"):
        q, k, v = qkv(shape=(2, 4, 40, 64), kv=(2, 4, columns, 64))
        mask = torch.ones(2, 1, 40, columns, dtype=torch.bool)
        bias: list[torch.Tensor] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            if t.shape == (2, 4, 40, columns):
                bias.append(t)
            return t

        with saved_tensors_hooks(pack, lambda t: t):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out.sum().backward()
    (kept,) = bias
    assert kept.dtype == BF16
    assert kept.stride() == (40 * 40, 0, 40, 1)  # rows padded to a multiple of 8
    assert kept.untyped_storage().nbytes() == 2 * 40 * 40 * 2


def test_mask_that_needs_grad() -> None:
    with fake_device("a100-80gb"):
        q, k, v = qkv(shape=(2, 4, 40, 64))
        bias = torch.randn(1, 4, 40, 40, dtype=BF16, requires_grad=True)
        F.scaled_dot_product_attention(q, k, v, attn_mask=bias).sum().backward()
        assert bias.grad is not None
        assert bias.grad.shape == bias.shape


@pytest.mark.skipif(not cudnn_promoted(resolve_device("h100"), (2, 13)), reason="cuDNN not promoted")
def test_cudnn_saves() -> None:
    with fake_device("h100"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = qkv(kv=(2, 2, 128, 64))
        out, saved = saved_by(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
        out.sum().backward()
        assert k.grad is not None
        assert k.grad.shape == k.shape
    assert saved == {
        (SHAPE, BF16): 2,
        ((2, 2, 128, 64), BF16): 2,
        ((2, 4, 128, 1), FP32): 1,
        ((), torch.int64): 2,
    }


def test_math_goes_up_to_float32_and_drops_with_bool_masks() -> None:
    with fake_device("a100-80gb"), sdpa_kernel(SDPBackend.MATH):
        q, k, v = qkv()
        out, saved = saved_by(lambda: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
        out.sum().backward()
        assert out.dtype == BF16
    scores = (2, 4, 128, 128)
    assert saved[(scores, FP32)] >= 1
    assert saved[(scores, torch.bool)] == 1


def test_dropout() -> None:
    with fake_device("h100"):
        x = torch.randn(8, 8, requires_grad=True)
        y, saved = saved_by(lambda: F.dropout(x, 0.1))
        y.sum().backward()
        assert saved == {((8, 8), torch.bool): 1}
        with Ops() as ops:
            assert F.dropout(x, 0.1, training=False) is not None
            F.dropout(x, 1.0)
            F.dropout(x.detach(), 0.1)
        assert ops.noted.count("native_dropout") == 1
        assert F.dropout(torch.randn(0, 4), 0.5).shape == (0, 4)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("with_weight", [True, False])
def test_rms_norm(dtype: torch.dtype, with_weight: bool) -> None:
    with fake_device("h100"):
        x = torch.randn(4, 16, 32, dtype=dtype, requires_grad=True)
        weight = torch.randn(32, dtype=dtype, requires_grad=True) if with_weight else None
        with Ops() as ops:
            y, saved = saved_by(lambda: F.rms_norm(x, (32,), weight))
            y.sum().backward()
        want: Saved = Counter({((4, 16, 32), dtype): 1, ((4, 16, 1), FP32): 1})
        if weight is not None:
            want[((32,), dtype)] = 1
            assert weight.grad is not None
            assert weight.grad.dtype == dtype
        assert saved == want
        assert y.dtype == dtype
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert {"_fused_rms_norm", "_fused_rms_norm_backward"} <= set(ops.noted)


def test_rms_norm_of_mixed_types_is_a_composite() -> None:
    with fake_device("h100"), Ops() as ops:
        x = torch.randn(4, 32, dtype=BF16, requires_grad=True)
        F.rms_norm(x, (32,), torch.randn(32, requires_grad=True)).sum().backward()
        assert "_fused_rms_norm" not in ops.noted


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_layer_norm_keeps_float32_statistics(dtype: torch.dtype) -> None:
    with fake_device("h100"):
        x, w, b = (torch.randn(s, dtype=dtype, requires_grad=True) for s in ((4, 16, 32), (32,), (32,)))
        y, saved = saved_by(lambda: F.layer_norm(x, (32,), w, b))
        assert saved == {((4, 16, 32), dtype): 1, ((32,), dtype): 2, ((4, 16, 1), FP32): 2}
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype


@pytest.mark.parametrize("softmax", [F.softmax, F.log_softmax])
def test_softmax_of_float16_is_fused_with_its_cast(softmax: Callable[..., torch.Tensor]) -> None:
    with fake_device("h100"):
        for dtype, casts in ((FP16, 0), (BF16, 1)):
            x = torch.randn(4, 8, dtype=dtype, requires_grad=True)
            with Ops() as ops:
                y = softmax(x, -1, dtype=FP32)
            assert y.dtype == FP32
            assert ops.noted.count("_to_copy") == casts
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.dtype == dtype


# --------------------------------------------------------------------------------------- where it works


def test_under_no_grad_and_autocast() -> None:
    with fake_device("a100-80gb"):
        q, k, v = qkv(FP32)
        with Ops() as ops, torch.no_grad():
            F.scaled_dot_product_attention(q, k, v)
        assert "_scaled_dot_product_efficient_attention" in ops.noted
        with Ops() as ops, torch.autocast("cpu", dtype=BF16):
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum().backward()
        assert "_scaled_dot_product_flash_attention" in ops.noted
        assert "_scaled_dot_product_flash_attention_backward" in ops.noted


def test_invalid_calls_fail_as_torch_does() -> None:
    with fake_device("h100"):
        q, k, v = qkv(FP32)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, attn_mask=torch.randn(128, 128), is_causal=True)
        with pytest.raises(DeviceError, match="Enable 'math'"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v).sum().backward()


def test_cpu_device_routes_nothing() -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):
        q, k, v = qkv(FP32)
        plain = saved_by(lambda: F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1))[1]
    with fake_device("cpu"):
        q, k, v = qkv(FP32)
        assert saved_by(lambda: F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1))[1] == plain


# --------------------------------------------------------------------------------------- nothing is left


def real_step() -> tuple[torch.Tensor, torch.Tensor, Saved]:
    torch.manual_seed(0)
    q, k, v = qkv(FP32, (2, 4, 16, 8))
    weight = torch.ones(8, requires_grad=True)

    def run() -> torch.Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = F.layer_norm(F.rms_norm(out, (8,), weight), (8,))
        return F.dropout(torch.softmax(out, -1), 0.3) * 2

    out, saved = saved_by(run)
    out.sum().backward()
    assert q.grad is not None
    return out, q.grad, saved


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]


def test_everything_is_restored() -> None:
    before = real_step()
    implementations = dict(fake_impls.op_implementations_dict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("h100", "l4", "cpu"):
            with fake_device(device):
                q, k, v = qkv(FP32)
                F.scaled_dot_product_attention(q, k, v).sum().backward()
            assert same(real_step(), before)
        with pytest.raises(BoomError), fake_device("h100"):
            raise BoomError
        with pytest.raises(DeviceError), fake_device("no such device"):
            pass
    assert active_device() is None
    assert fake_impls.op_implementations_dict == implementations
    with FakeTensorMode():
        x = torch.randn(4, 32, dtype=BF16, requires_grad=True)
        _, saved = saved_by(lambda: F.layer_norm(x, (32,)))
        assert saved[((4, 1), BF16)] == 2
        assert ((8, 8), torch.bool) not in saved_by(lambda: F.dropout(torch.randn(8, 8), 0.1))[1]


class BoomError(Exception):
    pass


def test_other_threads_keep_their_kernels() -> None:
    before = real_step()

    def work() -> tuple[Any, Any]:
        with FakeTensorMode():
            q, k, v = qkv(FP32)
            saved = saved_by(lambda: F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1))[1]
        return active_device(), saved

    with device_kernels("h100"):
        ((device, saved),) = at_once(work)
    assert device is None
    assert (SHAPE, torch.bool) not in saved
    assert same(real_step(), before)


# --------------------------------------------------------------------------------------- workspaces


def inside(func: Any, *args: Any, device: str = "a100-80gb", out: Any = None, **kwargs: Any) -> int:
    """What a kernel allocates beside its results, in bytes."""
    return kernel_workspace_bytes(Call(func, args, kwargs, out), resolve_device(device))


def test_flash_backward_workspace() -> None:
    q = torch.empty(2, 4, 100, 48, dtype=BF16, device="meta")
    kv = torch.empty(2, 2, 100, 48, dtype=BF16, device="meta")
    bshd = torch.empty(2, 100, 4, 48, dtype=BF16, device="meta").transpose(1, 2)
    func = aten._scaled_dot_product_flash_attention_backward.default
    accumulator, softmax_d = 4 * 2 * 128 * 4 * 64, 4 * 2 * 4 * 128
    tensor = -(-q.numel() * 2 // 512) * 512
    assert inside(func, bshd, q, q, q, bshd) == accumulator + softmax_d
    assert inside(func, q, q, q, q, bshd) == accumulator + softmax_d + tensor
    assert inside(func, bshd, q, kv, kv, bshd) == accumulator + softmax_d + 2 * tensor
    assert inside(func, q, q, q, q, q, device="cpu") == 0


def test_other_workspaces() -> None:
    q = torch.empty(2, 4, 128, 64, device="meta")
    bshd = torch.empty(2, 128, 4, 64, device="meta").transpose(1, 2)
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    assert inside(backward, bshd, q, q, q) == 4 * q.numel() + 4 * 1024
    forward = aten._scaled_dot_product_efficient_attention.default
    wide = torch.empty(2, 4, 128, 192, dtype=BF16, device="meta")
    assert inside(forward, q, q, q, None, True, scale=1.0) == 0
    assert inside(forward, wide, wide, wide, None, True) == 4 * wide.numel()
    embedding = aten.embedding_dense_backward.default
    grad, few = torch.empty(100, 8, device="meta"), torch.empty(100, dtype=torch.long, device="meta")
    assert inside(embedding, grad, few, 50, -1, False) == 0
    many = torch.empty(5120, dtype=torch.long, device="meta")
    # 512 segments, and 5120 / 10 + 512 partial rows.
    buffers = 8 * (3 * 5120 + 2 * 512 + 1024)
    assert inside(embedding, grad, many, 512, -1, False) == buffers + 4 * 1024 * 8
    grad = torch.empty(128, 8, device="meta")
    assert inside(aten._softmax_backward_data.default, grad, grad, -1, grad.dtype) == grad.nbytes
    assert inside(aten._log_softmax_backward_data.default, grad, grad, -1, grad.dtype) == 0
    images, weight, means = (torch.empty(shape, device="meta") for shape in ((16, 128, 9), (128,), (16, 8)))
    sizes = (16, 128, 9, 8)
    assert inside(aten.native_group_norm.default, images, weight, weight, *sizes, 1e-5) == 2 * 4 * 16 * 128
    norm_backward = (images, images, means, means, weight, *sizes, [True, True, True])
    assert inside(aten.native_group_norm_backward.default, *norm_backward) == 4 * 16 * (3 * 128 + 2 * 8)
    x = torch.empty(4, 4, device="meta")
    # Else a storage of the whole step.
    products = 0 if workspaces_stay() else library_workspace_bytes(resolve_device("a100-80gb"))
    assert inside(aten.mm.default, x, x, out=x) == products
    assert inside(aten.add.Tensor, x, x, out=x) == 0


@pytest.mark.parametrize(
    ("order", "has_gpu", "expected"),
    [
        ((1, 2, 0, 3), False, None),
        ((1, 2, 0, 3), True, None),
        ((3, 1, 2, 0), True, None),  # torch's own, after the first call on a GPU that prefers cuDNN
        ((3, 1, 2, 0), False, ["cudnn", "flash", "efficient", "math"]),
        ((3, 1, 0, 2), True, ["cudnn", "flash", "math", "efficient"]),
        ((0, 1, 2, 3), True, ["math", "flash", "efficient", "cudnn"]),
    ],
)
def test_whose_order_of_backends_it_is(
    order: tuple[int, ...], has_gpu: bool, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are those of ``SDPBackend``."""
    monkeypatch.delenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", raising=False)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: list(order))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert attention._user_priority() == expected
