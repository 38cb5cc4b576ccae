"""Watch one training step and write down its recording: a dispatch mode, saved-tensor hooks, module hooks.

The recorder sees each dispatched op, and asks its parts, of which each follows one thing:

- ``storages.py``: storages, and when each is gone;
- ``tensor_table.py``: the tensors on them;
- ``module_calls.py``: the module call that an op belongs to;
- ``autograd_nodes.py``: the autograd node that runs, and the op of the forward pass that made it;
- ``saved_tensors.py``: what autograd keeps, told apart from what code holds;
- ``training_state.py``: parameters, gradients and the optimizer's state;
- ``in_place.py``: what the plain step would write in place;
- ``regenerated_views.py``: gradients of views that were written to;
- ``seen_ops.py``: ops that a fake step has had before.

All of them write into one list of events, in the order in which things happen. ``Recorder.program`` makes the program
of them when the step is over.

Cost: O(1) Python work per dispatched op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import torch

from sacplan.core.program import ROOT_SCOPE, Event, Op, Phase, Program, StorageKind
from sacplan.device.cost import fused_ms
from sacplan.device.devices import DeviceSpec
from sacplan.device.host_step import rank_step_ms
from sacplan.device.op_kernels import Call
from sacplan.device.workspace import formula_bytes, workspace_bytes
from sacplan.record.autograd_nodes import AutogradNodes, KeptNumbers
from sacplan.record.call_arguments import arguments_of, plain_tensors
from sacplan.record.executor_notes import noted
from sacplan.record.fake_data import DataRules
from sacplan.record.filled import only_filled
from sacplan.record.in_place import InPlaceWrites, plain_formulas
from sacplan.record.in_place_versions import in_place_versions
from sacplan.record.module_calls import ModuleCalls
from sacplan.record.regenerated_views import RegeneratedViews
from sacplan.record.saved_tensors import SavedMode, SavedTensors
from sacplan.record.seen_ops import Figures, SeenOp, SeenOps
from sacplan.record.settle import settled
from sacplan.record.storages import Storages
from sacplan.record.streams import Streams
from sacplan.record.tensor_table import TensorTable
from sacplan.record.training_state import TrainingState
from sacplan.record.unseen_writes import UnseenWrites
from sacplan.torch_compat import inductor
from sacplan.torch_compat.autograd import called_by_checkpoint, in_backward
from sacplan.torch_compat.distributed_modules import unwrapped
from sacplan.torch_compat.fake_tensors import ZERO_TENSOR, FakeTensorMode, active_fake_mode, fake_device_of
from sacplan.torch_compat.host_memory import TO_DEVICE, TO_HOST
from sacplan.torch_compat.local_tensors import Watching, has_local_parts, is_deferred
from sacplan.torch_compat.ops import (
    OpTraits,
    can_run_again,
    draws_numbers,
    is_composite,
    op_traits,
    run_in_parts,
    tensors_in,
)
from sacplan.torch_compat.private import (
    GENERATOR_STATE_BYTES,
    dispatch_modes,
    noted_generator_states,
    storage_resizes,
    without_torch_functions,
)

# Plain integers, which the event stream is made of.
_ALLOC, _FREE, _OP, _PACK = map(int, (Event.ALLOC, Event.FREE, Event.OP, Event.PACK))

_NUMBER_BYTES = 8
"""Size of the tensor that a Python number becomes."""

_LIFTS = torch.ops.aten.lift_fresh.default


def _reads_a_number(func: Any, read: Sequence[torch.Tensor]) -> bool:
    """Whether the step asks for the value of a float, such as that of its loss.

    Such an op has no output, and is recorded all the same: a chunk that would compute the value later has to compute
    it by this op, in a loop of its own.
    """
    return func is torch.ops.aten._local_scalar_dense.default and read[0].is_floating_point()


class Recorder(Watching):
    """Context manager: everything dispatched inside becomes a ``Program``.

    Args:
        spec: the device that the step would run on: its allocator, workspaces and links.
        cost: FLOPs and time in ms of each call of an op.
        saved: how tensors that autograd saves are treated, see ``saved_tensors.py``.
        rules: knows values of fake tensors; a tensor that is unpacked keeps them.
        tensors_only: count nothing that kernels, generators and Python numbers take, as PyTorch's MemTracker does.

    Attributes:
        storages, tensors: those that have been seen.
        training: parameters, gradients and the optimizer's state.

    Errors in the recorder's own bookkeeping are kept and raised on exit: an exception that starts
    inside a dispatch mode under FakeTensorMode can abort the interpreter.
    """

    def __init__(
        self,
        spec: DeviceSpec,
        cost: Callable[[Call], tuple[int, float]],
        saved: SavedMode,
        rules: DataRules | None = None,
        *,
        tensors_only: bool = False,
    ) -> None:
        super().__init__()
        # Numbers and generators count on a CPU only: for a GPU they are in the host's memory.
        on_gpu, on_cpu = (spec.kind == kind and not tensors_only for kind in ("cuda", "cpu"))
        self._spec = spec
        self._cost = cost
        self._tensors_only = tensors_only
        self._rules = rules
        self._events: list[tuple[int, int]] = []
        self._ops: list[Op] = []
        self._formulas: dict[int, tuple[int, int]] = {}  # op to what its backward formula takes
        self._seen_ops: SeenOps | None = None
        self._paused = 0
        self._error: Exception | None = None
        self.storages = Storages(spec, self._events, self._phase)
        self.tensors = TensorTable()
        self.training = TrainingState(self.storages, self.tensors, lambda: self._paused > 0, on_gpu=on_gpu)
        self._calls = ModuleCalls(
            events=self._events,
            n_ops=self._ops.__len__,
            bytes_of=self.storages.bytes_of,
            fail=self._fail,
            track_model=self.track_model,
        )
        self._numbers = KeptNumbers(
            spec.round_up(_NUMBER_BYTES) if on_cpu else 0, self._events, self.storages
        )
        self._nodes = AutogradNodes(self._numbers)
        self._in_place = InPlaceWrites()
        self._unseen = UnseenWrites()
        self._regenerated = RegeneratedViews(self.paused)
        self._saved = SavedTensors(
            saved,
            storages=self.storages,
            tensors=self.tensors,
            events=self._events,
            paused=self.paused,
            unpacks=self._nodes.follow,
            rules=rules,
        )
        self._nodes.runs = self._saved.node_runs
        self._streams = Streams(self._extend) if on_gpu else None
        self._state_bytes = spec.round_up(GENERATOR_STATE_BYTES) if on_cpu else 0
        self.storages.is_fake = active_fake_mode() is not None  # what is tracked before the step counts, too

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Whether Dynamo may compile below: only where the step is to run compiled."""
        return inductor.is_compiling_dry()

    # --- what is there before the step -------------------------------------------------------

    @without_torch_functions
    def track_model(self, model: torch.nn.Module) -> None:
        """Name the modules after ``model`` and count its parameters, buffers and gradients."""
        self._calls.name(unwrapped(model))
        self.training.track_model(model)

    @without_torch_functions
    def track_tensors(self, tensors: Iterable[torch.Tensor], kind: StorageKind = StorageKind.OTHER) -> None:
        """Count tensors that are alive from the start, such as the batch."""
        for t in tensors:
            self.storages.track(t, kind)

    # --- the context --------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        self._calls.__enter__()
        self.training.__enter__()
        self._saved.__enter__()
        self._watched = contextlib.ExitStack()
        self._watched.callback(setattr, noted, "deferred", noted.deferred)
        noted.deferred = self._deferred
        # Not around compiled code: Dynamo guards torch's functions, and would compile again.
        if not inductor.is_compiling_dry():
            self._watched.enter_context(noted_generator_states(self._took_state))
        self._watched.enter_context(storage_resizes(self.storages.resized))
        if self._streams is not None:
            self._watched.enter_context(self._streams)
        self.storages.is_recording = True
        self.storages.is_fake = active_fake_mode() is not None
        self._seen_ops = self._make_seen_ops()
        inductor.watchers.append(self)
        super().__enter__()
        return self

    def _make_seen_ops(self) -> SeenOps | None:
        """Return a cache of ops; None in a real step, and if another mode would not see ops that are looked up."""
        mode, *others = dispatch_modes() or (None,)
        between = [] if self._rules is None else [self._rules]
        return SeenOps(mode, self._rules) if isinstance(mode, FakeTensorMode) and others == between else None

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        inductor.watchers.remove(self)
        self._watched.close()
        self._saved.__exit__(exc_type, exc_value, traceback)
        self._calls.__exit__()
        self.training.__exit__()
        if exc_type is None:
            self.training.mark_late_kinds()
        self.storages.is_recording = False
        self._numbers.stop()
        self._seen_ops = None
        noted.latest = noted.again = -1  # also after an op that failed
        error, self._error = self._error, None
        if error is not None and exc_type is None:
            raise error

    @property
    def is_active(self) -> bool:
        """Whether it has been entered and not been left."""
        return self.storages.is_recording

    @property
    def checkpointed(self) -> tuple[str, ...]:
        """The modules whose forward ``torch.utils.checkpoint`` ran again."""
        return tuple(self._calls.checkpointed)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ops inside are not recorded; storages that they make are entered when used, or tracked."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def restart(self) -> None:
        """Begin a new record with what is alive now.

        The lists are emptied in place, since the parts share them.
        """
        self.training.mark_late_kinds()
        self._ops.clear()
        self._events.clear()
        self._formulas.clear()
        parts = (self._calls, self._nodes, self._numbers, self._in_place, self._unseen, self.storages)
        for part in (self.training, *parts):
            part.restart()

    def forget(self) -> None:
        """Let go of the model and the optimizer."""
        self._calls.forget()
        self.training.forget()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error

    # --- parts of a step ------------------------------------------------------------------------

    def seen(self) -> tuple[int, int]:
        """How many ops and events there were so far."""
        return len(self._ops), len(self._events)

    def seen_since(self, n_ops: int, n_events: int) -> tuple[list[Op], list[tuple[int, int]]]:
        """Return ops and events after the first ``n_ops`` and ``n_events``; in these, ops count from 0."""
        events = [(code, arg - n_ops if code == _OP else arg) for code, arg in self._events[n_events:]]
        return self._ops[n_ops:], events

    # --- ops ----------------------------------------------------------------------------------

    def _took_state(self, state: torch.Tensor) -> None:
        # Not while an op is recorded, when this mode is off the stack: then sacplan takes a state, to measure the op.
        if self._state_bytes and not self._paused and self in dispatch_modes():
            self.storages.track(state, StorageKind.OTHER)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = fake_device_of(func, args)  # first, since most calls are this one
        if device is not None:
            return device
        if is_deferred(types):
            self._deferred(func, types, args)
            return NotImplemented
        if is_composite(func):
            return run_in_parts(self, func, args, kwargs)
        # An op's output gets its ``grad_fn`` only after this mode has returned. So a number that autograd kept for the
        # previous op can be tied to its node only now.
        if self._numbers.latest is not None:
            try:
                self._numbers.follow_latest()
            except Exception as error:
                self._fail(error)
        kwargs = kwargs or {}
        seen_ops = self._seen_ops
        seen_op = None if seen_ops is None else seen_ops.look_up(func, args, kwargs)
        given: tuple[int, ...] = ()
        if seen_op is None and not self._paused and op_traits(func).resizes:
            # Before the op runs, which may change the shapes of what it is given.
            taken = plain_tensors(args, kwargs)
            given = self.tensors.indices(taken, [self.storages.of(t) for t in taken], None)
        known = None if seen_op is None else seen_op.outputs
        # The op's own errors come through here. Those of our bookkeeping, below, are kept for the exit: where autograd
        # called the op from C++, an exception may end the interpreter.
        out = func(*args, **kwargs) if seen_ops is None or known is None else seen_ops.make(known, args)
        call = Call(func, args, kwargs, out)
        try:
            if not self._paused:
                self._record(call, given, seen_op, looked_up=known is not None)
            elif seen_op is not None:
                # Not recorded, but ``seen_op`` remembers its figures: a step that only makes the optimizer's state runs
                # the same ops as the one that is recorded next.
                self._figures(call, seen_op)
        except Exception as error:
            self._fail(error)
        return out

    def _deferred(self, func: Any, types: Any, args: Any) -> None:
        """Note an op that is not recorded: one on local tensors follows, or it runs later, in slices.

        Autograd makes and runs its node as any other.
        """
        phase = None if self._paused else self._phase()
        if has_local_parts(types):
            self._in_place.defers(func)
            self._numbers.await_local(func, args)
            if phase is Phase.FORWARD:
                self._calls.note_dtensors()
        elif phase is Phase.FORWARD:
            self._numbers.keep(func, args, ())
        elif phase is Phase.BACKWARD:
            self._nodes.follow()

    def _figures(self, call: Call, seen_op: SeenOp | None) -> Figures:
        """Return what an op costs; ``seen_op`` keeps that, and how outputs are made."""
        if seen_op is not None and seen_op.figures is not None:
            return seen_op.figures
        flops, time_ms = self._cost(call)
        inside = 0 if self._tensors_only else workspace_bytes(self._spec, call)
        figures = Figures(flops, time_ms, self._spec.round_up(inside), arguments_of(call.args, call.kwargs))
        if seen_op is not None and self._seen_ops is not None:
            seen_op.figures = figures
            self._seen_ops.observe(seen_op, call)
        return figures

    def _record(self, call: Call, given: tuple[int, ...], seen_op: SeenOp | None, *, looked_up: bool) -> None:
        func, args, kwargs, out = call.func, call.args, call.kwargs, call.returned
        # The order matters: written storages and inputs are numbered before outputs are, so that an output on a storage
        # that is not known yet is one that the op made. ``n_storages`` is taken before all of them.
        traits = op_traits(func)
        n_storages = len(self.storages.nbytes)
        # A compiled graph is run as it is: nothing of it is rewritten, and none of its ops runs again.
        compiled = inductor.in_compiled_graph()
        written = plain_tensors(traits.written(args, kwargs)) if traits.written_names and not compiled else ()
        mutates = tuple(dict.fromkeys(map(self.storages.of, written)))
        # An op that can be looked up resizes nothing, and takes plain tensors only (``SeenOps``).
        if seen_op is None:
            for t in written:
                self.storages.resized(t.untyped_storage())
        taken = plain_tensors(args, kwargs) if seen_op is None else tensors_in((args, kwargs))
        taken_on, lent = self.storages.taken(taken, lifts=func is _LIFTS)
        lent |= func is ZERO_TENSOR
        if seen_op is None and self.storages.is_fake and func is not _LIFTS:
            self.storages.know_copies(func, taken, taken_on, out)
        outputs = tensors_in(out)
        made = outputs if looked_up else plain_tensors(outputs)
        host_bytes = self.storages.host_bytes_of(taken, taken_on) if func is not TO_DEVICE else 0
        made_on, writes = self.storages.made(made, lent, func is TO_HOST or host_bytes > 0)
        phase = self._phase()
        reads_number = _reads_a_number(func, taken) and phase is Phase.FORWARD
        if not outputs and not mutates and not reads_number:
            return  # a metadata query
        index = noted.latest = len(self._ops)
        figures = self._figures(call, seen_op)
        scope = self._scope(phase)
        running = self._nodes.running if phase is Phase.BACKWARD else None
        given_bytes = self._numbers.given_bytes(running, func, args)
        if not reads_number:  # autograd makes no node for it, and the next op has the same sequence number
            self._nodes.note_op(func, index)
        tensors = self.tensors.indices((*taken, *made), (*taken_on, *made_on), seen_op)
        # In place, the tensor must be what another op made, so that it can be made again up to this version. Out of
        # place, all results must be new.
        if traits.in_place:
            replayable = self.storages.is_as_made(args[0], mutates)
        else:
            replayable = bool(writes) and len(made) == len(outputs) and all(s in writes for s in made_on)
        time_ms = rank_step_ms(host_bytes, self._spec) if host_bytes else figures.time_ms
        if self._streams is not None:
            time_ms = self._streams.ran(index, call, time_ms, (*taken_on, *mutates), writes)
        op = Op(
            name=traits.name,
            phase=phase,
            scope=scope,
            time_ms=time_ms,
            flops=figures.flops,
            workspace_bytes=0 if host_bytes else figures.workspace_bytes - given_bytes,
            reads=_read(traits, args, taken, taken_on),
            writes=tuple(writes),
            mutates=mutates,
            recomputable=phase is Phase.FORWARD
            and replayable
            and not compiled
            and can_run_again(func, args, kwargs, out),
            state_bytes=self._state_bytes if draws_numbers(func, args, kwargs) else 0,
            inputs=given or tensors[: len(taken)],
            outputs=tensors[len(taken) :],
            arguments=figures.arguments,
            forward_of=self._nodes.forward_op() if phase is Phase.BACKWARD else -1,
            recomputes=self._recomputes(traits.name),
        )
        self._ops.append(op)
        self._events.append((_OP, index))
        if compiled:
            return
        if phase is Phase.FORWARD or (torch.is_grad_enabled() and called_by_checkpoint()):
            self._numbers.keep(func, args, outputs)
        if phase is Phase.BACKWARD:
            self._in_place.saw(self._nodes.running, call, index, op, n_storages)
        elif phase is Phase.FORWARD:
            for lost in self._unseen.lost(taken, taken_on):
                self._ops[lost] = msgspec.structs.replace(self._ops[lost], recomputable=False)
            if op.recomputable:
                self._unseen.wrote(index, made, made_on, in_place=traits.in_place)
            inside = None if self._tensors_only else formula_bytes(self._spec, call)
            if inside is not None:
                self._formulas[index] = self._spec.round_up(inside[0]), self._spec.round_up(inside[1])
            if self.storages.is_fake:
                self._regenerated.saw(func, taken, made, writes=bool(mutates))

    def _recomputes(self, name: str) -> int:
        """Return the op that an executor runs again now, or -1."""
        # Not an op of an earlier record, nor one that a node runs besides, as for a generator's state.
        known = 0 <= noted.again < len(self._ops) and self._ops[noted.again].name == name
        return noted.again if known else -1

    def _extend(self, op: int, ms: float) -> None:
        self._ops[op] = msgspec.structs.replace(self._ops[op], time_ms=self._ops[op].time_ms + ms)

    def allocated(self, tensor: torch.Tensor) -> None:
        """Record memory that a compiled graph allocates."""
        if not self._paused:
            self.storages.of(tensor)

    def generator_state(self) -> torch.Tensor:
        """Make the state of a generator that a compiled graph saves."""
        state = torch.empty(self._state_bytes, dtype=torch.uint8)
        self.allocated(state)
        return state

    def kernel_ran(self, name: str, tensors: Sequence[torch.Tensor], nbytes: int) -> None:
        """Record an inductor kernel, which does not pass the dispatcher.

        All its tensors count as read, since it does not say which it writes. It never runs again.
        """
        if self._paused:
            return
        phase = self._phase()
        storages = [self.storages.of(t) for t in tensors]
        op = Op(
            name=f"inductor.{name}",
            phase=phase,
            scope=self._scope(phase),
            time_ms=fused_ms(self._spec, name, nbytes),
            flops=0,
            workspace_bytes=0,
            reads=tuple(dict.fromkeys(storages)),
            writes=(),
            mutates=(),
            recomputable=False,
            inputs=self.tensors.indices(tensors, storages, None),
            forward_of=self._nodes.forward_op() if phase is Phase.BACKWARD else -1,
        )
        self._events.append((_OP, len(self._ops)))
        self._ops.append(op)

    def _phase(self) -> Phase:
        backward, training = in_backward(), self.training
        # The closure of an optimizer's step runs forward and backward passes.
        if training.in_optimizer_step and not (
            training.runs_closure and (backward or torch.is_grad_enabled())
        ):
            return Phase.OPTIMIZER
        return Phase.BACKWARD if backward else Phase.FORWARD

    def _scope(self, phase: Phase) -> int:
        if phase == Phase.FORWARD:
            return self._calls.current
        if phase == Phase.OPTIMIZER:
            self._saved.node_runs(-1)  # the last node is done
            return ROOT_SCOPE
        return self._calls.of_node(self._nodes.follow())

    # --- the result ---------------------------------------------------------------------------

    def program(self) -> Program:
        """Return the program of what was seen.

        Each step needs the one before: what was done under a dispatch mode becomes what the plain step does (in-place
        sums, backward formulas), then storages that are written in place in the forward pass are split into versions,
        and only then is it known which ops may run again and what each storage is for.
        """
        storages, saved = self.storages, self._saved
        kinds = list(storages.kinds)
        born_backward = [phase is Phase.BACKWARD for phase in storages.born]
        given = storages.real_from_the_start()
        # Real tensors that were there before the step: they become ``initial``, so that their ``ALLOC`` must go.
        own_events = [event for event in self._events if event[0] != _ALLOC or event[1] not in given]
        # What a node keeps as an attribute is found when it runs, and was kept from its first op on.
        with_handles = ((e, saved.of_nodes.get(e[1], ()) if e[0] == _OP else ()) for e in own_events)
        own_events = [event for e, handles in with_handles for event in (e, *((_PACK, h) for h in handles))]
        ops, events, same = self._in_place.settle(self._ops, own_events, kinds, born_backward)
        table = self.tensors.table(same)
        ops, events = plain_formulas(ops, events, self._formulas, table)
        # Storages freed at one moment come in no fixed order. Sorted, equal layers have equal events.
        runs = groupby(events, key=itemgetter(0))
        events = [event for code, run in runs for event in (sorted(run) if code == _FREE else run)]
        recorded = Program(
            storage_bytes=tuple(storages.nbytes),
            storage_kinds=tuple(StorageKind.TEMPORARY if kind is None else kind for kind in kinds),
            initial=(*storages.initial, *sorted(given)),
            tensors=table,
            ops=tuple(ops),
            scopes=self._calls.scopes(),
            events=tuple(events),
            handle_storages=tuple(same[s] for s in saved.handle_storages),
            handle_tensors=tuple(saved.handle_tensors),
            handle_ops=tuple(map(self._nodes.op_at, saved.handle_numbers)),
            instance_handles=tuple(saved.instance_handles),
            backward_order=tuple(self._calls.backward_order),
            leaf_fqns=self._calls.leaf_fqns(),
            parameter_bytes=self._calls.parameter_bytes(),
            gradients=dict(self.training.gradients),
            on_dtensors=frozenset(self._calls.on_dtensors),
            resizes=tuple((same[s], before, after) for s, before, after in storages.resizes),
            streams={} if self._streams is None else {same[s]: n for s, n in self._streams.side.items()},
            gathering=self._calls.gathering(),
            fixed=storages.fixed,
        )
        named = frozenset(s for s, kind in enumerate(kinds) if kind is not None)
        recorded = only_filled(recorded)
        split = recorded.with_(in_place_versions(recorded))
        return settled(split, named, storages.born)


inductor.follow_generators(Recorder)


def _read(
    traits: OpTraits, args: Any, taken: Sequence[torch.Tensor], storages: Sequence[int]
) -> tuple[int, ...]:
    """Return the storages whose values an op needs: not statistics that it only writes."""
    left_out = [args[i] for i in traits.left_out(args)]
    return tuple(
        dict.fromkeys(
            s for t, s in zip(taken, storages, strict=True) if not any(t is other for other in left_out)
        )
    )
