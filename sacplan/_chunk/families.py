"""Chunks of layers that are alike: one is rehearsed, the others get its rewrite with their own ops and storages.

Two module calls are alike if their ops, and the backward ops of these, are the same one by one, up to a renaming of
storages from the first call to the second. The renaming is built on the way (``_Kinship``): ops in
the same position correspond, so do the storages in the same position of these, and so do the events of both. A patch is
renamed with it. If it refers to anything that the renaming does not cover, there is no transfer, and the second call is
rehearsed by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sacplan._program.derived import derived
from sacplan._program.program import Patch, Phase, Program, StorageKind
from sacplan._program.rewriting import Indices, PatchBuilder, Table


@dataclass(slots=True)
class _Kinship:
    """Which ops, storages and events of two module calls correspond.

    Attributes:
        ops, storages, positions: from one call to the other; positions are those of events.
    """

    program: Program
    ops: dict[int, int] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)

    def add_op(self, here: int, there: int) -> bool:
        """Let two ops correspond, and what they read and write. False if they are not alike, as far as is known."""
        program = self.program
        one, other = program.ops[here], program.ops[there]
        same = (one.name, one.arguments, one.phase, one.workspace_bytes, len(one.inputs), len(one.outputs))
        if same != (
            other.name, other.arguments, other.phase, other.workspace_bytes, len(other.inputs), len(other.outputs)
        ):  # fmt: skip
            return False
        # Layouts decide what a kernel allocates and how a slice lies in memory.
        tensors = program.tensors
        for a, b in zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=True):
            x, y = tensors[a], tensors[b]
            if (x.dtype, x.shape, x.stride, x.offset) != (y.dtype, y.shape, y.stride, y.offset):
                return False
        self.ops[here] = there
        self.positions[int(program.liveness.op_events[here])] = int(program.liveness.op_events[there])
        fields = ((one.reads, other.reads), (one.writes, other.writes), (one.mutates, other.mutates))
        return all(
            len(a) == len(b) and all(self._add_storage(x, y) for x, y in zip(a, b, strict=True))
            for a, b in fields
        )

    def _add_storage(self, here: int, there: int) -> bool:
        if self.storages.setdefault(here, there) != there:
            return False  # it already stands for another one
        program = self.program
        if program.storage_bytes[here] != program.storage_bytes[there]:
            return False
        ours, theirs = (program.liveness.events_of[s] for s in (here, there))
        # Only of what ops make. If the numbers differ, something else holds one of the two, and a patch that refers to
        # these events is not transferred.
        if here in program.writer and len(ours) == len(theirs):
            self.positions.update(zip(ours, theirs, strict=True))
        return True


def _kinship(program: Program, here: int, there: int) -> _Kinship | None:
    """Return how two module calls correspond; None if they are not alike."""
    found = _Kinship(program)
    ours, theirs = program.ops_in(here), program.ops_in(there)
    backward = backward_ops(program)
    pairs: list[tuple[Sequence[int], Sequence[int]]] = [(ours, theirs)]
    pairs += [(backward.get(a, ()), backward.get(b, ())) for a, b in zip(ours, theirs, strict=False)]
    for a, b in pairs:
        if len(a) != len(b) or not all(found.add_op(x, y) for x, y in zip(a, b, strict=True)):
            return None
    liveness = program.liveness
    found.positions[liveness.entered[here]] = liveness.entered[there]
    found.positions[liveness.exited[here]] = liveness.exited[there]
    return found


@derived
def backward_ops(program: Program) -> Mapping[int, Sequence[int]]:
    """Return by forward op the backward ops that belong to it; worked out once."""
    found: dict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(program.ops):
        if op.phase is Phase.BACKWARD and op.forward_of >= 0:
            found[op.forward_of].append(i)
    return dict(found)


def transferred(
    program: Program, patch: Patch, deferred: Iterable[int], here: int, there: int
) -> tuple[Patch, frozenset[int]] | None:
    """Return the patch of a chunk at one module call as one at another call, and the ops that it defers there.

    Args:
        program: the step.
        patch: the patch at the call ``here``.
        deferred: the ops that it defers.
        here, there: scopes of the two calls.

    Returns:
        None if the calls are not alike in all that the patch refers to.
    """
    # Each exit with None means that the second call is rehearsed by itself, which is slower and never wrong.
    kin = _kinship(program, here, there)
    if kin is None:
        return None
    n_ops, n_storages = len(program.ops), len(program.storage_bytes)
    shared = (StorageKind.PARAMETER, StorageKind.BUFFER)

    def storage(s: int) -> int:
        if s >= n_storages:
            return s
        if s not in kin.storages and program.storage_kinds[s] not in shared:
            raise KeyError(s)  # an activation from elsewhere; of the model's tensors both may read the same
        return kin.storages.get(s, s)

    def new(known: int) -> Callable[[int], int]:
        """Map handles or instances: those of the patch stay as they are. It must refer to no other ones."""

        def own(index: int) -> int:
            if index < known:
                raise KeyError(index)
            return index

        return own

    indices = Indices(
        storage,
        op=lambda i: i if i >= n_ops else kin.ops[i],
        handle=new(len(program.handle_storages)),
        instance=new(len(program.instance_handles)),
        scope={here: there}.__getitem__,
    )
    try:
        return (
            msgspec.structs.replace(
                patch,
                events={
                    kin.positions[at]: tuple(indices.event(*event) for event in events)
                    for at, events in patch.events.items()
                },
                ops=tuple(indices.moved(msgspec.structs.replace(op, scope=there)) for op in patch.ops),
                resized={storage(s): n_bytes for s, n_bytes in patch.resized.items()},
                handle_storages=tuple(map(storage, patch.handle_storages)),
                handle_ops=tuple(-1 if i < 0 else kin.ops[i] for i in patch.handle_ops),
            ),
            frozenset(kin.ops[i] for i in deferred),
        )
    except KeyError:
        return None  # it looks at something that only the first call has


def merged(program: Program, patches: Sequence[Patch]) -> Patch:
    """Return several patches as one. Each numbers its new ops and storages from the end of the program's.

    Raises:
        ValueError: two of them replace the same event.
    """
    if len(patches) == 1:
        return patches[0]
    draft = PatchBuilder(program)
    for patch in patches:
        # Offsets are those of now: all that the patch refers to is renamed before anything of it is added.
        indices = Indices(
            storage=_behind(draft.storage_bytes),
            op=_behind(draft.ops),
            handle=_behind(draft.handle_storages),
            instance=_behind(draft.instance_handles),
        )
        for at, found in patch.events.items():
            if at in draft.events:
                raise ValueError(f"two patches look at event {at}")
            draft.events[at] = tuple(indices.event(*event) for event in found)
        ops = [indices.moved(op) for op in patch.ops]
        handles = list(map(indices.storage, patch.handle_storages))
        instances = list(map(indices.handle, patch.instance_handles))
        draft.ops.new += ops
        for storage, n_bytes in patch.resized.items():
            draft.storage_bytes[storage] = n_bytes
        for n_bytes, kind in zip(patch.storage_bytes, patch.storage_kinds, strict=True):
            draft.new_storage(n_bytes, kind)
        for s, op in zip(handles, patch.handle_ops, strict=True):
            draft.new_handle(s, op)
        draft.instance_handles.new += instances
    return draft.patch()


def _behind(table: Table[Any]) -> Callable[[int], int]:
    """Return where a patch's own entries of a table are, behind those that were added before."""
    known, offset = len(table) - len(table.new), len(table.new)
    return lambda index: index if index < known else index + offset
