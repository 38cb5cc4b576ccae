"""Parameters, their gradients and the optimizer's state: storages that are known by name, and when each appears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sacplan.core.program import StorageKind
from sacplan.record.host_state import counters_on_host, paged_state, plain_parts, states
from sacplan.record.state import kept_by
from sacplan.record.storages import Storages
from sacplan.record.tensor_table import TensorTable
from sacplan.torch_compat.distributed_modules import gathered_parameters, offloaded_parameters, parts_on_host
from sacplan.torch_compat.local_tensors import local_part
from sacplan.torch_compat.private import is_plain, without_torch_functions


@dataclass(eq=False)
class TrainingState:
    """The model's own tensors and its optimizers, and hooks around an optimizer's step.

    Args:
        storages, tensors: the recorder's.
        is_paused: tells whether an optimizer's step that runs now is not recorded.
        on_gpu: whether the device has memory of its own, so that state that is kept in the host's does not count.

    Attributes:
        gradients: storage of a parameter to the tensor that is its gradient.
        runs_closure: whether the optimizer's step that began last got a closure, which runs the step with gradients.
        stepped_on_host: identities of the parameters that an optimizer updates on the host, and keeps no gradient of.
        in_optimizer_step: how many steps of optimizers run, one inside of another: of a wrapper, and what it wraps.
    """

    storages: Storages
    tensors: TensorTable
    is_paused: Callable[[], bool]
    on_gpu: bool = False
    gradients: dict[int, int] = field(default_factory=dict)
    runs_closure: bool = False
    stepped_on_host: frozenset[int] = frozenset()
    in_optimizer_step: int = 0
    _parameters: dict[int, torch.Tensor] = field(default_factory=dict)
    _optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    _removers: list[Any] = field(default_factory=list)

    def __enter__(self) -> TrainingState:
        self._removers = [
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for remover in self._removers:
            remover.remove()
        self._removers = []

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_paused():
            return
        # A gradient that is gone when the recording ends would never be named as one.
        self._mark_gradients()
        self.in_optimizer_step += 1
        self.runs_closure = any(map(callable, (*args, *kwargs.values())))

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_paused():
            return
        self.in_optimizer_step -= 1
        # It may have made its state just now. Optimizers inside of a wrapper are not this step's.
        if any(optimizer is o for o in self._optimizers):
            self._track_state(optimizer)

    def track_model(self, model: torch.nn.Module) -> None:
        """Count parameters, buffers and gradients."""
        # A tied parameter goes by its first name. Of two parameters on one memory, each has a name.
        for name, p in model.named_parameters():
            self.storages.name_fixed(p, name, alone=not p.requires_grad or id(p) in self.stepped_on_host)
            self.storages.track(p, StorageKind.PARAMETER)
            # Kept, so that no other tensor gets its identity.
            self._parameters[id(p)] = p
            if p.grad is not None:
                self.storages.track(p.grad, StorageKind.GRADIENT)
        for part in (t for p in offloaded_parameters(model) if self.on_gpu for t in parts_on_host(p)):
            self.storages.leave_on_host(part, shard=True)
        for name, b in model.named_buffers():
            self.storages.name_fixed(b, name, alone=False)
            self.storages.track(b, StorageKind.BUFFER)
        for t in gathered_parameters(model):
            self.storages.track(t, StorageKind.PARAMETER)

    def track_optimizer(self, optimizer: torch.optim.Optimizer, *, initial: bool = False) -> None:
        """Count the optimizer's state, the one that is there and the one that it will make.

        ``initial`` says that what is there now was there when the step began.
        """
        self._optimizers.append(optimizer)
        self._track_state(optimizer, initial=initial)

    @without_torch_functions
    def _track_state(self, optimizer: torch.optim.Optimizer, *, initial: bool = False) -> None:
        for part in (part for value in kept_by(optimizer) for part in plain_parts(value)):
            self.storages.track(part, StorageKind.OPTIMIZER_STATE, initial=initial)
        if self.on_gpu:
            for part in (*counters_on_host(optimizer), *paged_state(optimizer)):
                self.storages.leave_on_host(part)
            for p, state in states(optimizer):
                if self.storages.is_on_host(p):
                    for part in (part for value in state.values() for part in plain_parts(value)):
                        self.storages.leave_on_host(part, shard=True)

    def mark_late_kinds(self) -> None:
        """Note which of the storages that ops made are gradients or the optimizer's state.

        When such a storage is allocated, nothing tells it from any other result.
        """
        self._mark_gradients()
        for optimizer in self._optimizers:
            self._track_state(optimizer)

    @without_torch_functions
    def _mark_gradients(self) -> None:
        for p in self._parameters.values():
            if p.grad is not None:
                self.storages.track(p.grad, StorageKind.GRADIENT)
                # The table has no tensor for a sparse gradient.
                own, grad = local_part(p), local_part(p.grad)
                if is_plain(own) and is_plain(grad):
                    gradient = self.tensors.index(grad, self.storages.known(grad))
                    self.gradients[self.storages.known(own)] = gradient

    def restart(self) -> None:
        """Begin a new record."""
        self.gradients.clear()

    def forget(self) -> None:
        """Let go of the model and the optimizers."""
        self._parameters.clear()
        self._optimizers.clear()
