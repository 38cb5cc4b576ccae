"""Save the state of the user's objects before a real step, and restore it afterwards, whatever happens.

A :class:`Snapshot` follows what it is given (a model, an optimizer, a batch) through attributes and containers. It
keeps the objects that it finds, and copies of what can change in them: the bytes of storages, the sizes of tensors, the
entries of containers, the states of generators. So nothing has to be made again to be put back: a buffer that was
resized gets its own storage, size and bytes back, and a list its own tensors.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sacplan.errors import TraceError
from sacplan.torch_compat.autograd import set_version
from sacplan.torch_compat.fake_tensors import FakeTensor
from sacplan.torch_compat.private import storage_key, strided_parts

_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, type, torch.dtype, torch.device, torch.Size}
)
_PLAIN_CLASSES = (types.SimpleNamespace, functools.partial)  # followed, though of the standard library
_HELD = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the generators of torch, numpy and Python."""
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    cuda = (
        torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    )
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def preserved_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, *others: Any
) -> Iterator[None]:
    """Restore a model, its optimizer and others, such as the batch, after real steps; gradients are None inside.

    Restored are parameters, buffers, gradients, tensors and numbers in attributes and in containers (nested ones too,
    and those of plain objects), optimizer state, and random generators: the global ones, and those that the objects
    hold. Not followed are modules of code, data sets and loaders, and objects of the standard library (threads,
    files, iterators); of functions only the tensors, modules and optimizers in a closure. Copies of CUDA tensors lie
    on the host.
    """
    snapshot = Snapshot(model, optimizer, *others)
    snapshot.drop_gradients()
    with preserved_rng():
        try:
            yield
        finally:
            snapshot.restore()


@dataclass(slots=True)
class _Storage:
    """The bytes of a storage that the tensors found so far span, [low, high)."""

    storage: torch.UntypedStorage
    nbytes: int
    low: int
    high: int
    saved: torch.Tensor | None = None

    def bytes(self) -> torch.Tensor:
        view = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return view.set_(self.storage, self.low, (self.high - self.low,), (1,))

    def save(self) -> None:
        self.high = min(self.high, self.nbytes)  # a tensor whose storage was resized may reach beyond it
        if self.high > self.low:
            self.saved = self.bytes().to("cpu", copy=True)

    def restore(self) -> None:
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)
        if self.saved is not None:
            self.bytes().copy_(self.saved)


class Snapshot:
    """A copy of the state of some objects, see the module's docstring; ``restore`` may be called once.

    Raises:
        TraceError: an object that cannot be looked at; nothing has been changed then.
    """

    def __init__(self, *roots: Any) -> None:
        self._seen: dict[int, Any] = {}  # keeps the objects, so that no other one gets their ids
        self._storages: dict[int, _Storage] = {}
        self._leaves: list[torch.Tensor] = []
        # Each puts one thing back; the bytes of storages come first.
        self._undo: list[Callable[[], object]] = []
        self._pending: list[Any] = list(roots)
        try:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self._follow()
                for storage in self._storages.values():
                    storage.save()
        except Exception as error:
            raise TraceError(
                "the state of the model, the optimizer and the batch cannot be saved before a real step: "
                f'{type(error).__name__}: {error}. Use trace="fake", which leaves them alone.'
            ) from error

    def drop_gradients(self) -> None:
        """Set the gradients of all leaves to None."""
        for t in self._leaves:
            t.grad = None

    def restore(self) -> None:
        """Put everything back. An interrupt is raised when that is done.

        Raises:
            TraceError: something could not be put back; everything else was.
        """
        # Bytes first: ``_undo`` may give a tensor its old storage back, which must hold the old values by then. After
        # an interrupt, or an object that refuses, the loop goes on; both are reported at the end.
        interrupt: KeyboardInterrupt | None = None
        failed: list[str] = []
        steps = [*(s.restore for s in self._storages.values()), *self._undo]
        while steps:
            try:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    while steps:
                        steps[0]()  # harmless to do twice, if an interrupt comes in between
                        del steps[0]
            except KeyboardInterrupt as error:
                interrupt = error
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")
                del steps[0]
        if interrupt is not None:
            raise interrupt
        if failed:
            raise TraceError(
                f"after the real step {len(failed)} things could not be put back as they were: {failed[0]}. Make the "
                'model again, and use trace="fake".'
            )

    # --- looking around ------------------------------------------------------------------------

    def _follow(self) -> None:
        while self._pending:
            value = self._pending.pop()
            if type(value) in _ATOMS or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._look_at(value)

    def _look_at(self, value: Any) -> None:
        self._pending.extend(_parts(value))
        # Special kinds before general ones: a tensor or a container may also have attributes, and a module is an
        # object. What no branch takes (classes, Python modules, objects of the standard library) is left alone.
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, (dict, list, collections.deque, set)):
            self._container(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, torch.Generator):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, (np.random.Generator, np.random.BitGenerator, np.random.RandomState)):
            self._numpy_generator(value)
        elif isinstance(value, types.FunctionType):
            self._pending.extend((vars(value), *held_by_function(value)))
        elif _has_attributes(value):
            self._object(value)

    def _container(self, value: Any) -> None:
        kind: Any = _kind_of_container(value)
        items = _entries(value)

        # Only if something changed: others may watch a dictionary, and an unchanged one costs nothing. Order counts,
        # since ``parameters()`` follows it.
        def restore() -> None:
            now = _entries(value)
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                kind.clear(value)
                if issubclass(kind, dict):
                    kind.update(value, zip(items[::2], items[1::2], strict=True))
                else:
                    (kind.update if kind is set else kind.extend)(value, items)

        self._undo.append(restore)

    def _array(self, value: Any) -> None:
        if value.dtype == object:
            self._pending.extend(value.flat)
        copy = value.copy()

        def restore() -> None:
            if value.flags.writeable:
                value[...] = copy

        self._undo.append(restore)

    def _numpy_generator(self, value: Any) -> None:
        if isinstance(value, np.random.RandomState):
            self._undo.append(functools.partial(value.set_state, value.get_state()))
            return
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value
        self._undo.append(functools.partial(setattr, bits, "state", bits.state))

    def _object(self, value: Any) -> None:
        for slot in _slots(type(value)):
            self._slot(value, slot)
        if isinstance(value, torch.jit.ScriptModule):
            self._script_module(value)

    def _slot(self, value: Any, descriptor: types.MemberDescriptorType) -> None:
        try:
            old = descriptor.__get__(value)
        except AttributeError:  # not set: if a step sets it, it is deleted again
            self._undo.append(lambda: (descriptor.__set__(value, None), descriptor.__delete__(value)))  # type: ignore[func-returns-value]
            return
        self._undo.append(lambda: descriptor.__set__(value, old))

    def _script_module(self, module: torch.nn.Module) -> None:
        """Follow the tensors of a TorchScript module, which lie in C++ and in no attribute."""
        self._pending.extend(module.children())
        self._pending.extend(p for p in module.parameters(recurse=False))
        compiled: Any = module._c
        for name, tensor in module.named_buffers(recurse=False):
            self._pending.append(tensor)
            self._undo.append(functools.partial(compiled.setattr, name, tensor))

    # --- tensors -------------------------------------------------------------------------------

    def _tensor(self, t: torch.Tensor) -> None:
        self._pending.append(vars(t))
        inner = getattr(t, "__tensor_flatten__", None)
        if inner is not None:  # a wrapper subclass
            self._pending.extend(getattr(t, name) for name in inner()[0])
        elif t.layout == torch.strided:
            self._storage(t)
        else:
            self._pending.extend(part for part in strided_parts(t) if part is not t)
        self._metadata(t)
        if t.is_leaf:
            self._leaf(t)

    def _storage(self, t: torch.Tensor) -> None:
        if isinstance(t, FakeTensor) or t.device.type == "meta" or t._is_zerotensor():
            return  # no bytes to save
        # Only the bytes that its elements span: a view of a large buffer must not copy the whole buffer. Nested and
        # quantized tensors have other strides, and are saved whole.
        storage = t.untyped_storage()
        size = storage.nbytes()
        low, high = 0, size
        if not t.is_nested and not t.is_quantized:
            low = int(t.storage_offset()) * t.element_size()
            reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            high = low + (reach + 1 if t.numel() else 0) * t.element_size()
        known = self._storages.setdefault(storage_key(storage), _Storage(storage, size, low, high))
        known.low, known.high = min(known.low, low), max(known.high, high)

    def _metadata(self, t: torch.Tensor) -> None:
        """Put back sizes, strides and the storage itself, which ``resize_``, ``set_`` and ``.data =`` change."""
        if t.is_nested:
            return
        # The alias keeps sizes, strides and the storage as they are now, and the storage alive.
        alias = t.detach()
        strided = t.layout == torch.strided and getattr(t, "__tensor_flatten__", None) is None
        version = None if t.is_inference() or not strided else t._version

        def restore() -> None:
            if not strided or _layout_of(t) != _layout_of(alias):
                t.data = alias
            if version is not None:
                # In-place writes of the step have raised it. A graph that saved the tensor before would refuse that.
                set_version(t, version)

        self._undo.append(restore)

    def _leaf(self, t: torch.Tensor) -> None:
        grad, requires_grad = t.grad, t.requires_grad
        self._leaves.append(t)
        self._pending.append(grad)

        def restore() -> None:
            if t.requires_grad != requires_grad and t.is_leaf:
                t.requires_grad_(requires_grad)
            if t.grad is not grad:
                t.grad = grad

        self._undo.append(restore)


_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque, tuple, frozenset)


def _kind_of_container(value: Any) -> Any:
    return next(k for k in _CONTAINERS if isinstance(value, k))


def _entries(value: Any) -> list[Any]:
    """Return the items of a container, of a dictionary its keys and values in turn.

    By the methods of the built-in class: a subclass may do anything in its own, and e3nn's tuples have no ``len``.
    """
    kind = _kind_of_container(value)
    if issubclass(kind, dict):
        return [v for pair in kind.items(value) for v in pair]
    return list(kind.__iter__(value))


def _layout_of(t: torch.Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.shape, t.stride(), t.storage_offset(), storage_key(t.untyped_storage())


def _is_followed(cls: type) -> bool:
    """Whether the attributes of such objects are part of a model's state."""
    # Modules are followed, whoever made their class: that of ``fully_shard`` is in ``torch.distributed``. Loaders and
    # process groups are no state of the model, and hold threads and handles that must not be touched. Of the standard
    # library only containers are followed, and what the user's script (``__main__``) defines.
    if issubclass(cls, _PLAIN_CLASSES) or issubclass(cls, torch.nn.Module):
        return True
    room = cls.__module__
    if room.startswith(("torch.utils.data", "torch._C", "torch.distributed")):
        return False
    first = room.partition(".")[0]
    return first not in sys.stdlib_module_names or first in ("__main__", "collections")


def _slots(cls: type) -> Iterator[types.MemberDescriptorType]:
    """Yield the descriptors of ``__slots__`` of a class and its bases; classes in C have none."""
    for base in cls.__mro__:
        if "__slots__" in vars(base):
            yield from (d for d in vars(base).values() if isinstance(d, types.MemberDescriptorType))


def _has_attributes(value: Any) -> bool:
    """Whether a value is an object whose attributes are followed."""
    kinds = (torch.Tensor, types.FunctionType, types.MethodType, type, types.ModuleType)
    return not isinstance(value, kinds) and _is_followed(type(value))


def _parts(value: Any) -> Iterator[Any]:
    """Yield what a value refers to: the entries of containers, the attributes of objects. Of tensors, nothing."""
    if isinstance(value, _CONTAINERS):
        yield from _entries(value)
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif _has_attributes(value):
        with contextlib.suppress(AttributeError):
            yield object.__getattribute__(value, "__dict__")
        for slot in _slots(type(value)):
            with contextlib.suppress(AttributeError):  # not set
                yield slot.__get__(value)


def reachable(*roots: Any, seen: dict[int, Any] | None = None, but: tuple[type, ...] = ()) -> Iterator[Any]:
    """Yield the objects that a snapshot would follow, from attribute to attribute, but not inside of tensors.

    ``seen`` are objects that were yielded before, by ``id``; new ones are added. Objects of the classes ``but`` are
    yielded, and not followed.
    """
    seen = {} if seen is None else seen
    pending = list(roots)
    while pending:
        value = pending.pop()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        if not isinstance(value, but):
            pending.extend(_parts(value))


def kept_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps from step to step, wherever they lie in it, without its parameters."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = reachable(optimizer, but=(torch.nn.Module,))
    return [v for v in found if isinstance(v, torch.Tensor) and id(v) not in own]


def variables_of(function: Any) -> Iterator[tuple[types.CellType, Any]]:
    """Yield the variables of outer functions that a function refers to, and their values."""
    # Read no attribute of anything else: the stand-in for a missing package raises whatever one reads.
    for cell in (isinstance(function, types.FunctionType) and function.__closure__) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell, cell.cell_contents


def held_by_function(function: Any) -> Iterable[Any]:
    """Return tensors, modules and optimizers that a function has in its closure, its defaults or as bound arguments.

    Containers are left alone: people fill those to learn what ran.
    """
    found: list[Any] = []
    if isinstance(function, functools.partial):
        found.extend((*function.args, *function.keywords.values(), *held_by_function(function.func)))
    elif isinstance(function, types.MethodType):
        found.extend((function.__self__, *held_by_function(function.__func__)))
    elif isinstance(function, types.FunctionType):
        found.extend((*(function.__defaults__ or ()), *(v for _, v in variables_of(function))))
    return [v for v in found if isinstance(v, _HELD)]
