"""What only a CUDA device can tell: predictions against the allocator, the kernels and the clock that are there."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sacplan
from benchmarks import gpu
from benchmarks.models import gpu_models
from sacplan.device.cudnn_rnn import LSTM, reserve_bytes
from sacplan.device.devices import resolve_device
from sacplan.device.kernels import fake_device
from sacplan.device.library_workspaces import library_workspace_bytes
from sacplan.record.step import Step
from sacplan.running.measure import measured_step
from tests.device.test_kernels import saved_by

DEVICE = "cuda"
BF16 = torch.bfloat16

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gpt(dropout: float = 0.125) -> gpu_models.Case:
    """Four layers of GPT-2, bfloat16, with dropout that cuDNN's attention takes."""
    torch.manual_seed(0)
    sizes = gpu_models.Sizes(layers=4, width=512, heads=8, batch=8, length=512, vocab=8000)
    with torch.device(DEVICE):
        model = gpu_models.GPT2(sizes, dropout).to(BF16)
        batch = gpu_models._text(sizes)
    return model, batch, gpu_models._language


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["no optimizer", "AdamW"])
def test_the_peak_of_a_small_gpt_is_predicted_to_a_thousandth(optimizer: Any) -> None:
    model, batch, loss_fn = gpt()
    profile = sacplan.profile(model, batch, loss_fn, optimizer, device=DEVICE)
    made = optimizer(model.parameters()) if optimizer is not None else None
    seen = measured_step(Step(model, batch, loss_fn, made), list(batch.values()))
    assert profile.peak_bytes == pytest.approx(seen.requested_bytes, rel=0.001)


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_a_plan_keeps_its_budget_and_the_gradients_their_bits(share: float) -> None:
    model, batch, loss_fn = gpt()
    profile = sacplan.profile(model, batch, loss_fn, device=DEVICE)
    smallest = sacplan.plan(profile, "smallest").peak_bytes
    plan = sacplan.plan(profile, f"{int(smallest + share * (profile.peak_bytes - smallest))}B")
    result = sacplan.verify(model, batch, plan, loss_fn, run="real")
    assert result.tensor_bytes == pytest.approx(plan.peak_bytes, rel=0.001)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what has no deterministic kernel says so
            plain, again = (gpu.gradients(model, batch, loss_fn) for _ in range(2))
            if not gpu.equal(plain, again):
                pytest.skip("this step varies from run to run without a plan")
            with sacplan.apply(model, plan):
                planned = gpu.gradients(model, batch, loss_fn)
    finally:
        torch.use_deterministic_algorithms(False)
    assert gpu.equal(plain, planned)


def test_each_op_is_timed_here() -> None:
    model, batch, loss_fn = gpt()
    state = torch.cuda.get_rng_state()
    profile = sacplan.profile(model, batch, loss_fn, torch.optim.AdamW, device=DEVICE, runtime="benchmark")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(op.time_ms > 0 for op in profile.program.ops if op.flops)
    made = torch.optim.AdamW(model.parameters())
    gpu.gradients(model, batch, loss_fn)  # warm
    seen = measured_step(Step(model, batch, loss_fn, made), list(batch.values()))
    assert 0.2 < profile.step_ms / seen.wall_ms < 3


def test_the_table_of_attention_kernels() -> None:
    rows = gpu.attention_rows(resolve_device(DEVICE), DEVICE)
    assert [r for r in rows if not r["agree"]] == []


def test_cublas_workspaces() -> None:
    spec = resolve_device(DEVICE)
    report = gpu.cublas_report(spec, DEVICE)
    if report["torch_says_bytes"] is not None:
        assert report["torch_says_bytes"] == library_workspace_bytes(spec)
    assert report["forward_leaves_bytes"] == library_workspace_bytes(spec)
    assert report["backward_leaves_bytes"] == library_workspace_bytes(spec)


def saved_set(run: Callable[[], torch.Tensor]) -> Counter[tuple[tuple[int, ...], torch.dtype]]:
    out, saved = saved_by(run)
    out.backward()
    return saved


def _norms() -> torch.Tensor:
    x = torch.randn(4, 16, 64, dtype=BF16, requires_grad=True)
    y = F.rms_norm(F.layer_norm(x, (64,)), (64,), torch.ones(64, dtype=BF16))
    return F.softmax(F.group_norm(y.transpose(1, 2), 4), -1, dtype=torch.float32).sum()


def _images() -> torch.Tensor:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    )
    return F.dropout(model(torch.randn(4, 3, 16, 16)), 0.25).sum()


def _autocast() -> torch.Tensor:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
    with torch.autocast("cuda", dtype=BF16):
        y = model(torch.randn(32, 64))
        y = torch.exp(torch.cumsum(torch.sigmoid(y), -1)).pow(2) + torch.cat([y, y.float()], -1)[:, :64]
        return F.cross_entropy(y, torch.zeros(32, dtype=torch.long))


def _attention() -> torch.Tensor:
    q, k, v = (torch.randn(2, 4, 64, 64, dtype=BF16, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    out = F.scaled_dot_product_attention(q, k, v, mask) + F.scaled_dot_product_attention(
        q, k, v, is_causal=True
    )
    single = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), dropout_p=0.25)
    return out.sum() + single.sum()


@pytest.mark.parametrize("make", [_norms, _images, _autocast, _attention])
def test_autograd_keeps_what_the_fake_step_keeps(make: Callable[[], torch.Tensor]) -> None:
    with torch.device(DEVICE):
        real = saved_set(make)
    with fake_device(DEVICE):
        assert saved_set(make) == real


def test_what_an_lstm_keeps_is_estimated_to_a_quarter() -> None:
    layer = nn.LSTM(128, 128, 2, dropout=0.1).to(DEVICE)
    saved = saved_set(lambda: layer(torch.randn(64, 16, 128, device=DEVICE))[0].sum())
    # The other one is the state of its dropout.
    reserve = max(shape[0] for shape, dtype in saved if dtype == torch.uint8 and len(shape) == 1)
    assert reserve_bytes(LSTM, 64 * 16 * 128, 2, 0.1, 4) == pytest.approx(reserve, rel=0.25)
