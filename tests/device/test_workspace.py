"""What CPU kernels allocate inside: which are run, what is said where one cannot be, and what an LSTM keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

import sacplan
from sacplan.device.op_kernels import Call
from sacplan.device.workspace import measured_workspace_bytes
from sacplan.errors import TraceError
from sacplan.record.step import Step
from sacplan.running.measure import measured_step

aten = torch.ops.aten


CONV = ([1, 1], [1, 1], [1, 1], False, [0, 0])


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


@pytest.mark.parametrize("more", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_the_peak_of_a_step_of_a_small_lstm_is_exact(more):
    model, batch = nn.LSTM(20, 48, batch_first=True, **more), torch.randn(2, 11, 20)

    def loss_fn(model, batch):
        return model(batch)[0].square().mean()

    profile = sacplan.profile(model, batch, loss_fn=loss_fn, device="cpu")
    assert measured_step(Step(model, batch, loss_fn, None), [batch]).peak_bytes == profile.peak_bytes
