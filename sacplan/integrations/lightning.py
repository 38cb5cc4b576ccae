"""Plans in the ``Trainer`` of Lightning.

    from sacplan.integrations.lightning import PlanCallback, profile_trainer

    trainer = lightning.Trainer(..., precision="bf16-mixed")
    plan = sacplan.plan(profile_trainer(trainer, module, loader, device="h100"), "22GiB")
    trainer.callbacks.append(PlanCallback(plan))  # or Trainer(callbacks=[...])
    trainer.fit(module, loader)

A plan is made for the whole ``LightningModule``, in which names of modules start with its attributes
(``model.layers.0``), or for one of its submodules, with ``PlanCallback(plan, submodule="model")``.

Tested with lightning 2.6.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from sacplan.core.model_calls import ModelCall, Shapes, shapes_of
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec
from sacplan.errors import PlanError, TraceError
from sacplan.integrations._watch import PlannedTraining
from sacplan.planning.plan import Plan, PlanOrPath
from sacplan.profiling.profile import Profile
from sacplan.profiling.tracing import Runtime, Trace, profile
from sacplan.record.compiled import CompileModules
from sacplan.record.longest import LongestBatch, is_loader
from sacplan.record.state import preserved_rng
from sacplan.running.watch import ShapeWatch

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import _configure_optimizers
except ImportError as error:
    raise ImportError(
        f"sacplan.integrations.lightning needs lightning ({error}); pip install 'sacplan[lightning]'"
    ) from error


class PlanCallback(PlannedTraining, pl.Callback):
    """Fit with a plan: applied when fitting begins, removed when it ends or fails.

        lightning.Trainer(callbacks=[PlanCallback(plan)])

    The plan is applied after the strategy has set up the module (DDP, FSDP, precision). Modules that were compiled
    before are compiled again, with the plan.

    Args:
        plan: made for the module that is fitted, such as from :func:`profile_trainer`; or several, as
            ``sacplan.apply`` takes them.
        submodule: name of the submodule that the plan was made for; the whole module by default.
        check: as in ``sacplan.apply``.
        watch_steps: how many optimizer steps to measure. ``SacplanWarning`` if one takes more than ``tolerance``
            over the predicted peak, or more than the budget. The cost is negligible on CUDA; on a CPU these steps
            run under ``torch.profiler``. 0 switches it off.
        tolerance: a share of the predicted peak.

    Raises:
        PlanMismatch: when fitting begins, if the plan was made for another module.
        PlanError: there is no such submodule, or a plan is on it already.
    """

    _hint = (
        "If the batches are larger, or the training step or the optimizer is another one, plan for what is trained: "
        "sacplan.plan(profile_trainer(trainer, module, ...), ...)."
    )

    def __init__(
        self,
        plan: PlanOrPath | Sequence[PlanOrPath],
        submodule: str = "",
        *,
        check: bool = True,
        watch_steps: int = 2,
        tolerance: float = 0.05,
    ) -> None:
        super().__init__(plan, check=check, watch_steps=watch_steps, tolerance=tolerance)
        self.submodule = submodule
        self._planned_batches = [*map(_planned_batches, self.plans)]
        # Several plans are told apart by the arguments of calls: a strategy that wraps the module calls it with those
        # of ``training_step``.
        if len(self.plans) > 1:
            self.plans = [*map(_with_calls, self.plans, self._planned_batches)]
        self._shape_watch = ShapeWatch(self.plan, ())

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Apply the plan, and watch for batches that are larger than those it was made for."""
        # A fit that failed before ``on_exception`` could run may have left a plan on.
        self._take_off()
        # Lightning calls back for each batch and not for each optimizer step, so a step is several
        # measurements.
        self._put_on(self._planned(pl_module), batches=trainer.accumulate_grad_batches)
        self._shape_watch = ShapeWatch(self.plan, *self._planned_batches)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start to measure."""
        index = self._shape_watch.look(shapes_of((batch,), {}), stacklevel=2)
        # ``training_step`` is called, and ``forward`` need not be: the batch says which of several plans counts.
        if all(self._planned_batches) and self._handle is not None:
            self._handle.choose(index)
        # Here the batch is on its device already, so its own size counts and not the planned one.
        tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
        self._watch.begin(pl_module, trainer.optimizers, tensors)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop measuring before validation."""
        # Before ``_compare``, which is not a part of the step.
        self._watch.end()
        self._compare(trainer.optimizers)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the plan."""
        self._watch.finish()
        self._take_off()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the plan from a fit that failed."""
        self._take_off()

    def _planned(self, pl_module: pl.LightningModule) -> torch.nn.Module:
        try:
            # ``get_submodule("")`` is the module itself.
            model: torch.nn.Module = pl_module.get_submodule(self.submodule)
            return model
        except AttributeError as error:
            children = ", ".join(repr(name) for name, _ in pl_module.named_children())
            raise PlanError(
                f"{type(pl_module).__name__} has no submodule {self.submodule!r}; its children are {children}."
            ) from error


def profile_trainer(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    batches: Any = None,
    *,
    device: str | DeviceSpec | torch.device = DEFAULT_DEVICE,
    runtime: Runtime = "cost-model",
    trace: Trace = "fake",
    compile: CompileModules = None,
) -> Profile:
    """Record one optimizer step as this Trainer does it on this module.

        plan = sacplan.plan(profile_trainer(trainer, module, loader, device="h100"), "22GiB")

    The other arguments are those of ``sacplan.profile``; see :func:`step_arguments` for what is recorded.
    """
    arguments = step_arguments(trainer, module, batches)
    return profile(**arguments, device=device, runtime=runtime, trace=trace, compile=compile)


def step_arguments(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    batches: Iterable[Any] | pl.LightningDataModule | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``sacplan.profile`` and ``sacplan.verify`` for the step of this Trainer.

        arguments = step_arguments(trainer, module, loader)
        profile = sacplan.profile(**arguments, device="h100")
        sacplan.verify(**arguments, plan=sacplan.plan(profile, "22GiB"))

    The step is ``module.training_step`` under the trainer's precision, with the optimizer that
    ``module.configure_optimizers()`` makes. During the forward pass Lightning still holds the gradients of the previous
    step, and they count. With ``accumulate_grad_batches`` the last micro-step is recorded, which finds the gradients of
    the others, with the optimizer's step. Neither the trainer nor the module is changed, and the trainer is not
    attached: ``self.trainer`` cannot be used.

    Args:
        trainer: its precision and ``accumulate_grad_batches`` are used.
        module: with automatic optimization. With a manual one the loop is the module's own: describe its step
            to ``sacplan.profile`` with a ``loss_fn``, and fit with ``PlanCallback``.
        batches: the data loader, of which the largest batch is made from its longest samples; or any other iterable of
            batches as ``training_step`` gets them, of which the first is taken; or a ``LightningDataModule``. By
            default ``module.train_dataloader()``.

    Returns:
        ``model``, ``batch``, ``loss_fn``, ``optimizer`` and ``accumulation_steps``.

    Raises:
        TraceError: manual optimization, several optimizers, no batch, or a module in another precision.
    """
    # A manual ``training_step`` runs backward itself; a recording of it would have two backward passes.
    if not module.automatic_optimization:
        raise TraceError(
            f"{type(module).__name__} optimizes manually, so its training_step runs backward and the optimizer itself. "
            "Give sacplan.profile a loss_fn(module, batch) that computes the loss only, and the optimizer; "
            "then fit with PlanCallback(plan)."
        )
    _check_precision(trainer, module)
    with preserved_rng():
        batch = _largest(_loader(module, batches))
        optimizer = _optimizer(module)
    return {
        "model": module,
        "batch": {"batch": batch},
        "loss_fn": _FitLoss(trainer),
        "optimizer": optimizer,
        "accumulation_steps": trainer.accumulate_grad_batches,
    }


def _largest(loader: Any) -> Any:
    """Return the largest batch of a data loader, or the first of any other iterable."""
    # A stream is not searched for its largest batch, which would use it up: its batches are watched in training.
    if is_loader(loader) and not isinstance(loader.dataset, IterableDataset):
        return LongestBatch(loader)()
    first = next(iter(loader), None)
    if first is None:
        raise TraceError("there is no batch to plan for: the data loader yields none.")
    return first


@dataclass(frozen=True, slots=True)
class _FitLoss:
    """The forward pass of the last micro-batch of an optimizer step, in Lightning's order."""

    trainer: pl.Trainer

    def __call__(self, module: Any, batch: Any) -> torch.Tensor:
        module.train()
        # With accumulation, the recorded micro-step finds the gradients of the ones before.
        if self.trainer.accumulate_grad_batches > 1:
            return self._loss(module, batch["batch"])
        trained = [p for p in module.parameters() if p.requires_grad]
        # The closure of an optimizer step runs training_step, zero_grad and backward in this order
        # (``lightning/pytorch/loops/optimization/automatic.py``). So the gradients of the step before are alive during
        # the forward pass. Their values do not matter.
        for p in trained:
            p.grad = torch.empty_like(p)
        loss = self._loss(module, batch["batch"])
        for p in trained:
            p.grad = None
        return loss

    def _loss(self, module: Any, batch: Any) -> torch.Tensor:
        # ``batch_idx`` is optional in ``training_step``.
        arguments = (batch, 0) if len(inspect.signature(module.training_step).parameters) > 1 else (batch,)
        # The trainer is not attached to the module while the step is recorded. ``self.log`` then does nothing
        # but warn.
        with self.trainer.precision_plugin.forward_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*`self\.trainer` reference is not registered")
            output = module.training_step(*arguments)
        # A ``training_step`` may return the loss, or a mapping with it, or None to skip the batch.
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise TraceError(
                f"the training_step of {type(module).__name__} returned {type(output).__name__} without a loss for "
                "this batch. Give batches that have one."
            )
        # As ``ClosureResult.from_training_step_output`` normalizes it.
        return loss / self.trainer.accumulate_grad_batches


def _planned_batches(plan: Plan) -> list[Shapes]:
    """Return shapes, as of ``shapes_of``, of the batches of a plan from ``profile_trainer``; [] for any other plan."""
    batches = []
    for call in plan.fingerprint.calls_or_batch:
        own = [(path, shape) for path, shape in call.tensors if path.startswith(_PLANNED)]
        batches.append(tuple((f"[0]{path.removeprefix(_PLANNED)}", shape) for path, shape in own))
    return [*filter(None, batches)]


def _with_calls(plan: Plan, batches: list[Shapes]) -> Plan:
    calls = tuple(ModelCall(shapes, with_gradients=True) for shapes in batches) or plan.fingerprint.calls
    return structs.replace(plan, fingerprint=structs.replace(plan.fingerprint, calls=calls))


_PLANNED = "batch['batch']"


def _loader(module: pl.LightningModule, batches: Any) -> Any:
    if batches is None:
        return module.train_dataloader()
    if isinstance(batches, pl.LightningDataModule):
        batches.prepare_data()
        batches.setup("fit")
        return batches.train_dataloader()
    return batches


def _optimizer(module: pl.LightningModule) -> torch.optim.Optimizer | None:
    """Return the optimizer of ``configure_optimizers``, from any of the forms that Lightning accepts."""
    configured: Any = module.configure_optimizers()
    if configured is None:
        return None
    optimizers: list[torch.optim.Optimizer] = _configure_optimizers(configured)[0]
    if len(optimizers) > 1:
        raise TraceError(
            f"{type(module).__name__}.configure_optimizers made {len(optimizers)} optimizers, but with automatic "
            "optimization Lightning takes one."
        )
    return optimizers[0]


_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


def _check_precision(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse a module that Lightning has yet to convert: it would not be recorded in the precision it trains in."""
    # With mixed or full precision the module keeps its dtype, so there is nothing to check.
    wanted = _TRUE.get(trainer.precision)
    if wanted is None:
        return
    for name, p in module.named_parameters():
        if p.is_floating_point() and p.dtype != wanted:
            raise TraceError(
                f"with precision={trainer.precision!r} Lightning converts the module to {wanted}, and parameter "
                f"{name!r} is still {p.dtype}. Convert it first: module.to({wanted})."
            )
