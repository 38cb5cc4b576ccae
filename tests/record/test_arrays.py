"""Arrays of numpy inside a step: tensors on their memory take none of PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sacplan
from sacplan.record.step import Step
from sacplan.running.measure import measured_step

N = 4096


def _of_an_array() -> torch.Tensor:
    return torch.from_numpy(np.arange(N)[::-1].copy())


def _as_tensor() -> torch.Tensor:
    return torch.as_tensor(np.arange(N)[::-1].copy(), dtype=torch.int64)


def _converted() -> torch.Tensor:
    return torch.as_tensor(np.arange(N, dtype=np.int32)[::-1].copy(), dtype=torch.int64)


def _copied() -> torch.Tensor:
    return torch.tensor(np.arange(N)[::-1].copy())


@pytest.mark.parametrize("trace", ["fake", "real"])
@pytest.mark.parametrize("index", [_of_an_array, _as_tensor, _converted, _copied])
def test_the_memory_of_an_array_is_not_pytorchs(index: Any, trace: Any) -> None:
    """As the matched pairs of a loss for detection, which ``linear_sum_assignment`` gives as arrays."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8), torch.randn(N, 8)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        rows = index()
        return (y[rows].sigmoid() * y).sum()

    profile = sacplan.profile(model, x, loss, device="cpu", trace=trace)
    assert measured_step(Step(model, x, loss, None), [x]).peak_bytes == profile.peak_bytes
