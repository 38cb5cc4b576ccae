"""Optimizers that step in the backward pass: the hooks of parameters, for a copy of the model.

Such a loop registers a hook on each parameter (``register_post_accumulate_grad_hook``), which steps an optimizer over
that parameter and drops its gradient, as soon as the gradient is there. torchtune's recipes and PyTorch's tutorial do
that, and ``torch.distributed.optim._apply_optimizer_in_backward``.

A fake step runs a copy of the model. A hook is a function that refers to optimizers over the model's own parameters: in
its closure, its arguments or global variables. So the copy gets hooks of the same code, in which everything that leads
to an optimizer, a module or a tensor is replaced by its twin. Other things stay the same objects.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from sacplan._record.state import reachable
from sacplan._torch.gradient_hooks import Hook, applied_in_backward, gradient_hooks, step_applied

_HELD = (torch.optim.Optimizer, torch.nn.Module, torch.Tensor)


def optimizers_in_backward(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the hooks of a model's parameters refer to, each once."""
    found: dict[int, torch.optim.Optimizer] = {}
    seen: dict[int, Any] = {}  # hooks of many parameters share what they refer to
    for p in model.parameters():
        found.update((id(optimizer), optimizer) for optimizer in applied_in_backward(p))
        for hook in gradient_hooks(p):
            found.update((id(v), v) for v in _behind(hook, seen) if isinstance(v, torch.optim.Optimizer))
    return list(found.values())


def has_gradient_hooks(model: torch.nn.Module) -> bool:
    """Whether hooks run when the gradient of some parameter is there."""
    return any(gradient_hooks(p) or applied_in_backward(p) for p in model.parameters())


def copy_gradient_hooks(
    model: torch.nn.Module, twin_of: Mapping[int, Any], copied: Callable[[Any], Any]
) -> list[RemovableHandle]:
    """Register the hooks of a model's parameters on their twins, and return what removes them.

    Args:
        model: the user's.
        twin_of: ``id`` of a parameter to its twin.
        copied: makes a deep copy of a value in which tensors, modules and optimizers are replaced by their twins.
    """
    handles: list[RemovableHandle] = []
    functions: dict[int, Any] = {}  # one hook serves many parameters, and counts or collects what it likes
    for p in model.parameters():
        twin = twin_of[id(p)]
        hooks = [_rebound(hook, copied, functions) for hook in gradient_hooks(p)]
        if applied_in_backward(p):
            hooks.append(step_applied)
        handles.extend(map(twin.register_post_accumulate_grad_hook, hooks))
    return handles


def _rebound(value: Any, copied: Callable[[Any], Any], known: dict[int, Any]) -> Any:
    """Return a function, or another callable, with twins in the place of what it refers to."""
    if id(value) in known:
        return known[id(value)]
    again = functools.partial(_rebound, copied=copied, known=known)
    if isinstance(value, functools.partial):
        keywords = {name: again(v) for name, v in value.keywords.items()}
        found: Any = functools.partial(again(value.func), *map(again, value.args), **keywords)
    elif isinstance(value, types.MethodType):
        found = types.MethodType(again(value.__func__), again(value.__self__))
    elif isinstance(value, types.FunctionType):
        found = known[id(value)] = _rebound_function(value, again)
    elif any(isinstance(v, _HELD) for v in reachable(value)):
        found = copied(value)
    else:
        found = value
    known[id(value)] = found
    return found


def _rebound_function(function: types.FunctionType, again: Callable[[Any], Any]) -> types.FunctionType:
    used = {name: function.__globals__[name] for name in _globals_of(function)}
    # Only if one of them leads to the model's tensors: the function may write to the others.
    changed = {name: twin for name, value in used.items() if (twin := again(value)) is not value}
    cells = tuple(_rebound_cell(cell, again) for cell in function.__closure__ or ())
    found = types.FunctionType(
        function.__code__,
        {**function.__globals__, **changed} if changed else function.__globals__,
        function.__name__,
        tuple(map(again, function.__defaults__ or ())),
        cells,
    )
    if function.__kwdefaults__:
        found.__kwdefaults__ = {name: again(value) for name, value in function.__kwdefaults__.items()}
    return found


def _rebound_cell(cell: types.CellType, again: Callable[[Any], Any]) -> types.CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # an empty one
        return types.CellType()
    twin = again(value)
    # The same cell where nothing changes, so that a counter of the user's is the one that is written.
    return cell if twin is value else types.CellType(twin)


def _globals_of(function: types.FunctionType) -> Iterator[str]:
    """Yield the names of global variables that a function, or one that is defined in it, refers to.

    Functions and classes of modules are left out, since a hook's helpers take what they need as arguments.
    """
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
        for name in code.co_names:
            value = function.__globals__.get(name)
            if value is not None and not isinstance(value, (types.ModuleType, types.FunctionType, type)):
                yield name


def _behind(hook: Hook, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield what can be reached from a hook through closures, arguments and global variables, and is not ``seen``."""
    pending: list[Any] = [hook]
    while pending:
        for value in reachable(pending.pop(), seen=seen):
            yield value
            if isinstance(value, types.FunctionType):
                pending.extend(value.__globals__[name] for name in _globals_of(value))
                pending.extend((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
                for cell in value.__closure__ or ():
                    with contextlib.suppress(ValueError):  # an empty cell
                        pending.append(cell.cell_contents)
            elif isinstance(value, types.MethodType):
                pending.append(value.__func__)
