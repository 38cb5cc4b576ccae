"""How many ops of real models have factor rules: the benchmark's count, on two models, and its committed figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.factor_rules import coverage_of
from benchmarks.models import hf_models

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "factor_rules.json"


@pytest.mark.parametrize(("name", "device"), [("llama", "h100"), ("resnet", "cpu")])
def test_nearly_all_ops_may_be_sliced(name: str, device: str) -> None:
    found = coverage_of(name, device)
    assert sum(found.calls.values()) > 200
    assert found.share("sliced") > 0.98
    assert {op for outcome, op in found.calls_of if outcome == "none"} <= {"aten.arange.default"}


def test_dropout_is_random_not_unknown() -> None:
    found = coverage_of("vit", "cpu")
    assert found.calls_of["random", "aten.bernoulli_.float"] > 0
    assert found.calls["none"] == 0


def test_the_committed_figures() -> None:
    """All of ``hf_models`` on both devices: at most one call in a hundred has no rule."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = results["rows"]
    assert {(row["model"], row["device"]) for row in rows} == {
        (name, device) for name in hf_models.NAMES for device in ("h100", "cpu")
    }
    calls = [sum(row["calls"].values()) for row in rows]
    assert sum(row["calls"]["none"] for row in rows) < 0.01 * sum(calls)
    assert sum(row["calls"]["sliced"] for row in rows) > 0.98 * sum(calls)
    without_rule = [row for row in results["not_sliced"] if row["outcome"] == "none"]
    assert sum(row["calls"] for row in without_rule) == sum(row["calls"]["none"] for row in rows)
