"""The figures of compiled steps: what the pages say of them is what the files have."""

from __future__ import annotations

import pytest

from benchmarks import compiled, compiled_budgets
from benchmarks.harness.results import RESULTS, Row, read_results

ROWS = read_results(compiled.FIGURES)[1]
MEASURED = [row for row in ROWS if "measured" in row]
PAGE = compiled.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_table_of_the_file() -> None:
    assert compiled.table(ROWS) in PAGE


def test_no_compiled_plan_is_over_its_budget() -> None:
    planned = [row for row in MEASURED if row["budget"] != "100%"]
    assert planned
    assert all(row["measured"] <= row["budget_bytes"] for row in planned)


def test_each_step_that_is_not_exact_is_named_on_the_page() -> None:
    off = {row["model"] for row in MEASURED if abs(row["predicted"] / row["measured"] - 1) > 0.005}
    assert [model for model in off if f"`{model}`" not in PAGE] == []


@pytest.mark.parametrize("row", [row for row in ROWS if "bits" in row], ids=lambda row: row["case"])
def test_gradients_with_a_plan_are_those_of_compiling_alone(row: Row) -> None:
    if row["backend"] == "aot_eager":
        assert row["bits"]
    # Two orders of the same sums are both right: one may be a little farther from eager mode than the other.
    assert row["planned"] <= 2 * row["alone"] + 1e-6


def test_no_plan_takes_more_memory_than_the_setting_of_pytorch() -> None:
    rows = read_results(RESULTS / "compiled_budgets.json")[1]
    assert all(row["plan"] is None or row["plan"]["peak"] <= row["theirs"]["peak"] for row in rows)
    text = (compiled.ROOT / "docs" / "alternatives.md").read_text(encoding="utf-8")
    assert compiled_budgets.table(rows) in text
    # What the page says below the table.
    at = {row["setting"]: row for row in rows if row["model"] == "bert"}
    assert at[0.7]["theirs"]["step_ms"] < at[0.7]["plan"]["step_ms"]
    for setting in (0.4, 0.1):
        assert at[setting]["theirs"]["peak"] > at[0.7]["theirs"]["peak"]
        assert at[setting]["theirs"]["recompute_flops"] > at[setting]["plan"]["recompute_flops"] == 0
