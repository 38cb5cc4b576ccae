"""The time of a step where the CPU may be slower than the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sacplan
from sacplan._device.eager import OP_US, eager_ms


def step(width: int, rows: int) -> sacplan.Profile:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
        x = torch.empty(rows, width)
    return sacplan.profile(model, x, lambda m, x: m(x).sum(), device="h100")


def test_small_ops_wait_for_the_cpu() -> None:
    """The CPU issues an op every 20 us, and the last one runs when it has been issued."""
    profile = step(8, 8)
    ops = [op for op in profile.program.ops if op.time_ms]
    assert max(op.time_ms for op in ops) < 1e-3 * OP_US
    assert eager_ms(profile.program) == pytest.approx(1e-3 * OP_US * len(ops) + ops[-1].time_ms)


def test_large_ops_hide_it() -> None:
    """Only the first op is waited for."""
    profile = step(4096, 8192)
    assert eager_ms(profile.program) == pytest.approx(profile.step_ms + 1e-3 * OP_US, rel=1e-6)
    assert eager_ms(profile.program, op_us=0) == pytest.approx(profile.step_ms)
