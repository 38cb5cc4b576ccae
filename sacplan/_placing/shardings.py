"""Shardings of a step on a mesh: the fast ones, the small ones, and some between.

    for proposal in shardings(profile.recorded, parameters, mesh, spec):
        profile.on_ranks(Ranks.spread(proposal.sharding))

Time and peak of a proposal are by the search's own model. What it says becomes true in the program of one rank, which
also knows what the backward pass does by itself; recomputation and chunks are planned there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from sacplan._device.devices import DeviceSpec
from sacplan._placing.answer import sharding_of
from sacplan._placing.axis_program import SOLVER
from sacplan._placing.options import Allowed
from sacplan._placing.roles import ROLES
from sacplan._placing.search import ShardingSearch, ShardingSolution
from sacplan._profile.profile import Profile
from sacplan._program.program import ROOT_SCOPE, Phase, Program
from sacplan._ranks.shards import Parameter
from sacplan._shard.mesh import Mesh
from sacplan._shard.sharding import Sharding
from sacplan._solve.milp import Milp
from sacplan.errors import PlanError

_BETWEEN = (0.5,)
"""Limits between the smallest peak and that of the fastest."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A sharding, and what the search knows of it.

    Attributes:
        sharding: homes and places.
        ms: of a step on one rank, without a plan for memory.
        peak_bytes: of the same.
        status: ``"optimal"``: on one axis, proved to the gap; ``"feasible"``.
        binding: what runs at the peak: the fqn of a module, or ``"optimizer step"``.
        bound_ms: nothing that keeps the limit is faster; None where nothing is known.
        roles: by axis, what it was restricted to; empty if it was not.
        limited: whether a limit of work ended a solve on the way.
    """

    sharding: Sharding
    ms: float
    peak_bytes: int
    status: str
    binding: str
    bound_ms: float | None = None
    roles: tuple[str, ...] = ()
    limited: bool = False


class Sought(NamedTuple):
    """What a search came to, and whether a limit of work ended a solve on the way."""

    sharding: Sharding
    limited: bool


def shardings(
    program: Program,
    parameters: Sequence[Parameter],
    mesh: Mesh,
    spec: DeviceSpec,
    *,
    limits: Sequence[float] | None = None,
    allowed: Mapping[str, Allowed] | None = None,
    options: Milp = SOLVER,
) -> tuple[Proposal, ...]:
    """Shardings to plan on, the fastest first.

    Args:
        program: of the whole model on one device, as recorded.
        parameters: of the model (``parameters_of``).
        mesh: the ranks.
        spec: the device of a rank.
        limits: peaks in bytes for which the fastest is looked for, beside that without a limit; None: one between that
            one's and the smallest.
        allowed: by name of an axis, what is offered on it; see ``roles.py``.
        options: of the solver.

    Returns:
        At least one. The last has the smallest peak that was found.
    """
    search = ShardingSearch(program, parameters, mesh, spec, allowed, options)
    free = search.cheapest()
    smallest = search.smallest
    found: list[tuple[ShardingSolution, tuple[str, ...]]] = [(free, ())] if free is not None else []
    if limits is None:
        most = free.figures.peak_bytes if free is not None else smallest.figures.peak_bytes
        limits = [
            smallest.figures.peak_bytes + share * (most - smallest.figures.peak_bytes) for share in _BETWEEN
        ]
    for limit in limits:
        one = search.cheapest(limit)
        if one is not None:
            found.append((one, ()))
    found.extend((one, roles) for roles, one in search.starts.items())
    found.sort(key=lambda item: (item[0].figures.ms, item[0].figures.peak_bytes))
    found.append((smallest, ()))
    return _proposals(search, found)


def searched(profile: Profile, parameters: Sequence[Parameter], mesh: Mesh, limit: float = 0) -> Sought:
    """The fastest sharding whose peak on a rank, before recomputation, is at most ``limit`` bytes.

    Args:
        profile: of the whole model on one device.
        parameters: of the model.
        mesh: the ranks.
        limit: 0: none. Where no sharding keeps it, the one with the smallest peak is returned: recomputation may help.
    """
    search = _search(profile, parameters, mesh)
    found = search.cheapest(limit or math.inf) or search.smallest
    return Sought(sharding_of(search.evaluation, found.choice), found.limited)


def tensor_parallel(profile: Profile, parameters: Sequence[Parameter], mesh: Mesh) -> Sought:
    """The fastest tensor parallelism on the last axis, the fastest links; all other axes are left open.

    Raises:
        PlanError: the ranks of the axis divide no dimension of any parameter.
    """
    name, ranks = mesh.axes[-1]
    search = _search(profile, parameters, Mesh(((name, ranks),)), ("megatron",))
    found = search.cheapest() or search.smallest
    alone = sharding_of(search.evaluation, found.choice)
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


def _search(
    profile: Profile, parameters: Sequence[Parameter], mesh: Mesh, roles: tuple[str, ...] = ()
) -> ShardingSearch:
    """Kept with the recording, with what it has found."""
    allowed = {name: ROLES[role] for name, role in zip(mesh.names, roles, strict=False)}
    return profile.recorded.derived(
        ("search of placements", mesh, repr(profile.spec), tuple(parameters), roles),
        lambda: ShardingSearch(profile.recorded, parameters, mesh, profile.spec, allowed),
    )


def smallest_sharding(
    program: Program,
    parameters: Sequence[Parameter],
    mesh: Mesh,
    spec: DeviceSpec,
    *,
    allowed: Mapping[str, Allowed] | None = None,
    options: Milp = SOLVER,
) -> Proposal:
    """The sharding with the smallest peak on a rank that was found, before recomputation; arguments as above."""
    search = ShardingSearch(program, parameters, mesh, spec, allowed, options)
    return _proposals(search, [(search.smallest, ())])[0]


def _proposals(
    search: ShardingSearch, found: Sequence[tuple[ShardingSolution, tuple[str, ...]]]
) -> tuple[Proposal, ...]:
    """Each sharding once; of two, the one that is known better."""
    proposals: dict[str, Proposal] = {}
    for one, roles in found:
        sharding = sharding_of(search.evaluation, one.choice)
        bound = one.bound_ms if one.bound_ms is None or math.isfinite(one.bound_ms) else None
        figures, binding = one.figures, _binding(search, one.figures.moment)
        proposals.setdefault(
            repr(sharding),
            Proposal(
                sharding, figures.ms, figures.peak_bytes, one.status, binding, bound, roles, one.limited
            ),
        )
    return tuple(proposals.values())


def _binding(search: ShardingSearch, moment: int) -> str:
    program = search.graph.program
    op = program.ops[search.graph.order[moment]]
    if op.phase == Phase.OPTIMIZER:
        return "optimizer step"
    return program.scopes[op.scope].fqn if op.scope != ROOT_SCOPE else ""
