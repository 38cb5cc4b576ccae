"""The program of one rank: the recorded step of the whole model, with its ops spread over a mesh.

    rank = on_one_rank(program, homes, places, mesh, device)

The events of the recorded step are gone through once, in order. At each op of tensors with layouts:

1. ``choose`` picks how it runs from the layouts that its inputs have by then, as it does on real ranks.
2. Inputs that must have another layout are redistributed in front of it (``rank/moves.py``).
3. The executor's own code runs on fake tensors of a rank's sizes, once for each different call
   (``rank/local_runs.py``). The ops that ran, with what they allocate and free, take the place of the recorded op
   (``rank/draft.py``): so sizes are observed, not computed.
4. The outputs get the layouts that follow.

Ops of plain tensors alone stay as they are: every rank does the same. Who holds a storage does not change either,
but for what a rank adds: copies in other layouts, which are freed by the rule of ``copies.py``, and tensors that were
reduced, whose sums take their place (``rank/storages.py``, ``rank/saved.py``). Gradients get the layouts of their
parameters where the hooks of these run (``rank/gradients.py``). At the end, collectives that may run beside computation
get the time that they are waited for (``rank/exposed.py``).

sacplan runs this step. FSDP2 and DDP gather and reduce at other times, see ``sacplan/_ranks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sacplan._device.devices import DeviceSpec
from sacplan._program.derived import derived
from sacplan._program.program import Event, Op, Phase, Program
from sacplan._record.rehearsal import Piece
from sacplan._shard.choose import CallSharding
from sacplan._shard.costs import Costs
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import Placements
from sacplan._shard.places import CallPattern
from sacplan._shard.rank.draft import RankDraft
from sacplan._shard.rank.gradients import GradientHooks
from sacplan._shard.rank.local_runs import LocalRuns, module_of
from sacplan._shard.rank.moves import Moves
from sacplan._shard.rank.saved import RankSavedTensors
from sacplan._shard.rank.storages import RankStorages
from sacplan._shard.rank.tensors import AskedLayouts, PlacedTensors
from sacplan._shard.views import Views
from sacplan._torch.fake_tensors import fake_failures_unlogged
from sacplan._torch.ops import READS_NUMBER, changes_shape, op_named
from sacplan.errors import PlanError


def on_one_rank(
    program: Program,
    homes: Mapping[int, Placements],
    places: Sequence[CallPattern],
    mesh: Mesh,
    device: DeviceSpec,
) -> Program:
    """Return the step of one rank.

    Args:
        program: of the whole model on one device, as it was recorded.
        homes: by storage of a parameter, its layout. The others are replicated.
        places: the calls whose inputs are redistributed first.
        mesh: the ranks.
        device: of each rank.

    Raises:
        PlanError: an op cannot run so.
    """
    rank = _Rank(program, homes, places, mesh, device)
    try:
        with fake_failures_unlogged():  # they are part of the error below
            return rank.rewritten()
    except (IndexError, RuntimeError, TypeError, ValueError) as error:  # the op does not accept these tensors
        said = str(error).partition("\n")[0].rstrip(".")
        raise PlanError(
            f"{rank.running} cannot run on mesh {mesh} as it was recorded: {said}. Change this in the model, or plan "
            "without a mesh; if the profile was made by another version of PyTorch, make it again."
        ) from error


@derived
def _views(program: Program) -> Views:
    return Views(program)


class _Rank:
    """Goes through the events once and rewrites each for a rank.

    Attributes:
        running: the op that runs, in words.
    """

    def __init__(
        self,
        program: Program,
        homes: Mapping[int, Placements],
        places: Sequence[CallPattern],
        mesh: Mesh,
        device: DeviceSpec,
    ) -> None:
        self._program, self._mesh, self._device = program, mesh, device
        self._costs = Costs.of(mesh, device)
        self._draft = draft = RankDraft(program, self._costs)
        self._placed = placed = PlacedTensors(draft, homes, mesh)
        self._asked = AskedLayouts(draft, places)
        self._runs = LocalRuns(program, mesh, device)
        self._storages = storages = RankStorages()
        views = _views(program)
        self._saved = RankSavedTensors(draft, placed, storages, views)
        self._gradients = GradientHooks(program, placed.homes)
        self._moves = Moves(draft, mesh, self._runs, placed, storages, self._saved, views, self._gradients)
        self._phase = Phase.FORWARD
        self.running = "the step"

    # --- events -------------------------------------------------------------------------------------------

    def rewritten(self) -> Program:
        """See ``on_one_rank``."""
        program = self._program
        # Parameters and state first: they are there before the first event.
        self._placed.shrink(self._device)
        with self._runs.rehearsal.running():
            for position, (code, arg) in enumerate(program.events):
                self._draft.begin(position)
                self._step(code, arg)
            # The last gradient may be complete at the very end; its hook runs after all events.
            self._draft.begin(len(program.events))
            self._run_hooks()
            self._moves.drop_copies()
        # Exposed times last: they depend on the order of all ops.
        builder = self._draft.finished()
        self._moves.hidden.expose(self._draft, self._costs)
        return program.with_(builder.patch()).renumbered()

    def _step(self, code: int, arg: int) -> None:
        if code in (Event.OP, Event.UNPACK):
            # The node that completed these gradients is done only when the next one begins: it has let go of what
            # it read, which the events before this one say.
            self._run_hooks()
        if code == Event.OP:
            op = self._program.ops[arg]
            # The executor drops its copies at the end of the forward and of the backward pass.
            if op.phase != self._phase:
                self._moves.drop_copies()
                self._phase = op.phase
            self._run(arg, op)
            self._draft.free(self._storages.freed_after(arg))
            self._gradients.has_run(arg, op)
        elif code == Event.FREE:
            self._draft.free(self._storages.freed(arg))
        elif code == Event.PACK:
            self._saved.pack(arg)
        elif code == Event.UNPACK:
            self._draft.write(code, arg)
            self._saved.unpack(self._program.instance_handles[arg])
        elif code == Event.RELEASE:
            self._saved.release(arg)
        else:
            if code == Event.EXIT and not self._program.scopes[arg].fqn:  # the forward of the model ends
                self._moves.drop_copies()
            self._draft.write(code, arg)

    def _run_hooks(self) -> None:
        """Run the hooks of the parameters whose gradients are complete: these get the layouts of the parameters."""
        due = self._gradients.due()
        # No gradient was completed by the op before.
        if due is None:
            return
        op, gradients = due
        for tensor in gradients:
            source = self._placed.layout(tensor)
            if source is None:
                raise PlanError(
                    f"{op.name} does not make the gradient that the recording has there: it is damaged. Make the "
                    "profile again."
                )
            self._moves.gradient(op, tensor, source)

    # --- one op -------------------------------------------------------------------------------------------

    def _run(self, index: int, recorded: Op) -> None:
        """Write what runs on a rank for a recorded op."""
        self.running = f"{recorded.name} in {module_of(self._program, recorded)}"
        if recorded.name == READS_NUMBER:
            return  # the few bytes that ranks would add up for it are left out
        name = out_of_place(recorded)
        op = msgspec.structs.replace(recorded, name=name, mutates=()) if name else recorded
        layouts = [self._placed.layout(t) for t in op.inputs]
        self._check_shapes_stay(op)
        if all(layout is None for layout in layouts):
            self._draft.run(index)  # of plain tensors: every rank does the same
            return
        # Plain tensors count as replicated, as in the executor.
        have = tuple(self._placed.replicated if layout is None else layout for layout in layouts)
        weights = tuple(t in self._placed.weights for t in op.inputs)
        local = [self._placed.local(t) for t in op.inputs]
        choice, piece = self._runs.call(op, local, have, self._asked.next(op), weights)
        # The order is that of the executor: redistribute, run, note what was written, place the outputs, free
        # what only this op needed.
        given, passing = self._moves.inputs(index, op, have, choice.inputs)
        storages = self._put(index, op, given, piece)
        # Before any later op looks for a copy: copies of what was overwritten must not be found.
        self._moves.has_written(self._draft.ops[index].mutates)
        if name:
            self._become(op, choice, piece, storages, passing)
            return
        for t, made, layout in zip(op.outputs, piece.made, choice.outputs, strict=True):
            # An op that returns its own input has not made it anew.
            if t not in op.inputs:
                self._saved.is_made_anew(t)
            full, storage = self._program.tensors[t].storage, storages[made.storage]
            self._placed.set(t, layout, msgspec.structs.replace(made, storage=storage))
            # A view of a copy is recorded on the storage of which the copy was made.
            if storage != self._storages.now(full) and not self._draft.is_recorded(storage):
                self._storages.add_view(storage, full)
        self._moves.free(passing)
        # Made of parameters alone, such as a transposed or cast weight: its gather can be prefetched, too.
        if all(weights):
            self._placed.weights.update(op.outputs)

    def _put(self, index: int, op: Op, given: Sequence[int], piece: Piece) -> dict[int, int]:
        """Write the piece of an op; returns storages of the program by those of the piece."""
        tensors = self._program.tensors
        results = {
            made.storage: tensors[t].storage
            for t, made in zip(op.outputs, piece.made, strict=True)
            if tensors[t].storage in op.writes
        }
        like = msgspec.structs.replace(op, inputs=tuple(given))
        on = [self._placed.storage(t) for t in given]
        storages = self._draft.put(piece, on, like, results, index)
        if op.replaces >= 0:  # it writes in place, which the recording has as a new version of the storage
            (version,), (made,) = op.writes, piece.made
            old = storages[made.storage]
            self._draft.storage_bytes[version] = self._draft.storage_bytes[old]
            storages[made.storage] = version
            self._draft.change_op(index, writes=(version,), mutates=(), replaces=old)
        return storages

    def _become(
        self,
        op: Op,
        choice: CallSharding,
        piece: Piece,
        storages: Mapping[int, int],
        passing: Sequence[int],
    ) -> None:
        """Have the output of an op that was recorded in place become the tensor that it wrote."""
        (made,), layout = piece.made, choice.outputs[0]
        new = self._draft.add_tensor(made, storages)
        self._moves.replace(op.inputs[0], new, layout)
        self._moves.free(passing)
        for same in (op.outputs[0], op.inputs[0]):  # the recording may name the tensor anew after the write
            self._placed.set(same, layout, self._placed.local(new))

    def _check_shapes_stay(self, op: Op) -> None:
        """Refuse an op that changes the shape of a placed tensor in place: after it, the recording has another tensor.

        Raises:
            PlanError: it does.
        """
        if not op.mutates:
            return
        func = op_named(op.name)
        # Unknown here, harmless, or of a plain tensor.
        if func is None or not changes_shape(func) or not self._placed.any_recorded_on(op.mutates):
            return
        raise PlanError(
            f"{module_of(self._program, op)} cannot be spread over mesh {self._mesh}: {op.name} changes the shape of a "
            "tensor in place. nn.GRU, nn.LSTM and nn.RNN do so with batch_first=True: build them without it, and "
            "transpose what goes in and comes out. In code of your own, make a new tensor (transpose instead of "
            "transpose_)."
        )


def out_of_place(op: Op) -> str:
    """Return the op that autograd runs on ranks where it was recorded to write in place; empty if that is the same one.

    On tensors of a subclass it adds up gradients, and makes those of ``weight[indices]``, without writes in place
    (``areAnyTensorSubclassLike`` in torch/csrc/autograd).
    """
    # In-place ops of the forward pass are the user's, and run in place.
    if op.phase != Phase.BACKWARD:
        return ""
    # ``can_accumulate_inplace`` in ``input_buffer.cpp`` is false for tensors of a subclass.
    if op.name == "aten.add_.Tensor" and len(op.inputs) == 2 and op.arguments == _TWO_TENSORS:
        return "aten.add.Tensor"
    if op.name == "aten._index_put_impl_.default" and op.arguments.endswith(_ACCUMULATE):
        return "aten.index_put.default"
    return ""


_TWO_TENSORS = '[[{"tensor":0},{"tensor":1}],{}]'
_ACCUMULATE = "},true],{}]"
