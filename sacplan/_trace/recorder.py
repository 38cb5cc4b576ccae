"""Watch one training step and write down its recording: a dispatch mode, saved-tensor hooks, module hooks.

What autograd keeps is told apart from what code holds by a trick that only a recorder can afford:
the pack hook gives autograd an empty handle instead of the tensor. Every storage then dies when
nobody *else* holds it, the handle's own end is the end of autograd's hold, and unpacking makes a
fresh tensor whose life is that of the tensor autograd would have handed out. Under FakeTensorMode
nothing was ever computed, so nothing is lost; on real tensors the handle keeps a clone
(``saved="clone"``), and ``saved="observe"`` leaves autograd alone.

Cost: O(1) Python work per dispatched op; modules are found from the forward's call stack and, in
the backward pass, from autograd's sequence numbers.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan._trace.fake_data import DataRules
from sacplan._trace.ops import can_run_again, op_traits, tensors_in
from sacplan._trace.recording import ROOT_SCOPE, Event, Kind, Op, Phase, Recording, Scope
from sacplan._trace.torch_private import (
    autograd_sequence_number,
    current_node_sequence_number,
    in_backward,
    is_plain,
    storage_key,
)
from sacplan.errors import TraceError

SavedMode = Literal["virtual", "clone", "observe"]


class _Handle:
    """What autograd keeps instead of a tensor; its end is autograd's letting go."""

    __slots__ = ("__weakref__", "clone", "dtype", "index", "known", "size", "stride")

    def __init__(self, index: int, tensor: torch.Tensor, clone: torch.Tensor | None) -> None:
        self.index = index
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.clone = clone
        self.known: Any = (
            None,
            {},
        )  # a fake tensor's values, where they are known, and the rules they rest on


class Recorder(TorchDispatchMode):
    """Context manager: everything dispatched inside becomes a ``Recording``.

    Args:
        cost: ``(func, args, kwargs, out) -> (flops, time_ms)`` for each op.
        workspace: ``(func, args, kwargs, out) -> bytes`` that the kernel allocates inside.
        round_bytes: the allocator's granularity.
        saved: how tensors that autograd saves are treated, see the module's docstring.
        state_bytes: size of a random generator's state where it lies in the device's memory (on a CPU).
        rules: what knows values of fake tensors; a tensor that is unpacked keeps them.

    Errors in the recorder's own bookkeeping are kept and raised on exit: an exception that starts
    inside a dispatch mode under FakeTensorMode can abort the interpreter.
    """

    def __init__(
        self,
        *,
        cost: Callable[..., tuple[int, float]],
        workspace: Callable[..., int],
        round_bytes: int,
        saved: SavedMode,
        state_bytes: int = 0,
        rules: DataRules | None = None,
    ) -> None:
        super().__init__()
        self._rules = rules
        self._cost = cost
        self._workspace = workspace
        self._round = max(1, round_bytes)
        self._saved = saved
        self._state_bytes = self._rounded(state_bytes)
        self._paused = 0
        self._active = False
        self._error: Exception | None = None
        self._ids: dict[int, int] = {}
        self._finalizers: dict[int, weakref.ref[Any]] = {}
        self._mutated_at: dict[int, list[int]] = {}
        self._storage_bytes: list[int] = []
        self._kinds: list[Kind | None] = []
        self._born: list[Phase] = []
        self._initial: list[int] = []
        self._initial_set: set[int] = set()
        self._ops: list[Op] = []
        self._events: list[tuple[int, int]] = []
        self._handle_storages: list[int] = []
        self._handle_refs: dict[int, weakref.ref[Any]] = {}
        self._instance_handles: list[int] = []
        self._instance_refs: dict[int, weakref.ref[Any]] = {}
        self._scopes: list[list[Any]] = []
        self._stack: list[int] = []
        self._scope_marks: list[tuple[int, int]] = []  # (autograd sequence number, scope)
        self._backward_order: dict[int, None] = {}
        self._backward_scope = ROOT_SCOPE
        self._fqns: dict[int, str] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        self._parameters: dict[int, torch.Tensor] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._in_optimizer = False
        self._removers: list[Any] = []
        self._hooks: Any = None
        self._clones: weakref.WeakValueDictionary[tuple[Any, ...], torch.Tensor] = (
            weakref.WeakValueDictionary()
        )

    # --- what is there before the step -------------------------------------------------------

    def track_model(self, model: torch.nn.Module) -> None:
        """Name the modules after ``model`` and count its parameters, buffers and gradients."""
        for fqn, module in model.named_modules():
            self._fqns.setdefault(id(module), fqn)
            self._modules[id(module)] = module
        for p in model.parameters():
            self._track(p, Kind.PARAMETER)
            self._parameters[id(p)] = p
            if p.grad is not None:
                self._track(p.grad, Kind.GRADIENT)
        for b in model.buffers():
            self._track(b, Kind.BUFFER)

    def track_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the optimizer's state, the one that is there and the one that it will make."""
        self._optimizers.append(optimizer)
        self._track_optimizer_state(optimizer)

    def _track_optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._track(value, Kind.OPTIMIZER_STATE)

    def track_tensors(self, tensors: Iterable[torch.Tensor], kind: Kind = Kind.OTHER) -> None:
        """Count tensors that are alive from the start, such as the batch."""
        for t in tensors:
            self._track(t, kind)

    def _track(self, tensor: torch.Tensor, kind: Kind) -> None:
        if not is_plain(tensor):
            return
        storage = tensor.untyped_storage()
        known = self._ids.get(storage_key(storage))
        if known is None:
            index = self._new_storage(storage, kind)
            if self._active:
                self._events.append((Event.ALLOC, index))
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
        if self._saved != "observe":
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        self._active = True
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        if self._hooks is not None:
            self._hooks.__exit__(exc_type, exc_value, traceback)
            self._hooks = None
        for remover in self._removers:
            remover.remove()
        self._removers = []
        if exc_type is None:
            self._mark_late_kinds()
        self._active = False
        error, self._error = self._error, None
        if error is not None and exc_type is None:
            raise error
        self._clones.clear()

    def restart(self) -> None:
        """Begin a new record with what is alive now."""
        self._mark_late_kinds()
        self._ops.clear()
        self._events.clear()
        self._scopes.clear()
        self._scope_marks.clear()
        self._backward_order.clear()
        self._backward_scope = ROOT_SCOPE
        self._mutated_at.clear()
        self._initial = sorted(set(self._ids.values()))
        self._initial_set = set(self._initial)

    def forget(self) -> None:
        """Let go of the model and the optimizer."""
        self._modules.clear()
        self._fqns.clear()
        self._parameters.clear()
        self._optimizers.clear()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error

    def _mark_late_kinds(self) -> None:
        for p in self._parameters.values():
            if p.grad is not None:
                self._track(p.grad, Kind.GRADIENT)
        for optimizer in self._optimizers:
            self._track_optimizer_state(optimizer)

    # --- modules ------------------------------------------------------------------------------

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        if in_backward():
            fqn = self._fqns.get(id(module))
            if fqn is not None:
                self._fail(
                    TraceError(
                        f"the forward of module {fqn!r} ran again during the backward pass: checkpointing is "
                        "already switched on in this model. Switch it off (for a Hugging Face model "
                        "`model.gradient_checkpointing_disable()`), sacplan chooses what to recompute."
                    )
                )
            return
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
        self._events.append((Event.ENTER, scope))

    def _exit_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if in_backward() or id(module) not in self._fqns or not self._stack:
            return
        scope = self._stack.pop()
        self._scopes[scope][3] = len(self._ops)
        self._scopes[scope][5] = self._bytes_of(output)
        self._scope_marks.append((autograd_sequence_number(), self._stack[-1] if self._stack else ROOT_SCOPE))
        self._events.append((Event.EXIT, scope))

    def _bytes_of(self, value: Any) -> int:
        return sum(self._rounded(t.numel() * t.element_size()) for t in tensors_in(value))

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in self._parameters.values():
            if p.grad is not None:
                self._track(p.grad, Kind.GRADIENT)
        self._in_optimizer = True

    def _exit_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer = False
        if any(optimizer is o for o in self._optimizers):
            self._track_optimizer_state(optimizer)

    # --- saved tensors ------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._paused or not is_plain(tensor):
            return tensor
        storage_index = self._ids.get(storage_key(tensor.untyped_storage()))
        if storage_index is None or storage_index in self._initial_set:
            return tensor  # a parameter, a buffer, the batch: alive anyway
        index = len(self._handle_storages)
        handle = _Handle(
            index, tensor, self._clone(tensor, storage_index) if self._saved == "clone" else None
        )
        if self._rules is not None:
            handle.known = (self._rules.value(tensor), self._rules.rules_of([tensor]))
        self._handle_storages.append(storage_index)
        self._events.append((Event.PACK, index))

        def released(_: Any) -> None:
            self._events.append((Event.RELEASE, index))
            self._handle_refs.pop(index, None)

        self._handle_refs[index] = weakref.ref(handle, released)
        return handle

    def _clone(self, tensor: torch.Tensor, storage_index: int) -> torch.Tensor:
        """A copy of the part of the storage that the tensor spans, shared by handles on the same part."""
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        span = reach + 1 if tensor.numel() else 0
        key = (storage_index, tensor._version, tensor.dtype, tensor.storage_offset(), span)
        copy = self._clones.get(key)
        if copy is None:
            with torch.no_grad():
                self._paused += 1
                try:
                    copy = torch.as_strided(tensor, (span,), (1,), tensor.storage_offset()).clone()
                finally:
                    self._paused -= 1
            self._clones[key] = copy
        return copy

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Handle):
            return packed
        self._paused += 1
        try:
            if packed.clone is None:
                if self._rules is None:
                    out = torch.empty_strided(packed.size, packed.stride, dtype=packed.dtype)
                else:
                    out = self._rules.as_fake_like(packed.size, packed.stride, packed.dtype, *packed.known)
            else:
                out = torch.as_strided(packed.clone.clone(), packed.size, packed.stride, 0)
        finally:
            self._paused -= 1
        instance = len(self._instance_handles)
        self._instance_handles.append(packed.index)
        self._events.append((Event.UNPACK, instance))
        storage = out.untyped_storage()
        key = storage_key(storage)

        def dropped(_: Any) -> None:
            self._events.append((Event.DROP, instance))
            self._instance_refs.pop(instance, None)
            self._ids.pop(key, None)

        self._instance_refs[instance] = weakref.ref(storage, dropped)
        self._ids[key] = self._handle_storages[packed.index]
        return out

    # --- ops ----------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._paused:
            try:
                self._record(func, args, kwargs, out)
            except Exception as error:
                self._fail(error)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        traits = op_traits(func)
        reads = dict.fromkeys(self._index_of(t) for t in tensors_in((args, kwargs)) if is_plain(t))
        writes: dict[int, None] = {}
        fresh = True
        has_output = False
        phase = self._phase()
        for t in tensors_in(out):
            has_output = True
            if not is_plain(t):
                fresh = False
                continue
            storage = t.untyped_storage()
            if storage_key(storage) in self._ids:
                fresh = fresh and self._ids[storage_key(storage)] in writes
            else:
                writes[self._new_storage(storage, None)] = None
        mutates = self._mutated(traits, args, kwargs)
        if not has_output and not mutates:
            return  # a metadata query
        index = len(self._ops)
        for s in mutates:
            self._mutated_at.setdefault(s, []).append(index)
        flops, time_ms = self._cost(func, args, kwargs, out)
        self._ops.append(
            Op(
                name=traits.name,
                phase=phase,
                scope=self._scope(phase),
                time_ms=time_ms,
                flops=flops,
                workspace_bytes=self._rounded(self._workspace(func, args, kwargs, out)),
                reads=tuple(reads),
                writes=tuple(writes),
                mutates=mutates,
                recomputable=phase == Phase.FORWARD
                and fresh
                and bool(writes)
                and can_run_again(func, args, kwargs, out),
                state_bytes=self._state_bytes if traits.random else 0,
            )
        )
        self._events.append((Event.OP, index))

    def _phase(self) -> Phase:
        if self._in_optimizer:
            return Phase.OPTIMIZER
        return Phase.BACKWARD if in_backward() else Phase.FORWARD

    def _scope(self, phase: Phase) -> int:
        if phase == Phase.FORWARD:
            return self._stack[-1] if self._stack else ROOT_SCOPE
        if phase == Phase.OPTIMIZER:
            return ROOT_SCOPE
        number = current_node_sequence_number()
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

    def _mutated(self, traits: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        if not traits.written_names:
            return ()
        written = [args[i] for i in traits.written_positions if i < len(args)]
        written += [kwargs[n] for n in traits.written_names if n in kwargs]
        return tuple(dict.fromkeys(self._index_of(t) for t in tensors_in(written) if is_plain(t)))

    def _index_of(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        index = self._ids.get(storage_key(storage))
        if index is None:
            index = self._new_storage(storage, None)
            self._events.append((Event.ALLOC, index))
        return index

    def _new_storage(self, storage: Any, kind: Kind | None) -> int:
        index = len(self._storage_bytes)
        key = storage_key(storage)
        self._ids[key] = index
        self._storage_bytes.append(self._rounded(storage.nbytes()))
        self._kinds.append(kind)
        self._born.append(self._phase() if self._active else Phase.FORWARD)

        def freed(_: Any) -> None:
            self._ids.pop(key, None)
            self._finalizers.pop(index, None)
            if self._active:
                self._events.append((Event.FREE, index))

        self._finalizers[index] = weakref.ref(storage, freed)
        return index

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._round) * self._round

    # --- the result ---------------------------------------------------------------------------

    def recording(self) -> Recording:
        """What was seen, as a plain value."""
        saved = set(self._handle_storages)
        backward_at = next(
            (i for i, op in enumerate(self._ops) if op.phase == Phase.BACKWARD), len(self._ops)
        )
        seen_in_backward: set[int] = set()
        for op in self._ops[backward_at:]:
            seen_in_backward.update(op.reads)
        kinds = []
        for index, kind in enumerate(self._kinds):
            if kind is None:
                forward = self._born[index] == Phase.FORWARD
                kept = index in saved or index in seen_in_backward
                kind = Kind.ACTIVATION if forward and kept else Kind.TEMPORARY
            kinds.append(kind)
        return Recording(
            storage_bytes=tuple(self._storage_bytes),
            storage_kinds=tuple(kinds),
            initial=tuple(self._initial),
            ops=tuple(self._settled(i, op) for i, op in enumerate(self._ops)),
            scopes=tuple(Scope(*s) for s in self._scopes),
            events=tuple((int(code), arg) for code, arg in self._events),
            handle_storages=tuple(self._handle_storages),
            instance_handles=tuple(self._instance_handles),
            backward_order=tuple(self._backward_order),
            leaf_fqns=frozenset(
                fqn for key, fqn in self._fqns.items() if not any(self._modules[key].children())
            ),
            parameter_bytes={
                fqn: sum(self._rounded(p.numel() * p.element_size()) for p in self._modules[key].parameters())
                for key, fqn in self._fqns.items()
            },
        )

    def _settled(self, index: int, op: Op) -> Op:
        """Ops whose inputs or outputs are written in place later, before the optimizer's step, are kept."""
        if not op.recomputable:
            return op
        for s in (*op.reads, *op.writes):
            for at in self._mutated_at.get(s, ()):
                if at > index and self._ops[at].phase != Phase.OPTIMIZER:
                    return replace(op, recomputable=False)
        return op
