"""What the recorded figures of long sequences with offloading show, and the table that the page makes of them."""

from __future__ import annotations

import pytest

from benchmarks import offloaded_sequences
from benchmarks.harness.results import RESULTS, ROOT, Row, read_results

ROWS: list[Row] = read_results(RESULTS / "offloaded_sequences.json")[1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row"])
def test_predicted_is_the_fake_step_on_device_and_host(row: Row) -> None:
    assert row["fake_peak_bytes"] == row["peak_bytes"]
    assert row["fake_host_bytes"] == row["host_bytes"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["row"])
def test_both_budgets_hold(row: Row) -> None:
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert row["host_bytes"] + row["optimizer_host_bytes"] <= row["host_budget_bytes"]


def test_the_table_of_the_page() -> None:
    assert offloaded_sequences.table(ROWS) in (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
