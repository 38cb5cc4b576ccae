"""Fold the events of a program: how many bytes are alive when, and from when to when each thing lives.

There is one rule, which only :class:`Fold` implements: a storage is alive while its count of holders is above zero.
Each event changes at most one count by one, except that an op holds all storages that it writes:

    OP, ALLOC   +1, until  FREE      code holds the storage
    PACK        +1, until  RELEASE   autograd keeps a handle on it
    UNPACK      +1, until  DROP      a backward formula has the tensor of a handle

``RESIZE`` gives a storage another size, whoever holds it. Its contents are copied, so for a moment both are alive.

The invariant is ``live == sum(size(s) for s if holders[s] > 0)``. Since sizes are those of the device's allocator, the
peak of a program is that of the step, byte for byte. Storages on the host follow the same rule, and are added up apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sacplan.core.elements import ROOT_SCOPE, Event, Patch, Phase, StorageKind, pattern_of
from sacplan.core.recording import Recording

Bytes = npt.NDArray[np.int64]

_ALLOC, _FREE, _OP, _PACK, _RELEASE, _UNPACK, _DROP, _ENTER, _EXIT, _RESIZE = map(int, Event)
_NO_PATCH = Patch()


class Fold:
    """The bytes that are alive, after each event of a program in turn.

    Args:
        program: the program that the indices of the events refer to.
        patch: a patch of the program; indices beyond the program's refer to what it adds.
        initial: storages alive when the events begin; by default those of the step.

    Attributes:
        live: bytes alive now.
        noted: bytes alive while the op ran that ran last: its outputs and its workspace included.
        host: bytes alive now in the memory of the host; ``live`` is without them.
        holders: by storage, how many hold it.
    """

    def __init__(
        self, program: Recording, patch: Patch = _NO_PATCH, initial: Collection[int] | None = None
    ) -> None:
        self._program = program
        self._patch = patch
        self._n_ops = len(program.ops)
        # By index, those of the program, and after these those of the patch.
        self._sizes: Any = list(program.first_bytes) if program.resizes else program.storage_bytes
        self._handles: Any = program.handle_storages
        self._instances: Any = program.instance_storages
        if patch is not _NO_PATCH:
            # Copies, although each option has its own fold: almost every event looks an index up.
            self._sizes = [*program.first_bytes, *patch.storage_bytes]
            for s, n_bytes in patch.resized.items():
                self._sizes[s] = n_bytes
            self._handles = [*program.handle_storages, *patch.handle_storages]
            # An added instance may be on a handle of the program or on an added one.
            added = map(self._handles.__getitem__, patch.instance_handles)
            self._instances = [*program.instance_storages, *added]
        self.holders: dict[int, int] = defaultdict(int)
        self.live = self.noted = self.host = 0
        self._between = 0  # the most that was alive while a storage was resized since the last op
        self._on_host = host_storages(program, patch)
        for s in program.initial if initial is None else initial:
            self.hold(s)

    def hold(self, storage: int) -> None:
        """Count one more holder."""
        self.holders[storage] = n = self.holders[storage] + 1
        # The first holder adds the bytes and the last one takes them off; those between them change nothing.
        if n == 1:
            if storage in self._on_host:
                self.host += self._sizes[storage]
            else:
                self.live += self._sizes[storage]

    def release(self, storage: int) -> None:
        """Count one holder less."""
        self.holders[storage] = n = self.holders[storage] - 1
        if not n:
            if storage in self._on_host:
                self.host -= self._sizes[storage]
            else:
                self.live -= self._sizes[storage]

    def size(self, storage: int) -> int:
        """Return the bytes of a storage as it is now, held or not."""
        return int(self._sizes[storage])

    def step(self, code: int, arg: int) -> None:
        """Go on by one event. Module calls hold nothing."""
        if code == _OP:
            program = self._program
            if arg < self._n_ops:
                op, inside = program.ops[arg], program.inside_bytes[arg]
            else:
                # ``inside_bytes`` has only the ops of the program; for an op of the patch the sum is made here.
                op = self._patch.ops[arg - self._n_ops]
                inside = op.workspace_bytes - (self._sizes[op.replaces] if op.replaces >= 0 else 0)
            # Outputs are allocated while all inputs are alive, and the workspace with them. It is gone after the op, so
            # it is in ``noted`` but not in ``live``. An in-place version takes over the bytes of the old one, which is
            # freed by the next event: until then both are in ``live``, and ``inside`` takes one of them off.
            for s in op.writes:
                self.hold(s)
            self.noted = self.live + inside
            if self._between:
                self.noted, self._between = max(self.noted, self._between), 0
        elif code == _FREE:
            self.release(arg)
        elif code == _PACK:
            self.hold(self._handles[arg])
        elif code == _RELEASE:
            self.release(self._handles[arg])
        elif code == _UNPACK:
            self.hold(self._instances[arg])
        elif code == _DROP:
            self.release(self._instances[arg])
        elif code == _ALLOC:
            self.hold(arg)
        elif code == _RESIZE:
            self._resize(*self._program.resizes[arg])

    def _resize(self, storage: int, before: int, after: int) -> None:
        # Through ``release`` and ``hold``, which subclasses extend; with a count of 1 both change the bytes.
        n, self.holders[storage] = self.holders[storage], 1
        if n:
            self.release(storage)
        self._sizes[storage] = after
        if n:
            self.hold(storage)
            if storage not in self._on_host:
                self._between = max(self._between, self.live + before)
        self.holders[storage] = n


def host_storages(program: Recording, patch: Patch = _NO_PATCH) -> frozenset[int]:
    """Return the storages of a program and a patch that are in the memory of the host."""
    known = len(program.storage_kinds)
    added = {known + i for i, kind in enumerate(patch.storage_kinds) if kind is StorageKind.HOST}
    added.update(s for s, kind in patch.changed_kinds.items() if kind is StorageKind.HOST)
    return program.on_host | added if added else program.on_host


@dataclass(frozen=True, slots=True)
class Footprint:
    """The peak of a program, and what runs a second time in it.

    Attributes:
        peak_bytes: the most that is alive at any op of the step.
        peak_op: the op at which it happens.
        peak_phase, peak_fqn: where that is ("" for outside of any module, or in the model itself).
        peak_scope: the module call, or -1.
        end_bytes: alive when the step is over.
        recompute_ms, recompute_flops: what ran a second time.
        again: the recorded ops of these, in their order.
        host_peak_bytes: the most that is alive in the memory of the host.
    """

    peak_bytes: int
    peak_op: int
    peak_phase: Phase
    peak_fqn: str
    peak_scope: int
    end_bytes: int
    recompute_ms: float
    recompute_flops: int
    again: tuple[int, ...]
    host_peak_bytes: int = 0


def _phase_at(program: Recording, index: int) -> Phase:
    """Return the phase of the op at the peak: backward for an optimizer that steps before that pass is over."""
    # No op runs at all in this step.
    if index < 0:
        return Phase.FORWARD
    phase = program.ops[index].phase
    if phase is Phase.OPTIMIZER:
        # From the end: an op of the backward pass that is met before the op at the peak runs after it.
        for code, arg in reversed(program.events):
            if code == _OP and arg == index:
                break
            if code == _OP and program.ops[arg].phase is Phase.BACKWARD:
                return Phase.BACKWARD
    return phase


def footprint_of(program: Recording) -> Footprint:
    """Fold the events of a program. Of several ops with the same peak, the first one counts."""
    # Bytes are compared before the step and at ops only: what ``ALLOC`` and ``UNPACK`` add is still alive at the op
    # that uses it.
    fold = Fold(program)
    step, ops = fold.step, program.ops
    # A peak before any op is attributed to the first op.
    peak, peak_op = fold.live, next((arg for code, arg in program.events if code == _OP), -1)
    again: list[int] = []
    host = fold.host
    for code, arg in program.events:
        step(code, arg)
        if code == _OP:
            if fold.host > host:
                host = fold.host
            if fold.noted > peak:
                peak, peak_op = fold.noted, arg
            if ops[arg].recomputes >= 0:
                again.append(arg)
    scope = ops[peak_op].scope if peak_op >= 0 else ROOT_SCOPE
    return Footprint(
        peak_bytes=peak,
        peak_op=peak_op,
        peak_phase=_phase_at(program, peak_op),
        peak_fqn=program.scopes[scope].fqn if scope != ROOT_SCOPE else "",
        peak_scope=scope,
        end_bytes=fold.live,
        recompute_ms=sum(ops[i].time_ms for i in again),
        recompute_flops=sum(ops[i].flops for i in again),
        again=tuple(ops[i].recomputes for i in again),
        host_peak_bytes=host,
    )


def summits(program: Recording, share: float) -> Iterator[Footprint]:
    """Yield a footprint for each kind of module, with the highest moment of the kind as its peak, highest first.

    The first one is the footprint of the program. Layers that are alike are of one kind.

    Args:
        program: the program.
        share: of the peak; lower moments are left out.
    """
    peak, at_op = footprint_of(program), bytes_at_ops(program)
    yield peak
    seen = {pattern_of(peak.peak_fqn)}
    # From the highest op down. So the first op of a kind is its highest moment, and the first op below the share ends
    # the search.
    for op in map(int, np.argsort(-at_op, kind="stable")):
        if at_op[op] < share * peak.peak_bytes:
            break
        scope = program.ops[op].scope
        fqn = program.scopes[scope].fqn if scope != ROOT_SCOPE else ""
        if pattern_of(fqn) not in seen:
            seen.add(pattern_of(fqn))
            yield replace(
                peak,
                peak_bytes=int(at_op[op]),
                peak_op=op,
                peak_phase=_phase_at(program, op),
                peak_fqn=fqn,
                peak_scope=scope,
            )


def bytes_at_ops(program: Recording) -> Bytes:
    """Return, by op, the bytes alive while it runs: ``Liveness.at_op``, without the cost of the rest."""
    fold, found = Fold(program), np.zeros(len(program.ops), dtype=np.int64)
    step = fold.step
    for code, arg in program.events:
        step(code, arg)
        if code == _OP:
            found[arg] = fold.noted
    return found


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes that are alive while one op runs.

    Attributes:
        op: the op; -1 for the state before the step.
        live_bytes: everything alive, its outputs and workspace included.
        by_kind: the same, by ``StorageKind``; the workspace counts as temporary.
        host_bytes: what is alive in the memory of the host, which the other two leave out.
    """

    op: int
    live_bytes: int
    by_kind: tuple[int, ...]
    host_bytes: int = 0


class _FoldByKind(Fold):
    """A fold that also counts bytes by kind of storage."""

    def __init__(self, program: Recording) -> None:
        # Before the base class, whose ``__init__`` calls ``hold`` for what is alive at first.
        self.by_kind = [0] * len(StorageKind)
        super().__init__(program)

    def hold(self, storage: int) -> None:
        # The change of ``live`` is what counts: it is 0 for a further holder, and for a storage on the host.
        before = self.live
        super().hold(storage)
        self.by_kind[self._program.storage_kinds[storage]] += self.live - before

    def release(self, storage: int) -> None:
        before = self.live
        super().release(storage)
        self.by_kind[self._program.storage_kinds[storage]] += self.live - before

    def while_running(self, op: int) -> tuple[int, ...]:
        """Return bytes by kind while ``op`` ran, which must be the last event."""
        kinds = list(self.by_kind)
        kinds[StorageKind.TEMPORARY] += self._program.inside_bytes[op]
        return tuple(kinds)


class Liveness:
    """From when to when each storage, handle, instance and module call of a program lives.

    A position is an index into ``program.events``. Where something begins before the step its position is -1; where it
    does not end, ``len(program.events)``.

    Attributes:
        op_events: by op, the position at which it runs (-1: it does not).
        before_event: by position, bytes alive before the event.
        at_op: by op, bytes alive while it runs; 0 if it does not run.
        initial_bytes: alive before the first event.
        events_of: by storage, the positions of its events.
        died: by storage, the position after which nobody holds it.
        made, freed: by storage, from when to when something other than autograd holds it.
        packed, released: by handle.
        unpacked, dropped: by instance.
        entered, exited: by scope.
        handle_scopes: by handle, the innermost module call in which autograd took it.
    """

    def __init__(self, program: Recording) -> None:
        self.program = program
        n_events, n_storages, n_handles = (
            len(program.events),
            len(program.storage_bytes),
            len(program.handle_storages),
        )
        n_instances, n_scopes = len(program.instance_handles), len(program.scopes)
        self.op_events = np.full(len(program.ops), -1, dtype=np.int64)
        self.at_op = np.zeros(len(program.ops), dtype=np.int64)
        self.before_event = np.zeros(n_events, dtype=np.int64)
        self.events_of: list[list[int]] = [[] for _ in range(n_storages)]
        self.died = [n_events] * n_storages
        self.made, self.freed = [n_events] * n_storages, [n_events] * n_storages
        self.packed, self.released = [n_events] * n_handles, [n_events] * n_handles
        self.unpacked, self.dropped = [n_events] * n_instances, [n_events] * n_instances
        self.entered, self.exited = [-1] * n_scopes, [n_events] * n_scopes
        self.handle_scopes = [ROOT_SCOPE] * n_handles
        self._fill()

    def _fill(self) -> None:
        program = self.program
        fold = Fold(program)
        step, holders = fold.step, fold.holders
        self.initial_bytes = fold.live
        # Lists while events are gone through, since setting single elements of arrays is slower.
        before, at_op, op_events = [0] * len(program.events), [0] * len(program.ops), [-1] * len(program.ops)
        for s in program.initial:
            self.made[s] = -1
        stack = [ROOT_SCOPE]
        places = {_ALLOC: self.made, _FREE: self.freed, _PACK: self.packed, _RELEASE: self.released}
        places |= {_UNPACK: self.unpacked, _DROP: self.dropped}
        for position, (code, arg) in enumerate(program.events):
            before[position] = fold.live
            step(code, arg)
            # An op may write several storages, and a module call holds none. All other events are of one storage, which
            # the end of the loop handles.
            if code == _OP:
                op_events[arg] = position
                at_op[arg] = fold.noted
                for s in program.ops[arg].writes:
                    self.events_of[s].append(position)
                    self.made[s] = position
                continue
            if code == _ENTER:
                self.entered[arg] = position
                stack.append(arg)
                continue
            if code == _EXIT:
                self.exited[arg] = position
                stack.pop()
                continue
            if code in places:
                places[code][arg] = position
            if code == _PACK:
                self.handle_scopes[arg] = stack[-1]
            s = program.storage_of(code, arg)
            self.events_of[s].append(position)
            if not holders[s]:
                self.died[s] = position
        self.before_event[:] = before
        self.at_op[:] = at_op
        self.op_events[:] = op_events

    # --- at one op ----------------------------------------------------------------------------------

    def alive(self, op: int) -> dict[int, int]:
        """Return the storages alive while an op runs, its outputs included, with their bytes then."""
        # Holders and sizes are kept for no op, so the events up to this one are folded again.
        fold = Fold(self.program)
        for code, arg in self.program.events[: int(self.op_events[op]) + 1]:
            fold.step(code, arg)
        return {s: fold.size(s) for s, n in fold.holders.items() if n}

    def held_otherwise(self, op: int) -> set[int]:
        """Return storages that something other than a handle of autograd keeps alive while an op runs."""
        # Code holds a storage from ``made`` to ``freed``, and a backward formula from ``unpacked`` to ``dropped``.
        at = int(self.op_events[op])
        held = {
            s for s, (made, freed) in enumerate(zip(self.made, self.freed, strict=True)) if made <= at < freed
        }
        handles, storages = self.program.instance_handles, self.program.handle_storages
        instances = zip(handles, self.unpacked, self.dropped, strict=True)
        return held.union(storages[handle] for handle, start, end in instances if start <= at < end)

    def bytes_held(self, storages: Iterable[int], *, but_for_autograd: bool = False) -> Bytes:
        """Return by position the bytes of some storages that are alive once the event has happened.

        Args:
            storages: the storages to count.
            but_for_autograd: count a storage only while something other than autograd holds it.
        """
        # Each storage adds its bytes where it begins and takes them off where it ends; the running sum is the answer.
        # Indices are shifted by one, since positions begin at -1 (before the step). ``max`` keeps an end from coming
        # before its beginning: a storage that nobody ever holds adds nothing.
        change = np.zeros(len(self.program.events) + 2, dtype=np.int64)
        ends = self.freed if but_for_autograd else self.died
        for s in storages:
            change[self.made[s] + 1] += self.program.storage_bytes[s]
            change[max(self.made[s], ends[s]) + 1] -= self.program.storage_bytes[s]
        return np.cumsum(change)[1:-1]

    def held_for_later(self, op: int) -> list[int]:
        """Return storages that are alive while an op runs only because autograd holds them for later."""
        at = int(self.op_events[op])
        return sorted(self.packed_at(at) - self.held_otherwise(op))

    def packed_at(self, position: int) -> set[int]:
        """Return storages that autograd keeps for the backward pass once an event has happened."""
        handles = zip(self.program.handle_storages, self.packed, self.released, strict=True)
        return {s for s, start, end in handles if start <= position < end}

    # --- over the whole step ------------------------------------------------------------------------

    @cached_property
    def floor_bytes(self) -> int:
        """The peak without bytes that only handles of autograd hold: no plan that only recomputes has a lower peak."""
        # The same fold without ``PACK`` and ``RELEASE``: autograd then holds a storage only while a formula uses it. A
        # plan might not reach this bound, since what it recomputes takes memory while it runs.
        fold, most = Fold(self.program), 0
        for code, arg in self.program.events:
            if code not in (_PACK, _RELEASE):
                fold.step(code, arg)
                if code == _OP:
                    most = max(most, fold.noted)
        return most

    @cached_property
    def end_of_forward(self) -> int:
        """The position of the first op after the forward pass, or the number of events."""
        ops = self.program.ops
        # Ops that a rewrite has left out have position -1, which would be before all others.
        later = (
            p
            for op, p in zip(ops, self.op_events.tolist(), strict=True)
            if op.phase != Phase.FORWARD and p >= 0
        )
        return min(later, default=len(self.program.events))

    @cached_property
    def outlives_forward(self) -> frozenset[int]:
        """Storages that something other than autograd still holds when the backward pass begins."""
        end = self.end_of_forward
        return frozenset(
            s
            for s, (made, freed) in enumerate(zip(self.made, self.freed, strict=True))
            if made < end <= freed
        )

    @cached_property
    def unpacked_before_peak(self) -> frozenset[int]:
        """Storages that autograd has unpacked by the time of the backward pass's peak."""
        program = self.program
        backward = [i for i, op in enumerate(program.ops) if op.phase == Phase.BACKWARD]
        # A recording of the forward pass alone has no such peak.
        if not backward:
            return frozenset()
        at = int(self.op_events[max(backward, key=lambda i: self.at_op[i])])
        handles = zip(program.instance_handles, self.unpacked, strict=True)
        return frozenset(program.handle_storages[handle] for handle, start in handles if start <= at)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """One moment for each op in the order in which they run, after one for the state before the step."""
        fold = _FoldByKind(self.program)
        found = [Moment(-1, fold.live, tuple(fold.by_kind), fold.host)]
        for code, arg in self.program.events:
            fold.step(code, arg)
            if code == _OP:
                found.append(Moment(arg, fold.noted, fold.while_running(arg), fold.host))
        return tuple(found)

    @property
    def peak(self) -> Moment:
        """The moment at which most bytes are alive; the first of several."""
        return max(self.moments, key=lambda moment: moment.live_bytes)

    @cached_property
    def at_boundaries(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Bytes by ``StorageKind`` at each (``Event.ENTER`` or ``EXIT``, scope)."""
        fold, found = _FoldByKind(self.program), {}
        for code, arg in self.program.events:
            fold.step(code, arg)
            if code in (_ENTER, _EXIT):
                found[code, arg] = tuple(fold.by_kind)
        return found
