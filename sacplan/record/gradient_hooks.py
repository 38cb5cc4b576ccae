"""Optimizers that step in the backward pass: the hooks of parameters, for a copy of the model.

A loop registers a hook on each parameter (``register_post_accumulate_grad_hook``), which steps an optimizer over that
parameter and drops its gradient, as soon as the gradient is there. torchtune's recipes, PyTorch's tutorial and
``torch.distributed.optim._apply_optimizer_in_backward`` do that.

A fake step runs a copy of the model. A hook is a function that refers to optimizers over the model's own parameters: in
its closure, its arguments or global variables. So the copy gets twins of the hooks (``twin_functions.py``).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from sacplan.record.state import reachable, variables_of
from sacplan.record.twin_functions import TwinFunctions, globals_of
from sacplan.torch_compat.gradient_hooks import (
    Hook,
    applied_in_backward,
    gradient_hooks,
    step_applied,
    tensor_hooks,
)


def optimizers_in_backward(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that the hooks of a model's parameters refer to, each once."""
    found: dict[int, torch.optim.Optimizer] = {}
    seen: dict[int, Any] = {}  # hooks of many parameters share objects, which are searched once
    for p in model.parameters():
        found.update((id(optimizer), optimizer) for optimizer in applied_in_backward(p))
        for hook in gradient_hooks(p):
            found.update((id(v), v) for v in _reached(hook, seen) if isinstance(v, torch.optim.Optimizer))
    return list(found.values())


def has_gradient_hooks(model: torch.nn.Module) -> bool:
    """Whether some parameter has a hook that runs when its gradient is there."""
    return any(gradient_hooks(p) or applied_in_backward(p) for p in model.parameters())


def copy_gradient_hooks(model: torch.nn.Module, functions: TwinFunctions) -> list[RemovableHandle]:
    """Register the hooks of a model's parameters on their twins, and return the handles."""
    handles: list[RemovableHandle] = []
    for p in model.parameters():
        twin = functions.of(p)
        hooks = [functions.of(hook) for hook in gradient_hooks(p)]
        if applied_in_backward(p):
            hooks.append(step_applied)
        handles.extend(map(twin.register_post_accumulate_grad_hook, hooks))
        handles.extend(twin.register_hook(functions.of(hook)) for hook in tensor_hooks(p))
    return handles


def _reached(hook: Hook, seen: dict[int, Any]) -> Iterator[Any]:
    """Yield what can be reached from a hook through closures, arguments and global variables, and is not ``seen``."""
    pending: list[Any] = [hook]
    while pending:
        for value in reachable(pending.pop(), seen=seen):
            yield value
            if isinstance(value, types.FunctionType):
                pending.extend(v for _, v in globals_of(value))
                pending.extend((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
                pending.extend(v for _, v in variables_of(value))
            elif isinstance(value, types.MethodType):
                pending.append(value.__func__)
