"""Denoisers of diffusers by name: small ones of each kind are measured, and what cannot be made is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sacplan
from sacplan.cli.targets import load_target
from sacplan.integrations.hf.target import ModelOptions, TargetError

pytest.importorskip("diffusers")

from sacplan.errors import PlanError
from sacplan.integrations.diffusers import run_planned
from tests.support.denoisers import SMALL, small_denoiser
from tests.support.slow import slow_after
from tests.support.steps import bit_equal


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


@pytest.mark.parametrize("name", slow_after(1, sorted(SMALL)))
def test_a_plan_takes_the_place_of_its_checkpointing(name: str) -> None:
    made = small_denoiser(name, ModelOptions(dtype="float32"))
    asked = (made.model, made.batch, made.loss_fn)
    plan = sacplan.plan(sacplan.profile(*asked, device="cpu"), "smallest")

    def gradients() -> list[torch.Tensor]:
        made.model.zero_grad()
        torch.manual_seed(0)
        made.loss_fn(made.model, made.batch).backward()
        # As integers: a text that is all padding, as HunyuanVideo's is here, has gradients that are no numbers.
        return [p.grad.view(torch.int32) for p in made.model.parameters() if p.grad is not None]

    plain = gradients()
    made.model.enable_gradient_checkpointing()
    with pytest.raises(PlanError, match=r"model\.disable_gradient_checkpointing\(\)"):
        sacplan.apply(made.model, plan)
    made.model.enable_gradient_checkpointing(gradient_checkpointing_func=run_planned)
    with sacplan.apply(made.model, plan):
        assert bit_equal(gradients(), plain)
    made.model.zero_grad()
    seen = sacplan.verify(made.model, made.batch, plan, made.loss_fn, run="real")
    assert seen.peak_bytes == plan.peak_bytes <= plan.baseline_peak_bytes


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("FLUX.1-de", {}, "Did you mean 'diffusers:black-forest-labs/FLUX.1-dev'"),
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
