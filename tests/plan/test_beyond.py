"""The default of ``plan``: every technique that keeps the bits, and a line on what others would save."""

from __future__ import annotations

import json

import pytest
import torch

import sacplan
from sacplan._techniques import DEFAULT_TECHNIQUES, TECHNIQUES
from tests.zoo.language_models import LM, cross_entropy, tokens


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    """A step whose logits are most of its memory, so that a loss in slices saves a lot."""
    with torch.device("meta"):
        model = LM(layers=4, dim=128, vocab=16384, dropout=0.0)
    return sacplan.profile(model, tokens(8, 256, 16384), cross_entropy, device="h100")


def saved_ms(plan: sacplan.Plan) -> float:
    """The figure in the line."""
    (line,) = plan.beyond
    return float(line.split("the step takes ")[1].split(" ms less")[0])


def added(plan: sacplan.Plan) -> float:
    return plan.recompute_ms + plan.added_ms


def test_the_default_is_what_keeps_the_bits() -> None:
    assert {"recompute"} <= set(DEFAULT_TECHNIQUES) <= set(TECHNIQUES)
    for name, technique in TECHNIQUES.items():
        assert (technique.keeps_bits and not technique.takes_host) == (name in DEFAULT_TECHNIQUES)
    assert "chunk" not in DEFAULT_TECHNIQUES  # gradients are added up slice by slice


def test_a_line_says_what_other_techniques_would_save(profile: sacplan.Profile) -> None:
    smallest = sacplan.plan_smallest(profile).peak_bytes
    budget = f"{(smallest + profile.peak_bytes) // 2}B"
    plan, both = (
        sacplan.plan(profile, budget),
        sacplan.plan(profile, budget, techniques=("recompute", "chunk")),
    )
    assert plan.provenance.techniques == DEFAULT_TECHNIQUES
    assert saved_ms(plan) == pytest.approx(added(plan) - added(both), rel=1e-3)
    assert plan.beyond[0].endswith("its gradients are close, not bit-equal")
    assert plan.beyond[0] in " ".join(str(plan).split())
    # The decisions are those of recomputation alone, and the line is no part of them.
    alone = sacplan.plan(profile, budget, techniques=("recompute",))
    assert plan == alone
    assert not alone.beyond


def test_no_line_where_there_is_little_to_save(profile: sacplan.Profile) -> None:
    assert not sacplan.plan(profile, "100%").beyond
    assert not sacplan.plan(profile, f"{profile.peak_bytes - 1}B").beyond


def test_the_line_is_saved_with_the_plan(profile: sacplan.Profile, tmp_path: object) -> None:
    path = f"{tmp_path}/plan.json"
    plan = sacplan.plan(profile, "93%")
    plan.save(path)
    assert sacplan.Plan.load(path).beyond == plan.beyond
    with open(path) as file:
        assert json.load(file)["provenance"].get("beyond", []) == list(plan.beyond)
