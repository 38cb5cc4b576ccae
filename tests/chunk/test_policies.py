"""Plans whose loss runs in slices, and everything that reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sacplan
from sacplan.errors import PlanError
from tests.support.chunks import loss_in_slices
from tests.zoo.language_models import LM
from tests.zoo.language_models import cross_entropy as loss_fn
from tests.zoo.layers import FromFunction

VOCAB = 3001
BOTH = ("recompute", "chunk")


def cumulated() -> nn.Module:
    """All that comes behind the head reads along both dimensions."""
    return FromFunction(lambda self, x: self.head(x).cumsum(1).cumsum(0), head=nn.Linear(8, 8))


def batch() -> torch.Tensor:
    return torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> LM:
    torch.manual_seed(0)
    return LM(layers=2, dim=32, heads=2, vocab=VOCAB, dropout=0.0)


@pytest.fixture(scope="module")
def profile(model: LM) -> sacplan.Profile:
    return sacplan.profile(model, batch(), loss_fn, device="cpu")


@pytest.fixture(scope="module")
def sliced(profile: sacplan.Profile) -> sacplan.Plan:
    return loss_in_slices(profile, 8)


# --- what reads a plan


def test_a_profile_shows_the_step_with_a_plan(profile: sacplan.Profile, sliced: sacplan.Plan) -> None:
    for plan in (sliced, sliced.decisions):
        assert profile.footprint(plan).peak_bytes == sliced.peak_bytes
        assert profile.timeline(plan)["total_bytes"].max() == sliced.peak_bytes
    recomputed = sacplan.plan(profile, "97%")
    assert recomputed.discarded
    for same in (recomputed, recomputed.decisions, recomputed.discarded):
        assert profile.footprint(same).peak_bytes == recomputed.peak_bytes
    assert profile.timeline()["total_bytes"].max() == profile.peak_bytes
    for wrong in ("70%", 7, ["head"]):
        with pytest.raises(PlanError, match="this takes a plan"):
            profile.footprint(wrong)  # type: ignore[arg-type]


# --- surveys


@pytest.mark.slow
def test_a_frontier_with_chunks_goes_lower(profile: sacplan.Profile) -> None:
    plain = sacplan.frontier(profile, 2, ["greedy"])
    chunked = sacplan.frontier(profile, 5, ["greedy"], techniques=BOTH)
    solved = chunked[chunked["status"] != "policy"]
    assert solved["peak_bytes"].min() < plain[plain["status"] != "policy"]["peak_bytes"].min()
    assert (solved["peak_bytes"] <= solved["budget_bytes"]).all()
    assert not plain["added_ms"].any()
    costs = solved.sort_values("budget_bytes").eval("recompute_ms + added_ms").tolist()
    assert len(set(costs)) > 2  # between the extremes, fewer slices where fewer will do
    assert costs == sorted(costs, reverse=True)
    assert (solved["added_share"] == solved["added_ms"] / profile.step_ms).all()


@pytest.mark.slow
def test_larger_batches_fit_with_chunks(model: LM) -> None:
    def make(n: int) -> torch.Tensor:
        return torch.zeros(n, 32, dtype=torch.long)

    how = {"loss_fn": loss_fn, "device": "cpu", "solver": "greedy", "at_most": 6}
    plain = sacplan.max_batch(model, make, "2.5MiB", **how)  # type: ignore[arg-type]
    chunked = sacplan.max_batch(model, make, "2.5MiB", techniques=BOTH, **how)  # type: ignore[arg-type]
    assert chunked.batch_size > plain.batch_size
    assert chunked.plan.peak_bytes <= 2.5 * 2**20
    plan, point = chunked.plan, {p.batch_size: p for p in chunked.points}[chunked.batch_size]
    assert plan.chunks
    assert plan.provenance.techniques == BOTH
    assert point.added_ms == plan.added_ms
    assert chunked.step_ms == plan.planned_ms
    assert all(p.floor_bytes <= p.peak_bytes for p in chunked.points if p.peak_bytes is not None)
    assert "ms for chunks" in repr(chunked)
    with pytest.raises(PlanError, match="unknown technique 'slice'"):
        sacplan.max_batch(model, make, "2.5MiB", techniques=("slice",), device="cpu")


# --- reports


@pytest.fixture(scope="module")
def both(profile: sacplan.Profile) -> sacplan.Plan:
    """A plan that recomputes and runs the loss in slices."""
    found = sacplan.plan(profile, "smallest", "greedy", techniques=BOTH)
    assert found.discarded
    assert found.chunks
    return found


def test_what_is_alive_with_chunks_adds_up(
    profile: sacplan.Profile, sliced: sacplan.Plan, both: sacplan.Plan
) -> None:
    for plan in (sliced, both):
        assert sacplan.Report(profile, plan).alive_at_peak(None)["bytes"].sum() == plan.peak_bytes
        assert profile.timeline(plan)["ms"].sum() == pytest.approx(plan.planned_ms)
    assert "generator state" not in set(sacplan.Report(profile, sliced).alive_at_peak(None)["kind"])


def test_the_module_table_tells_slices_from_recomputation(
    profile: sacplan.Profile, sliced: sacplan.Plan, both: sacplan.Plan
) -> None:
    alone, mixed = (sacplan.Report(profile, plan).module_table() for plan in (sliced, both))
    assert alone.loc["head", "why"] == "in slices"
    assert alone.loc["(outside the model)", "why"] == "in slices"
    assert not alone["discarded_bytes"].any()
    assert mixed["recompute_ms"].sum() == pytest.approx(both.recompute_ms)
    assert mixed["discarded_bytes"].any()
    assert mixed["forward_ms"].sum() == pytest.approx(profile.with_plan(both.chunks).forward_ms)


def test_the_page_says_why_nothing_runs_in_slices() -> None:
    profile = sacplan.profile(cumulated(), torch.randn(4, 8, 8), device="cpu")
    page = sacplan.Report(profile, sacplan.plan(profile, "100%", techniques=BOTH)).html
    assert "Why the loss does not" in page
    assert "from head on: " in page


def test_reports_in_inference(model: LM) -> None:
    profile = sacplan.profile(model, batch(), device="cpu", mode="inference")
    plan = sacplan.plan(profile, "smallest")
    assert plan.chunks
    assert sacplan.Report(profile, plan).alive_at_peak(None)["bytes"].sum() == plan.peak_bytes
    assert "in slices" in set(sacplan.Report(profile, plan).module_table()["why"])
    page = sacplan.Report(profile, plan, sacplan.frontier(profile, 2)).html
    assert "The output is close" in page
    assert "a stretch of" in page
    assert "Gradients" not in page


def test_plans_leave_what_is_pinned_out_of_slices(profile: sacplan.Profile) -> None:
    for pins in ({"never": ["head"]}, {"keep": ["aten._log_softmax"]}):
        found = sacplan.plan(profile, "smallest", "greedy", techniques=BOTH, **pins)  # type: ignore[arg-type]
        assert "head" not in [chunk.unit for chunk in found.chunks]
        assert found.peak_bytes > profile.peak_bytes // 2
    assert sacplan.plan(profile, "smallest", "greedy", techniques=BOTH, never=["layers.0"]).chunks
