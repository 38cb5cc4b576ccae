"""The ranks of a mesh as one of them sees them: its position, and its process group on each axis."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from sacplan._shard.copies import Copies
from sacplan._shard.costs import sent_along
from sacplan._shard.executor.agreement import Agreement
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import REPLICATED, Placement, Placements, cut, fits
from sacplan._shard.places import CallPattern, CallPatterns
from sacplan._shard.redistribute import redistribute
from sacplan._torch import collectives, dtensors
from sacplan._torch.fake_tensors import active_fake_mode
from sacplan._torch.private import modes_off, storage_key
from sacplan.errors import PlanError


@dataclass(frozen=True, eq=False, slots=True)
class PlacedForm:
    """The layout, shape and dtype that placed tensors share. A grid has one object for each, compared by identity.

    Attributes:
        layout: their placements.
        shape, stride, dtype: of the unsharded tensor.
        weight: whether they are parameters, or made of nothing else.
        spec: the same, as DTensors have it.
        is_partial: whether ranks have summands.
    """

    layout: Placements
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    weight: bool
    spec: dtensors.DTensorSpec
    is_partial: bool


class Grid:
    """The state that all placed tensors of one model share on a rank.

    Attributes:
        mesh, device_mesh: the same ranks, as plans and as PyTorch know them.
        copies: redistributed inputs that are kept, each with its source.
        places: the calls that are asked for.
        modules: those that run, the innermost last: fqn, and the ops that it ran itself.
        prepared: how calls run, see ``prepare.py``.
        backward: number of the last backward pass in which hooks redistributed gradients.
        agreement: on random numbers and batches.
    """

    def __init__(
        self, mesh: Mesh, device_mesh: DeviceMesh, places: Sequence[CallPattern] = (), check: bool = True
    ) -> None:
        coordinate = device_mesh.get_coordinate()
        # ``get_coordinate`` is None on a process that is not in the mesh.
        if tuple(device_mesh.shape) != mesh.ranks or coordinate is None:
            raise PlanError(
                f"mesh {mesh} does not match the device mesh of shape {tuple(device_mesh.shape)}; "
                f"make it with init_device_mesh(device, {mesh.ranks}, mesh_dim_names={mesh.names})."
            )
        self.mesh, self.device_mesh, self.ranks = mesh, device_mesh, mesh.ranks
        self.coordinate = tuple(coordinate)
        self.copies: Copies[tuple[torch.Tensor, StorageWeakRef]] = Copies()
        self.places = CallPatterns(places)
        self.modules: list[tuple[str, Counter[str]]] = []
        self.backward = -1
        self.agreement = Agreement(device_mesh.device_type, check)
        self.prepared: dict[Any, Any] = {}
        self._forms: dict[Any, PlacedForm] = {}

    def __deepcopy__(self, _: Any) -> Grid:
        return self

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The names of this rank's process groups, by axis."""
        return tuple(self.device_mesh.get_group(axis).group_name for axis in range(len(self.ranks)))

    @cached_property
    def replicated(self) -> Placements:
        """The layout of a tensor that is replicated on all axes."""
        return (REPLICATED,) * len(self.ranks)

    def form(
        self, layout: Placements, shape: Any, stride: Any, dtype: torch.dtype, weight: bool = False
    ) -> PlacedForm:
        """Return the form of tensors with this layout, the same object each time."""
        key = (layout, shape, stride, dtype, weight)
        found = self._forms.get(key)
        if found is None:
            placements = placements_of(layout, self.ranks)
            spec = dtensors.dtensor_spec(self.device_mesh, placements, shape, stride, dtype)
            partial = any(p.is_partial for p in layout)
            found = self._forms[key] = PlacedForm(
                layout, torch.Size(shape), tuple(stride), dtype, weight, spec, partial
            )
        return found

    def move(
        self, local: torch.Tensor, shape: Sequence[int], source: Placements, target: Placements
    ) -> torch.Tensor:
        """Return this rank's part of a tensor in another layout."""
        return redistribute(local, shape, source, target, self.ranks, self.groups, self.coordinate)

    def moved(
        self, local: torch.Tensor, shape: Sequence[int], source: Placements, target: Placements, version: int
    ) -> torch.Tensor:
        """Return the same for an input of an op. Since it is only read, a copy that was made before is used again."""
        axes = sent_along(self.ranks, shape, source, target)
        if not axes:  # nothing is sent, so a copy is not worth keeping
            return self.move(local, shape, source, target)
        storage = local.untyped_storage()
        key = (
            *(storage_key(storage), version, local.dtype, local.shape, local.stride()),
            *(local.storage_offset(), tuple(shape), source, target),
        )
        known = self.copies.find(key)
        # The key has the address of the storage. If that storage is gone, another one may have its address:
        # the weak reference tells.
        if known is not None and not known[1].expired():
            return known[0]
        # Before the move, so that the old copy's memory is free for the new one.
        self.copies.make_room(axes)
        copy = self.move(local, shape, source, target)
        self.copies.keep(key, axes, (copy, StorageWeakRef(storage)))
        return copy

    def make_room(self, shape: Sequence[int], source: Placements, target: Placements) -> None:
        """Forget the copies on the axes of a redistribution whose own copy is not kept."""
        self.copies.make_room(sent_along(self.ranks, shape, source, target))

    def reduce(self, summand: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the sum over the ranks of an axis."""
        return collectives.all_reduce(summand, "sum", self.groups[axis])

    def place_of(self, op: str) -> CallPattern | None:
        """Return the place of the op that runs now, and count the op."""
        # Outside of all modules, or no place asks for anything: then no module is watched.
        if not self.modules:
            return None
        unit, ran = self.modules[-1]
        ran[op] += 1
        return self.places.find(unit, op, ran[op] - 1)

    @contextmanager
    def drawing(self, generator: torch.Generator, axes: Sequence[int]) -> Iterator[None]:
        """Draw from a generator that agrees on all ranks, but inside only on those that agree on all of ``axes``.

        Those that have the same part draw the same numbers; the others have other seeds. Afterwards all agree again.
        """
        # Nothing is drawn from fake tensors, and a generator's state is no tensor of the step.
        if active_fake_mode() is not None:
            yield
            return
        self.agreement.share(generator)
        if not axes:
            yield
            return
        with modes_off():  # ops on states are none of the step's
            # As bytes: a tensor would be alive beside what the op makes.
            state = generator.get_state().numpy().tobytes()
            where = ",".join(str(self.coordinate[axis]) for axis in axes)
            # The seed depends on the common state and on the position along ``axes``. So ranks with the same
            # part draw alike, and a run with the same seed draws the same again.
            digest = hashlib.blake2b(state + where.encode(), digest_size=7).digest()
            generator.manual_seed(int.from_bytes(digest, "little"))
        try:
            yield
        finally:
            with modes_off():
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
                # The state moves on in the same way on all ranks, so that the next op draws other numbers.
                torch.empty(4, device=generator.device).uniform_(generator=generator)


def placements_of(layout: Placements, ranks: Sequence[int]) -> list[Any]:
    """Return the placements of DTensor, which sees the cut of an axis within the parts of axes before it."""
    found: list[Any] = []
    for axis, placement in enumerate(layout):
        # DTensor's ``_StridedShard`` (``torch/distributed/tensor/placement_types.py``) counts pieces within
        # the parts of the axes before it, while ``outer`` counts them within the full tensor.
        if placement.is_cut:
            factor = placement.outer
            for other, n in zip(layout[:axis], ranks, strict=False):
                if other.is_cut and other.dim == placement.dim and other.outer < placement.outer:
                    factor //= n
            found.append(dtensors.shard(placement.dim, factor))
        elif placement.is_partial:
            found.append(dtensors.partial(placement.reduce))
        else:
            found.append(dtensors.replicate())
    return found


def layout_of(placements: Sequence[Any], shape: Sequence[int], ranks: Sequence[int]) -> Placements | None:
    """Return the layout of a DTensor, the inverse of ``placements_of``; None where its parts are not even."""
    options: list[list[Placement]] = []
    for axis, placement in enumerate(placements):
        kind, dim, factor, reduce = dtensors.placement_parts(placement)
        if kind != "S":
            options.append([Placement(kind, reduce=reduce)])
            continue
        before = [
            n
            for other, n in zip(placements[:axis], ranks, strict=False)
            if dtensors.placement_parts(other)[:2] == ("S", dim)
        ]
        outers = {factor}
        for n in before:
            outers |= {outer * n for outer in outers}
        options.append([cut(dim, outer) for outer in sorted(outers)])
    # DTensor's factor is relative to the parts of axes before it, which may or may not cut around this one.
    # So several ``outer`` are possible, and the one that gives back these placements is taken.
    for layout in product(*options):
        if fits(shape, layout, ranks) and placements_of(layout, ranks) == list(placements):
            return layout
    return None
