"""The whole road, profile to verify, on Hugging Face architectures: a GPU that is not there, this CPU."""

from __future__ import annotations

import pytest
import torch

import sacplan

pytest.importorskip("transformers")

from benchmarks.harness.plans import plan_or_smallest
from benchmarks.models import hf_models
from tests.support.slow import slow_after

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")


@pytest.mark.parametrize(
    "name", slow_after(1, [*hf_models.EIGHT, "llama+lora", "llama+frozen", "llama+accumulation"])
)
def test_plan_holds_on_an_h100(name):
    torch.manual_seed(0)
    model, batch, loss_fn = hf_models.build(name, "small", "meta", torch.bfloat16)
    profile = sacplan.profile(model, batch, loss_fn=loss_fn, device="h100")
    plan, _ = plan_or_smallest(profile, "75%")
    result = sacplan.verify(model, batch, plan, loss_fn=loss_fn)
    assert result.within_budget
    assert result.peak_bytes == plan.peak_bytes < profile.peak_bytes
    assert result.recompute_flops == plan.recompute_flops


def test_smallest_feasible_budget_works():
    model, batch, _ = hf_models.build("vit", "small", "meta", torch.bfloat16)
    profile = sacplan.profile(model, batch)
    with pytest.raises(sacplan.InfeasibleBudget) as caught:
        sacplan.plan(profile, "10%")
    plan = sacplan.plan(profile, f"{caught.value.smallest_feasible_bytes}B")
    assert sacplan.verify(model, batch, plan).peak_bytes <= caught.value.smallest_feasible_bytes
