"""``plan``: the closed loop, exactly reachable choices, files."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sacplan
from sacplan._plan.replay import replay
from sacplan._solve.solvers import unit_families
from tests.models import LM, cross_entropy, tokens


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    with torch.device("meta"):
        model = LM(layers=4, dim=128, vocab=1000)
    return sacplan.profile(model, tokens(8, 128, 1000), loss_fn=cross_entropy, device="h100")


@pytest.mark.parametrize("solver", ["best", "milp", "lagrangian"])
def test_plans_hold_and_are_monotone(profile: sacplan.Profile, solver: str) -> None:
    smallest = sacplan.plan_smallest(profile, solver).peak_bytes
    last_ms = float("inf")
    for i in range(9):
        budget = smallest + (profile.peak_bytes - smallest) * i // 8
        plan = sacplan.plan(profile, f"{budget}B", solver)
        assert plan.peak_bytes <= budget
        assert plan.peak_bytes == replay(profile.recording, plan.decisions).peak_bytes
        if solver == "best":
            assert plan.recompute_ms <= last_ms * 1.05
        last_ms = plan.recompute_ms
    assert plan.recompute_ms == 0
    assert plan.status == "unplanned"


def test_the_peak_is_that_of_a_real_fake_step(profile: sacplan.Profile) -> None:
    with torch.device("meta"):
        model = LM(layers=4, dim=128, vocab=1000)
    for budget in ("85%", "65%"):
        plan = sacplan.plan(profile, budget)
        seen = sacplan.verify(model, tokens(8, 128, 1000), plan, loss_fn=cross_entropy)
        assert seen.peak_bytes == plan.peak_bytes
        assert seen.within_budget
        assert seen.recompute_flops == plan.recompute_flops


def test_budgets_are_gib_text_or_shares(profile: sacplan.Profile) -> None:
    by_share = sacplan.plan(profile, "75%")
    by_bytes = sacplan.plan(profile, f"{by_share.budget_bytes}B")
    by_gib = sacplan.plan(profile, by_share.budget_bytes / 2**30)
    assert by_share.budget_bytes == profile.peak_bytes * 3 // 4
    assert by_share == by_bytes == by_gib


def test_same_input_same_plan(profile: sacplan.Profile) -> None:
    fresh = dataclasses.replace(profile)  # nothing cached
    assert sacplan.plan(fresh, "70%") == sacplan.plan(profile, "70%")


def test_units_take_points_that_they_reach_exactly(profile: sacplan.Profile) -> None:
    plan = sacplan.plan(profile, "70%", solver="milp")
    for fqn, unit in plan.units.items():
        points = {(p.discard_ratio, p.discarded) for p in profile.tradeoffs[fqn].points}
        assert (unit.discard_ratio, unit.discarded) in points
        assert not set(unit.discarded) & set(unit.kept)
    assert set(plan.op_decisions.values()) == {"keep", "discard"}
    assert plan.recompute_ms == pytest.approx(sum(u.recompute_ms for u in plan.units.values()))


def test_repeated_layers_have_the_same_points(profile: sacplan.Profile) -> None:
    middle = [profile.tradeoffs[f"layers.{i}"] for i in (1, 2)]
    assert middle[0].points == middle[1].points
    assert middle[0].points


def test_unit_families_do_not_nest(profile: sacplan.Profile) -> None:
    families = unit_families(profile)
    assert families[0] == ("",)
    assert {f"layers.{i}" for i in range(4)} <= set(families[1])
    for family in families[1:]:
        assert not any(a != b and a.startswith(b + ".") for a in family for b in family)


def test_files(profile: sacplan.Profile, tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = sacplan.plan(profile, "70%")
    plan.save(tmp_path / "plan.json")
    assert sacplan.Plan.load(tmp_path / "plan.json") == plan
    for name in ("profile.json", "profile.json.gz"):
        profile.save(tmp_path / name)
        loaded = sacplan.Profile.load(tmp_path / name)
        assert loaded == profile
        assert sacplan.plan(loaded, "70%") == plan
    assert (tmp_path / "profile.json.gz").stat().st_size < (tmp_path / "profile.json").stat().st_size / 3


def test_plans_are_frozen(profile: sacplan.Profile) -> None:
    plan = sacplan.plan(profile, "70%")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.peak_bytes = 0  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan.units["x"] = None  # type: ignore[index]


def test_frontier(profile: sacplan.Profile) -> None:
    frame = sacplan.frontier(profile, points=4)
    assert set(frame["solver"]) == {"best", "milp", "lagrangian"}
    assert (frame["peak_bytes"] <= frame["budget_bytes"]).all()
    best = frame[frame["solver"] == "best"].set_index("budget_bytes")["recompute_ms"]
    for row in frame.itertuples():
        if row.budget_bytes in best.index:
            assert best[row.budget_bytes] <= row.recompute_ms + 1e-9


def test_the_smallest_plan_for_a_solver_that_proposes_nothing(profile: sacplan.Profile) -> None:
    with pytest.raises(sacplan.InfeasibleBudget) as info:
        sacplan.plan(profile, "1KiB", solver=sacplan.Lagrangian(level=2))
    smallest = info.value.smallest_feasible_bytes
    assert sacplan.plan(profile, f"{smallest}B", solver=sacplan.Lagrangian(level=2)).peak_bytes <= smallest
