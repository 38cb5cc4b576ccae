"""Denoisers of diffusers by name: small ones of each kind are measured, and what cannot be made is an error."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import sacplan
from sacplan.cli.targets import load_target
from sacplan.integrations.hf.target import ModelOptions, TargetError

pytest.importorskip("diffusers")

from sacplan.integrations import diffusers
from tests.support.slow import slow_after

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


@pytest.mark.parametrize(
    ("name", "lora"),
    slow_after(1, [*((name, "r=2") for name in sorted(SMALL, key="LTX-Video".__ne__)), ("FLUX.1-dev", None)]),
)
def test_small_ones_take_what_is_predicted(
    name: str, lora: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, config = SMALL[name]
    table = copy.deepcopy(diffusers.known())
    (spec,) = (spec for full, spec in table.items() if full.endswith(f"/{name}"))
    spec["config"] |= config
    monkeypatch.setattr(diffusers, "known", lambda: table)
    options = ModelOptions(dtype="float32", lora=lora)
    made = load_target(f"diffusers:{name}@{size}", options, "cpu")
    asked = (made.model, made.batch, made.loss_fn, made.optimizer)
    plan = sacplan.plan(sacplan.profile(*asked, device="cpu"), "smallest")
    seen = sacplan.verify(made.model, made.batch, plan, made.loss_fn, made.optimizer, run="real")
    assert seen.peak_bytes == plan.peak_bytes
    assert plan.peak_bytes <= plan.baseline_peak_bytes
    assert made.facts["size"] == size
    assert (made.facts.get("trained", 0) > 0) == (lora is not None)


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("FLUX.1-de", {}, "Did you mean diffusers:black-forest-labs/FLUX.1-dev"),
        ("FLUX.1-dev@100x100", {}, "multiples of 16"),
        ("FLUX.1-dev@512x512x9", {}, "it makes images"),
        ("LTX-Video@512x512x10", {}, "a multiple of 8, and one more"),
        ("LTX-Video@big", {}, "is no size"),
        ("FLUX.1-dev", {"seq": 512}, "--seq is not for"),
        ("FLUX.1-dev@64x64", {"lora": "r=4,targets=nothing"}, "--lora r=4,targets=nothing"),
    ],
)
def test_what_is_not_known(target: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(TargetError, match=said):
        load_target(f"diffusers:{target}", ModelOptions(**options))
