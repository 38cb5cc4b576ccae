"""Data parallelism along one axis of a mesh: each rank has a part of the batch.

The batch is cut where the forward pass reads it together with parameters for the first time, and activations follow
from that. Parameters are replicated (``"ddp"``), or cut and gathered by each op that reads them (``"fsdp"``). PyTorch's
DDP and FSDP2 place parameters alike, but have other buffers: see ``sacplan/_ranks``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from sacplan._profile.profile import Profile
from sacplan._program.elements import pattern_of
from sacplan._program.program import ROOT_SCOPE, Phase, Program, StorageKind
from sacplan._ranks.shards import Parameter
from sacplan._shard.placements import REPLICATED, Placements, cut, fits, format_layout
from sacplan._shard.places import CallPattern
from sacplan._shard.sharding import Sharding, cut_homes
from sacplan._torch.ops import is_computation
from sacplan.errors import PlanError

_WHOLE = (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)


def rows_of(profile: Profile) -> int:
    """Return the number of samples in the batch: dimension 0 of its first tensor that has dimensions.

    Raises:
        PlanError: no tensor of the batch has a dimension.
    """
    for _, shape, _ in profile.fingerprint.batch:
        if shape:
            return int(shape[0])
    raise PlanError("the batch has no tensor with a dimension, so it cannot be spread over ranks.")


def with_data_parallel(sharding: Sharding, axis: str, profile: Profile, *, cut_parameters: bool) -> Sharding:
    """Return a sharding with the batch cut along one more of its axes.

    Args:
        sharding: has parameters replicated on the axis, and places that leave it open.
        axis: its name.
        profile: of the whole model.
        cut_parameters: they are cut, too: ``"fsdp"``.

    Raises:
        PlanError: the ranks of the axis do not divide the batch.
    """
    mesh, rows = sharding.mesh, rows_of(profile)
    at = mesh.names.index(axis)
    homes = dict(sharding.homes)
    if cut_parameters:
        homes = _cut_homes(sharding, at, profile.parameters)
    return Sharding(mesh, homes, _with_entries(sharding, at, _entries(profile.recorded, rows), rows))


def _cut_homes(sharding: Sharding, at: int, parameters: Sequence[Parameter]) -> dict[str, str]:
    """Cut every parameter along the first dimension that the ranks of the axis divide."""
    mesh = sharding.mesh
    here = sharding.layouts([(p.name, p.shape) for p in parameters])
    homes: dict[str, Placements] = {}
    for p in parameters:
        layout = here.get(p.name, (REPLICATED,) * len(mesh.axes))
        options = []
        for dim in range(len(p.shape)):
            # A dimension that other axes cut already is cut inside of their parts.
            others = prod(n for q, n in zip(layout, mesh.ranks, strict=True) if q.is_cut and q.dim == dim)
            options.append((*layout[:at], cut(dim, others), *layout[at + 1 :]))
        # If the ranks divide no dimension, the parameter stays as it is: there are no uneven parts.
        layout = next((option for option in options if fits(p.shape, option, mesh.ranks)), layout)
        homes[p.name] = layout
    return {name: format_layout(layout) for name, layout in cut_homes(homes).items()}


def _entries(program: Program, rows: int) -> dict[tuple[str, str, int], list[int]]:
    """Find the ops that read parameters and, for the first time, the batch, and which of their inputs to cut.

    Returns:
        By unit, op and occurrence, as ``CallPattern`` has them.
    """
    # Three growing sets: ``batch``, what depends on the batch and on no parameter; ``placed``, what depends
    # on a parameter; and ``weights``, what depends on parameters alone.
    batch = {s for s in program.initial if program.storage_kinds[s] not in _WHOLE}
    placed = {s for s in program.initial if program.storage_kinds[s] == StorageKind.PARAMETER}
    weights = set(placed)
    ran: Counter[tuple[int, str]] = Counter()
    found: dict[tuple[str, str, int], list[int]] = {}
    for op in program.ops:
        # The forward pass comes first. Later ones, of further micro-batches, have the same call sites.
        if op.phase != Phase.FORWARD:
            break
        # Plain tensors alone: every rank computes all of it, so there is nothing to cut yet.
        if placed.isdisjoint(op.reads):
            if not batch.isdisjoint(op.reads):
                batch.update(op.writes)
            continue
        occurrence = ran[op.scope, op.name]
        ran[op.scope, op.name] += 1
        inputs = [program.tensors[t] for t in op.inputs]
        # Inputs that are rows of the batch, possibly folded with other dimensions, such as batch times
        # sequence.
        cuts = [
            i
            for i, t in enumerate(inputs)
            if t.storage in batch
            and t.storage not in placed
            and t.shape
            and t.shape[0] % rows == 0
            and t.shape[0]
        ]
        # It is the first time if no input depends on both. Later ops have activations, which arrive cut.
        of_weights = all(t.storage in weights or t.storage not in placed for t in inputs)
        if cuts and of_weights and op.scope != ROOT_SCOPE and is_computation(op.name):
            found.setdefault((pattern_of(program.scopes[op.scope].fqn), op.name, occurrence), cuts)
        elif weights.issuperset(op.reads):
            weights.update(op.writes)
        placed.update(op.writes)
    return found


def _with_entries(
    sharding: Sharding, at: int, entries: Mapping[tuple[str, str, int], list[int]], rows: int
) -> tuple[CallPattern, ...]:
    """Return places that also cut inputs on one more axis, within what other axes have cut."""
    mesh = sharding.mesh
    found = {(p.unit, p.op, p.occurrence): list(p.inputs) for p in sharding.places}
    for key, cuts in entries.items():
        inputs = found.setdefault(key, [])
        inputs += [""] * (max(cuts) + 1 - len(inputs))
        for i in cuts:
            # An input of which nothing is asked so far may have any placement on the other axes.
            words = (inputs[i] or ",".join("*" * len(mesh.axes))).split(",")
            outer = prod(n for word, n in zip(words, mesh.ranks, strict=True) if word.startswith("S0"))
            parts = outer * mesh.ranks[at]
            if rows % parts:
                raise PlanError(
                    f"a batch of {rows} cannot be cut for {parts} ranks (mesh {mesh}): give a batch that is a multiple "
                    f"of {parts}, or a mesh with fewer ranks for data parallelism."
                )
            words[at] = str(cut(0, outer))
            inputs[i] = ",".join(words)
    return tuple(CallPattern(*key, tuple(inputs)) for key, inputs in found.items())
