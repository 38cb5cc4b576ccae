"""What CPU kernels allocate inside, against the profiler; and whole convolutional steps, planned and not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

import sacplan
from sacplan.device.op_kernels import Call
from sacplan.device.workspace import measured_reserves, measured_workspace_bytes
from sacplan.errors import TraceError
from sacplan.record.step import Step, default_loss
from sacplan.running.measure import measured_step
from sacplan.torch_compat.allocations import allocation_events
from sacplan.torch_compat.ops import tensors_in
from tests.support.slow import slow_after
from tests.zoo.convnets import BasicBlock, Depthwise, Inverted

aten = torch.ops.aten


def profiled_workspace(func, args):
    """Peak inside less the outputs, by torch.profiler."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = func(*args)
    live = peak = 0
    for delta in allocation_events(profiler):
        live += delta
        peak = max(peak, live)
    return peak - sum(t.untyped_storage().nbytes() for t in tensors_in(out))


CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0])
CASES = {
    "convolution": lambda: (
        aten.convolution.default,
        (torch.randn(2, 16, 12, 12), torch.randn(32, 16, 3, 3), None, *CONV, 1),
    ),
    "depthwise": lambda: (
        aten.convolution.default,
        (torch.randn(2, 16, 12, 12), torch.randn(16, 1, 3, 3), None, *CONV, 16),
    ),
    "backward": lambda: (
        aten.convolution_backward.default,
        (
            torch.randn(2, 32, 12, 12),
            torch.randn(2, 16, 12, 12),
            torch.randn(32, 16, 3, 3),
            [0],
            *CONV,
            1,
            [True, True, False],
        ),
    ),
    "channels last": lambda: (
        aten.convolution.default,
        (
            torch.randn(2, 16, 12, 12).to(memory_format=torch.channels_last),
            torch.randn(32, 16, 3, 3).to(memory_format=torch.channels_last),
            None,
            *CONV,
            1,
        ),
    ),
    "softmax": lambda: (aten._safe_softmax.default, (torch.randn(4, 64, 64), -1)),
    "layer norm of a transposed tensor": lambda: (
        aten.native_layer_norm.default,
        (torch.randn(4, 32, 64).transpose(1, 2), [32], torch.ones(32), torch.zeros(32), 1e-5),
    ),
    "half product": lambda: (
        aten.mm.default,
        (torch.randn(128, 64, dtype=torch.bfloat16), torch.randn(64, 96, dtype=torch.bfloat16)),
    ),
    "two types": lambda: (aten.mul.Tensor, (torch.randn(64, 64), torch.randn(64, 64, dtype=torch.bfloat16))),
}


@pytest.mark.parametrize("name", CASES)
def test_workspace_of_an_op_is_what_the_profiler_sees(name):
    func, args = CASES[name]()
    expected = profiled_workspace(func, args)
    out = func(*args)
    assert measured_workspace_bytes(Call(func, args, {}, out)) == expected
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        assert measured_workspace_bytes(Call(func, fake, {}, func(*fake))) == expected


def test_ops_without_workspace_are_not_run():
    a = torch.empty(100_000, 100_000, device="meta")  # could not be made for real
    assert measured_workspace_bytes(Call(aten.mm.default, (a, a), {}, a)) == 0
    assert measured_workspace_bytes(Call(aten.add.Tensor, (a, a), {}, a)) == 0


def test_what_cannot_be_run_counts_as_nothing_with_a_warning():
    x = torch.empty(2**22, 2**22, 8, 8, device="meta")
    with pytest.warns(UserWarning, match="convolution"):
        assert measured_workspace_bytes(Call(aten.convolution.default, (x, x, None, *CONV, 1), {}, x)) == 0


def test_a_profiler_that_is_on_is_an_error():
    x, w = torch.randn(1, 3, 7, 11), torch.randn(5, 3, 3, 3)
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(TraceError, match="profiler"),
    ):
        measured_workspace_bytes(Call(aten.convolution.default, (x, w, None, *CONV, 1), {}, x))


# --- whole steps ------------------------------------------------------------------------------------------


def residual(channels, width, stride):
    return BasicBlock(
        channels, width, stride, nn.Conv2d(channels, width, 1, stride, bias=False), inplace=False
    )


MODELS = {
    "residual": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), residual(16, 16, 1), residual(16, 32, 2), residual(32, 64, 2), nn.Flatten()
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(3, 24, 4, 4), *[Depthwise(24) for _ in range(4)], nn.Flatten()
    ),
    "inverted": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), *[Inverted(8) for _ in range(4)], nn.Flatten()
    ),
}


@pytest.mark.parametrize("optimizer", [None, torch.optim.AdamW], ids=["no optimizer", "AdamW"])
@pytest.mark.parametrize("name", MODELS)
def test_a_convolutional_step_is_predicted_to_half_a_percent(name, optimizer):
    torch.manual_seed(0)
    model, batch = MODELS[name](), torch.randn(4, 3, 64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = sacplan.profile(model, batch, default_loss, device="cpu", optimizer=optimizer)
    made = optimizer(model.parameters()) if optimizer else None
    seen = measured_step(Step(model, batch, default_loss, made), [batch])
    assert profile.peak_bytes == seen.peak_bytes


@pytest.mark.parametrize("name", slow_after(1, MODELS))
def test_a_planned_convolutional_step_keeps_its_promise(name):
    torch.manual_seed(0)
    model, batch = MODELS[name](), torch.randn(4, 3, 64, 64)
    profile = sacplan.profile(model, batch, device="cpu")
    planned = 0
    for budget in ("90%", "75%", "60%"):
        try:
            plan = sacplan.plan(profile, budget)
        except sacplan.InfeasibleBudget:
            break
        planned += 1
        result = sacplan.verify(model, batch, plan, run="real")
        assert abs(result.error) < 0.005
    assert planned


def test_what_an_lstm_keeps_for_its_backward_pass():
    model, batch = nn.LSTM(32, 48, 1, batch_first=True), torch.randn(4, 16, 32)

    def kept():
        seen = {}

        def pack(t):
            storage = t.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(batch)[0]
        del out
        return sum(seen.values())

    real = kept()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        without = kept()
        with measured_reserves():
            assert kept() == real
        assert kept() == without < real


@pytest.mark.parametrize("more", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_the_peak_of_a_step_of_a_small_lstm_is_exact(more):
    model, batch = nn.LSTM(20, 48, batch_first=True, **more), torch.randn(2, 11, 20)

    def loss_fn(model, batch):
        return model(batch)[0].square().mean()

    profile = sacplan.profile(model, batch, loss_fn=loss_fn, device="cpu")
    assert measured_step(Step(model, batch, loss_fn, None), [batch]).peak_bytes == profile.peak_bytes
