"""Hooks that run when the gradient of a parameter is there, and the optimizers that step in them.

Private PyTorch API, tried on 2.11 and 2.13: ``Tensor._post_accumulate_grad_hooks``, ``Tensor._backward_hooks``, and
what ``torch.distributed.optim._apply_optimizer_in_backward`` leaves on parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[[torch.Tensor], Any]


def gradient_hooks(p: torch.Tensor) -> tuple[Hook, ...]:
    """Return the hooks of ``register_post_accumulate_grad_hook``, in the order in which they run."""
    return tuple((getattr(p, "_post_accumulate_grad_hooks", None) or {}).values())


def tensor_hooks(p: torch.Tensor) -> tuple[Hook, ...]:
    """Return the hooks of ``register_hook``, in the order in which they run."""
    return tuple((p._backward_hooks or {}).values())


def applied_in_backward(p: torch.Tensor) -> list[torch.optim.Optimizer]:
    """Return the optimizers of ``_apply_optimizer_in_backward``, if they step in a hook of the parameter."""
    found: list[torch.optim.Optimizer] = getattr(p, "_in_backward_optimizers", [])
    if found:
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        # With ``register_hook=False`` the user steps them. A copy of the parameter has ``step_applied`` as its hook.
        steps = p in param_to_optim_hook_handle_map or step_applied in gradient_hooks(p)
        return found if steps else []
    return []


def step_applied(p: torch.Tensor) -> None:
    """Do what the hook of ``_apply_optimizer_in_backward`` does, which refers to its own parameter."""
    for optimizer in getattr(p, "_in_backward_optimizers"):  # noqa: B009  (no attribute of a tensor's class)
        optimizer.step()
    p.grad = None
