"""Candidates: decisions, and what is said of the step with them."""

from __future__ import annotations

import pytest
import torch

import sacplan
from sacplan._plan.candidate import Candidate
from sacplan._plan.make import MadeBy, plan_by_hand
from sacplan._program.decisions import Chunk, Offload, as_decisions
from sacplan._program.liveness import footprint_of
from sacplan._technique.step import PlanStep
from sacplan._techniques import rewritten
from tests.zoo.language_models import LM, cross_entropy, tokens

ALL = ("recompute", "chunk", "offload")


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    with torch.device("meta"):
        model = LM(layers=2, dim=32, vocab=256)
    return sacplan.profile(model, tokens(8, 64, 256), cross_entropy, device="h100 without workspaces")


@pytest.mark.parametrize("techniques", [ALL, ("recompute",), ("chunk",), ("offload",)])
def test_a_plan_has_the_figures_of_the_rewritten_program(
    profile: sacplan.Profile, techniques: tuple[str, ...]
) -> None:
    """Worked out here without a candidate: folds, and sums over the ops that run."""
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=techniques)
    assert plan.decisions
    program = rewritten(profile.program, plan.decisions, profile.spec)
    found = footprint_of(program)
    assert (plan.peak_bytes, plan.host_bytes) == (found.peak_bytes, found.host_peak_bytes)
    assert plan.recompute_ms == found.recompute_ms
    more_ms = program.step_ms - profile.step_ms - found.recompute_ms
    assert plan.added_ms == pytest.approx(more_ms, abs=1e-9)
    assert 0 <= plan.lower_bound_ms <= plan.recompute_ms
    assert plan.lower_bound_ms == 0 or not plan.offloaded


def test_units_see_the_ops_that_slices_leave(profile: sacplan.Profile) -> None:
    decisions = sacplan.plan(profile, "smallest", "greedy", techniques=ALL).decisions
    chunks = [one for one in decisions if isinstance(one, Chunk)]
    away = [one for one in decisions if isinstance(one, Offload)]
    assert chunks
    assert away
    found = Candidate(PlanStep(profile.program, device=profile.spec), decisions, "feasible")
    assert [technique.name for technique in found.techniques] == ["chunk", "recompute", "offload"]
    assert found.left is rewritten(profile.program, chunks, profile.spec)
    assert not found.only_recomputes


def test_a_unit_around_several_sharded_modules_is_refused(profile: sacplan.Profile) -> None:
    rank = profile.on_ranks(sacplan.FSDP2(2, ["layers.0", "layers.1", ""]))
    (call,) = rank.program.calls[""]
    site = next(site for op, site in rank.program.sites(call).items() if rank.program.ops[op].recomputable)
    with pytest.raises(sacplan.PlanError, match=r"unit '' is around several modules .* one by one"):
        plan_by_hand(rank, as_decisions({"": {site: 1}}), MadeBy("by hand"))
    assert plan_by_hand(profile, as_decisions({"": {site: 1}}), MadeBy("by hand")).units
