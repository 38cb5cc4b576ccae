"""Every architecture of transformers at a small size, made from its config class: no weights, no file by hand.

    small_configs.architectures()            # model types, such as "llama"
    case = small_configs.build("llama")      # model, batch, loss_fn

A config is made from the defaults of its class. ``RULES`` say what becomes of a field, by its name: widths become 64,
depths 2, heads 4, vocabularies 512. Configs inside it are shrunk the same way, so that what has to agree between them
does. ``OVERRIDES`` are for what the rules get wrong, by model type. The class is the first of the architecture's heads
that runs; the batch is made as for an ``hf:`` target (``integrations/hf/batches.py``), with labels where it has them.

An architecture that ``hf_models`` has a config for, written by hand, takes that one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto

from benchmarks.harness.results import ROOT
from benchmarks.harness.steps import seed_everything
from benchmarks.models import hf_models
from benchmarks.models.cases import Case
from sacplan.integrations.hf import batches as hf_batches
from sacplan.integrations.hf import models as hf
from sacplan.record.step import default_loss

ROWS = 8
LENGTH = 48
WIDTH = 64
HEADS_COUNT = 4
HEAD_DIM = WIDTH // HEADS_COUNT
LAYERS = 2
VOCABULARY = 512
IMAGE = 64
MELS = 16
FRAMES = 64
SAMPLES = 6400

_SEED = 0


class NotBuilt(Exception):
    """An architecture was not built, or its step does not run in plain PyTorch; the message says why."""


# --- which architectures ---------------------------------------------------------------------------------------------


@functools.cache
def architectures() -> tuple[str, ...]:
    """Return the model types that have a model class, in alphabetical order.

    The towers of an architecture ("qwen2_vl_vision") are left out: they run as part of it.
    """
    types = model_types()
    return tuple(t for t in types if not _whole_of(t, types))


def model_types() -> tuple[str, ...]:
    """Return the model types that an auto class of transformers builds, towers included."""
    return tuple(sorted({name for head in hf.HEADS for name in hf.class_names(head)}))


_PART = re.compile(
    r"_(vision|text|audio|encoder|decoder|vision_model|text_model|text_text_model|vqmodel|\w*_model)$"
)


def _whole_of(model_type: str, types: Iterable[str]) -> bool:
    """Whether a type is named as a part of another one."""
    return any(
        model_type.startswith(f"{whole}_") and _PART.fullmatch(model_type.removeprefix(whole)) is not None
        for whole in types
    )


# --- configs ---------------------------------------------------------------------------------------------------------

Rule = Callable[[Any], Any]


def _at_most(most: int) -> Rule:
    """Bound the number, or each of several."""

    def rule(value: Any) -> Any:
        return type(value)(map(rule, value)) if isinstance(value, (list, tuple)) else min(value, most)

    return rule


def _all(number: int) -> Rule:
    return lambda value: type(value)([number] * len(value)) if isinstance(value, (list, tuple)) else number


def _heads(value: Any) -> Any:
    """Return powers of two, which divide the widths."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_heads, value))
    return min(HEADS_COUNT, 2 ** int(math.log2(max(1, value))))


def _widths(value: Any) -> Any:
    """Return at most ``WIDTH``; several keep their ratios."""
    if not isinstance(value, (list, tuple)) or not value:
        return min(value, WIDTH) if isinstance(value, int) else value
    largest = max(value)
    if largest <= WIDTH:
        return value
    return type(value)(max(8, int(v * WIDTH / largest) // 8 * 8) for v in value)


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Fit the sections of a rotary embedding to the head's width, and set a base where the class has none."""
    value = dict(value)
    if "mrope_section" in value:
        half = HEAD_DIM // 2
        side = 3 * half // 8
        value["mrope_section"] = [half - 2 * side, side, side]
    if "rope_type" in value and value.get("rope_theta") is None:
        value["rope_theta"] = 10000.0
    return value


_KINDS: dict[str, Callable[[Any], Rule]] = {
    "at_most": _at_most,
    "all": _all,
    "each": lambda value: lambda default: type(default)([value]),
    "heads": lambda _: _heads,
    "widths": lambda _: _widths,
    "rope": lambda _: _rope,
}


def _made_rule(said: Any) -> Any:
    (kind, value), *_ = said.items() if isinstance(said, dict) else [("", said)]
    return _KINDS[kind](value) if kind else said


_TABLE = json.loads((ROOT / "benchmarks" / "data" / "small_configs.json").read_text(encoding="utf-8"))
RULES: list[tuple[str, Any]] = [(pattern, _made_rule(said)) for pattern, said in _TABLE["rules"]]
"""Name of a field (a pattern that is its whole name) and what it becomes: a value, or a function of the default.

The first pattern that fits counts; None leaves the field. A field whose default is None is left as well: the config
works it out. So is one that is a share.
"""


def small_config(
    config_class: type[PretrainedConfig], defaults: PretrainedConfig | None = None
) -> PretrainedConfig:
    """Make a small config of a class.

    Args:
        config_class: whose fields are asked for.
        defaults: values to start from, where the config is part of another one.
    """
    model_type = config_class.model_type
    overrides = OVERRIDES.get(model_type, {})
    if defaults is None:
        defaults = config_class()
    values: dict[str, Any] = {}
    for name, declared in _fields(config_class).items():
        value = vars(defaults).get(name, declared)
        if isinstance(value, PretrainedConfig):
            values[name] = small_config(type(value), value)
        elif name == "vocab_size" and value is None:  # a checkpoint brings it
            values[name] = VOCABULARY
        elif value is not None and (declared is not None or name == "rope_parameters"):
            rule = _rule(name)
            if rule is not None and not isinstance(value, (float, bool)) and model_type not in UNSHRUNK:
                values[name] = rule(value) if callable(rule) else rule
    if model_type not in UNSHRUNK:
        values |= _layer_types(defaults)
    if "qk_rope_head_dim" in values:  # latent attention: the rotary part has a width of its own
        values |= {k: v for k, v in _LATENT_ATTENTION.items() if k in _fields(config_class)}
    made = {k: v() if callable(v) else v for k, v in overrides.items()}
    return config_class(**values | made)


_LATENT_ATTENTION = {"head_dim": HEAD_DIM // 2, "num_key_value_heads": HEADS_COUNT, "qk_head_dim": HEAD_DIM}


@functools.cache
def _rule(name: str) -> Any:
    return next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), None)


def _fields(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Return the fields that the class declares for the architecture, with their defaults."""
    common = {f.name for f in dataclasses.fields(PretrainedConfig)}
    found = {}
    for field in dataclasses.fields(config_class):
        if field.name in common or not field.init:
            continue
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = None if field.default is dataclasses.MISSING else field.default
    return found


def _layer_types(defaults: PretrainedConfig) -> dict[str, Any]:
    """Keep one layer of each kind that the architecture mixes, and at least ``LAYERS``."""
    found: dict[str, Any] = {}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = vars(defaults).get(name)
        if isinstance(kinds, list) and kinds and name in _fields(type(defaults)):
            found[name] = list(dict.fromkeys(kinds))
    if not found:
        return {}
    layers = max(LAYERS, *map(len, found.values()))
    for name, kinds in found.items():
        found[name] = [kinds[i % len(kinds)] for i in range(layers)]
    return {**found, "num_hidden_layers": layers}


def _resnet() -> PretrainedConfig:
    """Return a backbone that needs no other package."""
    return transformers.ResNetConfig(  # type: ignore[call-arg]
        embedding_size=16, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


_OWN_BACKBONE = {"backbone_config": _resnet, "use_timm_backbone": False, "backbone": None}
OVERRIDES: dict[str, dict[str, Any]] = _TABLE["overrides"] | dict.fromkeys(
    ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer"), _OWN_BACKBONE
)
"""By model type, of configs inside others too: values (or makers of values) for fields that the rules get wrong."""

UNSHRUNK = frozenset(_TABLE["unshrunk"])
"""Convolutional networks whose shape is a table in the config: small enough as they are."""


# --- batches ---------------------------------------------------------------------------------------------------------

SIZES = hf_batches.BatchDimensions(
    rows=ROWS, tokens=LENGTH, pixels=IMAGE, patches=4, frames=FRAMES, samples=SAMPLES, mels=MELS, transcript=6,
    padded=True,
)  # fmt: skip


def _sizes(config: Any) -> hf_batches.BatchDimensions:
    positions = hf_batches.first_of(config.get_text_config(), "max_position_embeddings", "n_positions")
    return dataclasses.replace(SIZES, tokens=min(LENGTH, positions or LENGTH))


def _with_data(model: torch.nn.Module, arguments: Any, call: Callable[..., Any]) -> Any:
    with torch.no_grad():
        return call(model, arguments)


# --- models ----------------------------------------------------------------------------------------------------------

_BY_HAND_ROWS = 2


@functools.cache
def by_hand() -> dict[str, str]:
    """Map model types to names in ``hf_models``."""
    return {make("small")[1].model_type: name for name, make in hf_models.ARCHITECTURES.items()}


def build(model_type: str) -> Case:
    """Build a model of an architecture, in training mode, and a batch that it trains on.

    Raises:
        NotBuilt: it cannot be made small, or no batch was found that it runs on; the message is the first error.
    """
    seed_everything(_SEED)
    if model_type in by_hand():
        return Case(*hf_models.build(by_hand()[model_type], "small", "cpu", copies=_BY_HAND_ROWS))
    config_class = configuration_auto.CONFIG_MAPPING[model_type]
    errors: list[str] = []
    with _noted(errors, "config"):
        small_config(config_class)
    if errors:
        raise NotBuilt(errors[0])
    for model_class in hf.model_classes(model_type):
        seed_everything(_SEED)
        with _noted(errors, model_class.__name__):
            model = model_class(small_config(config_class)).train()
            for batch in _batches(model, errors):
                return Case(model, batch)
    raise NotBuilt("; then ".join(dict.fromkeys((*errors[:1], *errors[-1:]))) or "no model class")


def _batches(model: torch.nn.Module, errors: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the first batch on which a step runs; those with labels are tried first."""
    for labels in (True, False):
        for layout in hf_batches.layouts(model):
            with _noted(errors, type(model).__name__):
                seed_everything(_SEED)
                sizes = _sizes(model.config)
                inputs = hf_batches.BatchInputs(model, sizes, layout=layout, run=_with_data)
                batch = hf_batches.make_batch(inputs, labels=labels)
                _try_step(model, batch)
                yield batch
                return


def _try_step(model: torch.nn.Module, batch: dict[str, Any]) -> None:
    """Run a step without a plan, and forget its gradients.

    Raises:
        ValueError: nothing to train came out of it.
    """
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    try:
        loss = default_loss(model, batch)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}")
        loss.backward()
        if all(p.grad is None for p in model.parameters()):
            raise ValueError("no parameter has a gradient")
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])


@contextlib.contextmanager
def _noted(errors: list[str], where: str) -> Iterator[None]:
    """Turn an exception into a line of ``errors``: whatever an architecture raises, another try may do."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        errors.append(f"{where}: {type(error).__name__}: {text[:200]}")
