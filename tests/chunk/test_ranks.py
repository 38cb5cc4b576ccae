"""Chunks under DistributedDataParallel and ``fully_shard``: two gloo ranks on the CPU, against the plain step there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from sacplan._chunk.executor.install import InstalledChunks
from sacplan._program.decisions import Chunk
from tests.support.processes import gloo, run_ranks
from tests.zoo.language_models import LM, cross_entropy, tokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo"
    ),
]

RANKS, VOCAB = 2, 201
CHUNKS = [Chunk("head", "rest", 5, 1), Chunk("layers.0.mlp", "module", 3, 1)]
CLOSE = ("head.", "layers.0.mlp.")


def replicated(model: LM) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def replicated_statically(model: LM) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, static_graph=True)


def sharded(model: LM) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sharded_with_head(model: LM) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.head, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
    return sharded(model)


Wrap = Callable[[LM], nn.Module]


def run(
    base: LM, wrap: Wrap, batch: torch.Tensor, order: str
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Loss and gradients of the second of two steps, and how often each parameter's hook fired in it."""
    model = copy.deepcopy(base)
    if order == "chunks first":
        InstalledChunks(model, CHUNKS)
    called = wrap(model)
    if order == "chunks last":
        InstalledChunks(model, CHUNKS)
    fired: dict[str, int] = {}

    def count(name: str) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            fired[name] = fired.get(name, 0) + 1

        return hook

    named = dict(model.named_parameters())
    if not any(hasattr(p, "to_local") for p in named.values()):
        for name, p in named.items():
            p.register_post_accumulate_grad_hook(count(name))
    for _ in range(2):
        model.zero_grad()
        fired.clear()
        loss = cross_entropy(called, batch)
        loss.backward()
    found: dict[str, Any] = {"loss": loss.detach() + 0}
    for name, p in named.items():
        assert p.grad is not None
        found[name] = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
    if order:
        assert model.head.forward.tally.loops == 1
        assert not model.head.forward.tally.whole
    return found, fired


def on_rank(rank: int, directory: str) -> None:
    with gloo(rank, RANKS, directory):
        torch.manual_seed(0)
        base = LM(layers=2, dim=16, heads=2, vocab=VOCAB, dropout=0.0)
        torch.manual_seed(10 + rank)
        batch = tokens(2, 32, VOCAB)
        for wrap in (replicated, replicated_statically, sharded, sharded_with_head):
            expected, fired = run(base, wrap, batch, "")
            for order in ("chunks first", "chunks last"):
                got, fired_here = run(base, wrap, batch, order)
                where = f"{wrap.__name__}, {order}"
                assert fired_here == fired, where
                assert set(fired.values()) <= {1}, where
                for name, value in expected.items():
                    if name == "loss" or name.startswith(CLOSE):
                        assert (got[name] - value).norm() <= 2e-6 * value.norm(), f"{where}: {name}"
                    else:
                        assert torch.equal(got[name], value), f"{where}: {name}"


def test_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_rank, (str(tmp_path),), RANKS)
