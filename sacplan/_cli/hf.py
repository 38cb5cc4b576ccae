"""``hf:`` targets: a model from a configuration of transformers, without weights, and a batch for its own loss."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sacplan._cli import architectures
from sacplan._cli.exits import TargetError

if TYPE_CHECKING:
    from sacplan._program.fingerprint import Fingerprint

DEFAULT_BATCH = 1
DEFAULT_SEQ = 1024
DEFAULT_DTYPE = "bfloat16"
DEFAULT_OPTIMIZER = "adamw"
_IMAGE = 224  # pixels, for a configuration that says nothing


@dataclass(frozen=True, slots=True)
class HfOptions:
    """What the command line says about an ``hf:`` target; None where it says nothing."""

    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    attn: str | None = None

    def given(self) -> list[str]:
        """Those that were given, as they are written."""
        return [f"--{f.name}" for f in fields(self) if getattr(self, f.name) is not None]

    def words(self) -> str:
        """As they are written, with their values."""
        return " ".join(f"{name} {getattr(self, name[2:])}" for name in self.given())

    def over(self, other: HfOptions) -> HfOptions:
        """With the other's in the place of what was not given."""
        mine = {name[2:]: getattr(self, name[2:]) for name in self.given()}
        return replace(other, **mine)

    def less(self, other: HfOptions) -> HfOptions:
        """Those that the other has not given."""
        return replace(self, **{name[2:]: None for name in other.given()})

    @classmethod
    def of_fingerprint(cls, fingerprint: Fingerprint) -> HfOptions:
        """What a plan of the library shows of the model and the batch: all but optimizer and attention."""
        shapes = {path: shape for path, shape, _ in fingerprint.batch}
        tokens = shapes.get("batch['input_ids']")
        first = tokens or shapes.get("batch['pixel_values']")
        types = Counter(
            dtype.removeprefix("frozen ").removeprefix("torch.") for _, _, dtype in fingerprint.parameters
        )
        return cls(
            batch=first[0] if first else None,
            seq=tokens[1] if tokens else None,
            dtype=types.most_common(1)[0][0] if types else None,
        )


@dataclass(frozen=True)
class Built:
    """A model, its batch and its optimizer; ``facts`` are the choices in it."""

    model: Any
    batch: Any
    optimizer: Any
    make_batch: Callable[[int], Any]
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Task:
    """A kind of model that has a loss of its own: the Auto class that makes it, and what its batch holds."""

    auto: str
    table: str
    images: bool = False


_TASKS = {
    "seq2seq": _Task("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image classification": _Task(
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", images=True
    ),
    # before causal LM: BERT and its relatives are in both, and are trained on masks
    "masked LM": _Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "causal LM": _Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
}


def build(name: str, options: HfOptions, place: str) -> Built:
    """The model that a name or a configuration file describes, in training mode.

    Args:
        name: of the table, of a directory or a file, or of a configuration in the local cache.
        options: sizes and types.
        place: where the tensors are; on ``"meta"`` there are no weights, elsewhere random ones.

    Raises:
        TargetError: transformers is missing, the configuration is not here, or is of a model without a loss.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise TargetError(
            "hf: targets need transformers, which is not installed; run: pip install 'sacplan[hf]'"
        ) from error
    import torch

    config = _config(name)
    kind = _task_of(config)
    task = _TASKS[kind]
    dtype = getattr(torch, options.dtype or DEFAULT_DTYPE)
    batch_size = DEFAULT_BATCH if options.batch is None else options.batch
    seq = _seq(name, config, task, options.seq)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # nobody generates while training, and the cache would be held as an output
    attn = {} if options.attn is None else {"attn_implementation": options.attn}
    with torch.device(place):
        model = getattr(transformers, task.auto).from_config(config, dtype=dtype, **attn)
    if kind == "causal LM" and getattr(model, "loss_type", "") is None:
        model.loss_type = (
            "ForCausalLM"  # what it falls back to, with a warning, where the class is named otherwise
        )
    make_batch = functools.partial(_batch, config, task, seq, dtype, place)
    facts: dict[str, Any] = {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "task": kind,
        "batch": batch_size,
        **({} if task.images else {"seq": seq}),
        "dtype": options.dtype or DEFAULT_DTYPE,
        "attn": config._attn_implementation,
        "optimizer": options.optimizer or DEFAULT_OPTIMIZER,
    }
    return Built(model.train(), make_batch(batch_size), _optimizer(options.optimizer), make_batch, facts)


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

    tables: dict[str, Any] = {kind: getattr(modeling_auto, task.table) for kind, task in _TASKS.items()}
    wanted = (getattr(config, "architectures", None) or [""])[0]
    for kind, table in tables.items():
        names = [n for v in table.values() for n in ((v,) if isinstance(v, str) else v)]
        if wanted in names:
            return kind
    bodies = ("", "Model", "ForPreTraining")  # without a head, or with one that the others contain
    if wanted.endswith(bodies[1:]) or not wanted:
        for kind, table in tables.items():
            if config.model_type in table and (kind != "seq2seq" or config.is_encoder_decoder):
                return kind
    raise TargetError(
        f"hf: targets are {', '.join(_TASKS)}; this configuration is of a {wanted or config.model_type!r}. "
        "Write a function that returns the model and a batch, and give it as train.py:make."
    )


def _seq(name: str, config: Any, task: _Task, asked: int | None) -> int:
    if task.images:
        if asked is not None:
            raise TargetError(f"{name} reads images; --seq is for models that read tokens.")
        return 0
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if asked is not None and limit is not None and asked > limit:
        raise TargetError(f"--seq {asked}: {name} has positions for {limit} tokens.")
    return asked if asked is not None else min(DEFAULT_SEQ, limit or DEFAULT_SEQ)


def _batch(config: Any, task: _Task, seq: int, dtype: Any, place: str, size: int) -> dict[str, Any]:
    """Full sequences without padding, or images; with labels."""
    import torch

    if task.images:
        pixels = getattr(config, "image_size", _IMAGE)
        height, width = (pixels, pixels) if isinstance(pixels, int) else pixels
        channels = getattr(config, "num_channels", 3)
        return {
            "pixel_values": torch.zeros(size, channels, height, width, dtype=dtype, device=place),
            "labels": torch.zeros(size, dtype=torch.long, device=place),
        }
    vocab = config.get_text_config().vocab_size
    ids = torch.randint(0, vocab, (size, seq), device=place)
    return {"input_ids": ids, "labels": ids.clone()}


def _optimizer(name: str | None) -> Any:
    import torch

    known: dict[str, Any] = {
        "adamw": torch.optim.AdamW,
        "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
        "sgd": torch.optim.SGD,
        "none": None,
    }
    return known[name or DEFAULT_OPTIMIZER]
