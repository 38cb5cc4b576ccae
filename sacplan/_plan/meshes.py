"""Plans on a mesh: shardings that people name and those that the search finds, with recomputation and slices on each.

What is compared is the step of one rank, rewritten for a sharding and then for a plan: its peak, and its time. Of the
shardings the cheapest counts whose plan holds the budget. Nothing is proved about other shardings; ``Plan.gap`` and
``Plan.lower_bound_ms`` are about recomputation with this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec import structs

from sacplan._device.devices import DeviceSpec
from sacplan._placing.data_parallel import with_data_parallel
from sacplan._placing.shardings import searched, tensor_parallel
from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._program.budget import format_bytes
from sacplan._ranks.ranks import Ranks
from sacplan._ranks.shards import Parameter, parameters_of
from sacplan._shard.mesh import Mesh
from sacplan._shard.sharding import Sharding
from sacplan.errors import InfeasibleBudget, PlanError

POLICIES = ("ddp", "fsdp", "megatron")
DATA, TENSOR = "dp", "tp"


@dataclass(frozen=True)
class Spread:
    """A step on a mesh, in one way.

    Attributes:
        name: ``"ddp"``, ``"fsdp"``, ``"megatron"``, two of them, or ``"search"``.
        whole: the profile of the whole model on one device.
        sharding: the way.
    """

    name: str
    whole: Profile
    sharding: Sharding

    @cached_property
    def profile(self) -> Profile:
        """Of one rank."""
        return self.whole.on_ranks(Ranks.spread(self.sharding))

    def named(self, plan: Plan) -> Plan:
        """The plan with the name of the sharding in its provenance."""
        options = {**plan.provenance.options, "sharding": self.name}
        return structs.replace(plan, provenance=structs.replace(plan.provenance, options=options))


def rows_of(profile: Profile) -> int:
    """Size of the batch: dimension 0 of its first tensor that has one."""
    for _, shape, _ in profile.fingerprint.batch:
        if shape:
            return int(shape[0])
    raise PlanError("the batch has no tensor with a dimension, so it cannot be spread over ranks.")


def resolve_mesh(mesh: Any, profile: Profile) -> tuple[Mesh, ...]:
    """The meshes that are asked for: one, or all of a number of devices.

    Args:
        mesh: ``{"dp": 2, "tp": 4}``; ``8`` or ``"8xh100"`` stands for all meshes of so many devices.
        profile: of the whole model.

    Raises:
        PlanError: it is none of these, or names another device than the profile's.
    """
    if isinstance(mesh, str):
        found = re.fullmatch(r"(\d+)\s*x\s*(\S+)", mesh.strip())
        if found is None:
            raise PlanError(
                f"mesh {mesh!r} cannot be read; give '8x{profile.device}', 8, or {{'dp': 2, 'tp': 4}}."
            )
        if found[2] != profile.device.split()[0]:
            raise PlanError(
                f"mesh {mesh!r} is of {found[2]}, and the profile is of a step on {profile.device}: make a profile with "
                f"device={found[2]!r}."
            )
        mesh = int(found[1])
    if isinstance(mesh, int) and not isinstance(mesh, bool) and mesh > 1:
        return meshes_of(mesh, profile.spec)
    return (Mesh.of(mesh),)


def meshes_of(devices: int, spec: DeviceSpec) -> tuple[Mesh, ...]:
    """The meshes of a number of devices: data parallel, times tensor parallel within a node."""
    found = []
    for n in range(1, min(devices, spec.ranks_per_node) + 1):
        if devices % n == 0:
            axes = ((DATA, devices // n), (TENSOR, n))
            found.append(Mesh(tuple((name, size) for name, size in axes if size > 1) or axes[:1]))
    return tuple(found)


def spreads(profile: Profile, mesh: Mesh, *, search: tuple[int, ...] | None = None) -> Iterator[Spread]:
    """Ways to spread a step over a mesh.

    Named ones first; then what the search finds without a limit (0), and under these peaks in bytes; None: no search.
    The last axis may be for tensor parallelism; the others are for data parallelism.
    """
    parameters = parameters_of(profile.recorded, profile.fingerprint.parameters)
    rows, seen = rows_of(profile), set()
    base = Sharding(mesh)
    makers: list[tuple[str, Callable[[], Sharding]]] = []
    for policy in ("ddp", "fsdp"):
        makers.append((policy, lambda p=policy: named_sharding(profile, parameters, base, p, rows)))
    if len(mesh.axes) == 1:
        makers.append(("megatron", lambda: tensor_parallel(profile, parameters, mesh)))
    else:
        for policy in ("ddp", "fsdp"):
            makers.append(
                (f"{policy} + megatron", lambda p=policy: _with_megatron(profile, parameters, mesh, p, rows))
            )
    for limit in search or ():
        makers.append(("search", lambda limit=limit: searched(profile, parameters, mesh, limit)))
    refused = []
    for name, make in makers:
        try:
            sharding = make()
        except PlanError as error:
            refused.append(f"{name}: {error}")
            continue
        if sharding not in seen:
            seen.add(sharding)
            yield Spread(name, profile, sharding)
    if not seen:
        raise PlanError(f"the step cannot be spread over mesh {mesh}. " + " ".join(refused))


def named_sharding(
    profile: Profile, parameters: tuple[Parameter, ...], base: Sharding, policy: str, rows: int
) -> Sharding:
    """Data parallelism along all axes of a mesh on which the sharding replicates everything."""
    found = base
    for axis, (name, n) in enumerate(base.mesh.axes):
        if n > 1 and not any(layout.split(",")[axis] != "R" for layout in base.homes.values()):
            rows_here = rows
            found = with_data_parallel(
                found, name, profile.recorded, parameters, rows_here, cut_parameters=policy == "fsdp"
            )
    return found


def _with_megatron(
    profile: Profile, parameters: tuple[Parameter, ...], mesh: Mesh, policy: str, rows: int
) -> Sharding:
    """Tensor parallelism on the last axis, data parallelism on the others."""
    found = tensor_parallel(profile, parameters, mesh)
    for name, n in mesh.axes[:-1]:
        if n > 1:
            found = with_data_parallel(
                found, name, profile.recorded, parameters, rows, cut_parameters=policy == "fsdp"
            )
    return found
