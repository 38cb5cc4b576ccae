"""Read ``--lora``, and put adapters and 4-bit layers into an ``hf:`` model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sacplan.integrations.hf.target import LORA, TargetError
from sacplan.integrations.peft import library, with_lora
from sacplan.record.step import DefaultLoss
from sacplan.torch_compat.host_memory import device_of

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer but the head."""

_TASKS = {"causal LM": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
"""Tasks for which PEFT has a class of its own, by how they are called in ``models.task_of``."""


def parse(text: str) -> dict[str, Any]:
    """Return the arguments of ``peft.LoraConfig`` that a text such as ``r=16,alpha=32,dropout=0.05`` stands for.

    A number alone is the rank. Layers are separated by ``+``: ``targets=q_proj+v_proj``.

    Raises:
        TargetError: it cannot be read. The message says what can.
    """
    found: dict[str, Any] = {"target_modules": ALL_LINEAR}
    for word in text.split(","):
        # From the right: a number alone has no name then, and is taken for the rank.
        name, _, value = word.strip().rpartition("=")
        name = name.strip().lower() or "r"
        if name not in _WORDS:
            raise TargetError(f"--lora {text}: {name!r} is not known. {LORA}")
        argument, read = _WORDS[name]
        try:
            found[argument] = read(value.strip())
        except ValueError as error:
            raise TargetError(f"--lora {text}: {word.strip()!r} cannot be read. {LORA}") from error
    return found


def _targets(value: str) -> list[str] | str:
    # PEFT takes its word for all linear layers as a text, and names of layers as a list.
    return value if value == ALL_LINEAR else value.split("+")


_WORDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "r": ("r", int),
    "rank": ("r", int),
    "alpha": ("lora_alpha", int),
    "dropout": ("lora_dropout", float),
    "targets": ("target_modules", _targets),
}


class AutocastLoss(DefaultLoss):
    """The loss that a model computes, or its default, under ``torch.autocast``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the loss, a scalar."""
        # A fake step of a CUDA device has CPU tensors, and follows CUDA's lists in the autocast of a CPU too.
        with torch.autocast(device_of(model).type, self.dtype):
            return super().__call__(model, batch)


def adapted(
    model: torch.nn.Module,
    task: str,
    lora: str | None,
    load_in_4bit: bool,
    dtype: torch.dtype,
    storage: str | None = None,
) -> tuple[Any, AutocastLoss | None]:
    """Return the model with adapters, 4-bit layers or both, and the loss that its step trains (None: its own).

    4-bit layers are those of QLoRA: NF4 in blocks of 64, with double quantization, which compute in ``dtype`` and are
    stored as ``storage`` (None: bytes). The step runs under autocast in ``dtype``, as that of the Trainer does with
    ``bf16=True``; in float32 there is none.

    Raises:
        TargetError: ``lora`` cannot be read, or there is a ``storage`` and no 4-bit layer.
        TraceError: as for ``with_lora``, such as for a model without layers of these names.
    """
    if storage is not None and not load_in_4bit:
        raise TargetError(
            "--bnb-4bit-quant-storage says how 4-bit weights are stored: give --load-in-4bit too."
        )
    config = quantization = None
    if lora is not None:
        # For a task without a class of its own PEFT is given none, and wraps the model in its general class.
        config = library("peft").LoraConfig(task_type=_TASKS.get(task), **parse(lora))
    if load_in_4bit:
        quantization = library("transformers").BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=storage,
        )
    made = with_lora(model, config, quantization)
    return made, None if dtype == torch.float32 else AutocastLoss(dtype)
