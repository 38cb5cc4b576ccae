"""Stretches of a step for inference, as a rewrite of its program.

The rewrite is exact, since the executor's own loop is recorded. Three steps:

1. ``placed_stretches``: a decision names call sites; find their ops in each call of the unit, and what the loop reads.
2. ``_records``: defer these ops on fake tensors with the kernels of the device (``executor/collected.py``), and run the
   loop under the recorder, with the slices that ``sampling.py`` chooses. Layers repeat, so the loop is recorded once
   for all stretches that are alike.
3. ``_LoopRewriter``: remove the ops and what they allocate, put the buffer of each exit where its op stood, and the
   loop where the last op stood. What the loop reads is freed after it at the earliest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch

from sacplan.core.calls import call_with, dtype_of
from sacplan.core.decisions import Chunk
from sacplan.core.derived import derived
from sacplan.core.elements import CallSite, Event, Op, Patch, Tensor
from sacplan.core.liveness import Fold
from sacplan.core.program import Program
from sacplan.core.rewriting import Indices, PatchBuilder
from sacplan.device.devices import DeviceSpec
from sacplan.errors import PlanError
from sacplan.record.rehearsal import Piece, Rehearsal
from sacplan.techniques.chunk.dataflow import Dataflow, dataflow
from sacplan.techniques.chunk.executor.collected import Stretch
from sacplan.techniques.chunk.sampling import SampledSlices
from sacplan.torch_compat.ops import is_alias, is_computation, op_named, tensors_in

_OP, _FREE, _ALLOC = int(Event.OP), int(Event.FREE), int(Event.ALLOC)
_EMPTY = "aten.empty_strided.default"


@dataclass(frozen=True, slots=True)
class PlacedStretch:
    """A decision in one call of its unit.

    Attributes:
        decision: the decision.
        members: the ops of the loop, with views of what they make.
        end: the last of them, in whose place the loop runs.
        exits: by op, the positions of its outputs that are needed after the loop.
        inputs: the tensors that the loop reads, in the order of first use.
    """

    decision: Chunk
    members: tuple[int, ...]
    end: int
    exits: Mapping[int, tuple[int, ...]]
    inputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """A loop as it was recorded, for all stretches that are alike.

    Attributes:
        loop: the ops that ran. It was given the memory of its inputs and the buffers of the exits.
        inputs: the storage of each input that it was given, as a position in ``_input_storages``.
        allocations: the ops that make the buffers.
        peak_bytes: the most that is alive at once of what the loop makes, workspaces included.
    """

    loop: Piece
    inputs: tuple[int, ...]
    allocations: tuple[Op, ...]
    peak_bytes: int


def stretches_patch(program: Program, decisions: Sequence[Chunk], spec: DeviceSpec) -> Patch:
    """Return the rewrite of a program for stretches; worked out once, since both the search and the planner ask.

    Raises:
        PlanError: a stretch that the program does not have, or that cannot run in slices as it says.
    """
    return _stretches_patch(program, tuple(decisions), spec)


@derived
def _stretches_patch(program: Program, decisions: tuple[Chunk, ...], spec: DeviceSpec) -> Patch:
    # By where the loops run, so that what they add is numbered in the order of the step.
    placed = sorted(
        (one for decision in decisions for one in placed_stretches(program, decision)), key=lambda s: s.end
    )
    patch = _LoopRewriter(program)
    for stretch, record in zip(placed, _records(program, placed, spec), strict=True):
        patch.add(stretch, record)
    return patch.draft.patch()


def loop_bytes(program: Program, decisions: Sequence[Chunk], spec: DeviceSpec) -> list[int]:
    """Return by decision what its loop makes at its peak, beside its inputs and the buffers of its exits."""
    # The first call of a unit stands for the others.
    placed = [next(placed_stretches(program, decision)) for decision in decisions]
    return [record.peak_bytes for record in _records(program, placed, spec)]


def placed_stretches(program: Program, decision: Chunk) -> Iterator[PlacedStretch]:
    """Yield a decision's place in each call of its unit that has its sites. Another call may take another branch.

    Raises:
        PlanError: no call has them.
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
    """Return the ops of a module call that compute something; worked out once."""
    return {site: op for op, site in program.sites(scope).items() if is_computation(site.op)}


def _placed(program: Program, decision: Chunk, sites: Sequence[int]) -> PlacedStretch:
    flow = dataflow(program)
    inside, end = set(sites), sites[-1]
    members: list[int] = []
    made: dict[int, None] = {}
    inputs: dict[int, None] = {}
    for i in range(sites[0], end + 1):
        op = program.ops[i]
        # Sites name ops that compute. Views of what the loop makes belong to it as well; an op in between that
        # computes something else from it would read what is not there yet.
        reads = any(t in made for t in op.inputs)
        if i in inside or (reads and is_alias(op.name)):
            members.append(i)
            inputs.update(dict.fromkeys(t for t in flow.inputs[i] if t not in made))
            made.update(dict.fromkeys(flow.outputs[i]))
        elif reads:  # the loop runs only at the end
            raise PlanError(
                f"a stretch of unit {decision.unit!r} that ends with {decision.sites[-1]} makes what {op.name} reads "
                "before that."
            )
    # A plan names an exit by its position among the sites, the patch by its op.
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
    """Return the loops of a program on a device by their kind, none at first; ``_records`` adds to them."""
    return {}


def _kind(program: Program, stretch: PlacedStretch) -> Hashable:
    """Return a key that is equal for stretches whose loops do the same.

    Tensors and storages are numbered in the order in which they appear, so that the key says which are shared, and not
    which they are.
    """
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
    """Makes fake tensors for those that a loop reads. Tensors on one storage share one here, too."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self.bases: dict[tuple[int, str], torch.Tensor] = {}  # by storage and type

    def make(self, index: int) -> torch.Tensor:
        program = self._rehearsal.program
        t = program.tensors[index]
        key = t.storage, t.dtype
        if key not in self.bases:
            reach = 1 + t.offset + sum((n - 1) * s for n, s in zip(t.shape, t.stride, strict=True))
            # The whole storage, so that other tensors on it find their place, too.
            elements = max(reach, program.storage_bytes[t.storage] // dtype_of(t).itemsize)
            self.bases[key] = self._rehearsal.like(Tensor(-1, t.dtype, (elements,), (1,), 0))
        return self.bases[key].as_strided(t.shape, t.stride, t.offset)


def _recorded(program: Program, stretch: PlacedStretch, spec: DeviceSpec) -> LoopRecord:
    rehearsal = Rehearsal(program, spec)
    inputs = _LoopInputs(rehearsal)
    d = stretch.decision
    loop = Stretch(d.dim, d.outer, d.inner, d.slices)
    sampled = SampledSlices(rehearsal)
    in_slices = False

    def run() -> None:
        nonlocal in_slices
        in_slices = loop.run(sampled)

    # First the ops are put off, which allocates the buffers of the exits. Then one run of the loop fills them.
    with rehearsal.running():
        buffers, allocations = _collected(program, stretch, loop, inputs, rehearsal)
        bases = inputs.bases.values()
        piece = rehearsal.piece([*bases, *buffers], run)
    # The engine then ran all ops whole. That is no error in a step, but a plan must not count on it.
    if not in_slices:
        raise PlanError(f"the stretch of unit {d.unit!r} that ends with {d.sites[-1]} cannot run in slices.")
    # The record serves all stretches of this kind, so it has the positions of inputs, and not their storages.
    number = {s: i for i, s in enumerate(_input_storages(program, stretch))}
    # An op of a slice counts for all slices that it stands for.
    ops = tuple(
        msgspec.structs.replace(op, recomputable=False)
        for op in sampled.counted(piece.ops, rehearsal.n_ops - len(piece.ops))
    )
    piece = replace(piece, ops=ops)
    return LoopRecord(
        piece, tuple(number[s] for s, _ in inputs.bases), allocations, _peak_bytes(program, piece)
    )


def _collected(
    program: Program, stretch: PlacedStretch, loop: Stretch, inputs: _LoopInputs, rehearsal: Rehearsal
) -> tuple[list[torch.Tensor], tuple[Op, ...]]:
    """Defer the ops of a stretch; return the buffers of its exits, and the ops that make them."""
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
        made = list(tensors_in(put_off))
        tensors.update(zip(op.outputs, made, strict=True))
        buffers += [made[position] for position in kept]
        allocations += [each for each in seen.ops if each.name == _EMPTY]
        del made, put_off, args, kwargs  # the loop keeps a tensor for as long as somebody refers to it
    return buffers, tuple(allocations)


def _peak_bytes(program: Program, loop: Piece) -> int:
    """Return the most that is alive at once of what a loop makes: its events, folded from nothing."""
    draft = PatchBuilder(program)
    known: dict[int, int] = {}
    events = draft.put(loop.events, loop.ops, _indices(draft, loop, known))
    # Nothing is alive at first: the inputs and the buffers of the exits belong to the step around the loop.
    fold, most = Fold(program, draft.patch(), initial=()), 0
    for code, arg in events:
        fold.step(code, arg)
        most = max(most, fold.noted)
    return most


def _indices(draft: PatchBuilder, loop: Piece, known: dict[int, int]) -> Indices:
    """Return where storages and tensors of a loop are in a program. Those that are not known are added."""
    storage = draft.numbering(known, loop.sizes)

    def tensor(index: int) -> int:
        found = loop.tensors[index]
        return draft.tensors.add(msgspec.structs.replace(found, storage=storage(found.storage)))

    return Indices(storage, tensor=tensor)


def _input_storages(program: Program, stretch: PlacedStretch) -> list[int]:
    return list(dict.fromkeys(program.tensors[t].storage for t in stretch.inputs))


# --- the patch ------------------------------------------------------------------------------------------


class _LoopRewriter:
    """Puts loops in the place of the ops of stretches.

    Attributes:
        freed: by storage, where it is freed.
    """

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
                # Of a buffer that ops write in place the last version stays, and its free is that of the buffer.
                if flow.origin[s] not in buffers or s not in exits.values():
                    self._drop(s)
            # A view of a buffer is made where the step makes it. All else happens in the loop.
            if flow.computes[i] or not any(flow.origin[flow.storage[t]] in buffers for t in op.inputs):
                events[position] = ()
        # One for each exit, in the order in which ``_collected`` met them.
        allocations = iter(record.allocations)
        for i in stretch.members:
            for output in stretch.exits.get(i, ()):
                at = int(positions[i])
                made = self._buffer(i, flow.outputs[i][output], exits[i, output], next(allocations))
                events[at] = (*events[at], (_OP, made))
        # The loop reads at the end what its ops read before, so the step may not have freed it by then.
        after = self._inputs_freed(stretch, end)
        storages = [*_input_storages(program, stretch), *exits.values()]
        events[end] = (*events[end], *self._loop(stretch, record, storages), *after)

    def _drop(self, storage: int) -> None:
        """Remove the free of a storage that is never made; one that outlives the step has none."""
        at = self.freed.get(storage)
        if at is not None:
            self.draft.events[at] = ()

    def _exits(self, stretch: PlacedStretch) -> dict[tuple[int, int], int]:
        """Return by (op, output) the last version of the storage of an exit."""
        program, flow = self.program, self.flow
        found = {}
        for i in stretch.members:
            for output in stretch.exits.get(i, ()):
                if output >= len(flow.outputs[i]):
                    raise PlanError(f"{program.ops[i].name} does not return as many tensors as a plan says.")
                found[i, output] = flow.storage[flow.outputs[i][output]]
        # Members are in order, so later versions of a storage replace earlier ones.
        latest = {flow.origin[s]: s for i in stretch.members for s in program.ops[i].writes}
        return {key: latest.get(flow.origin[s], s) for key, s in found.items()}

    def _buffer(self, op: int, tensor: int, storage: int, allocation: Op) -> int:
        """Add the op that makes the buffer of an exit, where the op stood that returns it."""
        view = self.program.tensors[tensor]
        index = self.draft.tensors.add(msgspec.structs.replace(view, storage=storage))
        return self.draft.ops.add(
            msgspec.structs.replace(
                allocation, scope=self.program.ops[op].scope, writes=(storage,), outputs=(index,)
            )
        )

    def _inputs_freed(self, stretch: PlacedStretch, end: int) -> list[tuple[int, int]]:
        """Let inputs that were freed before the loop be freed after it; return these events."""
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
        """Add the recorded loop; ``storages``: those of its inputs, then those of its exits."""
        inputs = [storages[i] for i in record.inputs]
        exits = storages[len(storages) - len(record.allocations) :]
        known = dict(zip(record.loop.given, (*inputs, *exits), strict=True))
        scope = self.program.ops[stretch.end].scope
        ops = [msgspec.structs.replace(op, scope=scope) for op in record.loop.ops]
        return self.draft.put(record.loop.events, ops, _indices(self.draft, record.loop, known))
