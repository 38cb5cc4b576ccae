"""Steps of ranks that are seeded differently, or get different batches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import sacplan
from sacplan._ranks.ranks import Ranks
from sacplan._shard.places import CallPattern
from sacplan._shard.sharding import Sharding
from tests.support.spread import Case
from tests.zoo.layers import FromFunction


def layer() -> nn.Module:
    def drop(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        """Dropout with a mask that a plan may discard: no op writes it in place."""
        return x * torch.bernoulli(torch.full_like(x, 0.7))

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.down(self.inside(F.gelu(self.up(x)))))

    return FromFunction(
        forward,
        up=nn.Linear(16, 64),
        inside=nn.Dropout(0.3),
        down=nn.Linear(64, 16),
        after=FromFunction(drop),
    )


def model_that_draws() -> FromFunction:
    """Dropout, and a number that the forward pass draws by itself before anything else."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rand(())
        for layer in self.layers:
            x = layer(x)
        return x * scale

    return FromFunction(forward, layers=nn.ModuleList(layer() for _ in range(2)))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def parts_loss_fn(model: FromFunction, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Calls parts of the model, and never the model."""
    return F.mse_loss(model.layers[1](model.layers[0](batch[0])), batch[1])


def made(batch_seed: int = 0) -> tuple[FromFunction, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = model_that_draws()
    torch.manual_seed(batch_seed)
    return model, (torch.randn(8, 16), torch.randn(8, 16))


def seeded(file: Path, loss_fn: Any, shift: int) -> dict[str, Any]:
    """Three steps, each seeded anew: losses, gradients, and this rank's part of two dropouts."""
    model, batch = made()
    found: dict[str, Any] = {"losses": [], "gradients": [], "inside": [], "after": []}
    with sacplan.apply(model, sacplan.Plan.load(file)):
        for name in ("inside", "after"):
            module = model.layers[0].get_submodule(name)
            module.register_forward_hook(lambda m, a, out, n=name: found[n].append(out.detach().to_local()))
        for step in range(3):
            torch.manual_seed(100 * step + shift * dist.get_rank())
            loss = loss_fn(model, batch)
            loss.backward()
            found["losses"].append(loss.detach().full_tensor())
            found["gradients"] += [p.grad.full_tensor() for p in model.parameters()]
            model.zero_grad(set_to_none=True)
    return found


def different(file: Path, kind: str) -> dict[str, Any]:
    """What is said where the last rank gets another batch."""
    model, batch = made()
    if dist.get_rank() == 3:
        if kind == "values":
            _, batch = made(batch_seed=1)
        elif kind == "labels":
            batch = batch[0], batch[1] + 1
        elif kind == "shapes":
            batch = batch[0][:4], batch[1][:4]
    with sacplan.apply(model, sacplan.Plan.load(file)):
        try:
            loss_fn(model, batch).backward()
        except sacplan.SacplanError as error:
            return {"says": str(error)}
    return {"says": ""}


def later(file: Path) -> dict[str, Any]:
    """In a later step, a last batch that has fewer rows on one rank."""
    model, batch = made()
    said = ""
    with sacplan.apply(model, sacplan.Plan.load(file)):
        for rows in (8, 8 if dist.get_rank() else 4):
            try:
                loss_fn(model, (batch[0][:rows], batch[1][:rows])).backward()
            except sacplan.SacplanError as error:
                said += str(error)
    return {"says": said}


_HOMES = {"layers.*.up.weight": "R,S0", "layers.*.up.bias": "R,S0", "layers.*.down.weight": "R,S1"}
SHARDING = Sharding.of(
    {"dp": 2, "tp": 2}, _HOMES, [CallPattern("layers.0.up", "aten.addmm.default", 0, ("*,*", "S0,R"))]
)
"""The batch is cut on one axis, and what layers have inside on the other, too."""


def agreement_cases(directory: Path) -> dict[str, Case]:
    """What ranks run in ``tests/shard/test_spread.py``, with a plan that only spreads, and one that recomputes, too."""
    model, batch = made()
    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    on_rank = profile.on_ranks(Ranks.spread(SHARDING))
    spread = sacplan.plan(on_rank, "100%", techniques=("recompute",))
    recomputing = sacplan.policy("full", profile=on_rank)
    drawn = {d.place for d in recomputing.decisions if "bernoulli" in d.op}
    assert drawn == {"after"}
    plain_file, recomputing_file = directory / "spread.json", directory / "recomputing.json"
    spread.save(plain_file)
    recomputing.save(recomputing_file)
    cases: dict[str, Case] = {
        "alike": functools.partial(seeded, plain_file, loss_fn, 0),
        "differently": functools.partial(seeded, plain_file, loss_fn, 1),
        "again": functools.partial(seeded, recomputing_file, loss_fn, 1),
        "parts alike": functools.partial(seeded, plain_file, parts_loss_fn, 0),
        "parts": functools.partial(seeded, plain_file, parts_loss_fn, 1),
        "later": functools.partial(later, plain_file),
    }
    for kind in ("same batches", "values", "labels", "shapes"):
        cases[kind] = functools.partial(different, plain_file, kind)
    return cases
