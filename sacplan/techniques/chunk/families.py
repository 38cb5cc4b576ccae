"""Chunks of layers that are alike: one is rehearsed, the others get its rewrite with their own ops and storages.

The same holds for a module in two versions of a step: as it was recorded, and with decisions about other modules.

Two parts of steps are alike if their ops, and the backward ops of these, are the same one by one, up to a renaming of
storages from the first part to the second. The renaming is built on the way (``Kinship``): ops in
the same position correspond, so do the storages in the same position of these, and so do the events of both. A patch is
renamed with it. If it refers to anything that the renaming does not cover, there is no transfer, and the second part is
rehearsed by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, starmap
from typing import Any

import msgspec

from sacplan.core.program import Patch, Phase, Program, StorageKind
from sacplan.core.rewriting import Indices, PatchBuilder, Table
from sacplan.techniques.base.step import backward_ops


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A chunk as a rewrite of a program.

    Attributes:
        patch: the rewrite.
        deferred: ops of the program that no longer run where they ran.
        added_ms: how much longer the step takes.
        held: storages, made in the forward pass, that a loop of the backward pass holds from there on, such as a mask.
            What enters is not among them: autograd keeps that, and may have it made again.
        loop_bytes: of a stretch, the most that is alive at once of what its loop makes; 0 for other chunks.
    """

    patch: Patch
    deferred: frozenset[int]
    added_ms: float
    held: frozenset[int] = frozenset()
    loop_bytes: int = 0


@dataclass(slots=True)
class Kinship:
    """Which ops, storages and events of two parts of steps correspond.

    Attributes:
        ours, theirs: the steps of the two parts, which may be the same one.
        ops, storages, positions: from one part to the other; positions are those of events.
    """

    ours: Program
    theirs: Program
    ops: dict[int, int] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    _back: dict[int, int] = field(default_factory=dict)

    def add_ops(self, here: Sequence[int], there: Sequence[int]) -> bool:
        """Let ops correspond, and what they read and write; return False if they are not alike."""
        return len(here) == len(there) and all(map(self._add_op, here, there))

    def _add_op(self, here: int, there: int) -> bool:
        one, other = self.ours.ops[here], self.theirs.ops[there]
        same = (one.name, one.arguments, one.phase, one.workspace_bytes, len(one.inputs), len(one.outputs))
        if same != (
            other.name, other.arguments, other.phase, other.workspace_bytes, len(other.inputs), len(other.outputs)
        ):  # fmt: skip
            return False
        # Layouts decide what a kernel allocates and how a slice lies in memory.
        for a, b in zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True):
            x, y = self.ours.tensors[a], self.theirs.tensors[b]
            if (x.dtype, x.shape, x.stride, x.offset) != (y.dtype, y.shape, y.stride, y.offset):
                return False
        self.ops[here] = there
        position = int(self.ours.liveness.op_events[here])
        self.positions[position] = int(self.theirs.liveness.op_events[there])
        fields = ((one.reads, other.reads), (one.writes, other.writes), (one.mutates, other.mutates))
        return all(
            len(a) == len(b) and all(self._add_storage(x, y) for x, y in zip(a, b, strict=True))
            for a, b in fields
        )

    def _add_storage(self, here: int, there: int) -> bool:
        if self.storages.setdefault(here, there) != there or self._back.setdefault(there, here) != here:
            return False  # one of the two already corresponds to another storage
        if self.ours.storage_bytes[here] != self.theirs.storage_bytes[there]:
            return False
        ours, theirs = self.ours.liveness.events_of[here], self.theirs.liveness.events_of[there]
        # Events correspond only for what ops make. If their numbers differ, something else holds one of the two
        # storages, and a patch that refers to these events is not transferred.
        if here in self.ours.writer and len(ours) == len(theirs):
            self.positions.update(zip(ours, theirs, strict=True))
        return True


def kinship_of_calls(one: tuple[Program, int], other: tuple[Program, int], *, to_end: bool) -> Kinship | None:
    """Return how two module calls (``to_end``: and the forward pass after them) correspond; None if not alike."""
    (ours, here), (theirs, there) = one, other
    found = Kinship(ours, theirs)
    inside = [_forward_ops(ours, here, to_end=to_end), _forward_ops(theirs, there, to_end=to_end)]
    backward = backward_ops(ours), backward_ops(theirs)
    pairs: list[tuple[Sequence[int], Sequence[int]]] = [(inside[0], inside[1])]
    pairs += [(backward[0].get(a, ()), backward[1].get(b, ())) for a, b in zip(*inside, strict=False)]
    if not all(found.add_ops(a, b) for a, b in pairs):
        return None
    found.positions[ours.liveness.entered[here]] = theirs.liveness.entered[there]
    found.positions[ours.liveness.exited[here]] = theirs.liveness.exited[there]
    return found


def _forward_ops(program: Program, scope: int, *, to_end: bool) -> Sequence[int]:
    """Return the ops of a module call, or all forward ops from its first one on."""
    ops = range(program.scopes[scope].first_op, len(program.ops))
    return [i for i in ops if program.ops[i].phase is Phase.FORWARD] if to_end else program.ops_in(scope)


def transferred(known: Iterable[tuple[Kinship | None, Rewrite]], scope: int) -> Rewrite | None:
    """Return the rewrite of a part of a step, transferred from the first known rewrite that fits.

    Args:
        known: rewrites of other parts, each with how that part corresponds to this one (None: not alike).
        scope: the module call of this part, to which the ops of its loops belong.

    Returns:
        None if no known part is alike in all that its patch refers to.
    """
    return next(filter(None, (_transferred(one, kin, scope) for kin, one in known if kin is not None)), None)


def _transferred(rewrite: Rewrite, kin: Kinship, scope: int) -> Rewrite | None:
    # Each exit with None means that the second part is rehearsed by itself, which is slower and never wrong.
    ours, theirs, patch = kin.ours, kin.theirs, rewrite.patch
    n_ops, n_storages = len(ours.ops), len(ours.storage_bytes)
    shared = (StorageKind.PARAMETER, StorageKind.BUFFER)

    def storage(s: int) -> int:
        if s >= n_storages:
            return s - n_storages + len(theirs.storage_bytes)
        if s not in kin.storages and ours.storage_kinds[s] not in shared:
            raise KeyError(s)  # an activation from elsewhere; parameters and buffers both parts may read
        return kin.storages.get(s, s)

    def new(known: int, first: int) -> Callable[[int], int]:
        """Return a map of a patch's own handles or instances, numbered after the step's. It must refer to no others."""

        def own(index: int) -> int:
            if index < known:
                raise KeyError(index)
            return index - known + first

        return own

    indices = Indices(
        storage,
        op=lambda i: i - n_ops + len(theirs.ops) if i >= n_ops else kin.ops[i],
        handle=new(len(ours.handle_storages), len(theirs.handle_storages)),
        instance=new(len(ours.instance_handles), len(theirs.instance_handles)),
        scope=lambda _: scope,
    )
    try:
        moved = _moved(patch, indices, kin.positions.__getitem__)
        ops = tuple(msgspec.structs.replace(op, scope=scope) for op in moved.ops)
        deferred = frozenset(kin.ops[i] for i in rewrite.deferred)
        held = frozenset(map(storage, rewrite.held))
    except KeyError:
        return None  # the patch refers to something that only the first part has
    return replace(rewrite, patch=msgspec.structs.replace(moved, ops=ops), deferred=deferred, held=held)


def _moved(patch: Patch, indices: Indices, position: Callable[[int], int]) -> Patch:
    """Return a patch with other indices, at other positions."""
    return msgspec.structs.replace(
        patch,
        events={position(at): tuple(starmap(indices.event, events)) for at, events in patch.events.items()},
        ops=tuple(map(indices.moved, patch.ops)),
        resized={indices.storage(s): n_bytes for s, n_bytes in patch.resized.items()},
        handle_storages=tuple(map(indices.storage, patch.handle_storages)),
        handle_ops=tuple(-1 if i < 0 else indices.op(i) for i in patch.handle_ops),
        instance_handles=tuple(map(indices.handle, patch.instance_handles)),
    )


def merged(program: Program, rewrites: Sequence[Rewrite]) -> Patch:
    """Return the patches of several chunks as one. Each numbers its new ops and storages from the end of the program's.

    Raises:
        ValueError: two of them replace the same event, or two stretches interleave, which the executor does not run.
    """
    if len(rewrites) == 1:
        return rewrites[0].patch
    # Only a stretch has ``loop_bytes``.
    stretches = sorted((min(one.deferred), max(one.deferred)) for one in rewrites if one.loop_bytes)
    for (_, end), (start, _) in pairwise(stretches):
        if start < end:
            raise ValueError(f"two stretches interleave at op {start}")
    draft = PatchBuilder(program)
    for patch in (one.patch for one in rewrites):
        # Offsets are the draft's current lengths, so the whole patch is renamed before any of it is added.
        indices = Indices(
            storage=_after(draft.storage_bytes),
            op=_after(draft.ops),
            handle=_after(draft.handle_storages),
            instance=_after(draft.instance_handles),
        )
        if both := draft.events.keys() & patch.events:
            raise ValueError(f"two patches look at event {min(both)}")
        draft.add(_moved(patch, indices, position=lambda at: at))
    return draft.patch()


def _after(table: Table[Any]) -> Callable[[int], int]:
    """Return a map of a patch's indices into a table: its own entries come after those that were added before."""
    known, offset = len(table) - len(table.new), len(table.new)
    return lambda index: index if index < known else index + offset
