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
from itertools import groupby, pairwise

import torch

from sacplan._chunk.calls import arguments, overload
from sacplan._chunk.executor import losses  # noqa: F401  (registers how losses are put together)
from sacplan._chunk.executor.lazy import Lazy, defer, root
from sacplan._chunk.executor.loop import compute, needed_nodes
from sacplan._chunk.executor.values import Held, Region, Value
from sacplan._chunk.rehearsal import Additions, Rehearsal, Seen
from sacplan._device.devices import DeviceSpec
from sacplan._factors.axes import Axis
from sacplan._program.decisions import Chunk
from sacplan._program.program import Event, Op, Patch, Phase, Program, StorageKind
from sacplan._record.in_place import OUT_OF_PLACE
from sacplan._torch.ops import tensors_in
from sacplan.errors import ChunkError

_ALLOC, _FREE, _OP = map(int, (Event.ALLOC, Event.FREE, Event.OP))
_PACK, _RELEASE = int(Event.PACK), int(Event.RELEASE)
_UNPACK, _DROP = int(Event.UNPACK), int(Event.DROP)
_ADDITIONS = ("aten.add.Tensor", "aten.add_.Tensor")
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
    """A region of which some slices stand for all.

    Slices that read equally long parts of everything that is sliced run the same ops. Of several in a row the first two
    run, since results are made in the one and added to in the other; and the last slice of all.

    Attributes:
        windows: where tensors begin and end that have only a part of the axis, as shifted ones do.
        marks: ops seen before a slice, and how many slices it stands for.
    """

    def __init__(self, size: int, slices: int, accumulate: torch.dtype | None, rehearsal: Rehearsal) -> None:
        super().__init__(size, slices, accumulate, _refuse)
        self._rehearsal = rehearsal
        self.windows: set[tuple[int, int]] = {(0, size)}
        self.marks: list[tuple[int, int]] = []

    def slices(self) -> Iterator[tuple[int, int]]:
        """See above."""
        *every, last = super().slices()
        for _, same in groupby(every, self._lengths):
            first, *others = same
            yield from self._marked(first, 1)
            if others:
                yield from self._marked(others[0], len(others))
        yield from self._marked(last, 1)
        self.marks.append((self._rehearsal.n_ops, 1))

    def _marked(self, bounds: tuple[int, int], times: int) -> Iterator[tuple[int, int]]:
        self.marks.append((self._rehearsal.n_ops, times))
        yield bounds

    def _lengths(self, bounds: tuple[int, int]) -> tuple[int, ...]:
        start, stop = bounds
        return tuple(max(0, min(stop, end) - max(start, begin)) for begin, end in sorted(self.windows))


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
        self.real_views: set[int] = set()  # of the former, those that another op has made meanwhile
        self.own: set[int] = set()  # ops that the module runs on its own parameters alone
        self.own_storages: set[int] = set()
        self.gradients: set[int] = set()  # storages that ops of the backward pass make where they did
        self.deferred: list[int] = []
        self.ran: dict[int, Seen] = {}  # what runs where an op was deferred
        self.held: dict[int, int] = {}  # storages that deferred ops read to the op that reads them first
        self.expanded: set[int] = set()  # gradients that the step computes where it did
        self.computed: list[int] = []  # ops that needed numbers out of a loop of their own
        self.needed: set[int] = set()  # storages that the last loop reads
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
            lazy = [t for t in op.inputs if t in self.lazy and not self._is_real_here(t, op)]
            if not lazy:
                self._passed_by(i, op)
                continue
            if op.phase is Phase.FORWARD:
                self._check_reads(i, op, lazy)
            if op.phase is Phase.BACKWARD and self._is_behind(op):
                self.gradients.update(op.writes)
                lazy = [t for t in lazy if t != self.entry.tensor and not self._is_there(t)]
                if lazy:
                    self._check_exits(i, op, lazy)
                    self.exits.update(dict.fromkeys(lazy))
                    self.boundary.append(i)
            else:
                self._defer(i, op)
        if not self.exits:
            raise CannotChunk(
                f"nothing that is computed from the input of {self.entry.unit!r} is differentiated"
            )

    def _is_there(self, tensor: int) -> bool:
        """A gradient that is lazy only so that what autograd expands it to is sliced."""
        return tensor in self.expanded

    def _is_real_here(self, tensor: int, op: Op) -> bool:
        """Only what the module does with its input is lazy; others read the input itself, or the same view of it."""
        program, entry = self.program, self.entry.tensor
        if program.tensors[tensor].storage != program.tensors[entry].storage:
            return False
        if op.phase is Phase.BACKWARD:
            return op.forward_of not in self.ran
        return tensor in self.real_views or (tensor == entry and not self._is_inside(op))

    def _is_inside(self, op: Op) -> bool:
        return self.entry.scope in (op.scope, *self.program.ancestors(op.scope))

    def _passed_by(self, index: int, op: Op) -> None:
        """An op that runs where it ran. What the module makes of its own parameters alone, such as casts, is noted."""
        program = self.program
        if op.phase is Phase.BACKWARD:
            self.gradients.update(op.writes)
            return
        if self.storages.intersection(op.reads):
            raise CannotChunk(f"{op.name} reads what is sliced in another layout", index)
        self.real_views.update(t for t in op.outputs if t in self.lazy)
        kinds = (
            program.storage_kinds[s] is StorageKind.PARAMETER or s in self.own_storages for s in op.reads
        )
        if op.reads and self._is_inside(op) and all(kinds):
            self.own.add(index)
            self.own_storages.update(op.writes)

    def _is_behind(self, op: Op) -> bool:
        """Whether an op of the backward pass reads gradients that the entry's node has made real."""
        if op.forward_of not in self.ran and op.forward_of not in self.own:
            return True
        if op.name not in _ADDITIONS:
            return False
        # Where another gradient of the module's input meets the entry's.
        tensors, like = self.program.tensors, self.program.tensors[self.entry.tensor]
        others = [t for t in op.inputs if t not in self.lazy]
        return any(tensors[t].shape == like.shape and tensors[t].storage in self.gradients for t in others)

    def _check_exits(self, index: int, op: Op, lazy: list[int]) -> None:
        """What leaves is a gradient of the input or of a parameter; another activation's needs a loop of its own."""
        program = self.program
        parameters = {
            program.tensors[t].shape
            for i in program.ops_in(self.entry.scope)
            for t in program.ops[i].inputs
            if program.storage_kinds[program.tensors[t].storage] is StorageKind.PARAMETER
        }
        shapes = parameters | {program.tensors[self.entry.tensor].shape}
        if any(program.tensors[t].shape not in shapes for t in lazy):
            raise CannotChunk(
                f"{op.name} reads a gradient of an activation that did not enter {self.entry.unit!r}", index
            )

    def _gradients_are_lazy(self, op: Op) -> None:
        """As the executor lets them be, so that what autograd expands them to is sliced."""
        for t in op.inputs:
            tensor = self.program.tensors[t]
            if t not in self.lazy and tensor.shape in self.reduced[op.forward_of] and "float" in tensor.dtype:
                made = self._tensor(t)
                self.lazy[t] = Lazy(Value(self.region, made, data=made))
                self.expanded.add(t)

    def _check_reads(self, index: int, op: Op, lazy: list[int]) -> None:
        """Whatever else is differentiated would get its gradient from elsewhere than the entry.

        Losses that are added to one that is sliced get theirs from the one behind.
        """
        program = self.program
        sliced = any(self.lazy[t].value.sliced for t in lazy)
        for t in op.inputs:
            s = program.tensors[t].storage
            if t in self.lazy or s in self.storages or s in self.own_storages:
                continue
            if "float" not in program.tensors[t].dtype:
                continue
            if sliced and program.writer.get(s, -1) in self.differentiated:
                raise CannotChunk(
                    f"{op.name} also reads an activation that did not enter {self.entry.unit!r}", index
                )
            if program.storage_kinds[s] is StorageKind.PARAMETER and not self._is_inside(op):
                raise CannotChunk(f"{op.name} reads a parameter outside of {self.entry.unit!r}", index)

    def _defer(self, index: int, op: Op) -> None:
        func = overload(OUT_OF_PLACE.get(op.name, op.name))
        if func is None:
            raise CannotChunk(f"this process has no op {op.name}", index)
        try:
            args, kwargs = arguments(op, self._tensor)
        except ValueError as error:
            raise CannotChunk(str(error), index) from error
        loops = self.region.tally.loops
        try:
            out, seen = self.rehearsal.seen(lambda: defer(func, args, kwargs))
        except ChunkError as error:
            raise CannotChunk(str(error), index) from error
        if self.region.tally.loops > loops:
            self.computed.append(index)
        outputs = list(tensors_in(out))
        if len(outputs) != len(op.outputs):
            raise CannotChunk(f"{op.name} gave {len(outputs)} results instead of {len(op.outputs)}", index)
        for t, made in zip(op.outputs, outputs, strict=True):
            storage = self.program.tensors[t].storage
            if isinstance(made, Lazy):
                self.lazy[t] = made
                self.real_views.discard(t)
                if (window := made.value.window) is not None:
                    self.region.windows.add((window.start, window.start + window.axis.size))
                if made.value.combined is not None:
                    self.reduced.setdefault(index, set()).add(tuple(made.shape))
                if storage != self.program.tensors[self.entry.tensor].storage:
                    self.storages.add(storage)
            else:
                self.real[t] = made
                self.rehearsal.is_made(made, storage)
        for t in op.inputs if any(isinstance(made, Lazy) for made in outputs) else ():
            if t not in self.lazy or self._is_there(t):
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
        self._check_let_go(end)
        self.lazy.clear()  # what the step has let go of by then is not computed along

        def run() -> dict[int, torch.Tensor]:
            """As an entry node does: numbers that are still referred to are computed along, and kept."""
            pending = [value for value in self.region.pending if value not in gradients]
            held = (
                x for node in needed_nodes([*gradients, *pending]) for x in node.inputs if isinstance(x, Held)
            )
            self.needed.update(self.rehearsal.stands_for(x.tensor) for x in held)
            made = compute([*gradients, *pending])
            for value, data in zip(pending, made[len(gradients) :], strict=True):
                value.settle(data)
            gradients.clear()
            found = dict(zip(self.exits, made, strict=False))
            found.update((t, value.data) for t, value in numbers.items() if value.data is not None)
            return found

        return self.rehearsal.seen(run)

    def _check_let_go(self, end: int) -> None:
        """Results that code still refers to when the loop is over, such as logits, are computed if it reads them."""
        program, liveness = self.program, self.program.liveness
        kept = {program.tensors[t].storage for t in self.exits}
        for s in {program.tensors[t].storage for t, lazy in self.lazy.items() if lazy.value.sliced} - kept:
            made_by = program.writer.get(s, -1)
            if made_by not in self.ran or program.ops[made_by].phase is not Phase.FORWARD:
                continue
            freed = [at for at in liveness.events_of[s] if program.events[at] == (_FREE, s)]
            if not freed or freed[-1] > end:
                what = f"what {program.ops[made_by].name} makes, {program.storage_bytes[s]} bytes,"
                raise CannotChunk(
                    f"{what} is sliced, and referred to when the backward pass is over", made_by
                )

    # --- the patch --------------------------------------------------------------------------------

    def _rewritten(self, exits: dict[int, torch.Tensor], loop: Seen) -> Rewrite:
        program, liveness, additions = self.program, self.program.liveness, self.additions
        resized = {}  # a kernel may leave a scalar in memory that was large
        for t, made in exits.items():
            storage = program.tensors[t].storage
            n_bytes = self.rehearsal.is_made(made, storage)
            if n_bytes != program.storage_bytes[storage]:
                resized[storage] = n_bytes
        events: dict[int, list[tuple[int, int]]] = {}
        for i in self.deferred:
            op = program.ops[i]
            at = int(liveness.op_events[i])
            events[at] = self.rehearsal.into(additions, self.ran[i], op.phase, op.scope)
        end = int(liveness.op_events[self.deferred[-1]])
        kept = {program.tensors[t].storage for t in exits}
        self._drop_events(events, kept, end)
        handles, until_end = self._hold(events)
        n_before = len(additions.ops)
        entry_instance = len(program.instance_handles)
        body = self.rehearsal.into(additions, loop, Phase.BACKWARD, self.entry.scope)
        self._multiply(n_before, loop)
        after = [(_DROP, entry_instance), *((_RELEASE, handle) for handle in until_end)]
        after += self._put_off(events, end)
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
                resized=resized,
            ),
            gone,
            sum(op.time_ms for op in ops) - sum(program.ops[i].time_ms for i in gone),
        )

    def _put_off(self, events: dict[int, list[tuple[int, int]]], end: int) -> list[tuple[int, int]]:
        """Ops that read what the loop makes run behind it; what they read and write is freed behind them."""
        program, liveness = self.program, self.program.liveness
        tensors = program.tensors
        freed: set[int] = set()
        found: list[tuple[int, tuple[int, int]]] = []
        for i in self.boundary:
            at = int(liveness.op_events[i])
            if at < end:
                events[at] = []
                found.append((at, (_OP, i)))
                op = program.ops[i]
                freed.update((*op.reads, *op.writes, *(tensors[t].storage for t in op.inputs)))
        if not found:
            return []
        first = found[0][0]
        for s in freed:
            for at in liveness.events_of[s]:
                if first < at <= end and program.events[at] == (_FREE, s):
                    events[at] = []
                    found.append((at, program.events[at]))
        return [event for _, event in sorted(found)]

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

    def _hold(self, events: dict[int, list[tuple[int, int]]]) -> tuple[dict[int, int], list[int]]:
        """By new handle, what is held: what enters, and what deferred ops read besides; and until the loop is over.

        What only a loop before it reads is held until that one is over.
        """
        program, liveness = self.program, self.program.liveness
        begins = program.tensors[self.entry.tensor].storage
        handles = {len(program.handle_storages): begins}
        until_end = list(handles)
        at = liveness.entered[self.entry.scope]
        events[at] = [program.events[at], (_PACK, len(program.handle_storages))]
        initial = set(program.initial)
        for s, op in self.held.items():
            if s in initial or s == begins:
                continue
            handle = len(program.handle_storages) + len(handles)
            handles[handle] = s
            events[int(liveness.op_events[op])].append((_PACK, handle))
            over = next((i for i in self.computed if i >= op), None)
            if over is None or s in self.needed:
                until_end.append(handle)
            else:
                events[int(liveness.op_events[over])].append((_RELEASE, handle))
        return handles, until_end

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
