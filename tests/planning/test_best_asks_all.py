"""The default solver asks all the others: none goes below its smallest peak, or is cheaper at it."""

from __future__ import annotations

import pytest
import torch

import sacplan

pytest.importorskip("transformers")

import transformers

from benchmarks.models import hf_models

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.SacplanWarning")


def test_no_solver_is_cheaper_at_the_smallest_peak_of_another() -> None:
    """Where milp reaches its smallest peak, it runs whole stages of convolutions again; Rotor keeps some of them."""
    with torch.device("meta"):
        config = transformers.ResNetConfig(num_labels=1000)
        model = transformers.ResNetForImageClassification(config).bfloat16()
        images = torch.empty(64, 3, 224, 224, dtype=torch.bfloat16)
    batch = {"pixel_values": images, "labels": torch.zeros(64, dtype=torch.long)}
    profile = sacplan.profile(model, batch, optimizer=torch.optim.SGD, device="h100")
    budget = f"{sacplan.plan(profile, 'smallest', 'milp').peak_bytes}B"
    costs = {
        solver: sacplan.plan(profile, budget, solver).recompute_ms for solver in ("milp", "rotor", "best")
    }
    assert costs["best"] == costs["rotor"] < costs["milp"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_no_solver_goes_below_the_default_on_a_convnext() -> None:
    """Depthwise convolutions between residual sums: a chain, for which Rotor is strong."""
    model, batch, loss_fn = hf_models.build("convnext", "small", "meta")
    profile = sacplan.profile(model, batch, loss_fn, torch.optim.AdamW, device="cpu")
    smallest = sacplan.plan(profile, "smallest").peak_bytes
    for solver in ("milp", "greedy", "rotor"):
        assert sacplan.plan(profile, "smallest", solver).peak_bytes >= smallest
    assert sacplan.plan(profile, f"{smallest}B").peak_bytes == smallest
    with pytest.raises(sacplan.InfeasibleBudget) as info:
        sacplan.plan(profile, f"{smallest - 1}B")
    assert info.value.smallest_feasible_bytes == smallest
    assert "solver=" not in str(info.value)
