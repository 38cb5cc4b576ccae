"""Small denoisers of diffusers, of each kind that has a name."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

from sacplan.cli.targets import Target, load_target
from sacplan.integrations import diffusers
from sacplan.integrations.hf.target import ModelOptions

_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "FLUX.1-dev": ("64x64", _HEADS | {"num_layers": 1, "num_single_layers": 1, "axes_dims_rope": (4, 6, 6)}),
    "stable-diffusion-3.5-large": ("64x64", _HEADS | {"num_layers": 2, "caption_projection_dim": 32}),
    "stable-diffusion-xl-base-1.0": (
        "64x64",
        {
            "block_out_channels": [32, 64, 64],
            "transformer_layers_per_block": [1, 1, 1],
            "attention_head_dim": [2, 2, 2],
            "layers_per_block": 1,
        },
    ),
    "Wan2.1-T2V-14B-Diffusers": ("64x32x5", _HEADS | {"num_layers": 2, "ffn_dim": 64}),
    "LTX-Video": ("64x64x9", _HEADS | {"num_layers": 2, "cross_attention_dim": 32}),
    "Qwen-Image": ("64x64", _HEADS | {"num_layers": 2, "axes_dims_rope": (4, 6, 6)}),
    "HunyuanVideo": (
        "64x64x5",
        _HEADS
        | {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "rope_axes_dim": (4, 6, 6)},
    ),
}


def small_denoiser(name: str, options: ModelOptions) -> Target:
    """Return a denoiser with its batch, on the CPU."""
    size, config = SMALL[name]
    table = copy.deepcopy(diffusers.known())
    (spec,) = (spec for full, spec in table.items() if full.endswith(f"/{name}"))
    spec["config"] |= config
    with mock.patch.object(diffusers, "known", return_value=table):
        return load_target(f"diffusers:{name}@{size}", options, "cpu")
