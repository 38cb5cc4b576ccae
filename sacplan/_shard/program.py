"""The program of one rank: the recorded step of the whole model, with its ops spread over a mesh.

    rank = on_one_rank(program, homes, places, mesh, device)

Each op takes the layouts that its inputs have by then, runs as ``choose`` says, and its outputs have the layouts that
follow: as on the ranks. How large things are is not worked out but seen: the executor's own code runs on fake tensors
of the sizes of a rank, once for each different call. A redistribution is ops in front of the one that needs it.

This is a step that sacplan runs. FSDP2 and DDP gather and reduce at other times, see ``sacplan/_ranks``.

Who holds what when does not change, but for what is added: copies that a redistribution made, and gradients, which a
hook moves to the layout of their parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch

from sacplan._device.devices import DeviceSpec
from sacplan._program.calls import Opaque, call_with
from sacplan._program.program import ROOT_SCOPE, Event, Op, Phase, Program, StorageKind, Tensor
from sacplan._program.rewriting import PatchBuilder
from sacplan._record.rehearsal import Piece, Rehearsal
from sacplan._shard.choose import CallSharding, choose
from sacplan._shard.copies import Copies
from sacplan._shard.costs import Costs, sent_along
from sacplan._shard.executor.prepare import RESHAPES, changes_shape
from sacplan._shard.mesh import Mesh
from sacplan._shard.optimizer import optimizer_state
from sacplan._shard.overlap import Overlap
from sacplan._shard.placements import REPLICATED, Placements, WantedPlacements, is_reduced, local_shape
from sacplan._shard.places import CallPattern, CallPatterns
from sacplan._shard.recorded import collective_named
from sacplan._shard.redistribute import kept, redistribute
from sacplan._shard.strategies import local_call
from sacplan._shard.views import Views
from sacplan._torch.calls import Call
from sacplan._torch.collectives import all_reduce
from sacplan._torch.ops import READS_NUMBER, aten_names, op_named
from sacplan._torch.private import below_autograd, fake_failures_unlogged
from sacplan.errors import PlanError

_FREE, _OP = int(Event.FREE), int(Event.OP)
_OF_UNKNOWN_SIZE = aten_names("mkldnn_rnn_layer")
"""Ops with an output whose size only the kernel knows."""


def on_one_rank(
    program: Program,
    homes: Mapping[int, Placements],
    places: Sequence[CallPattern],
    mesh: Mesh,
    device: DeviceSpec,
) -> Program:
    """The step of one rank.

    Args:
        program: of the whole model on one device, as it was recorded.
        homes: by storage of a parameter, where it lies. The others are replicated.
        places: what inputs of some ops are moved to.
        mesh: the ranks.
        device: what each of them is.

    Raises:
        PlanError: an op cannot run so.
    """
    rank = _Rank(program, homes, places, mesh, device)
    try:
        with fake_failures_unlogged():  # they are part of the error below
            return rank.program()
    except (IndexError, RuntimeError, TypeError, ValueError) as error:  # the op does not accept these tensors
        said = str(error).partition("\n")[0].rstrip(".")
        raise PlanError(
            f"{rank.running} cannot run on mesh {mesh} as it was recorded: {said}. Change this in the model, or plan "
            "without a mesh; if the profile was made by another version of PyTorch, make it again."
        ) from error


@dataclass(frozen=True, slots=True)
class Meta:
    """A whole tensor, as strategies see it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Known(NamedTuple):
    """Parts by what they depend on."""

    calls: dict[Any, tuple[CallSharding, Piece]]
    redistributions: dict[Any, Piece]

    @classmethod
    def nothing(cls) -> _Known:
        """At first."""
        return cls({}, {})


class _Rank:
    """Goes through the events once and rewrites each op for a rank."""

    def __init__(
        self,
        program: Program,
        homes: Mapping[int, Placements],
        places: Sequence[CallPattern],
        mesh: Mesh,
        device: DeviceSpec,
    ) -> None:
        self.r = program
        self.mesh = mesh
        self.device = device
        self.costs = Costs.of(mesh, device)
        self.whole: Placements = (REPLICATED,) * len(mesh.axes)
        self.places = CallPatterns(places)
        self.layouts: dict[int, Placements] = {}  # of tensors
        self.weights: set[int] = set()  # tensors that are parameters, or made of nothing else
        self.draft = PatchBuilder(program)
        self.tensors, self.ops, self.sizes = self.draft.tensors, self.draft.ops, self.draft.storage_bytes
        self.out: list[tuple[int, int]] = []  # what takes the place of the event that is looked at
        self.ran: Counter[tuple[int, str]] = Counter()  # ops on tensors that are placed, by module call
        self.versions: dict[int, int] = defaultdict(int)  # of storages, by writes in place
        self.moved: dict[int, int] = {}  # recorded storages to those that have taken their place
        self.recorded_as: dict[int, int] = {}  # the inverse
        self.packed: dict[int, list[int]] = defaultdict(list)  # by tensor, handles of what it is now
        self.packed_as: dict[int, tuple[Placements, Tensor, list[int]]] = {}  # by handle, these of its tensor
        self.packed_at: dict[int, tuple[list[tuple[int, int]], int]] = {}  # by handle, the event, in these
        self.viewed: set[int] = set()  # storages of copies that have views
        self.freed_with: dict[int, list[int]] = defaultdict(list)  # by recorded storage, these
        self.writers: dict[int, list[int]] = defaultdict(list)  # by storage, ops
        self.views = program.derived(("views",), lambda: Views(program))
        self.due: dict[int, list[int]] = defaultdict(list)  # by op, storages that nothing uses after it
        self.bases: dict[int, int] = {}  # by handle, one on what its tensor is a view of
        self.homes = {
            s: homes.get(s, self.whole)
            for s, kind in enumerate(program.storage_kinds)
            if kind == StorageKind.PARAMETER
        }
        self.gradient_of = {program.gradients[s]: s for s in self.homes if s in program.gradients}
        self.last_of = self._last_of_gradients()
        self.complete: list[tuple[Op, int]] = []  # gradients whose hooks are due
        self.copies: Copies[int] = Copies()
        self.ahead: set[int] = set()  # collectives that gather parameters
        self.behind: set[int] = set()  # collectives that reduce gradients
        self.index, self.running = -1, "the step"  # the op
        # What was seen on this mesh is the same for other homes and places.
        self.seen, self.redistributions = program.derived(("parts", mesh, device), _Known.nothing)
        self.metas = [Meta(t.shape, getattr(torch, t.dtype)) for t in program.tensors]
        self.rehearsal = Rehearsal(program, device)

    # --- the whole ----------------------------------------------------------------------------------------

    def program(self) -> Program:
        """See ``on_one_rank``."""
        r = self.r
        for storage in self.homes:
            self._resize(storage, self.homes[storage])
        for storage, layout in optimizer_state(r, self.homes).items():
            self.homes[storage] = layout
            self._resize(storage, layout)
        self.phase = Phase.FORWARD
        placed: list[list[tuple[int, int]]] = []  # by position
        with self.rehearsal.running():
            for code, arg in r.events:
                self.out = []
                placed.append(self.out)
                self._step(code, arg)
            self.out = []
            placed.append(self.out)
            self._move_gradients()
            self._drop_copies()
        as_before = [*([event] for event in r.events), []]
        pairs = enumerate(zip(placed, as_before, strict=True))
        self.draft.events.update((at, tuple(now)) for at, (now, before) in pairs if now != before)
        self._hide_collectives()
        return r.with_(self.draft.patch()).renumbered()

    def _step(self, code: int, arg: int) -> None:
        """One event of the program."""
        r = self.r
        if code in (_OP, Event.UNPACK):
            self._move_gradients()  # the node that made them is done, and has let go of what it read
        if code == _OP:
            if r.ops[arg].phase != self.phase:
                self._drop_copies()
                self.phase = r.ops[arg].phase
            self._run(arg)
            self.out.extend((_FREE, storage) for storage in self.due.pop(arg, ()))
            self.complete = [(r.ops[arg], gradient) for gradient in self.last_of.get(arg, ())]
        elif code == _FREE:
            self._free(arg)
        else:
            if code == Event.EXIT and not r.scopes[arg].fqn:  # the model's forward ends
                self._drop_copies()
            self.out.append((code, arg))
            if code == Event.PACK:
                self._pack(arg)
            elif code == Event.UNPACK:
                self._unpack(r.instance_handles[arg])
            elif code == Event.RELEASE:
                self.packed_at.pop(arg, None)
                if arg in self.bases:
                    self.out.append((code, self.bases.pop(arg)))

    def _hide_collectives(self) -> None:
        """Gathers of parameters run one ahead of computation, and reductions of gradients behind it."""
        clock = Overlap(self.costs)
        since, reduced, last = 0.0, 0.0, -1
        order = [arg for code, arg in self.draft.stream() if code == _OP]
        for index in order:
            op = self.ops[index]
            if index in self.ahead:
                end = clock.send(op.time_ms, since)
                self.ops[index] = msgspec.structs.replace(op, time_ms=clock.wait(end))
                since = clock.now
            elif index in self.behind:
                reduced, last = clock.send(op.time_ms), index
                self.ops[index] = msgspec.structs.replace(op, time_ms=0.0)
            else:
                if op.phase == Phase.OPTIMIZER and last >= 0:
                    self._wait(last, clock.wait(reduced))
                    last = -1
                clock.compute(op.time_ms)
        if last >= 0:
            self._wait(last, clock.wait(reduced))

    def _wait(self, index: int, ms: float) -> None:
        self.ops[index] = msgspec.structs.replace(self.ops[index], time_ms=ms)

    # --- one op -------------------------------------------------------------------------------------------

    def _run(self, index: int) -> None:
        op = self.r.ops[index]
        self.running, self.index = f"{op.name} in {self._module(op)}", index
        if op.name == READS_NUMBER:
            return  # the few bytes that ranks would add up for it are left out
        if name := out_of_place(op):
            op = msgspec.structs.replace(op, name=name, mutates=())
        have = [self._layout(t) for t in op.inputs]
        if op.mutates and self._changes_shape_of_placed(op):
            raise PlanError(
                f"{self._module(op)} cannot be spread over mesh {self.mesh}: {op.name} changes the shape of a tensor "
                "in place. nn.GRU, nn.LSTM and nn.RNN do so with batch_first=True: build them without it, and "
                "transpose what goes in and comes out. In code of your own, make a new tensor (transpose instead of "
                "transpose_)."
            )
        if all(layout is None for layout in have):
            self._append(index)  # of plain tensors: every rank does the same
            return
        layouts = tuple(self.whole if layout is None else layout for layout in have)
        asked = self._asked(op) if op.phase == Phase.FORWARD else None
        local = tuple(_layout_of(self.tensors[t]) for t in op.inputs)
        shapes = tuple(_layout_of(self.r.tensors[t]) for t in (*op.inputs, *op.outputs))
        weights = tuple(t in self.weights for t in op.inputs)
        key = (op.name, op.arguments, layouts, local, shapes, asked, weights)
        if key not in self.seen:
            self.seen[key] = self._rehearsed(op, layouts, asked, weights)
        choice, part = self.seen[key]
        given: list[int] = []
        passing: list[int] = []  # copies that no other op uses
        for t, target in zip(op.inputs, choice.inputs, strict=True):
            source = self._layout(t) or self.whole
            given.append(
                t if source == target else self._redistributed(op, t, source, target, given, passing)
            )
        like = msgspec.structs.replace(op, inputs=tuple(given))
        results = {
            made.storage: self.r.tensors[t].storage
            for t, made in zip(op.outputs, part.made, strict=True)
            if self.r.tensors[t].storage in op.writes
        }
        storages = self._emit(part, [self.tensors[t].storage for t in given], results, like, index)
        if op.replaces >= 0:
            self._make_version(index, op, part, storages)
        for storage in self.ops[index].mutates:
            self.versions[storage] += 1
        if op is not self.r.ops[index]:
            (made,) = part.made
            new = self.tensors.add(msgspec.structs.replace(made, storage=storages[made.storage]))
            self._replace(op.inputs[0], new, choice.outputs[0])
            self._free_copies(passing)
            for same in (op.outputs[0], op.inputs[0]):  # before this version, and after it
                self.layouts[same], self.tensors[same] = choice.outputs[0], self.tensors[new]
            return
        for t, made, layout in zip(op.outputs, part.made, choice.outputs, strict=True):
            if t not in op.inputs:
                self.packed.pop(t, None)
            recorded, storage = self.r.tensors[t].storage, storages[made.storage]
            self.layouts[t] = layout
            self.tensors[t] = msgspec.structs.replace(made, storage=storage)
            if storage != self.moved.get(recorded, recorded):
                self._view_of_copy(storage, recorded)
        self._free_copies(passing)
        if all(weights):
            self.weights.update(op.outputs)

    def _changes_shape_of_placed(self, op: Op) -> bool:
        """Whether an op changes the shape of a placed tensor in place; after it the recording has another tensor."""
        func = op_named(op.name)
        if func is None or not changes_shape(func):
            return False
        return any(self.r.tensors[t].storage in op.mutates for t in self.layouts)

    def _make_version(self, index: int, op: Op, part: Piece, storages: dict[int, int]) -> None:
        """An op that writes in place makes a new version of a storage (``Op.replaces``), as it was recorded."""
        (version,), (made,) = op.writes, part.made
        old = storages[made.storage]
        self.sizes[version] = self.sizes[old]
        storages[made.storage] = version
        self.ops[index] = msgspec.structs.replace(
            self.ops[index], writes=(version,), mutates=(), replaces=old
        )

    def _asked(self, op: Op) -> tuple[WantedPlacements | None, ...] | None:
        """What a place of the plan asks for at an op of the forward pass."""
        if op.scope == ROOT_SCOPE:
            return None
        occurrence = self.ran[op.scope, op.name]
        self.ran[op.scope, op.name] += 1
        place = self.places.find(self.r.scopes[op.scope].fqn, op.name, occurrence)
        return None if place is None else tuple(place.asked(len(op.inputs)))

    def _module(self, op: Op) -> str:
        fqn = self.r.scopes[op.scope].fqn if op.scope != ROOT_SCOPE else ""
        return f"module {fqn!r}" if fqn else "the model"

    def _rehearsed(
        self,
        op: Op,
        have: tuple[Placements, ...],
        asked: Sequence[WantedPlacements | None] | None,
        weights: Sequence[bool],
    ) -> tuple[CallSharding, Piece]:
        """What runs for an op on tensors that lie so."""
        func = op_named(op.name)
        if func is None:
            raise PlanError(f"op {op.name} of the recording is not there in this version of PyTorch.")
        try:
            args, kwargs = call_with(op.arguments, [self.metas[t] for t in op.inputs])
        except Opaque as error:
            raise PlanError(f"{op.name} cannot run on a mesh: {error}") from error
        if func._schema.name in _OF_UNKNOWN_SIZE:
            raise PlanError(
                f"{self._module(op)} cannot be spread over mesh {self.mesh}: how large the workspace of {op.name} is "
                "for a rank is not known. Plan for a GPU (device='h100'), which runs another op, or without a mesh."
            )
        whole = Call(func, args, kwargs, [self.metas[t] for t in op.outputs])
        try:
            choice = choose(whole, have, self.mesh, asked, weights)
        except PlanError as error:
            raise PlanError(f"{self._module(op)} cannot be spread so: {error}") from error
        inputs = []
        for t, source, target in zip(op.inputs, have, choice.inputs, strict=True):
            local = self.tensors[t]
            if source != target:
                (local,) = self._redistribution(t, source, target).made
            inputs.append(self.rehearsal.like(local))
        local_args, local_kwargs = call_with(op.arguments, inputs)
        call = local_call(whole, choice.strategies, self.mesh)
        position = (0,) * len(self.mesh.axes)

        def run() -> Any:
            if func._schema.name in RESHAPES:
                return inputs[0].reshape(call.args(local_args)[1])
            return call.run(local_args, local_kwargs, _reduce, position)

        part = self._seen(inputs, run)
        if len(part.made) != len(op.outputs):
            raise PlanError(
                f"{op.name} returned {len(part.made)} tensors on a rank, and {len(op.outputs)} on one device."
            )
        return choice, part

    def _seen(self, inputs: Sequence[torch.Tensor], run: Callable[[], Any]) -> Piece:
        with below_autograd():  # as in the dispatch of a tensor
            return self.rehearsal.piece(inputs, run)

    def _emit(
        self,
        part: Piece,
        storages: Sequence[int],
        results: Mapping[int, int],
        like: Op,
        main: int | None = None,
    ) -> dict[int, int]:
        """Put what was seen into the program.

        Args:
            part: what runs.
            storages: of the program, by input.
            results: storages of the program for storages of the rehearsal.
            like: the op that it runs for.
            main: the op of the program that the op of its name becomes.

        Returns:
            Storages of the rehearsal to those of the program.
        """
        known = {**results, **dict(zip(part.given, storages, strict=True))}
        for s in results.keys() - set(part.given):
            self.sizes[results[s]] = part.sizes[s]
        storage = self.draft.numbering(known, part.sizes)
        carrier = _carrier(part, like) if main is not None else -1
        for code, arg in part.events:
            if code == _OP:
                op = part.ops[arg]
                found = msgspec.structs.replace(
                    like,
                    name=op.name,
                    time_ms=self._time_ms(op, part),
                    flops=op.flops,
                    workspace_bytes=op.workspace_bytes,
                    reads=tuple(map(storage, op.reads)),
                    writes=tuple(map(storage, op.writes)),
                    mutates=tuple(map(storage, op.mutates)),
                    arguments=op.arguments,
                )
                if arg == carrier and main is not None:
                    taken = like.inputs if op.name == like.name else self._taken(part, op, storage)
                    self.ops[main] = msgspec.structs.replace(
                        found, recomputable=like.recomputable, inputs=taken
                    )
                    self._append(main)
                else:
                    new = msgspec.structs.replace(
                        found,
                        recomputable=op.recomputable and like.phase == Phase.FORWARD,
                        state_bytes=0,
                        replaces=-1,
                        inputs=self._taken(part, op, storage),
                        outputs=(),
                    )
                    self._append(self.ops.add(new))
            elif code in (Event.ALLOC, Event.FREE):
                self.out.append((code, storage(arg)))
        for t in part.made:
            storage(t.storage)
        return known

    def _append(self, index: int) -> None:
        self.out.append((_OP, index))
        for storage in self.ops[index].writes:
            self.writers[storage].append(index)

    def _taken(self, part: Piece, op: Op, storage: Callable[[int], int]) -> tuple[int, ...]:
        """What an op of a rehearsal takes as tensors of the program."""
        taken = (part.tensors[t] for t in op.inputs)
        return tuple(self.tensors.add(msgspec.structs.replace(t, storage=storage(t.storage))) for t in taken)

    def _time_ms(self, op: Op, part: Piece) -> float:
        """A collective's time is that of its link."""
        if op.name == "_c10d_functional.wait_tensor.default":
            return 0.0
        kind = collective_named(op.name)
        if kind is None:
            return op.time_ms
        args, _ = op.call
        (whole,) = op.reads if kind in ("reduce_scatter", "all_reduce") else op.writes
        n_bytes = part.sizes[whole]
        axis = int(args[-1])
        if kind == "all_to_all":
            n_bytes *= self.mesh.ranks[axis]
        return self.costs.collective_ms(kind, n_bytes, axis)

    # --- redistributions ----------------------------------------------------------------------------------

    def _redistribution(
        self, tensor: int, source: Placements, target: Placements, *, keep: bool = False
    ) -> Piece:
        """``keep``: what is made holds no more than its part."""
        local, whole = self.tensors[tensor], self.r.tensors[tensor].shape
        key = (_layout_of(local), whole, source, target, keep)
        if key not in self.redistributions:
            x = self.rehearsal.like(local)
            groups = [str(axis) for axis in range(len(self.mesh.axes))]
            zero = (0,) * len(groups)

            def run() -> torch.Tensor:
                moved = redistribute(x, whole, source, target, self.mesh.ranks, groups, zero)
                return kept(moved) if keep else moved

            self.redistributions[key] = self._seen([x], run)
        return self.redistributions[key]

    def _redistributed(
        self,
        op: Op,
        tensor: int,
        source: Placements,
        target: Placements,
        given: Collection[int],
        passing: list[int],
    ) -> int:
        """A tensor that is a copy of one in another layout: made here, or kept since an op before.

        Args:
            op: that needs it.
            tensor, source, target: what it is a copy of, and the layouts.
            given: other inputs of the op, which holds them while it runs.
            passing: here those copies are added that are not kept after the op.
        """
        if is_reduced(source, target):
            summed = self._moved(op, tensor, source, target)
            if tensor in self.views:  # what it is a view of still has the summands
                self._replace_view(tensor, summed, target)
            else:
                self._replace(tensor, summed, target)
            return tensor
        key = (tensor, self.versions[self.tensors[tensor].storage], target)
        known = self.copies.find(key)
        if known is not None:
            return known
        axes = self._sent_along(tensor, source, target)
        gone = self.copies.make_room(axes)
        self._free_copies([copy for copy in gone if copy not in given])
        passing.extend(copy for copy in gone if copy in given)
        copy = self._moved(op, tensor, source, target)
        if axes:
            self.copies.keep(key, axes, copy)
        elif self.tensors[copy].storage != self.tensors[tensor].storage:
            passing.append(copy)
        return copy

    def _moved(
        self, op: Op, tensor: int, source: Placements, target: Placements, *, keep: bool = False
    ) -> int:
        part = self._redistribution(tensor, source, target, keep=keep)
        known = len(self.ops)
        storages = self._emit(part, [self.tensors[tensor].storage], {}, _inserted(op))
        hidden = (
            self.ahead if tensor in self.weights else self.behind if tensor in self.gradient_of else set()
        )
        hidden.update(i for i in range(known, len(self.ops)) if collective_named(self.ops[i].name))
        (made,) = part.made
        return self.tensors.add(msgspec.structs.replace(made, storage=storages[made.storage]))

    def _free_copies(self, copies: Sequence[int]) -> None:
        """Copies that are on a storage of their own; those that cut off a part are views."""
        n_recorded = len(self.r.storage_bytes)
        for storage in dict.fromkeys(self.tensors[copy].storage for copy in copies):
            if storage >= n_recorded and storage not in self.viewed:
                self.out.append((_FREE, storage))

    def _drop_copies(self) -> None:
        self._free_copies(self.copies.clear())

    def _view_of_copy(self, copy: int, recorded: int) -> None:
        """A view of a copy is alive as long as the tensor that it is a view of in the recorded step."""
        if copy >= len(self.r.storage_bytes) and copy not in self.viewed:
            self.viewed.add(copy)
            self.freed_with[recorded].append(copy)

    # --- gradients, and what is there before the step -------------------------------------------------------

    def _last_of_gradients(self) -> dict[int, list[int]]:
        """By op, the gradients that are complete after it: autograd then calls the hooks of their parameters.

        That is when all that one node computes is done.
        """
        ops, last = self.r.ops, dict[int, int]()
        for index, op in enumerate(ops):
            if op.phase == Phase.BACKWARD and op.name != "aten.detach.default":
                last.update((t, index) for t in op.outputs if t in self.gradient_of)
        found: dict[int, list[int]] = defaultdict(list)
        for tensor, index in sorted(last.items(), key=lambda each: -each[1]):
            end = index
            while end + 1 < len(ops) and _of_one_node(ops[index], ops[end + 1]):
                end += 1
            found[end].append(tensor)
        return found

    def _move_gradients(self) -> None:
        """What the hooks of parameters do: gradients get their layouts, and what was computed is freed."""
        for op, tensor in self.complete:
            target, source = self.homes[self.gradient_of[tensor]], self._layout(tensor)
            if source is None:
                raise PlanError(
                    f"{op.name} does not make the gradient that the recording has there: it is damaged. Make the "
                    "profile again."
                )
            if source != target:
                self._free_copies(self.copies.make_room(self._sent_along(tensor, source, target)))
                self._replace(tensor, self._moved(op, tensor, source, target, keep=True), target)
        self.complete = []

    def _sent_along(self, tensor: int, source: Placements, target: Placements) -> tuple[int, ...]:
        return sent_along(self.mesh.ranks, self.r.tensors[tensor].shape, source, target)

    def _replace(self, tensor: int, moved: int, layout: Placements) -> None:
        """What a tensor lay on is freed, and what was made of it takes its place, and its kind."""
        old, new = self.tensors[tensor].storage, self.tensors[moved].storage
        self.layouts[tensor] = layout
        self.tensors[tensor] = self.tensors[moved]
        if new == old:
            return
        kinds = self.draft.storage_kinds
        kinds[new], kinds[old] = kinds[old], StorageKind.TEMPORARY
        self._pack_again(tensor, old)
        recorded = self.recorded_as.pop(old, old)
        self.recorded_as[new], self.moved[recorded] = recorded, new
        self.out.append((_FREE, old))

    def _replace_view(self, tensor: int, moved: int, layout: Placements) -> None:
        """What was made of a view takes its place, and is freed where code would let go of the view."""
        old, new = self.tensors[tensor].storage, self.tensors[moved].storage
        self.layouts[tensor], self.tensors[tensor] = layout, self.tensors[moved]
        end = self.views.last_op_of(tensor, self.index)
        if end is None:
            self.freed_with[self.r.tensors[tensor].storage].append(new)
        else:
            self.due[end].append(new)
        self._pack_again(tensor, old)

    def _free(self, storage: int) -> None:
        """A recorded storage is let go: what has taken its place is."""
        self.out.append((_FREE, self.moved.pop(storage, storage)))
        for copy in self.freed_with.pop(storage, ()):
            self.out.append((_FREE, copy))

    def _layout(self, tensor: int) -> Placements | None:
        """Where a tensor lies; None if it is plain."""
        if tensor not in self.layouts:
            storage = self.r.tensors[tensor].storage
            if storage not in self.homes:
                return None
            self._place(tensor, self.homes[storage])
            if self.r.storage_kinds[storage] == StorageKind.PARAMETER:
                self.weights.add(tensor)
        return self.layouts[tensor]

    def _place(self, tensor: int, layout: Placements) -> None:
        """A tensor that is there before the step: a contiguous part."""
        whole = self.r.tensors[tensor]
        shape = local_shape(whole.shape, layout, self.mesh.ranks)
        stride = whole.stride
        if shape != whole.shape:
            stride = tuple(torch.empty(shape, device="meta").stride())
        self.layouts[tensor] = layout
        self.tensors[tensor] = msgspec.structs.replace(whole, shape=shape, stride=stride)

    def _resize(self, storage: int, layout: Placements) -> None:
        parts = prod(n for p, n in zip(layout, self.mesh.ranks, strict=True) if p.is_cut)
        self.sizes[storage] = self.device.round_up(-(-self.sizes[storage] // parts))

    def _pack(self, handle: int) -> None:
        """Autograd keeps a tensor, and with a view what that is a view of as far as autograd knows."""
        tensor = self.r.handle_tensors[handle]
        if tensor not in self.layouts:
            return
        self.draft.handle_storages[handle] = self.tensors[tensor].storage
        self.packed[tensor].append(handle)
        self._note(tensor, handle)
        self.packed_at[handle] = self.out, len(self.out) - 1
        self._pack_base(tensor, handle)

    def _note(self, tensor: int, handle: int) -> None:
        self.packed_as[handle] = self.layouts[tensor], self.tensors[tensor], self.packed[tensor]

    def _unpack(self, handle: int) -> None:
        """Views that are alike are one tensor of the program; of several, autograd has its own one back."""
        if handle in self.packed_as:
            tensor = self.r.handle_tensors[handle]
            self.layouts[tensor], self.tensors[tensor], self.packed[tensor] = self.packed_as[handle]

    def _pack_again(self, tensor: int, old: int) -> None:
        """What autograd keeps of a tensor is another storage from now on.

        Recipes for the old one do not make it, so neither is discarded.
        """
        for handle in self.packed.get(tensor, ()):
            if self.draft.handle_storages[handle] != old or handle not in self.packed_at:
                continue
            before = self._new_handle(handle, old)
            events, at = self.packed_at[handle]
            events[at] = (int(Event.PACK), before)
            self.out.append((int(Event.RELEASE), before))
            self.draft.handle_storages[handle] = self.tensors[tensor].storage
            self._note(tensor, handle)
            self.out.append((int(Event.PACK), handle))
            self.packed_at[handle] = self.out, len(self.out) - 1
            self._pack_base(tensor, handle)
            self._keep(old)
            self._keep(self.draft.handle_storages[handle])

    def _keep(self, storage: int) -> None:
        for writer in self.writers[storage]:
            self.ops[writer] = msgspec.structs.replace(self.ops[writer], recomputable=False)

    def _pack_base(self, tensor: int, handle: int) -> None:
        """That of a view of a copy is never discarded: the view would still hold it."""
        recorded, kept = self.r.tensors[tensor].storage, self.draft.handle_storages[handle]
        base = self.moved.get(recorded, recorded)
        if kept == base or handle in self.bases or not (kept in self.viewed or tensor in self.views):
            return
        self.bases[handle] = self._new_handle(handle, base)
        self.out.append((int(Event.PACK), self.bases[handle]))
        self._keep(base)

    def _new_handle(self, like: int, storage: int) -> int:
        return self.draft.new_handle(storage, self.draft.handle_ops[like])


def _carrier(part: Piece, like: Op) -> int:
    """Which of the ops that ran stands for the recorded one: that of its name, or that which makes its first output."""
    for index, op in enumerate(part.ops):
        if op.name in (like.name, _RESHAPE):
            return index
    makers = [index for index, op in enumerate(part.ops) if part.made and part.made[0].storage in op.writes]
    return makers[-1] if makers else len(part.ops) - 1


def _of_one_node(op: Op, following: Op) -> bool:
    return op.forward_of >= 0 and (op.phase, op.forward_of) == (following.phase, following.forward_of)


def out_of_place(op: Op) -> str:
    """The op that autograd runs on ranks where it was recorded to write in place; empty if that is the same one.

    On tensors of a subclass it adds up gradients, and makes those of ``weight[indices]``, without writes in place
    (``areAnyTensorSubclassLike`` in torch/csrc/autograd).
    """
    if op.phase != Phase.BACKWARD:
        return ""
    if op.name == "aten.add_.Tensor" and len(op.inputs) == 2 and op.arguments == _TWO_TENSORS:
        return "aten.add.Tensor"
    if op.name == "aten._index_put_impl_.default" and op.arguments.endswith(_ACCUMULATE):
        return "aten.index_put.default"
    return ""


_TWO_TENSORS = '[[{"tensor":0},{"tensor":1}],{}]'
_ACCUMULATE = "},true],{}]"
_RESHAPE = "aten.reshape.default"


def _reduce(t: torch.Tensor, axis: int) -> torch.Tensor:
    return all_reduce(t, "sum", str(axis))


def _inserted(op: Op) -> Op:
    """An op that runs where another one does, and is not that one."""
    return msgspec.structs.replace(op, state_bytes=0, replaces=-1, inputs=(), outputs=())


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride)
