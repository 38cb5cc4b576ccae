"""Published steps of transformers and PEFT."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from benchmarks.harness.played import Loop
from benchmarks.harness.results import MIB
from benchmarks.models import cases
from benchmarks.models.cases import Case
from benchmarks.models.published_step import Point, Step, empty, foreach_adamw, in_autocast, single_adamw
from sacplan.profiling.optimizer_table import AdamW8bitSizes
from sacplan.record.step import default_loss

# --- transformers -----------------------------------------------------------------------------------------


def _bert(optimizer: Any, autocast: bool = False) -> Case:
    import transformers

    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096, num_labels=2, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(config)
    loss_fn = in_autocast(default_loss, torch.float16) if autocast else None
    return Case(model, {"input_ids": empty(4, 512), "labels": empty(4)}, loss_fn, optimizer)


_CONTEXT_MIB = 1343
_BERT = functools.partial(
    Step,
    points=(Point(unit=MIB, minus=_CONTEXT_MIB, figure="reserved"),),
    device="v100-32gb",
    workspace_bytes=0,
    loop=Loop("never"),
    assumed=True,
)


def _peft(kind: Literal["full", "lora", "ln"]) -> Case:
    model: Any = cases.published("meta-llama/Llama-3.2-3B")
    if kind != "full":
        import peft

        adapter: Any = (
            peft.LoraConfig(r=32, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
            if kind == "lora"
            else peft.LNTuningConfig(task_type="CAUSAL_LM")
        )
        with torch.device("meta"):
            model = peft.get_peft_model(model, adapter)
    tokens = empty(4, 768)
    return Case(model.train(), {"input_ids": tokens, "labels": tokens}, optimizer=foreach_adamw)


_PEFT = functools.partial(
    Step,
    device="l40s",
    points=(Point(part=("max_reserved",), figure="reserved"),),
    assumed=True,
)


TRANSFORMERS: dict[str, Step] = {
    "hf-bertlarge-bs4": _BERT(build=lambda: _bert(single_adamw)),
    "hf-bertlarge-bs4_fp16": _BERT(build=lambda: _bert(single_adamw, autocast=True)),
    "hf-bertlarge-bs4_adafactor": _BERT(build=lambda: _bert("adafactor")),
    "hf-bertlarge-bs4_adam8bit": _BERT(build=lambda: _bert(AdamW8bitSizes)),
    "peft-full-finetuning--llama-3.2-3B-lr_0.00001": _PEFT(build=lambda: _peft("full")),
    "peft-lora--llama-3.2-3B-rank32": _PEFT(build=lambda: _peft("lora")),
    "peft-ln_tuning--llama-3.2-3B-default": _PEFT(build=lambda: _peft("ln")),
}
