"""Layers of several experts: all of them run, or each on the rows that a router sends to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle


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
        group: Any = dist.group.WORLD
        share, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.ranks * len(self.weight))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
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


class GroupedExperts(nn.Module):
    """Feed-forward experts whose weights lie in one tensor, [experts, ...]: each takes its rows, which are in order."""

    def __init__(self, experts: int, dim: int) -> None:
        super().__init__()
        for name in ("w1", "w2", "w3"):
            self.register_parameter(name, nn.Parameter(torch.randn(experts, dim, dim)))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3)]
        parts = x.split(counts.tolist())
        return torch.cat([
            (F.silu(part @ w1) * (part @ w3)) @ w2
            for part, w1, w2, w3 in zip(parts, *weights, strict=True)
        ])  # fmt: skip


class ExpertParallel(ParallelStyle):
    """As torchtitan's style of this name: hooks send tokens to the ranks of their experts, and back."""

    def _token_dispatch(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        rows, counts = inputs
        group, ranks = mesh.get_group(), mesh.size()
        with torch.no_grad():
            theirs = wait_tensor(all_to_all_single(counts, None, None, group))
            self.sent = counts.view(ranks, -1).sum(1).to("cpu", non_blocking=True).tolist()
            self.received = theirs.view(ranks, -1).sum(1).to("cpu", non_blocking=False).tolist()
        rows = all_to_all_single_autograd(rows, self.received, self.sent, group)
        local = torch.arange(len(theirs) // ranks).repeat(ranks).repeat_interleave(theirs)
        self.by_expert = local.argsort(stable=True)
        return rows[self.by_expert], theirs.view(ranks, -1).sum(0)

    def _token_combine(self, module: nn.Module, made: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        back = torch.empty_like(made).index_copy(0, self.by_expert, made)
        return all_to_all_single_autograd(back, self.sent, self.received, mesh.get_group())

    @staticmethod
    def _partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(param, mesh, [Shard(0)])))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module, device_mesh, self._partition, self._token_dispatch, self._token_combine
        )


class TitanMoE(nn.Module):
    """The best ``top_k`` experts of a router, as in torchtitan: counted, sorted by expert, scattered back."""

    def __init__(self, experts: int = 4, dim: int = 16, top_k: int = 2, float_counts: bool = True) -> None:
        super().__init__()
        self.top_k, self.float_counts = top_k, float_counts
        self.gate = nn.Linear(dim, experts, bias=False)
        nn.init.eye_(self.gate.weight)
        self.experts = GroupedExperts(experts, dim)
        self.register_buffer("tokens_per_expert", torch.zeros(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.gate.out_features
        scores, chosen = self.gate(x).sigmoid().topk(self.top_k)
        # The kernel of a CPU counts floats only; that of a GPU takes the integers, as routers give them.
        counted = chosen.view(-1).float() if self.float_counts else chosen.view(-1)
        counts = torch.histc(counted, bins=n, min=0, max=n)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = chosen.view(-1).argsort(stable=True)
        token = order // self.top_k
        rows = x[token] * scores.view(-1)[order, None]
        made = self.experts(rows, counts.long())
        return x.scatter_add(0, token[:, None].expand_as(made), made)
