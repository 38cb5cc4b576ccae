"""Watch one training step and write down its recording: a dispatch mode, saved-tensor hooks, module hooks.

What autograd keeps is told apart from what code holds by ``saved_tensors.py``; what the plain step would write in
place is put right by ``in_place.py``; ops that a fake step has had before are looked up in ``seen_ops.py``.

Cost: O(1) Python work per dispatched op; modules are found from the forward's call stack and, in
the backward pass, from autograd's sequence numbers.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sacplan._program.program import ROOT_SCOPE, Event, Op, Phase, Program, Scope, StorageKind, Tensor
from sacplan._record.calls import arguments_of
from sacplan._record.fake_data import DataRules
from sacplan._record.in_place import InPlaceWrites, plain_formulas
from sacplan._record.saved_tensors import SavedMode, SavedTensors
from sacplan._record.seen_ops import SeenOp, SeenOps
from sacplan._rewrites.in_place_versions import in_place_versions
from sacplan._rewrites.settle import settled
from sacplan._torch.local_tensors import Watching, has_local_parts, is_deferred, local_part
from sacplan._torch.ops import can_run_again, draws_numbers, op_traits, tensors_in
from sacplan._torch.private import (
    FakeTensor,
    FakeTensorMode,
    active_fake_mode,
    autograd_sequence_number,
    called_by_checkpoint,
    current_node_sequence_number,
    dispatch_modes,
    fake_device_of,
    in_backward,
    is_plain,
    keeps_graph,
    storage_key,
    strided_parts,
    without_torch_functions,
)
from sacplan.errors import TraceError

# Plain integers, which the event stream is made of.
_ALLOC, _FREE, _OP = int(Event.ALLOC), int(Event.FREE), int(Event.OP)
_ENTER, _EXIT = int(Event.ENTER), int(Event.EXIT)


_StridedLayout = tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # shape, stride, offset in the storage

NUMBER_BYTES = 8
"""Of the tensor that a Python number becomes."""

_KEEP_THEIR_SECOND = frozenset(
    (
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.mul_.Tensor,
        torch.ops.aten.div.Tensor,
        torch.ops.aten.div_.Tensor,
    )
)
_LIFTS = torch.ops.aten.lift_fresh.default
_NODE_LIVES = "sacplan: the node lives"
"""A key of the dictionary that autograd nodes have for anomaly detection."""


class _NodeLives:
    """Lies in an autograd node, and is gone when the node is."""

    __slots__ = ("__weakref__",)


def _keeps_a_number(func: Any, args: Any) -> bool:
    """Whether autograd keeps the tensor that a Python number became; it shows those to no saved-tensor hook."""
    if func not in _KEEP_THEIR_SECOND or isinstance(args[1], torch.Tensor):
        return False
    return args[0].requires_grad and torch.is_grad_enabled()  # in the forward of a custom function it is off


def _reads_a_number(func: Any, read: Sequence[torch.Tensor]) -> bool:
    """Whether the step asks for the value of a float, such as that of its loss.

    A chunk that would compute the value later computes it there, in a loop of its own.
    """
    return func is torch.ops.aten._local_scalar_dense.default and read[0].is_floating_point()


def other_thread(what: str) -> TraceError:
    """What to say where a part of the step runs in another thread."""
    return TraceError(
        f"{what} runs in another thread than the step that is recorded, such as one of a ThreadPoolExecutor. Dispatch "
        "modes and saved-tensor hooks belong to one thread, so neither a recording nor a plan would see what it runs. "
        "Call the parts of the model one after the other, in the thread that calls the model."
    )


def _as_recorded(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[int, int] | None:
    return None


class Recorder(Watching):
    """Context manager: everything dispatched inside becomes a ``Program``.

    Args:
        cost: ``(func, args, kwargs, out) -> (flops, time_ms)`` for each op.
        workspace: ``(func, args, kwargs, out) -> bytes`` that the kernel allocates inside.
        formula: the same arguments, for an op that is differentiated: bytes that its backward formula takes beyond its
            gradients in the plain step, for an incoming gradient that is contiguous and for one that is expanded; or
            None if the ops that are recorded are those of the plain step.
        round_bytes: the allocator's granularity.
        saved: how tensors that autograd saves are treated, see ``saved_tensors.py``.
        state_bytes: size of a random generator's state where it lies in the device's memory (on a CPU).
        number_bytes: size of a tensor that autograd makes of a Python number, where it lies in that memory. It
            is counted until the step ends.
        rules: what knows values of fake tensors; a tensor that is unpacked keeps them.

    Errors in the recorder's own bookkeeping are kept and raised on exit: an exception that starts
    inside a dispatch mode under FakeTensorMode can abort the interpreter.
    """

    def __init__(
        self,
        *,
        cost: Callable[..., tuple[int, float]],
        workspace: Callable[..., int],
        formula: Callable[..., tuple[int, int] | None] = _as_recorded,
        round_bytes: int,
        saved: SavedMode,
        state_bytes: int = 0,
        number_bytes: int = 0,
        rules: DataRules | None = None,
    ) -> None:
        super().__init__()
        self._rules = rules
        self._cost = cost
        self._workspace = workspace
        self._formula = formula
        self._formulas: dict[int, tuple[int, int]] = {}  # op to what its backward formula takes
        self._round = max(1, round_bytes)
        self._state_bytes = self._rounded(state_bytes)
        self._number_bytes = self._rounded(number_bytes)
        self._in_place = InPlaceWrites()
        self._seen: SeenOps | None = None
        self._paused = 0
        self._active = False
        self._thread = threading.get_ident()
        self._fake = active_fake_mode() is not None
        self._error: Exception | None = None
        self._ids: dict[int, int] = {}
        self._offsets: dict[int, int] = {}  # of unpacked tensors in the storage that was recorded
        self._layouts: dict[_StridedLayout, int] = {}
        self._tensors: dict[tuple[int, int], int] = {}  # (storage, layout) to tensor
        self._op_of_number: dict[int, int] = {}  # autograd's next sequence number to the first op run at it
        self._finalizers: dict[int, weakref.ref[Any]] = {}
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}  # storage to the output of the op that made it
        self._storage_bytes: list[int] = []
        self._kinds: list[StorageKind | None] = []
        self._born: list[Phase] = []
        self._initial: list[int] = []
        self._initial_set: set[int] = set()
        self._ops: list[Op] = []
        self._events: list[tuple[int, int]] = []
        self._scopes: list[list[Any]] = []
        self._stack: list[int] = []
        self._scope_marks: list[tuple[int, int]] = []  # (autograd sequence number, scope)
        self._backward_order: dict[int, None] = {}
        self._backward_scope = ROOT_SCOPE
        self._on_dtensors: set[str] = set()
        self._node: int | None = None  # the autograd node that runs
        self._numbers: dict[
            int, list[int]
        ] = {}  # autograd's next sequence number to storages of kept numbers
        self._numbers_ends: dict[int, weakref.ref[_NodeLives]] = {}  # such a storage to what its node holds
        self._last_number: tuple[weakref.ref[torch.Tensor], int, int] | None = (
            None  # output, next number, storage
        )
        self._fqns: dict[int, str] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        self._lent: set[int] = (
            set()
        )  # found storages on memory that PyTorch did not allocate, such as an array's
        self._real: set[int] = set()  # storages of real tensors that a fake step was seen to read
        self._copies: dict[int, weakref.ref[Any]] = {}  # by key, the storages of their fake copies
        self._gradients: dict[int, int] = {}  # storage of a parameter to the tensor that is its gradient
        self._optimizers: list[torch.optim.Optimizer] = []
        self._in_optimizer = False
        self._removers: list[Any] = []
        self._have_hooks: set[int] = set()  # modules with hooks of their own that run before their forward
        self._saved = SavedTensors(
            saved,
            ids=self._ids,
            offsets=self._offsets,
            tensor_index=self._tensor_index,
            events=self._events,
            initial=self._initial_set,
            paused=self.paused,
            unpacks=self._follow_node,
            rules=rules,
        )

    # --- what is there before the step -------------------------------------------------------

    @without_torch_functions
    def track_model(self, model: torch.nn.Module) -> None:
        """Name the modules after ``model`` and count its parameters, buffers and gradients."""
        for fqn, module in model.named_modules():
            self._fqns.setdefault(id(module), fqn)
            self._modules[id(module)] = module
        for p in model.parameters():
            self._track(p, StorageKind.PARAMETER)
            self._parameters[id(p)] = p
            if p.grad is not None:
                self._track(p.grad, StorageKind.GRADIENT)
        for b in model.buffers():
            self._track(b, StorageKind.BUFFER)

    def track_storages(self, storages: Iterable[weakref.ref[Any]]) -> None:
        """Count storages that are alive from the start, as far as they are."""
        for storage in filter(None, (ref() for ref in storages)):
            if storage_key(storage) not in self._ids:
                index = self._new_storage(storage, StorageKind.OTHER)
                self._initial.append(index)
                self._initial_set.add(index)

    def left_behind(self) -> list[weakref.ref[Any]]:
        """Storages that the step made and that are still alive; gradients and the optimizer's state are expected."""
        expected = (StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)
        return [
            ref
            for index, ref in self._finalizers.items()
            if index in self._made
            and index not in self._initial_set
            and self._kinds[index] not in expected
            and ref() is not None
        ]

    def track_optimizer(self, optimizer: torch.optim.Optimizer, *, initial: bool = False) -> None:
        """Count the optimizer's state, the one that is there and the one that it will make.

        ``initial`` says that what is there now was there when the step began.
        """
        self._optimizers.append(optimizer)
        self._track_optimizer_state(optimizer, initial=initial)

    @without_torch_functions
    def _track_optimizer_state(self, optimizer: torch.optim.Optimizer, *, initial: bool = False) -> None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._track(value, StorageKind.OPTIMIZER_STATE, initial=initial)

    @without_torch_functions
    def track_tensors(self, tensors: Iterable[torch.Tensor], kind: StorageKind = StorageKind.OTHER) -> None:
        """Count tensors that are alive from the start, such as the batch."""
        for t in tensors:
            self._track(t, kind)

    def _track(self, tensor: torch.Tensor, kind: StorageKind, *, initial: bool = False) -> None:
        if not is_plain(tensor):
            for part in _plain_tensors(tensor):
                self._track(part, kind, initial=initial)
            return
        storage = tensor.untyped_storage()
        known = self._ids.get(storage_key(storage))
        if known is None:
            index = self._new_storage(storage, kind)
            if self._active and not initial:
                self._events.append((_ALLOC, index))
            else:
                self._initial.append(index)
                self._initial_set.add(index)
        elif self._kinds[known] is None:
            self._kinds[known] = kind

    # --- the context --------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        hooks = torch.nn.modules.module
        self._removers = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._exit_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._exit_optimizer),
        ]
        # What a module's hooks run before its forward is no part of the module: recipes of a unit do not see it.
        for key, module in self._modules.items():
            if module._forward_pre_hooks:
                self._removers.append(module.register_forward_pre_hook(self._begin_module))
                self._have_hooks.add(key)
        self._saved.__enter__()
        self._thread = threading.get_ident()
        self._active = True
        self._fake = active_fake_mode() is not None
        if self._rules is not None:
            self._seen = self._seen_ops(self._rules)
        super().__enter__()
        return self

    @staticmethod
    def _seen_ops(rules: DataRules) -> SeenOps | None:
        """None where another mode would not see the ops that are looked up."""
        stack = dispatch_modes()
        if len(stack) == 2 and isinstance(stack[0], FakeTensorMode) and stack[1] is rules:
            return SeenOps(stack[0], rules)
        return None

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        self._saved.__exit__(exc_type, exc_value, traceback)
        for remover in self._removers:
            remover.remove()
        self._removers = []
        self._have_hooks.clear()
        if exc_type is None:
            self._mark_late_kinds()
        self._active = False
        self._numbers_ends.clear()
        self._last_number = None
        self._seen = None
        error, self._error = self._error, None
        if error is not None and exc_type is None:
            raise error

    @property
    def is_active(self) -> bool:
        """Whether it has been entered and not been left."""
        return self._active

    @property
    def n_ops(self) -> int:
        """How many ops it has recorded."""
        return len(self._ops)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ops inside are not recorded; what they leave behind is noticed when it is used, or tracked."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def restart(self) -> None:
        """Begin a new record with what is alive now."""
        self._mark_late_kinds()
        self._ops.clear()
        self._op_of_number.clear()
        self._gradients.clear()
        self._events.clear()
        self._scopes.clear()
        self._scope_marks.clear()
        self._backward_order.clear()
        self._on_dtensors.clear()
        self._backward_scope = ROOT_SCOPE
        self._in_place.clear()
        self._formulas.clear()
        self._numbers.clear()
        self._numbers_ends.clear()
        self._last_number = None
        self._initial = sorted(set(self._ids.values()))
        self._initial_set.clear()
        self._initial_set.update(self._initial)

    def forget(self) -> None:
        """Let go of the model and the optimizer."""
        self._modules.clear()
        self._fqns.clear()
        self._parameters.clear()
        self._optimizers.clear()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error

    @without_torch_functions
    def _track_gradients(self) -> None:
        for p in self._parameters.values():
            if p.grad is not None:
                self._track(p.grad, StorageKind.GRADIENT)
                if is_plain(p) and is_plain(p.grad):
                    gradient = self._tensor_index(p.grad, self.storage_of(p.grad))
                    self._gradients[self.storage_of(p)] = gradient

    def _mark_late_kinds(self) -> None:
        self._track_gradients()
        for optimizer in self._optimizers:
            self._track_optimizer_state(optimizer)

    # --- parts of a step ------------------------------------------------------------------------

    def track_given(self, tensor: torch.Tensor) -> int:
        """Count a tensor as alive from the start; its storage."""
        self._track(tensor, StorageKind.OTHER, initial=True)
        return self.storage_of(tensor)

    def storage_of(self, tensor: torch.Tensor) -> int:
        """The index of a tensor's storage, which has been seen."""
        return self._ids[storage_key(tensor.untyped_storage())]

    @property
    def storage_sizes(self) -> Sequence[int]:
        """Bytes of the storages seen so far."""
        return self._storage_bytes

    def tensors(self, indices: Iterable[int]) -> tuple[Tensor, ...]:
        """Tensors that ops take or return."""
        known, layouts = list(self._tensors), list(self._layouts)
        found = []
        for storage, layout in (known[i] for i in indices):
            dtype, shape, stride, offset = layouts[layout]
            found.append(
                Tensor(storage, str(dtype).removeprefix("torch."), tuple(shape), tuple(stride), offset)
            )
        return tuple(found)

    def seen(self) -> tuple[int, int]:
        """How many ops and events there were so far."""
        return len(self._ops), len(self._events)

    def seen_since(self, n_ops: int, n_events: int) -> tuple[list[Op], list[tuple[int, int]]]:
        """The ops and events behind those, as they ran; ops are counted from there."""
        events = [(code, arg - n_ops if code == _OP else arg) for code, arg in self._events[n_events:]]
        return self._ops[n_ops:], events

    # --- modules ------------------------------------------------------------------------------

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if id(module) not in self._have_hooks:
            self._begin_module(module, args)

    def _begin_module(self, module: torch.nn.Module, args: Any) -> None:
        if in_backward():
            fqn = self._fqns.get(id(module))
            if fqn is not None and called_by_checkpoint():
                self._fail(
                    TraceError(
                        f"the forward of module {fqn!r} ran again during the backward pass: checkpointing is "
                        "already switched on in this model. Switch it off (for a Hugging Face model "
                        "`model.gradient_checkpointing_disable()`), sacplan chooses what to recompute."
                    )
                )
            return
        if threading.get_ident() != self._thread:
            if id(module) in self._fqns:
                error = other_thread(f"module {self._fqns[id(module)]!r}")
                self._fail(error)  # whoever started the thread may never ask what became of it
                raise error
            return  # of a model that is not recorded
        if id(module) not in self._fqns:
            if self._stack or self._fqns:
                return
            self.track_model(module)  # nobody named a model: the first module that is called is it
        fqn = self._fqns[id(module)]
        scope = len(self._scopes)
        parent = self._stack[-1] if self._stack else ROOT_SCOPE
        self._scopes.append([fqn, parent, len(self._ops), len(self._ops), self._bytes_of(args), 0])
        self._stack.append(scope)
        self._scope_marks.append((autograd_sequence_number(), scope))
        self._events.append((_ENTER, scope))

    def _exit_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if in_backward() or id(module) not in self._fqns or not self._stack:
            return
        if threading.get_ident() != self._thread:
            return
        scope = self._stack.pop()
        self._scopes[scope][3] = len(self._ops)
        self._scopes[scope][5] = self._bytes_of(output)
        self._scope_marks.append((autograd_sequence_number(), self._stack[-1] if self._stack else ROOT_SCOPE))
        self._events.append((_EXIT, scope))

    @without_torch_functions
    def _bytes_of(self, value: Any) -> int:
        return sum(self._rounded(t.numel() * t.element_size()) for t in map(local_part, tensors_in(value)))

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._paused:
            return
        self._track_gradients()
        self._in_optimizer = True

    def _exit_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._paused:
            return
        self._in_optimizer = False
        if any(optimizer is o for o in self._optimizers):
            self._track_optimizer_state(optimizer)

    # --- ops ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_deferred(types):
            if has_local_parts(types):  # what runs in slices runs later, and no op follows now
                self._in_place.defers(func)
                if not self._paused and self._phase() is Phase.FORWARD:
                    self._on_dtensors.add(self._scopes[self._stack[-1]][0] if self._stack else "")
            return NotImplemented
        device = fake_device_of(func, args)
        if device is not None:
            return device
        if self._last_number is not None:
            try:
                self._follow_number()
            except Exception as error:
                self._fail(error)
        kwargs = kwargs or {}
        key = seen = None
        if self._seen is not None:
            key = self._seen.key(func, args, kwargs)
            seen = self._seen.get(key) if key is not None else None
        if seen is None or seen.outputs is None or self._seen is None:
            out = func(*args, **kwargs)
        else:
            out = self._seen.make(seen, args)
        try:
            if not self._paused:
                self._record(func, args, kwargs, out, key, seen)
            elif key is not None and seen is None:
                self._figures(func, args, kwargs, out, key)
        except Exception as error:
            self._fail(error)
        return out

    def _figures(self, func: Any, args: Any, kwargs: Any, out: Any, key: Any) -> SeenOp:
        flops, time_ms = self._cost(func, args, kwargs, out)
        workspace_bytes = self._rounded(self._workspace(func, args, kwargs, out))
        seen = SeenOp(flops, time_ms, workspace_bytes, arguments_of(args, kwargs))
        if key is not None and self._seen is not None:
            self._seen.remember(key, args, kwargs, out, seen)
        return seen

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, key: Any, seen: SeenOp | None) -> None:
        traits = op_traits(func)
        known = self._ids
        n_storages = len(self._storage_bytes)
        mutates = self._mutated(traits, args, kwargs) if traits.written_names else ()
        taken = _plain_tensors(args, kwargs) if key is None else _tensor_list(args, kwargs)
        storages = []
        lent = False
        for t in taken:
            storage = t.untyped_storage()
            at = known.get(storage_key(storage))
            storages.append(self._found(storage) if at is None else at)
            if at is None and func is _LIFTS and self._fake:
                # A constant, made outside of the fake mode. A plain step goes on with it; the fake one replaces it by
                # a tensor with a storage of its own, and that one counts.
                self._storage_bytes[storages[-1]] = 0
                if not storage.resizable():
                    lent = True
        if key is None and self._fake and func is not _LIFTS:
            self._know_copies(func, taken, storages, out)
        left_out = [args[i] for i in traits.left_out(args)]  # statistics, which it only writes
        reads = dict.fromkeys(
            s for t, s in zip(taken, storages, strict=True) if not any(t is other for other in left_out)
        )
        writes: dict[int, None] = {}
        outputs = _tensor_list(out)
        made = outputs if seen is not None and seen.outputs is not None else _plain_tensors(outputs)
        fresh = len(made) == len(outputs)
        for t in made:
            storage = t.untyped_storage()
            at = known.get(storage_key(storage))
            if at is None:
                at = self._new_storage(storage, None)
                self._made[at] = weakref.ref(t)
                writes[at] = None
                if lent:
                    self._storage_bytes[at] = 0
            elif at not in writes:
                fresh = False
            storages.append(at)
        phase = self._phase()
        reads_number = _reads_a_number(func, taken) and phase is Phase.FORWARD
        if not outputs and not mutates and not reads_number:
            return  # a metadata query
        index = len(self._ops)
        if seen is None:
            seen = self._figures(func, args, kwargs, out, key)
        scope = self._scope(phase)
        if not reads_number:  # autograd makes no node for it, and the op behind has the same sequence number
            self._op_of_number.setdefault(autograd_sequence_number(), index)
        tensors = self._tensors_of((*taken, *made), storages, seen if key is not None else None)
        op = Op(
            traits.name,
            phase,
            scope,
            seen.time_ms,
            seen.flops,
            seen.workspace_bytes,
            tuple(reads),
            tuple(writes),
            mutates,
            phase is Phase.FORWARD
            and (self._is_as_made(args[0], mutates) if traits.in_place else fresh and bool(writes))
            and can_run_again(func, args, kwargs, out),
            self._state_bytes if draws_numbers(func, args, kwargs) else 0,
            -1,
            tensors[: len(taken)],
            tensors[len(taken) :],
            seen.arguments,
            self._op_of_number.get(self._node + 1, -1)
            if phase is Phase.BACKWARD and self._node is not None
            else -1,
        )
        self._ops.append(op)
        self._events.append((_OP, index))
        if phase is Phase.BACKWARD:
            self._in_place.saw(self._node, func, args, out, index, op.reads, op.writes, n_storages)
            return
        if phase is Phase.FORWARD:
            inside = self._formula(func, args, kwargs, out)
            if inside is not None:
                self._formulas[index] = self._rounded(inside[0]), self._rounded(inside[1])
        if self._number_bytes and phase is Phase.FORWARD and _keeps_a_number(func, args):
            number, next_node = len(self._storage_bytes), autograd_sequence_number()
            self._events.append((_ALLOC, number))
            self._numbers.setdefault(next_node, []).append(number)
            if outputs:
                self._last_number = weakref.ref(outputs[0]), next_node, number
            self._storage_bytes.append(self._number_bytes)
            self._kinds.append(StorageKind.OTHER)
            self._born.append(phase)

    # --- tensors ------------------------------------------------------------------------------

    def _tensors_of(
        self, tensors: Sequence[torch.Tensor], storages: Sequence[int], seen: SeenOp | None
    ) -> tuple[int, ...]:
        """The indices of tensors; ``seen`` remembers the layouts where the op was looked up."""
        if seen is None or self._offsets:
            layouts: Iterable[int] = map(self._layout_of, tensors)
        else:
            if seen.layouts is None:
                seen.layouts = tuple(map(self._layout_of, tensors))
            layouts = seen.layouts
        known = self._tensors
        return tuple(known.setdefault(view, len(known)) for view in zip(storages, layouts, strict=True))

    def _tensor_index(self, tensor: torch.Tensor, storage: int) -> int:
        return self._tensors.setdefault((storage, self._layout_of(tensor)), len(self._tensors))

    def _layout_of(self, t: torch.Tensor) -> int:
        offset = int(t.storage_offset())
        if self._offsets:
            offset += self._offsets.get(storage_key(t.untyped_storage()), 0)
        layout = (t.dtype, t.shape, t.stride(), offset)
        return self._layouts.setdefault(layout, len(self._layouts))

    def _phase(self) -> Phase:
        if self._in_optimizer:
            return Phase.OPTIMIZER
        return Phase.BACKWARD if in_backward() else Phase.FORWARD

    def _scope(self, phase: Phase) -> int:
        if phase == Phase.FORWARD:
            return self._stack[-1] if self._stack else ROOT_SCOPE
        if phase == Phase.OPTIMIZER:
            return ROOT_SCOPE
        number = self._follow_node()
        if number is None:
            return self._backward_scope  # gradient accumulation goes with what came before
        at = bisect_right(self._scope_marks, number, key=lambda mark: mark[0])
        scope = self._scope_marks[at - 1][1] if at else ROOT_SCOPE
        self._backward_scope = scope
        chain = []
        while scope != ROOT_SCOPE and scope not in self._backward_order:
            chain.append(scope)
            scope = self._scopes[scope][1]
        self._backward_order.update(dict.fromkeys(reversed(chain)))
        return self._backward_scope

    def _follow_node(self) -> int | None:
        """Note which autograd node runs; its number.

        Also before a tensor is unpacked: what is recomputed for it runs when the node before is done.
        """
        number = current_node_sequence_number()
        if number != self._node:
            self._leave_node()
            self._node = number
        return number

    def _leave_node(self) -> None:
        """Free the numbers that the node kept: autograd releases what a node saved once the node has run."""
        if self._node is not None and not keeps_graph():
            for storage in tuple(self._numbers.get(self._node + 1, ())):
                self._free_number(self._node + 1, storage)

    @without_torch_functions
    def _follow_number(self) -> None:
        """Note when the node that keeps the last number dies: that of a branch that the loss does not need never runs.

        Called at the op behind: autograd gives an output its node when the dispatch mode has returned.
        """
        assert self._last_number is not None
        ref, next_node, storage = self._last_number
        self._last_number = None
        if storage not in self._numbers.get(next_node, ()):
            return
        output = ref()
        if output is None:
            self._free_number(next_node, storage)
            return
        if output._is_view():
            return  # the node is inside another one; and autograd may be in the view's lock now
        node: Any = output.grad_fn
        if node is None or node._sequence_nr() + 1 != next_node:
            return
        lives = node.metadata.setdefault(_NODE_LIVES, _NodeLives())
        self._numbers_ends[storage] = weakref.ref(lives, lambda _: self._free_number(next_node, storage))

    def _free_number(self, next_node: int, storage: int) -> None:
        self._numbers_ends.pop(storage, None)
        kept = self._numbers.get(next_node, [])
        if storage in kept:
            kept.remove(storage)
            self._events.append((_FREE, storage))

    def _is_as_made(self, tensor: Any, storages: Sequence[int]) -> bool:
        """Whether what an op writes is what another one gave back, and not an alias, which may count other versions."""
        made = self._made.get(storages[0]) if storages else None
        return made is not None and made() is tensor

    def _mutated(self, traits: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        written = _plain_tensors(traits.written(args, kwargs))
        return tuple(dict.fromkeys(map(self._index_of, written)))

    def _index_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        index = self._ids.get(storage_key(storage))
        return self._found(storage) if index is None else index

    def _found(self, storage: Any) -> int:
        """A storage that is there, and that no op was seen to make.

        Memory that the step borrows from an array (``torch.from_numpy``) and gives back is not PyTorch's: it counts as
        0. What stays alive was there before, as far as anybody can tell.
        """
        index = self._new_storage(storage, None)
        self._events.append((_ALLOC, index))
        if not self._fake and not storage.resizable():
            self._lent.add(index)
        return index

    def _know_copies(
        self, func: Any, taken: Sequence[torch.Tensor], storages: Sequence[int], out: Any
    ) -> None:
        """Note real tensors among the arguments of a fake step, such as a loss function's own.

        FakeTensorMode runs the op on a copy, so that a view of a real tensor is on another storage. It is the same one.
        """
        real = [s for t, s in zip(taken, storages, strict=True) if not isinstance(t, FakeTensor)]
        self._real.update(real)
        if not real or not isinstance(func, torch._ops.OpOverload) or not func.is_view:
            return
        for t in _plain_tensors(out):
            storage = t.untyped_storage()
            key = storage_key(storage)
            if key not in self._ids:
                self._ids[key] = real[0]
                self._copies[key] = weakref.ref(storage, functools.partial(self._forget_copy, key))

    def _forget_copy(self, key: int, _: Any) -> None:
        self._copies.pop(key, None)
        self._ids.pop(key, None)

    def _new_storage(self, storage: Any, kind: StorageKind | None) -> int:
        index = len(self._storage_bytes)
        key = storage_key(storage)
        self._ids[key] = index
        # In a real step autograd's zero tensors have their shapes inferred on the meta device.
        has_memory = self._fake or storage.device.type != "meta"
        self._storage_bytes.append(self._rounded(storage.nbytes()) if has_memory else 0)
        self._kinds.append(kind)
        self._born.append(self._phase() if self._active else Phase.FORWARD)

        def freed(_: Any) -> None:
            self._ids.pop(key, None)
            self._finalizers.pop(index, None)
            if index in self._lent:
                self._storage_bytes[index] = 0
            if self._active:
                self._events.append((_FREE, index))

        self._finalizers[index] = weakref.ref(storage, freed)
        return index

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._round) * self._round

    # --- the result ---------------------------------------------------------------------------

    def program(self) -> Program:
        """What was seen, as a plain value."""
        kinds = list(self._kinds)
        born_backward = [phase is Phase.BACKWARD for phase in self._born]
        given = {s for s in self._real if s in self._finalizers and s not in self._initial_set}
        own_events = [event for event in self._events if event[0] != _ALLOC or event[1] not in given]
        ops, events, same = self._in_place.settle(self._ops, own_events, kinds, born_backward)
        table = self._tensor_table(same)
        ops, events = plain_formulas(ops, events, self._formulas, table)
        saved = self._saved
        parameters = {id(p): p for m in self._modules.values() for p in m.parameters(recurse=False)}
        sizes = {key: self._bytes_of(p) for key, p in parameters.items()}
        recorded = Program(
            storage_bytes=tuple(self._storage_bytes),
            storage_kinds=tuple(StorageKind.TEMPORARY if kind is None else kind for kind in kinds),
            initial=(*self._initial, *sorted(given)),
            tensors=table,
            ops=tuple(ops),
            scopes=tuple(Scope(*s) for s in self._scopes),
            events=tuple(events),
            handle_storages=tuple(same[s] for s in saved.handle_storages),
            handle_tensors=tuple(saved.handle_tensors),
            handle_ops=tuple(self._op_of_number.get(number, -1) for number in saved.handle_numbers),
            instance_handles=tuple(saved.instance_handles),
            backward_order=tuple(self._backward_order),
            leaf_fqns=frozenset(
                fqn for key, fqn in self._fqns.items() if not any(self._modules[key].children())
            ),
            parameter_bytes={
                fqn: sum(sizes[id(p)] for p in self._modules[key].parameters())
                for key, fqn in self._fqns.items()
            },
            gradients=dict(self._gradients),
            on_dtensors=frozenset(self._on_dtensors),
        )
        named = frozenset(s for s, kind in enumerate(kinds) if kind is not None)
        split = recorded.with_(in_place_versions(recorded))
        return settled(split, named, self._born)

    def _tensor_table(self, same: Sequence[int]) -> tuple[Tensor, ...]:
        layouts = [
            (str(dtype).removeprefix("torch."), tuple(shape), tuple(stride), offset)
            for dtype, shape, stride, offset in self._layouts
        ]
        return tuple(Tensor(same[storage], *layouts[layout]) for storage, layout in self._tensors)


def _plain_tensors(*values: Any) -> list[torch.Tensor]:
    """The plain tensors of arguments or results, local parts, and those that sparse ones are made of."""
    found: list[torch.Tensor] = []
    for t in _tensor_list(*values):
        if is_plain(t):
            found.append(t)
        else:
            found.extend(part for part in strided_parts(t) if is_plain(part))
    return found


def _tensor_list(*values: Any) -> list[torch.Tensor]:
    """The tensors of arguments or results, as ``tensors_in`` finds them."""
    found: list[torch.Tensor] = []
    stack = list(values)
    stack.reverse()
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            stack.extend(reversed(value))
        elif isinstance(value, dict):
            stack.extend(reversed(value.values()))
    return found
