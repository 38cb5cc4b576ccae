"""Layers of several experts: all of them run, or each on the rows that a router sends to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    """Branches of one kind that do not follow on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts)


class MoE(nn.Module):
    """Routing as it is usually written: each expert takes its rows."""

    def __init__(self, experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(16, experts)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(experts))
        self.rows: list[int] = []

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        self.rows.clear()
        for e, expert in enumerate(self.experts):
            slot, row = torch.where(mask[e])
            self.rows.append(len(row))
            out = out.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return out
