"""Chunks of layers that are alike: one is rehearsed, the others get its rewrite with their own ops and storages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from sacplan._program.program import Event, Events, Op, Patch, Phase, Program, StorageKind

_ALLOC, _FREE, _OP, _PACK, _RELEASE, _UNPACK, _DROP, _ENTER, _EXIT = map(int, Event)


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


def _backward(program: Program) -> Mapping[int, Sequence[int]]:
    """By forward op, the backward ops that belong to it."""

    def find() -> Mapping[int, Sequence[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(program.ops):
            if op.phase is Phase.BACKWARD and op.forward_of >= 0:
                found[op.forward_of].append(i)
        return found

    return program.derived("backward ops", find)


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

    def event(code: int, arg: int) -> tuple[int, int]:
        if code == _OP:
            return code, arg if arg >= n_ops else kin.ops[arg]
        if code in (_ALLOC, _FREE):
            return code, storage(arg)
        if code in (_ENTER, _EXIT):
            return code, {here: there}[arg]
        known = len(program.handle_storages) if code in (_PACK, _RELEASE) else len(program.instance_handles)
        if arg < known:
            raise KeyError(arg)
        return code, arg

    def op(one: Op) -> Op:
        reads, writes, mutates = (tuple(map(storage, each)) for each in (one.reads, one.writes, one.mutates))
        return msgspec.structs.replace(one, scope=there, reads=reads, writes=writes, mutates=mutates)

    try:
        return (
            msgspec.structs.replace(
                patch,
                events={
                    kin.positions[at]: tuple(event(code, arg) for code, arg in events)
                    for at, events in patch.events.items()
                },
                ops=tuple(map(op, patch.ops)),
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
    events: dict[int, Events] = {}
    resized: dict[int, int] = {}
    ops: list[Op] = []
    lists: dict[str, list[int]] = {
        name: []
        for name in ("storage_bytes", "storage_kinds", "handle_storages", "handle_ops", "instance_handles")
    }
    n_storages, n_ops = len(program.storage_bytes), len(program.ops)
    n_handles, n_instances = len(program.handle_storages), len(program.instance_handles)
    for patch in patches:
        by = _Offsets(
            (n_storages, len(lists["storage_bytes"])),
            (n_ops, len(ops)),
            (n_handles, len(lists["handle_storages"])),
            (n_instances, len(lists["instance_handles"])),
        )
        resized.update(patch.resized)
        for at, found in patch.events.items():
            if at in events:
                raise ValueError(f"two patches look at event {at}")
            events[at] = tuple(by.event(code, arg) for code, arg in found)
        ops += (
            msgspec.structs.replace(
                op,
                reads=tuple(by.storages(op.reads)),
                writes=tuple(by.storages(op.writes)),
                mutates=tuple(by.storages(op.mutates)),
            )
            for op in patch.ops
        )
        lists["storage_bytes"] += patch.storage_bytes
        lists["storage_kinds"] += patch.storage_kinds
        lists["handle_storages"] += by.storages(patch.handle_storages)
        lists["handle_ops"] += patch.handle_ops or (-1,) * len(patch.handle_storages)
        lists["instance_handles"] += (by.moved(handle, by.handle) for handle in patch.instance_handles)
    return Patch(
        events=events,
        resized=resized,
        ops=tuple(ops),
        storage_bytes=tuple(lists["storage_bytes"]),
        storage_kinds=tuple(map(StorageKind, lists["storage_kinds"])),
        handle_storages=tuple(lists["handle_storages"]),
        handle_ops=tuple(lists["handle_ops"]),
        instance_handles=tuple(lists["instance_handles"]),
    )


@dataclass(frozen=True, slots=True)
class _Offsets:
    """By what the indices of a patch's own things move: (how many the program has, how many came before)."""

    storage: tuple[int, int]
    op: tuple[int, int]
    handle: tuple[int, int]
    instance: tuple[int, int]

    @staticmethod
    def moved(index: int, by: tuple[int, int]) -> int:
        known, offset = by
        return index if index < known else index + offset

    def storages(self, indices: Iterable[int]) -> Iterator[int]:
        return (self.moved(s, self.storage) for s in indices)

    def event(self, code: int, arg: int) -> tuple[int, int]:
        if code == _OP:
            return code, self.moved(arg, self.op)
        if code in (_ALLOC, _FREE):
            return code, self.moved(arg, self.storage)
        if code in (_PACK, _RELEASE):
            return code, self.moved(arg, self.handle)
        if code in (_UNPACK, _DROP):
            return code, self.moved(arg, self.instance)
        return code, arg
