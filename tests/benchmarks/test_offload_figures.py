"""What the recorded figures of offloading show, and the table that the page makes of them."""

from __future__ import annotations

import pytest

from benchmarks import offload
from benchmarks.harness.results import RESULTS, ROOT, Row, read_results

ROWS: list[Row] = read_results(RESULTS / "offload.json")[1]
TIMES: list[Row] = read_results(RESULTS / "offload_times.json")[1]


def test_all_models_are_there() -> None:
    assert [row["model"] for row in ROWS] == list(offload.MODELS)
    assert len(ROWS) == 10


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["model"])
def test_peaks_are_exact_and_no_choice_costs_more_for_being_wider(row: Row) -> None:
    for budget in row["budgets"].values():
        plans = {choice: budget[choice] for choice in offload.CHOICES}
        assert budget["worse"] == offload.worse(plans) == []
        assert all(plan["peak_bytes"] <= budget["budget_bytes"] for plan in plans.values() if plan["held"])
        assert all(plan.get("exact", True) for plan in plans.values())


def test_the_table_of_the_page() -> None:
    assert offload.table(ROWS) in (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")


def test_how_much_less_both_cost_than_recomputation_alone() -> None:
    less = [
        1 - budget["both"]["longer_ms"] / budget["recompute"]["longer_ms"]
        for row in ROWS
        for budget in row["budgets"].values()
    ]
    page = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
    assert f"falls by up to {max(less):.0%}".replace("%", " %") in page


def test_planned_times_are_those_of_simulated_streams_on_ten_models() -> None:
    assert sorted(row["model"] for row in TIMES) == sorted(offload.MODELS)
    plans = [plan for row in TIMES for plan in row["plans"].values()]
    assert all(row["plans"]["random"]["offloaded"] for row in TIMES)
    for plan in plans:
        assert plan["planned_ms"] == pytest.approx(plan["simulated_ms"], rel=1e-9)
        # A link that has more bandwidth than a plan counts on makes no step longer.
        assert plan["full_link_ms"] <= plan["simulated_ms"]
    waiting = sum(plan["simulated_ms"] > plan["full_link_ms"] + 1e-9 for plan in plans)
    page = (ROOT / "docs" / "offload.md").read_text(encoding="utf-8")
    assert f"{len(plans)} plans of ten models, {waiting} of which wait for the link" in " ".join(page.split())
