"""What the recorded figures of training with chunks show."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.harness.results import RESULTS
from benchmarks.models.chunk_models import TRAINING

MIB, GIB = 2**20, 2**30


def rows(name: str, key: str) -> dict[str, Any]:
    return {row[key]: row for row in json.loads((RESULTS / name).read_text())["rows"]}


def test_training_with_a_large_head() -> None:
    found = rows("chunked_training.json", "model")
    assert found.keys() == {*TRAINING, "large-vocabulary"}
    for row in found.values():
        for kind in ("recomputed", "half_way", "smallest"):
            plan = row[kind]
            assert plan["fake_peak_bytes"] == plan["peak_bytes"]
            assert plan["measured_peak_bytes"] == pytest.approx(plan["peak_bytes"], rel=0.005)
        assert row["half_way"]["measured_peak_bytes"] <= row["half_way"]["budget_bytes"]
        assert row["half_way"]["budget_bytes"] < row["recomputed"]["peak_bytes"]
        for gradients in (row["gradients"], row["gradients_of_smallest"]):
            assert gradients["loss"] <= 2e-6
            assert gradients["head"] <= 1e-6
            assert gradients["others_with_other_bits"] == 0
    assert found["large-vocabulary"]["smallest"]["measured_peak_bytes"] <= 135 * MIB


def test_a_loss_in_slices_takes_little_memory() -> None:
    for size in ("small", "medium"):
        found = [
            row
            for row in json.loads((RESULTS / "chunked_loss.json").read_text())["rows"]
            if row["size"] == size
        ]
        by_name = {row["variant"]: row for row in found}
        assert by_name["chunked/16"]["peak_bytes"] < 0.2 * by_name["plain"]["peak_bytes"]
        assert by_name["chunked/16"]["error"] < 1e-5


def test_long_sequences() -> None:
    found = rows("long_sequences.json", "model")
    for row in found.values():
        alone, chunked = row["recomputed"], row["chunked"]
        assert chunked["within_budget"]
        assert chunked["fake_peak_bytes"] == chunked["peak_bytes"] <= row["budget_bytes"]
        assert chunked["smallest_peak_bytes"] < 0.75 * alone["smallest_peak_bytes"]
        assert chunked["longest"]["tokens"] > 1.2 * alone["longest"]["tokens"]
        assert row["loss"]["share"] <= 0.05
    llama = found["llama-3-8b"]
    assert llama["tokens"] == 32768
    assert llama["chunked"]["smallest_peak_bytes"] <= 70 * GIB
    assert llama["planning"]["ratio"] <= 2
