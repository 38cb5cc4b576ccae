"""A chunk of all that follows a module, in a step of training: what it makes of the recorded step.

From the module's input on, everything is computed in slices: the head's logits, the loss and their gradients, in one
loop that runs when autograd asks for the gradient of that input. Which ops that is follows from the recording: forward
ops that read what comes from the input, and the backward ops that belong to them. The executor's engine defers them on
fake tensors here as it defers them in the step, and runs its loop; what the recorder sees of it takes their place in
the program.

What is in the way is a reason, not an error: an op that the engine would have to run as a whole, or a parameter from
elsewhere, whose gradient would not come through the module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from sacplan._chunk.calls import arguments, overload
from sacplan._chunk.executor import losses  # noqa: F401  (registers how losses are put together)
from sacplan._chunk.executor.lazy import Lazy, defer, root
from sacplan._chunk.executor.loop import compute
from sacplan._chunk.executor.values import Region, Value
from sacplan._chunk.rehearsal import Additions, Rehearsal, Seen
from sacplan._device.devices import DeviceSpec
from sacplan._factors.axes import Axis
from sacplan._program.decisions import Chunk
from sacplan._program.program import Event, Op, Patch, Phase, Program, StorageKind
from sacplan._record.in_place import OUT_OF_PLACE
from sacplan._torch.ops import tensors_in
from sacplan.errors import ChunkError

_ALLOC, _OP, _PACK, _RELEASE = map(int, (Event.ALLOC, Event.OP, Event.PACK, Event.RELEASE))
_UNPACK, _DROP = int(Event.UNPACK), int(Event.DROP)
_OF_MODEL = (StorageKind.PARAMETER, StorageKind.BUFFER)


class CannotChunk(Exception):
    """Why something is not computed in slices. ``op``: the op that is in the way, or -1."""

    def __init__(self, why: str, op: int = -1) -> None:
        super().__init__(why)
        self.op = op


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a chunk of all that follows may begin.

    Attributes:
        unit: fqn of a module that is called once.
        scope: its call.
        tensor: of the program, what enters.
    """

    unit: str
    scope: int
    tensor: int

    @staticmethod
    def of(program: Program, unit: str) -> Entry:
        """The entry at a module.

        Raises:
            CannotChunk: it is called several times, or reads no activation.
        """
        calls = program.calls.get(unit, ())
        if len(calls) != 1:
            raise CannotChunk(f"module {unit!r} is called {len(calls)} times in a step, and it must be once")
        for i in program.ops_in(calls[0]):
            for t in program.ops[i].inputs:
                tensor = program.tensors[t]
                of_model = program.storage_kinds[tensor.storage] in _OF_MODEL
                if not of_model and "float" in tensor.dtype and tensor.shape:
                    return Entry(unit, calls[0], t)
        raise CannotChunk(f"module {unit!r} reads no floating-point activation")


class _Sampled(Region):
    """A region of which the first, the second and the last slice stand for all; the others are as the second."""

    def __init__(self, size: int, slices: int, accumulate: torch.dtype | None, rehearsal: Rehearsal) -> None:
        super().__init__(size, slices, accumulate, _refuse)
        self._rehearsal = rehearsal
        self.marks: list[tuple[int, int]] = []  # ops seen before a slice, and how many slices it stands for

    def slices(self) -> Iterator[tuple[int, int]]:
        """See above."""
        every = list(super().slices())
        sampled = [(every[0], 1)]
        if len(every) > 2:
            sampled.append((every[1], len(every) - 2))
        if len(every) > 1:
            sampled.append((every[-1], 1))
        for bounds, times in sampled:
            self.marks.append((self._rehearsal.n_ops, times))
            yield bounds
        self.marks.append((self._rehearsal.n_ops, 1))


def _refuse(op: str, why: str) -> None:
    raise CannotChunk(f"{op} cannot run in slices: {why}")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What a chunk makes of a program.

    Attributes:
        patch: the rewrite.
        deferred: ops of the program that no longer run where they ran.
        added_ms: how much longer the step takes.
    """

    patch: Patch
    deferred: frozenset[int]
    added_ms: float


def chunk_rest(program: Program, chunk: Chunk, device: DeviceSpec) -> Rewrite:
    """The rewrite that a decision about all that follows a module is.

    Raises:
        CannotChunk: why not.
    """
    return _Rest(program, Entry.of(program, chunk.unit), chunk, device).rewrite()


class _Rest:
    def __init__(self, program: Program, entry: Entry, chunk: Chunk, device: DeviceSpec) -> None:
        self.program = program
        self.entry = entry
        self.chunk = chunk
        self.rehearsal = Rehearsal(program, device)
        like = program.tensors[entry.tensor]
        if chunk.dim >= len(like.shape) or like.shape[chunk.dim] % (chunk.outer * chunk.inner):
            raise CannotChunk(
                f"what enters {entry.unit!r} has shape {like.shape}, which has no such axis ({chunk})"
            )
        size = like.shape[chunk.dim] // (chunk.outer * chunk.inner)
        self.axis = Axis(chunk.dim, chunk.outer, size, chunk.inner)
        accumulate = torch.float32 if chunk.accumulate == "float32" else None
        self.region = _Sampled(size, chunk.slices, accumulate, self.rehearsal)
        self.lazy: dict[int, Lazy] = {}  # tensors of the program that are not computed where they were
        self.real: dict[int, torch.Tensor] = {}
        self.storages: set[int] = set()  # of the former
        self.deferred: list[int] = []
        self.ran: dict[int, Seen] = {}  # what runs where an op was deferred
        self.held: dict[int, int] = {}  # storages that deferred ops read to the op that reads them first
        self.exits: dict[int, None] = {}  # tensors that somebody reads who is not deferred
        self.boundary: list[int] = []  # who does
        self.reduced: dict[int, set[tuple[int, ...]]] = {}  # ops that reduce what is sliced, to shapes
        self.readers = Counter(s for op in program.ops for s in op.reads)
        self.differentiated = frozenset(op.forward_of for op in program.ops) - {-1}
        self.additions = Additions(program)

    def rewrite(self) -> Rewrite:
        with self.rehearsal.running():
            begins = self.rehearsal.given(self.entry.tensor)
            self.lazy[self.entry.tensor] = root(self.region, begins, self.axis)
            self._defer_all()
            targets, loop = self._run_loop()
        return self._rewritten(targets, loop)

    # --- which ops are deferred ------------------------------------------------------------------

    def _defer_all(self) -> None:
        program, first = self.program, self.program.scopes[self.entry.scope].first_op
        for i in range(first, len(program.ops)):
            op = program.ops[i]
            if op.phase is Phase.OPTIMIZER:
                break
            if op.phase is Phase.BACKWARD and op.forward_of in self.reduced:
                self._gradients_are_lazy(op)
            lazy = [t for t in op.inputs if t in self.lazy]
            if not lazy:
                if op.phase is not Phase.BACKWARD and self.storages.intersection(op.reads):
                    raise CannotChunk(f"{op.name} reads what is sliced in another layout", i)
                continue
            if op.phase is Phase.FORWARD:
                self._check_reads(i, op)
            if op.phase is Phase.BACKWARD and op.forward_of < first:
                self.exits.update(dict.fromkeys(t for t in lazy if t != self.entry.tensor))
                self.boundary.append(i)
            else:
                self._defer(i, op)
        if not self.exits:
            raise CannotChunk(
                f"nothing that is computed from the input of {self.entry.unit!r} is differentiated"
            )

    def _gradients_are_lazy(self, op: Op) -> None:
        """As the executor lets them be, so that what autograd expands them to is sliced."""
        for t in op.inputs:
            tensor = self.program.tensors[t]
            if t not in self.lazy and tensor.shape in self.reduced[op.forward_of] and "float" in tensor.dtype:
                made = self._tensor(t)
                self.lazy[t] = Lazy(Value(self.region, made, data=made))

    def _check_reads(self, index: int, op: Op) -> None:
        """Whatever else is differentiated would get its gradient from elsewhere than the entry."""
        program = self.program
        for t in op.inputs:
            s = program.tensors[t].storage
            if t in self.lazy or s in self.storages or "float" not in program.tensors[t].dtype:
                continue
            writer = program.writer.get(s, -1)
            if writer in self.differentiated and not self._of_parameters(writer):
                raise CannotChunk(
                    f"{op.name} also reads an activation that did not enter {self.entry.unit!r}", index
                )
            scopes = (op.scope, *program.ancestors(op.scope))
            if program.storage_kinds[s] is StorageKind.PARAMETER and self.entry.scope not in scopes:
                raise CannotChunk(f"{op.name} reads a parameter outside of {self.entry.unit!r}", index)

    def _of_parameters(self, index: int) -> bool:
        """Whether an op in the module reads its parameters only, as what casts them under autocast does."""
        op = self.program.ops[index]
        scopes = (op.scope, *self.program.ancestors(op.scope))
        return self.entry.scope in scopes and all(self.program.storage_kinds[s] in _OF_MODEL for s in op.reads)

    def _defer(self, index: int, op: Op) -> None:
        func = overload(OUT_OF_PLACE.get(op.name, op.name))
        if func is None:
            raise CannotChunk(f"this process has no op {op.name}", index)
        try:
            args, kwargs = arguments(op, self._tensor)
        except ValueError as error:
            raise CannotChunk(str(error), index) from error
        try:
            out, seen = self.rehearsal.seen(lambda: defer(func, args, kwargs))
        except ChunkError as error:
            raise CannotChunk(str(error), index) from error
        outputs = list(tensors_in(out))
        if len(outputs) != len(op.outputs):
            raise CannotChunk(f"{op.name} gave {len(outputs)} results instead of {len(op.outputs)}", index)
        for t, made in zip(op.outputs, outputs, strict=True):
            storage = self.program.tensors[t].storage
            if isinstance(made, Lazy):
                self.lazy[t] = made
                if made.value.combined is not None:
                    self.reduced.setdefault(index, set()).add(tuple(made.shape))
                if storage != self.program.tensors[self.entry.tensor].storage:
                    self.storages.add(storage)
            else:
                self.real[t] = made
                self.rehearsal.is_made(made, storage)
        for t in op.inputs:
            if t not in self.lazy:
                self.held.setdefault(self.program.tensors[t].storage, index)
        self.deferred.append(index)
        self.ran[index] = seen

    def _tensor(self, index: int) -> torch.Tensor:
        if index in self.lazy:
            return self.lazy[index]
        if index not in self.real:
            if self.program.tensors[index].storage in self.storages:
                raise CannotChunk("what is sliced is read in a layout that no op made")
            self.real[index] = self.rehearsal.given(index)
        return self.real[index]

    # --- the loop ---------------------------------------------------------------------------------

    def _run_loop(self) -> tuple[dict[int, torch.Tensor], Seen]:
        """The exits, computed, and what ran for it."""
        died, tensors = self.program.liveness.died, self.program.tensors
        end = int(self.program.liveness.op_events[self.deferred[-1]])
        numbers = {
            t: lazy.value
            for t, lazy in self.lazy.items()
            if not tensors[t].shape and t not in self.exits and died[tensors[t].storage] > end
        }
        gradients = [self.lazy[t].value for t in self.exits]
        self.lazy.clear()  # what the step has let go of by then is not computed along

        def run() -> dict[int, torch.Tensor]:
            """As an entry node does: numbers that are still referred to are computed along, and kept."""
            pending = [value for value in self.region.pending if value not in gradients]
            made = compute([*gradients, *pending])
            for value, data in zip(pending, made[len(gradients) :], strict=True):
                value.settle(data)
            gradients.clear()
            found = dict(zip(self.exits, made, strict=False))
            found.update((t, value.data) for t, value in numbers.items() if value.data is not None)
            return found

        return self.rehearsal.seen(run)

    # --- the patch --------------------------------------------------------------------------------

    def _rewritten(self, exits: dict[int, torch.Tensor], loop: Seen) -> Rewrite:
        program, liveness, additions = self.program, self.program.liveness, self.additions
        for t, made in exits.items():
            self.rehearsal.is_made(made, program.tensors[t].storage)
        events: dict[int, list[tuple[int, int]]] = {}
        for i in self.deferred:
            op = program.ops[i]
            at = int(liveness.op_events[i])
            events[at] = self.rehearsal.into(additions, self.ran[i], op.phase, op.scope)
        end = int(liveness.op_events[self.deferred[-1]])
        kept = {program.tensors[t].storage for t in exits}
        self._drop_events(events, kept, end)
        handles = self._hold(events, end)
        n_before = len(additions.ops)
        entry_instance = len(program.instance_handles)
        body = self.rehearsal.into(additions, loop, Phase.BACKWARD, self.entry.scope)
        self._multiply(n_before, loop)
        after = [(_DROP, entry_instance), *((_RELEASE, handle) for handle in handles)]
        for i in self.boundary:
            at = int(liveness.op_events[i])
            if at < end:
                events[at] = []
                after.append((_OP, i))
        events[end] += [(_UNPACK, entry_instance), *body, *after]
        gone = frozenset(self.deferred)
        ops = tuple(additions.ops)
        return Rewrite(
            Patch(
                events={at: tuple(each) for at, each in events.items()},
                ops=ops,
                storage_bytes=tuple(additions.storage_bytes),
                storage_kinds=tuple(additions.kinds),
                handle_storages=tuple(handles.values()),
                handle_ops=(program.scopes[self.entry.scope].first_op,) + (-1,) * (len(handles) - 1),
                instance_handles=(len(program.handle_storages),),
            ),
            gone,
            sum(op.time_ms for op in ops) - sum(program.ops[i].time_ms for i in gone),
        )

    def _drop_events(self, events: dict[int, list[tuple[int, int]]], kept: set[int], end: int) -> None:
        """Nobody holds what is not computed; what leaves the loop is held from there on."""
        program, liveness = self.program, self.program.liveness
        first = program.scopes[self.entry.scope].first_op
        lazy_handles = {
            h
            for h, (t, op) in enumerate(zip(program.handle_tensors, program.handle_ops, strict=True))
            if program.handle_storages[h] in self.storages or (t in self.lazy and op >= first)
        }
        begins = program.tensors[self.entry.tensor].storage
        on_cpu = self.rehearsal.device.kind == "cpu"  # elsewhere they do not count
        numbers = {s for i in self.deferred if on_cpu and (s := self._number_after(i)) is not None}
        for s in numbers:
            for at in liveness.events_of[s]:
                events.setdefault(at, [])
        for s in (*self.storages, begins):
            for at in liveness.events_of[s]:
                code, arg = program.events[at]
                handle = arg if code in (_PACK, _RELEASE) else -1
                if code in (_UNPACK, _DROP):
                    handle = program.instance_handles[arg]
                if handle >= 0:
                    if handle in lazy_handles:
                        events.setdefault(at, [])
                elif code != _OP and s in self.storages and not (s in kept and at > end):
                    events.setdefault(at, [])

    def _number_after(self, op: int) -> int | None:
        """The tensor that a Python number became and that autograd keeps for an op, which no lazy tensor has."""
        program = self.program
        at = int(program.liveness.op_events[op]) + 1
        code, arg = program.events[at] if at < len(program.events) else (-1, -1)
        if code != _ALLOC or program.storage_kinds[arg] is not StorageKind.OTHER or arg in program.writer:
            return None
        return arg if not self.readers[arg] else None

    def _hold(self, events: dict[int, list[tuple[int, int]]], end: int) -> dict[int, int]:
        """By new handle, what is held until the loop is over: what enters, and what deferred ops read besides."""
        program, liveness = self.program, self.program.liveness
        begins = program.tensors[self.entry.tensor].storage
        handles = {len(program.handle_storages): begins}
        at = liveness.entered[self.entry.scope]
        events[at] = [program.events[at], (_PACK, len(program.handle_storages))]
        initial = set(program.initial)
        for s, op in self.held.items():
            if s not in initial and s != begins:
                handle = len(program.handle_storages) + len(handles)
                handles[handle] = s
                events[int(liveness.op_events[op])].append((_PACK, handle))
        return handles

    def _multiply(self, n_before: int, loop: Seen) -> None:
        """Slices that were left out take the time of the one that stands for them."""
        ops, marks = self.additions.ops, self.region.marks
        base = marks[0][0] if marks else 0
        # Ops were counted by the recorder; those of the loop are the last len(loop.ops) of them.
        offset = self.rehearsal.n_ops - len(loop.ops)
        for (begin, times), (stop, _) in pairwise(marks):
            if times == 1 or begin < base:
                continue
            for at in range(begin - offset, stop - offset):
                op = ops[n_before + at]
                ops[n_before + at] = _times(op, times)


def _times(op: Op, times: int) -> Op:
    import msgspec

    return msgspec.structs.replace(op, time_ms=op.time_ms * times, flops=op.flops * times)
