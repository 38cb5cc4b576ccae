"""Architectures of Hugging Face transformers at sizes that can be traced in seconds.

    model, batch, loss_fn = hf_models.build("gpt2", "small", device="cpu")

``benchmarks/data/hf_models.json`` has the class of each, and for a size the arguments of its configuration and the
inputs of its batch. Sizes are "small" (a real step runs on a laptop's CPU), "medium" (a few GiB on a GPU),
"compiled" (for ``compiled_models.py``) and "frontier". ``VARIANTS`` are architectures with LoRA or gradient
accumulation. ``build`` makes either.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.harness.results import ROOT

hf: Any = transformers

Batch = dict[str, Any]
Case = tuple[type[torch.nn.Module], Any, Callable[[], Batch]]

_TABLE = json.loads((ROOT / "benchmarks" / "data" / "hf_models.json").read_text(encoding="utf-8"))


def _architecture(name: str, size: str) -> Case:
    model_class, of_size = getattr(hf, _TABLE[name]["class"]), _TABLE[name][size]
    config = model_class.config_class(**of_size["config"])
    return model_class, config, functools.partial(_batch, of_size["batch"])


ARCHITECTURES: dict[str, Callable[[str], Case]] = {
    name: functools.partial(_architecture, name) for name in _TABLE
}
"""Name: size -> (model class, config, make_batch); ``make_batch()`` makes real CPU tensors by keyword."""


def _batch(inputs: dict[str, Any]) -> Batch:
    """Make the inputs of a batch: drawn ones first, since others are made of token ids."""
    drawn = {name: _drawn(how) for name, how in inputs.items() if isinstance(how, dict)}
    made = {name: drawn.get(name, how) for name, how in inputs.items()}
    ids, mask = made.get("input_ids"), inputs.get("attention_mask")
    if mask is not None:
        made["attention_mask"] = torch.ones_like(ids)
        if mask == "padded":  # the last quarter of the first row
            made["attention_mask"][0, -ids.shape[1] // 4 :] = 0
    if "mm_token_type_ids" in inputs:
        made["mm_token_type_ids"] = (ids == inputs["mm_token_type_ids"]).long()
    if inputs.get("labels") in ("input_ids", "the same"):  # a copy, or the tensor itself
        labels = ids if inputs["labels"] == "the same" else ids.clone()
        made["labels"] = labels.masked_fill(made["attention_mask"] == 0, -100) if mask == "padded" else labels
    return made


def _drawn(how: dict[str, Any]) -> torch.Tensor:
    """Make ``noise`` of a shape, integers ``from`` one number up to ``below`` another, or a ``value``."""
    if "noise" in how:
        return torch.randn(how["noise"])
    if "value" in how:
        return torch.tensor(how["value"])
    made = torch.randint(how.get("from", 0), how["below"], how["shape"])
    for start, stop, value in how.get("put", ()):
        made[:, start:stop] = value
    return made


# --- variants ---------------------------------------------------------------------------------------


def _with_lora(model: torch.nn.Module) -> torch.nn.Module:
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    )


def _micro_batches(batch: Batch) -> list[Batch]:
    return [{k: v[i::2] for k, v in batch.items()} for i in range(2)]


def two_micro_batches(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Accumulate gradients as a loop does it: the first half's backward pass ends before the second half begins.

    While the second half runs, the gradients of the first are alive, and counted.
    """
    first, second = _micro_batches(batch)
    (model(**first).loss / 2).backward()
    return model(**second).loss / 2


VARIANTS: dict[str, tuple[str, Callable[[torch.nn.Module], torch.nn.Module] | None, Any]] = {
    "llama+lora": ("llama", _with_lora, None),
    "llama+accumulation": ("llama", None, two_micro_batches),
}  # fmt: skip
"""Name: (architecture, what is done to the model, loss_fn)."""

NAMES = (*ARCHITECTURES, *VARIANTS)


def build(
    name: str,
    size: str = "medium",
    device: str = "meta",
    dtype: torch.dtype = torch.float32,
    *,
    dropout: float | None = None,
    copies: int = 1,
) -> tuple[torch.nn.Module, dict[str, Any], Any]:
    """Build ``(model, batch, loss_fn)``, in training mode; float inputs have the model's type.

    Args:
        name: of ``NAMES``.
        size: "small" or "medium".
        device: where the parameters are; the batch is on the CPU.
        dtype: of the parameters and of inputs that are float.
        dropout: put in place of each dropout probability that the config has at 0.
        copies: that many batches of the size, joined.
    """
    base, change, loss_fn = VARIANTS.get(name, (name, None, None))
    model_class, config, make_batch = ARCHITECTURES[base](size)
    if dropout is not None:
        _set_dropout(config, dropout)
    with torch.device(device):
        model = model_class(config)
    model = model.to(dtype).train()
    if change is not None:
        model = change(model)
    batch = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in _joined([make_batch() for _ in range(copies)]).items()
    }
    return model, batch, loss_fn


def _joined(batches: list[Batch]) -> Batch:
    """Join tensors and lists end to end; anything else stays as the first batch has it."""
    if len(batches) == 1:
        return batches[0]

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], torch.Tensor):
            return torch.cat(values)
        return [x for v in values for x in v] if isinstance(values[0], list) else values[0]

    return {k: join([b[k] for b in batches]) for k in batches[0]}


def _set_dropout(config: Any, p: float) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            _set_dropout(value, p)
        elif ("dropout" in name or name.endswith("_pdrop")) and value == 0.0:
            setattr(config, name, p)
