"""Models spread over gloo ranks, beside the same in one process."""

from __future__ import annotations

import copy
import functools
import os
import random
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sacplan._shard.executor.install import ShardingHandle, spread
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import REPLICATED, Placements, cut, fits, local_shape, parse_layout
from sacplan._shard.places import CallPattern, matches
from tests.support.processes import run_ranks

RANKS = 4
MESHES = {"4": Mesh.of({"tp": 4}), "2x2": Mesh.of({"dp": 2, "tp": 2})}

Made = tuple[nn.Module, tuple[Any, ...], Callable[..., torch.Tensor]]
"""A model, its batch, and the loss of both."""

Case = Callable[[], Mapping[str, Any]]
"""Runs on each rank; what it returns is compared where the test is."""


def homes_of(model: nn.Module, mesh: Mesh, patterns: Mapping[str, str]) -> dict[str, Placements]:
    """The home of each parameter; replicated where no pattern has its name."""
    found = dict.fromkeys(dict(model.named_parameters()), (REPLICATED,) * len(mesh.axes))
    for pattern, text in patterns.items():
        found |= {name: parse_layout(text) for name in found if matches(pattern, name)}
    return found


def first_axis(model: nn.Module, mesh: Mesh) -> dict[str, Placements]:
    """As FSDP does: each parameter cut along its first dimension, where the ranks divide it."""
    found = {}
    for name, parameter in model.named_parameters():
        layout = (cut(0), *(REPLICATED,) * (len(mesh.axes) - 1))
        whole = (REPLICATED,) * len(mesh.axes)
        found[name] = layout if fits(parameter.shape, layout, mesh.ranks) else whole
    return found


def random_homes(model: nn.Module, mesh: Mesh, seed: int) -> dict[str, Placements]:
    """Any homes that fit, cuts inside dimensions among them."""
    rng = random.Random(seed)

    def placement(dims: int) -> Any:
        return rng.choice([REPLICATED, cut(rng.randrange(dims)), cut(rng.randrange(dims), 2)])

    found = {}
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        layouts = [tuple(placement(len(shape)) for _ in mesh.axes) for _ in range(30)]
        found[name] = next(
            (layout for layout in layouts if fits(shape, layout, mesh.ranks)),
            (REPLICATED,) * len(mesh.axes),
        )
    return found


@functools.cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """Of the ranks that run."""
    return init_device_mesh("cpu", mesh.ranks, mesh_dim_names=mesh.names)


def spread_on(
    model: nn.Module, mesh: Mesh, homes: Mapping[str, Placements], places: Sequence[CallPattern] = ()
) -> ShardingHandle:
    """``spread`` on the ranks that run."""
    return spread(model, mesh, device_mesh(mesh), homes, places)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, over the largest value if that is above 1."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))


def beside_one_process(
    make: Callable[[], Made],
    mesh: Mesh,
    homes: Callable[[nn.Module], Mapping[str, Placements]],
    places: Sequence[CallPattern],
) -> dict[str, Any]:
    """Loss and gradients of a step, and parameters after three with AdamW: differences from the same in one process.

    Also what this rank holds.
    """
    torch.manual_seed(0)
    model, batch, loss_fn = make()
    whole = copy.deepcopy(model)
    lies = homes(model)
    handle = spread_on(model, mesh, lies, places)
    shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    found: dict[str, Any] = {"never_met": len(handle.never_met) if not places else 0, "wrong_parts": []}
    models = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3)) for m in (model, whole)]
    for step in range(3):
        losses = [loss_fn(m, *batch) for m, _ in models]
        for loss in losses:
            loss.backward()
        if step == 0:
            found["loss"] = far(losses[0].full_tensor().detach(), losses[1].detach())
            found["gradients"] = 0.0
            found["never_met"] = len(handle.never_met)
            for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None), name
                if theirs.grad is None:
                    continue
                found["gradients"] = max(found["gradients"], far(ours.grad.full_tensor(), theirs.grad))
                expected = local_shape(shapes[name], lies[name], mesh.ranks)
                for held in (ours, ours.grad):
                    part = held.to_local().detach()
                    n_bytes = part.untyped_storage().nbytes()
                    if tuple(part.shape) != expected or n_bytes != part.nbytes:
                        found["wrong_parts"].append((name, tuple(part.shape), expected, n_bytes))
        for _, optimizer in models:
            optimizer.step()
            optimizer.zero_grad()
    handle.remove()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    found["parameters"] = max(
        far(p.detach(), q.detach()) for p, q in zip(model.parameters(), whole.parameters(), strict=True)
    )
    return found


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _rank(rank: int, port: int, cases: Mapping[str, Case], directory: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = dict(case())
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    torch.save(found, directory / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(cases: Mapping[str, Case], directory: Path) -> list[dict[str, Any]]:
    """What each rank found in each case; one spawn for all."""
    run_ranks(_rank, (_free_port(), cases, directory), RANKS)
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def ok(found: Sequence[Mapping[str, Any]], case: str) -> list[Mapping[str, Any]]:
    """What ranks found in a case that none of them failed in."""
    results = [of_rank[case] for of_rank in found]
    for rank, result in enumerate(results):
        assert "failed" not in result, f"rank {rank}: {result['failed']}"
    return results
