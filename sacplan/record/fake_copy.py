"""Make copies of a model, a batch and an optimizer that have no data.

The fake model is a deep copy whose memo already maps every tensor of the model to a fake one, so no weight is copied
and the user's model is not touched.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from sacplan.errors import TraceError
from sacplan.record.fake_data import DataRules
from sacplan.record.fake_values import BATCH
from sacplan.record.gradient_hooks import copy_gradient_hooks, optimizers_in_backward
from sacplan.record.host_state import for_fake_steps, stand_in_factory
from sacplan.record.state import reachable
from sacplan.record.step import check_optimizer, make_optimizer
from sacplan.record.twin_functions import TwinFunctions
from sacplan.torch_compat.distributed_modules import copyable
from sacplan.torch_compat.fake_tensors import active_fake_mode, fake_empty_strided, meta_storage
from sacplan.torch_compat.local_tensors import local_part, stands_for_another, wrapping_of


class FakeCopier:
    """Maps tensors of a model, a batch and an optimizer to fake CPU ones, which share storages as the originals do."""

    def __init__(self, rules: DataRules | None = None) -> None:
        self._rules = rules  # learns the values of real integers
        if rules is not None:
            rules.copier = self.tensor
        mode = active_fake_mode()
        assert mode is not None, "a FakeCopier belongs inside of a FakeTensorMode"
        self._mode = mode
        self._rests_on: tuple[str, ...] = ()
        self._storages: dict[int, Any] = {}
        self._keep: list[Any] = []  # alive, so that no other object gets an id that is in the memo
        self._gradient_hooks: list[RemovableHandle] = []
        self.memo: dict[int, Any] = {}
        self.functions = TwinFunctions(self.memo, functools.partial(copy.deepcopy, memo=self.memo))

    def tensor(self, t: torch.Tensor) -> torch.Tensor:
        """Return the fake twin of a tensor: the same for the same tensor, on the same storage for the same storage."""
        known: torch.Tensor | None = self.memo.get(id(t))
        if known is not None:
            return known
        with torch._C.DisableTorchFunction():
            return self._new_twin(t)

    def _new_twin(self, t: torch.Tensor) -> torch.Tensor:
        self._keep.append(t)
        if stands_for_another(t):
            return self._twin_around(t)
        if t.layout != torch.strided:
            # Only strided tensors have fake twins. An op that takes this one fails, but there may be none (Whisper).
            self.memo[id(t)] = t
            return t
        # Tensors that share a storage (tied weights, views) must share one in the copy, or their memory counts twice.
        # The storage is kept, since its address is unique only while it lives.
        real = t.untyped_storage()
        storage = self._storages.get(real._cdata)
        new = storage is None
        if new:
            storage = self._storages[real._cdata] = meta_storage(real.nbytes())
            self._keep.append(real)
        fake: torch.Tensor = fake_empty_strided(
            self._mode, t.shape, t.stride(), t.dtype, storage, int(t.storage_offset())
        )
        if new and self._rules is not None:
            self._rules.learn(fake, t, self._rests_on)
        if isinstance(t, torch.nn.Buffer):
            fake = torch.nn.Buffer(fake)
        fake.requires_grad_(t.requires_grad)
        if isinstance(t, torch.nn.Parameter):
            fake._is_param = True  # what makes a tensor of another class than torch.Tensor a Parameter
        self.memo[id(t)] = fake
        return fake

    def _twin_around(self, t: torch.Tensor) -> torch.Tensor:
        trained = isinstance(t, torch.nn.Parameter)
        # ``learn`` copies no parameter, but would copy the local part of one, which is a plain tensor.
        rules, self._rules = self._rules, None if trained else self._rules
        try:
            local = self.tensor(local_part(t))
        finally:
            self._rules = rules
        fake: torch.Tensor = wrapping_of(t)(local).requires_grad_(t.requires_grad)
        if trained:
            fake._is_param = True
        self.memo[id(t)] = fake
        return fake

    def batch(self, batch: Any) -> Any:
        """Return a batch with its tensors replaced."""
        self._rests_on = (BATCH,)
        fake = self.tree(batch)
        self._rests_on = ()
        return fake

    def tree(self, value: Any) -> Any:
        """Return a nested value with its tensors replaced; mappings become dicts with the same keys."""
        if isinstance(value, Mapping):
            return {k: self.tree(v) for k, v in value.items()}
        return tree_map_only(torch.Tensor, self.tensor, value)

    def model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a deep copy with fake tensors; no weight is copied.

        ``copy.deepcopy`` looks each object up in its memo before it copies. So twins are put into the memo first: of
        all tensors and generators that are found, and of objects that cannot be copied or need not be.

        Raises:
            TraceError: the model cannot be copied.
        """
        # The memo gets its twins, gradients are left out, and then Python's own deep copy does the rest.
        own: dict[int, Any] = {}
        for value in reachable(model, seen=own):
            if isinstance(value, torch.Tensor):
                self.tensor(value)
            elif isinstance(value, torch.Generator):
                self._share(value, _copy_of_generator(value))
            elif isinstance(value, _SHARED) or _is_constant(value):
                self._share(value, value)
        for stepping in optimizers_in_backward(model):
            self._share(stepping, self.optimizer(stepping, model, model))
        # The copy begins its step without gradients: deepcopy finds None in the memo for each.
        grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        self.memo.update((id(g), None) for _, g in grads)
        self._keep.extend(grads)
        try:
            with _CopiesAreFake(self), copyable(model, self.memo, self.tensor):
                twin = copy.deepcopy(model, self.memo)
                self._copy_attributes()
                self.functions.put_into(twin, lambda value: id(value) in own)
                self._gradient_hooks = copy_gradient_hooks(model, self.functions)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"the model cannot be copied for a fake trace: {type(error).__name__}: {error}. Something it "
                'holds cannot be deep-copied; make it copyable, or use trace="real".'
            ) from error
        for module in twin.modules():
            module.__dict__["_apply"] = functools.partial(_convert_fake, module)
        return twin

    def forget_hooks(self) -> None:
        """Remove the hooks of the copy's parameters: they refer to these, in cycles that are never collected."""
        for handle in self._gradient_hooks:
            handle.remove()

    def _share(self, value: Any, twin: Any) -> None:
        self.memo[id(value)] = twin
        self._keep.append(value)

    def _copy_attributes(self) -> None:
        """Copy Python attributes of tensors, such as Megatron's ``main_grad``, but not those of fake tensors."""
        # Attributes that every fake tensor has, such as its mode, were not set by a user.
        of_fakes = vars(fake_empty_strided(self._mode, (), (), torch.float32)).keys()
        for t in self._keep.copy():
            if isinstance(t, torch.Tensor) and not vars(t).keys() <= of_fakes:
                found = {name: value for name, value in vars(t).items() if name not in of_fakes}
                vars(self.memo[id(t)]).update(copy.deepcopy(found, self.memo))

    def parameters_replaced(self, model: torch.nn.Module, fake: torch.nn.Module) -> None:
        """Note parameters of a copy that something has replaced, so that an optimizer is made over the new ones."""
        for p, q in zip(model.parameters(), fake.parameters(), strict=True):
            self.memo[id(p)] = q

    def optimizer(
        self, optimizer: Any, model: torch.nn.Module, fake_model: torch.nn.Module
    ) -> torch.optim.Optimizer | None:
        """Return the same optimizer over the fake parameters, without state."""
        if optimizer is None:
            return None
        if isinstance(optimizer, torch.optim.Optimizer):
            check_optimizer(optimizer, model)
            groups = [
                {
                    **{k: v for k, v in group.items() if k != "params"},
                    "params": [self.memo[id(p)] for p in group["params"]],
                }
                for group in optimizer.param_groups
            ]
            try:
                twin = type(optimizer)(groups, **_constructor_arguments(optimizer))
            except TypeError as error:
                raise TraceError(
                    f"the optimizer {type(optimizer).__name__} cannot be made again for the fake parameters: "
                    f"{error}. Pass a callable instead: optimizer=lambda params: ..."
                ) from error
        else:
            twin = make_optimizer(stand_in_factory(optimizer), fake_model)
        return for_fake_steps(twin)


_SHARED = (types.ModuleType, type(threading.Lock()), type(threading.RLock()), threading.Thread, io.IOBase)
"""Objects that cannot be copied, and that a step does not change: the copy of the model holds the same ones."""


def _is_constant(value: Any) -> bool:
    """Whether a value is a tuple of numbers and texts with a class of its own, which might refuse a copy."""
    if not isinstance(value, tuple) or type(value) is tuple or getattr(value, "__dict__", None):
        return False
    return all(v is None or isinstance(v, (bool, int, float, complex, str)) for v in tuple.__iter__(value))


def _copy_of_generator(generator: torch.Generator) -> torch.Generator:
    with no_dispatch():
        return torch.Generator(generator.device).set_state(generator.get_state())


class _CopiesAreFake(TorchFunctionMode):
    """Inside, a deep copy of a tensor is its fake twin, wherever the tensor was found."""

    def __init__(self, copier: FakeCopier) -> None:
        super().__init__()
        self._copier = copier

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._copier.tensor(args[0])
        return func(*args, **(kwargs or {}))


def _convert_fake(
    module: torch.nn.Module, fn: Callable[..., torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """``Module._apply``, which ``.to`` and ``.half`` call, for a fake module.

    torch's own method tries to swap fake tensors, and cannot. As on a real module the parameters stay the same
    objects, and get the converted data.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)
    for p in module._parameters.values():
        if p is None:
            continue
        with torch.no_grad():
            converted = fn(p)
            if converted is not p:
                p.data = converted
            if p.grad is not None:
                p.grad.data = fn(p.grad)
    for key, b in module._buffers.items():
        if b is not None:
            module._buffers[key] = fn(b)
    return module


def _constructor_arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {k: v for k, v in optimizer.defaults.items() if k in accepted}
