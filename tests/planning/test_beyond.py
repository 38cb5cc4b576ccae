"""The default of ``plan``: every technique that keeps the bits, and a line on what others would save."""

from __future__ import annotations

import json

import pytest
import torch

import sacplan
from sacplan.techniques.chunk import entries, rest
from sacplan.techniques.chunk.chunk_entry import ChunkSpan
from sacplan.techniques.chunk.entries import loss_chunks
from sacplan.techniques.chunk.families import Rewrite
from sacplan.techniques.registry import DEFAULT_TECHNIQUES, TECHNIQUES
from tests.support.steps import mean_square
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import Uneven


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
    smallest = sacplan.plan(profile, "smallest").peak_bytes
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


def test_slices_that_cannot_pay_are_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven layers on a CPU: two slices of the loss cost more than the recomputation that they would save."""
    rehearsed, rehearse = [], rest._rehearsed

    def noted(span: ChunkSpan, device: sacplan.DeviceSpec) -> Rewrite:
        found = rehearse(span, device)  # an entry that is refused raises
        rehearsed.append(span.chunk.slices)
        return found

    monkeypatch.setattr(rest, "_rehearsed", noted)
    profile = sacplan.profile(Uneven(), torch.randn(8, 32, 32), mean_square, device="cpu")
    floor = profile.program.liveness.floor_bytes
    plan = sacplan.plan(profile, f"{(floor + 3 * profile.peak_bytes) // 4}B")
    assert plan.recompute_ms
    assert not plan.beyond
    # One number to know at which module slices may begin, and two slices, which cost least.
    assert len(loss_chunks(profile.program, profile.spec).chunks) > 2
    assert sorted(set(rehearsed)) == [2, entries._PROBE]
