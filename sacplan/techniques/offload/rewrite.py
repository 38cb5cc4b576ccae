"""Offloading as a rewrite: tensors that are kept for the backward pass are away from the device in between.

    move = Move(storage, sent=17, let_go=40, fetch=9120)
    program.with_(moved(program, [move], spec))

It follows the executor (``executor/parcels.py``) rule for rule:

- After the op ``sent`` memory on the host is taken, and the copy out begins.
- After the op ``let_go`` computation waits for that copy. All handles on the storage let go of it: those of autograd,
  and those of recomputation, whose recipes read it. What code still holds stays on the device until code frees it. So
  does a handle from before the last write in place: the copy has other contents.
  If all handles are released before that, computation waits at the last release. If nobody has had a handle by the end
  of the call, computation waits where the tensor is freed, or else at that end. Then the memory on the host is free.
- Before the event ``fetch`` memory on the device is taken, and the copy back begins; at the latest when a value is
  needed.
- Whoever needs the value first waits for the copy back. Then the memory on the host is free.
- The copy on the device lives until the last of the handles is released.

So all that is taken and freed is at fixed places of the program. Only the time that computation waits depends on the
link; ``timing.py`` finds it.

A rewrite is local: it looks at the events of the storages that move, and at the places named above.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from sacplan.core.derived import derived
from sacplan.core.program import Event, Op, Patch, Phase, Program, StorageKind
from sacplan.core.rewriting import PatchBuilder
from sacplan.device.devices import DeviceSpec

_ALLOC, _FREE, _OP, _PACK, _RELEASE, _UNPACK, _DROP, _ENTER, _EXIT, _ = map(int, Event)

TO_HOST, WAIT_OUT = "sacplan.copy_to_host", "sacplan.wait_for_copy_to_host"
TO_DEVICE, WAIT_BACK = "sacplan.copy_to_device", "sacplan.wait_for_copy_to_device"
"""The names of the ops that a rewrite adds. Those that wait have the time that computation waits."""

FROM_HOST = "sacplan.from_host_.default"
"""The name of the op in which an optimizer updates parameters on the host (``record/host_state.py``)."""


class Move(NamedTuple):
    """A storage that is away, by places in the recorded program.

    Attributes:
        storage: which one.
        sent: the op after which the copy out begins.
        let_go: the op after which the device's memory is let go of; -1 if that op does not run: the memory is kept.
        fetch: the event before which the copy back begins; -1: when it is needed.
        call: the module call that sends it: handles that are taken outside of it do not let go. -1: all handles do.
    """

    storage: int
    sent: int
    let_go: int
    fetch: int
    call: int = -1


class Visit(NamedTuple):
    """A parameter that stays on the host, and its visits on the device, by places in the recorded program.

    Attributes:
        storage: that of the parameter.
        begin: the module call at whose beginning the copy for the forward pass begins.
        around: the module call from whose beginning the parameter is on the device.
        call: the module call at whose end it leaves: ``around``, or the last call inside that uses it.
        fetch: the event before which the copy for the backward pass begins; -1: when it is needed.
    """

    storage: int
    begin: int
    around: int
    call: int
    fetch: int


def moved(
    program: Program,
    moves: Iterable[Move | Visit],
    spec: DeviceSpec,
    base: Patch | None = None,
) -> Patch:
    """Return the patch that moves storages to the host and back.

    Args:
        program: the step.
        moves: what moves, and when.
        spec: the device.
        base: what another technique does to the same program. The result does both.
    """
    draft = PatchBuilder(program) if base is None else PatchBuilder.continuing(program, base)
    # A program knows the uses of each storage. Uses that the other technique adds are found once for all moves.
    concerned = _concerned(program, base)
    for move in moves:
        journey = _Journey if isinstance(move, Move) else _Visits
        journey(program, draft, move, spec).write(concerned.get(move.storage, ()))
    return draft.patch()


def _concerned(program: Program, base: Patch | None) -> dict[int, Sequence[int]]:
    """Return by storage the positions at which a patch takes or releases handles on it, or runs an op that reads it."""
    found: dict[int, list[int]] = defaultdict(list)
    # Without a patch no use is added, but the program itself may run ops again.
    if base is None:
        return dict(rereads(program))
    n_ops, n_handles = len(program.ops), len(program.handle_storages)
    for position, events in base.events.items():
        for code, arg in events:
            if code == _OP and arg >= n_ops:
                for s in base.ops[arg - n_ops].reads:
                    found[s].append(position)
            elif code in (_PACK, _RELEASE) and arg >= n_handles:
                found[base.handle_storages[arg - n_handles]].append(position)
    return dict(found)


@derived
def rereads(program: Program) -> dict[int, Sequence[int]]:
    """Return by storage the positions at which ops run again that read it."""
    found: dict[int, list[int]] = defaultdict(list)
    for position, (code, arg) in enumerate(program.events):
        if code == _OP and program.ops[arg].recomputes >= 0:
            for s in program.ops[arg].reads:
                found[s].append(position)
    return dict(found)


@derived
def last_writes(program: Program) -> dict[int, int]:
    """Return by storage the last op that writes to it in place."""
    return {s: i for i, op in enumerate(program.ops) for s in op.mutates}


def behind(program: Program, op: int) -> int:
    """Return the last event of an op: its own, or a later one in which its recipe, if it leaves one, takes arguments.

    After an op that writes in place, the old version is gone as well: both take the same memory.
    """
    events = program.events
    at = int(program.liveness.op_events[op])
    room = events[at - 1][1] if at > 0 and events[at - 1][0] == _ALLOC else -1  # for a random op's generator
    freed = {(_FREE, room), (_FREE, program.ops[op].replaces)}
    while at + 1 < len(events):
        code, arg = events[at + 1]
        of_recipe = code == _PACK and program.handle_tensors[arg] < 0 and program.handle_ops[arg] == op
        if not of_recipe and (code, arg) not in freed:
            break
        at += 1
    return at


class _Journey:
    """Follows the events of one storage, and writes those that take their place.

    ``frees_host``: whether the memory on the host is freed when the value is back.
    """

    frees_host = True

    def __init__(self, program: Program, draft: PatchBuilder, move: Any, spec: DeviceSpec) -> None:
        self.program = program
        self.draft = draft
        self.move = move
        n_bytes = program.storage_bytes[move.storage]
        # A tensor that is smaller than a block of the device takes no more than itself on the host.
        if n_bytes == spec.round_up(1):
            n_bytes = program.largest_tensors[move.storage][0] or n_bytes
        self.host_bytes = spec.host_bytes(n_bytes)
        write = last_writes(program).get(move.storage, -1)
        self.written = int(program.liveness.op_events[write]) if write >= 0 else -1
        self.held: dict[int, None] = {}  # handles on the storage, until it is let go of
        self.gone: dict[int, None] = {}  # those that have let go of it, until they are released
        self.instances: dict[int, int] = {}  # unpacked tensors, and those on the copy that take their place
        # Handles of formulas that save what they unpacked, and the handles on the copy that take their place.
        self.again: dict[int, int] = {}
        # Storages of the copies, and a handle on the one that is back.
        self.host = self.copy = self.handle = -1
        self.waited = self.needed = False
        self.out: list[tuple[int, int]] = []

    def write(self, concerned: Sequence[int]) -> None:
        program, move = self.program, self.move
        liveness = program.liveness
        sent = behind(program, move.sent)
        let_go = behind(program, move.let_go) if move.let_go >= 0 else -1
        positions = {*liveness.events_of[move.storage], *concerned, sent}
        positions.update(at for at in (let_go, move.fetch) if at >= 0)
        begin, end = 0, len(program.events)
        if move.call >= 0:
            begin, end = liveness.entered[move.call], liveness.exited[move.call]
            positions.add(end)
        for position in sorted(positions):
            # What another technique has put in this place, which may be nothing, or else the recorded event.
            was = before = self._events_at(position)
            self.out = []
            if position == move.fetch and self.gone:
                before = self._fetch_first(position, before)
            for code, arg in before:
                self._step(position, code, arg, inside=begin < position < end)
            # Nobody has a handle on the storage when the call is over.
            if position == end and self.host >= 0 and not self.held and not self.gone:
                self._wait_out(position)
                self._end()
            # Sending and letting go come after the event of their place.
            if position == sent:
                self._send(position)
            if position == let_go:
                self._let_go(position)
            self._put(position, was)

    def _fetch_first(self, position: int, before: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Begin the copy back before the event of its place, after other copies back; return the events after it."""
        begun = self._begun(before, TO_DEVICE)
        self.out += before[:begun]
        self._fetch(position)
        return before[begun:]

    def _events_at(self, position: int) -> Sequence[tuple[int, int]]:
        events = self.draft.events
        return events[position] if position in events else (self.program.events[position],)

    def _put(self, position: int, was: Sequence[tuple[int, int]]) -> None:
        # Places where nothing changes stay out of the patch.
        if tuple(self.out) != tuple(was):
            self.draft.events[position] = tuple(self.out)

    def _begun(self, events: Sequence[tuple[int, int]], name: str) -> int:
        """Return how many events, before the first other one, begin copies with an op of this name."""
        ops = self.draft.ops
        others = (i for i, (code, arg) in enumerate(events) if code != _OP or ops[arg].name != name)
        return next(others, len(events))

    def _step(self, position: int, code: int, arg: int, *, inside: bool) -> None:
        handles, storage = self.draft.handle_storages, self.move.storage
        if code == _PACK and handles[arg] == storage and self.instances:
            # For a second derivative, a backward formula saves what it has unpacked.
            self.again[arg] = arg = self.draft.new_handle(self.copy, self.draft.handle_ops[arg])
        elif code == _PACK and handles[arg] == storage and inside and not self._is_code_s(arg):
            if position > self.written:
                self.held[arg] = None
        elif code == _FREE and arg == storage and self.host >= 0 and not self.held and not self.gone:
            # The copy out still reads the memory.
            self._wait_out(position)
        elif code == _RELEASE and arg in self.again:
            arg = self.again.pop(arg)
        elif code == _UNPACK and self.draft.instance_handles[arg] in self.again:
            handle = self.again[self.draft.instance_handles[arg]]
            self.instances[arg] = self.draft.instance_handles.add(handle)
            arg = self.instances[arg]
        elif code == _RELEASE and arg in self.gone:
            # Released already, when it let go. The copy lives as long as any handle, also on the storage, taken since.
            del self.gone[arg]
            if not self.gone and not self.held:
                self._end()
            return
        elif code == _RELEASE:
            # If the last handle is released before the storage is let go of, nobody will ask for the copy. But the copy
            # out may still run, so computation waits for it.
            was_held = arg in self.held
            self.held.pop(arg, None)
            if was_held and self.host >= 0 and not self.held and not self.gone:
                self._wait_out(position)
                self.out.append((code, arg))
                self._end()
                return
        elif code == _UNPACK and self.draft.instance_handles[arg] in self.gone:
            # Autograd asks for a handle that has let go: it gets an instance of the one on the copy.
            self._need(position)
            self.instances[arg] = self.draft.instance_handles.add(self.handle)
            arg = self.instances[arg]
        elif code == _DROP and arg in self.instances:
            # The instance on the copy, which took its place, is dropped instead.
            arg = self.instances.pop(arg)
        elif (
            code == _OP and self.gone and storage in (op := self.draft.ops[arg]).reads and op.recomputes >= 0
        ):
            # An op that runs again reads the copy.
            self._need(position)
            reads = tuple(self.copy if s == storage else s for s in op.reads)
            self.draft.ops[arg] = replace(op, reads=reads)
        self.out.append((code, arg))

    def _is_code_s(self, handle: int) -> bool:
        """Whether code holds this handle rather than autograd or a recipe: such a handle never lets go."""
        return self.draft.handle_ops[handle] < 0 and self.draft.handle_tensors[handle] < 0

    def _send(self, position: int) -> None:
        self.host = self.draft.new_storage(self.host_bytes, StorageKind.HOST)
        self._run(position, TO_HOST, (self.move.storage,), (self.host,))

    def _let_go(self, position: int) -> None:
        if self.host < 0 or not self.held:
            return  # it was not sent, or nobody holds it any more
        # At one op memory is let go of first, and copies out begin after that.
        begun = self._begun(self.out[::-1], TO_HOST)
        waiting = self.out[len(self.out) - begun :]
        del self.out[len(self.out) - begun :]
        self._wait_out(position)
        self.out += [(_RELEASE, handle) for handle in self.held]
        self.out += waiting
        self.gone, self.held = self.held, {}

    def _wait_out(self, position: int) -> None:
        """Have computation wait for the copy out, unless it did."""
        if not self.waited:
            self.waited = True
            self._run(position, WAIT_OUT, (self.host,), ())

    def _fetch(self, position: int) -> None:
        if self.copy >= 0:
            return  # the copy back has begun
        program, storage = self.program, self.move.storage
        self.copy = self.draft.new_storage(program.storage_bytes[storage], program.storage_kinds[storage])
        self.handle = self.draft.new_handle(self.copy)
        self._run(position, TO_DEVICE, (self.host,), (self.copy,))

    def _need(self, position: int) -> None:
        if self.needed:
            return
        self.needed = True
        self._fetch(position)
        self._run(position, WAIT_BACK, (self.copy,), ())
        if self.frees_host:
            self.out.append((_FREE, self.host))

    def _end(self) -> None:
        """Free the copies, when nobody can ask for the value any more."""
        if self.copy >= 0:
            self.out.append((_FREE, self.copy))
        if self.frees_host:
            # Whoever needed the value has freed the memory on the host.
            if not self.needed:
                self.out.append((_FREE, self.host))
            self.host = -1

    def _run(self, position: int, name: str, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        events = self.program.events
        # In the phase and the module call of the op that ran last.
        ran = (self.program.ops[events[at][1]] for at in range(position, -1, -1) if events[at][0] == _OP)
        phase, scope = next(((op.phase, op.scope) for op in ran), (Phase.FORWARD, -1))
        # Without time: how long a wait takes depends on all copies, and is worked out when all are placed.
        op = Op(name, phase, scope, 0.0, 0, 0, reads, writes, (), False)
        self.out.append((_OP, self.draft.ops.add(op)))


class _Visits(_Journey):
    """Follows a parameter: its storage is on the host, and each visit on the device is a storage of its own.

    In the executor, what autograd and recipes hold lets go of the first visit when the module's call ends, and shares
    the second visit, which lives from where it is needed, or fetched, until the last of their handles is released.
    """

    move: Visit
    frees_host = False

    def write(self, concerned: Sequence[int]) -> None:
        program, move, draft = self.program, self.move, self.draft
        liveness = program.liveness
        n_bytes, kind = program.storage_bytes[move.storage], program.storage_kinds[move.storage]
        draft.storage_kinds[move.storage] = StorageKind.HOST
        draft.storage_bytes[move.storage] = self.host_bytes
        self.host = move.storage
        first = draft.new_storage(n_bytes, kind)
        begin, enter = liveness.entered[move.begin], liveness.entered[move.around]
        leave = liveness.exited[move.call]
        positions = {begin, enter, leave, *liveness.events_of[move.storage], *concerned}
        positions.update((move.fetch,) if move.fetch >= 0 else ())
        for position in sorted(positions):
            was = before = self._events_at(position)
            self.out = []
            if position == move.fetch and self.gone:
                before = self._fetch_first(position, before)
            elif position == leave:
                self.out.append((_FREE, first))
            for code, arg in before:
                self._step(position, code, arg, inside=False)
            # All copies that begin with a call begin before the call waits for its own.
            if position == begin:
                at = self.out.index((_ENTER, move.begin)) + 1
                at += self._begun(self.out[at:], TO_DEVICE)
                events, self.out = self.out, self.out[:at]
                self._run(position, TO_DEVICE, (self.host,), (first,))
                self.out += events[at:]
            if position == enter:
                self._run(position, WAIT_BACK, (first,), ())
            self._put(position, was)

    def _step(self, position: int, code: int, arg: int, *, inside: bool) -> None:
        if code == _PACK and self.draft.handle_storages[arg] == self.move.storage:
            self.gone[arg] = None  # at once: until the call ends, the first visit is there anyway
        else:
            super()._step(position, code, arg, inside=inside)
