"""Other ways to compute a loss in slices: what they are said to take, against what they take."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sacplan.device.cost import op_flops
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.techniques.chunk.alternatives import LossRegion, liger, linear_cross_entropy
from sacplan.torch_compat.allocations import allocation_events

MIB = 2**20
CPU = resolve_device("cpu")
H100 = resolve_device("h100")
needs_torch_2_13 = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="F.linear_cross_entropy is there from torch 2.13 on"
)
Step = Callable[[], None]


def operands(region: LossRegion, device: str = "cpu") -> list[torch.Tensor]:
    """Hidden states, weight and (maybe) bias, which require gradients, and targets."""
    torch.manual_seed(0)
    sizes = [(region.tokens, region.width), (region.vocabulary, region.width)]
    sizes += [(region.vocabulary,)] if region.bias else []
    made = [torch.randn(s, device=device, dtype=region.dtype, requires_grad=True) for s in sizes]
    return [*made, torch.randint(region.vocabulary, (region.tokens,), device=device)]


def step_of(name: str, tensors: list[torch.Tensor], rows: int | None = None) -> Step:
    hidden, weight, *rest = tensors
    bias, targets = rest if len(rest) == 2 else (None, rest[0])

    def step() -> None:
        if name == "plain":
            loss = F.cross_entropy(F.linear(hidden, weight, bias), targets)
        else:
            options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
            loss = F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, options=options)
        loss.backward()
        for tensor in tensors:
            tensor.grad = None

    return step


def measured_on_cpu(step: Step, tensors: list[torch.Tensor]) -> int:
    gc.collect()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = peak = 0
    for delta in allocation_events(profiler):
        live += delta
        peak = max(peak, live)
    return peak + sum(t.nbytes for t in tensors)


REGIONS = [
    LossRegion(256, 64, 20000, torch.float32),
    LossRegion(1024, 64, 2000, torch.float32, bias=True),
    LossRegion(300, 128, 96, torch.float32),  # fewer words than columns, a smaller last slice
    LossRegion(2000, 64, 300, torch.float64),
    LossRegion(512, 64, 5000, torch.bfloat16, bias=True),
    LossRegion(300, 128, 5000, torch.bfloat16),
    LossRegion(300, 64, 3000, torch.float16, bias=True),
]


@needs_torch_2_13
@pytest.mark.parametrize("rows", [None, 100])
@pytest.mark.parametrize("region", REGIONS, ids=str)
def test_the_peak_of_linear_cross_entropy_is_the_allocators(region: LossRegion, rows: int | None) -> None:
    tensors = operands(region)
    assert linear_cross_entropy(region, CPU, rows).peak_bytes == pytest.approx(
        measured_on_cpu(step_of("linear_cross_entropy", tensors, rows), tensors), rel=0.005
    )


def test_a_loss_that_others_measured() -> None:
    region = LossRegion(2048, 256, 50257, torch.float32)
    assert linear_cross_entropy(region, CPU).peak_bytes / MIB == pytest.approx(153.5, rel=0.005)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@needs_torch_2_13
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_peak_on_a_gpu_is_the_allocators(dtype: torch.dtype) -> None:
    region = LossRegion(4096, 512, 50000, dtype)
    priced = linear_cross_entropy(region, resolve_device("cuda"))
    tensors = operands(region, "cuda")
    step = step_of("linear_cross_entropy", tensors)
    step()  # cuBLAS has its workspace then
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_allocated() - sum(t.nbytes for t in tensors)
    step()
    assert priced.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - others, rel=0.005)


class InSlices(torch.autograd.Function):
    """A loss that is built as Liger's is: gradients in the forward pass, those of the logits where these were."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: int
    ) -> Any:
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        losses = torch.zeros(len(hidden))
        counted = targets != -100
        buffer = torch.empty(rows, len(weight))
        for start in range(0, len(hidden), rows):
            part = hidden[start : start + rows]
            logits = buffer[: len(part)]
            torch.mm(part, weight.t(), out=logits)
            logits.exp_().div_(logits.sum(1, keepdim=True))
            torch.mm(logits, weight, out=grad_hidden[start : start + rows])
            torch.addmm(grad_weight, logits.t(), part, out=grad_weight)
        del buffer, logits
        ctx.save_for_backward(grad_hidden.detach(), grad_weight.detach())
        return losses.sum() / counted.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *ctx.saved_tensors, None, None


@pytest.mark.parametrize("region", [r for r in REGIONS if r.dtype == torch.float32 and not r.bias], ids=str)
def test_ligers_peak_is_that_of_a_loss_built_alike(region: LossRegion) -> None:
    tensors = operands(region)
    priced = liger(region, CPU)

    def step() -> None:
        InSlices.apply(*tensors, rows_of(priced.note)).backward()
        for tensor in tensors:
            tensor.grad = None

    assert priced.peak_bytes == pytest.approx(measured_on_cpu(step, tensors), rel=0.005)


# --- sizes of slices ------------------------------------------------------------------------------------------


def rows_of(note: str) -> int:
    return int(note.removeprefix("slices of ").split()[0])


def test_ligers_slices_are_those_of_its_own_example() -> None:
    region = LossRegion(4096 * 4, 4096, 32000, torch.bfloat16)
    assert rows_of(liger(region, H100).note) == 2048


@needs_torch_2_13
@pytest.mark.parametrize("spec", [CPU, H100], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "width", "words"), [(2048, 256, 50257), (8192, 4096, 128256), (100, 512, 300), (3, 8, 5000)]
)
def test_slices_are_as_torch_decides(
    tokens: int, width: int, words: int, dtype: torch.dtype, spec: DeviceSpec
) -> None:
    chosen: Any = torch.nn.LinearCrossEntropyOptions()._adjust(
        tokens, width, words, dtype, torch.device(spec.kind)
    )
    priced = linear_cross_entropy(LossRegion(tokens, width, words, dtype), spec)
    assert rows_of(priced.note) == chosen.batch_chunk_size


# --- times ------------------------------------------------------------------------------------------------------


@needs_torch_2_13
def test_flops_of_the_custom_op_are_those_of_the_plain_step() -> None:
    region = LossRegion(100, 32, 300, torch.float32)
    tensors = operands(region)
    found = 0

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal found
            out = func(*args, **(kwargs or {}))
            found += op_flops(func, args, kwargs or {}, out)
            return out

    with Counter():
        step_of("linear_cross_entropy", tensors)()
    with FlopCounterMode(display=False) as counter:
        step_of("plain", tensors)()
    assert found == counter.get_total_flops() > 0


# --- what is there ------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_priced_and_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    region = LossRegion(8192, 768, 50257, torch.bfloat16)
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = linear_cross_entropy(region, H100), liger(region, H100)
    assert not any(one.available for one in found)
    assert "torch 2.13" in found[0].note
    assert "liger-kernel" in found[1].note


def test_liger_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    region = LossRegion(8192, 768, 50257, torch.bfloat16)
    assert liger(region, H100).available
    assert not liger(region, CPU).available
    assert "GPU" in liger(region, CPU).note
