"""Plans in the ``Trainer`` of ``transformers``.

    from sacplan.integrations.transformers import PlanCallback, profile_trainer

    plan = sacplan.plan(profile_trainer(trainer, device="h100"), "22GiB")
    trainer.add_callback(PlanCallback(plan))
    trainer.train()

The callback puts the plan on when the model is prepared for training (mixed precision, DDP, ``torch.compile``,
sharding), and takes it off at the end. ``sacplan.apply(model, plan)`` before ``Trainer(...)`` works too; then
nobody checks the first steps.

Uses the Trainer's public methods, and of Accelerate what its ``prepare_model`` uses for mixed precision; tried
on transformers 5.23 with accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sacplan._apply.apply import Handle, apply
from sacplan._device.devices import DeviceSpec
from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile, Runtime, Trace, profile
from sacplan._record.step import check_model, preserved_rng
from sacplan.errors import PlanError, TraceError
from sacplan.integrations._watch import PeakWatch

try:
    import transformers
    from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager
    from transformers.integrations.neftune import activate_neftune, deactivate_neftune
except ImportError as error:
    raise ImportError(
        f"sacplan.integrations.transformers needs transformers 5 and accelerate ({error}); "
        "pip install 'sacplan[transformers]'"
    ) from error

_HINT = (
    "If the steps are larger, or the loss or the optimizer is another one, plan for what is trained: "
    "sacplan.plan(profile_trainer(trainer, device=...), ...)."
)


class PlanCallback(transformers.TrainerCallback):
    """Trains with a plan: applied when training begins, removed when it ends.

        trainer.add_callback(PlanCallback(plan))

    It applies last, to the model inside of DDP, of ``torch.compile`` and of mixed precision, before anything
    has been compiled.

    Args:
        plan: made for this trainer's model, such as from :func:`profile_trainer`.
        check: as in ``sacplan.apply``.
        watch_steps: how many optimizer steps to measure. ``SacplanWarning`` if one takes more than ``tolerance``
            over the predicted peak, or more than the budget. On CUDA that costs nothing to speak of, on a CPU
            these steps run under ``torch.profiler``. 0 switches it off.
        tolerance: as a share of the predicted peak.

    Raises:
        PlanMismatch: when training begins, if the plan was made for another model.
        PlanError: the Trainer's own checkpointing is switched on, or a plan is on the model already.
    """

    def __init__(
        self, plan: Plan, *, check: bool = True, watch_steps: int = 2, tolerance: float = 0.05
    ) -> None:
        self.plan = plan
        self._check = check
        self._watch_steps = watch_steps
        self._tolerance = tolerance
        self._handle: Handle | None = None
        self._watch = self._new_watch()

    @property
    def peaks_bytes(self) -> tuple[int, ...]:
        """Measured peaks of the first steps of the last run."""
        return tuple(self._watch.peaks_bytes)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Put the plan on."""
        assert model is not None
        self._take_off()  # of a run that raised
        _check_checkpointing(args, model)
        self._handle = apply(model, self.plan, check=self._check)
        self._watch = self._new_watch()

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Measure from here, all micro-batches of the step together."""
        assert model is not None
        self._watch.begin(model, [] if optimizer is None else [optimizer])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """To here: evaluation and saving come later."""
        self._watch.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the plan off."""
        self._watch.finish()
        self._take_off()

    def _take_off(self) -> None:
        self._watch.abandon()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _new_watch(self) -> PeakWatch:
        return PeakWatch(self.plan, self._watch_steps, self._tolerance, _HINT)


def profile_trainer(
    trainer: transformers.Trainer,
    *,
    device: str | DeviceSpec | torch.device = "h100",
    runtime: Runtime = "cost-model",
    trace: Trace = "fake",
) -> Profile:
    """Record one optimizer step as this Trainer does it.

        plan = sacplan.plan(profile_trainer(trainer, device="h100"), "22GiB")

    The arguments are those of ``sacplan.profile``; what is recorded says :func:`step_arguments`.
    """
    return profile(**step_arguments(trainer), device=device, runtime=runtime, trace=trace)


def step_arguments(trainer: transformers.Trainer) -> dict[str, Any]:
    """What ``sacplan.profile`` and ``sacplan.verify`` need for the step of this Trainer.

        arguments = step_arguments(trainer)
        profile = sacplan.profile(**arguments, device="h100")
        sacplan.verify(**arguments, plan=sacplan.plan(profile, "22GiB"))

    The batches are the first ones of ``trainer.get_train_dataloader()``: see to it that they are as large as any.
    The loss is ``trainer.compute_loss``, under the mixed precision that Accelerate will switch on; the optimizer
    is the one that ``trainer.create_optimizer`` makes. The trainer stays as it is, but an iterable dataset
    that cannot start anew has lost a batch.

    With gradient accumulation two micro-batches are run, one without and one with gradients from before; more
    of them would take no more memory. All batches of the step are there, as in the Trainer. Times and FLOPs are
    those of the two. Not counted: the scalars of gradient clipping and of the gradient scaler; the buffers of DDP.

    Returns:
        ``model``, ``batch``, ``loss_fn`` and ``optimizer``.

    Raises:
        TraceError: the trainer checkpoints on its own, or trains in a way that is not planned for.
    """
    _check_plannable(trainer)
    shadow = copy.copy(trainer)  # what it makes stays with the copy
    batches, items = _first_step(shadow)
    if trainer.optimizer_cls_and_kwargs is not None:
        cls, options = trainer.optimizer_cls_and_kwargs
        shadow.optimizer_cls_and_kwargs = (cls, dict(options))
    with preserved_rng():
        optimizer = shadow.create_optimizer()
    return {
        "model": trainer.model,
        "batch": {"micro_batches": batches, "num_items_in_batch": items},
        "loss_fn": _TrainerLoss(shadow),
        "optimizer": getattr(optimizer, "optimizer", optimizer),  # out of Accelerate's wrapper
    }


@dataclass(frozen=True, slots=True)
class _TrainerLoss:
    """The forward passes of one optimizer step, and the backward passes of all but the last."""

    trainer: transformers.Trainer

    def __call__(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        trainer = copy.copy(self.trainer)
        trainer.model = trainer.model_wrapped = model
        micro_batches, items = batch["micro_batches"], batch["num_items_in_batch"]
        trainer.current_gradient_accumulation_steps = len(micro_batches)
        model.train()
        with _prepared(trainer, model):
            if len(micro_batches) > 1:
                self._loss(trainer, model, micro_batches[0], items).backward()
            return self._loss(trainer, model, micro_batches[-1], items)

    @staticmethod
    def _loss(trainer: transformers.Trainer, model: torch.nn.Module, batch: Any, items: Any) -> torch.Tensor:
        loss: Any = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
        return loss if _is_normalized(trainer, items) else loss / trainer.current_gradient_accumulation_steps


def _is_normalized(trainer: transformers.Trainer, items: Any) -> bool:
    """Whether the loss is divided already by what the step accumulates; as in ``Trainer.training_step``."""
    known = getattr(trainer, "loss_is_scaled_for_ga", None)
    if known is not None:
        return bool(known)
    return trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and items is not None)


@contextlib.contextmanager
def _prepared(trainer: transformers.Trainer, model: torch.nn.Module) -> Iterator[None]:
    """The model as ``Accelerator.prepare_model`` and ``Trainer.train`` make it; a trained one is that already."""
    accelerator = trainer.accelerator
    own = model.__dict__.get("forward")
    mixed = accelerator.native_amp and not hasattr(model, "_original_forward")
    if mixed:
        autocast = get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler)
        model.__dict__["forward"] = convert_outputs_to_fp32(autocast(model.forward))
    noise = None
    if trainer.neftune_noise_alpha is not None:
        noise = activate_neftune(model, trainer.neftune_noise_alpha, accelerator)
    try:
        yield
    finally:
        if noise is not None:
            deactivate_neftune(model, noise, accelerator)
        if mixed:
            del model.__dict__["forward"]
            if own is not None:
                model.__dict__["forward"] = own


def _first_step(trainer: transformers.Trainer) -> tuple[tuple[Any, ...], Any]:
    """The batches of an optimizer step, and their number of items, as the Trainer counts it for the loss."""
    known = list(trainer.accelerator._dataloaders)
    with preserved_rng():
        loader = trainer.get_train_dataloader()
        iterator = iter(loader)
        try:
            samples, items = trainer.get_batch_samples(
                iterator, trainer.args.gradient_accumulation_steps, trainer.args.device
            )
        finally:
            if hasattr(iterator, "close"):
                iterator.close()
            if hasattr(loader, "end"):  # else Accelerate takes it for the one that is being iterated over
                loader.end()
            trainer.accelerator._dataloaders[:] = known
    if not samples:
        raise TraceError("the trainer's data loader yields no batch. Give it a train_dataset with one.")
    return tuple(_plain(trainer._prepare_inputs(sample)) for sample in samples), items


def _plain(value: Any) -> Any:
    """``BatchEncoding`` and the like as dicts, which may be nested."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _check_plannable(trainer: transformers.Trainer) -> None:
    args = trainer.args
    try:
        assert trainer.model is not None
        _check_checkpointing(args, trainer.model)
    except PlanError as error:
        raise TraceError(str(error)) from error
    found = {
        "nn.DataParallel over several GPUs": args.n_gpu > 1,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": bool(args.fsdp) or trainer.is_fsdp_enabled,
        "Liger kernels": args.use_liger_kernel,
    }
    for what, is_used in found.items():
        if is_used:
            raise TraceError(
                f"this trainer uses {what}, which is not planned for from a Trainer. Describe the step of one "
                "process to sacplan.profile yourself."
            )


def _check_checkpointing(args: Any, model: torch.nn.Module) -> None:
    """``activation_checkpointing`` is the name since transformers 5.20 or so, ``gradient_checkpointing`` before."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(args, name, None):
            raise PlanError(
                f"checkpointing is already switched on in the TrainingArguments ({name}=True). Set it to False: "
                "sacplan chooses what to recompute."
            )
    check_model(model)
