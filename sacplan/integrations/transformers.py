"""Plans in the ``Trainer`` of ``transformers``.

    from sacplan.integrations.transformers import PlanCallback, profile_trainer

    plan = sacplan.plan(profile_trainer(trainer, device="h100"), "22GiB")
    trainer.add_callback(PlanCallback(plan))
    trainer.train()

The callback applies the plan when the model is prepared for training (mixed precision, DDP, ``torch.compile``,
``fully_shard``), and removes it at the end. ``sacplan.apply(model, plan)`` before ``Trainer(...)`` works too, but
then nothing checks the first steps.

Uses the Trainer's public methods, and for mixed precision the functions of Accelerate's ``prepare_model``. Tested with
transformers 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from sacplan.core.program import is_inside
from sacplan.device.devices import DeviceSpec
from sacplan.errors import PlanError, TraceError
from sacplan.integrations._watch import PlannedTraining
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.profiling.tracing import Runtime, Trace, profile
from sacplan.record.longest import LongestBatch, is_loader
from sacplan.record.state import preserved_rng
from sacplan.record.step import check_model, inner_optimizer
from sacplan.techniques.registry import why_uncompiled
from sacplan.techniques.runtime.stand_ins import StandIn

try:
    import transformers
    from accelerate.utils import convert_outputs_to_fp32, get_mixed_precision_context_manager
    from transformers.integrations import neftune
except ImportError as error:
    raise ImportError(
        f"sacplan.integrations.transformers needs transformers 5 and accelerate ({error}); "
        "pip install 'sacplan[transformers]'"
    ) from error

_neftune: Any = neftune  # the module has no annotations


class PlanCallback(PlannedTraining, transformers.TrainerCallback):
    """Train with a plan: applied when training begins, removed when it ends.

        trainer.add_callback(PlanCallback(plan))

    The plan is applied last, to the model inside DDP, ``torch.compile`` and mixed precision, before anything is
    compiled. It takes the place of checkpointing that the Trainer switches on (``gradient_checkpointing=True``, TRL's
    default), unless the profile was recorded with checkpointing.

    Args:
        plan: made for this trainer's model, such as from :func:`profile_trainer`; or several, as ``sacplan.apply``
            takes them, such as ``[plan for _, plan in found.plans]`` of ``certify``.
        check: as in ``sacplan.apply``.
        watch_steps: how many optimizer steps to measure. ``SacplanWarning`` if one takes more than ``tolerance``
            over the predicted peak, or more than the budget. The cost is negligible on CUDA; on a CPU these steps
            run under ``torch.profiler``. 0 switches it off.
        tolerance: a share of the predicted peak.

    Raises:
        PlanMismatch: when training begins, if the plan was made for another model.
        PlanError: a plan is on the model already; ``fsdp=`` has sharded the model, and the plan is not one of a rank.
    """

    _hint = (
        "If the steps are larger, or the loss or the optimizer is another one, plan for what is trained: "
        "sacplan.plan(profile_trainer(trainer, device=...), ...)."
    )

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Apply the plan."""
        assert model is not None
        self._take_off()  # a run that raised has left the plan on
        decisions = tuple(decision for plan in self.plans for decision in plan.decisions)
        why = why_uncompiled(decisions) if args.torch_compile else ""
        if why:
            raise PlanError(f"the Trainer compiles its model (torch_compile=True). {why}")
        # Checkpointing goes by its older names before transformers 5.20 or so.
        names = ("activation_checkpointing", "gradient_checkpointing")
        checkpoints = any(getattr(args, name, None) for name in names)
        if checkpoints and not self.plan.fingerprint.setup.checkpointed:
            stops = (getattr(model, f"{name}_disable", None) for name in names)
            next(filter(None, stops))()
        check_model(model)
        for plan in self.plans:
            _check_sharded(model, plan)
        # ``model`` is the one inside of the wrappers: the Trainer's ``CallbackHandler`` passes
        # ``trainer.model``.
        self._put_on(model)

    def on_step_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Start to measure all micro-batches of the step together."""
        assert model is not None
        # Without the batches, which callbacks do not get: their size is taken from the plan.
        self._watch.begin(model, [] if optimizer is None else [optimizer])

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Stop measuring before evaluation and saving."""
        self._watch.end()
        self._compare([] if optimizer is None else [optimizer])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the plan."""
        self._watch.finish()
        self._take_off()


def profile_trainer(
    trainer: transformers.Trainer,
    *,
    device: str | DeviceSpec | torch.device | None = None,
    runtime: Runtime = "cost-model",
    trace: Trace = "fake",
) -> Profile:
    """Record one optimizer step as this Trainer does it.

        plan = sacplan.plan(profile_trainer(trainer, device="h100"), "22GiB")

    The arguments are those of ``sacplan.profile``; see :func:`step_arguments` for what is recorded.
    """
    # What ``Trainer`` has Accelerate compile with. None: as the model is compiled already, if it is.
    backend, mode = trainer.args.torch_compile_backend or "inductor", trainer.args.torch_compile_mode
    compiled = {"backend": backend, "mode": mode} if trainer.args.torch_compile else None
    return profile(**step_arguments(trainer), device=device, runtime=runtime, trace=trace, compile=compiled)


def step_arguments(trainer: transformers.Trainer) -> dict[str, Any]:
    """Return the arguments of ``sacplan.profile`` and ``sacplan.verify`` for the step of this Trainer.

        arguments = step_arguments(trainer)
        profile = sacplan.profile(**arguments, device="h100")
        sacplan.verify(**arguments, plan=sacplan.plan(profile, "22GiB"))

    The batch is made of the longest samples of the training data, by the trainer's own collator: no later one is
    larger. Of a data set without a length it is the largest of the first batches. The loss is ``trainer.compute_loss``,
    under the mixed precision that Accelerate will switch on; the optimizer is the one that ``trainer.create_optimizer``
    makes. The trainer is not changed, but an iterable dataset that cannot be restarted loses a batch, and with
    ``use_liger_kernel`` Liger's kernels are put into the model and into the classes of its code, as ``train`` would.

    With ``fsdp=`` the model is one on the meta device that Accelerate's own code has sharded: the step is that of this
    rank, of the job that runs or of ``sacplan.ranks`` around the call.

    With gradient accumulation the last micro-step is recorded, which finds the gradients of the others, with the
    optimizer's step. All batches of the step are held, as in the Trainer. Times and FLOPs are those of this micro-step;
    with ``fsdp=`` of it and the one before, whose gradients are not reduced.
    Not counted are the scalars of gradient clipping and of the gradient scaler, and the buffers of DDP.

    Returns:
        ``model``, ``batch``, ``loss_fn``, ``optimizer`` and ``accumulation_steps``.

    Raises:
        TraceError: the trainer trains in a way that is not supported.
    """
    _check_plannable(trainer)
    if trainer.args.use_liger_kernel:  # as ``Trainer.train`` does, which finds them in place then
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
    shadow = copy.copy(trainer)  # keeps what is created below away from the trainer
    batches, items = _largest_step(shadow)
    # ``create_optimizer`` pops entries from these options, so the copy gets its own dict.
    if trainer.optimizer_cls_and_kwargs is not None:
        cls, options = trainer.optimizer_cls_and_kwargs
        shadow.optimizer_cls_and_kwargs = (cls, dict(options))
    with preserved_rng():
        optimizer = inner_optimizer(shadow.create_optimizer())
    model: Any = trainer.model
    is_sharded = bool(trainer.is_fsdp_enabled or trainer.args.fsdp)
    if is_sharded:
        model = _sharded(trainer)
        optimizer = _stepping(optimizer, cast(torch.nn.Module, trainer.model), model)
    return {
        "model": model,
        "batch": {"micro_batches": batches, "num_items_in_batch": items},
        "loss_fn": _TrainerLoss(shadow, is_sharded),
        "optimizer": optimizer,
        "accumulation_steps": 1 if is_sharded else trainer.args.gradient_accumulation_steps,
    }


def _sharded(trainer: transformers.Trainer) -> torch.nn.Module:
    """Return the model on the meta device, sharded by Accelerate as ``Accelerator.prepare`` does it.

    Raises:
        TraceError: the trainer uses the older FSDP1, or an FSDP that checkpoints by itself.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    accelerator = copy.copy(trainer.accelerator)
    accelerator.state = copy.copy(accelerator.state)
    # A copy of its dictionary: all instances of ``AcceleratorState`` share one.
    accelerator.state.__dict__ = dict(accelerator.state.__dict__)
    plugin = copy.deepcopy(getattr(accelerator.state, "fsdp_plugin", None))
    if plugin is None:  # Accelerate ignores ``fsdp=`` on a machine without accelerators
        plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
    if plugin.fsdp_version != 2:
        raise TraceError(
            "this trainer shards with the older FullyShardedDataParallel, which a plan does not go with. Shard with "
            'fully_shard: fsdp_config={"version": 2}.'
        )
    if plugin.activation_checkpointing:
        raise TraceError(
            "checkpointing is switched on in fsdp_config (activation_checkpointing). Leave it out: sacplan chooses "
            "what to recompute."
        )
    plugin.cpu_ram_efficient_loading = False  # there are no weights to load
    accelerator.state.fsdp_plugin = plugin
    model: Any = trainer.model
    on_meta = {id(p): torch.nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Accelerate repeats what it warns of in training
        sharded: torch.nn.Module = fsdp2_prepare_model(accelerator, copy.deepcopy(model, on_meta))
    return sharded


def _stepping(optimizer: Any, model: torch.nn.Module, sharded: torch.nn.Module) -> Any:
    """Return the optimizer over the parameters of the same names of the sharded model, as Accelerate does."""
    names = {id(p): name for name, p in model.named_parameters()}
    parts = dict(sharded.named_parameters())
    stepping = copy.copy(optimizer)
    stepping.param_groups = [
        group | {"params": [parts[names[id(p)]] for p in group["params"]]} for group in optimizer.param_groups
    ]
    return stepping


@dataclass(frozen=True, slots=True)
class _TrainerLoss:
    """The forward pass of the last micro-batch of an optimizer step; of a sharded model, the one before as well."""

    trainer: transformers.Trainer
    is_sharded: bool

    def __call__(self, model: Any, batch: Any) -> torch.Tensor:
        trainer = _without_metrics(self.trainer)
        # The model to record is a copy on fake tensors. ``compute_loss`` reads these attributes as well
        # as its argument.
        trainer.model = trainer.model_wrapped = model
        micro_batches, items = batch["micro_batches"], batch["num_items_in_batch"]
        trainer.current_gradient_accumulation_steps = len(micro_batches)
        # As ``Trainer.training_step`` does.
        model.train()
        with _prepared(trainer, model, self.is_sharded):
            if self.is_sharded and len(micro_batches) > 1:
                # As ``Accelerator.no_sync`` does. One is enough: still earlier ones find and leave the same gradients.
                model.set_requires_gradient_sync(False)
                self._loss(trainer, model, micro_batches[-2], items).backward()
                model.set_requires_gradient_sync(True)
            return self._loss(trainer, model, micro_batches[-1], items)

    @staticmethod
    def _loss(trainer: transformers.Trainer, model: torch.nn.Module, batch: Any, items: Any) -> torch.Tensor:
        loss: Any = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
        # As ``Trainer.training_step`` does.
        if not _is_normalized(trainer, items):
            loss = loss / trainer.current_gradient_accumulation_steps
        return cast(torch.Tensor, loss)


def _without_metrics(trainer: transformers.Trainer) -> transformers.Trainer:
    """Return a copy of the trainer whose metrics are not kept.

    Trainers of TRL add up metrics in ``compute_loss``, and read them as numbers there, which fake tensors do not have.
    So what they gather for metrics is replaced by ones. The loss does not depend on it.
    """
    shadow: Any = copy.copy(trainer)
    shadow.accelerator = copy.copy(trainer.accelerator)
    shadow.accelerator.gather_for_metrics = shadow.accelerator.gather = torch.ones_like
    if hasattr(trainer, "_metrics"):
        shadow._metrics = copy.deepcopy(trainer._metrics)
    return cast("transformers.Trainer", shadow)


def _is_normalized(trainer: transformers.Trainer, items: Any) -> bool:
    """Return whether the loss already accounts for gradient accumulation, as ``Trainer.training_step`` decides it."""
    # Newer versions of transformers say it in an attribute; None there means that the rule below decides.
    known = getattr(trainer, "loss_is_scaled_for_ga", None)
    if known is not None:
        return bool(known)
    return trainer.compute_loss_func is not None or (trainer.model_accepts_loss_kwargs and items is not None)


@contextlib.contextmanager
def _prepared(trainer: transformers.Trainer, model: torch.nn.Module, is_sharded: bool) -> Iterator[None]:
    """Prepare the model as ``Accelerator.prepare_model`` and ``Trainer.train`` do, and undo that afterwards.

    A model that was trained already has been prepared for mixed precision, and one that is sharded has a policy.
    """
    accelerator = trainer.accelerator
    attributes, name, forward = model.__dict__, "forward", model.forward
    # Under the stand-ins of a plan, as in training, where the callback applies the plan to the prepared model.
    while isinstance(stand_in := attributes.get(name), StandIn):
        attributes, name, forward = vars(stand_in), "replaced", stand_in.original
    own = {key: value for key, value in attributes.items() if key == name}
    # ``Accelerator.prepare_model`` leaves ``_original_forward`` on a model that it has wrapped. Wrapped
    # again, autocast would be entered twice.
    mixed = accelerator.native_amp and not is_sharded and not hasattr(model, "_original_forward")
    if mixed:
        autocast = get_mixed_precision_context_manager(accelerator.native_amp, accelerator.autocast_handler)
        attributes[name] = convert_outputs_to_fp32(autocast(forward))
    noise = None
    if trainer.neftune_noise_alpha is not None:
        noise = _neftune.activate_neftune(model, trainer.neftune_noise_alpha, accelerator)
    try:
        yield
    finally:
        # In reverse order. Without a forward of the instance's own, the class's is found again.
        if noise is not None:
            _neftune.deactivate_neftune(model, noise, accelerator)
        if mixed:
            del attributes[name]
            attributes.update(own)


def _largest_step(trainer: transformers.Trainer) -> tuple[tuple[Any, ...], Any]:
    """Return the batches of an optimizer step, the largest last, and the number of items to divide the loss by."""
    # ``get_train_dataloader`` has Accelerate register the loader. It is taken out again, so that training
    # does not find two.
    known = list(trainer.accelerator._dataloaders)
    with preserved_rng():
        loader = trainer.get_train_dataloader()
        count = trainer.args.gradient_accumulation_steps
        iterator = _largest_batches(loader, count)
        try:
            samples, items = trainer.get_batch_samples(iterator, count, trainer.args.device)
        finally:
            if hasattr(iterator, "close"):
                iterator.close()
            if hasattr(loader, "end"):  # else Accelerate would still take it for the active loader
                loader.end()
            trainer.accelerator._dataloaders[:] = known
    if not samples:
        raise TraceError(
            "the trainer's data loader yields no batch. Give it a train_dataset that is not empty."
        )
    plain = [_plain(trainer._prepare_inputs(sample)) for sample in samples]
    return tuple(sorted(plain, key=_elements)), items


def _largest_batches(loader: Any, count: int) -> Any:
    """Return an iterator over the largest batch, ``count`` times, or over all batches of a stream."""
    # A stream is not searched for its largest batch, which would use it up: its batches are watched in training.
    if not is_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return iter(loader)
    make = LongestBatch(loader)
    return (make() for _ in range(count))


def _elements(batch: Any) -> int:
    return sum(t.numel() for t in tree_leaves(batch) if isinstance(t, torch.Tensor))


def _plain(value: Any) -> Any:
    """Convert ``BatchEncoding`` and other mappings to dicts, nested ones too."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _check_plannable(trainer: transformers.Trainer) -> None:
    # Every exit here is a way of training whose step would not be recorded as it runs: a sharded or replicated model,
    # replaced kernels, a second model on the device, or tensors that are moved to the host.
    args = trainer.args
    check_model(trainer.model)
    is_of_trl = any(base.__module__.partition(".")[0] == "trl" for base in type(trainer).__mro__)
    unsupported = {
        "nn.DataParallel over several GPUs": args.n_gpu > 1,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "a reference model of TRL (precompute_ref_log_probs=True and LoRA do without)": (
            getattr(trainer, "ref_model", None) is not None
            and not getattr(args, "precompute_ref_log_probs", False)
        ),
        "activation_offloading": getattr(args, "activation_offloading", False),  # of TRL
        # With these, TRL's head calls the forward of the original model, not that of the copy that is recorded.
        "label_smoothing_factor or compute_loss_func with TRL (both are deprecated there)": is_of_trl
        and (args.label_smoothing_factor > 0 or trainer.compute_loss_func is not None),
    }
    for what, is_used in unsupported.items():
        if is_used:
            raise TraceError(
                f"this trainer uses {what}, which profile_trainer does not support. Describe the step of one "
                "process to sacplan.profile yourself."
            )


def _check_sharded(model: torch.nn.Module, plan: Plan) -> None:
    """Raise ``PlanError`` if ``fsdp=`` has sharded the model and the plan was not made for that."""
    # Nothing can be sharded without a process group.
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    # FullyShardedDataParallel flattens a unit's parameters into one, so names and shapes are not those planned for.
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise PlanError(
            "the Trainer has wrapped this model in the older FullyShardedDataParallel, which a plan does not go with. "
            'Shard with fully_shard: fsdp_config={"version": 2}.'
        )
    sharded = [fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)]
    # A process group without sharding is DDP, with which any plan for one device runs.
    if not sharded:
        return
    # The profile was recorded on a rank's own shards, so the planner has seen which modules gather parameters.
    if plan.fingerprint.local_shapes is not None:
        return
    if plan.ranks.fsdp_units is None:
        raise PlanError(
            "the Trainer shards this model with fully_shard, and the plan is not one of a rank: its peak is another "
            "one, and it may recompute where parameters are not gathered. Give profile_trainer the trainer with fsdp=, "
            f"in this job or in sacplan.ranks({dist.get_world_size()})."
        )
    # A unit of the plan runs again in the backward pass as a whole. If a module inside of it is sharded by
    # itself, its parameters are gathered only while FSDP2 runs that module's own hooks. A unit that is itself
    # sharded, or lies inside of a sharded module, is safe: its parameters are gathered for all of its
    # backward pass.
    for unit in plan.units:
        inner = next((fqn for fqn in sharded if fqn != unit and is_inside(fqn, unit)), None)
        if inner is not None:
            raise PlanError(
                f"the plan's unit {unit!r} contains {inner!r}, which the Trainer shards by itself, so that its "
                f"parameters are not gathered where the unit recomputes. Name {inner!r} among the units of FSDP2 that "
                "you plan with."
            )
