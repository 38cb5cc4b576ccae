"""Recipes: recompute one discarded tensor, not a module's Python.

While a chosen module's forward runs, a dispatch mode leaves a node for every op that the plan
discards, with its arguments: tensors, or slots of other nodes. The pack hook gives autograd a handle
on a slot instead of the tensor. When autograd asks, the nodes that this one slot needs run, arguments
first; each runs once, remembers only the outputs that somebody pending still refers to, and drops
its arguments, so that plain reference counts free everything right after its last use.

What the mode did not see being made (custom kernels, other modules, wrapper subclasses) is kept. What
is kept is still checked: a saved-tensor hook switches autograd's own check for in-place writes off, so
handles carry the version and check it themselves.

Relatives: RETURNN's ``gradient_checkpoint_scope``, DTR (Kirisame et al. 2020). Known inefficiency: the
dispatch mode costs a few microseconds for every op in the forward of a unit, kept ones too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan._compiled import checkpointed_for_compile, tags_of
from sacplan._ops import op_traits, tensors_in
from sacplan._recording import CallSite
from sacplan._torch_private import FakeTensor, is_plain, storage_key
from sacplan.errors import RecipeError

_View = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


def _view_of(t: torch.Tensor) -> _View:
    return t.shape, t.stride(), t.storage_offset(), t.dtype


class _Slot:
    """One output of a discarded op: a value once it has been recomputed."""

    __slots__ = ("__weakref__", "node", "storage", "value", "version", "written")

    def __init__(self, node: _Node, tensor: torch.Tensor) -> None:
        self.node: _Node | None = node
        self.storage = weakref.ref(tensor.untyped_storage())
        self.version = tensor._version
        self.value: torch.Tensor | None = None
        self.written = False

    def view(self, view: _View) -> torch.Tensor:
        size, stride, offset, dtype = view
        assert self.value is not None
        base = self.value if self.value.dtype == dtype else self.value.view(dtype)
        return torch.as_strided(base, size, stride, offset)


class _SlotArg:
    """An argument that is a view of a slot."""

    __slots__ = ("slot", "view")

    def __init__(self, slot: _Slot, view: _View) -> None:
        self.slot = slot
        self.view = view


class _HeldArg:
    """An argument that is a kept tensor, and the version it had."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = _version(tensor)


def _version(t: torch.Tensor) -> int:
    return 0 if t.is_inference() else t._version


class _Node:
    """A discarded op, ready to run again."""

    __slots__ = ("__weakref__", "args", "func", "kwargs", "outputs", "rng", "slot_args", "unit")

    def __init__(self, unit: str, func: Any, rng: Any) -> None:
        self.unit = unit
        self.func: Any = func
        self.rng = rng  # (generator, state) for a random op
        self.args: Any = ()
        self.kwargs: Any = {}
        self.slot_args: list[_SlotArg] = []
        self.outputs: list[weakref.ref[_Slot] | None] = []

    def run(self) -> None:
        """Run the op; its slots get their values, its arguments are let go."""
        args = self._restore(self.args)
        kwargs = self._restore(self.kwargs)
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
        for ref, tensor in zip(self.outputs, tensors_in(out), strict=True):
            slot = ref() if ref is not None else None
            if slot is not None:
                slot.value = tensor
                slot.node = None
        self.args = self.kwargs = ()
        self.slot_args = []

    def _restore(self, value: Any) -> Any:
        if isinstance(value, _SlotArg):
            return value.slot.view(value.view)
        if isinstance(value, _HeldArg):
            if _version(value.tensor) != value.version:
                raise RecipeError(
                    f"unit {self.unit!r}: {self.func} has to run again in the backward pass, but an argument of "
                    f"shape {tuple(value.tensor.shape)} was written in place after the forward pass (version "
                    f"{value.version}, now {_version(value.tensor)}). Keep this op's output, or write to a copy."
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

    __slots__ = ("slot", "view")

    def __init__(self, slot: _Slot, view: _View) -> None:
        self.slot = slot
        self.view = view


class _Kept:
    """What autograd keeps for a kept tensor: itself, and the version it had."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = _version(tensor)


class UnitRecorder(TorchDispatchMode):
    """On while one call of a unit's forward runs.

    Args:
        unit: fqn, for messages.
        wanted: op name to the occurrences that are discarded.
    """

    def __init__(self, unit: str, wanted: dict[str, frozenset[int]]) -> None:
        super().__init__()
        self._unit = unit
        self._wanted = wanted
        self._by_func: dict[Any, frozenset[int] | None] = {}
        self._seen: dict[Any, int] = {}
        self._table: dict[int, _Slot] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> UnitRecorder:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        super().__exit__(exc_type, exc_value, traceback)
        self._hooks.__exit__(exc_type, exc_value, traceback)
        self._table.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            wanted = self._by_func[func]
        except KeyError:
            traits = op_traits(func)
            wanted = self._wanted.get(traits.name) if not traits.written_names else _WRITES
            self._by_func[func] = wanted
        if wanted is None:
            return func(*args, **kwargs)
        if wanted is _WRITES:
            self._note_write(func, args, kwargs)
            return func(*args, **kwargs)
        occurrence = self._seen.get(func, 0)
        self._seen[func] = occurrence + 1
        if occurrence not in wanted or not op_traits(func).rerunnable:
            return func(*args, **kwargs)
        rng = _generator_state(func, args, kwargs)
        out = func(*args, **kwargs)
        self._note(func, args, kwargs, out, rng)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, rng: Any) -> None:
        outputs = list(tensors_in(out))
        if not all(is_plain(t) for t in outputs) or not all(is_plain(t) for t in tensors_in((args, kwargs))):
            return
        node = _Node(self._unit, func, rng)
        node.args = self._remember(args, node)
        node.kwargs = self._remember(kwargs, node)
        for t in outputs:
            slot = _Slot(node, t)
            node.outputs.append(weakref.ref(slot))
            self._table[storage_key(t.untyped_storage())] = slot

    def _remember(self, value: Any, node: _Node) -> Any:
        if isinstance(value, torch.Tensor):
            slot = self._slot_of(value)
            if slot is None:
                return _HeldArg(value)
            arg = _SlotArg(slot, _view_of(value))
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
        if slot is None or slot.storage() is not storage or slot.written or slot.version != _version(t):
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
                slot = self._table.pop(storage_key(storage), None)
                if slot is not None and slot.storage() is storage:  # else the address was used again
                    slot.written = True

    def _pack(self, t: torch.Tensor) -> Any:
        slot = self._slot_of(t) if is_plain(t) else None
        return _Kept(t) if slot is None else _Handle(slot, _view_of(t))


_WRITES: frozenset[int] = frozenset({-1})


def _generator_state(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if not op_traits(func).random:
        return None
    generator = kwargs.get("generator")
    if generator is None:
        tensor = next(tensors_in((args, kwargs)), None)
        if tensor is None or isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return None
        generator = (
            torch.cuda.default_generators[tensor.device.index]
            if tensor.device.type == "cuda"
            else torch.default_generator
        )
    return generator, generator.get_state()


def _unpack(packed: Any) -> torch.Tensor:
    if type(packed) is _Kept:
        if _version(packed.tensor) != packed.version:
            raise RecipeError(
                f"a tensor of shape {tuple(packed.tensor.shape)} that the backward pass needs was written in place "
                f"after the forward pass (version {packed.version}, now {_version(packed.tensor)}). Write to a copy."
            )
        return packed.tensor
    slot: _Slot = packed.slot
    if slot.written:
        raise RecipeError(
            f"a discarded tensor of shape {tuple(packed.view[0])} was written in place after autograd took it"
            + (f" (made by {slot.node.func} in unit {slot.node.unit!r})" if slot.node else "")
            + ". Write to a copy, or keep it."
        )
    if slot.value is None:
        assert slot.node is not None
        _compute(slot.node)
    with torch.no_grad():
        return slot.view(packed.view)


def _compute(node: _Node) -> None:
    """Run the nodes that this one needs, arguments first, each once."""
    with torch.no_grad(), torch._C._DisableAutocast():
        stack = [(node, False)]
        while stack:
            current, ready = stack.pop()
            if not current.outputs:
                continue
            if not ready:
                stack.append((current, True))
                stack.extend(
                    (arg.slot.node, False)
                    for arg in reversed(current.slot_args)
                    if arg.slot.value is None and arg.slot.node is not None
                )
                continue
            current.run()
            current.outputs = []


def wanted_by_name(sites: Collection[CallSite]) -> dict[str, frozenset[int]]:
    """Call sites as op name to occurrences."""
    names: dict[str, set[int]] = {}
    for name, occurrence in sites:
        names.setdefault(name, set()).add(occurrence)
    return {name: frozenset(found) for name, found in names.items()}


class PlannedForward:
    """Stands in for a unit's ``forward`` on the instance; copies with the module, undone by ``remove``."""

    def __init__(self, module: torch.nn.Module, fqn: str, sites: Collection[CallSite]) -> None:
        self.module = module
        self.fqn = fqn
        self.sites = tuple(sites)
        self.wanted = wanted_by_name(self.sites)
        self.tags = tags_of(self.sites)
        self.replaced = module.__dict__.get("forward")  # somebody else's instance attribute, if there is one
        self.running = False

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that stands behind."""
        return self.replaced if self.replaced is not None else type(self.module).forward.__get__(self.module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpointed_for_compile(self, args, kwargs)
        if self.running or not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        self.running = True
        try:
            with UnitRecorder(self.fqn, self.wanted):
                return self.original(*args, **kwargs)
        finally:
            self.running = False
