"""Build a patch of a program: collect additions and changes, and insert pieces that were recorded elsewhere.

Each rewrite goes through the events of a program, and puts other events in the place of some:

    draft = PatchBuilder(program)
    state = draft.new_storage(5056, StorageKind.OTHER)
    draft.events[position] = ((Event.ALLOC, state), (Event.OP, op))
    patch = draft.patch()

New things have the indices after those of the program. Pieces that were recorded apart from it (a loop that ran in
slices, a collective, an optimizer) have indices of their own; an ``Indices`` translates them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from sacplan.core.elements import Event, Events, Op, Patch, StorageKind
from sacplan.core.recording import Recording

T = TypeVar("T")

_ALLOC, _FREE, _OP, _PACK, _RELEASE, _UNPACK, _DROP, _ENTER, _EXIT, _ = map(int, Event)


class Table(Generic[T]):
    """The things of one kind in a program (its ops, for example), with those that a rewrite changes and adds.

    Attributes:
        new: the added things, in order.
        changed: by index, the new value of a thing of the program.
    """

    __slots__ = ("_known", "changed", "new")

    def __init__(
        self, known: Sequence[T], new: Iterable[T] = (), changed: Iterable[tuple[int, T]] = ()
    ) -> None:
        self._known, self.new, self.changed = known, list(new), dict(changed)

    def __len__(self) -> int:
        return len(self._known) + len(self.new)

    def __getitem__(self, index: int) -> T:
        if index >= len(self._known):
            # Added things are numbered on from those that are known, so the index tells them apart.
            return self.new[index - len(self._known)]
        return self.changed[index] if index in self.changed else self._known[index]

    def __setitem__(self, index: int, thing: T) -> None:
        # The known things belong to the program, which stays as it is: their new values are kept in ``changed``.
        if index >= len(self._known):
            self.new[index - len(self._known)] = thing
        else:
            self.changed[index] = thing

    def add(self, thing: T) -> int:
        """Add a thing, and return its index."""
        self.new.append(thing)
        return len(self._known) + len(self.new) - 1


class PatchBuilder:
    """Collects a rewrite of a program.

    Attributes:
        program: the program that is rewritten.
        events: by position, the events that take the place of the one there; see ``Patch.events``.
        ops, storage_bytes, storage_kinds, tensors, handle_storages, handle_tensors, handle_ops, instance_handles: as in
            ``Recording``, changed and added ones included.
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

    @classmethod
    def continuing(cls, program: Recording, patch: Patch) -> PatchBuilder:
        """Return a builder that begins with a patch of the program: new things come after those of the patch."""
        draft = cls(program)
        draft.add(patch)
        return draft

    def add(self, patch: Patch) -> None:
        """Add what a patch changes and adds; its new things must be numbered on from those in the builder."""
        self.events.update(patch.events)
        self.initial += patch.initial
        # A patch does not say on which tensors its new handles are, and may leave out their ops: -1, as in ``with_``.
        unknown = (-1,) * len(patch.handle_storages)
        self.ops.new += patch.ops
        self.storage_bytes.new += patch.storage_bytes
        self.storage_kinds.new += patch.storage_kinds
        self.tensors.new += patch.tensors
        self.handle_storages.new += patch.handle_storages
        self.handle_tensors.new += unknown
        self.handle_ops.new += patch.handle_ops or unknown
        self.instance_handles.new += patch.instance_handles
        self.ops.changed.update(patch.changed_ops)
        self.storage_bytes.changed.update(patch.resized)
        self.storage_kinds.changed.update(patch.changed_kinds)
        self.tensors.changed.update(patch.changed_tensors)
        for handle, (storage, tensor) in patch.changed_handles.items():
            self.handle_storages[handle], self.handle_tensors[handle] = storage, tensor

    def new_storage(self, n_bytes: int, kind: StorageKind = StorageKind.TEMPORARY) -> int:
        """Add a storage, and return its index."""
        self.storage_kinds.add(kind)
        return self.storage_bytes.add(n_bytes)

    def new_handle(self, storage: int, op: int = -1) -> int:
        """Add a handle on a storage, and return its index. ``op``: the op whose gradient needs it, if that is known."""
        self.handle_tensors.add(-1)
        self.handle_ops.add(op)
        return self.handle_storages.add(storage)

    def numbering(
        self, known: dict[int, int], sizes: Mapping[int, int] | Sequence[int]
    ) -> Callable[[int], int]:
        """Return a function from storages that were recorded elsewhere to storages of the program.

        A storage that is not known is added when the function is first called with it.

        Args:
            known: storages of the other recording that are in the program; added ones are entered here.
            sizes: bytes, by storage of the other recording.
        """

        # On demand, so that only storages that the kept events and ops refer to come into the program.
        def storage(index: int) -> int:
            if index not in known:
                known[index] = self.new_storage(sizes[index])
            return known[index]

        return storage

    def stream(self) -> Iterator[tuple[int, int]]:
        """Yield the events of the program as rewritten so far."""
        for position, event in enumerate(self.program.events):
            yield from self.events.get(position, (event,))
        # The position after the last event is the end of the step, where only a rewrite can have put events.
        yield from self.events.get(len(self.program.events), ())

    def put(
        self, events: Iterable[tuple[int, int]], ops: Sequence[Op], indices: Indices
    ) -> list[tuple[int, int]]:
        """Add ops that were recorded elsewhere, in the order in which they run.

        Args:
            events: the recorded events, with ops by their position in ``ops``. Events of module calls and handles are
                dropped.
            ops: the recorded ops.
            indices: translate storages and tensors to those of the program.

        Returns:
            The events with the indices of the program.
        """
        found: list[tuple[int, int]] = []
        for code, arg in events:
            if code == _OP:
                found.append((code, self.ops.add(indices.moved(ops[arg]))))
            elif code in (_ALLOC, _FREE):
                found.append(indices.event(code, arg))
        return found

    def patch(self) -> Patch:
        """Return the patch."""
        # A patch has both of a changed handle: what was not set stays as it was.
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
    """A translation of indices from one recording to another.

    Attributes:
        storage, op, tensor, handle, instance, scope: functions from index to index, one for each kind.
    """

    storage: Callable[[int], int]
    op: Callable[[int], int] = _same
    tensor: Callable[[int], int] = _same
    handle: Callable[[int], int] = _same
    instance: Callable[[int], int] = _same
    scope: Callable[[int], int] = _same

    def event(self, code: int, arg: int) -> tuple[int, int]:
        """Translate an event."""
        kinds = (self.storage, self.storage, self.op, self.handle, self.handle, self.instance, self.instance)
        return code, (kinds[code] if code < _ENTER else self.scope)(arg)

    def moved(self, op: Op) -> Op:
        """Translate the storages and tensors of an op."""
        # Scope, ``forward_of`` and ``recomputes`` are left to the caller.
        return msgspec.structs.replace(
            op,
            reads=tuple(map(self.storage, op.reads)),
            writes=tuple(map(self.storage, op.writes)),
            mutates=tuple(map(self.storage, op.mutates)),
            # -1 stands for none, here and below, and is no index to translate.
            replaces=self.storage(op.replaces) if op.replaces >= 0 else -1,
            inputs=tuple(self.tensor(t) if t >= 0 else -1 for t in op.inputs),
            outputs=tuple(self.tensor(t) if t >= 0 else -1 for t in op.outputs),
        )
