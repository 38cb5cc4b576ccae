"""Arrays of numpy inside a step: tensors on their memory take none of PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sacplan
from sacplan.record.step import Step
from sacplan.running.measure import measured_step

N = 4096


REVERSED = np.arange(N)[::-1]
INDICES: dict[str, Callable[[], torch.Tensor]] = {
    "of an array": lambda: torch.from_numpy(REVERSED.copy()),
    "as a tensor": lambda: torch.as_tensor(REVERSED.copy(), dtype=torch.int64),
    "converted": lambda: torch.as_tensor(REVERSED.astype(np.int32), dtype=torch.int64),
    "copied": lambda: torch.tensor(REVERSED.copy()),
}


@pytest.mark.parametrize("trace", ["fake", "real"])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
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
