"""Spreads a model over a mesh as a plan says, by PyTorch's own calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sacplan.distributed.sharding.process_groups import device_mesh_of
from sacplan.errors import PlanError, PlanMismatch
from sacplan.planning.plan import Plan
from sacplan.techniques.base.technique import Installed


class SpreadModel(Installed):
    """A model that PyTorch has spread over a mesh, as a plan says. PyTorch has no call that undoes this.

    Raises:
        PlanError: there is no process group, or it has another number of ranks.
        PlanMismatch: ranks have other plans, or parameters of other values.
    """

    def __init__(self, model: torch.nn.Module, plan: Plan, mesh: DeviceMesh | None) -> None:
        assert plan.ranks.sharding is not None
        self._model, self._ranks, self._sharding = model, plan.ranks, plan.ranks.sharding
        # All ranks of the default group, on the kind of device that the parameters are on.
        if mesh is None:
            device = next((p.device.type for p in model.parameters()), "cpu")
            mesh = device_mesh_of(device, self._sharding.mesh.ranks, self._sharding.mesh.names)
        if tuple(mesh.shape) != self._sharding.mesh.ranks:
            raise PlanError(
                f"the plan is for mesh {self._sharding.mesh}, not for one of {tuple(mesh.shape)}."
            )
        self._mesh = mesh
        _agree(model, plan)
        self._sharding.parallelize(model, mesh)

    def spread_data(self) -> None:
        """Shard or replicate the model; called after everything else of the plan is installed."""
        self._ranks.spread_data(self._model, self._mesh)

    def remove(self) -> None:
        """Leave the model spread."""


_SAMPLES = 64  # of each parameter


def _agree(model: torch.nn.Module, plan: Plan) -> None:
    """Check that all ranks have the same plan and model: else they would hang, or train a mixture of models."""
    mine = {
        "the plan": _digest([repr((plan.ranks, plan.decisions)).encode()]),
        "the values of parameters": _digest(_sampled(model)),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for what in mine:
        others = [rank for rank, theirs in enumerate(everyone) if theirs[what] != everyone[0][what]]
        if others:
            raise PlanMismatch(
                f"ranks differ in {what}: {', '.join(map(str, others))} from rank 0. "
                f"Load the same plan on each, and make the model from the same seed or checkpoint."
            )


def _digest(parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _sampled(model: torch.nn.Module) -> Iterator[bytes]:
    """Yield a few bytes of each parameter."""
    for parameter in model.parameters():
        # There are no values to sample.
        if parameter.is_meta or not parameter.numel():
            continue
        flat = parameter.detach().flatten()
        few = flat[:: max(1, len(flat) // _SAMPLES)].contiguous().cpu()
        yield few.view(torch.uint8).numpy().tobytes()
