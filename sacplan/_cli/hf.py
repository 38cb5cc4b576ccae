"""``hf:`` targets: a model from a configuration of transformers, without weights, and a batch for its own loss."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from sacplan._cli import architectures
from sacplan._cli.exits import TargetError
from sacplan._cli.options import HF_DEFAULTS, HfOptions
from sacplan._cli.output import note
from sacplan._cli.target import Target

_IMAGE = 224  # pixels, for a configuration that says nothing

_IMAGES = "image classification"
# models with a loss of their own: the Auto class that makes them, and transformers' table of their classes
_TASKS = {
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    _IMAGES: ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    # before causal LM: BERT and its relatives are in both tables, and are trained on masks
    "masked LM": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal LM": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
}


def build(target: str, asked: HfOptions, place: str) -> Target:
    """The model that a name or a configuration file describes, in training mode, with a batch and an optimizer.

    Args:
        target: ``hf:`` and a name in our table, a directory, a file, or a configuration in the local cache.
        asked: sizes and types.
        place: where the tensors are; on ``"meta"`` there are no weights, elsewhere they are random.

    Raises:
        TargetError: transformers is missing, there is no such configuration here, or its model has no loss.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise TargetError(
            "hf: targets need transformers, which is not installed; run: pip install 'sacplan[hf]'"
        ) from error
    import torch

    from sacplan._program.setup import Setup

    name = target.removeprefix("hf:")
    if not name.strip():
        raise TargetError(
            "hf: needs a name, a configuration file or a directory behind it: hf:gpt2, hf:config.json. Names that are "
            f"known: {', '.join(row.name for row in architectures.TABLE)}."
        )
    options = replace(HF_DEFAULTS, **asked.given())
    config = _config(name)
    task = _task_of(config)
    seq = None if task == _IMAGES and asked.seq is None else _seq(name, config, task, asked.seq)
    dtype = getattr(torch, str(options.dtype))
    cached = getattr(config, "use_cache", False)
    if cached:
        config.use_cache = False  # nobody generates while training, and the cache would be held as an output
    attn = {} if options.attn is None else {"attn_implementation": options.attn}
    with torch.device(place):
        model = getattr(transformers, _TASKS[task][0]).from_config(config, dtype=dtype, **attn)
    if cached and Setup.of(model).use_cache is False:
        note(
            "use_cache=False: a cache would be alive until the step is over. Set model.config.use_cache = False too"
        )
    if task == "causal LM" and getattr(model, "loss_type", "") is None:
        # what transformers falls back to, with a warning, for a class whose name does not say it
        model.loss_type = "ForCausalLM"
    make_batch = functools.partial(_batch, config, seq, dtype, place)
    optimizers: dict[str | None, Any] = {
        "adamw": torch.optim.AdamW,
        "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
        "sgd": torch.optim.SGD,
        "none": None,
    }
    facts = {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "task": task,
        "batch": options.batch,
        **({} if seq is None else {"seq": seq}),
        "dtype": options.dtype,
        "attn": config._attn_implementation,
        "optimizer": options.optimizer,
    }
    optimizer = optimizers[options.optimizer]
    return Target(
        target, model.train(), make_batch(int(options.batch or 1)), None, optimizer, make_batch, facts
    )


def _config(name: str) -> Any:
    import transformers

    path = Path(name)
    if path.exists():
        if path.is_dir() and not (path / "config.json").is_file():
            raise TargetError(f"{name} has no config.json.")
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    row = architectures.find(name)
    if row is not None:
        return transformers.AutoConfig.for_model(
            row.model_type, architectures=[row.architecture], **row.values
        )
    if name.lower().endswith(".json"):
        raise TargetError(f"{name}: there is no such file.")
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        near = architectures.near(name)
        hint = f" Did you mean hf:{' or hf:'.join(near)}?" if near else ""
        known = ", ".join(row.name for row in architectures.TABLE)
        raise TargetError(
            f"no configuration {name!r} is known or in the local cache, and nothing is downloaded.{hint} Known are "
            f"{known}; or give its file: hf:config.json."
        ) from error


def _task_of(config: Any) -> str:
    from transformers.models.auto import modeling_auto

    tables: dict[str, Any] = {task: getattr(modeling_auto, table) for task, (_, table) in _TASKS.items()}
    wanted = (getattr(config, "architectures", None) or [""])[0]
    for task, table in tables.items():
        names = [n for v in table.values() for n in ((v,) if isinstance(v, str) else v)]
        if wanted in names:
            return task
    if not wanted or wanted.endswith(("Model", "ForPreTraining")):  # no head, or one that contains the others
        for task, table in tables.items():
            if config.model_type in table and (task != "seq2seq" or config.is_encoder_decoder):
                return task
    raise TargetError(
        f"hf: targets are {', '.join(_TASKS)}; this configuration is of a {wanted or config.model_type!r}. "
        "Write a function that returns the model and a batch, and give it as train.py:make."
    )


def _seq(name: str, config: Any, task: str, asked: int | None) -> int:
    if task == _IMAGES:
        raise TargetError(f"{name} reads images; --seq is for models that read tokens.")
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is not None and limit is not None and asked > limit:
        raise TargetError(f"--seq {asked}: {name} has positions for {limit} tokens.")
    default = int(HF_DEFAULTS.seq or 0)
    return asked if asked is not None else min(default, limit or default)


def _batch(config: Any, seq: int | None, dtype: Any, place: str, size: int) -> dict[str, Any]:
    """Full sequences without padding, or images; with labels."""
    import torch

    if seq is None:
        pixels = getattr(config, "image_size", _IMAGE)
        height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
        channels = getattr(config, "num_channels", 3)
        return {
            "pixel_values": torch.zeros(size, channels, height, width, dtype=dtype, device=place),
            "labels": torch.zeros(size, dtype=torch.long, device=place),
        }
    ids = torch.randint(0, config.get_text_config().vocab_size, (size, seq), device=place)
    return {"input_ids": ids, "labels": ids.clone()}
