"""The default solver asks all the others: its error names none that holds the budget."""

from __future__ import annotations

import pytest
import torch

import sacplan

pytest.importorskip("transformers")

from benchmarks.models import hf_models

pytestmark = pytest.mark.filterwarnings("ignore::sacplan.SacplanWarning")


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
