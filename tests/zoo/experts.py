"""Layers of several experts: all of them run, or each on the rows that a router sends to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
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


class SpreadExperts(nn.Module):
    """Experts over ranks: each rank counts its tokens for all experts, exchanges the counts, and then the tokens.

    Rows of inputs say in their first features which expert they want.
    """

    def __init__(self, experts: int = 4, dim: int = 16) -> None:
        super().__init__()
        self.ranks = dist.get_world_size()
        self.router = nn.Linear(dim, experts)
        nn.init.eye_(self.router.weight)
        self.weight = nn.Parameter(torch.randn(experts // self.ranks, dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

        group: Any = dist.group.WORLD
        share, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.ranks * len(self.weight))
        theirs = all_to_all_single(counts, None, None, group)
        sent, received = (n.view(self.ranks, -1).sum(1).tolist() for n in (counts, theirs))
        rows = all_to_all_single_autograd(x[order], received, sent, group)
        # Rows come by rank, and experts take them one after the other.
        experts = torch.arange(len(self.weight)).repeat(self.ranks).repeat_interleave(theirs)
        by_expert = experts.argsort(stable=True)
        sizes = theirs.view(self.ranks, -1).sum(0).tolist()
        parts = rows[by_expert].split(sizes)
        made = torch.cat([(part @ w).tanh() for part, w in zip(parts, self.weight, strict=True)])
        back = torch.empty_like(made).index_copy(0, by_expert, made)
        returned = all_to_all_single_autograd(back, sent, received, group)
        return x.index_add(0, order, returned * share[order, None])
