"""Small units whose middle a test hands in, and nets of the blocks of ``benchmarks.models.random_blocks``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH, DIM = 2, 3, 4


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, LENGTH, DIM)


class Unit(nn.Module):
    """Linear, dropout and what the test hands in."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] = torch.sin) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(self.first(x)), 0.3, self.training)
        return self.second(self.middle(x).exp())


class Outer(nn.Module):
    def __init__(self, *units: nn.Module) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x).tanh()
        return x.pow(2).mean()


def outer(*middles: Callable[[torch.Tensor], torch.Tensor]) -> Outer:
    torch.manual_seed(0)
    return Outer(*(Unit(m) for m in middles or (torch.sin, torch.cos)))
