"""What the recorded figures of long sequences with offloading show, and the table that the page makes of them."""

from __future__ import annotations

import pytest

from benchmarks import offloaded_sequences
from benchmarks.harness.results import RESULTS, ROOT, Row, read_results

ROWS: list[Row] = read_results(RESULTS / "offloaded_sequences.json")[1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_predicted_is_the_fake_step_on_device_and_host(row: Row) -> None:
    for found in (row["short"], row["long"]):
        assert found["fake_peak_bytes"] == found["peak_bytes"]
        assert found["fake_host_bytes"] == found["host_bytes"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_the_longest_sequence_keeps_both_budgets(row: Row) -> None:
    found = row["long"]
    assert found["peak_bytes"] <= row["budget_bytes"]
    assert found["host_bytes"] + found["optimizer_host_bytes"] <= row["host_budget_bytes"]


def test_the_table_of_the_page() -> None:
    assert offloaded_sequences.table(ROWS) in (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
