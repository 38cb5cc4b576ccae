"""Chunks of layers that are alike: one is rehearsed, the others get its rewrite with their own ops and storages."""

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
    """What stands for what in two calls of modules that are alike.

    Attributes:
        ops, storages, positions: of the program, from one call to the other.
    """

    program: Program
    ops: dict[int, int] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)

    def add_op(self, here: int, there: int) -> bool:
        """Whether two ops are alike, as far as is known; what they read and write then is too."""
        program = self.program
        one, other = program.ops[here], program.ops[there]
        same = (one.name, one.arguments, one.phase, one.workspace_bytes, len(one.inputs), len(one.outputs))
        if same != (
            other.name, other.arguments, other.phase, other.workspace_bytes, len(other.inputs), len(other.outputs)
        ):  # fmt: skip
            return False
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
            return False
        program = self.program
        if program.storage_bytes[here] != program.storage_bytes[there]:
            return False
        ours, theirs = (program.liveness.events_of[s] for s in (here, there))
        if here in program.writer and len(ours) == len(theirs):
            self.positions.update(zip(ours, theirs, strict=True))
        return True


def _kinship(program: Program, here: int, there: int) -> _Kinship | None:
    """Of two module calls; None if they are not alike."""
    found = _Kinship(program)
    ours, theirs = program.ops_in(here), program.ops_in(there)
    backward = _backward(program)
    pairs: list[tuple[Sequence[int], Sequence[int]]] = [(ours, theirs)]
    pairs += [(backward[a], backward[b]) for a, b in zip(ours, theirs, strict=False)]
    for a, b in pairs:
        if len(a) != len(b) or not all(found.add_op(x, y) for x, y in zip(a, b, strict=True)):
            return None
    liveness = program.liveness
    found.positions[liveness.entered[here]] = liveness.entered[there]
    found.positions[liveness.exited[here]] = liveness.exited[there]
    return found


@derived
def _backward(program: Program) -> Mapping[int, Sequence[int]]:
    """By forward op, the backward ops that belong to it."""
    found: dict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(program.ops):
        if op.phase is Phase.BACKWARD and op.forward_of >= 0:
            found[op.forward_of].append(i)
    return found


def transferred(
    program: Program, patch: Patch, deferred: Iterable[int], here: int, there: int
) -> tuple[Patch, frozenset[int]] | None:
    """A patch about one module call as one about another that is alike, and the ops that this one is about.

    None where the two are not alike in all that the patch looks at.
    """
    kin = _kinship(program, here, there)
    if kin is None:
        return None
    n_ops, n_storages = len(program.ops), len(program.storage_bytes)
    shared = (StorageKind.PARAMETER, StorageKind.BUFFER)

    def storage(s: int) -> int:
        if s >= n_storages:
            return s
        if s not in kin.storages and program.storage_kinds[s] not in shared:
            raise KeyError(s)
        return kin.storages.get(s, s)

    def new(known: int) -> Callable[[int], int]:
        """Of handles and instances, those of the patch stay what they are; there are no others."""

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
    """Patches that do not look at the same events, as one.

    Raises:
        ValueError: two of them do.
    """
    if len(patches) == 1:
        return patches[0]
    draft = PatchBuilder(program)
    for patch in patches:
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
    """Where a patch's own things stand behind those that are there already."""
    known, offset = len(table) - len(table.new), len(table.new)
    return lambda index: index if index < known else index + offset
