"""One training step on a copy that has no data, or on the user's model with everything put back after.

The fake copy is a deep copy whose memo already maps every tensor of the model to a fake one, so no
weight is copied and the user's model is not touched.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from sacplan._record.fake_data import DataRules
from sacplan._torch.ops import tensors_in
from sacplan._torch.private import active_fake_mode, fake_empty_strided, meta_storage
from sacplan.errors import TraceError

LossFn = Callable[[torch.nn.Module, Any], Any]
"""``loss_fn(model, batch)``: a scalar tensor; in inference the output."""

Mode = Literal["train", "inference"]


@dataclass(frozen=True, slots=True)
class Step:
    """A model, its batch, its loss and its optimizer, ready to run."""

    model: torch.nn.Module
    batch: Any
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer | None
    mode: Mode = "train"

    def run(self, before_optimizer: Callable[[], None] | None = None) -> Any:
        """Zero the gradients, forward, loss, backward, optimizer step; ``before_optimizer`` is called before that.

        In inference the forward pass alone; returns its output, which the caller then holds.
        """
        if self.mode == "inference":
            with torch.no_grad():
                return self.loss_fn(self.model, self.batch)
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_fn(self.model, self.batch)
        check_loss(loss)
        loss.backward()
        if self.optimizer is not None:
            if before_optimizer is not None:
                before_optimizer()
            self.optimizer.step()
        return None


def check_loss(loss: Any) -> None:
    """``TraceError`` unless it is a scalar that gradients flow from."""
    if not isinstance(loss, torch.Tensor):
        raise TraceError(
            f"loss_fn must return a scalar tensor, it returned {type(loss).__name__}. "
            "Pass loss_fn=lambda model, batch: ... that returns one."
        )
    if loss.numel() != 1:
        raise TraceError(
            f"loss_fn must return a scalar tensor, it returned one of shape {tuple(loss.shape)}. "
            "Reduce it, for example with .mean()."
        )
    if not loss.requires_grad:
        raise TraceError(
            "the loss does not require a gradient: there is no backward pass to plan for. Is every parameter "
            "frozen, or the step inside torch.no_grad()?"
        )


def default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Call the model; its ``.loss`` or ``["loss"]`` where there is one, else the sum of its float outputs."""
    output = call_model(model, batch)
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is not None:
        return loss
    sums = [t.sum() for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not sums:
        raise TraceError(
            f"the model returned {type(output).__name__} without a loss and without a float tensor. "
            "Pass loss_fn=lambda model, batch: ... that makes a scalar of it."
        )
    total = sums[0]
    for s in sums[1:]:
        total = total + s
    return total


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """``model(batch)``, with a tuple as positional and a mapping as keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def resolve_batch(batch: Any) -> Any:
    """The batch itself, made by calling it where it is a callable."""
    if callable(batch) and not isinstance(batch, (torch.Tensor, Mapping)):
        batch = batch()
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(_as_tree(batch))):
        raise TraceError(
            f"the batch holds no tensor, it is {type(batch).__name__}. Give a tensor, a tuple (positional), "
            "a mapping (keyword arguments), or a callable of no arguments that makes one."
        )
    return batch


def _as_tree(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) else batch


def own_checkpointing(model: torch.nn.Module) -> str | None:
    """Where a model checkpoints by itself, and what to do about it; None if it does not."""
    for fqn, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            return (
                f"checkpointing is already switched on in {fqn or type(module).__name__!r} "
                "(gradient_checkpointing=True). Call model.gradient_checkpointing_disable() first: sacplan "
                "chooses what to recompute."
            )
        if type(module).__name__ == "CheckpointWrapper":
            return (
                f"module {fqn!r} is wrapped in a CheckpointWrapper: checkpointing is already switched on. "
                "Plan the model without the wrapper."
            )
    return None


def check_model(model: Any) -> None:
    """``TraceError`` unless it is a module without a plan, or checkpointing of its own."""
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"model must be an nn.Module, not {type(model).__name__}.")
    checkpointing = own_checkpointing(model)
    if checkpointing is not None:
        raise TraceError(checkpointing)
    for fqn, module in model.named_modules():
        if type(module.__dict__.get("forward")).__name__ == "PlannedForward":
            raise TraceError(
                f"a plan is applied to {fqn or type(module).__name__!r}, so that the step is not the model's own. Call "
                ".remove() on its handle first."
            )


# --- fake copies ----------------------------------------------------------------------------------


class FakeCopier:
    """Maps the tensors of a model, a batch and an optimizer to fake CPU ones, sharing what they share."""

    def __init__(self, rules: DataRules | None = None) -> None:
        self._rules = rules  # learns the values of real integers
        mode = active_fake_mode()
        assert mode is not None, "a FakeCopier belongs inside of a FakeTensorMode"
        self._mode = mode
        self._storages: dict[int, Any] = {}
        self._keep: list[Any] = []  # ids in the memo must stay theirs
        self.memo: dict[int, Any] = {}

    def tensor(self, t: torch.Tensor) -> torch.Tensor:
        """The fake twin of a tensor; same twin for the same tensor, same storage for the same storage."""
        known = self.memo.get(id(t))
        if known is not None:
            return known
        with torch._C.DisableTorchFunction():
            return self._new_twin(t)

    def _new_twin(self, t: torch.Tensor) -> torch.Tensor:
        self._keep.append(t)
        if t.layout != torch.strided:
            raise TraceError(
                f"a tensor of layout {t.layout} in the model or the batch: only strided ones can be traced."
            )
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
            self._rules.learn(fake, t)
        if isinstance(t, torch.nn.Parameter):
            fake.requires_grad_(t.requires_grad)
            fake._is_param = True  # what makes a tensor of another class than torch.Tensor a Parameter
        elif isinstance(t, torch.nn.Buffer):
            fake = torch.nn.Buffer(fake)
        else:
            fake.requires_grad_(t.requires_grad)
        self.memo[id(t)] = fake
        return fake

    def tree(self, value: Any) -> Any:
        """A nested value with its tensors replaced; mappings keep their keys."""
        if isinstance(value, Mapping):
            return {k: self.tree(v) for k, v in value.items()}
        return tree_map_only(torch.Tensor, self.tensor, value)

    def model(self, model: torch.nn.Module) -> torch.nn.Module:
        """A deep copy with fake tensors; no weight is copied."""
        for module in model.modules():
            for value in vars(module).values():
                for t in tensors_in(value):
                    self.tensor(t)
        grads = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        self.memo.update((id(g), None) for _, g in grads)
        self._keep.extend(grads)
        try:
            twin = copy.deepcopy(model, self.memo)
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

    def optimizer(
        self, optimizer: Any, model: torch.nn.Module, fake_model: torch.nn.Module
    ) -> torch.optim.Optimizer | None:
        """The same optimizer over the fake parameters, without state."""
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
                made = type(optimizer)(groups, **_constructor_arguments(optimizer))
            except TypeError as error:
                raise TraceError(
                    f"the optimizer {type(optimizer).__name__} cannot be made again for the fake parameters: "
                    f"{error}. Pass a callable instead: optimizer=lambda params: ..."
                ) from error
        else:
            made = make_optimizer(optimizer, fake_model)
        return made


@contextlib.contextmanager
def cleared_caches(model: torch.nn.Module) -> Iterator[None]:
    """Clear ``functools`` caches in the code of the model's modules, before and after.

    Some hold tensors (the relative positions of transformers' BEiT): real ones must not get into a fake step,
    and fake ones must not stay for the real one.
    """
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
    """Inside, transformers does not see that tensors are fake, and takes the branches that real ones take.

    It looks at an attention mask's values to leave a mask out that masks nothing, which decides the attention
    kernel, but not if the mask is a ``FakeTensor``. ``data_rules`` knows the values, or has a rule for them.
    Private API of transformers (4.57 to 5): ``utils.import_utils.is_fake_tensor``.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    asks = getattr(module, "is_fake_tensor", None)
    if asks is None:
        yield
        return
    module.__dict__["is_fake_tensor"] = lambda tensor: False
    try:
        yield
    finally:
        module.__dict__["is_fake_tensor"] = asks


def function_caches(model: torch.nn.Module) -> Iterator[Any]:
    """The ``functools`` caches in the code of the model's modules."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    namespaces: dict[int, Any] = {}
    for cls in classes:
        if cls is not object and not cls.__module__.startswith(("torch.", "sacplan.")):
            for owner in (cls, sys.modules.get(cls.__module__)):
                if owner is not None:
                    namespaces[id(owner)] = vars(owner)
    seen: set[int] = set()
    for namespace in namespaces.values():
        for value in list(namespace.values()):
            function = getattr(value, "__func__", value)  # out of static and class methods
            for candidate in (function, *_closure(function)):
                if isinstance(candidate, functools._lru_cache_wrapper) and id(candidate) not in seen:
                    seen.add(id(candidate))
                    yield candidate


def tensors_cached(caches: Iterable[Any]) -> int:
    """How many tensors ``functools`` caches hold among their results."""
    seen: set[int] = set()
    pending, count = list(caches), 0
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            count += 1
        elif isinstance(value, (dict, list, tuple)) or type(value).__module__ == "functools":
            pending.extend(gc.get_referents(value))
    return count


def _closure(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents


def _convert_fake(
    module: torch.nn.Module, fn: Callable[..., torch.Tensor], recurse: bool = True
) -> torch.nn.Module:
    """``Module._apply``, behind ``.to`` and ``.half``, for a fake module.

    torch's own tries to swap fake tensors, and cannot. As on a real module the parameters stay the same
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
    import inspect

    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {k: v for k, v in optimizer.defaults.items() if k in accepted}


def make_optimizer(factory: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Call ``params -> optimizer`` on the parameters of the model that can be trained."""
    if not callable(factory):
        raise TraceError(
            "optimizer must be an optimizer or a callable `params -> optimizer`, not "
            f"{type(factory).__name__}."
        )
    made = factory([p for p in model.parameters() if p.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise TraceError(
            f"the optimizer callable returned {type(made).__name__}, not a torch.optim.Optimizer."
        )
    check_optimizer(made, model)
    return made


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """``TraceError`` if the optimizer updates something that is not the model's."""
    own = {id(p): name for name, p in model.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in own:
                raise TraceError(
                    f"parameter {i} of group {g} of the optimizer (shape {tuple(p.shape)}) does not belong "
                    "to the model. Pass an optimizer over model.parameters(), or a callable "
                    "`params -> optimizer`."
                )


# --- on the user's own model ----------------------------------------------------------------------


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Put the generators of torch, numpy and Python back."""
    import numpy as np

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
def preserved_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Put parameters, buffers, gradients, optimizer state and generators back after real steps.

    Parameters are copied only if an optimizer is going to change them; buffers always.
    """
    with torch.no_grad():
        tensors = [*model.buffers(), *(model.parameters() if optimizer is not None else ())]
        copies = [(t, t.detach().clone()) for t in tensors]
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(m, dict(m._buffers)) for m in model.modules()]
    training = [(m, m.training) for m in model.modules()]
    state = copy.deepcopy(optimizer.state_dict()) if optimizer is not None and optimizer.state else None
    for p, _ in grads:
        p.grad = None
    with preserved_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for t, old in copies:
                    t.copy_(old)
            for p, grad in grads:
                p.grad = grad
            for m, old_buffers in buffers:
                m._buffers.clear()
                m._buffers.update(old_buffers)
            for m, mode in training:
                m.training = mode
            if optimizer is not None:
                if state is None:
                    optimizer.state.clear()
                else:
                    optimizer.load_state_dict(state)
