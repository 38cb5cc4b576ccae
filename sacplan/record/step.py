"""One step: a model, its batch, its loss and its optimizer, and the checks on each of them.

To run a step on a copy without data, see ``fake_copy.py``; to put everything back after a real one, ``state.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from sacplan.core.setup import ONLY_SCALAR, OWN_LOSS, SUM_OF_OUTPUTS, Setup, function_name
from sacplan.errors import PlanError, TraceError
from sacplan.record.gradient_hooks import optimizers_in_backward
from sacplan.record.largest_step import before_largest_step, update
from sacplan.record.longest import LongestBatch, is_loader
from sacplan.record.state import reachable
from sacplan.record.user_code import tensors_in_caches
from sacplan.torch_compat.private import is_plain

LossFn = Callable[..., Any]
"""``loss_fn(model, batch)``: a scalar tensor; in inference the output. With a list of optimizers, ``loss_fn(model,
batch, optimizers)`` runs the whole step."""

Mode = Literal["train", "inference"]


@dataclass(frozen=True, slots=True)
class Step:
    """A model, its batch, its loss and its optimizer, ready to run.

    If there are several optimizers, ``loss_fn`` gets them all, and runs the whole step.
    """

    model: torch.nn.Module
    batch: Any
    loss_fn: LossFn
    optimizer: torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...] | None
    mode: Mode = "train"
    accumulation_steps: int = 1

    @property
    def accumulates(self) -> bool:
        """Whether gradients are there when a step begins, and it adds to them."""
        return self.accumulation_steps > 1 and self.mode == "train"

    @property
    def stepped_last(self) -> torch.optim.Optimizer | None:
        """The optimizer that steps when the backward pass is over."""
        return None if isinstance(self.optimizer, tuple) else self.optimizer

    @property
    def stepped_by_loss(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that ``loss_fn`` steps itself."""
        return self.optimizer if isinstance(self.optimizer, tuple) else ()

    @property
    def stepped_inside(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that ``loss_fn`` steps, or hooks of parameters in the backward pass."""
        if self.mode == "inference":
            return ()
        return (*self.stepped_by_loss, *optimizers_in_backward(self.model))

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All optimizers that step."""
        return (*filter(None, [self.stepped_last]), *self.stepped_inside)

    @property
    def state_made_inside(self) -> int:
        """The number of parameters for which the optimizers ``stepped_inside`` have state."""
        return sum(len(optimizer.state) for optimizer in self.stepped_inside)

    def run(self, before_optimizer: Callable[[], None] | None = None) -> Any:
        """Run the step: zero the gradients, forward, loss, backward, optimizer step.

        With accumulation it is the last of the micro-steps: the gradients that are there stay, and the backward pass
        adds to them. No micro-step has a higher peak: later ones have alive what the first one has, and all gradients
        besides; and the optimizer's step comes after the last. The caller sees to it that there are gradients
        (``accumulate``).

        In inference only the forward pass runs. Its output is returned, so that the caller decides how long it lives.

        Args:
            before_optimizer: called between the backward pass and the optimizer's step, if there is an optimizer.
        """
        if self.mode == "inference":
            with torch.no_grad():
                return self.loss_fn(self.model, self.batch)
        # First, as most loops have it: the gradients of the step before do not overlap with this forward pass.
        optimizer = self.stepped_last
        if optimizer is not None and not self.accumulates:
            optimizer.zero_grad(set_to_none=True)
        # A training loop holds its loss until the optimizer has stepped, and so does this one.
        _loss = self.accumulate()
        if optimizer is not None:
            if before_optimizer is not None:
                before_optimizer()
            update(optimizer)
        return None

    def forget_gradients_of_batch(self) -> None:
        """Drop the gradients of a batch that requires some: the next step has a batch of its own."""
        for t in tree_leaves(_as_tree(self.batch)):
            if isinstance(t, torch.Tensor) and t.is_leaf:
                t.grad = None

    def make_state(self) -> None:
        """Run a step after which the optimizers have their state, and the largest of their steps is the next."""
        self.accumulate()
        if self.stepped_last is not None:
            before_largest_step(self.stepped_last, lambda number: number)

    def accumulate(self) -> torch.Tensor | None:
        """Run a micro-step and return its loss: forward, loss, backward. It adds to the gradients that are there.

        A ``loss_fn`` that returns None has run the backward pass itself, as the schedule of a pipeline does.
        """
        if self.stepped_by_loss:
            self.loss_fn(self.model, self.batch, list(self.stepped_by_loss))
            return None
        loss: torch.Tensor | None = self.loss_fn(self.model, self.batch)
        if loss is not None or not any(p.grad is not None for p in self.model.parameters()):
            check_loss(loss)
            assert loss is not None
            loss.backward()
        return loss

    def setup(self, autocast: str | None = None) -> Setup:
        """Return how the step was set up.

        To be read after it has run: a ``loss_fn`` may switch modes, and the default loss knows its form only then.
        """
        loss = self.loss_fn.took if isinstance(self.loss_fn, DefaultLoss) else function_name(self.loss_fn)
        loss = "" if self.loss_fn is call_model else loss
        steps = self.accumulation_steps if self.accumulates else 1
        return Setup.of(self.model, self.optimizers, loss, autocast, accumulation_steps=steps)


def loss_or_default(loss_fn: LossFn | None, mode: Mode) -> LossFn:
    """Return ``loss_fn``, or the default: the loss in the model's output, in inference the output itself."""
    return loss_fn or (DefaultLoss() if mode == "train" else call_model)


def check_accumulation(steps: Any) -> None:
    """Raise ``TraceError`` unless it is a number of micro-batches."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise TraceError(
            f"accumulation_steps={steps!r} must be the number of micro-batches whose gradients an optimizer step "
            "adds up: 1 or more."
        )


def accumulation_of(optimizer: Any) -> int:
    """Return over how many micro-batches an optimizer that Accelerate has prepared adds up gradients; else 1."""
    state = getattr(optimizer, "gradient_state", None)  # ``accelerate.state.GradientState``
    return int(getattr(state, "num_steps", 1))


def check_loss(loss: Any) -> None:
    """Raise ``TraceError`` unless the loss is a scalar that gradients flow from."""
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


class DefaultLoss:
    """``default_loss`` as an object that remembers which of its rules it followed.

    Attributes:
        took: the rule of the last call, in words.
    """

    def __init__(self) -> None:
        self.took = ""

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the loss, a scalar."""
        output = call_model(model, batch)
        loss = _own_loss(output)
        if loss is not None:
            self.took = OWN_LOSS
            return loss
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        # A scalar without a gradient is a metric that the model returns beside its loss, or without one.
        scalars = [t for t in outputs if t.dim() == 0 and t.requires_grad]
        if len(scalars) == 1:
            self.took = ONLY_SCALAR
            return scalars[0]
        self.took = SUM_OF_OUTPUTS
        return _sum_of(output, outputs)


def default_loss(model: torch.nn.Module, batch: Any) -> Any:
    """Call the model and find a loss in its output.

    That is ``.loss`` or ``["loss"]`` where there is one, else the only scalar with a gradient, else the sum of the
    float outputs.
    """
    return DefaultLoss()(model, batch)


def _own_loss(output: Any) -> Any:
    # Outputs of Hugging Face models have an attribute, others a key.
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    return loss


def _sum_of(output: Any, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    sums = [t.sum() for t in outputs]
    if not sums:
        raise TraceError(
            f"the model returned {type(output).__name__} without a loss and without a float tensor. "
            "Pass loss_fn=lambda model, batch: ... that makes a scalar of it."
        )
    return functools.reduce(torch.add, sums)


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """``model(batch)``, with a tuple as positional and a mapping as keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def resolve_batch(batch: Any) -> Any:
    """Return the batch that is given, that a callable makes, or that is the largest of a data loader."""
    if is_loader(batch):
        batch = LongestBatch(batch)()
    # A mapping may be callable as well, and is a batch all the same.
    if callable(batch) and not isinstance(batch, (torch.Tensor, Mapping)):
        batch = batch()
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(_as_tree(batch))):
        raise TraceError(
            f"the batch holds no tensor, it is {type(batch).__name__}. Give a tensor, a tuple (positional), "
            "a mapping (keyword arguments), a callable of no arguments that makes one, or a data loader."
        )
    return batch


def part_of_batch(batch: Any, rows: int, parts: int) -> Any:
    """Return the first of equal parts of a batch: of each tensor that has a row for each sample, the first rows.

    Raises:
        PlanError: the number of parts does not divide that of the rows.
    """
    if rows % parts:
        raise PlanError(
            f"a batch of {rows} cannot be cut for {parts} ranks: give a batch that is a multiple of {parts}, or a mesh "
            "with fewer ranks for data."
        )

    def part(t: torch.Tensor) -> torch.Tensor:
        # Cloned: a view would have the storage of the whole batch.
        return t[: rows // parts].clone() if t.dim() and len(t) == rows else t

    return batch if parts == 1 else tree_map_only(torch.Tensor, part, _as_tree(batch))


def _as_tree(batch: Any) -> Any:
    # A pytree knows ``dict``, and takes its relatives, such as ``BatchEncoding``, for leaves.
    return dict(batch) if isinstance(batch, Mapping) else batch


def cached_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return tensors that outlive the step as buffers do, but are not registered.

    They are attributes of modules, of what these hold (such as the scales of 4-bit weights), or lie in ``functools``
    caches of the modules' code.
    """
    registered = ("_parameters", "_buffers", "_modules")
    attributes = [v for m in model.modules() for k, v in vars(m).items() if k not in registered]
    found: list[Any] = []
    for held in {id(v): v for v in tree_leaves(attributes)}.values():
        own = list(reachable(held, but=(torch.nn.Module,)))
        # An object that leads to modules, such as a trainer, is no part of one.
        is_part = not any(isinstance(v, torch.nn.Module) for v in own)
        found.extend(v for v in own if isinstance(v, torch.Tensor) and (is_part or v is held))
    return [t for t in (*found, *tensors_in_caches(model)) if is_plain(t)]


def run_planned(module: torch.nn.Module, *args: Any) -> Any:
    """Call a module: the ``gradient_checkpointing_func`` of a model that has a plan, which says what runs again."""
    return module(*args)


def own_checkpointing(model: torch.nn.Module) -> str | None:
    """Return a sentence on where a model checkpoints by itself, and what to do; None if it does not."""
    for fqn, module in model.named_modules():
        by = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) is True and by is not run_planned:
            off = "disable_gradient_checkpointing"  # in diffusers
            off = off if hasattr(model, off) else "gradient_checkpointing_disable"
            return (
                f"checkpointing is already switched on in {fqn or type(module).__name__!r} "
                f"(gradient_checkpointing=True). Call model.{off}() first: sacplan chooses what to recompute."
            )
        if any(
            base.__name__ == "CheckpointWrapper" for base in type(module).__mro__
        ):  # fully_shard derives a class
            return (
                f"module {fqn!r} is wrapped in a CheckpointWrapper: checkpointing is already switched on. "
                "Plan the model without the wrapper."
            )
    return None


def check_model(model: Any) -> None:
    """Raise ``TraceError`` unless the model can be recorded: a module without a plan."""
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"model must be an nn.Module, not {type(model).__name__}.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TraceError(
                f"{name!r} has no shape yet, it belongs to a lazy module. Call the model once on a batch first."
            )
    for fqn, module in model.named_modules():
        if any(base.__name__ == "StandIn" for base in type(module.__dict__.get("forward")).__mro__):
            raise TraceError(
                f"a plan is applied to {fqn or type(module).__name__!r}, so that the step is not the model's own. Call "
                ".remove() on its handle first."
            )


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of a wrapper that is an ``Optimizer`` by its class only, as Accelerate's is."""
    # The inner optimizer has the state and takes the step. Wrappers may nest.
    while isinstance(optimizer, torch.optim.Optimizer):
        inner = vars(optimizer).get("optimizer")
        # A wrapper with state of its own, such as Lookahead, takes a step of its own.
        if not isinstance(inner, torch.optim.Optimizer) or "state" in vars(optimizer):
            break
        optimizer = inner
    return optimizer


def each_optimizer(optimizer: Any, make: Callable[[Any], Any]) -> Any:
    """Return what ``make`` returns for an optimizer; for a list, a tuple of it for each; None for None."""
    if isinstance(optimizer, (list, tuple)):
        if not optimizer or None in optimizer:
            found = ", ".join(type(one).__name__ for one in optimizer)
            raise TraceError(
                f"optimizer=[{found}]: a list needs optimizers, or callables `params -> optimizer`."
            )
        return tuple(map(make, optimizer))
    return None if optimizer is None else make(optimizer)


def optimizer_over(optimizer: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that is over the model's parameters, made if it is given as a callable."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return make_optimizer(optimizer, model)
    check_optimizer(optimizer, model)
    return optimizer


def make_optimizer(factory: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Call ``params -> optimizer`` on the parameters of the model that can be trained."""
    if not callable(factory):
        raise TraceError(
            "optimizer must be an optimizer or a callable `params -> optimizer`, not "
            f"{type(factory).__name__}."
        )
    optimizer = factory([p for p in model.parameters() if p.requires_grad])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TraceError(
            f"the optimizer callable returned {type(optimizer).__name__}, not a torch.optim.Optimizer."
        )
    check_optimizer(optimizer, model)
    return optimizer


def check_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Raise ``TraceError`` if the optimizer updates other tensors than the model's."""
    own = {id(p): name for name, p in model.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in own:
                raise TraceError(
                    f"parameter {i} of group {g} of the optimizer (shape {tuple(p.shape)}) does not belong "
                    "to the model. Pass an optimizer over model.parameters(), or a callable `params -> optimizer`; "
                    "modules that train together, as of a GAN, go into one nn.ModuleDict."
                )
