"""``hf:`` targets of every kind: a batch that fits the architecture, with a loss where it has one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sacplan

pytest.importorskip("transformers")

import transformers

from benchmarks.models import hf_models
from sacplan.cli.targets import load_target
from sacplan.integrations.hf import architectures
from sacplan.integrations.hf import batches as hf_batches
from sacplan.integrations.hf import models as hf
from sacplan.integrations.hf.target import ModelOptions, TargetError
from tests.support.slow import slow_after

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")

FAMILIES = {
    "llama": ("causal LM", {"input_ids", "labels"}),
    "bert": ("masked LM", {"input_ids", "labels"}),
    "t5": ("seq2seq", {"input_ids", "labels"}),
    "vit": ("image classification", {"pixel_values", "labels"}),
    "whisper": ("speech seq 2 seq", {"input_features", "labels"}),
    "wav2vec2": ("CTC", {"input_values", "labels"}),
    "clip": ("no head", {"input_ids", "attention_mask", "pixel_values", "return_loss"}),
    "llava": ("image text to text", {"input_ids", "attention_mask", "pixel_values", "labels"}),
    "mixtral": ("causal LM", {"input_ids", "labels"}),
}


def _saved(config: Any, directory: Path, **more: Any) -> str:
    config.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return f"hf:{path}"


@pytest.mark.parametrize("name", slow_after(4, FAMILIES))
def test_families(name: str, tmp_path: Path) -> None:
    """A loss of its own in a step without data, and the same loss backpropagates in a real one."""
    task, arguments = FAMILIES[name]
    model_class, config, _ = hf_models.ARCHITECTURES[name]("small")
    saved, options = (
        _saved(config, tmp_path, architectures=[model_class.__name__]),
        ModelOptions(batch=2, dtype="float32"),
    )
    target, real = load_target(saved, options), load_target(saved, options, "cpu")
    loss = real.model(**real.batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert target.facts["model"] == model_class.__name__
    assert target.facts["task"] == task
    assert "loss" not in target.facts
    assert target.batch.keys() == arguments
    profile = sacplan.profile(target.model, target.batch, target.loss_fn, target.optimizer, device="h100")
    assert profile.peak_bytes > target.facts["parameters"] * 4
    larger = target.make_batch(3)
    assert larger.keys() == arguments
    for name, value in larger.items():
        assert value is True or value.shape == (3, *target.batch[name].shape[1:])


def test_rows_hold_what_the_models_of_images_make(tmp_path: Path) -> None:
    """Computed by the model itself, which refuses another number of placeholders."""
    _, config, _ = hf_models.ARCHITECTURES["qwen2_vl"]("small")
    text = _saved(config, tmp_path, architectures=["Qwen2VLForConditionalGeneration"])
    target = load_target(text, ModelOptions(batch=2, dtype="float32"), "cpu")
    side = 224 // 14
    assert target.batch["image_grid_thw"].tolist() == [[1, side, side]] * 2
    assert (target.batch["input_ids"] == config.image_token_id).sum(1).tolist() == [side * side // 4] * 2
    loss = target.model(**target.batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    with pytest.raises(TargetError, match=f"holds {side * side // 4} of an image"):
        load_target(text, ModelOptions(seq=32))


def test_a_model_without_a_head_is_summed_up_and_says_so(tmp_path: Path) -> None:
    _, config, _ = hf_models.ARCHITECTURES["clip"]("small")
    target = load_target(_saved(config.text_config, tmp_path), ModelOptions(seq=8))
    assert (target.facts["model"], target.facts["task"]) == ("CLIPTextModel", "no head")
    assert target.facts["loss"] == "the sum of its outputs"
    assert sacplan.profile(target.model, target.batch).peak_bytes > 0


def test_a_model_that_no_batch_is_known_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, config, _ = hf_models.ARCHITECTURES["vit"]("small")
    text = _saved(config, tmp_path, architectures=["ViTForImageClassification"])
    monkeypatch.delitem(hf_batches.INPUTS, "pixel_values")
    with pytest.raises(TargetError, match=r"'ViTForImageClassification'.*no batch.*train\.py:make"):
        load_target(text, ModelOptions())


@pytest.mark.parametrize("stated", [["GPT9ForEverything"], ["AutoModel"], ["Trainer"], [None], 5], ids=str)
def test_a_class_that_is_no_model_of_transformers(stated: object, tmp_path: Path) -> None:
    text = _saved(transformers.GPT2Config(), tmp_path, architectures=stated)
    with pytest.raises(TargetError, match="has no model"):
        load_target(text, ModelOptions())


def test_sizes_of_sound() -> None:
    """Whisper reads 30 seconds, always: 3,000 frames of 10 ms."""
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = transformers.WhisperConfig(d_model=16, vocab_size=64, pad_token_id=0, **sides)
    with torch.device("meta"):
        model = transformers.WhisperForConditionalGeneration(config)
    sizes = hf_batches.BatchDimensions(rows=2, tokens=7)
    batch = hf_batches.make_batch(hf_batches.BatchInputs(model, sizes, "meta"))
    assert batch["input_features"].shape == (2, 80, 3000)
    assert batch["labels"].shape == (2, 7)
    padded = hf_batches.BatchInputs(model, replace(sizes, padded=True), "meta")
    assert hf_batches.make_batch(padded).keys() == batch.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_have_the_models_type(dtype: torch.dtype) -> None:
    _, config, _ = hf_models.ARCHITECTURES["vit"]("small")
    model = transformers.ViTForImageClassification(config)
    batch = hf_batches.make_batch(hf_batches.BatchInputs(model, hf_batches.BatchDimensions(), "cpu", dtype))
    assert batch["pixel_values"].dtype == dtype
    assert batch["labels"].dtype == torch.long


def test_tasks_are_in_words() -> None:
    assert hf.task_of(transformers.GPT2LMHeadModel) == "causal LM"
    assert hf.task_of(transformers.SegformerForSemanticSegmentation) == "semantic segmentation"
    assert hf.task_of(transformers.LlamaForSequenceClassification) == "sequence classification"


def test_the_docs_list_the_names() -> None:
    text = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    listed = text.partition("### Names that ship with sacplan")[2]
    named = re.findall(r"`([^`:]+/[^`]+)`", listed)
    assert sorted(named) == sorted(row.name for row in architectures.table())
