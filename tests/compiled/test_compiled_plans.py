"""A plan for a compiled step holds its budget compiled, which a dry run of the step with the plan shows."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import sacplan
from sacplan.errors import PlanError
from tests.compiled.test_compiled_steps import BATCH, BLOCKS, WHOLE, model, profile_of
from tests.zoo.language_models import cross_entropy, tokens
from tests.zoo.layers import FromFunction


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_a_plan_holds_its_budget_compiled(blocks: bool) -> None:
    profile = profile_of(blocks)
    plan = sacplan.plan(profile, "80%")
    assert plan.decisions
    assert plan.peak_bytes <= plan.budget_bytes == int(0.8 * profile.peak_bytes)
    assert sacplan.verify(model(), BATCH, plan, cross_entropy).peak_bytes == plan.peak_bytes
    real = sacplan.verify(model(), BATCH, plan, cross_entropy, run="real")
    assert real.peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


@pytest.mark.slow
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


def test_a_policy_has_the_peak_of_the_compiled_step() -> None:
    profile = profile_of(True)
    full = sacplan.policy("full", profile=profile)
    assert full.status == "policy"
    assert profile.footprint(full).peak_bytes == full.peak_bytes == profile.timeline(full).total_bytes.max()
    assert full.peak_bytes < profile.peak_bytes
    with pytest.raises(PlanError, match="not decisions of one"):
        profile.footprint(full.decisions)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_reports_and_frontiers_are_those_of_the_compiled_step(tmp_path: Path) -> None:
    profile = profile_of(True)
    full = sacplan.policy("full", profile=profile)
    assert sacplan.verify(model(), BATCH, full, cross_entropy).peak_bytes == full.peak_bytes
    sacplan.write_report(tmp_path / "report.html", profile, full)
    assert "compiled layers.*" in (tmp_path / "report.html").read_text()
    frontier = sacplan.frontier(profile, 2, policies=False)
    assert list(frontier.peak_bytes) == [sacplan.plan(profile, "smallest").peak_bytes, profile.peak_bytes]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_fit_says_whether_the_compiled_step_fits() -> None:
    found = sacplan.fit(
        model(), lambda n: tokens(n, 64), "cpu", cross_entropy, "sgd", "3MiB", batch=4, compile=BLOCKS
    )
    as_it_is, planned = found.rows
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    profile = sacplan.profile(model(), BATCH, cross_entropy, sgd, device="cpu", compile=BLOCKS)
    assert (as_it_is.peak_bytes, as_it_is.fits) == (profile.peak_bytes, False)
    assert (planned.peak_bytes, planned.fits) == (sacplan.plan(profile, "3MiB").peak_bytes, True)
    assert f"compile={BLOCKS!r}" in found.code
    with pytest.raises(PlanError, match="2 devices"):
        sacplan.fit(model(), lambda n: tokens(n, 64), devices=2, compile=True)


@pytest.mark.slow
def test_no_unit_of_a_plan_is_around_a_graph_break() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        x = x.sigmoid() * x.exp()  # an op of the model itself, which only a unit around all can run again
        torch._dynamo.graph_break()
        return self.down(x).sum()

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Sigmoid())

    found, x = FromFunction(forward, up=block(), down=block()), torch.randn(512, 16)
    profile = sacplan.profile(found, x, device="cpu", compile=WHOLE)
    assert "" in sacplan.plan(profile.uncompiled, "smallest").units
    plan = sacplan.plan(profile, "smallest")
    assert plan.units
    assert "" not in plan.units
    assert sacplan.verify(found, x, plan, run="real").peak_bytes == plan.peak_bytes
