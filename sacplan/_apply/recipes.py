"""Recipes: recompute one discarded tensor, not a module's Python.

While a chosen module's forward runs, a dispatch mode leaves a node for every op that the plan
discards, with its arguments: tensors, or slots of other nodes. The pack hook gives autograd a handle
on a slot instead of the tensor. When autograd asks, the nodes that this one slot needs run, arguments
first; each runs once, remembers only the outputs that somebody pending still refers to, and drops
its arguments, so that plain reference counts free everything right after its last use.

A plan is advice, and this file does not trust it. What the mode did not see being made (custom kernels, other
modules, wrapper subclasses), what was written since, and ops that may not run again are kept, whatever
the plan says. What is kept is still checked: a saved-tensor hook switches autograd's own check for in-place
writes off, so handles carry the version and check it themselves. A kernel that writes through a pointer
(Triton, numpy) is seen by no mode and counts no version; so in the first step of a unit each discarded
tensor leaves a checksum behind, which the recomputed one must have.

Relatives: RETURNN's ``gradient_checkpoint_scope``, DTR (Kirisame et al. 2020). Known inefficiencies: the
dispatch mode costs a few microseconds for every op in the forward of a unit, kept ones too; an argument
that a recipe holds is not offloaded by the saved-tensor hooks around the model.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan._apply.compiled import checkpointed_for_compile, tags_of
from sacplan._trace.kernels import active_device
from sacplan._trace.ops import can_run_again, op_traits, tensors_in
from sacplan._trace.recording import CallSite
from sacplan._trace.torch_private import (
    GENERATOR_STATE_BYTES,
    FakeTensor,
    current_saved_tensors_hooks,
    history_free_alias,
    is_plain,
    storage_key,
)
from sacplan.errors import RecipeError

_View = tuple[torch.Size, tuple[int, ...], Any, torch.dtype]

_WRITES: frozenset[int] = frozenset({-1})
"""Stands in for occurrences at ops that write."""

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Here(threading.local):
    recorder: UnitRecorder | None = None


_here = _Here()
_lock = threading.RLock()  # autograd has a thread for each device, and recipes are shared


@contextlib.contextmanager
def _recomputation() -> Iterator[None]:
    """What runs inside is no part of a forward pass, even if a backward pass runs in one."""
    recorder = _here.recorder
    paused = recorder is not None and recorder.paused
    with _lock, torch.no_grad(), torch._C._DisableAutocast():
        if recorder is not None:
            recorder.paused = True
        try:
            yield
        finally:
            if recorder is not None:
                recorder.paused = paused


def _view_of(t: torch.Tensor) -> _View:
    return t.shape, t.stride(), t.storage_offset(), t.dtype


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _checksum(t: torch.Tensor) -> tuple[int, ...] | None:
    """Of the bits, without a temporary of the tensor's size. None where nothing can be computed."""
    if isinstance(t, FakeTensor) or t.is_meta or not t.numel():
        return None
    if t.numel() <= 2 and not t.is_floating_point():
        return None  # seeds and offsets, which attention kernels without dropout do not fill
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    bits = torch.view_as_real(t) if t.is_complex() else t
    bits = bits.view(_INT_OF_SIZE[bits.element_size()])
    # Equal elements cancel out in the hash, so one of them is looked at.
    return int(torch.hash_tensor(bits).view(torch.int64)), int(bits[(0,) * bits.ndim])


class FirstStep:
    """Whether the discarded tensors of a unit leave checksums: until the first one has been compared."""

    __slots__ = ("pending",)

    def __init__(self, pending: bool) -> None:
        self.pending = pending


class _Slot:
    """One output of a discarded op: a value once it has been recomputed."""

    __slots__ = ("__weakref__", "node", "storage", "value", "version", "view", "written")

    def __init__(self, node: _Node, tensor: torch.Tensor, table: dict[int, _Slot]) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        self.node = node
        self.storage = weakref.ref(storage, lambda _: table.pop(key, None))
        self.version = tensor._version
        self.view = _view_of(tensor)
        self.value: torch.Tensor | None = None
        self.written = False

    def take(self, view: _View) -> torch.Tensor:
        """A view of the value."""
        size, stride, offset, dtype = view
        base = self.value
        assert base is not None
        if base.dtype != dtype:
            elements = base.untyped_storage().nbytes() // base.element_size()
            base = torch.as_strided(base, (elements,), (1,), 0).view(dtype)
        return torch.as_strided(base, size, stride, offset)


class _SlotArg:
    """An argument that is a view of a slot."""

    __slots__ = ("requires_grad", "slot", "view")

    def __init__(self, slot: _Slot, tensor: torch.Tensor) -> None:
        self.slot = slot
        self.view = _view_of(tensor)
        self.requires_grad = tensor.requires_grad


class _HeldArg:
    """An argument that is a kept tensor, with its version and the writes to its storage that the mode saw."""

    __slots__ = ("tensor", "version", "writes", "writes_before")

    def __init__(self, tensor: torch.Tensor, writes: dict[int, int]) -> None:
        self.tensor = history_free_alias(tensor).requires_grad_(tensor.requires_grad)
        self.version = tensor._version
        self.writes = writes
        self.writes_before = self._writes_now()

    def _writes_now(self) -> int:
        return self.writes.get(storage_key(self.tensor.untyped_storage()), 0)

    @property
    def unchanged(self) -> bool:
        return self.tensor._version == self.version and self._writes_now() == self.writes_before


class _Node:
    """A discarded op, ready to run again."""

    __slots__ = (
        "__weakref__",
        "args",
        "func",
        "grad_mode",
        "kwargs",
        "outputs",
        "rng",
        "site",
        "slot_args",
        "unit",
    )

    def __init__(self, unit: str, func: Any, site: CallSite, rng: Any) -> None:
        self.unit = unit
        self.func: Any = func
        self.site = site
        self.rng = rng  # (generator, state) for a random op
        self.grad_mode = torch.is_grad_enabled()  # some kernels look at it, and at what requires a gradient
        self.args: Any = ()
        self.kwargs: Any = {}
        self.slot_args: list[_SlotArg] = []
        self.outputs: list[weakref.ref[_Slot] | None] = []  # empty once it has run

    def __str__(self) -> str:
        return f"{self.site[0]} #{self.site[1]} of unit {self.unit!r}"

    def run(self) -> None:
        """Run the op; its slots get their values, its arguments are let go."""
        with torch._C._AutoDispatchBelowADInplaceOrView(), torch.set_grad_enabled(self.grad_mode):
            args, kwargs = self._restore(self.args), self._restore(self.kwargs)
            if self.rng is None:
                out = self.func(*args, **kwargs)
            else:
                generator, state = self.rng
                now = generator.get_state()
                generator.set_state(state)
                try:
                    out = self.func(*args, **kwargs)
                finally:
                    generator.set_state(now)
        tensors = list(tensors_in(out))
        for i, ref in enumerate(self.outputs):
            slot = ref() if ref is not None else None
            if slot is not None:
                if len(tensors) != len(self.outputs) or _view_of(tensors[i]) != slot.view:
                    raise RecipeError(
                        f"{self} gave output {i} another shape or memory layout when it ran again than in the "
                        f"forward pass ({tuple(slot.view[0])}, strides {slot.view[1]}). Keep its output."
                    )
                slot.value = tensors[i]
        self.args = self.kwargs = ()
        self.rng = None
        self.slot_args = []
        self.outputs = []

    def _restore(self, value: Any) -> Any:
        if isinstance(value, _SlotArg):
            return value.slot.take(value.view).requires_grad_(value.requires_grad)
        if isinstance(value, _HeldArg):
            if not value.unchanged:
                raise RecipeError(
                    f"{self} has to run again in the backward pass, but an argument of shape "
                    f"{tuple(value.tensor.shape)} was written in place since. Keep its output, or write to a copy."
                )
            return value.tensor
        if isinstance(value, tuple):
            return tuple(self._restore(v) for v in value)
        if isinstance(value, list):
            return [self._restore(v) for v in value]
        if isinstance(value, dict):
            return {k: self._restore(v) for k, v in value.items()}
        return value


class _Handle:
    """What autograd keeps for a discarded tensor."""

    __slots__ = ("checksum", "first_step", "original", "slot", "view")

    def __init__(self, slot: _Slot, tensor: torch.Tensor, first_step: FirstStep) -> None:
        self.slot = slot
        self.view = _view_of(tensor)
        self.original = weakref.ref(tensor)
        self.first_step = first_step
        self.checksum: tuple[int, ...] | None = None
        if first_step.pending:
            with _recomputation():
                self.checksum = _checksum(tensor)

    def unpack(self) -> torch.Tensor:
        """The tensor, recomputed unless it has been."""
        slot, original = self.slot, self.original()
        if slot.written or (
            original is not None
            and (original._version != slot.version or original.untyped_storage() is not slot.storage())
        ):
            raise RecipeError(_WRITTEN.format(tuple(self.view[0]), f", made by {slot.node},"))
        with _recomputation():
            if slot.value is None:
                _compute(slot.node)
            tensor = slot.take(self.view)
            if self.checksum is not None:
                if _checksum(tensor) != self.checksum:
                    raise RecipeError(
                        f"{slot.node} gives other bits when it runs again than autograd took in the forward "
                        "pass. Its kernel, or one before it, is not deterministic; or something wrote its output "
                        "or an argument where PyTorch cannot see it (a Triton kernel, numpy). Keep this output."
                    )
                self.checksum = None
                self.first_step.pending = False
        return tensor


class _Kept:
    """What autograd keeps for a kept tensor: itself, and the version it had."""

    __slots__ = ("original", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, plain: bool) -> None:
        self.original: weakref.ref[torch.Tensor] | None = None
        self.tensor = tensor
        self.version = _version(tensor)
        if tensor.grad_fn is not None:  # else an op's output holds the op's autograd node, which holds this
            self.tensor = history_free_alias(tensor)
            self.original = weakref.ref(tensor) if plain else None

    def unpack(self) -> torch.Tensor:
        """The tensor, if it has not been written."""
        original = self.original() if self.original is not None else None
        if _version(self.tensor) != self.version or (
            original is not None and original.untyped_storage() is not self.tensor.untyped_storage()
        ):
            raise RecipeError(_WRITTEN.format(tuple(self.tensor.shape), ""))
        return self.tensor


_WRITTEN = (
    "a tensor of shape {}{} that the backward pass needs was written in place after the forward pass took it. "
    "Write to a copy."
)


class _PassedOn:
    """A kept tensor, as the saved-tensor hooks around the unit want to keep it."""

    __slots__ = ("packed", "unpack_hook")

    def __init__(self, packed: Any, unpack_hook: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack_hook = unpack_hook

    def unpack(self) -> torch.Tensor:
        """What those hooks give back."""
        return self.unpack_hook(self.packed)


def _unpack(packed: _Handle | _Kept | _PassedOn) -> torch.Tensor:
    return packed.unpack()


class UnitRecorder(TorchDispatchMode):
    """On while one call of a unit's forward runs.

    Args:
        unit: fqn, for messages.
        wanted: op name to the occurrences that are discarded.
        first_step: whether checksums are wanted.
    """

    supports_higher_order_operators = True

    def __init__(
        self, unit: str, wanted: dict[str, frozenset[int]], first_step: FirstStep | None = None
    ) -> None:
        super().__init__()
        self.paused = False
        self._unit = unit
        self._wanted = wanted
        self._first_step = first_step or FirstStep(False)
        self._by_func: dict[Any, frozenset[int] | None] = {}
        self._seen: dict[Any, int] = {}
        self._table: dict[int, _Slot] = {}
        self._writes: dict[int, int] = {}  # storage to how often it was written
        self._outer: tuple[Any, Any] | None = None
        self._hooks: Any = None

    def __enter__(self) -> UnitRecorder:
        self._outer = current_saved_tensors_hooks()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        try:
            self._hooks.__enter__()
        except RuntimeError as error:
            raise RecipeError(
                f"unit {self._unit!r} cannot discard anything here, since saved-tensor hooks are switched off "
                f"({error}). Remove the plan for this call: handle.remove()."
            ) from error
        super().__enter__()
        _here.recorder = self
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        _here.recorder = None
        super().__exit__(exc_type, exc_value, traceback)
        self._hooks.__exit__(exc_type, exc_value, traceback)
        self._hooks = self._outer = None
        self._table.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            wanted = self._by_func[func]
        except KeyError:
            wanted = self._by_func[func] = self._look_up(func)
        if wanted is None or self.paused:
            return func(*args, **kwargs)
        if wanted is _WRITES:
            self._note_write(func, args, kwargs)
            return func(*args, **kwargs)
        occurrence = self._seen.get(func, 0)
        self._seen[func] = occurrence + 1
        if occurrence not in wanted:
            return func(*args, **kwargs)
        rng = _generator_state(func, args, kwargs)
        out = func(*args, **kwargs)
        self._note(func, occurrence, args, kwargs, out, rng)
        return out

    def _look_up(self, func: Any) -> frozenset[int] | None:
        """Which occurrences are discarded; None if the op does not matter here."""
        if not isinstance(func, torch._ops.OpOverload):
            return None
        traits = op_traits(func)
        if traits.written_names:
            return _WRITES
        return self._wanted.get(traits.name) if traits.rerunnable else None

    def _note(self, func: Any, occurrence: int, args: Any, kwargs: Any, out: Any, rng: Any) -> None:
        """Leave a node, unless something about this call says that it had better be kept."""
        if not can_run_again(func, args, kwargs, out):
            return
        node = _Node(self._unit, func, (str(func), occurrence), rng)
        node.args = self._remember(args, node)
        node.kwargs = self._remember(kwargs, node)
        made: dict[int, _Slot] = {}
        for t in tensors_in(out):
            key = storage_key(t.untyped_storage())
            if key in made:  # two outputs on one storage
                node.outputs.append(None)
            else:
                made[key] = slot = _Slot(node, t, self._table)
                node.outputs.append(weakref.ref(slot))
        self._table.update(made)

    def _remember(self, value: Any, node: _Node) -> Any:
        if isinstance(value, torch.Tensor):
            slot = self._slot_of(value)
            if slot is None:
                return _HeldArg(value, self._writes)
            arg = _SlotArg(slot, value)
            node.slot_args.append(arg)
            return arg
        if isinstance(value, tuple):
            return tuple(self._remember(v, node) for v in value)
        if isinstance(value, list):
            return [self._remember(v, node) for v in value]
        if isinstance(value, dict):
            return {k: self._remember(v, node) for k, v in value.items()}
        return value

    def _slot_of(self, t: torch.Tensor) -> _Slot | None:
        """The slot whose storage this tensor is on, if it is still what the op made."""
        storage = t.untyped_storage()
        slot = self._table.get(storage_key(storage))
        if slot is None or slot.storage() is not storage or slot.version != _version(t):
            return None
        return slot

    def _note_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Storages written in place are kept from here on; a handle given out before is refused."""
        traits = op_traits(func)
        written = [args[i] for i in traits.written_positions if i < len(args)]
        written += [kwargs[name] for name in traits.written_names if name in kwargs]
        for t in tensors_in(written):
            if is_plain(t):
                storage = t.untyped_storage()
                key = storage_key(storage)
                self._writes[key] = self._writes.get(key, 0) + 1
                slot = self._table.pop(key, None)
                if slot is not None and slot.storage() is storage:  # else the address was used again
                    slot.written = True

    def _pack(self, t: torch.Tensor) -> Any:
        plain = is_plain(t)
        slot = self._slot_of(t) if plain else None
        if slot is not None:
            return _Handle(slot, t, self._first_step)
        if self._outer is not None:
            pack_hook, unpack_hook = self._outer
            return _PassedOn(pack_hook(t), unpack_hook)
        return _Kept(t, plain)


class _FakeGenerator:
    """Takes as many bytes for its state as a CPU's, and draws nothing."""

    @classmethod
    def with_state(cls) -> tuple[_FakeGenerator, torch.Tensor]:
        """One, and its state."""
        generator = cls()
        return generator, generator.get_state()

    def get_state(self) -> torch.Tensor:
        """A fake tensor."""
        return torch.empty(GENERATOR_STATE_BYTES, dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Nothing to do."""


def _generator_state(func: Any, args: Any, kwargs: Any) -> tuple[Any, torch.Tensor] | None:
    """The generator that a random op draws from, and its state."""
    if not op_traits(func).random:
        return None
    values = (*args, *kwargs.values())
    tensor = next(tensors_in(values), None)
    if tensor is None or tensor.is_meta:
        return None
    if isinstance(tensor, FakeTensor):
        spec = active_device()
        return None if spec is not None and spec.kind != "cpu" else _FakeGenerator.with_state()
    generator = next((v for v in values if isinstance(v, torch.Generator)), None)
    if generator is None:
        cuda = torch.cuda.default_generators if tensor.is_cuda else ()
        generator = cuda[tensor.device.index] if cuda else torch.default_generator
    return generator, generator.get_state()


def _compute(node: _Node) -> None:
    """Run the nodes that this one needs, arguments first, each once."""
    stack = [(node, False)]
    while stack:
        current, ready = stack.pop()
        if not current.outputs:
            continue
        if ready:
            current.run()
            continue
        stack.append((current, True))
        stack.extend((arg.slot.node, False) for arg in reversed(current.slot_args) if arg.slot.value is None)


def wanted_by_name(sites: Collection[CallSite]) -> dict[str, frozenset[int]]:
    """Call sites as op name to occurrences."""
    names: dict[str, set[int]] = {}
    for name, occurrence in sites:
        names.setdefault(name, set()).add(occurrence)
    return {name: frozenset(found) for name, found in names.items()}


class PlannedForward:
    """Stands in for a unit's ``forward`` on the instance; copies with the module, undone by ``remove``."""

    def __init__(
        self, module: torch.nn.Module, fqn: str, sites: Collection[CallSite], check: bool = True
    ) -> None:
        self.module = module
        self.fqn = fqn
        self.sites = tuple(sites)
        self.wanted = wanted_by_name(self.sites)
        self.tags = tags_of(self.sites)
        self.replaced = module.__dict__.get("forward")  # somebody else's instance attribute, if there is one
        self.first_step = FirstStep(check)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that stands behind."""
        return self.replaced if self.replaced is not None else type(self.module).forward.__get__(self.module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            return checkpointed_for_compile(self, args, kwargs)
        if _here.recorder is not None or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)  # a unit inside of a unit belongs to the outer one
        with UnitRecorder(self.fqn, self.wanted, self.first_step):
            return self.original(*args, **kwargs)
