"""Make batches for any model of transformers, from its configuration and the signature of its forward.

    found = find(model, BatchDimensions(rows=2), "meta", torch.bfloat16)
    found.batch                   # keyword arguments of forward
    make(model, found, BatchDimensions(rows=5), "meta", torch.bfloat16)    # of another size

``INPUTS`` says how to make each argument, and ``LABELS`` how to make the labels of each head. Some arguments have one
name for several layouts: ``pixel_values`` may be images, videos or patches. The forward is tried with each layout on
tensors without data, and the first one that runs is taken. A row of tokens holds one placeholder for each feature that
the model makes of an image or a sound.
"""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sacplan.record.step import call_model
from sacplan.torch_compat.private import without_a_log

InputShapes = Mapping[str, int]
"""The number of the layout of each argument that has several; see ``LAYOUTS``."""

Run = Callable[[torch.nn.Module, Mapping[str, Any], Callable[[torch.nn.Module, Any], Any]], Any]
"""``run(model, arguments, call)`` returns ``call(model, arguments)``, of which only shapes are used."""


@dataclass(frozen=True, slots=True)
class BatchDimensions:
    """Sizes of a batch that the configuration does not fix.

    Attributes:
        rows: samples.
        tokens: in a sample, placeholders included.
        pixels: side of an image.
        patches: along a side of an image that is given in patches; None for as many as fit into ``pixels``.
        frames: of a spectrogram.
        samples: of a sound.
        mels: bands of a spectrogram.
        transcript: tokens in the transcript of a sound.
        padded: whether the last quarter of the first row of tokens is padding.
    """

    rows: int = 1
    tokens: int = 1024
    pixels: int = 224
    patches: int | None = None
    frames: int = 1000
    samples: int = 160_000
    mels: int = 80
    transcript: int = 128
    padded: bool = False


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A batch that the forward of a model runs with.

    Attributes:
        batch: keyword arguments.
        layout, features: layouts and numbers of placeholders, for batches of other sizes.
        tokens: in a sample; None for a model that reads no tokens.
        has_loss: whether the output has a loss.
    """

    batch: dict[str, Any]
    layout: InputShapes
    features: Mapping[str, int]
    tokens: int | None
    has_loss: bool


class NoBatch(Exception):
    """No batch was found that a model runs with. The message is the first error."""


class BatchInputs:
    """Make the tensors that a forward asks for by name.

    Args:
        model: with its ``config``.
        sizes: of the batch.
        place: device of the tensors. With ``"meta"`` integers are on the CPU, since sizes may depend on their values.
        dtype: of floats.
        layout: see ``LAYOUTS``.
        features: how many features of ``"image"`` and ``"audio"`` a row has. A missing number is counted by running
            that part of the model.
        run: how to run it; on tensors without data by default.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sizes: BatchDimensions,
        place: str = "cpu",
        dtype: torch.dtype = torch.float32,
        layout: InputShapes | None = None,
        features: Mapping[str, int] | None = None,
        run: Run | None = None,
    ) -> None:
        config: Any = model.config
        self.model, self.config, self.sizes = model, config, sizes
        self.name = type(model).__name__
        self.parameters = inspect.signature(model.forward).parameters
        self.text = text_config(config)
        self.vocab = first_of(self.text, "vocab_size", "n_vocab") or _VOCABULARY
        self.length = sizes.tokens
        self.rows = sizes.rows
        self.place, self.dtype = place, dtype
        self.reads_only_text = not any(p.startswith(_NOT_TEXT) for p in self.parameters)
        # Grids of images and positions of placeholders are read as numbers by forwards, which meta tensors do
        # not have.
        self.place_of_integers = "cpu" if place == "meta" and not self.reads_only_text else place
        self.layout = layout or {}
        self.features = dict(features or {})
        self.run = run or without_data

    def requires(self, name: str) -> bool:
        """Return whether forward takes an argument of this name and has no default for it."""
        return name in self.parameters and self.parameters[name].default is inspect.Parameter.empty

    def layout_of(self, name: str) -> int:
        """Return a size of the layout; 0 if it has none of this name."""
        return self.layout.get(name, 0)

    def part(self, *names: str) -> Any:
        """Return the nested configuration of a tower, or the whole configuration."""
        # Models around a model, such as ColQwen2, have the towers one level deeper.
        inner = [c for c in vars(self.config).values() if hasattr(c, "model_type")]
        return next(
            (
                c
                for owner in (self.config, *inner)
                for n in names
                if (c := getattr(owner, n, None)) is not None
            ),
            self.config,
        )

    def floats(self, *shape: int) -> torch.Tensor:
        """Return random floats, normally distributed."""
        return torch.randn(shape, dtype=self.dtype, device=self.place)

    def shares(self, *shape: int) -> torch.Tensor:
        """Return random floats in [0, 1)."""
        return torch.rand(shape, dtype=self.dtype, device=self.place)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return random integers in [low, high), at least ``low``."""
        return torch.randint(low, max(high, low + 1), shape, device=self.place_of_integers)

    def ones(self, *shape: int) -> torch.Tensor:
        """Return ones, such as a mask that hides nothing."""
        return torch.ones(shape, dtype=torch.long, device=self.place_of_integers)

    def rows_of(self, *values: int) -> torch.Tensor:
        """Return the same integers in each row."""
        return torch.tensor([values] * self.rows, device=self.place_of_integers)

    def tokens(self, length: int | None = None) -> torch.Tensor:
        """Return random tokens, without the first ten of the vocabulary: those are often special tokens."""
        choices = (_CHOICES,) if self.name.endswith("MultipleChoice") else ()
        return self.integers(min(10, self.vocab - 1), self.vocab, self.rows, *choices, length or self.length)

    def classes(self, *shape: int) -> torch.Tensor:
        """Return random labels of the classes that the model knows."""
        return self.integers(0, self.config.num_labels, *shape)

    def image_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width."""
        vision = self.part("vision_config", "vision", "backbone_config", "encoder")
        channels = first_of(vision, "num_channels", "in_channels", "in_chans", "input_channels")
        size = first_of(vision, "image_size", "img_size") or first_of(self.config, "image_size")
        # SAM 2 and 3: the tower is a neck on a backbone, which has the size.
        backbone = getattr(vision, "backbone_config", None)
        size = size or first_of(backbone, "image_size", "img_size")
        size = size or self.sizes.pixels
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        # Squares of patches are shuffled into one feature (Idefics 3): a side is a multiple of theirs.
        shuffled = first_of(self.config, "scale_factor", "pixel_shuffle_factor")
        patch = first_of(vision, "patch_size")
        if vision is not self.config and isinstance(shuffled, int) and isinstance(patch, int):
            height, width = (
                max(1, side // (patch * shuffled)) * patch * shuffled for side in (height, width)
            )
        return channels if isinstance(channels, int) else 3, height, width

    def samples(self) -> int:
        """Return the samples of a sound: as many as fill whole tokens, where the configuration says what one takes."""
        unit = first_of(self.part("audio_config"), "samples_per_token")
        unit = unit if isinstance(unit, int) else 1
        return max(1, self.sizes.samples // unit) * unit

    def images(self) -> torch.Tensor:
        """Return one random image in each row."""
        return self.floats(self.rows, *self.image_shape())

    def patches(self) -> int:
        """Return the number of patches along a side: a multiple of those that are merged into one feature."""
        if self.sizes.patches is not None:
            return self.sizes.patches
        vision = self.part("vision_config")
        merged = first_of(vision, "spatial_merge_size", "merge_size", "pooling_kernel_size") or 1
        merged = merged if isinstance(merged, int) else 2
        return max(1, self.sizes.pixels // int(vision.patch_size) // merged) * merged

    def labels(self) -> Any:
        """Return labels for the head of the class, or None if its labels are not known."""
        return next((make(self) for pattern, make in LABELS if re.search(pattern, self.name)), None)


_VOCABULARY = 512
_CHOICES = 2
_NOT_TEXT = (
    "pixel_",
    "input_features",
    "input_values",
    "image",
    "flattened_patches",
    "visual_",
    "past_values",
    "grid_thw",
)


def text_config(config: Any) -> Any:
    """Return the configuration of the text that a model reads, or writes if it has one for either (MusicGen)."""
    try:
        return config.get_text_config()
    except ValueError:  # ambiguous, says transformers
        return config.get_text_config(decoder=True)


def first_of(config: Any, *names: str) -> Any:
    """Return the first of these fields that has a value in a configuration."""
    return next((v for n in names if (v := getattr(config, n, None)) is not None), None)


def _boxes_of_objects(i: BatchInputs) -> list[dict[str, torch.Tensor]]:
    # Center, width and height as shares of the image, all from 0.3 to 0.5, so that each box lies inside of it.
    boxes = [i.shares(3, 4) * 0.2 + 0.3 for _ in range(i.rows)]
    return [{"class_labels": i.classes(3), "boxes": b} for b in boxes]


LABELS: tuple[tuple[str, Callable[[BatchInputs], Any]], ...] = (
    (r"ForCTC", lambda i: i.tokens(i.sizes.transcript)),
    (
        r"(CausalLM|LMHead\w*|MaskedLM|ConditionalGeneration\w*|SpeechSeq2Seq|Seq2SeqLM)$",
        lambda i: i.tokens(),
    ),
    (r"(Image|Video|Audio|Sequence|Text)Classification\w*$", lambda i: i.classes(i.rows)),
    (r"MultipleChoice$", lambda i: i.integers(0, _CHOICES, i.rows)),
    (r"TokenClassification$", lambda i: i.classes(i.rows, i.length)),
    (r"SemanticSegmentation$", lambda i: i.classes(i.rows, *i.image_shape()[1:])),
    # Above zero, since losses of depths take logarithms.
    (r"DepthEstimation$", lambda i: i.shares(i.rows, *i.image_shape()[1:]) + 0.1),
    (r"ObjectDetection$", _boxes_of_objects),
)
"""Patterns of class names, and how to make the ``labels`` of these classes. The first that matches counts."""


def _pixel_values(i: BatchInputs, name: str = "pixel_values") -> torch.Tensor:
    """Return images, videos, several images per row, or a list of patches, for the argument ``name``."""
    channels, height, width = i.image_shape()
    vision = i.part("vision_config")
    # Patches of all images in one list, as Qwen-VL takes them.
    if "image_grid_thw" in i.parameters or "grid_thw" in i.parameters:
        times = first_of(vision, "temporal_patch_size", "patch_temporal") or 1
        patch, count = vision.patch_size, i.rows * i.patches() ** 2
        # A patch is a row of numbers or a square, and the list may be in a batch of one.
        flat = (count, channels * times * patch * patch)
        squares = (count, channels, patch, patch)
        return i.floats(*(flat, squares, (1, *squares), (1, *flat))[i.layout_of(name)])
    # Patches by row, padded to the largest image (SigLIP 2, Gemma 4).
    if i.parameters.keys() & _PLACES_OF_PATCHES or i.layout_of(name) == _PATCHES_BY_ROW:
        return i.floats(i.rows, i.patches() ** 2, channels * vision.patch_size**2)
    frames = first_of(i.config, "num_frames") or 2
    # One image for each row, without and with a dimension for their number; the frames of a video; several images.
    between: tuple[tuple[int, ...], ...] = ((), (1,), (frames,), (_tiles(i, height, width),))
    return i.floats(i.rows, *between[i.layout_of(name)], channels, height, width)


def _tiles(i: BatchInputs, height: int, width: int) -> int:
    """Return how many images one is cut into: a small one, and tiles of the size that suits it best (LLaVA-NeXT)."""
    grids = first_of(i.config, "image_grid_pinpoints")
    if not grids:
        return 2
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    tiles: int = image_size_to_num_patches((height, width), grids, i.part("vision_config").image_size)
    return tiles


_PATCHES_BY_ROW = 4
_PLACES_OF_PATCHES = {"spatial_shapes", "pixel_position_ids", "image_position_ids"}
"""Arguments that say where in its image each patch of a row is."""


def _patches_of_a_tower(i: BatchInputs) -> torch.Tensor | None:
    """Return the patches that a tower by itself reads: with a grid, they come under the name of hidden states."""
    # Elsewhere, hidden states are what another part makes, of a width that is not known here.
    if not i.requires("hidden_states") or "grid_thw" not in i.parameters:
        return None
    return _pixel_values(i, "hidden_states")


def _pixel_mask(i: BatchInputs) -> torch.Tensor | None:
    """Return which patches are there, or which pixels of images."""
    if "spatial_shapes" in i.parameters:
        return i.ones(i.rows, i.patches() ** 2)
    images = _pixel_values(i)
    owner = _maker_of_features(i.model, "image")
    reads = {} if owner is None else inspect.signature(type(owner).get_image_features).parameters
    mask = reads.get("pixel_attention_mask")
    # Of several images in a row, some may be padding; of one, only where the model insists.
    needed = images.dim() == 5 or (mask is not None and mask.default is inspect.Parameter.empty)
    return i.ones(*images.shape[:-3], *images.shape[-2:]) if needed else None


def _places_of_patches(i: BatchInputs) -> torch.Tensor:
    """Return the row and the column of each patch."""
    side = torch.arange(i.patches(), device=i.place_of_integers)
    return torch.cartesian_prod(side, side).expand(i.rows, -1, -1)


def _spectrogram_shape(i: BatchInputs) -> tuple[int, ...]:
    audio = i.part("audio_config", "speech_config", "encoder_config", "audio_encoder")
    mels = first_of(audio, "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim",
                    "input_dim", "mel_dim", "num_mels", "input_size") or i.sizes.mels  # fmt: skip
    positions = first_of(audio, "max_source_positions")
    frames = 2 * positions if positions and positions <= _WHISPER_POSITIONS else i.sizes.frames
    return (
        # Bands or frames first, or with a channel. Some models read waves under the same name.
        (i.rows, mels, frames),
        (i.rows, frames, mels),
        (i.rows, 1, frames, mels),
        (i.rows, i.samples()),
        (i.rows, 1, i.samples()),
        # Frames that were stacked before: as wide as the first layer reads. Some read more bands, and do not
        # say how many.
        (i.rows, frames, _width_of_first_layer(i.model) or mels),
        (i.rows, frames, _MANY_MELS),
    )[i.layout_of("input_features")]


_MANY_MELS = 128
"""Bands of a spectrogram in newer models; older ones read 80."""


def _width_of_first_layer(model: torch.nn.Module) -> int | None:
    return next((m.in_features for m in model.modules() if isinstance(m, torch.nn.Linear)), None)


_WHISPER_POSITIONS = 1500
"""Encoders with at most as many positions as Whisper's read two frames per position, and need all of them."""


def _audio_mask(i: BatchInputs) -> torch.Tensor:
    shape = _spectrogram_shape(i)
    # Behind the bands, or behind a channel.
    return i.ones(i.rows, shape[2 if i.layout_of("input_features") in (0, 2, 4) else 1])


def _videos(i: BatchInputs) -> torch.Tensor | None:
    """Return videos if they are the only input."""
    # Videos beside images or text are optional, unless the signature says otherwise.
    if not i.requires("pixel_values_videos") and (
        "pixel_values" in i.parameters or "input_ids" in i.parameters
    ):
        return None
    frames = first_of(i.config, "num_frames", "frames_per_clip")
    frames = frames or first_of(i.part("vision_config"), "num_frames", "frames_per_clip") or 2
    return i.floats(i.rows, frames, *i.image_shape())


def _series(i: BatchInputs, *, past: bool) -> tuple[int, ...]:
    """Return the shape of a time series: its steps, and its channels if it has any."""
    channels = first_of(i.config, "num_input_channels")
    steps = i.config.context_length if past else i.config.prediction_length
    if channels is not None:
        return steps, channels
    # Without channels, a model looks back from each step of the context, as far as its largest lag.
    return (steps + max(i.config.lags_sequence) if past else steps,)


def _waves(i: BatchInputs) -> torch.Tensor:
    audio = i.part("audio_config")
    mels = first_of(audio, "num_mel_bins", "feature_size") or i.sizes.mels
    shapes = (
        (i.rows, i.samples()),
        (i.rows, 1, i.samples()),
        (i.rows, first_of(audio, "max_length") or i.sizes.frames, mels),
        (i.rows, mels, i.sizes.frames),
    )
    return i.floats(*shapes[i.layout_of("input_values")])


def _high_resolution(i: BatchInputs) -> torch.Tensor:
    """Return the same images for the second tower, which reads them at a size of its own."""
    size = first_of(i.part("high_res_vision_config"), "image_size") or i.sizes.pixels
    return i.floats(i.rows, i.image_shape()[0], size, size)


def _embeddings(i: BatchInputs) -> torch.Tensor | None:
    """Return embedded tokens for a tower that is given nothing else."""
    if "input_ids" in i.parameters or not i.requires("inputs_embeds"):
        return None
    return i.floats(i.rows, i.length, first_of(i.text, "hidden_size", "d_model", "n_embd"))


def _boxes_of_tokens(i: BatchInputs) -> torch.Tensor:
    low, high = i.integers(0, 32, i.rows, i.length, 2), i.integers(32, 64, i.rows, i.length, 2)
    return torch.cat([low, high], dim=-1)


def _mask(i: BatchInputs) -> torch.Tensor | None:
    """Return an attention mask. A model that reads only text gets one only for padded rows: it needs none otherwise."""
    if "input_ids" not in i.parameters or (i.reads_only_text and not i.sizes.padded):
        return None
    mask = i.ones(i.rows, i.length)
    if i.reads_only_text:
        mask[0, -i.length // 4 :] = 0
    return mask


def _position(i: BatchInputs) -> torch.Tensor | None:
    """Return positions of the answer to a question."""
    return i.integers(0, i.length, i.rows) if i.name.endswith("QuestionAnswering") else None


INPUTS: dict[str, Callable[[BatchInputs], Any]] = {
    "pixel_values": _pixel_values,
    "input_ids": lambda i: i.tokens(),
    "attention_mask": _mask,
    "bbox": _boxes_of_tokens,
    "image": lambda i: i.images(),
    "flattened_patches": lambda i: i.shares(i.rows, 16, i.config.vision_config.patch_embed_hidden_size + 2),
    "inputs_embeds": _embeddings,
    "high_res_pixel_values": _high_resolution,
    "task_inputs": lambda i: i.integers(1, i.vocab, i.rows, i.config.task_seq_len),
    # Speech encoder-decoders take either, and not both.
    "input_features": lambda i: None if "input_values" in i.parameters else i.floats(*_spectrogram_shape(i)),
    "input_values": _waves,
    "image_grid_thw": lambda i: i.rows_of(1, i.patches(), i.patches()),
    "grid_thw": lambda i: i.rows_of(1, i.patches(), i.patches()),
    "hidden_states": _patches_of_a_tower,
    "spatial_shapes": lambda i: i.rows_of(i.patches(), i.patches()),
    "pixel_position_ids": _places_of_patches,
    "image_position_ids": _places_of_patches,
    "pixel_attention_mask": _pixel_mask,
    "image_sizes": lambda i: None if i.layout_of("image_sizes") else i.rows_of(*i.image_shape()[1:]),
    "input_points": lambda i: i.shares(i.rows, 1, 2, 2) * i.sizes.pixels,
    "input_labels": lambda i: i.ones(i.rows, 1, 2),
    "decoder_input_ids": lambda i: i.tokens(),
    "qformer_input_ids": lambda i: i.tokens(
        min(i.length, first_of(i.part("qformer_config"), "max_position_embeddings") or i.length)
    ),
    "input_features_mask": _audio_mask,
    "feature_attention_mask": _audio_mask,
    "pixel_values_videos": _videos,
    "prompt_pixel_values": lambda i: i.images(),
    "prompt_masks": lambda i: i.images(),
    # Episodes of a decision transformer.
    "states": lambda i: i.floats(i.rows, _EPISODE, i.config.state_dim),
    "actions": lambda i: i.floats(i.rows, _EPISODE, i.config.act_dim) if "states" in i.parameters else None,
    "rewards": lambda i: i.floats(i.rows, _EPISODE, 1),
    "returns_to_go": lambda i: i.floats(i.rows, _EPISODE, 1),
    "timesteps": lambda i: i.integers(0, _EPISODE, i.rows, _EPISODE) if "states" in i.parameters else None,
    "visual_feats": lambda i: i.floats(i.rows, 10, i.config.visual_feat_dim),
    "visual_pos": lambda i: i.shares(i.rows, 10, 4),
    "past_values": lambda i: i.shares(i.rows, *_series(i, past=True)),
    "past_time_features": lambda i: i.shares(i.rows, _series(i, past=True)[0], 1),
    "past_observed_mask": lambda i: torch.ones_like(i.shares(i.rows, *_series(i, past=True))),
    "future_values": lambda i: i.shares(i.rows, *_series(i, past=False)),
    "future_time_features": lambda i: i.shares(i.rows, _series(i, past=False)[0], 1),
    "start_positions": _position,
    "end_positions": _position,
    "return_loss": lambda i: True,
}
"""Arguments of forward by name, and how to make each. One that returns None is left out."""

_EPISODE = 20

LAYOUTS: dict[str, int] = {
    "pixel_values": 5, "hidden_states": 4, "input_features": 7, "input_values": 4, "image_sizes": 2,
}  # fmt: skip
"""Arguments whose layout the signature does not tell (dimensions, or whether to pass them), and how many there are."""


def has_own_loss(model_class: type[torch.nn.Module]) -> bool:
    """Return whether the forward of a class computes a loss from our batches."""
    parameters = inspect.signature(model_class.forward).parameters
    if "labels" in parameters and any(re.search(pattern, model_class.__name__) for pattern, _ in LABELS):
        return True
    return "return_loss" in parameters or model_class.__name__.endswith("QuestionAnswering")


def reads_tokens(model_class: type[torch.nn.Module]) -> bool:
    """Return whether a class reads tokens."""
    return any(
        name in inspect.signature(model_class.forward).parameters
        for name in ("input_ids", "decoder_input_ids")
    )


def layouts(model: torch.nn.Module) -> Iterator[InputShapes]:
    """Yield every combination of layouts for the arguments of forward that have several."""
    ambiguous = [name for name in LAYOUTS if name in inspect.signature(model.forward).parameters]
    # The last factor of a product varies fastest. Reversed, that is the first argument.
    for numbers in itertools.product(*(range(LAYOUTS[name]) for name in reversed(ambiguous))):
        yield dict(zip(ambiguous, reversed(numbers), strict=True))


def make_batch(inputs: BatchInputs, *, labels: bool = True) -> dict[str, Any]:
    """Make a batch for the arguments of forward that are known."""
    batch: dict[str, Any] = {}
    made_labels = inputs.labels() if labels and "labels" in inputs.parameters else None
    absent = _read_by_absent_towers(inputs.config)
    for name, make in INPUTS.items():
        # The decoder's input is made of the labels where there are any.
        if name not in inputs.parameters or (name == "decoder_input_ids" and made_labels is not None):
            continue
        if name.startswith(absent):
            continue
        made = make(inputs)
        if made is not None:
            batch[name] = made
    # Placeholders last, since counting features runs a part of the model on the other arguments.
    if "input_ids" in batch:
        sounds = "input_features" in batch or "input_values" in batch
        kinds = [
            kind for kind, is_there in (("image", "pixel_values" in batch), ("audio", sounds)) if is_there
        ]
        _place(inputs, batch, kinds)
    if made_labels is not None:
        # Labels of a language model have the length of its tokens, which placeholders may have changed.
        same = "input_ids" in batch and _are_tokens(made_labels) and "TokenClass" not in inputs.name
        batch["labels"] = batch["input_ids"].clone() if same else made_labels
    return batch


_READ_BY = {
    "vision_config": ("pixel_", "image_"),
    "audio_config": ("input_features", "input_values", "feature_attention_mask"),
}  # fmt: skip


def _read_by_absent_towers(config: Any) -> tuple[str, ...]:
    """Return what the arguments of towers start with that a configuration has a place for, and leaves out."""
    absent = [name for name in _READ_BY if getattr(config, name, "") is None]
    return tuple(start for name in absent for start in _READ_BY[name])


def _are_tokens(labels: Any) -> bool:
    return isinstance(labels, torch.Tensor) and labels.ndim == 2 and not labels.is_floating_point()


def _place(inputs: BatchInputs, batch: dict[str, Any], kinds: Sequence[str]) -> None:
    """Put one placeholder token into each row for every feature that the model makes of an image or a sound.

    ``kinds`` are of ``"image"`` and ``"audio"``. A model without such a token or such features is left alone.
    """
    tokens = {kind: token for kind in kinds if (token := _placeholder(inputs, batch, kind)) is not None}
    if not tokens:
        return
    # The row is made longer if it has no room for the placeholders and some text.
    count = sum(inputs.features[kind] for kind in tokens)
    inputs.length = max(inputs.sizes.tokens, count + _TEXT_BESIDES)
    batch["input_ids"] = ids = inputs.tokens()
    # Some text comes before the placeholders, and between those of an image and a sound; the rest behind them.
    begin = _TEXT_BEFORE
    # Text has none of them, by chance either: as many as there are features are accepted.
    text = next(other for other in range(len(tokens) + 1) if other not in tokens.values())
    ids[torch.isin(ids, ids.new_tensor(list(tokens.values())))] = text
    for kind, token in tokens.items():
        ids[:, begin : begin + inputs.features[kind]] = token
        begin += inputs.features[kind] + _TEXT_BEFORE
    if "attention_mask" in batch:
        batch["attention_mask"] = torch.ones_like(ids)
    # Some forwards are also told which tokens are placeholders.
    if "mm_token_type_ids" in inputs.parameters:
        batch["mm_token_type_ids"] = sum((ids == token).long() for token in tokens.values())
    if "token_type_ids" in inputs.parameters and "image" in tokens:
        batch["token_type_ids"] = (ids == tokens["image"]).long()


def _placeholder(inputs: BatchInputs, batch: Mapping[str, Any], kind: str) -> int | None:
    """Return the token that stands for a feature, and count the features; None if the model has none."""
    owner = _maker_of_features(inputs.model, kind)
    if owner is None:
        return None
    token: int | None = first_of(inputs.config, f"{kind}_token_id", f"{kind}_token_index")
    # A model around a model, such as ColPali, has the token in the configuration of the inner one.
    if token is None:
        token = first_of(getattr(owner, "config", None), f"{kind}_token_id", f"{kind}_token_index")
    if token is None:
        return None
    # Counted once: batches of other sizes have as many in each row.
    if kind not in inputs.features:
        features_of = getattr(type(owner), f"get_{kind}_features")
        accepted = inspect.signature(features_of).parameters
        given = {k: v for k, v in batch.items() if k in accepted}
        made = inputs.run(owner, given, lambda model, given: _number_of(features_of(model, **given)))
        inputs.features[kind] = made // inputs.rows
    return token


def _maker_of_features(model: torch.nn.Module, kind: str) -> Any:
    """Return the module that makes features of images or sounds: the model, or a model inside of it (ColPali)."""
    return next((part for part in model.modules() if hasattr(type(part), f"get_{kind}_features")), None)


def _number_of(features: Any) -> int:
    # One tensor or several, bare or in an output of transformers. Its last dimension is the size of a feature.
    features = getattr(features, "pooler_output", features)
    features = features if isinstance(features, (list, tuple)) else [features]
    return sum(f.numel() // f.shape[-1] for f in features if isinstance(f, torch.Tensor))


_TEXT_BESIDES, _TEXT_BEFORE = 16, 4
"""The least number of tokens of text beside the placeholders, and of those before them."""


def without_data(
    model: torch.nn.Module, arguments: Mapping[str, Any], call: Callable[[torch.nn.Module, Any], Any]
) -> Any:
    """Call the model on fake tensors, and return the result, which must hold none of these tensors."""
    import sacplan

    seen: list[Any] = []

    def watched(model: torch.nn.Module, arguments: Any) -> Any:
        seen.append(call(model, arguments))

    # torch logs what its fake kernels refuse, such as a layout that the model does not read.
    with warnings.catch_warnings(), without_a_log("torch._subclasses.fake_tensor"):
        warnings.simplefilter("ignore")  # the profile reports what it assumes
        # Any GPU: to learn the workspaces of kernels on a CPU, ops would run on real tensors of these sizes.
        sacplan.profile(model, dict(arguments), watched, mode="inference", device="h100")
    return seen[-1]


def find(model: torch.nn.Module, sizes: BatchDimensions, place: str, dtype: torch.dtype) -> FoundBatch:
    """Find a batch that the model runs with, with labels if it takes any.

    Args:
        model: with or without weights.
        sizes: of the batch. A sample gets more tokens if its placeholders need them.
        place: the device of the batch.
        dtype: of its floats.

    Raises:
        NoBatch: there is none.
    """
    errors: list[str] = []
    # With labels first: a batch with a loss is worth more than one that runs sooner.
    for labels in (True, False):
        for layout in layouts(model):
            inputs = BatchInputs(model, sizes, place, dtype, layout)
            try:
                batch = make_batch(inputs, labels=labels)
                if not batch.keys() - {"labels", "return_loss"}:
                    raise NoBatch(
                        f"none of the arguments of its forward is known: {', '.join(inputs.parameters)}"
                    )
                tokens = inputs.length if "input_ids" in batch or "decoder_input_ids" in batch else None
                if tokens is None and _are_tokens(batch.get("labels")) and reads_tokens(type(model)):
                    tokens = inputs.length
                # Counting the features ran the part that reads the input, so its layout is right.
                tried = inputs.features and "image_sizes" not in batch
                # No need to run the whole forward: text has one layout, and that of other inputs has been
                # tried.
                if "labels" in batch and (inputs.reads_only_text or tried):
                    return FoundBatch(batch, layout, inputs.features, tokens, True)
                has_loss = without_data(model, batch, _has_loss)
            except Exception as error:  # an architecture may raise anything; another layout may still work
                errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            return FoundBatch(batch, layout, inputs.features, tokens, has_loss)
    # The first error is that of the most likely layout, with labels.
    raise NoBatch(errors[0])


def _has_loss(model: torch.nn.Module, batch: Any) -> bool:
    """Return whether the output has a loss.

    Raises:
        NoBatch: it has no float tensor, so there is nothing to sum up either.
    """
    output = call_model(model, batch)
    loss = getattr(output, "loss", None)
    output = dict(output) if isinstance(output, Mapping) else output
    # Without a loss the sum of the outputs is trained, which needs a float.
    if not any(isinstance(t, torch.Tensor) and t.is_floating_point() for t in tree_leaves(output)):
        raise NoBatch("its output holds no float tensor")
    return loss is not None or (isinstance(output, dict) and output.get("loss") is not None)


def make(
    model: torch.nn.Module, found: FoundBatch, sizes: BatchDimensions, place: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Make a batch of another size, with the layouts of the one that was found."""
    sizes = replace(sizes, tokens=found.tokens or sizes.tokens)
    inputs = BatchInputs(model, sizes, place, dtype, found.layout, found.features)
    return make_batch(inputs, labels="labels" in found.batch)
