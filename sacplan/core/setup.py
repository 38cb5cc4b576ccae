"""The setup of a recorded step: settings that change its memory, that no shape shows and a training loop may change.

    planned = Setup.of(model, [optimizer], loss="the model's own loss")
    planned.differences(Setup.of(other_model))

``Fingerprint.setup`` holds it, so profiles and plans have it in their files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from msgspec import Struct

from sacplan.core.compilation import Compilation
from sacplan.core.elements import outermost, pattern_of
from sacplan.core.files import Count, Name, Positive, Share
from sacplan.errors import SacplanWarning
from sacplan.torch_compat.compiling import compiled_in_place

Routing = Literal["balanced", "worst"]
ModuleMode = Literal["train", "eval", "mixed"]

_MEMORY_OPTIONS = (
    "amsgrad", "momentum", "centered", "nesterov", "foreach", "fused", "capturable", "differentiable",
)  # fmt: skip
"""Options of an optimizer that change what it keeps, or what its step allocates."""


@dataclass(frozen=True, slots=True)
class SetupDifference:
    """One setting that differs from the recorded step.

    Attributes:
        what: "key-value cache", "attention", "dropout", "modules", "loss", "optimizer", "autocast" or "accumulation".
        planned, here: both values, in words.
        advice: a sentence on what to do about it; empty where the peak can only be lower.
    """

    what: str
    planned: str
    here: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.planned} in the plan, {self.here} here"


OWN_LOSS, ONLY_SCALAR = "the model's own loss", "the only scalar of the outputs"
SUM_OF_OUTPUTS = "the sum of the outputs"
"""``Setup.loss`` where the default loss was taken."""


class Setup(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a step was set up.

    Attributes:
        use_cache: whether the configuration of a transformers model asks for a key-value cache, which is then alive as
            an output; None for a model that makes none.
        attention: attention implementations in the configurations of the model, "sdpa"; empty where there is none.
        modules: whether its modules were in training mode.
        in_eval: where modes are mixed, the modules in eval mode (numbers as ``*``), without those inside them.
        dropout: modules (numbers as ``*``) to the probability with which they drop values, in training mode.
        loss: the function's name, or what was taken by default.
        optimizer: its class, and the options that change its memory, "AdamW(fused=True)"; None where none ran.
        compiled: the modules that ran compiled, and how; None if none did. A plan has no unit around one of them, in
            which it would not run compiled.
        scripted: modules made by ``torch.jit.script`` or ``torch.jit.trace``. A plan has no unit in or around them:
            after a few calls TorchScript runs other ops than at first, and some of those fail under a dispatch mode.
        checkpointed: modules that ``torch.utils.checkpoint`` runs again in the step itself, with those inside them. A
            plan leaves them as they are.
        autocast: the type of a ``torch.autocast`` around the call of ``profile``; one inside ``loss_fn`` does not show.
        accumulation_steps: micro-batches whose gradients one optimizer step adds up. With more than one, gradients are
            alive before the recorded step begins.
        routing: how a fake trace spread tokens over experts, where a router decides by values that it does not have.
        optimizer_host_bytes: memory of the host that the optimizer takes, in no peak of the device.
        shards_host_bytes: memory of the host that shards of a recorded rank take with a ``CPUOffloadPolicy``.
    """

    use_cache: bool | None = None
    attention: tuple[Name, ...] = ()
    modules: ModuleMode = "train"
    in_eval: tuple[str, ...] = ()
    dropout: Mapping[str, Share] = {}
    loss: str = ""
    optimizer: Name | None = None
    autocast: Name | None = None
    compiled: Compilation | None = None
    scripted: tuple[Name, ...] = ()
    checkpointed: tuple[str, ...] = ()
    accumulation_steps: Positive = 1
    routing: Routing = "balanced"
    optimizer_host_bytes: Count = 0
    shards_host_bytes: Count = 0

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        loss: str = "",
        autocast: str | None = None,
        *,
        accumulation_steps: int = 1,
    ) -> Setup:
        """Read the setup from a model and its optimizers as they are now."""
        with compiled_in_place(model) as model:
            modes = {module.training for module in model.modules()}
            return cls(
                use_cache=_use_cache(model),
                attention=_attention(model),
                modules="mixed" if len(modes) > 1 else "train" if True in modes else "eval",
                in_eval=_in_eval(model) if len(modes) > 1 else (),
                dropout=_dropout(model),
                loss=loss,
                optimizer=" and ".join(dict.fromkeys(map(optimizer_name, optimizers))) or None,
                autocast=autocast,
                accumulation_steps=accumulation_steps,
            )

    def differences(self, here: Setup) -> tuple[SetupDifference, ...]:
        """Return all differences of a setup ``here`` from this one, that of the plan."""
        return (*self.model_differences(here), *self.mode_differences(here), *self.step_differences(here))

    def model_differences(self, here: Setup) -> tuple[SetupDifference, ...]:
        """Return differences in the configuration of the model, which ``apply`` can see."""
        # A setting that one of the two does not have is not compared.
        found: tuple[SetupDifference, ...] = ()
        if None not in (self.use_cache, here.use_cache):
            advice = (
                "What the cache holds is alive until the step is over: set model.config.use_cache = False, or plan "
                "the model as it is. (Nothing to do if each call passes use_cache=False.)"
            )
            # Only a cache that is on here takes more than was planned. The other way round the peak can only be lower.
            found += _differing(
                "key-value cache", _on(self.use_cache), _on(here.use_cache), advice if here.use_cache else ""
            )
        if self.attention and here.attention:
            advice = "Other kernels keep other tensors: use the same attn_implementation, or plan the model as it is."
            found += _differing("attention", ", ".join(self.attention), ", ".join(here.attention), advice)
        return found

    def mode_differences(self, here: Setup) -> tuple[SetupDifference, ...]:
        """Return differences in training and eval mode, which are known once a step runs."""
        # A probability changes no shape: only modules that drop values here, and dropped none in the plan, take more.
        # Mixed modes a loop may set before each step: they need no advice.
        more = "mixed" not in (self.modules, here.modules) and here.dropout.keys() - self.dropout.keys()
        advice = "Dropout keeps a mask of what it drops: call model.train() before sacplan.profile too."
        modules = _differing("modules", self._modes(), here._modes())
        if self.dropout == here.dropout:  # by module: two that read the same may differ
            return modules
        dropout = (_probabilities(self.dropout), _probabilities(here.dropout))
        return (SetupDifference("dropout", *dropout, advice if more else ""), *modules)

    def step_differences(self, here: Setup) -> tuple[SetupDifference, ...]:
        """Return differences in the loss, the optimizer and autocast."""
        # Two names may stand for the same loss, but no given loss_fn is the default sum of all outputs.
        loss = "Give the loss_fn that was profiled." if SUM_OF_OUTPUTS in (self.loss, here.loss) else ""
        autocast = "Enter the same torch.autocast as around sacplan.profile."
        return (
            *_differing("loss", self.loss, here.loss, loss),
            *self.optimizer_difference(here.optimizer),
            *_differing("autocast", self.autocast or "off", here.autocast or "off", autocast),
            *self.accumulation_difference(here.accumulation_steps),
        )

    def accumulation_difference(self, here: int) -> tuple[SetupDifference, ...]:
        """Return the difference in the number of micro-batches, if there is one."""
        # A second micro-batch raises the peak, further ones do not.
        advice = f"Gradients of earlier micro-batches are alive in each later one: plan with accumulation_steps={here}."
        only_one = self.accumulation_steps == 1
        planned, now = (_micro_batches(n) for n in (self.accumulation_steps, here))
        return _differing("accumulation", planned, now, advice if only_one else "")

    def optimizer_difference(self, here: str | None) -> tuple[SetupDifference, ...]:
        """Return the difference in the optimizer, if there is one (see ``optimizer_name``)."""
        advice = "The optimizer's state and its step's temporaries are part of the peak: give the one that trains to "
        where = "sacplan.profile." if self.optimizer is None else "both sacplan.profile and this step."
        return _differing("optimizer", self.optimizer or "none", here or "none", advice + where)

    def __str__(self) -> str:
        """Return one line: ``cache off, dropout 0.1, sdpa attention, the model's own loss, AdamW(fused=True)``."""
        words = [
            "" if self.use_cache is None else f"cache {_on(self.use_cache)}",
            "" if self.modules == "train" else self._modes(),
            f"dropout {_probabilities(self.dropout)}" if self.dropout else "no dropout",
            f"{', '.join(self.attention)} attention" if self.attention else "",
            self.loss if " " in self.loss or not self.loss else f"loss {self.loss}",
            self.optimizer or "no optimizer",
            f"autocast {self.autocast}" if self.autocast else "",
            f"gradients of {self.accumulation_steps} micro-batches" if self.accumulation_steps > 1 else "",
            "" if self.routing == "balanced" else f"{self.routing} routing",
            "" if self.compiled is None else str(self.compiled),
            f"left alone as TorchScript: {_patterns(self.scripted)}" if self.scripted else "",
            "checkpoints by itself" if self.checkpointed else "",
        ]
        return ", ".join(word for word in words if word)

    def _modes(self) -> str:
        if self.modules != "mixed":
            return f"{self.modules} mode"
        names = [fqn or "the model itself" for fqn in self.in_eval]
        return f"{', '.join(names[:3])}{', ...' if names[3:] else ''} in eval mode"


def _differing(what: str, planned: str, here: str, advice: str = "") -> tuple[SetupDifference, ...]:
    """Return the difference of two values in words; nothing where they read the same."""
    return () if planned == here else (SetupDifference(what, planned, here, advice),)


def _micro_batches(n: int) -> str:
    return "one batch" if n == 1 else f"{n} micro-batches"


def warn_of(differences: Iterable[SetupDifference], stacklevel: int) -> None:
    """Issue one ``SacplanWarning`` for all differences that need something done."""
    found = [difference for difference in differences if difference.advice]
    if found:
        sentences = " ".join(f"{difference}. {difference.advice}" for difference in found)
        message = f"this is not set up as the step planned for, so its peak is another. {sentences}"
        warnings.warn(message, SacplanWarning, stacklevel=stacklevel + 1)


def optimizer_name(optimizer: Any) -> str:
    """Return the class of an optimizer with the options that change its memory: ``AdamW(fused=True)``."""
    options: dict[str, Any] = {}
    for name in _MEMORY_OPTIONS:
        for group in optimizer.param_groups:
            value = group.get(name)
            # An option that is off is left out, as if the optimizer did not have it. ``foreach=False`` is shown, since
            # with None torch chooses, and may take the implementation that makes large temporaries.
            if value or (name == "foreach" and value is not None):
                options[name] = value
    shown = ", ".join(f"{name}={value}" for name, value in options.items())
    # An optimizer of sacplan with the sizes of another class names it in ``stands_for``.
    return getattr(optimizer, "stands_for", type(optimizer).__name__) + (f"({shown})" if shown else "")


def function_name(function: Callable[..., Any]) -> str:
    """Return the last part of the name of a function, or of the class of a callable object."""
    inner = getattr(function, "func", function)  # of a partial
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return str(name.rpartition(".")[2])


def current_autocast(kind: str) -> str | None:
    """Return the type that an entered ``torch.autocast`` casts to on devices of a kind; None if none is entered."""
    if not torch.is_autocast_enabled(kind):
        return None
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _configurations(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Yield modules with their configuration; of a multi-modal one, that of the text model."""
    for module in model.modules():
        config = getattr(module, "config", None)
        of_text = getattr(config, "get_text_config", None)
        # ``get_text_config`` is of transformers; an older or other configuration is taken as it is.
        if config is not None:
            yield module, of_text(decoder=True) if callable(of_text) else config


def _use_cache(model: torch.nn.Module) -> bool | None:
    found = set()
    # A model may hold several configurations that disagree: one that asks for a cache is enough.
    for module, config in _configurations(model):
        asked = getattr(config, "use_cache", None)
        # Encoders such as BERT ask for a cache and make none.
        decoder = getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False)
        if isinstance(asked, bool) and (decoder or _generates(module)):
            found.add(asked)
    return None if not found else True in found


def _generates(module: torch.nn.Module) -> bool:
    can_generate = getattr(module, "can_generate", None)
    return bool(callable(can_generate) and can_generate())


def _attention(model: torch.nn.Module) -> tuple[str, ...]:
    found = {getattr(config, "_attn_implementation", None) for _, config in _configurations(model)}
    return tuple(sorted(name for name in found if isinstance(name, str) and name))


def _in_eval(model: torch.nn.Module) -> tuple[str, ...]:
    modes = {fqn: module.training for fqn, module in model.named_modules()}
    # A module whose parent is in eval mode as well is inside of one that is named.
    top = (
        fqn for fqn, training in modes.items()
        if not training and (not fqn or modes[fqn.rpartition(".")[0]])
    )  # fmt: skip
    return tuple(dict.fromkeys(pattern_of(fqn) for fqn in top))


def _dropout(model: torch.nn.Module) -> dict[str, float]:
    """Return, by module pattern, the probability with which modules in training mode drop values.

    These are ``nn.Dropout`` and the like, and modules with a float attribute like ``attention_dropout``.
    """
    found: dict[str, float] = {}
    for fqn, module in model.named_modules():
        # In eval mode a module drops nothing.
        if not module.training:
            continue
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            given = [vars(module).get("p", 0.0)]
        else:
            given = [v for name, v in vars(module).items() if "drop" in name and isinstance(v, float)]
        # A probability of 0 drops nothing and keeps no mask, so such a module is as if it were not there.
        p = max((float(value) for value in given if 0 < value <= 1), default=0.0)
        if p > 0:
            pattern = pattern_of(fqn)
            # Of the layers with one pattern, the highest probability counts.
            found[pattern] = max(p, found.get(pattern, 0.0))
    return found


def scripted_inside(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the outermost modules made by ``torch.jit.script`` or ``torch.jit.trace``; "" is the model itself."""
    return _outermost(model, lambda module: isinstance(module, torch.jit.ScriptModule))


def compiled_inside(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the outermost modules, except for the model itself, that are compiled on their own."""
    return _outermost(model, lambda module: module is not model and _is_compiled(module))


def _is_compiled(module: torch.nn.Module) -> bool:
    # ``module.compile()``, a module in ``torch.compile(module)``'s wrapper, and ``torch.compile(module.forward)``.
    return (
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
    )


def _outermost(model: torch.nn.Module, of_kind: Callable[[torch.nn.Module], bool]) -> tuple[str, ...]:
    return outermost(fqn for fqn, module in model.named_modules() if of_kind(module))


def outermost_patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names (numbers as ``*``) of the modules that are inside of none of the others."""
    return tuple(dict.fromkeys(map(pattern_of, outermost(names))))


def _patterns(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(map(pattern_of, names)))


def _probabilities(dropout: Mapping[str, float]) -> str:
    return ", ".join(f"{p:g}" for p in sorted(set(dropout.values()))) or "none"


def _on(value: bool | None) -> str:
    return "on" if value else "off"
