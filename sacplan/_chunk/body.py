"""What a stretch that runs in slices does to a program: exactly, since the executor's own loop is recorded.

The ops of a stretch are deferred on fake tensors, with the kernels of the device, and the loop runs under the package's
recorder: for the first slice, one of those in the middle, and the last, which may be shorter. What the recorder saw
takes the place of the ops. Layers repeat, so the loop of a stretch is recorded once for all that are like it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch

from sacplan._chunk.dataflow import Dataflow, dataflow
from sacplan._chunk.executor.collected import Stretch
from sacplan._device.devices import DeviceSpec
from sacplan._program.calls import call_with, dtype_of
from sacplan._program.decisions import Chunk
from sacplan._program.derived import derived
from sacplan._program.elements import CallSite, Event, Op, Patch, Tensor
from sacplan._program.liveness import Fold
from sacplan._program.program import Program
from sacplan._program.rewriting import Indices, PatchBuilder
from sacplan._record.rehearsal import Piece, Rehearsal
from sacplan._torch.ops import is_alias, is_computation, op_named
from sacplan.errors import PlanError

_OP, _FREE, _ALLOC = int(Event.OP), int(Event.FREE), int(Event.ALLOC)
_EMPTY = "aten.empty_strided.default"


@dataclass(frozen=True, slots=True)
class PlacedStretch:
    """A decision in one call of its unit.

    Attributes:
        members: the ops of the loop, views of what they make included.
        end: the op at which the loop runs.
        exits: by op, which of the tensors that it returns are needed afterwards.
        inputs: the tensors that the loop reads, in the order of first use.
    """

    decision: Chunk
    members: tuple[int, ...]
    end: int
    exits: Mapping[int, tuple[int, ...]]
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """A loop as it was recorded.

    Attributes:
        loop: what ran; given to it are the memory of its inputs and the buffers of the exits.
        inputs: of each input tensor that is given, which storage it lies on, as a position in ``_input_storages``.
        allocations: what makes the buffers.
        peak_bytes: the most that is alive of what is made inside, workspaces included.
    """

    loop: Piece
    inputs: tuple[int, ...]
    allocations: tuple[Op, ...]
    peak_bytes: int


def stretches_patch(program: Program, decisions: Sequence[Chunk], spec: DeviceSpec) -> Patch:
    """The rewrite of a program that stretches are.

    Raises:
        PlanError: a stretch that the program does not have, or that cannot run in slices as it says.
    """
    placed = sorted(
        (one for decision in decisions for one in placed_stretches(program, decision)), key=lambda s: s.end
    )
    patch = _LoopRewriter(program)
    for stretch, record in zip(placed, _records(program, placed, spec), strict=True):
        patch.add(stretch, record)
    return patch.draft.patch()


def loop_bytes(program: Program, decisions: Sequence[Chunk], spec: DeviceSpec) -> list[int]:
    """By decision, what its loop makes at its peak, beside its inputs and the buffers of its exits."""
    placed = [next(placed_stretches(program, decision)) for decision in decisions]
    return [record.peak_bytes for record in _records(program, placed, spec)]


def placed_stretches(program: Program, decision: Chunk) -> Iterator[PlacedStretch]:
    """A decision in each call of its unit that has its sites.

    Raises:
        PlanError: no call has.
    """
    scopes = program.calls.get(decision.unit, ())
    found = False
    for scope in scopes:
        ops = ops_by_site(program, scope)
        if decision.sites and all(site in ops for site in decision.sites):
            found = True
            yield _placed(program, decision, [ops[site] for site in decision.sites])
    if not found:
        raise PlanError(
            f"no call of unit {decision.unit!r} runs all ops of a stretch that ends with "
            f"{decision.sites[-1] if decision.sites else 'nothing'}. Make a plan for this step with sacplan.plan."
        )


@derived
def ops_by_site(program: Program, scope: int) -> Mapping[CallSite, int]:
    """The ops of a module call that compute something; worked out once."""
    return {site: op for op, site in program.sites(scope).items() if is_computation(site.op)}


def _placed(program: Program, decision: Chunk, sites: Sequence[int]) -> PlacedStretch:
    flow = dataflow(program)
    inside, end = set(sites), sites[-1]
    members: list[int] = []
    made: dict[int, None] = {}
    inputs: dict[int, None] = {}
    for i in range(sites[0], end + 1):
        op = program.ops[i]
        reads = any(t in made for t in op.inputs)
        if i in inside or (reads and is_alias(op.name)):
            members.append(i)
            inputs.update(dict.fromkeys(t for t in flow.inputs[i] if t not in made))
            made.update(dict.fromkeys(flow.outputs[i]))
        elif reads:
            raise PlanError(
                f"a stretch of unit {decision.unit!r} that ends with {decision.sites[-1]} makes what {op.name} reads "
                "before that."
            )
    exits: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for position, output in decision.exits:
        if position >= len(sites):
            raise PlanError(
                f"an exit of a stretch of unit {decision.unit!r} refers to a site that it does not have."
            )
        exits[sites[position]] += (output,)
    return PlacedStretch(decision, tuple(members), end, exits, tuple(inputs))


# --- recording loops ------------------------------------------------------------------------------------


def _records(program: Program, placed: Sequence[PlacedStretch], spec: DeviceSpec) -> list[LoopRecord]:
    known = _known_loops(program, spec)
    keys = [_kind(program, stretch) for stretch in placed]
    for key, stretch in zip(keys, placed, strict=True):
        if key not in known:
            known[key] = _recorded(program, stretch, spec)
    return [known[key] for key in keys]


@derived
def _known_loops(program: Program, spec: DeviceSpec) -> dict[Hashable, LoopRecord]:
    """The loops of a program on a device, by their kind; ``_records`` fills it."""
    return {}


def _kind(program: Program, stretch: PlacedStretch) -> Hashable:
    """Equal for stretches whose loops do the same."""
    names: dict[int, int] = {}
    storages: dict[int, int] = {}

    def named(t: int) -> Any:
        tensor = program.tensors[t]
        layout = tensor.dtype, tensor.shape, tensor.stride, tensor.offset
        return names.setdefault(t, len(names)), storages.setdefault(tensor.storage, len(storages)), layout

    d = stretch.decision
    rows = tuple(
        (
            op.name,
            op.arguments,
            tuple(map(named, op.inputs)),
            tuple(map(named, op.outputs)),
            stretch.exits.get(i),
        )
        for i, op in ((i, program.ops[i]) for i in stretch.members)
    )
    return rows, d.slices, d.dim, d.outer, d.inner


class _LoopInputs:
    """Fake tensors for those that a loop reads; tensors on one storage share it."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self.bases: dict[tuple[int, str], torch.Tensor] = {}  # by storage and type

    def make(self, index: int) -> torch.Tensor:
        program = self._rehearsal.program
        t = program.tensors[index]
        key = t.storage, t.dtype
        if key not in self.bases:
            reach = 1 + t.offset + sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True))
            elements = max(reach, program.storage_bytes[t.storage] // dtype_of(t).itemsize)
            self.bases[key] = self._rehearsal.like(Tensor(-1, t.dtype, (elements,), (1,), 0))
        return self.bases[key].as_strided(t.shape, t.stride, t.offset)


def _recorded(program: Program, stretch: PlacedStretch, spec: DeviceSpec) -> LoopRecord:
    rehearsal = Rehearsal(program, spec)
    inputs = _LoopInputs(rehearsal)
    d = stretch.decision
    loop = Stretch(d.dim, d.outer, d.inner, d.slices)
    marks: list[int] = []
    n_slices, in_slices = 0, False

    def some(slices: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        nonlocal n_slices
        n_slices = len(slices)
        for one in dict.fromkeys((slices[0], slices[min(1, n_slices - 1)], slices[-1])):
            marks.append(rehearsal.n_ops)
            yield one

    def run() -> None:
        nonlocal in_slices
        in_slices = loop.run(some)

    with rehearsal.running():
        buffers, allocations = _collected(program, stretch, loop, inputs, rehearsal)
        bases = inputs.bases.values()
        piece = rehearsal.piece([*bases, *buffers], run)
    if not in_slices:
        raise PlanError(f"the stretch of unit {d.unit!r} that ends with {d.sites[-1]} cannot run in slices.")
    number = {s: i for i, s in enumerate(_input_storages(program, stretch))}
    times = [1] * len(piece.ops)
    if len(marks) == 3:
        first = rehearsal.n_ops - len(piece.ops)
        times[marks[1] - first : marks[2] - first] = [n_slices - 2] * (marks[2] - marks[1])
    ops = tuple(
        msgspec.structs.replace(op, time_ms=op.time_ms * n, flops=op.flops * n, recomputable=False)
        for op, n in zip(piece.ops, times, strict=True)
    )
    piece = replace(piece, ops=ops)
    return LoopRecord(
        piece, tuple(number[s] for s, _ in inputs.bases), allocations, _peak_bytes(program, piece)
    )


def _collected(
    program: Program, stretch: PlacedStretch, loop: Stretch, inputs: _LoopInputs, rehearsal: Rehearsal
) -> tuple[list[torch.Tensor], tuple[Op, ...]]:
    """The buffers of the exits, once the ops of a stretch are deferred, and what makes them."""
    tensors: dict[int, torch.Tensor] = {t: inputs.make(t) for t in stretch.inputs}
    buffers: list[torch.Tensor] = []
    allocations: list[Op] = []
    for i in stretch.members:
        op, kept = program.ops[i], stretch.exits.get(i, ())
        func = op_named(op.name)
        args, kwargs = call_with(op.arguments, [tensors[t] for t in op.inputs])
        if func is None or not loop.may_defer(func, args, kwargs):
            raise PlanError(f"{op.name} in unit {stretch.decision.unit!r} cannot run in slices.")
        put_off, seen = rehearsal.seen(partial(loop.defer, func, args, kwargs, kept))
        made = _tensors(put_off)
        tensors.update(zip(op.outputs, made, strict=True))
        buffers += [made[position] for position in kept]
        allocations += [each for each in seen.ops if each.name == _EMPTY]
        del made, put_off, args, kwargs
    return buffers, tuple(allocations)


def _peak_bytes(program: Program, loop: Piece) -> int:
    """The most that is alive of what a loop makes."""
    draft = PatchBuilder(program)
    known: dict[int, int] = {}
    events = draft.put(loop.events, loop.ops, _indices(draft, loop, known))
    fold, most = Fold(program, draft.patch(), initial=()), 0
    for code, arg in events:
        fold.step(code, arg)
        most = max(most, fold.noted)
    return most


def _indices(draft: PatchBuilder, loop: Piece, known: dict[int, int]) -> Indices:
    """Storages and tensors of a loop in a program; those that are not known are added."""
    storage = draft.numbering(known, loop.sizes)

    def tensor(index: int) -> int:
        found = loop.tensors[index]
        return draft.tensors.add(msgspec.structs.replace(found, storage=storage(found.storage)))

    return Indices(storage, tensor=tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in value if isinstance(t, torch.Tensor)]


def _input_storages(program: Program, stretch: PlacedStretch) -> list[int]:
    return list(dict.fromkeys(program.tensors[t].storage for t in stretch.inputs))


# --- the patch ------------------------------------------------------------------------------------------


class _LoopRewriter:
    """Puts loops in the place of the ops of stretches."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.flow: Dataflow = dataflow(program)
        self.draft = PatchBuilder(program)
        self.freed = {arg: at for at, (code, arg) in enumerate(program.events) if code == _FREE}

    def add(self, stretch: PlacedStretch, record: LoopRecord) -> None:
        program, flow, events = self.program, self.flow, self.draft.events
        positions = program.liveness.op_events
        end = int(positions[stretch.end])
        exits = self._exits(stretch)
        buffers = {flow.origin[s] for s in exits.values()}
        for i in stretch.members:
            op = program.ops[i]
            position = int(positions[i])
            for s in op.writes:
                if flow.origin[s] not in buffers or s not in exits.values():
                    self._drop(s)
            if flow.computes[i] or not any(flow.origin[flow.storage[t]] in buffers for t in op.inputs):
                events[position] = ()
        allocations = iter(record.allocations)
        for i in stretch.members:
            for output in stretch.exits.get(i, ()):
                at = int(positions[i])
                made = self._buffer(i, flow.outputs[i][output], exits[i, output], next(allocations))
                events[at] = (*events[at], (_OP, made))
        after = self._inputs_freed(stretch, end)
        storages = [*_input_storages(program, stretch), *exits.values()]
        events[end] = (*events[end], *self._loop(stretch, record, storages), *after)

    def _drop(self, storage: int) -> None:
        at = self.freed.get(storage)
        if at is not None:
            self.draft.events[at] = ()

    def _exits(self, stretch: PlacedStretch) -> dict[tuple[int, int], int]:
        """By (op, output), the last version of the storage of an exit."""
        program, flow = self.program, self.flow
        found = {}
        for i in stretch.members:
            for output in stretch.exits.get(i, ()):
                if output >= len(flow.outputs[i]):
                    raise PlanError(f"{program.ops[i].name} does not return as many tensors as a plan says.")
                found[i, output] = flow.storage[flow.outputs[i][output]]
        latest = {flow.origin[s]: s for i in stretch.members for s in program.ops[i].writes}
        return {key: latest.get(flow.origin[s], s) for key, s in found.items()}

    def _buffer(self, op: int, tensor: int, storage: int, allocation: Op) -> int:
        """An op that makes the buffer of an exit where the op stood that gives it."""
        view = self.program.tensors[tensor]
        index = self.draft.tensors.add(msgspec.structs.replace(view, storage=storage))
        return self.draft.ops.add(
            msgspec.structs.replace(
                allocation, scope=self.program.ops[op].scope, writes=(storage,), outputs=(index,)
            )
        )

    def _inputs_freed(self, stretch: PlacedStretch, end: int) -> list[tuple[int, int]]:
        """The inputs that would be free before the loop ends: they are then freed after it."""
        found = []
        for s in _input_storages(self.program, stretch):
            at = self.freed.get(s)
            if at is not None and at < end:
                self.draft.events[at] = ()
                found.append((_FREE, s))
        return found

    def _loop(
        self, stretch: PlacedStretch, record: LoopRecord, storages: Sequence[int]
    ) -> list[tuple[int, int]]:
        inputs = [storages[i] for i in record.inputs]
        exits = storages[len(storages) - len(record.allocations) :]
        known = dict(zip(record.loop.given, (*inputs, *exits), strict=True))
        scope = self.program.ops[stretch.end].scope
        ops = [msgspec.structs.replace(op, scope=scope) for op in record.loop.ops]
        return self.draft.put(record.loop.events, ops, _indices(self.draft, record.loop, known))
