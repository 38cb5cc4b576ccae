"""The step of one rank while it is written: what takes the place of each recorded event.

The events are gone through in order, and those of the current position are collected. Only positions whose events
differ from the recorded ones become part of the patch. An event that is already written can still be replaced
(``amend``): reducing a tensor that autograd has saved changes the ``PACK`` of it that came before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from sacplan._program.program import Event, Op, Phase, Program, StorageKind, Tensor
from sacplan._program.rewriting import PatchBuilder
from sacplan._record.rehearsal import Piece
from sacplan._shard.costs import Costs
from sacplan._shard.recorded import collective_named

_FREE, _OP = int(Event.FREE), int(Event.OP)
_WAIT = "_c10d_functional.wait_tensor.default"
_RESHAPE = "aten.reshape.default"


class Written(NamedTuple):
    """Where an event was written: the recorded position whose place it takes, and its number there."""

    position: int
    number: int


class RankDraft:
    """Writes the patch of one rank.

    Args:
        program: the recorded step of the whole model.
        costs: of collectives on the mesh.

    Attributes:
        program: see above.
        tensors, ops, storage_bytes: as in ``PatchBuilder``: those of the program, changed, and new ones.
    """

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program = program
        self.builder = PatchBuilder(program)
        self.tensors = self.builder.tensors
        self.ops = self.builder.ops
        self.storage_bytes = self.builder.storage_bytes
        self._costs = costs
        self._position = -1  # before the first event
        self._out: list[tuple[int, int]] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # by storage, the ops that write it

    # --- events -------------------------------------------------------------------------------------------

    def begin(self, position: int) -> None:
        """Go on to a position: what is written from here on takes the place of its event."""
        self._end()
        self._position, self._out = position, []

    def _end(self) -> None:
        events = tuple(self._out)
        # A position that keeps its event is no part of the patch.
        if self._position >= 0 and events != self.program.events[self._position : self._position + 1]:
            self.builder.events[self._position] = events

    def write(self, code: int, arg: int) -> Written:
        """Write an event."""
        self._out.append((code, arg))
        return Written(self._position, len(self._out) - 1)

    def amend(self, written: Written, code: int, arg: int) -> None:
        """Write another event in the place of one that is there."""
        position, number = written
        if position == self._position:  # not yet among the events of the builder
            self._out[number] = code, arg
            return
        events = list(self.builder.events.get(position, self.program.events[position : position + 1]))
        events[number] = code, arg
        self.builder.events[position] = tuple(events)

    def run(self, index: int) -> None:
        """Write that an op runs."""
        self.write(_OP, index)
        for storage in self.ops[index].writes:
            self._writers[storage].append(index)

    def free(self, storages: Iterable[int]) -> None:
        """Write that code lets go of storages."""
        for storage in storages:
            self.write(_FREE, storage)

    def finished(self) -> PatchBuilder:
        """Return the builder with all that was written."""
        self._end()
        return self.builder

    # --- storages -----------------------------------------------------------------------------------------

    def is_recorded(self, storage: int) -> bool:
        """Whether a storage is one of the recorded step, and not one that the rank adds."""
        return storage < len(self.program.storage_bytes)

    def swap_kinds(self, old: int, new: int) -> None:
        """Give a storage the kind of the one whose place it takes."""
        kinds = self.builder.storage_kinds
        # What leaves its place is alive only until it is freed.
        kinds[new], kinds[old] = kinds[old], StorageKind.TEMPORARY

    def forbid_recomputation(self, storage: int) -> None:
        """Keep what is on a storage: no plan may discard it and run its ops again."""
        # The ops of the rank that were written so far, not those of the recording.
        for writer in self._writers[storage]:
            self.change_op(writer, recomputable=False)

    def change_op(self, index: int, **fields: object) -> None:
        """Change fields of an op."""
        self.ops[index] = msgspec.structs.replace(self.ops[index], **fields)

    # --- what ran on fake tensors ---------------------------------------------------------------------------

    def put(
        self,
        piece: Piece,
        given: Sequence[int],
        like: Op,
        results: Mapping[int, int] | None = None,
        main: int | None = None,
    ) -> dict[int, int]:
        """Write a piece: its ops, and what they allocate and free.

        Args:
            piece: what ran.
            given: by input of the piece, its storage in the program.
            like: the op that it runs for: its phase and its module are those of all ops of the piece.
            results: storages of the program by storages of the piece, for outputs that were recorded.
            main: the recorded op that one op of the piece becomes (``_carrier``); the others are new.

        Returns:
            By storage of the piece, that of the program.
        """
        known = {**(results or {}), **dict(zip(piece.given, given, strict=True))}
        for s, recorded in (results or {}).items():
            # An output on an input's storage has its size already.
            if s not in piece.given:
                self.storage_bytes[recorded] = piece.sizes[s]
        storage = self.builder.numbering(known, piece.sizes)
        # The recorded op must stay one op, since saved tensors and recipes refer to it by its index.
        carrier = _carrier(piece, like) if main is not None else -1
        # The piece's own events: ops, and what they allocate and free between them. Storages are renumbered
        # on the way.
        for code, arg in piece.events:
            if code == _OP:
                op = piece.ops[arg]
                found = msgspec.structs.replace(
                    like,
                    name=op.name,
                    time_ms=self._time_ms(op, piece),
                    flops=op.flops,
                    workspace_bytes=op.workspace_bytes,
                    reads=tuple(map(storage, op.reads)),
                    writes=tuple(map(storage, op.writes)),
                    mutates=tuple(map(storage, op.mutates)),
                    arguments=op.arguments,
                )
                if arg == carrier and main is not None:
                    # ``found`` keeps the outputs and the state of the recorded op; its tensors are given.
                    inputs = like.inputs if op.name == like.name else self._inputs(piece, op, storage)
                    self.ops[main] = msgspec.structs.replace(found, inputs=inputs)
                    self.run(main)
                else:
                    # What is beside it in the backward pass is no part of a recipe.
                    new = msgspec.structs.replace(
                        found,
                        recomputable=op.recomputable and like.phase == Phase.FORWARD,
                        state_bytes=0,
                        replaces=-1,
                        inputs=self._inputs(piece, op, storage),
                        outputs=(),
                    )
                    self.run(self.ops.add(new))
            elif code in (Event.ALLOC, Event.FREE):
                self.write(code, storage(arg))
        for t in piece.made:  # an output may lie on a storage that no op of the piece writes
            storage(t.storage)
        return known

    def add_tensor(self, made: Tensor, storages: Mapping[int, int]) -> int:
        """Add a tensor that a piece has made; ``storages`` as ``put`` returned them."""
        return self.tensors.add(msgspec.structs.replace(made, storage=storages[made.storage]))

    def _inputs(self, piece: Piece, op: Op, storage: Callable[[int], int]) -> tuple[int, ...]:
        """Add the tensors that an op of a piece reads."""
        taken = (piece.tensors[t] for t in op.inputs)
        return tuple(self.tensors.add(msgspec.structs.replace(t, storage=storage(t.storage))) for t in taken)

    def _time_ms(self, op: Op, piece: Piece) -> float:
        """Return the time of an op; a collective takes what the links of its axis take, and nothing is waited for."""
        # ``wait_tensor`` follows each functional collective. The collective's own op has all the time.
        if op.name == _WAIT:
            return 0.0
        kind = collective_named(op.name)
        if kind is None:
            return op.time_ms
        args, _ = op.call
        # ``Costs.collective_ms`` takes the full buffer: the larger one of input and output.
        (buffer,) = op.reads if kind in ("reduce_scatter", "all_reduce") else op.writes
        n_bytes, axis = piece.sizes[buffer], int(args[-1])  # pieces name process groups by their axis
        if kind == "all_to_all":  # costs want the bytes of all ranks together
            n_bytes *= self._costs.mesh.ranks[axis]
        return self._costs.collective_ms(kind, n_bytes, axis)


def _carrier(piece: Piece, like: Op) -> int:
    """Return which op of a piece stands for the recorded one: that of its name, or the last that makes its output.

    A piece may hold other ops beside it: a mean is scaled, a view is made by ``reshape``, the norm of a cut tensor
    comes from several ops.
    """
    for index, op in enumerate(piece.ops):
        if op.name in (like.name, _RESHAPE):
            return index
    makers = [
        index for index, op in enumerate(piece.ops) if piece.made and piece.made[0].storage in op.writes
    ]
    return makers[-1] if makers else len(piece.ops) - 1
