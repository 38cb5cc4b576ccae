"""The layout of each tensor of a step on one rank, and what the rank has of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import prod

import msgspec
import torch

from sacplan._device.devices import DeviceSpec
from sacplan._program.program import ROOT_SCOPE, Op, Phase, StorageKind, Tensor
from sacplan._shard.mesh import Mesh
from sacplan._shard.optimizer import optimizer_state
from sacplan._shard.placements import REPLICATED, Placements, WantedPlacements, local_shape
from sacplan._shard.places import CallPattern, CallPatterns
from sacplan._shard.rank.draft import RankDraft


class PlacedTensors:
    """The layouts of tensors; those without one are plain: every rank has all of them.

    Args:
        draft: the step as it is written.
        homes: by storage of a parameter, its layout. The others are replicated.
        mesh: the ranks.

    Attributes:
        replicated: on each axis.
        homes: by storage, the layout of all parameters and, after ``shrink``, of optimizer state.
        layouts: by tensor, its layout now. A redistribution may change it.
        weights: tensors that are parameters, or made of nothing else.
    """

    def __init__(self, draft: RankDraft, homes: Mapping[int, Placements], mesh: Mesh) -> None:
        program = draft.program
        self._draft = draft
        self._mesh = mesh
        self.replicated: Placements = (REPLICATED,) * len(mesh.axes)
        self.homes = {
            s: homes.get(s, self.replicated)
            for s, kind in enumerate(program.storage_kinds)
            if kind == StorageKind.PARAMETER
        }
        self.layouts: dict[int, Placements] = {}
        self.weights: set[int] = set()

    def shrink(self, device: DeviceSpec) -> None:
        """Give parameters and optimizer state the sizes of this rank's parts."""
        self.homes.update(optimizer_state(self._draft.program, self.homes))
        sizes = self._draft.storage_bytes
        for storage, layout in self.homes.items():
            parts = prod(n for p, n in zip(layout, self._mesh.ranks, strict=True) if p.is_cut)
            sizes[storage] = device.round_up(-(-sizes[storage] // parts))

    def layout(self, tensor: int) -> Placements | None:
        """Return the layout of a tensor; None if it is plain."""
        # Placed when it is first asked for: a program may have several tensors on one parameter's storage.
        if tensor not in self.layouts:
            program = self._draft.program
            storage = program.tensors[tensor].storage
            # Made by the step: placed when its op has run, or plain.
            if storage not in self.homes:
                return None
            self._place(tensor, self.homes[storage])
            if program.storage_kinds[storage] == StorageKind.PARAMETER:
                self.weights.add(tensor)
        return self.layouts[tensor]

    def _place(self, tensor: int, layout: Placements) -> None:
        """Place a tensor that is there before the step: its part is contiguous."""
        full = self._draft.program.tensors[tensor]
        shape = local_shape(full.shape, layout, self._mesh.ranks)
        stride = full.stride
        # A cut parameter is a contiguous copy on the rank (``kept`` in ``redistribute.py``); a replicated one
        # is as it was.
        if shape != full.shape:
            stride = tuple(torch.empty(shape, device="meta").stride())
        self.set(tensor, layout, msgspec.structs.replace(full, shape=shape, stride=stride))

    def set(self, tensor: int, layout: Placements, local: Tensor) -> None:
        """Note a tensor's layout, and this rank's part of it."""
        self.layouts[tensor] = layout
        self._draft.tensors[tensor] = local

    def local(self, tensor: int) -> Tensor:
        """Return this rank's part of a tensor."""
        return self._draft.tensors[tensor]

    def storage(self, tensor: int) -> int:
        """Return the storage on which this rank's part lies."""
        return self._draft.tensors[tensor].storage

    def any_recorded_on(self, storages: Collection[int]) -> bool:
        """Whether a tensor with a layout was recorded on one of these storages."""
        return any(self._draft.program.tensors[t].storage in storages for t in self.layouts)


class AskedLayouts:
    """The layouts that a sharding asks for at calls of the forward pass.

    Args:
        draft: the step as it is written.
        places: of the sharding.
    """

    def __init__(self, draft: RankDraft, places: Sequence[CallPattern]) -> None:
        self._program = draft.program
        self._places = CallPatterns(places)
        self._ran: Counter[tuple[int, str]] = Counter()  # ops on placed tensors, by module call

    def next(self, op: Op) -> tuple[WantedPlacements | None, ...] | None:
        """Return the layouts that are asked for at the op that runs next, and count it; None if none are.

        The backward pass follows the forward pass, and ops outside of all modules have no name to ask by.
        """
        # Not counted either: ``occurrence`` is that of ops for which a place could ask.
        if op.phase != Phase.FORWARD or op.scope == ROOT_SCOPE:
            return None
        occurrence = self._ran[op.scope, op.name]
        self._ran[op.scope, op.name] += 1
        place = self._places.find(self._program.scopes[op.scope].fqn, op.name, occurrence)
        return None if place is None else tuple(place.asked(len(op.inputs)))
