"""Every architecture of transformers at a small size, made from its config class: no weights, no file by hand.

    small_configs.architectures()            # model types, such as "llama"
    case = small_configs.build("llama")      # model, batch, loss_fn, the class that was taken

A config is made from the defaults of its class. ``RULES`` say what becomes of a field, by its name: widths become 64,
depths 2, heads 4, vocabularies 512. Configs inside it are shrunk the same way, so that what has to agree between them
does. ``OVERRIDES`` are for what the rules get wrong, by model type. The class is the first of the architecture's heads
(``HEADS``) that runs; the batch is made from the signature of its forward (``INPUTS``), with labels where it has them.

An architecture that ``zoo`` has a config for, written by hand, takes that one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from benchmarks import zoo
from benchmarks.common import seed_everything
from sacplan._record.step import default_loss

ROWS = 8
LENGTH = 48
WIDTH = 64
HEADS_COUNT = 4
HEAD_DIM = WIDTH // HEADS_COUNT
LAYERS = 2
VOCABULARY = 512
IMAGE = 64
PATCH = 8
MELS = 16
FRAMES = 64
SAMPLES = 6400

_SEED = 0


class NotBuilt(Exception):
    """An architecture that was not built, or whose step does not run in plain PyTorch; the message says why."""


@dataclass(frozen=True, slots=True)
class SmallCase:
    """A model that trains.

    Attributes:
        model_class: its name, such as "LlamaForCausalLM".
        source: "zoo" (written by hand) or "rules".
    """

    model: torch.nn.Module
    batch: dict[str, Any]
    loss_fn: Any
    model_class: str
    source: str


# --- which architectures, and which class of each ------------------------------------------------------------------

HEADS = (
    "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CTC", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM",
    "CAUSAL_LM", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION",
    "TIME_SERIES_PREDICTION", "TEXT_TO_SPECTROGRAM", "PRETRAINING", "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION", "VISUAL_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING",
    "QUESTION_ANSWERING", None, "IMAGE_TO_IMAGE", "KEYPOINT_DETECTION", "KEYPOINT_MATCHING", "MASK_GENERATION",
    "ZERO_SHOT_OBJECT_DETECTION", "RETRIEVAL", "TEXT_TO_WAVEFORM", "IMAGE_MATTING", "POSE_ESTIMATION",
    "TEXT_RECOGNITION", "TABLE_RECOGNITION", "INSTANCE_SEGMENTATION", "IMAGE_SEGMENTATION", "RNNT", "TDT",
    "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION", "BACKBONE",
)  # fmt: skip
"""Tasks of transformers' auto classes in the order in which they are tried; None is the model without a head."""


def _mapping(head: str | None) -> dict[str, Any]:
    name = "MODEL_MAPPING_NAMES" if head is None else f"MODEL_FOR_{head}_MAPPING_NAMES"
    return dict(getattr(modeling_auto, name, {}))


def model_classes(model_type: str) -> list[type[torch.nn.Module]]:
    """The classes of an architecture, in the order of ``HEADS``."""
    found = []
    for head in HEADS:
        names = _mapping(head).get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            model_class = getattr(transformers, name, None)
            if model_class is not None and model_class not in found:
                found.append(model_class)
    return found


@functools.cache
def architectures() -> tuple[str, ...]:
    """Model types that have a model class, in alphabetical order.

    Not the towers of an architecture ("qwen2_vl_vision"): they run as part of it.
    """
    types = sorted({name for head in HEADS for name in _mapping(head)})
    return tuple(t for t in types if not _whole_of(t, types))


_PART = re.compile(
    r"_(vision|text|audio|encoder|decoder|vision_model|text_model|text_text_model|vqmodel|\w*_model)$"
)


def _whole_of(model_type: str, types: list[str]) -> bool:
    """Whether it is named as a part of another type."""
    return any(
        model_type.startswith(f"{whole}_") and _PART.fullmatch(model_type.removeprefix(whole)) is not None
        for whole in types
    )


# --- configs ---------------------------------------------------------------------------------------------------------

Rule = Callable[[Any], Any]


def _at_most(most: int) -> Rule:
    """The number, or each of several."""

    def rule(value: Any) -> Any:
        return type(value)(map(rule, value)) if isinstance(value, (list, tuple)) else min(value, most)

    return rule


def _all(number: int) -> Rule:
    return lambda value: type(value)([number] * len(value)) if isinstance(value, (list, tuple)) else number


def _heads(value: Any) -> Any:
    """Powers of two, which divide the widths."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_heads, value))
    return min(HEADS_COUNT, 2 ** int(math.log2(max(1, value))))


def _widths(value: Any) -> Any:
    """At most ``WIDTH``; several keep their ratios."""
    if not isinstance(value, (list, tuple)) or not value:
        return min(value, WIDTH) if isinstance(value, int) else value
    largest = max(value)
    if largest <= WIDTH:
        return value
    return type(value)(max(8, int(v * WIDTH / largest) // 8 * 8) for v in value)


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Sections of a rotary embedding, made to fit the head's width, and a base where the class has none."""
    value = dict(value)
    if "mrope_section" in value:
        half = HEAD_DIM // 2
        side = 3 * half // 8
        value["mrope_section"] = [half - 2 * side, side, side]
    if "rope_type" in value and value.get("rope_theta") is None:
        value["rope_theta"] = 10000.0
    return value


RULES: tuple[tuple[str, Any], ...] = (
    # tokens
    (r"pad_token_id|pad_index", 0),
    (r"bos_token_id|bos_index|cls_token_id|forced_bos_token_id", 1),
    (r"eos_token_id|eos_index|sep_token_id|forced_eos_token_id", 2),
    (r"decoder_start_token_id", 1),
    (r"image_token_(id|index)|media_token_(id|index)|mask_token_id|mask_index", 3),
    (r"video_token_(id|index)", 4),
    (r"audio_token_(id|index)", 5),
    (r"\w*(vision|image|boi)\w*_token_(id|index)", 6),
    (r"\w+_token_(id|index)", 7),
    (r"type_vocab_sizes?|n_langs", None),
    (r"\w*vocab_size\w*|num_embeddings", VOCABULARY),
    # depths
    (r"(\w+_)?(n|num)_(hidden_|encoder_|decoder_|attention_)?layers?|num_blocks|(\w+_)?depth|\w+_layers|layers",
     _at_most(LAYERS)),
    (r"depths|layers_per_stage|stage_num_blocks|num_block_repeats|stage_layers", _at_most(1)),
    (r"deepstack_visual_indexes|fullatt_block_indexes|global_attn_index(e|ice)s", lambda v: type(v)([1])),
    (r"first_k_dense_replace|num_dense_layers", _at_most(1)),
    # heads
    (r"(\w+_)?num_key_value_heads|num_kv_heads|n_head_kv", _at_most(2)),
    (r"(\w+_)?(num_attention_heads|attention_heads|num_heads|n_heads?|heads)", _heads),
    (r"qk_(rope|nope)_head_dim", HEAD_DIM // 2),
    (r"(\w+_)?head_dim|d_kv|d_head|rotary_dim", HEAD_DIM),
    (r"(q|kv)_lora_rank", 32),
    (r"rope_parameters|rope_scaling", _rope),
    # experts
    (r"num_experts_per_tok(en)?|top_?k_experts|moe_k|moe_top_?k|experts_per_token", _at_most(2)),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", _at_most(4)),
    (r"n_group|topk_group", 1),
    (r"(\w+_)?expert_capacity", LENGTH),
    # positions, images, sound
    (r"(\w+_)?max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_(source|target)_positions",
     _at_most(512)),
    (r"image_size", _all(IMAGE)),
    (r"patch_size", _at_most(PATCH)),
    (r"image_grid_pinpoints", [[IMAGE, IMAGE]]),
    (r"mm_tokens_per_image|image_seq_length", (IMAGE // PATCH // 2) ** 2),
    (r"num_mel_bins|feature_size", MELS),
    (r"mask_(time|feature)_length", 2),
    (r"num_frames", _at_most(4)),
    (r"num_queries|num_detection_tokens|num_labels|num_latents", _at_most(20)),
    (r"sliding_window|local_attention|attention_window", _at_most(16)),
    # widths
    (r"coordinate_size", 10),
    (r"shape_size", 12),
    (r"num_pos_feats", WIDTH // 2),
    (r"intermediate_size|\w*_intermediate_size|\w*ffn_dim|ffn_hidden_size|d_ff|d_inner|n_inner|mlp_dim|dim_feedforward"
     r"|\w+_feedforward_dim|\w*ffn_hidden_dim", _at_most(2 * WIDTH)),
    (r"hidden_sizes|neck_hidden_sizes|(encoder|decoder)_in_channels|embed_dims?|embedding_dims?|conv_dim"
     r"|encoder_hidden_sizes|(\w+_)?(hidden_size|hidden_dim|d_model|n_embd|projection_dim|embed_dim|embedding_size"
     r"|output_dim|out_hidden_size|proj_dim|channels|out_channels|width|dim|mask_feature_size|latent_dim|proj_size)"
     r"|upsample_groups|d_latents", _widths),
)  # fmt: skip
"""Name of a field (a pattern that is its whole name) and what it becomes: a value, or a function of the default.

The first pattern that fits counts; None leaves the field. A field whose default is None is left as well: the config
works it out. So is one that is a share.
"""


def small_config(
    config_class: type[PretrainedConfig], defaults: PretrainedConfig | None = None
) -> PretrainedConfig:
    """A small config of a class.

    Args:
        config_class: whose fields are asked for.
        defaults: values to start from, where the config is part of another one that sets some.
    """
    model_type = config_class.model_type
    overrides = OVERRIDES.get(model_type, {})
    if defaults is None:
        defaults = config_class(**overrides if model_type in _DEFAULTS_NEED_OVERRIDES else {})
    values: dict[str, Any] = {}
    for name, declared in _fields(config_class).items():
        value = vars(defaults).get(name, declared)
        if isinstance(value, PretrainedConfig):
            values[name] = small_config(type(value), value)
        elif name == "vocab_size" and value is None:  # a checkpoint brings it
            values[name] = VOCABULARY
        elif value is not None and (declared is not None or name == "rope_parameters"):
            rule = _rule(name)
            if rule is not None and not isinstance(value, (float, bool)) and model_type not in UNSHRUNK:
                values[name] = rule(value) if callable(rule) else rule
    if model_type not in UNSHRUNK:
        values |= _layer_types(defaults)
    if "qk_rope_head_dim" in values:  # latent attention: the rotary part has a width of its own
        values |= {k: v for k, v in _LATENT_ATTENTION.items() if k in _fields(config_class)}
    made = {k: v() if callable(v) else v for k, v in overrides.items()}
    return config_class(**values | made)


_LATENT_ATTENTION = {"head_dim": HEAD_DIM // 2, "num_key_value_heads": HEADS_COUNT, "qk_head_dim": HEAD_DIM}


@functools.cache
def _rule(name: str) -> Any:
    return next((rule for pattern, rule in RULES if re.fullmatch(pattern, name)), None)


def _fields(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Fields that the class declares for the architecture, with their defaults."""
    common = {f.name for f in dataclasses.fields(PretrainedConfig)}
    found = {}
    for field in dataclasses.fields(config_class):
        if field.name in common or not field.init:
            continue
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = None if field.default is dataclasses.MISSING else field.default
    return found


def _layer_types(defaults: PretrainedConfig) -> dict[str, Any]:
    """One layer of each kind that the architecture mixes, and at least ``LAYERS``."""
    found: dict[str, Any] = {}
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = vars(defaults).get(name)
        if isinstance(kinds, list) and kinds and name in _fields(type(defaults)):
            found[name] = list(dict.fromkeys(kinds))
    if not found:
        return {}
    layers = max(LAYERS, *map(len, found.values()))
    for name, kinds in found.items():
        found[name] = [kinds[i % len(kinds)] for i in range(layers)]
    return {**found, "num_hidden_layers": layers}


def _resnet() -> PretrainedConfig:
    """A backbone that needs no other package."""
    return transformers.ResNetConfig(  # type: ignore[call-arg]
        embedding_size=16, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


_OWN_BACKBONE = {"backbone_config": _resnet, "use_timm_backbone": False, "backbone": None}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_HALF_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_TIME_SERIES = {
    "prediction_length": 8,
    "context_length": 24,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 1,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "detr": _OWN_BACKBONE,
    "conditional_detr": _OWN_BACKBONE,
    "dab-detr": _OWN_BACKBONE,
    "deformable_detr": _OWN_BACKBONE,
    "table-transformer": _OWN_BACKBONE,
    "glm4v_text": _MROPE,
    "glm4v_moe_text": _HALF_MROPE,
    "glm_ocr_text": _MROPE,
    "glm_image_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "autoformer": _TIME_SERIES,
    "informer": _TIME_SERIES,
    "time_series_transformer": _TIME_SERIES,
    "lilt": {"hidden_size": 96},
    "aria": {"projector_patch_to_query_dict": {"64": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "hunyuan_v1_dense": _ROPE,
    "hunyuan_v1_moe": _ROPE,
    "hunyuan_vl_text": _ROPE,
    "ministral": _ROPE,
    "longcat_flash": {"zero_expert_num": 2, "moe_topk": 2},
    "nemotron": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "layoutlmv3": {"input_size": IMAGE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mask2former": {"feature_size": WIDTH, "mask_feature_size": WIDTH},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 16},
    "patchtst": {"num_input_channels": 4, "prediction_length": 8},
    "patchtsmixer": {"num_input_channels": 4, "prediction_length": 8},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "xmod": {"default_language": "en_XX"},
    "esm": {"pad_token_id": 0, "mask_token_id": 3},
    "cpmant": {"dim_head": HEAD_DIM, "dim_ff": 2 * WIDTH},
    "ctrl": {"dff": 2 * WIDTH},
}
"""By model type, of configs inside others too: fields that the rules get wrong, or functions that make them."""

_DEFAULTS_NEED_OVERRIDES: frozenset[str] = frozenset()
"""Model types whose config class cannot be made without arguments."""

UNSHRUNK: frozenset[str] = frozenset({
    "bit", "efficientnet", "align_vision_model", "cvt", "textnet", "uvdoc_backbone", "uvdoc", "slanet", "pp_lcnet",
    "pp_lcnet_v3", "pp_lcnet_v4",
})  # fmt: skip
"""Convolutional networks whose shape is a table in the config: small enough as they are."""


# --- batches ---------------------------------------------------------------------------------------------------------


class _Inputs:
    """Makes the tensors that a forward asks for by name."""

    def __init__(self, model: torch.nn.Module, model_type: str, shapes: dict[str, int]) -> None:
        self.model, self.shapes = model, shapes
        config: Any = model.config
        self.config = config
        self.name = type(model).__name__
        self.parameters = inspect.signature(model.forward).parameters
        self.overrides = BATCH_OVERRIDES.get(model_type, {})
        self.text = config.get_text_config()
        self.vocab = _first(self.text, "vocab_size", "n_vocab") or VOCABULARY
        self.length = min(LENGTH, _first(self.text, "max_position_embeddings", "n_positions") or LENGTH)

    def shape_of(self, name: str) -> int:
        return self.shapes.get(name, 0)

    def part(self, *names: str) -> Any:
        """The config inside that describes a tower, or the whole one."""
        return next((c for n in names if (c := getattr(self.config, n, None)) is not None), self.config)

    def tokens(self, rows: int = ROWS, length: int | None = None) -> torch.Tensor:
        low = min(10, self.vocab - 1)
        return torch.randint(low, self.vocab, (rows, length or self.length))

    def images(self) -> torch.Tensor:
        vision = self.part("vision_config", "vision", "backbone_config", "encoder")
        channels = _first(vision, "num_channels", "in_channels", "in_chans", "input_channels")
        channels = channels if isinstance(channels, int) else 3
        size = _first(vision, "image_size", "img_size") or _first(self.config, "image_size") or IMAGE
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return torch.randn(ROWS, channels, height, width)

    def labels(self) -> Any:
        """What the head of the class is trained on, or None where that is not known."""
        return next((make(self) for pattern, make in LABELS if re.search(pattern, self.name)), None)


def _first(config: Any, *names: str) -> Any:
    return next((v for n in names if (v := getattr(config, n, None)) is not None), None)


def _classes(inputs: _Inputs, *shape: int) -> torch.Tensor:
    return torch.randint(0, max(1, inputs.config.num_labels), shape)


def _boxes_of_objects(inputs: _Inputs) -> list[dict[str, torch.Tensor]]:
    return [{"class_labels": _classes(inputs, 3), "boxes": torch.rand(3, 4) * 0.2 + 0.3} for _ in range(ROWS)]


LABELS: tuple[tuple[str, Callable[[_Inputs], Any]], ...] = (
    (r"ForCTC", lambda i: i.tokens(length=6)),
    (
        r"(CausalLM|LMHead\w*|MaskedLM|ConditionalGeneration\w*|SpeechSeq2Seq|Seq2SeqLM)$",
        lambda i: i.tokens(),
    ),
    (r"(Image|Video|Audio|Sequence|Text)Classification\w*$", lambda i: _classes(i, ROWS)),
    (r"TokenClassification$", lambda i: _classes(i, ROWS, i.length)),
    (r"SemanticSegmentation$", lambda i: _classes(i, ROWS, *i.images().shape[-2:])),
    (r"DepthEstimation$", lambda i: torch.rand(ROWS, *i.images().shape[-2:]) + 0.1),
    (r"ObjectDetection$", _boxes_of_objects),
)
"""End of a class's name, and what its ``labels`` are."""


def _pixel_values(i: _Inputs) -> torch.Tensor:
    """Images; videos, several images a row, or a list of patches, as the model wants it."""
    images = i.images()
    vision = i.part("vision_config")
    if "image_grid_thw" in i.parameters or "grid_thw" in i.parameters:
        times = _first(vision, "temporal_patch_size", "patch_temporal") or 1
        patch, count = vision.patch_size, ROWS * _GRID * _GRID
        flat = torch.randn(count, images.shape[1] * times * patch * patch)
        squares = torch.randn(count, images.shape[1], patch, patch)
        return (flat, squares, squares[None], flat[None])[i.shape_of("pixel_values")]
    if "spatial_shapes" in i.parameters:
        return torch.randn(ROWS, _GRID * _GRID, images.shape[1] * vision.patch_size**2)
    frames = _first(i.config, "num_frames") or 2
    shape = (
        images,
        images[:, None],
        images[:, None].expand(-1, frames, -1, -1, -1).contiguous(),
        images[:, None].expand(-1, 2, -1, -1, -1).contiguous(),
    )
    return shape[i.shape_of("pixel_values")]


_GRID = 4


def _audio(i: _Inputs) -> torch.Tensor:
    audio = i.part("audio_config", "speech_config", "encoder_config", "audio_encoder")
    mels = _first(audio, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim",
                  "input_dim", "mel_dim", "num_mels", "input_size") or MELS  # fmt: skip
    positions = _first(audio, "max_source_positions")
    frames = 2 * positions if positions and positions <= 512 else FRAMES
    shapes = (
        (ROWS, mels, frames),
        (ROWS, frames, mels),
        (ROWS, 1, frames, mels),
        (ROWS, SAMPLES),
        (ROWS, 1, SAMPLES),
    )
    return torch.randn(shapes[i.shape_of("input_features")])


def _audio_mask(i: _Inputs) -> torch.Tensor:
    shape = _audio(i).shape
    return torch.ones(ROWS, shape[2 if i.shape_of("input_features") == 0 else 1], dtype=torch.long)


def _videos(i: _Inputs) -> torch.Tensor | None:
    """Videos, where they are the only input."""
    if "pixel_values" in i.parameters or "input_ids" in i.parameters:
        return None
    frames = _first(i.config, "num_frames", "frames_per_clip") or 2
    return i.images()[:, None].expand(-1, frames, -1, -1, -1).contiguous()


def _series(i: _Inputs, *, past: bool) -> tuple[int, ...]:
    """Steps of a time series, and its channels where it has them."""
    channels = _first(i.config, "num_input_channels")
    if channels is None:
        return (
            i.config.context_length + max(i.config.lags_sequence) if past else i.config.prediction_length,
        )
    return (i.config.context_length if past else i.config.prediction_length, channels)


def _waves(i: _Inputs) -> torch.Tensor:
    audio = i.part("audio_config")
    mels = _first(audio, "num_mel_bins", "feature_size") or MELS
    shapes = (
        (ROWS, SAMPLES),
        (ROWS, 1, SAMPLES),
        (ROWS, _first(audio, "max_length") or FRAMES, mels),
        (ROWS, mels, FRAMES),
    )
    return torch.randn(shapes[i.shape_of("input_values")])


def _bbox(i: _Inputs) -> torch.Tensor:
    corners = torch.randint(0, 64, (ROWS, i.length, 4))
    return torch.cat([corners[..., :2].clamp(max=31), corners[..., 2:].clamp(min=32)], dim=-1)


def _mask(i: _Inputs) -> torch.Tensor:
    """The last quarter of the first row is padding, in models of text alone."""
    mask = torch.ones(ROWS, i.length, dtype=torch.long)
    if not any(name.startswith(("pixel_", "input_features", "input_values")) for name in i.parameters):
        mask[0, -i.length // 4 :] = 0
    return mask


INPUTS: dict[str, Callable[[_Inputs], Any]] = {
    "pixel_values": _pixel_values,
    "input_ids": lambda i: i.tokens(),
    "attention_mask": lambda i: _mask(i) if "input_ids" in i.parameters else None,
    "bbox": _bbox,
    "image": lambda i: i.images(),
    "flattened_patches": lambda i: torch.rand(ROWS, 16, i.config.vision_config.patch_embed_hidden_size + 2),
    "input_features": _audio,
    "input_values": _waves,
    "image_grid_thw": lambda i: torch.tensor([[1, _GRID, _GRID]] * ROWS),
    "grid_thw": lambda i: torch.tensor([[1, _GRID, _GRID]] * ROWS),
    "spatial_shapes": lambda i: torch.tensor([[_GRID, _GRID]] * ROWS),
    "pixel_attention_mask": lambda i: (
        torch.ones(ROWS, _GRID * _GRID, dtype=torch.long) if "spatial_shapes" in i.parameters else None
    ),
    "image_sizes": lambda i: torch.tensor([list(i.images().shape[-2:])] * ROWS),
    "input_points": lambda i: torch.rand(ROWS, 1, 2, 2) * IMAGE,
    "input_labels": lambda i: torch.ones(ROWS, 1, 2, dtype=torch.long),
    "decoder_input_ids": lambda i: i.tokens(),
    "qformer_input_ids": lambda i: i.tokens(),
    "input_features_mask": _audio_mask,
    "feature_attention_mask": _audio_mask,
    "pixel_values_videos": _videos,
    "visual_feats": lambda i: torch.randn(ROWS, 10, i.config.visual_feat_dim),
    "visual_pos": lambda i: torch.rand(ROWS, 10, 4),
    "past_values": lambda i: torch.rand(ROWS, *_series(i, past=True)),
    "past_time_features": lambda i: torch.rand(ROWS, _series(i, past=True)[0], 1),
    "past_observed_mask": lambda i: torch.ones(ROWS, *_series(i, past=True)),
    "future_values": lambda i: torch.rand(ROWS, *_series(i, past=False)),
    "future_time_features": lambda i: torch.rand(ROWS, _series(i, past=False)[0], 1),
    "return_loss": lambda i: True,
}
"""Name of an argument of forward, and how to make it."""

BATCH_OVERRIDES: dict[str, dict[str, Callable[[_Inputs], Any] | None]] = {}
"""By model type: as in ``INPUTS``; None leaves an argument out."""

SHAPES: dict[str, int] = {"pixel_values": 4, "input_features": 5, "input_values": 4}
"""Arguments whose number of dimensions the signature does not tell: how many shapes there are to try."""


def make_batch(inputs: _Inputs, *, labels: bool) -> dict[str, Any]:
    """A batch for the arguments of forward that are known."""
    batch: dict[str, Any] = {}
    makers = {**INPUTS, **inputs.overrides}
    made_labels = inputs.labels() if labels and "labels" in inputs.parameters else None
    for name, make in makers.items():
        if name not in inputs.parameters or make is None:
            continue
        if name == "decoder_input_ids" and made_labels is not None:
            continue
        made = make(inputs)
        if made is not None:
            batch[name] = made
    if "input_ids" in batch:
        if "pixel_values" in batch:
            _place(inputs, batch, "image")
        if "input_features" in batch or "input_values" in batch:
            _place(inputs, batch, "audio")
    if made_labels is not None:
        batch["labels"] = (
            batch["input_ids"].clone() if _same_tokens(inputs, batch, made_labels) else made_labels
        )
    return batch


def _same_tokens(inputs: _Inputs, batch: dict[str, Any], labels: Any) -> bool:
    return (
        isinstance(labels, torch.Tensor)
        and "input_ids" in batch
        and (labels.ndim == 2 and not labels.is_floating_point())
        and not re.search("TokenClassification", inputs.name)
    )


def _place(inputs: _Inputs, batch: dict[str, Any], kind: str) -> None:
    """Put as many tokens of a kind ("image", "audio") into each row as the model makes features of its input."""
    token = _first(inputs.config, f"{kind}_token_id", f"{kind}_token_index")
    features_of = getattr(inputs.model, f"get_{kind}_features", None)
    if token is None or features_of is None:
        return
    accepted = inspect.signature(features_of).parameters
    with torch.no_grad():
        found = features_of(**{k: v for k, v in batch.items() if k in accepted})
    found = getattr(found, "pooler_output", found)
    found = [
        f for f in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(f, torch.Tensor)
    ]
    count = sum(f.numel() // f.shape[-1] for f in found) // ROWS
    inputs.length = max(LENGTH, count + 16)
    batch["input_ids"] = ids = inputs.tokens()
    ids[:, 4 : 4 + count] = token
    if "attention_mask" in batch:
        batch["attention_mask"] = torch.ones_like(ids)
    if "mm_token_type_ids" in inputs.parameters:
        batch["mm_token_type_ids"] = (ids == token).long()
    if "token_type_ids" in inputs.parameters and kind == "image":
        batch["token_type_ids"] = (ids == token).long()


# --- models ----------------------------------------------------------------------------------------------------------

_FROM_ZOO_ROWS = 2


@functools.cache
def _by_hand() -> dict[str, str]:
    """Model type: name in ``zoo``."""
    return {make("small")[1].model_type: name for name, make in zoo.ARCHITECTURES.items()}


def build(model_type: str) -> SmallCase:
    """A model of an architecture, in training mode, and a batch that it trains on.

    Raises:
        NotBuilt: it cannot be made small, or no batch was found that it runs on; the message is the first error.
    """
    seed_everything(_SEED)
    if model_type in _by_hand():
        model, batch, loss_fn = zoo.build(_by_hand()[model_type], "small", "cpu", copies=_FROM_ZOO_ROWS)
        return SmallCase(model, batch, loss_fn, type(model).__name__, "zoo")
    config_class = configuration_auto.CONFIG_MAPPING[model_type]
    errors: list[str] = []
    with _noted(errors, "config"):
        small_config(config_class)
    if errors:
        raise NotBuilt(errors[0])
    for model_class in model_classes(model_type):
        seed_everything(_SEED)
        with _noted(errors, model_class.__name__):
            model = model_class(small_config(config_class)).train()
            for batch in _batches(model, model_type, errors):
                return SmallCase(model, batch, None, model_class.__name__, "rules")
    raise NotBuilt("; then ".join(dict.fromkeys((*errors[:1], *errors[-1:]))) or "no model class")


def _batches(model: torch.nn.Module, model_type: str, errors: list[str]) -> Iterator[dict[str, Any]]:
    """Batches on which a step runs, one with labels first."""
    parameters = inspect.signature(model.forward).parameters
    ambiguous = [name for name in SHAPES if name in parameters]
    count = math.prod(SHAPES[name] for name in ambiguous)
    for labels in (True, False):
        for number in range(count):
            shapes, rest = {}, number
            for name in ambiguous:
                rest, shapes[name] = divmod(rest, SHAPES[name])
            with _noted(errors, type(model).__name__):
                seed_everything(_SEED)
                batch = make_batch(_Inputs(model, model_type, shapes), labels=labels)
                _try_step(model, batch)
                yield batch
                return


def _try_step(model: torch.nn.Module, batch: dict[str, Any]) -> None:
    """Run a step without a plan, and forget its gradients.

    Raises:
        ValueError: nothing to train came out of it.
    """
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    try:
        loss = default_loss(model, batch)
        if not torch.isfinite(loss):
            raise ValueError(f"the loss is {loss.item()}")
        loss.backward()
        if all(p.grad is None for p in model.parameters()):
            raise ValueError("no parameter has a gradient")
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.copy_(buffers[name])


@contextlib.contextmanager
def _noted(errors: list[str], where: str) -> Iterator[None]:
    """An exception becomes a line of ``errors``: whatever an architecture raises, another try may do."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        errors.append(f"{where}: {type(error).__name__}: {text[:200]}")
