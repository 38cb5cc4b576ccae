"""A small model in the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SEQUENCE, VOCAB = 32, 128


def llama(layers: int = 2, **options: Any) -> Any:
    """All start from the same weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        **{"vocab_size": VOCAB} | options,
    )
    return transformers.LlamaForCausalLM(config)


def short_run(directory: Path | str, **options: Any) -> dict[str, Any]:
    """Training arguments of three steps that are logged, and of nothing else."""
    return {
        "output_dir": f"{directory}/run",
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    } | options


def examples(count: int, vocab: int = VOCAB) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, vocab, (count, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": t, "labels": t} for t in tokens]


def trainer(
    directory: Path | str, *, layers: int = 2, vocab: int = VOCAB, dropout: float = 0.1, **options: Any
) -> Any:
    """A Trainer of a model with dropout; ``options`` are training arguments."""
    made = transformers.Trainer(
        llama(layers, attention_dropout=dropout, vocab_size=vocab),
        transformers.TrainingArguments(**short_run(directory, **options)),
        train_dataset=examples(32, vocab),
        eval_dataset=examples(8, vocab),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made
