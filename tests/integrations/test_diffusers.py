"""Denoisers of diffusers by name: small ones of each kind are measured, and what cannot be made is an error."""

from __future__ import annotations

from typing import Any

import pytest

import sacplan
from sacplan.cli.targets import load_target
from sacplan.integrations.hf.target import ModelOptions, TargetError

pytest.importorskip("diffusers")

from tests.support.denoisers import SMALL, small_denoiser
from tests.support.slow import slow_after


@pytest.mark.parametrize(
    ("name", "lora"),
    slow_after(1, [*((name, "r=2") for name in sorted(SMALL, key="LTX-Video".__ne__)), ("FLUX.1-dev", None)]),
)
def test_small_ones_take_what_is_predicted(name: str, lora: str | None) -> None:
    made, size = small_denoiser(name, ModelOptions(dtype="float32", lora=lora)), SMALL[name][0]
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
