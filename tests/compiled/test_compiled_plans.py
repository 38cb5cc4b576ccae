"""A plan for a compiled step holds its budget compiled, which a dry run of the step with the plan shows."""

from __future__ import annotations

from pathlib import Path

import pytest

import sacplan
from sacplan.errors import PlanError
from tests.compiled.test_compiled_steps import BATCH, model, profile_of
from tests.zoo.language_models import cross_entropy


@pytest.mark.parametrize("blocks", [False, True])
def test_a_plan_holds_its_budget_compiled(blocks: bool) -> None:
    profile = profile_of(blocks)
    plan = sacplan.plan(profile, "80%")
    assert plan.decisions
    assert plan.peak_bytes <= plan.budget_bytes == int(0.8 * profile.peak_bytes)
    assert sacplan.verify(model(), BATCH, plan, cross_entropy).peak_bytes == plan.peak_bytes
    real = sacplan.verify(model(), BATCH, plan, cross_entropy, run="real")
    assert real.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


def test_a_budget_that_no_compiled_step_holds_is_infeasible() -> None:
    with pytest.raises(sacplan.InfeasibleBudget, match="compiled step") as error:
        sacplan.plan(profile_of(True), "30%")
    assert 0.3 < error.value.smallest_feasible_bytes / profile_of(True).peak_bytes < 1


def test_a_profile_from_a_file_has_no_model_to_run(tmp_path: Path) -> None:
    profile_of(True).save(tmp_path / "profile.json")
    loaded = sacplan.Profile.load(tmp_path / "profile.json")
    assert loaded == profile_of(True)
    with pytest.raises(PlanError, match="has no model"):
        sacplan.plan(loaded, "80%")
