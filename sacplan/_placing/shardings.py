"""Shardings of a step on a mesh, as a plan asks for them: the fastest one under a limit, and tensor parallelism.

    found = searched(profile, mesh, limit=40 * 2**30)
    profile.on_ranks(Ranks.spread(found.sharding))

The search goes by its own cost model (``evaluation.py``). The program of one rank has the exact time and peak;
recomputation and chunks are planned there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec import structs

from sacplan._device.devices import DeviceSpec
from sacplan._placing.answer import sharding_of
from sacplan._placing.roles import ROLES
from sacplan._placing.search import ShardingSearch
from sacplan._profile.profile import Profile
from sacplan._program.derived import derived
from sacplan._program.program import Program
from sacplan._ranks.shards import Parameter
from sacplan._shard.mesh import Mesh
from sacplan._shard.sharding import Sharding
from sacplan.errors import PlanError


class Sought(NamedTuple):
    """The sharding that a search found, and whether a limit of work ended a solve on the way."""

    sharding: Sharding
    limited: bool


def searched(profile: Profile, mesh: Mesh, limit: float = 0) -> Sought:
    """Return the fastest sharding whose peak on a rank, before recomputation, is at most ``limit`` bytes.

    Args:
        profile: of the whole model on one device.
        mesh: the ranks.
        limit: 0: none. Where no sharding keeps it, the one with the smallest peak is returned: recomputation may help.
    """
    search = _search(profile, mesh)
    # No sharding keeps the limit: the plan may still, by recomputation.
    found = search.cheapest(limit or math.inf) or search.smallest
    return Sought(sharding_of(search.evaluation, found.choice), found.limited)


def tensor_parallel(profile: Profile, mesh: Mesh) -> Sought:
    """Return the fastest tensor parallelism on the last axis, which has the fastest links. Other axes are left open.

    Raises:
        PlanError: the ranks of the axis divide no dimension of any parameter.
    """
    name, ranks = mesh.axes[-1]
    # On a mesh of this axis alone. The other axes are added below: ``R`` for parameters, ``*`` (any) for
    # inputs.
    search = _search(profile, Mesh(((name, ranks),)), ("megatron",))
    found = search.cheapest() or search.smallest
    alone = sharding_of(search.evaluation, found.choice)
    # Nothing is cut: on this axis all ranks would do the same.
    if not alone.homes:
        raise PlanError(
            f"{ranks} ranks of axis {name!r} divide no dimension of a parameter of {profile.fingerprint.model_class}: "
            "choose another number of ranks."
        )
    others = len(mesh.axes) - 1
    homes = {pattern: ",".join(["R"] * others + [home]) for pattern, home in alone.homes.items()}
    places = [
        structs.replace(place, inputs=tuple(",".join(["*"] * others + [text]) for text in place.inputs))
        for place in alone.places
    ]
    return Sought(Sharding(mesh, homes, tuple(places)), found.limited)


def _search(profile: Profile, mesh: Mesh, roles: tuple[str, ...] = ()) -> ShardingSearch:
    """Return the search for a mesh; it is kept with the recording, so that later limits use what it has found."""
    return _recorded_search(profile.recorded, profile.parameters, mesh, profile.spec, roles)


@derived
def _recorded_search(
    program: Program, parameters: tuple[Parameter, ...], mesh: Mesh, spec: DeviceSpec, roles: tuple[str, ...]
) -> ShardingSearch:
    allowed = {name: ROLES[role] for name, role in zip(mesh.names, roles, strict=False)}
    return ShardingSearch(program, parameters, mesh, spec, allowed)
