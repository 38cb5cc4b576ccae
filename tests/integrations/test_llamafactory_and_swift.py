"""Runs of LLaMA-Factory and ms-swift as their users start them, with a plan and without: the same weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sacplan
from sacplan.planning.plan import Plan

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tests.support.trainers import VOCAB, llama, short_run  # noqa: E402


def test_llamafactory(tmp_path: Path) -> None:
    tuner = pytest.importorskip("llamafactory.train.tuner", reason="needs LLaMA-Factory")
    from sacplan.integrations.transformers import PlanCallback

    callback = PlanCallback(_made(tmp_path))
    samples = [{"instruction": _words(i), "input": "", "output": _words(i + 7)} for i in range(16)]
    (tmp_path / "data.json").write_text(json.dumps(samples))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "data.json"}}))
    for name, callbacks in (("plain", []), ("planned", [callback])):
        run = short_run(tmp_path, output_dir=f"{tmp_path}/{name}", use_cpu=True) | {
            "model_name_or_path": str(tmp_path), "stage": "sft", "do_train": True, "finetuning_type": "full",
            "dataset": "tiny", "dataset_dir": str(tmp_path), "template": "default", "cutoff_len": 64,
            "disable_gradient_checkpointing": True,
        }  # fmt: skip
        tuner.run_exp(run, callbacks=callbacks)
    plain, planned = (_weights(tmp_path / name) for name in ("plain", "planned"))
    assert all(torch.equal(plain[name], planned[name]) for name in plain)
    assert len(callback.peaks_bytes) == 2
    budget = callback.plan.budget_bytes
    assert budget is not None
    assert max(callback.peaks_bytes) <= budget < callback.plan.baseline_peak_bytes


def test_swift(tmp_path: Path) -> None:
    swift = pytest.importorskip("swift", reason="needs ms-swift")
    _made(tmp_path).save(tmp_path / "plan.json")
    turns = (("user", 0), ("assistant", 7))
    samples = [[{"role": role, "content": _words(i + n)} for role, n in turns] for i in range(16)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"messages": one}) for one in samples))
    (tmp_path / "plan.py").write_text(
        "from sacplan.integrations.transformers import PlanCallback\n"
        "from swift.callbacks import callbacks_map\n"
        f"made = PlanCallback({str(tmp_path / 'plan.json')!r})\n"
        "callbacks_map['sacplan'] = lambda args, trainer: made\n"
    )
    with_plan = {"external_plugins": tmp_path / "plan.py", "callbacks": "sacplan"}
    for name, more in (("plain", {}), ("planned", with_plan)):
        options = {
            "model": tmp_path, "model_type": "llama", "template": "dummy", "tuner_type": "full",
            "dataset": tmp_path / "data.jsonl", "torch_dtype": "float32", "max_steps": 3, "save_steps": 3,
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_length": 64,
            "split_dataset_ratio": 0, "dataloader_num_workers": 0, "add_version": "false", "report_to": "none",
            "gradient_checkpointing": "false", "output_dir": tmp_path / name, **more,
        }  # fmt: skip
        swift.sft_main([word for key, value in options.items() for word in (f"--{key}", str(value))])
    callback = swift.callbacks_map["sacplan"](None, None)  # the one that trained
    plain, planned = (_weights(tmp_path / name / "checkpoint-3") for name in ("plain", "planned"))
    assert all(torch.equal(plain[name], planned[name]) for name in plain)
    assert len(callback.peaks_bytes) == 2
    assert max(callback.peaks_bytes) <= callback.plan.budget_bytes


def _made(directory: Path) -> Plan:
    """Save a small model with a tokenizer of words, and return a plan for 64 tokens of 4 samples."""
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    words = [*special.values(), *(f"w{i}" for i in range(VOCAB - len(special)))]
    named = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(named)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    model = llama(bos_token_id=1, eos_token_id=2, pad_token_id=3)
    model.save_pretrained(directory)

    def batch() -> dict[str, Any]:
        tokens = torch.ones(4, 64, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": tokens, "labels": tokens}

    optimizer = functools.partial(torch.optim.AdamW, fused=True)
    return sacplan.plan(sacplan.profile(model, batch, optimizer=optimizer, device="cpu"), "75%")


def _words(first: int) -> str:
    return " ".join(f"w{(first + i) % 100}" for i in range(20))


def _weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()
    return found
