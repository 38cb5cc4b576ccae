"""Batches of ``hf:`` targets for arguments that are hard to tell: the models themselves, on a CPU, accept them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from benchmarks.models import hf_models, small_configs
from sacplan.device import workspace
from sacplan.integrations.hf import batches as hf_batches
from sacplan.integrations.hf import models as hf
from sacplan.integrations.hf.target import ModelOptions, TargetError

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")


def _small(model_type: str) -> Any:
    return small_configs.small_config(transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type])


def _target(config: Any, folder: Any, **options: Any) -> Any:
    config.save_pretrained(folder)
    return hf.build(f"hf:{folder}", ModelOptions(dtype="float32", **options), "cpu")


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


@pytest.mark.parametrize(
    ("model_type", "reads"),
    [
        ("smolvlm", {"pixel_values", "pixel_attention_mask", "input_ids", "attention_mask", "labels"}),
        ("decision_transformer", {"states", "actions", "rewards", "returns_to_go", "timesteps"}),
        (
            "prophetnet",
            {"input_ids", "labels"},
        ),  # two positions fewer than rows: the padding's, and the next word's
    ],
)
def test_inputs_that_follow_from_the_configuration(model_type: str, reads: set[str], tmp_path: Any) -> None:
    _runs(_small(model_type), reads, tmp_path)


def test_all_positions_of_a_grid(tmp_path: Any) -> None:
    config = transformers.ReformerConfig(
        attn_layers=["local"], hidden_size=32, feed_forward_size=32, num_attention_heads=2,
        axial_pos_embds_dim=(16, 16), axial_pos_shape=(8, 8), max_position_embeddings=64,
        vocab_size=50, is_decoder=False,
    )  # fmt: skip
    target = _runs(config, {"input_ids", "labels"}, tmp_path)
    assert target.facts["seq"] == 64


def test_tiles_of_an_image(tmp_path: Any) -> None:
    """A sample has the small image, and the four tiles of the grid that suits it."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaNextConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **vision},
        text_config={"model_type": "llama", "vocab_size": 50, **vision},
        image_grid_pinpoints=[[56, 56]],
        image_token_index=49,
    )
    reads = {"pixel_values", "image_sizes", "input_ids", "attention_mask", "labels"}
    assert _runs(config, reads, tmp_path).batch["pixel_values"].shape == (1, 5, 3, 28, 28)


def test_a_sound_of_whole_tokens() -> None:
    class Reads(torch.nn.Module):
        config = transformers.PretrainedConfig(samples_per_token=1920)

        def forward(self, input_values: Any) -> None: ...

    made = hf_batches.INPUTS["input_values"](hf_batches.BatchInputs(Reads(), hf_batches.BatchDimensions()))
    assert made.shape == (1, 83 * 1920)


def _runs(config: Any, reads: set[str], folder: Any) -> Any:
    target = _target(config, folder)
    assert set(target.batch) == reads
    output = target.model(**target.batch)
    assert torch.isfinite(output.loss if "labels" in reads else output[0]).all()
    return target


def test_an_image_and_a_sound_have_placeholders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(torch.nn.Module):
        config = transformers.PretrainedConfig(
            image_token_id=1, audio_token_id=2, vocab_size=64, hidden_size=8
        )

        def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(pixel_values.shape[0], 5, 8)

        def get_audio_features(self, input_values: torch.Tensor) -> torch.Tensor:
            return torch.zeros(input_values.shape[0], 7, 8)

        def forward(
            self, input_ids: Any, pixel_values: Any, input_values: Any, attention_mask: Any
        ) -> None: ...

    monkeypatch.setattr(hf_batches, "without_data", lambda model, given, call: call(model, given))
    inputs = hf_batches.BatchInputs(Both(), hf_batches.BatchDimensions(rows=2, tokens=32))
    ids = hf_batches.make_batch(inputs)["input_ids"]
    assert ids.shape == (2, 32)
    assert [int((row == 1).sum()) for row in ids] == [5, 5]
    assert [int((row == 2).sum()) for row in ids] == [7, 7]


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
