"""Optimizers that step in hooks of sharded parameters: against the allocator of a rank of eight, to the byte."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import sacplan
from tests.record.test_optimizer_in_backward import tutorial
from tests.support.ranks import RANKS, RankMemory, fully_sharded
from tests.support.slow import slow_after
from tests.support.steps import mean_square
from tests.zoo import language_models as models
from tests.zoo.layers import HeavyLayers

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

adamw = functools.partial(torch.optim.AdamW, foreach=False)
momentum = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=False)


class _Hooked(RankMemory):
    """Its optimizers step in hooks; their state counts."""

    def __init__(self, model: nn.Module, batch: Any, loss_fn: Any, make: Any) -> None:
        super().__init__(model, batch, loss_fn)
        made: list[torch.optim.Optimizer] = []

        def noted(parameters: Any) -> torch.optim.Optimizer:
            made.append(make(parameters))
            return made[-1]

        tutorial(model, noted)
        self.made = made

    def step(self) -> None:
        self.loss_fn(self.model, self.batch).backward()

    def _alive_bytes(self) -> int:
        state = {p: s for optimizer in self.made for p, s in optimizer.state.items()}
        self.optimizer.state.update(state)
        return super()._alive_bytes()


@pytest.mark.parametrize(
    ("make", "options", "model"),
    slow_after(
        3,
        [
            (adamw, {}, "language"),
            (momentum, {"reshard_after_forward": False}, "heavy"),
            (adamw, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "heavy"),
            (adamw, {}, "heavy"),
            (momentum, {}, "heavy"),
        ],
    ),
)
def test_the_peak_of_a_rank(make: Any, options: dict[str, Any], model: str, mesh: Any) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return HeavyLayers(dropout=0.0) if model == "heavy" else models.LM(3, 32, 4, 64)

    batch = torch.randn(16, 64) if model == "heavy" else models.tokens(4, 32, 64)
    loss_fn: Any = mean_square if model == "heavy" else models.cross_entropy
    units = ["layers.*", ""]
    names = ("", *(f"layers.{i}" for i in range(len(made().layers))))  # type: ignore[arg-type]

    def sharded() -> nn.Module:
        reshard, offload = options.get("reshard_after_forward"), options.get("offload_policy")
        return fully_sharded(made(), mesh, names, reshard, None, offload)

    hooked = sharded()
    tutorial(hooked, make)
    profile = sacplan.profile(hooked, batch, loss_fn, device="cpu")
    assert profile.peak_bytes == _Hooked(sharded(), batch, loss_fn, make).peak_bytes()
    ranks = sacplan.FSDP2(RANKS, units, **options)
    after = sacplan.profile(made(), batch, loss_fn, make, "cpu", ranks=ranks)
    assert profile.peak_bytes <= after.peak_bytes
