"""Keep a fake step and the user's code apart.

Caches in the code, and branches on whether a tensor is fake, would make a fake step differ from a real one. The other
way round, a fake step may leave fake tensors in the code, on which a real step would then fail.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sacplan.errors import SacplanWarning, TraceError
from sacplan.record.state import reachable, variables_of
from sacplan.torch_compat.fake_tensors import FakeTensor, FakeTensorMode
from sacplan.torch_compat.local_tensors import local_part
from sacplan.torch_compat.private import replaced


@contextlib.contextmanager
def cleared_caches(model: torch.nn.Module) -> Iterator[None]:
    """Clear ``functools`` caches in the code of the model's modules, before and after.

    Some hold tensors (the relative positions of transformers' BEiT): real ones must not get into a fake step,
    and fake ones must not stay for the real one.
    """
    # Listed once, so that the same caches are cleared afterwards, whatever the step imports.
    caches = list(function_caches(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


@contextlib.contextmanager
def branches_of_a_real_step() -> Iterator[None]:
    """Inside, transformers does not see that tensors are fake, and takes the branches it takes for real ones.

    transformers leaves out an attention mask that masks nothing, which decides the attention kernel, but does not
    look at the values of a ``FakeTensor``. ``data_rules`` knows the values, or has a rule for them.
    Private API of transformers (4.57 to 5): ``utils.import_utils.is_fake_tensor``.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        yield
        return
    with replaced(module, is_fake_tensor=lambda tensor: False):
        yield


@contextlib.contextmanager
def no_fake_tensors_left(
    model: torch.nn.Module, loss_fn: Callable[..., Any]
) -> Iterator[Callable[[FakeTensorMode], None]]:
    """After a fake step, take its fake tensors out of the user's objects. Yields a function to call with the fake mode.

    Whatever such a tensor came into gets its earlier entries back: globals of the Python modules of the model's
    classes, ``loss_fn`` and hooks, and of what these import, attributes of these classes, variables of outer functions,
    and containers in all of these. For anything else a ``SacplanWarning`` says that it holds one. The step's own
    objects must be gone on exit, and the garbage collector be off: this collects what was made since, and looks further
    only if something is left.
    """
    # Three rounds, each only if the one before has left something. A mode dies with its last fake tensor, so a weak
    # reference to the mode tells at no cost that none is left:
    # 1. collect cycles that were made since the garbage collector was switched off;
    # 2. put the entries of namespaces and containers back to what they were;
    # 3. ask the garbage collector who holds what is left, and say so.
    before = _Namespaces(model, loss_fn)
    modes: list[weakref.ref[FakeTensorMode]] = []

    def alive() -> list[FakeTensorMode]:
        return [mode for ref in modes if (mode := ref()) is not None]

    try:
        yield lambda mode: modes.append(weakref.ref(mode))
    except BaseException:
        for mode in alive():  # also held by the traceback, so nothing is collected
            before.put_back(mode)
        raise
    if not alive():
        return  # the usual case
    gc.collect(1)  # what was made since the collector was switched off
    for mode in alive():
        before.put_back(mode)
        gc.collect()
    holders = [name for mode in alive() for name in _holders(mode)]
    if holders:
        warnings.warn(
            f"the fake step left fake tensors outside of the model, in {', '.join(dict.fromkeys(holders))}. A real "
            "step cannot use them: remove them before it, or keep what a step caches in the model.",
            SacplanWarning,
            stacklevel=4,
        )


_CONTAINERS = (dict, list, set, deque)
_NOTED = frozenset((*_CONTAINERS, OrderedDict, defaultdict))  # subclasses may do anything when they are asked


class _Namespaces:
    """The globals and class attributes of a model's code, and the containers in them, as they are now."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., Any]) -> None:
        self._owners: list[tuple[Any, dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        functions = [f for f in reachable(model, loss_fn) if isinstance(f, types.FunctionType)]
        self._variables = [(cell, v) for f in functions for cell, v in variables_of(f)]
        for _, value in self._variables:
            if type(value) in _NOTED:
                self._note(value)
            elif not isinstance(value, torch.nn.Module) and type(getattr(value, "__dict__", None)) is dict:
                self._note(vars(value))
        for owner in _code_used_by(model, (loss_fn, *functions)):
            names = dict(vars(owner))
            self._owners.append((owner, names))
            for value in names.values():
                if type(value) in _NOTED:
                    self._note(value)

    def _note(self, container: Any) -> None:
        pending = [container]
        while pending:
            value = pending.pop()
            if id(value) in self._containers:
                continue
            copy = dict(value) if isinstance(value, dict) else list(value)
            self._containers[id(value)] = value, copy
            inside = copy.values() if isinstance(copy, dict) else copy
            pending.extend(v for v in inside if type(v) in _NOTED)

    def put_back(self, mode: FakeTensorMode) -> None:
        """Give names and containers their entries of before where fake tensors of this mode have come in."""
        # Other new entries stay: they are the code's own.
        for container, copy in self._containers.values():
            if isinstance(container, dict):
                for key in _changed(container, copy, mode):
                    if key in copy:
                        container[key] = copy[key]
                    else:
                        del container[key]
            elif any(_holds(value, mode) for value in list(container)):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(copy)
        for cell, value in self._variables:
            if _holds(cell.cell_contents, mode) and cell.cell_contents is not value:
                cell.cell_contents = value
        for owner, names in self._owners:
            for name in _changed(vars(owner), names, mode):
                if name in names:
                    setattr(owner, name, names[name])
                else:
                    delattr(owner, name)


def _changed(now: Any, before: dict[Any, Any], mode: FakeTensorMode) -> list[Any]:
    """Return the keys that have a new value with fake tensors in it."""
    missing = object()
    return [
        key
        for key, value in list(now.items())
        if value is not before.get(key, missing) and _holds(value, mode)
    ]


def _holds(value: Any, mode: FakeTensorMode) -> bool:
    """Whether a value, its items or the attributes of its objects hold a fake tensor of this mode."""
    tensors = (local_part(v) for v in reachable(value) if isinstance(v, torch.Tensor))
    return any(isinstance(t, FakeTensor) and t.fake_mode is mode for t in tensors)


def _holders(mode: FakeTensorMode) -> list[str]:
    """Return what holds the fake tensors of a mode, by name or class; of a container, what holds that."""
    found: list[Any] = [
        o for o in gc.get_objects() if issubclass(type(o), FakeTensor) and o.fake_mode is mode
    ]
    names: set[str] = set()
    for _ in range(_LEVELS):
        holders = [h for h in gc.get_referrers(*found) if h is not found]
        found = [h for h in holders if isinstance(h, (*_CONTAINERS, tuple))]
        others = [h for h in holders if not isinstance(h, (*_CONTAINERS, tuple, types.FrameType))]
        names.update(getattr(h, "__name__", f"a {type(h).__qualname__}") for h in others)
    return sorted(names)


_LEVELS = 4  # of containers in containers


def _code_of(model: torch.nn.Module) -> list[Any]:
    """Return the classes of the model's modules, and the Python modules in which they are."""
    owners: dict[int, Any] = {}
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        if cls is not object and _is_users(cls.__module__):
            for owner in (cls, sys.modules.get(cls.__module__)):
                if owner is not None:
                    owners[id(owner)] = owner
    return list(owners.values())


def _code_used_by(model: torch.nn.Module, functions: Iterable[Any]) -> list[Any]:
    """Return the code of the model, the Python modules of functions, and those that this code imports from."""
    rooms = {getattr(function, "__module__", None) or "" for function in functions}
    owners = [*_code_of(model), *(sys.modules[r] for r in sorted(rooms) if _is_users(r) and r in sys.modules)]
    for owner in owners.copy():
        for value in list(vars(owner).values()) if isinstance(owner, types.ModuleType) else ():
            if isinstance(value, types.ModuleType):
                room = value.__name__
            elif isinstance(value, (types.FunctionType, type)):
                room = value.__module__
            else:
                continue
            if isinstance(room, str) and _is_users(room) and room in sys.modules:
                owners.append(sys.modules[room])
    return list({id(owner): owner for owner in owners}.values())


def _is_users(room: str) -> bool:
    top = room.partition(".")[0]
    return top == "__main__" or (top not in _NO_CACHES and top not in sys.stdlib_module_names)


_NO_CACHES = frozenset(("torch", "sacplan", "numpy", "pytest", ""))  # of fake tensors, at least


def function_caches(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the ``functools`` caches in the code of the model's modules."""
    seen: set[int] = set()
    for owner in _code_of(model):
        for value in list(vars(owner).values()):
            # Read no attribute of any other value: the stand-in for a missing package raises whatever one reads.
            wrapped = isinstance(value, (staticmethod, classmethod, types.MethodType))
            function = value.__func__ if wrapped else value
            for candidate in (function, *(v for _, v in variables_of(function))):
                if isinstance(candidate, functools._lru_cache_wrapper) and id(candidate) not in seen:
                    seen.add(id(candidate))
                    yield candidate


def tensors_in_caches(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that ``functools`` caches in the code of the model's modules hold at this moment.

    They outlive the step as buffers do. A cache has no way to list its results, so the garbage collector is asked.
    """
    held = [value for cache in function_caches(model) for value in gc.get_referents(cache)]
    results = [value for value in held if not isinstance(value, type)]
    return [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]


def told_of_scripted(model: torch.nn.Module, scripted: tuple[str, ...], trace: str) -> Any:
    """Return a context for a step of a model with modules made by ``torch.jit.script`` or ``torch.jit.trace``.

    A fake step cannot replace their tensors, which lie in C++. In a real step the modules are recorded as written.
    After a few calls TorchScript rewrites them: later steps may keep other tensors, and some fail under a mode.

    Raises:
        TraceError: there are some, and the trace is fake; or the model itself is one.
    """
    if not scripted:
        return contextlib.nullcontext()
    which = f"module {scripted[0]!r}" if scripted[0] else "the model"
    origin = f"{which} was made by torch.jit.script or torch.jit.trace"
    instead = "Put the Python module that it was made of in its place (some packages have a switch for that)"
    if not scripted[0]:
        raise TraceError(f"{origin}, and nothing can be put around its ops. {instead}.")
    if trace == "fake":
        raise TraceError(
            f"{origin}: its tensors lie in C++, where a fake step cannot replace them. {instead}, or use "
            'trace="real".'
        )
    warnings.warn(
        f"{origin}. TorchScript rewrites its code after a few calls, and then keeps other tensors, so the peak may be "
        f"off by some percent; a plan leaves it alone. {instead}.",
        SacplanWarning,
        stacklevel=5,
    )
    return torch.jit.optimized_execution(False)  # type: ignore[attr-defined]


def plain_attributes(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the numbers, flags and texts that modules have as attributes, and the sizes of their containers.

    If a step changes one of them, the next step may run other ops.
    """
    return [
        {
            name: len(value) if isinstance(value, (dict, list, set)) else value
            for name, value in vars(module).items()
            if value is None or isinstance(value, (bool, int, float, str, dict, list, set))
        }
        for module in model.modules()
    ]
