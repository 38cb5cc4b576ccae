"""How a rewrite is built: what a patch adds and changes is collected here, and pieces of other programs are put in.

Each rewrite goes through the events of a program and says what takes the place of some:

    draft = PatchBuilder(program)
    state = draft.new_storage(5056, StorageKind.OTHER)
    draft.events[position] = ((Event.ALLOC, state), (Event.OP, op))
    patch = draft.patch()

New things have the indices behind those of the program. What was recorded apart from it (a loop that ran in slices, a
collective, an optimizer) has indices of its own; an ``Indices`` says what they are in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from sacplan._program.elements import Event, Events, Op, Patch, StorageKind
from sacplan._program.recording import Recording

T = TypeVar("T")

_ALLOC, _FREE, _OP, _PACK, _RELEASE, _UNPACK, _DROP, _ENTER, _EXIT = map(int, Event)


class Table(Generic[T]):
    """Things of one kind: those of a program, which may be changed, and those that a rewrite adds.

    Attributes:
        new: what was added, in order.
        changed: by index, what takes the place of something of the program.
    """

    __slots__ = ("_known", "changed", "new")

    def __init__(self, known: Sequence[T]) -> None:
        self._known = known
        self.new: list[T] = []
        self.changed: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._known) + len(self.new)

    def __getitem__(self, index: int) -> T:
        if index >= len(self._known):
            return self.new[index - len(self._known)]
        return self.changed[index] if index in self.changed else self._known[index]

    def __setitem__(self, index: int, thing: T) -> None:
        if index >= len(self._known):
            self.new[index - len(self._known)] = thing
        else:
            self.changed[index] = thing

    def add(self, thing: T) -> int:
        """Add one; its index."""
        self.new.append(thing)
        return len(self._known) + len(self.new) - 1


class PatchBuilder:
    """Collects a rewrite of a program.

    Attributes:
        program: what is rewritten.
        events: by position, what takes the place of the event there; see ``Patch.events``.
        ops, storage_bytes, storage_kinds, tensors, handle_storages, handle_tensors, handle_ops, instance_handles: as in
            ``Recording``, with what was added and changed.
        initial: new storages that are alive when the step begins.
    """

    def __init__(self, program: Recording) -> None:
        self.program = program
        self.events: dict[int, Events] = {}
        self.ops = Table(program.ops)
        self.storage_bytes = Table(program.storage_bytes)
        self.storage_kinds = Table(program.storage_kinds)
        self.tensors = Table(program.tensors)
        self.handle_storages = Table(program.handle_storages)
        self.handle_tensors = Table(program.handle_tensors)
        self.handle_ops = Table(program.handle_ops)
        self.instance_handles = Table(program.instance_handles)
        self.initial: list[int] = []

    def new_storage(self, n_bytes: int, kind: StorageKind = StorageKind.TEMPORARY) -> int:
        """Add a storage; its index."""
        self.storage_kinds.add(kind)
        return self.storage_bytes.add(n_bytes)

    def new_handle(self, storage: int, op: int = -1) -> int:
        """Add a handle on a storage, taken for an op if that is known; its index."""
        self.handle_tensors.add(-1)
        self.handle_ops.add(op)
        return self.handle_storages.add(storage)

    def numbering(
        self, known: dict[int, int], sizes: Mapping[int, int] | Sequence[int]
    ) -> Callable[[int], int]:
        """Where storages that were recorded elsewhere are in the program; others are added when they are asked for.

        Args:
            known: those that are there; the others join them.
            sizes: bytes by storage there.
        """

        def storage(index: int) -> int:
            if index not in known:
                known[index] = self.new_storage(sizes[index])
            return known[index]

        return storage

    def stream(self) -> Iterator[tuple[int, int]]:
        """The events as they are so far."""
        for position, event in enumerate(self.program.events):
            yield from self.events.get(position, (event,))
        yield from self.events.get(len(self.program.events), ())

    def put(
        self, events: Iterable[tuple[int, int]], ops: Sequence[Op], indices: Indices
    ) -> list[tuple[int, int]]:
        """Add ops that were recorded elsewhere, in the order in which they run.

        Args:
            events: what happened there, ops by their position in ``ops``. Only ops and what they allocate and free is
                taken: module calls, and what autograd keeps, are not.
            ops: those.
            indices: what storages and tensors are in the program.

        Returns:
            The events in terms of the program.
        """
        found: list[tuple[int, int]] = []
        for code, arg in events:
            if code == _OP:
                found.append((code, self.ops.add(indices.moved(ops[arg]))))
            elif code in (_ALLOC, _FREE):
                found.append(indices.event(code, arg))
        return found

    def patch(self) -> Patch:
        """What was collected."""
        changed = {*self.handle_storages.changed, *self.handle_tensors.changed}
        return Patch(
            events=self.events,
            ops=tuple(self.ops.new),
            changed_ops=self.ops.changed,
            storage_bytes=tuple(self.storage_bytes.new),
            storage_kinds=tuple(self.storage_kinds.new),
            initial=tuple(self.initial),
            tensors=tuple(self.tensors.new),
            handle_storages=tuple(self.handle_storages.new),
            handle_ops=tuple(self.handle_ops.new),
            instance_handles=tuple(self.instance_handles.new),
            changed_handles={h: (self.handle_storages[h], self.handle_tensors[h]) for h in changed},
            changed_kinds=self.storage_kinds.changed,
            changed_tensors=self.tensors.changed,
            resized=self.storage_bytes.changed,
        )


def _same(index: int) -> int:
    return index


@dataclass(frozen=True, slots=True)
class Indices:
    """What the indices of one program, or of what was recorded apart from it, are in another.

    Attributes:
        storage, op, tensor, handle, instance, scope: of each kind.
    """

    storage: Callable[[int], int]
    op: Callable[[int], int] = _same
    tensor: Callable[[int], int] = _same
    handle: Callable[[int], int] = _same
    instance: Callable[[int], int] = _same
    scope: Callable[[int], int] = _same

    def event(self, code: int, arg: int) -> tuple[int, int]:
        """An event there."""
        if code == _OP:
            return code, self.op(arg)
        if code in (_ALLOC, _FREE):
            return code, self.storage(arg)
        if code in (_PACK, _RELEASE):
            return code, self.handle(arg)
        if code in (_UNPACK, _DROP):
            return code, self.instance(arg)
        return code, self.scope(arg)

    def moved(self, op: Op) -> Op:
        """An op with the storages and the tensors that it reads and writes there."""
        return msgspec.structs.replace(
            op,
            reads=tuple(map(self.storage, op.reads)),
            writes=tuple(map(self.storage, op.writes)),
            mutates=tuple(map(self.storage, op.mutates)),
            replaces=self.storage(op.replaces) if op.replaces >= 0 else -1,
            inputs=tuple(self.tensor(t) if t >= 0 else -1 for t in op.inputs),
            outputs=tuple(self.tensor(t) if t >= 0 else -1 for t in op.outputs),
        )
