"""Redistributions on a rank: the copies that they make, and the tensors whose place they take.

There are three kinds:

- A copy in another layout for the op that needs it. It is kept for later ops until another collective runs on one of
  its axes, or the phase ends (``copies.py``). The executor does the same.
- A sum. Where summands are reduced, the sum takes the place of the tensor, so that it is computed once.
- A gradient that gets the layout of its parameter, as the hook of the parameter does. It takes the place, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from sacplan._program.program import Op
from sacplan._shard.copies import Copies
from sacplan._shard.costs import sent_along
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import Placements, is_reduced
from sacplan._shard.rank.draft import RankDraft
from sacplan._shard.rank.exposed import HiddenCollectives
from sacplan._shard.rank.gradients import GradientHooks
from sacplan._shard.rank.local_runs import LocalRuns
from sacplan._shard.rank.saved import RankSavedTensors
from sacplan._shard.rank.storages import RankStorages
from sacplan._shard.rank.tensors import PlacedTensors
from sacplan._shard.recorded import collective_named
from sacplan._shard.views import Views


class Moves:
    """Redistributes tensors, and knows which copies there are.

    Args:
        draft: the step as it is written.
        mesh: the ranks.
        runs: what runs for a redistribution.
        placed: the layouts of tensors.
        storages: which of them were replaced.
        saved: what autograd holds.
        views: of the recorded step.
        gradients: of parameters.

    Attributes:
        hidden: the collectives that may run beside computation.
    """

    def __init__(
        self,
        draft: RankDraft,
        mesh: Mesh,
        runs: LocalRuns,
        placed: PlacedTensors,
        storages: RankStorages,
        saved: RankSavedTensors,
        views: Views,
        gradients: GradientHooks,
    ) -> None:
        self._draft, self._mesh, self._runs, self._placed = draft, mesh, runs, placed
        self._storages, self._saved, self._views, self._gradients = storages, saved, views, gradients
        self.hidden = HiddenCollectives()
        self._copies: Copies[int] = Copies()  # tensors
        self._versions: dict[int, int] = defaultdict(int)  # by storage, how often it was written in place

    # --- inputs of ops ------------------------------------------------------------------------------------

    def inputs(
        self, index: int, op: Op, have: Iterable[Placements], want: Iterable[Placements]
    ) -> tuple[list[int], list[int]]:
        """Redistribute the inputs of an op.

        Args:
            index: of the recorded op.
            op: as it runs.
            have: by input, its layout; that of a plain tensor is replicated.
            want: by input, the layout that it must have.

        Returns:
            The tensors that the op reads, and those copies among them that nothing reads after it.
        """
        given: list[int] = []
        passing: list[int] = []
        for tensor, source, target in zip(op.inputs, have, want, strict=True):
            # An input before this one may have been the same tensor, and have been reduced.
            here = self._placed.layouts.get(tensor, source)
            # Three cases: nothing to do; summands become their sum, for good; a copy in another layout, for
            # now.
            if here == target:
                given.append(tensor)
            elif is_reduced(here, target):
                self._reduce(index, op, tensor, here, target)
                given.append(tensor)
            else:
                given.append(self._copy(op, tensor, here, target, given, passing))
        return given, passing

    def _reduce(self, index: int, op: Op, tensor: int, source: Placements, target: Placements) -> None:
        summed = self.move(op, tensor, source, target)
        if tensor in self._views:  # what it is a view of still has the summands
            self._replace_view(index, tensor, summed, target)
        else:
            self.replace(tensor, summed, target)

    def _copy(
        self,
        op: Op,
        tensor: int,
        source: Placements,
        target: Placements,
        given: Collection[int],
        passing: list[int],
    ) -> int:
        """Return a copy in another layout: one that is kept, or a new one.

        Args:
            op: that needs it.
            tensor, source, target: what it is a copy of, and the layouts.
            given: other inputs of the op, which holds them while it runs.
            passing: copies that are not kept after the op are added here.
        """
        key = (tensor, self._versions[self._placed.storage(tensor)], target)
        # The key has the version of the storage: a copy from before a write in place is not found.
        known = self._copies.find(key)
        if known is not None:
            return known
        axes = self._axes(tensor, source, target)
        gone = self._copies.make_room(axes)
        self.free([copy for copy in gone if copy not in given])
        passing.extend(copy for copy in gone if copy in given)
        copy = self.move(op, tensor, source, target)
        if axes:
            self._copies.keep(key, axes, copy)
        elif self._placed.storage(copy) != self._placed.storage(
            tensor
        ):  # nothing was sent: made again each time
            passing.append(copy)
        return copy

    def move(self, op: Op, tensor: int, source: Placements, target: Placements, *, keep: bool = False) -> int:
        """Write a redistribution in front of an op; returns the new tensor. ``keep``: see ``LocalRuns``."""
        shape = self._draft.program.tensors[tensor].shape
        piece = self._runs.redistribution(self._placed.local(tensor), shape, source, target, keep=keep)
        known = len(self._draft.ops)
        storages = self._draft.put(piece, [self._placed.storage(tensor)], op)
        sent = (i for i in range(known, len(self._draft.ops)) if collective_named(self._draft.ops[i].name))
        # Only these can run beside computation (``exposed.py``). Those of activations are needed at once.
        if tensor in self._placed.weights:
            self.hidden.gathers.update(sent)
        elif tensor in self._gradients.parameter_of:
            self.hidden.reductions.update(sent)
        (made,) = piece.made
        return self._draft.add_tensor(made, storages)

    def _axes(self, tensor: int, source: Placements, target: Placements) -> tuple[int, ...]:
        shape = self._draft.program.tensors[tensor].shape
        return sent_along(self._mesh.ranks, shape, source, target)

    # --- copies -------------------------------------------------------------------------------------------

    def has_written(self, storages: Iterable[int]) -> None:
        """Note a write in place: copies of what was there before are not found any more."""
        for storage in storages:
            self._versions[storage] += 1

    def drop_copies(self) -> None:
        """Free all copies: a phase ends."""
        self.free(self._copies.clear())

    def free(self, copies: Iterable[int]) -> None:
        """Free copies.

        A copy without a storage of its own is a view of what it was cut from. One that has views lives until these
        are gone, see ``RankStorages.add_view``.
        """
        for storage in dict.fromkeys(map(self._placed.storage, copies)):
            if not self._draft.is_recorded(storage) and not self._storages.has_views(storage):
                self._draft.free([storage])

    # --- gradients ----------------------------------------------------------------------------------------

    def gradient(self, op: Op, tensor: int, source: Placements) -> None:
        """Give a gradient the layout of its parameter."""
        target = self._placed.homes[self._gradients.parameter_of[tensor]]
        # Before the reduction, as in the executor: two copies on one axis are never kept.
        if source != target:
            self.free(self._copies.make_room(self._axes(tensor, source, target)))
            self.replace(tensor, self.move(op, tensor, source, target, keep=True), target)

    # --- what takes the place of a tensor -------------------------------------------------------------------

    def replace(self, tensor: int, moved: int, layout: Placements) -> None:
        """Have what was made of a tensor take its place; what it lay on is freed."""
        old, new = self._placed.storage(tensor), self._placed.storage(moved)
        self._placed.set(tensor, layout, self._placed.local(moved))
        if new == old:  # only cut: a view of what is there
            return
        # The sum is now the activation or the gradient, and the summands were temporary.
        self._draft.swap_kinds(old, new)
        self._saved.is_replaced(tensor, old)
        self._storages.replace(old, new)
        self._draft.free([old])

    def _replace_view(self, index: int, tensor: int, moved: int, layout: Placements) -> None:
        """Have what was made of a view take its place.

        What it was a view of stays. The new storage is freed where the code lets go of the view, which no event says.
        """
        old, new = self._placed.storage(tensor), self._placed.storage(moved)
        self._placed.set(tensor, layout, self._placed.local(moved))
        end = self._views.last_op_of(tensor, index)
        # The code has the view as long as its base.
        if end is None:
            self._storages.free_with(self._draft.program.tensors[tensor].storage, new)
        else:
            self._storages.free_after(end, new)
        self._saved.is_replaced(tensor, old)
