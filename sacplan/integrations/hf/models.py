"""Make ``hf:`` targets: a model from a configuration of transformers, without weights, and a batch for it."""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from sacplan.integrations.hf import architectures, hub
from sacplan.integrations.hf.batches import (
    BatchDimensions,
    FoundBatch,
    NoBatch,
    find,
    first_of,
    has_own_loss,
    make,
    reads_tokens,
    text_config,
)
from sacplan.integrations.hf.lora import adapted
from sacplan.integrations.hf.target import DEFAULTS, ModelOptions, Target, TargetError, hinted
from sacplan.profiling.optimizer_names import NONE, named_optimizer


class _Heads(msgspec.Struct):
    """Tasks of transformers' auto classes, and words for some of them."""

    order: tuple[str | None, ...]
    spelled: dict[str, str]


_HEADS = msgspec.json.decode(Path(__file__).with_name("heads.json").read_bytes(), type=_Heads)
HEADS = _HEADS.order
"""Tasks of transformers' auto classes, in the order in which they are tried for a configuration that names no class.

None stands for the model without a head.
"""

_OWN_FUNCTION = "Write a function that returns the model and a batch, and give it as train.py:make."


_NO_CODE = "its model is code that comes with its weights, which is not run."

_KNOWN = ("names that are known, with or without their owner:", *architectures.by_owner())
"""Hints, a line each."""


def build(
    target: str, asked: ModelOptions, place: str, may_fetch: Callable[[str], bool] = lambda name: False
) -> Target:
    """Make the model that a name or a configuration file describes, in training mode, with a batch and an optimizer.

    Args:
        target: ``hf:`` and a name in our table, a directory, a file, or a configuration in the local cache.
        asked: sizes and types.
        place: the device of the tensors. On ``"meta"`` there are no weights; elsewhere they are random.
        may_fetch: whether the configuration of a name may be fetched from the hub.

    Raises:
        TargetError: transformers is missing, there is no such configuration here, or no batch for its model.
    """
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise TargetError(
            "hf: targets need transformers, which is not installed; run: pip install 'sacplan[hf]'"
        ) from error
    name = target.removeprefix("hf:")
    if not name.strip():
        needed = "hf: needs a name, a configuration file or a directory behind it: hf:gpt2, hf:config.json."
        raise hinted(TargetError(needed), *_KNOWN)
    options = replace(DEFAULTS, **asked.given())
    config = _config(name, may_fetch)
    dtype = getattr(torch, str(options.dtype))
    # The text configuration of a model with several parts is an object of its own, with its own flag.
    for part in (config, text_config(config)):
        if getattr(part, "use_cache", False):
            part.use_cache = False  # useless in training, and the outputs would keep the cache alive
    # Most such models shift the labels to the right to get the decoder's input, and raise without a first
    # token.
    if config.is_encoder_decoder and first_of(config, "decoder_start_token_id") is None:
        config.decoder_start_token_id = first_of(config, "bos_token_id", "pad_token_id") or 0
    attn = {} if options.attn is None else {"attn_implementation": options.attn}
    sizes = BatchDimensions(rows=int(options.batch or 1))
    model, found = _first_that_runs(name, config, asked.seq, sizes, dtype, place, attn)
    task, whole = task_of(type(model)), sum(p.numel() for p in model.parameters())
    loss_fn, name_of_class = None, type(model).__name__
    stored_as = options.bnb_4bit_quant_storage
    if options.lora is not None or options.load_in_4bit or stored_as is not None:
        in_4bit = bool(options.load_in_4bit)
        model, loss_fn = adapted(model, task, options.lora, in_4bit, dtype, stored_as)

    def make_batch(size: int) -> dict[str, Any]:
        return make(model, found, replace(sizes, rows=size), place, dtype)

    chosen = str(options.optimizer)
    optimizer = None if chosen == NONE else named_optimizer(chosen).make
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    facts = {
        "model": name_of_class,
        "parameters": whole,
        "trained": None if options.lora is None else trained,
        "lora": options.lora,
        "load_in_4bit": options.load_in_4bit or None,
        "bnb_4bit_quant_storage": stored_as,
        "autocast": None if loss_fn is None else options.dtype,
        "task": task,
        "loss": None if found.has_loss else "the sum of its outputs",
        "batch": options.batch,
        "seq": found.tokens,
        "dtype": options.dtype,
        "attn": model.config._attn_implementation,
        "optimizer": options.optimizer,
    }
    facts = {name: value for name, value in facts.items() if value is not None}
    # Recordings collect what they leave behind, and need not look through all of transformers. When Python ends, it has
    # to: of what it does not free then, libraries in C++, such as Triton, report each object as leaked.
    gc.freeze()
    atexit.unregister(gc.unfreeze)  # a process may ask for many models
    atexit.register(gc.unfreeze)
    return Target(target, model, found.batch, loss_fn, optimizer, make_batch, facts)


def _first_that_runs(
    name: str,
    config: Any,
    seq: int | None,
    sizes: BatchDimensions,
    dtype: Any,
    place: str,
    attn: dict[str, Any],
) -> tuple[Any, FoundBatch]:
    """Return a model of the class that the configuration names, else of the first class that a batch can be made for.

    Raises:
        TargetError: no class of the architecture runs with a batch.
    """
    errors: list[str] = []
    classes = _classes(config)
    for model_class in classes:
        try:
            with torch.device(place):
                model = model_class._from_config(copy.deepcopy(config), dtype=dtype, **attn)
        except Exception as error:
            if len(classes) == 1:
                raise  # the configuration names this class, so there is no other to try
            # Some classes cannot be built from this configuration, such as one that needs a part that it does
            # not have.
            errors.append(f"{model_class.__name__}: {type(error).__name__}: {error}")
            continue
        if task_of(model_class) == "causal LM" and getattr(model, "loss_type", "") is None:
            # transformers falls back to this loss, with a warning, for a class whose name names no loss
            model.loss_type = "ForCausalLM"
        sized = replace(sizes, tokens=_seq(name, model, seq))
        try:
            found = find(model.train(), sized, place, dtype)
        except NoBatch as error:
            errors.append(f"{model_class.__name__}: {error}")
            continue
        _check_seq(name, seq, found)
        return model, found
    kind = _stated_class(config) or config.model_type
    why = f" ({errors[0]})" if errors else ""
    raise TargetError(f"{name} is of a {kind!r}, for which no batch could be made{why}. {_OWN_FUNCTION}")


def _stated_class(config: Any) -> str:
    """Return the first class that a configuration names, or ``""``. A file may have anything there."""
    stated = getattr(config, "architectures", None) or [""]
    return str(stated[0] if isinstance(stated, list) else stated)


def _classes(config: Any) -> list[Any]:
    """Return the class that the configuration names. If it has no head, return all classes of its architecture.

    Those with a loss come first.
    """
    import transformers

    named = _stated_class(config)
    # Four cases: a name that is no model's in this version; a class with a loss or a head, which is taken; one
    # without, in whose place any class of the architecture may be; no name.
    wanted = getattr(transformers, named, None)
    if named and not (isinstance(wanted, type) and issubclass(wanted, transformers.PreTrainedModel)):
        raise TargetError(f"transformers {transformers.__version__} has no model {named}. {_OWN_FUNCTION}")
    headless = named.endswith(("Model", "ForPreTraining"))
    if wanted is not None and (has_own_loss(wanted) or not headless):
        return [wanted]
    classes = model_classes(config.model_type)
    classes = classes if wanted is None or wanted in classes else [*classes, wanted]
    # A class from sequence to sequence does not fit a configuration without an encoder.
    if not config.is_encoder_decoder:
        seq2seq = class_names("SEQ_TO_SEQ_CAUSAL_LM").get(config.model_type)
        classes = [c for c in classes if c.__name__ != seq2seq or len(classes) == 1]
    # A stable sort: within each half in the order of ``HEADS``.
    return sorted(classes, key=lambda c: not has_own_loss(c))


@functools.cache
def class_names(head: str | None) -> dict[str, Any]:
    """Return the class names with this head by model type: one name, or several."""
    from transformers.models.auto import modeling_auto

    table = "MODEL_MAPPING_NAMES" if head is None else f"MODEL_FOR_{head}_MAPPING_NAMES"
    return dict(getattr(modeling_auto, table, {}))


def model_classes(model_type: str) -> list[Any]:
    """Return the classes of an architecture, in the order of ``HEADS``."""
    import transformers

    found: list[Any] = []
    for head in HEADS:
        names = class_names(head).get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            model_class = getattr(transformers, name, None)
            if model_class is not None and model_class not in found:
                found.append(model_class)
    return found


def task_of(model_class: type[Any]) -> str:
    """Return the name of a class's head in words."""
    for head in HEADS:
        for names in class_names(head).values():
            if model_class.__name__ in ((names,) if isinstance(names, str) else names):
                return "no head" if head is None else _HEADS.spelled.get(head, head.lower().replace("_", " "))
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", model_class.__name__.rpartition("For")[2])
    return words.lower()


def _config(name: str, may_fetch: Callable[[str], bool]) -> Any:
    import transformers

    # The order: a file or directory of the user wins; then our table, which needs no cache; then the local
    # cache; then the hub, if the user wants that.
    path = Path(name)
    if path.exists():
        return _read(name, _file_in(path))
    row = architectures.find(name)
    if row is not None:
        return transformers.AutoConfig.for_model(
            row.model_type, architectures=[row.architecture], **row.values
        )
    # Clearly meant as a file: do not look for it in the cache.
    if name.lower().endswith(".json"):
        raise TargetError(f"{name}: there is no such file.")
    found = hub.cached(name)
    if found is None and hub.is_name(name) and may_fetch(name):
        found = hub.fetched(name)
    if found is not None:
        return _read(name, found)
    near = architectures.near(name)
    meant = f" Did you mean hf:{' or hf:'.join(near)}?" if near else ""
    failed = TargetError(
        f"no configuration {name!r} is known or in the local cache, and nothing is downloaded unasked.{meant} Any "
        "other model is named by the file of its configuration: hf:config.json."
    )
    known = ("sacplan plan hf: lists the names that are known",) if near else _KNOWN
    fetching = ("--fetch fetches this one file from the hub",) if hub.is_name(name) else ()
    raise hinted(failed, *known, *fetching)


def _file_in(path: Path) -> Path:
    """Return the configuration that a file, a model's folder or its folder in the hub's cache holds."""
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    newest = hub.newest_in(path)  # as people copy it from ~/.cache/huggingface/hub
    if newest is None:
        raise TargetError(f"{path} has no config.json.")
    return newest


def _read(name: str, path: Path) -> Any:
    """Read a configuration. No code that comes with it runs.

    Raises:
        TargetError: It is no configuration, or one of a model that this version of transformers does not have.
    """
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = _NO_CODE if "trust_remote_code" in str(error) else " ".join(str(error).split())[:200]
        version = transformers.__version__
        raise TargetError(
            f"{name} cannot be read as a configuration of transformers {version}: {reason} {_OWN_FUNCTION}"
        ) from error


def _seq(name: str, model: Any, asked: int | None) -> int:
    """Return the number of tokens in a sample: as asked for, else the default, but no more than there are positions."""
    # Errors for what was asked for alone: the default length is cut to what there is.
    if asked is not None and not reads_tokens(type(model)):
        raise TargetError(f"{name} reads {_read_by(type(model))}; --seq is for models that read tokens.")
    limit = positions(model)
    if asked is not None and limit is not None and asked > limit:
        raise TargetError(f"--seq {asked}: {name} has positions for {limit} tokens.")
    default = int(DEFAULTS.seq or 0)
    # Axial positions are a grid that a sequence fills in training (Reformer).
    if first_of(model.config, "axial_pos_embds"):
        default = limit = math.prod(model.config.axial_pos_shape)
    return asked if asked is not None else min(default, limit or default)


def positions(model: Any) -> int | None:
    """Return for how many tokens there are positions, or None where any length runs."""
    stated = first_of(text_config(model.config), "max_position_embeddings", "max_target_positions")
    # RoBERTa, ProphetNet and their kin count positions from behind the padding's own row: of 514, 512 are left.
    counted = [
        part.num_embeddings - part.padding_idx - 1
        for name, part in model.named_modules()
        if name.rpartition(".")[2] == "position_embeddings"
        and isinstance(part, torch.nn.Embedding)
        and part.padding_idx is not None
    ]
    # ProphetNet predicts n-grams, and its last positions are those of the tokens ahead.
    ahead = (first_of(model.config, "ngram") or 1) - 1
    found = min((n for n in (stated, *counted) if n is not None), default=None)
    return None if found is None else found - ahead


def _read_by(model_class: type[Any]) -> str:
    arguments = inspect.signature(model_class.forward).parameters
    if any(a.startswith("pixel_values") for a in arguments):
        return "images"
    return "sound" if {"input_values", "input_features"} & set(arguments) else "no tokens"


def _check_seq(name: str, asked: int | None, found: FoundBatch) -> None:
    if asked is None or found.tokens == asked:
        return
    # The class can read tokens, but the batch that was found has none.
    if found.tokens is None:
        raise TargetError(f"{name} reads no tokens here; --seq is for models that read tokens.")
    held = " and ".join(f"{count} of an {kind}" for kind, count in found.features.items())
    raise TargetError(
        f"--seq {asked}: a sample of {name} holds {held}, and text; it takes {found.tokens} tokens."
    )
