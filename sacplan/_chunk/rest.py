"""A chunk in a step of training: what it makes of the recorded step.

From a module's input on, everything is computed in slices: to the module's outputs (span ``"module"``), or until it is
reduced to numbers (``"rest"``: a head, the loss and their gradients). Which ops that is follows from the recording:
forward ops that read what comes from the input, and the backward ops that belong to them. The executor's engine defers
them on fake tensors here as it defers them in the step, and runs its loops; what the recorder sees of these takes the
place of the ops in the program.

What is in the way is a reason, not an error: an op that the engine would have to run as a whole, or a parameter from
elsewhere, whose gradient would not come through the module.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise, takewhile
from typing import Any

import msgspec
import torch

from sacplan._chunk.executor import losses  # noqa: F401  (registers how losses are put together)
from sacplan._chunk.executor.lazy import Lazy, defer, real, root
from sacplan._chunk.executor.loop import compute, needed_nodes
from sacplan._chunk.executor.values import DeferredTensor, Held, SlicedRegion, Window
from sacplan._chunk.families import transferred
from sacplan._device.devices import DeviceSpec
from sacplan._factors.axes import Axis
from sacplan._program.calls import Opaque, call_with
from sacplan._program.decisions import Chunk
from sacplan._program.derived import derived
from sacplan._program.program import Event, Op, Patch, Phase, Program, StorageKind, Tensor
from sacplan._program.rewriting import PatchBuilder
from sacplan._record.in_place import OUT_OF_PLACE
from sacplan._record.rehearsal import Rehearsal, RehearsedOps
from sacplan._torch.ops import is_computation, op_named, tensors_in
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
class ChunkEntry:
    """Where a chunk begins.

    Attributes:
        unit: fqn of a module that is called once.
        scope: its call.
        tensor: of the program, what enters.
    """

    unit: str
    scope: int
    tensor: int

    @staticmethod
    def of(program: Program, unit: str) -> ChunkEntry:
        """The entry at a module.

        Raises:
            CannotChunk: it is called several times, or reads no activation.
        """
        calls = program.calls.get(unit, ())
        if len(calls) != 1:
            raise CannotChunk(f"module {unit!r} is called {len(calls)} times in a step, and it must be once")
        inside = program.ops_in(calls[0])
        read = (t for i in inside for t in program.ops[i].inputs)
        for t in read:
            tensor = program.tensors[t]
            if program.storage_kinds[tensor.storage] in _OF_MODEL or not tensor.shape:
                continue
            if "float" in tensor.dtype and program.writer.get(tensor.storage, -1) not in inside:
                return ChunkEntry(unit, calls[0], t)
            break
        raise CannotChunk(f"what module {unit!r} reads first is no floating-point activation from outside")


class _Sampled(SlicedRegion):
    """A region of which some slices stand for all.

    Slices that read equally long parts of everything that is sliced run the same ops. Of several in a row the first two
    run, since results are made in the one and added to in the other; and the last slice of all.

    Attributes:
        windows: where tensors begin and end that have only a part of the axis, as shifted ones do.
        marks: by loop, how many ops had been seen before a slice, and how many slices it stands for.
    """

    def __init__(self, size: int, slices: int, accumulate: torch.dtype | None, rehearsal: Rehearsal) -> None:
        super().__init__(size, slices, accumulate, _refuse)
        self._rehearsal = rehearsal
        self.windows: set[tuple[int, int]] = {(0, size)}
        self.marks: list[list[tuple[int, int]]] = []

    def slices(self) -> Iterator[tuple[int, int]]:
        """See above."""
        *every, last = super().slices()
        sampled: list[tuple[tuple[int, int], int]] = []
        for _, same in groupby(every, self._lengths):
            first, *others = same
            sampled += [(first, 1), *((each, len(others)) for each in others[:1])]
        marks: list[tuple[int, int]] = []
        self.marks.append(marks)
        for bounds, times in (*sampled, (last, 1)):
            marks.append((self._rehearsal.n_ops, times))
            yield bounds
        marks.append((self._rehearsal.n_ops, 1))

    def _lengths(self, bounds: tuple[int, int]) -> tuple[int, ...]:
        start, stop = bounds
        return tuple(max(0, min(stop, end) - max(start, begin)) for begin, end in sorted(self.windows))


def _call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op none of whose inputs is lazy; a number that code reads has no value here, and nobody asks for it."""
    return None if func is _READ_NUMBER else func(*args, **kwargs)


def _deferred(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``defer``, but a number that code reads is computed at once."""
    if func is _READ_NUMBER:
        real(args[0])
        return None
    return defer(func, args, kwargs)


_READ_NUMBER = torch.ops.aten._local_scalar_dense.default


def _is_like(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype


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


@derived
def training_chunk(program: Program, chunk: Chunk, device: DeviceSpec) -> Rewrite:
    """The rewrite that a decision of span ``"module"`` or ``"rest"`` is; worked out once for a program.

    Raises:
        CannotChunk: why there is none.
    """
    entry = ChunkEntry.of(program, chunk.unit)
    _check_plain(program, entry, chunk)
    if chunk.span != "module":
        return _Rehearsed(program, entry, chunk, device).rewrite()
    rehearsed = _rehearsed(program, msgspec.structs.replace(chunk, unit=""), device)
    for scope, known in rehearsed.items():
        found = transferred(program, known.patch, known.deferred, scope, entry.scope)
        if found is not None:
            return Rewrite(*found, known.added_ms)
    rehearsed[entry.scope] = _Rehearsed(program, entry, chunk, device).rewrite()
    return rehearsed[entry.scope]


@derived
def _rehearsed(program: Program, chunk: Chunk, device: DeviceSpec) -> dict[int, Rewrite]:
    """The rewrites for one chunk but for its unit, by module call; ``training_chunk`` fills it."""
    return {}


def _check_plain(program: Program, entry: ChunkEntry, chunk: Chunk) -> None:
    """Slices are made of plain tensors: a module that gets a DTensor, or has one as a parameter, runs as a whole."""
    if not program.on_dtensors:
        return
    scope = program.scopes[entry.scope]
    for i in range(scope.first_op, scope.end_op if chunk.span == "module" else len(program.ops)):
        op = program.ops[i]
        module = program.scopes[op.scope].fqn if op.scope >= 0 else ""
        if op.phase is Phase.FORWARD and module in program.on_dtensors:
            where = f"module {module!r}" if module else "the loss function"
            raise CannotChunk(f"{where} runs ops on DTensors, and only plain tensors can be sliced", i)


class _Rehearsed:
    def __init__(self, program: Program, entry: ChunkEntry, chunk: Chunk, device: DeviceSpec) -> None:
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
        self.begins = like.storage
        self.scope = program.scopes[entry.scope]
        # Forward ops whose backward belongs to the chunk: all from the entry on, or those of the module.
        last = self.scope.end_op if chunk.span == "module" else len(program.ops)
        self.span = range(self.scope.first_op, last)
        self.lazy: dict[int, Lazy] = {}  # tensors of the program that are not computed where they were
        self.inside: dict[int, Lazy] = {}  # views of what enters: lazy in the module, and real outside
        self.saved: dict[int, dict[int, Lazy]] = {}  # by deferred forward op: what it read and made
        self.real: dict[int, torch.Tensor] = {}
        self.storages: set[int] = set()  # of lazy tensors
        self.there: set[int] = {like.storage}  # of lazy tensors that are there, and taken in slices
        self.lazy_handles: set[int] = set()
        self.own: set[int] = set()  # ops that the module runs on its own parameters alone, such as casts
        self.own_storages: set[int] = set()
        self.upstream: set[int] = set()  # storages that ops of the backward pass make where they did
        self.met = 0  # times that a gradient of the input was added to one from elsewhere
        self.deferred: list[int] = []
        self.ran: dict[int, RehearsedOps] = {}  # what runs where an op was deferred
        self.temporaries: dict[int, int] = {}  # of formulas, see _run_temporary; to the forward op
        self.held: dict[tuple[int, int], None] = {}  # (storage, deferred op that reads it)
        self.node_ops: dict[int, int] = {}  # by number of a node, the deferred op that it is of
        self.expanded: set[int] = set()  # gradients that the step computes where it did
        self.handed_on: set[int] = set()  # those that are as they are the gradient of what is inside, too
        self.computed: list[int] = []  # ops that needed numbers out of a loop of their own
        self.needed: set[int] = set()  # storages that the last loop reads
        self.needed_ops: set[int] = set()  # deferred ops that run in it
        self.exits: dict[int, Lazy] = {}  # tensors that somebody reads who is not deferred
        self.boundary: list[int] = []  # who does
        self.outputs: dict[int, torch.Tensor] = {}  # of the module
        self.left: RehearsedOps | None = None  # what runs when the module is left
        self.gradients: dict[int, tuple[tuple[int, ...], Window | None]] = {}  # see _gradients_are_lazy
        self.readers = Counter(s for op in program.ops for s in op.reads)
        self.differentiated = frozenset(op.forward_of for op in program.ops) - {-1}
        self.draft = PatchBuilder(program)

    def rewrite(self) -> Rewrite:
        """Rehearse it."""
        with self.rehearsal.running():
            begins = self.rehearsal.given(self.entry.tensor)
            self.inside[self.entry.tensor] = root(self.region, begins, self.axis)
            self._forward()
            if self.chunk.span == "module":
                self._leave()
            self._backward()
            exits, loop = self._run_loop()
        return self._rewritten(exits, loop)

    # --- which ops are deferred ------------------------------------------------------------------

    def _forward(self) -> None:
        program = self.program
        for i in self.span:
            op = program.ops[i]
            if op.phase is not Phase.FORWARD:
                continue
            own = i < self.scope.end_op
            known = self._known(op, own)
            if any(t in known for t in op.inputs):
                before = {t: known[t] for t in op.inputs if t in known}
                self._check_reads(i, op, known)
                self._defer(i, op, known)
                self.saved[i] = before | {t: known[t] for t in op.outputs if t in known}
            elif self.storages.intersection(op.reads):
                raise CannotChunk(f"{op.name} reads what is sliced in another layout", i)
            elif own and op.reads and all(map(self._is_own, op.reads)):
                self.own.add(i)
                self.own_storages.update(op.writes)
            elif self.chunk.span == "module" and own and is_computation(op.name):
                # What a kernel makes besides, such as a mask, it may make otherwise for what is lazy.
                raise CannotChunk(
                    f"{op.name} in {self.entry.unit!r} computes something that is not sliced", i
                )

    def _backward(self) -> None:
        program, first = self.program, self.scope.first_op
        for i in range(self.scope.end_op, len(program.ops)):
            op = program.ops[i]
            if op.phase is Phase.OPTIMIZER:
                break
            if op.phase is not Phase.BACKWARD:
                continue
            belongs = op.forward_of in self.ran or op.forward_of in self.own
            own = belongs and op.forward_of < self.scope.end_op
            if belongs and op.forward_of in self.gradients:
                self._gradients_are_lazy(i, op, own)
            known = self._known(op, own)
            lazy = [t for t in op.inputs if t in known]
            if belongs and lazy and not self._meets(op, known):
                self._defer(i, op, known)
                continue
            if belongs and lazy:
                self.met += 1
                if (
                    self.met > 1
                ):  # they are added up one by one here, and first among themselves with an entry's node
                    raise CannotChunk(
                        f"{self.entry.unit!r} reads its input several times, and so do others", i
                    )
            elif belongs and self._makes_temporaries(i, op):
                self._run_temporary(i, op, known)
                continue
            self.upstream.update(op.writes)
            lazy = [t for t in lazy if t not in self.expanded]
            if lazy:
                self._check_exits(i, op, lazy)
                self.exits.update((t, known[t]) for t in lazy if t not in self.exits)
                self.boundary.append(i)
            for t in op.outputs:
                self.lazy.pop(t, None)  # others see it from here on, of what has left
        if not self.exits:
            raise CannotChunk(
                f"nothing that is computed from the input of {self.entry.unit!r} is differentiated"
            )
        if program.ops[self.deferred[-1]].phase is not Phase.BACKWARD:
            raise CannotChunk(f"no backward op belongs to the forward pass behind {self.entry.unit!r}", first)

    def _makes_temporaries(self, index: int, op: Op) -> bool:
        """Whether an op computes what its backward formula frees again, in a formula that is deferred in part.

        In the program such a formula is one workspace at its last op (``plain_formulas``), which is gone with that op.
        """
        tensors, writer = self.program.tensors, self.program.writer
        made = {tensors[t].storage for t in op.outputs} - {tensors[t].storage for t in op.inputs}
        if not made or any(s in writer for s in made):
            return False
        saved = self.saved.get(op.forward_of, {})
        following = takewhile(lambda o: o.forward_of == op.forward_of, islice(self.program.ops, index, None))
        return any(t in saved or t in self.lazy for later in following for t in later.inputs)

    def _run_temporary(self, index: int, op: Op, known: Mapping[int, Lazy]) -> None:
        """It runs where it ran, and what it makes is freed with the last op of the formula that is deferred."""
        self._defer(index, op, known)
        for t in op.outputs:
            self.temporaries[self.program.tensors[t].storage] = op.forward_of

    def _is_own(self, storage: int) -> bool:
        return self.program.storage_kinds[storage] is StorageKind.PARAMETER or storage in self.own_storages

    def _meets(self, op: Op, known: Mapping[int, Lazy]) -> bool:
        """Whether another gradient of the module's input is added to the one that the entry's node makes."""
        if op.name not in _ADDITIONS:
            return False
        tensors, like = self.program.tensors, self.program.tensors[self.entry.tensor]
        outside = {t for t in op.inputs if t not in known or t in self.expanded}
        inside = self.handed_on.intersection(op.inputs)
        if inside and len(set(op.inputs)) == len(op.inputs):
            self.handed_on -= inside  # a sum within the module, of slices
            outside -= inside
        return any(tensors[t].shape == like.shape and tensors[t].storage in self.upstream for t in outside)

    def _hands_on_gradient(self, forward: int) -> bool:
        """Whether the gradient of what an op makes is that of one of its inputs, too: that of a residual sum is.

        Autograd then runs no op for that input; for another it may, such as a cast.
        """
        program = self.program
        (like, *others) = (program.tensors[t] for t in program.ops[forward].outputs)
        alike = [t for t in self.saved[forward] if _is_like(program.tensors[t], like)]
        made = (
            t
            for op in program.ops
            if op.forward_of == forward and op.name not in _ADDITIONS
            for t in op.outputs
        )
        return not others and len(alike) > 1 and not any(_is_like(program.tensors[t], like) for t in made)

    def _check_exits(self, index: int, op: Op, lazy: Sequence[int]) -> None:
        """What leaves is a gradient of the input or of a parameter; another activation's needs a loop of its own."""
        program = self.program
        tensors = (
            program.tensors[t] for i in program.ops_in(self.entry.scope) for t in program.ops[i].inputs
        )
        shapes = {t.shape for t in tensors if program.storage_kinds[t.storage] is StorageKind.PARAMETER}
        shapes.add(program.tensors[self.entry.tensor].shape)
        if any(program.tensors[t].shape not in shapes for t in lazy):
            raise CannotChunk(
                f"{op.name} reads a gradient of an activation that did not enter {self.entry.unit!r}", index
            )

    def _known(self, op: Op, own: bool) -> Mapping[int, Lazy]:
        """The lazy tensors that an op may read; in the backward pass first those that its forward op had.

        Two views of one layout are the same tensor of the program, and two lazy ones.
        """
        saved = self.saved.get(op.forward_of, {}) if op.phase is Phase.BACKWARD else {}
        return ChainMap(saved, self.lazy, self.inside if own else {})

    def _gradients_are_lazy(self, index: int, op: Op, own: bool) -> None:
        """As the executor lets them be.

        Those of what is reduced, so that what autograd expands them to is sliced; and those of a module's outputs,
        which come in slices.
        """
        shape, window = self.gradients[op.forward_of]
        for t in op.inputs:
            tensor = self.program.tensors[t]
            known = t in self._known(op, own) or t in self.outputs
            if not known and tensor.shape == shape and "float" in tensor.dtype:
                made = self._tensor(t, {})
                self.there.add(tensor.storage)
                self.expanded.add(t)
                if window is not None and self._hands_on_gradient(op.forward_of):
                    self.handed_on.add(t)
                self.held[tensor.storage, index] = None
                self.lazy[t] = Lazy(DeferredTensor(self.region, made, window=window, data=made))

    def _check_reads(self, index: int, op: Op, known: Mapping[int, Lazy]) -> None:
        """Whatever else is differentiated would get its gradient from elsewhere than the entry.

        Losses that are added to one that is sliced get theirs from the one behind.
        """
        program = self.program
        sliced = any(known[t].value.sliced for t in op.inputs if t in known)
        for t in op.inputs:
            s = program.tensors[t].storage
            if t in known or s in self.storages or s in self.own_storages:
                continue
            if "float" not in program.tensors[t].dtype:
                continue
            if sliced and program.writer.get(s, -1) in self.differentiated:
                raise CannotChunk(
                    f"{op.name} also reads an activation that did not enter {self.entry.unit!r}", index
                )
            scopes = (op.scope, *program.ancestors(op.scope))
            if program.storage_kinds[s] is StorageKind.PARAMETER and self.entry.scope not in scopes:
                raise CannotChunk(f"{op.name} reads a parameter outside of {self.entry.unit!r}", index)

    def _defer(self, index: int, op: Op, known: Mapping[int, Lazy]) -> None:
        func = op_named(OUT_OF_PLACE.get(op.name, op.name))
        if func is None:
            raise CannotChunk(f"this process has no op {op.name}", index)
        try:
            args, kwargs = call_with(op.arguments, [self._tensor(t, known) for t in op.inputs])
            loops = self.region.tally.loops
            run = _deferred if any(t in known for t in op.inputs) else _call
            out, seen = self.rehearsal.seen(lambda: run(func, args, kwargs))
        except (Opaque, ChunkError) as error:
            raise CannotChunk(str(error), index) from error
        if self.region.tally.loops > loops:
            self.computed.append(index)
        outputs = list(tensors_in(out))
        if len(outputs) != len(op.outputs):
            raise CannotChunk(f"{op.name} gave {len(outputs)} results instead of {len(op.outputs)}", index)
        for t, made in zip(op.outputs, outputs, strict=True):
            storage = self.program.tensors[t].storage
            if not isinstance(made, Lazy):
                self.real[t] = made
                self.rehearsal.is_made(made, storage)
                continue
            (self.inside if storage == self.begins else self.lazy)[t] = made
            if (window := made.value.window) is not None:
                self.region.windows.add((window.start, window.start + window.axis.size))
            if made.value.combined is not None:
                self.gradients[index] = tuple(made.shape), None
            if storage not in self.there:
                self.storages.add(storage)
        for t in op.inputs if any(isinstance(made, Lazy) for made in outputs) else ():
            if t not in known:
                self.held[self.program.tensors[t].storage, index] = None
        self._note_nodes(index, [made.value for made in outputs if isinstance(made, Lazy)])
        self.deferred.append(index)
        self.ran[index] = seen

    def _note_nodes(self, index: int, values: list[DeferredTensor]) -> None:
        """The nodes behind an op's outputs are its own, but for those that earlier ops have made."""
        while values:
            node = values.pop().node
            if node is not None and node.number not in self.node_ops:
                self.node_ops[node.number] = index
                values.extend(node.values)

    def _tensor(self, index: int, known: Mapping[int, Lazy]) -> torch.Tensor:
        if index in known:
            return known[index]
        if index not in self.real:
            if self.program.tensors[index].storage in self.storages:
                raise CannotChunk("what is sliced is read in a layout that no op made")
            self.real[index] = self.rehearsal.given(index)
        return self.real[index]

    # --- the loops --------------------------------------------------------------------------------

    def _leave(self) -> None:
        """The module's outputs are computed, in a loop of their own; their gradients come in slices."""
        program = self.program
        outputs: dict[int, None] = {}
        views: set[int] = set()  # that others take of the outputs, perhaps as the module did
        for op in program.ops[self.scope.end_op :]:
            if not (op.phase is Phase.BACKWARD and op.forward_of in self.span):
                outputs.update(dict.fromkeys(t for t in op.inputs if t in self.lazy and t not in views))
                views.update(op.outputs)
        if not outputs:
            raise CannotChunk(f"nobody reads what {self.entry.unit!r} returns")
        values = [self.lazy[t].value for t in outputs]
        if not all(value.sliced for value in values):
            raise CannotChunk(f"{self.entry.unit!r} returns something that is not sliced")
        made, self.left = self.rehearsal.seen(lambda: compute(values))
        maker = {t: i for i in self.deferred for t in program.ops[i].outputs}
        self.lazy.clear()  # those that autograd keeps are found where they were saved
        if any(maker[t] not in self.differentiated for t in outputs):
            # Such as a residual sum: what comes in would be read by several ops, inside and outside.
            raise CannotChunk(
                f"the gradient of what {self.entry.unit!r} returns goes through its last op as it is"
            )
        for t, value, tensor in zip(outputs, values, made, strict=True):
            self.outputs[t] = self.real[t] = tensor
            self.gradients[maker[t]] = program.tensors[t].shape, value.window

    def _run_loop(self) -> tuple[dict[int, torch.Tensor], RehearsedOps]:
        """The exits, computed, and what ran for it."""
        died, tensors = self.program.liveness.died, self.program.tensors
        end = int(self.program.liveness.op_events[self.deferred[-1]])
        for handle, (t, op) in enumerate(
            zip(self.program.handle_tensors, self.program.handle_ops, strict=True)
        ):
            own = op in self.span and op < self.scope.end_op
            inside = own and (t in self.inside or self.program.handle_storages[handle] in self.storages)
            if (inside or (op in self.span and t in self.lazy)) and t not in self.outputs:
                self.lazy_handles.add(handle)
        numbers = {
            t: lazy.value
            for t, lazy in self.lazy.items()
            if not tensors[t].shape and t not in self.exits and died[tensors[t].storage] > end
        }
        self._check_let_go(end)
        exits = list(self.exits)
        gradients = [lazy.value for lazy in self.exits.values()]
        self.lazy.clear()  # what the step has let go of by then is not computed along
        self.inside.clear()
        self.saved.clear()
        self.exits.clear()

        def run() -> dict[int, torch.Tensor]:
            """As an entry node does: numbers that are still referred to are computed along, and kept."""
            pending = [value for value in self.region.pending if value not in gradients]
            nodes = needed_nodes([*gradients, *pending])
            inputs = [x for node in nodes for x in node.inputs]
            held = [x.tensor if isinstance(x, Held) else x.data for x in inputs]
            self.needed.update(self.rehearsal.stands_for(t) for t in held if t is not None)
            self.needed_ops.update(self.node_ops[node.number] for node in nodes)
            del nodes, inputs, held
            made = compute([*gradients, *pending])
            for value, data in zip(pending, made[len(gradients) :], strict=True):
                value.settle(data)
            gradients.clear()
            found = dict(zip(exits, made, strict=False))
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

    def _rewritten(self, exits: dict[int, torch.Tensor], loop: RehearsedOps) -> Rewrite:
        program, liveness, draft = self.program, self.program.liveness, self.draft
        summed: list[torch.Tensor] = []
        for t, made in (*exits.items(), *self.outputs.items()):
            storage = program.tensors[t].storage
            if storage in self.there:  # in the program a sum in place, see below
                summed.append(made)
                continue
            n_bytes = self.rehearsal.is_made(made, storage)
            if n_bytes != program.storage_bytes[storage]:
                draft.storage_bytes[storage] = n_bytes  # a kernel may leave a scalar in memory that was large
        events: dict[int, list[tuple[int, int]]] = {}
        for i in self.deferred:
            op = program.ops[i]
            events[int(liveness.op_events[i])] = self._placed(self.ran[i], op.phase, op.scope)
        end, left = int(liveness.op_events[self.deferred[-1]]), liveness.exited[self.entry.scope]
        made_at = {program.tensors[t].storage: end for t in exits}
        made_at |= {program.tensors[t].storage: left for t in self.outputs}
        self._drop_events(events, made_at)
        if self.left is not None:
            events[left] = self._placed(self.left, Phase.FORWARD, self.entry.scope)
        until_end = self._hold(events)
        last_of = {program.ops[i].forward_of: i for i in self.deferred}
        for s, forward in self.temporaries.items():
            events[int(liveness.op_events[last_of[forward]])].append((_FREE, s))
        instance = draft.instance_handles.add(until_end[0])
        if self.left is not None:
            events[left].append(program.events[left])
        body = self._placed(loop, Phase.BACKWARD, self.entry.scope)
        after = [(_DROP, instance), *((_RELEASE, handle) for handle in until_end)]
        after += self._put_off(events, end)
        # A gradient to which the plain step adds is read by the loop instead, which makes another of its size: when
        # the loop is over, the program's storage stands for that one.
        after += [(_FREE, self.rehearsal.stands_for(made)) for made in summed]
        events[end] += [(_UNPACK, instance), *body, *after]
        gone = frozenset(self.deferred)
        draft.events.update((at, tuple(each)) for at, each in events.items())
        return Rewrite(
            draft.patch(),
            gone,
            sum(op.time_ms for op in draft.ops.new) - sum(program.ops[i].time_ms for i in gone),
        )

    def _put_off(self, events: dict[int, list[tuple[int, int]]], end: int) -> list[tuple[int, int]]:
        """Ops that add to what the loop makes run behind it; what they read and write is freed behind them."""
        program, liveness = self.program, self.program.liveness
        freed: set[int] = set()
        found: list[tuple[int, tuple[int, int]]] = []
        for i in self.boundary:
            at, op = int(liveness.op_events[i]), program.ops[i]
            if at < end and (op.writes or op.mutates):  # a view takes nothing
                events[at] = []
                found.append((at, (_OP, i)))
                freed.update((*op.reads, *op.writes, *(program.tensors[t].storage for t in op.inputs)))
        first = found[0][0] if found else end
        for s in freed:
            for at in liveness.events_of[s]:
                if first < at <= end and program.events[at] == (_FREE, s):
                    events[at] = []
                    found.append((at, program.events[at]))
        return [event for _, event in sorted(found)]

    def _placed(self, seen: RehearsedOps, phase: Phase, scope: int) -> list[tuple[int, int]]:
        """The events of what ran; slices that were left out take the time of the one that stands for them."""
        added = self.draft.ops.new
        first = len(added)
        found = self.rehearsal.into(self.draft, seen, phase, scope)
        last = seen.first + len(seen.ops)
        for marks in self.region.marks:
            if seen.first <= marks[0][0] and marks[-1][0] <= last:
                for (begin, times), (stop, _) in pairwise(marks):
                    for at in range(begin - seen.first + first, stop - seen.first + first):
                        op = added[at]
                        added[at] = msgspec.structs.replace(
                            op, time_ms=op.time_ms * times, flops=op.flops * times
                        )
        return found

    def _drop_events(self, events: dict[int, list[tuple[int, int]]], made_at: dict[int, int]) -> None:
        """Nobody holds what is not computed; what leaves a loop is held from there on."""
        program, liveness = self.program, self.program.liveness
        on_cpu = self.rehearsal.device.kind == "cpu"  # elsewhere they do not count
        numbers = {s for i in self.deferred if on_cpu and (s := self._number_after(i)) is not None}
        for s in numbers:
            for at in liveness.events_of[s]:
                events.setdefault(at, [])
        for s in (*self.storages, self.begins):
            for at in liveness.events_of[s]:
                code, arg = program.events[at]
                handle = arg if code in (_PACK, _RELEASE) else -1
                if code in (_UNPACK, _DROP):
                    handle = program.instance_handles[arg]
                if handle >= 0:
                    if handle in self.lazy_handles:
                        events.setdefault(at, [])
                elif code != _OP and s in self.storages and not (s in made_at and at > made_at[s]):
                    events.setdefault(at, [])

    def _number_after(self, op: int) -> int | None:
        """The tensor that a Python number became and that autograd keeps for an op, which no lazy tensor has."""
        program = self.program
        at = int(program.liveness.op_events[op]) + 1
        code, arg = program.events[at] if at < len(program.events) else (-1, -1)
        if code != _ALLOC or program.storage_kinds[arg] is not StorageKind.OTHER or arg in program.writer:
            return None
        return arg if not self.readers[arg] else None

    def _hold(self, events: dict[int, list[tuple[int, int]]]) -> list[int]:
        """Take handles on what is held: what enters, and what deferred ops read besides.

        What only a loop before it reads is held until that one is over: one for a number, or the one that computes a
        module's outputs.

        Returns:
            Handles that are held until the loop is over; the first is that on what enters.
        """
        program, liveness, draft = self.program, self.program.liveness, self.draft
        until_end = [draft.new_handle(self.begins, self.scope.first_op)]
        at = liveness.entered[self.entry.scope]
        events[at] = [program.events[at], (_PACK, until_end[0])]
        initial: Collection[int] = set(program.initial)
        held_until: dict[tuple[int, int], None] = {}  # (storage, event at which it is let go, or -1)
        for s, op in self.held:
            if s in initial or s == self.begins or (s in self.there and s not in self.needed):
                continue  # the last: gradients from which all was computed before the loop
            over = next((int(liveness.op_events[i]) for i in self.computed if i >= op), -1)
            if over < 0 and self.left is not None and op < self.scope.end_op:
                over = liveness.exited[self.entry.scope]
            if s in self.there or op in self.needed_ops:
                over = -1
            if (s, over) in held_until or (s, -1) in held_until:
                continue
            held_until[s, over] = None
            handle = draft.new_handle(s)
            events[int(liveness.op_events[op])].append((_PACK, handle))
            if over < 0:
                until_end.append(handle)
            else:
                events[over].append((_RELEASE, handle))
        return until_end
