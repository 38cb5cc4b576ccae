"""The default solver asks all the others: none is cheaper at the smallest peak of another."""

from __future__ import annotations

import pytest
import torch

import sacplan

pytest.importorskip("transformers")

import transformers

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
