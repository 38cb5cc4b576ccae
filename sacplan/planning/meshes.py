"""Plans on a mesh: ways to spread a step that PyTorch carries out, each with recomputation and chunks.

A way is a list of PyTorch's own calls: ``parallelize_module`` with a style for each module, and ``fully_shard``
or replicas. The step of one rank is recorded with these calls, and planned like any other step. The fastest plan
that holds the budget wins:

1. Make the ways on every mesh.
2. Plan each with a quick solver, by rising step time. A plan only adds time, so this ends as soon as the next way
   is slower without a plan than the best one is with its plan.
3. Plan the ways within ``_CLOSE`` of the fastest plan with the solver that was asked for.

This is a heuristic. Nothing is proved about other ways: ``Plan.gap`` and ``Plan.lower_bound_ms`` are about
recomputation with the chosen way. A way that would be fastest only with the careful solver is missed if its quick plan
is slower than the fastest one by more than ``_CLOSE``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from msgspec import structs

from sacplan.core.budget import is_share
from sacplan.device.devices import DeviceSpec
from sacplan.distributed.ranks.ranks import Ranks, layers_of
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.distributed.sharding.sharding import Sharding
from sacplan.distributed.sharding.styles import tensor_parallel
from sacplan.errors import PlanError, TraceError
from sacplan.planning.infeasible import infeasible_on_mesh
from sacplan.planning.make import Outcome, outcome_of
from sacplan.planning.plan import Plan
from sacplan.planning.request import Request
from sacplan.profiling.profile import NO_SOURCE, Profile
from sacplan.techniques.registry import TECHNIQUES

_DATA, _TENSOR = ("ddp", "fsdp"), ("megatron", "sequence")
POLICIES = (*_DATA, *_TENSOR)
"""Names of shardings."""

SHARD = "shard"
"""The technique with which ``plan`` spreads a step over a mesh."""


@dataclass(frozen=True)
class Spread:
    """A step that is spread over a mesh in one way.

    Attributes:
        name: ``"ddp"``, ``"fsdp"``, ``"megatron"``, ``"sequence"``, or ``"fsdp + megatron"`` and the like.
        whole: The profile of the whole model on one device.
        ranks: The mesh, and the arguments of the calls of PyTorch.
    """

    name: str
    whole: Profile
    ranks: Ranks

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        assert self.ranks.sharding is not None
        return self.ranks.sharding.mesh

    @cached_property
    def profile(self) -> Profile:
        """The profile of one rank."""
        return self.whole.on_ranks(self.ranks)

    def named(self, plan: Plan) -> Plan:
        """Return the plan with the name of the way in its provenance."""
        options = {**plan.provenance.options, "sharding": self.name}
        return structs.replace(plan, provenance=structs.replace(plan.provenance, options=options))


def devices_of(text: str, spec: DeviceSpec) -> int:
    """Return the number in ``"8xh100"``.

    Raises:
        PlanError: The text cannot be read, or names another device than the profile's.
    """
    found = re.fullmatch(r"(\d+)\s*x\s*(\S+)", text.strip())
    if found is None:
        raise PlanError(f"{text!r} cannot be read as a number of devices; give '8x{spec.name}', or 8.")
    # The name of a device may have several words; the first one is compared.
    if found[2] != spec.name.split()[0]:
        raise PlanError(
            f"{text!r} is of {found[2]}, and the profile is of a step on {spec.name}: make a profile with "
            f"device={found[2]!r}, or give '{found[1]}x{spec.name.split()[0]}'."
        )
    return int(found[1])


def resolve_mesh(mesh: Any, spec: DeviceSpec) -> tuple[Mesh, ...]:
    """Return the meshes that the user means: one, or all meshes of a number of devices.

    Args:
        mesh: Sizes by axis, ``{"dp": 2, "tp": 4}``. ``8`` or ``"8xh100"`` stands for all meshes of eight devices.
        spec: The device that the profile is of.

    Raises:
        PlanError: ``mesh`` is none of these, or names another device than the profile's.
    """
    if isinstance(mesh, str):
        if "x" not in mesh:
            raise PlanError(
                f"mesh {mesh!r} cannot be read; give '8x{spec.name}', 8, or {{'dp': 2, 'tp': 4}}."
            )
        mesh = devices_of(mesh, spec)
    if isinstance(mesh, int) and not isinstance(mesh, bool) and mesh > 1:
        return meshes_of(mesh, spec)
    return (Mesh.of(mesh),)


def meshes_of(devices: int, spec: DeviceSpec) -> tuple[Mesh, ...]:
    """Return the meshes of a number of devices: one data parallel axis, and a tensor parallel axis within a node."""
    found = []
    # The tensor parallel axis communicates most, so it stays within a node, where links are fastest.
    for n in range(1, min(devices, spec.ranks_per_node) + 1):
        if devices % n == 0:
            axes = (("dp", devices // n), ("tp", n))
            # Axes of one rank are left out. If none remains, the data parallel axis stays, since a mesh needs one.
            found.append(Mesh(tuple((name, size) for name, size in axes if size > 1) or axes[:1]))
    return tuple(found)


def spreads(profile: Profile, mesh: Mesh, names: Sequence[str] | None = None) -> Iterator[Spread]:
    """Yield ways to spread a step over a mesh, equal ones once.

    Args:
        profile: The profile of the whole model on one device.
        mesh: The ranks. A last axis named ``"tp"`` is for tensor parallelism, all others are for data parallelism.
        names: Names of the ways; None for all that fit the axes.

    Raises:
        PlanError: The step cannot be spread over this mesh in any of the ways. The message says why for each.
    """
    # By reason, the refused ways: often several share one, and the error then gives it once.
    refused: dict[str, list[str]] = {}
    seen = set[str]()
    for name in names_on(mesh) if names is None else names:
        try:
            spread = way(profile, mesh, name)
            if repr(spread.ranks) in seen:
                continue
            # Recorded inside of ``try``: if the step cannot run so, this way is refused.
            _ = spread.profile
        except (PlanError, TraceError) as error:
            refused.setdefault(str(error), []).append(name)
            continue
        seen.add(repr(spread.ranks))
        yield spread
    if not seen:
        reasons = " ".join(f"{', '.join(names)}: {reason}" for reason, names in refused.items())
        raise PlanError(f"the step cannot be spread over mesh {mesh}. {reasons}".rstrip())


def names_on(mesh: Mesh) -> tuple[str, ...]:
    """Return the names of the ways that suit the axes of a mesh: a last ``"tp"`` is for tensors, others for data."""
    if mesh.names[-1] != "tp":
        return _DATA
    return _TENSOR if len(mesh.axes) == 1 else tuple(f"fsdp + {name}" for name in _TENSOR)


def way(profile: Profile, mesh: Any, name: str) -> Spread:
    """Return a way to spread a step by its name, one of ``POLICIES`` or ``"fsdp + megatron"``, ``"fsdp + sequence"``.

    Raises:
        PlanError: The name is unknown, ``mesh`` stands for several meshes, PyTorch has no such way on it, or the number
            of ranks does not divide what has to be cut.
    """
    meshes = resolve_mesh(mesh, profile.spec)
    if len(meshes) != 1:
        raise PlanError(
            f"mesh {mesh!r} stands for several meshes; name the axes, such as {{'dp': 4, 'tp': 2}}."
        )
    mesh, words = meshes[0], name.split(" + ")
    both = [f"{data} + {tensor}" for data in _DATA for tensor in _TENSOR]
    if name not in (*POLICIES, *both):
        raise PlanError(
            f"sharding {name!r} is not known; it is one of {', '.join(map(repr, (*POLICIES, *both)))}."
        )
    has_tensors = words[-1] in _TENSOR
    data = Mesh(mesh.axes[:-1] if has_tensors else mesh.axes)
    if has_tensors and data.size > 1 and words[0] in ("ddp", *_TENSOR):
        raise PlanError(
            "DistributedDataParallel does not take a model that parallelize_module has cut: with tensor parallelism, "
            f"the other axes of mesh {mesh} are for fully_shard: 'fsdp + {words[-1]}'."
        )
    styles: dict[str, str] = {}
    if has_tensors:
        if profile.source is None:
            raise PlanError(NO_SOURCE)
        styles = tensor_parallel(
            profile.recorded,
            profile.fingerprint,
            profile.source.model,
            mesh.axes[-1],
            words[-1] == "sequence",
        )
    units = (
        None
        if words[0] in ("ddp", *_TENSOR)
        else layers_of(name for name, *_ in profile.fingerprint.parameters)
    )
    return Spread(name, profile, Ranks.on_mesh(Sharding(mesh, styles), units))


@dataclass(frozen=True, slots=True)
class TriedSpread:
    """A way to spread a step, and the outcome of planning one of its ranks."""

    spread: Spread
    outcome: Outcome

    @property
    def step_ms(self) -> float:
        """Predicted time of the step with the plan; infinite if there is no plan."""
        found = self.outcome.step_ms
        return math.inf if found is None else found


def asks_for_mesh(
    mesh: Any,
    techniques: Sequence[str] | None,
    ranks: Any,
) -> bool:
    """Whether the user wants the step spread over a mesh.

    Raises:
        PlanError: Arguments that contradict each other.
    """
    asked = techniques or ()
    # Neither ``mesh`` nor the technique was given.
    if mesh is None and SHARD not in asked:
        return False
    # Only one of the two was given. Without a list of techniques, the mesh is enough.
    if mesh is None or SHARD not in (techniques or (SHARD,)):
        raise PlanError(
            f'to shard, give a mesh, such as mesh={{"dp": 2, "tp": 4}}, and "{SHARD}" among the techniques.'
        )
    if ranks is not None:
        raise PlanError("give either a mesh, or ranks.")
    for name in asked:
        if name in TECHNIQUES and TECHNIQUES[name].one_device:
            others = (SHARD, *(other for other, each in TECHNIQUES.items() if not each.one_device))
            named = [f'"{other}"' for other in others]
            raise PlanError(
                f'"{name}" does not go together with a mesh: {TECHNIQUES[name].one_device}. Use techniques='
                f"({', '.join(named)}), or more ranks."
            )
    return True


def tried(ways: Iterable[Spread], request: Request, *, all_of_them: bool = False) -> list[TriedSpread]:
    """Plan each way, by rising step time. Unless ``all_of_them``, stop when no other way can be faster."""
    found: list[TriedSpread] = []
    best = math.inf
    for spread in sorted(ways, key=lambda each: each.profile.step_ms):
        if spread.profile.step_ms >= best and not all_of_them:
            break  # a plan only adds time, and the ways that follow are slower still
        outcome = outcome_of(request, spread.profile)
        if outcome.plan is not None:
            outcome = replace(outcome, plan=spread.named(outcome.plan))
        found.append(TriedSpread(spread, outcome))
        best = min(best, found[-1].step_ms)
    return found


# Quick plans are not the best ones, so a way that is slightly slower may win once it is planned carefully.
_CLOSE = 0.05
"""A way is planned carefully if its quick plan takes at most this share more time than the fastest plan."""


def on_meshes(request: Request, profile: Profile, mesh: Any) -> Outcome:
    """Return the fastest plan within the limit of each rank, on a mesh or on any mesh of a number of devices.

    A budget that is a share is one of the unplanned peak of a rank, so it differs from one sharding to another.

    Args:
        request: What is asked for, ``"shard"`` among the techniques or not.
        profile: The profile of the whole model.
        mesh: As for ``plan``.

    Raises:
        PlanError: The step cannot be spread over the mesh.
    """
    request.limit.room_of(profile)  # a budget that cannot be read is refused before the long search
    if request.techniques is not None:
        request = replace(request, techniques=[name for name in request.techniques if name != SHARD])
    found = _fastest(request, profile, mesh)
    if found.plan is None:
        return found
    # The planner of a rank knows nothing of ``shard``, which the plan names among its techniques.
    made_by = found.plan.provenance
    made_by = structs.replace(made_by, techniques=(SHARD, *made_by.techniques))
    return replace(found, plan=structs.replace(found.plan, provenance=made_by))


def _fastest(request: Request, profile: Profile, mesh: Any) -> Outcome:
    if profile.ranks.devices > 1:
        raise PlanError(
            "the profile is that of one of several ranks; a mesh is planned for from a profile of the whole model."
        )
    # ``"best"`` includes a quick solver, which is asked about every way first. Any other solver takes its place.
    quick = replace(request, solver="greedy") if request.solver == "best" else request
    meshes = resolve_mesh(mesh, profile.spec)
    ways: list[Spread] = []
    refused: list[str] = []
    for each in meshes:
        try:
            ways += spreads(profile, each)
        except PlanError as error:
            refused.append(str(error))
    # Refused meshes are an error only if no other mesh is left.
    if not ways:
        raise PlanError(" ".join(refused))
    found = tried(ways, quick)
    fastest = min(one.step_ms for one in found)
    near = [one for one in found if one.step_ms <= fastest * (1 + _CLOSE)]  # all, if none holds the budget
    # Plan these with the solver that was asked for. The quick plans stay in the list, since they may be faster.
    found += tried([one.spread for one in near if _may_improve(one)], request)
    best = min(found, key=lambda one: one.step_ms)
    if best.outcome.plan is not None:
        return best.outcome
    # Budgets differ if they are shares, so each peak is compared relative to its own budget.
    without = [(one.spread, one.outcome.error) for one in found if one.outcome.error is not None]
    least, nearest = min(without, key=lambda each: each[1].smallest_feasible_bytes / each[1].budget_bytes)
    where = " or ".join(map(str, meshes))
    shared = is_share(request.limit.budget)
    failed = infeasible_on_mesh(profile, least.profile, nearest, where, least.name, is_share=shared)
    return Outcome(least.profile, None, failed.smallest_feasible_bytes, failed)


def _may_improve(one: TriedSpread) -> bool:
    """Whether careful planning may find a faster plan; False if the step fits without any decisions."""
    return one.outcome.plan is None or bool(one.outcome.plan.decisions)
