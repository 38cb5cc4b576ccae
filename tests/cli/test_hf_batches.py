"""Batches of ``hf:`` targets for arguments that are hard to tell: the models themselves, on a CPU, accept them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from benchmarks.models import hf_models, small_configs
from sacplan._cli import hf, hf_batches
from sacplan._cli.exits import TargetError
from sacplan._cli.options import HfOptions
from sacplan._device import workspace

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")


def _small(model_type: str) -> Any:
    return small_configs.small_config(transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type])


def _target(config: Any, folder: Any, **options: Any) -> Any:
    config.save_pretrained(folder)
    return hf.build(f"hf:{folder}", HfOptions(dtype="float32", **options), "cpu")


@pytest.mark.parametrize(
    ("model_type", "reads"),
    [
        ("qwen2_5_vl_vision", {"hidden_states", "grid_thw"}),  # patches under another name
        ("gemma4_vision", {"pixel_values", "pixel_position_ids"}),  # with the place of each patch
        ("granite_speech5_encoder", {"input_features"}),  # four frames in one
    ],
)
def test_towers_by_themselves(model_type: str, reads: set[str], tmp_path: Any) -> None:
    target = _target(_small(model_type), tmp_path, batch=2)
    assert set(target.batch) == reads
    output = target.model(**target.batch)
    assert torch.isfinite(output.last_hidden_state).all()
    larger = target.make_batch(3)
    assert all(len(larger[name]) * 2 == len(target.batch[name]) * 3 for name in reads)


def test_a_tower_that_is_left_out_reads_nothing(tmp_path: Any) -> None:
    config = _small("gemma4")
    config.vision_config = config.audio_config = None
    target = _target(config, tmp_path, seq=16)
    assert set(target.batch) == {"input_ids", "attention_mask", "labels"}
    assert torch.isfinite(target.model(**target.batch).loss)


def test_positions_that_are_counted_from_behind_the_padding(tmp_path: Any) -> None:
    """RoBERTa has two positions fewer than rows; its own embedding refuses one token more."""
    _, config, _ = hf_models.ARCHITECTURES["roberta"]("small")
    config.max_position_embeddings, config.pad_token_id = 34, 1
    target = _target(config, tmp_path)
    assert target.facts["seq"] == 32
    target.model(**target.batch)
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        target.model(torch.full((1, 33), 5))
    with pytest.raises(TargetError, match="positions for 32 tokens"):
        _target(config, tmp_path, seq=33)


@pytest.mark.parametrize("layout", range(hf_batches.LAYOUTS["input_features"]))
def test_a_mask_of_sound_has_its_frames(layout: int) -> None:
    _, config, _ = hf_models.ARCHITECTURES["whisper"]("small")
    model = transformers.WhisperForConditionalGeneration(config)
    sizes = hf_batches.BatchDimensions(rows=2, frames=50, samples=70)
    inputs = hf_batches.BatchInputs(model, sizes, layout={"input_features": layout})
    frames = 2 * config.max_source_positions
    mask = hf_batches.INPUTS["input_features_mask"](inputs)
    assert mask.shape == (2, 70 if layout in (3, 4) else frames)
    assert mask.shape[1] in hf_batches.INPUTS["input_features"](inputs).shape


def test_no_op_runs_while_a_batch_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """To learn workspaces of CPU kernels, they would run with images of full size."""
    ran: list[object] = []
    monkeypatch.setattr(workspace, "measured_workspace_bytes", lambda *a, **k: ran.append(a))
    _, config, _ = hf_models.ARCHITECTURES["vit"]("small")
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(config).train()
    found = hf_batches.find(model, hf_batches.BatchDimensions(), "meta", torch.float32)
    assert found.has_loss
    assert ran == []
