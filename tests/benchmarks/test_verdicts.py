"""``benchmarks.verdicts``: twelve things that people train; the page says what the file of figures says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.results import Row, read_results
from benchmarks.published import published_rows
from benchmarks.verdicts import CASES, END, FIGURES, MARK, PAGE, Case, row_of, with_table


@pytest.fixture
def rows() -> list[Row]:
    if not FIGURES.exists():
        pytest.skip("python -m benchmarks.verdicts has not left its figures in benchmarks/results yet")
    return read_results(FIGURES)[1]


def test_the_figures_are_of_these_commands(rows: list[Row]) -> None:
    assert {row["id"]: row["command"] for row in rows} == {
        name: f"sacplan fit {case.command}" for name, case in CASES.items()
    }
    assert len(rows) == 12


def test_the_table_of_the_page_is_that_of_the_figures(rows: list[Row]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert MARK in page
    assert page == with_table(page, rows), "run python -m benchmarks.verdicts"


def test_published_figures_are_those_of_the_data(rows: list[Row]) -> None:
    compared = [row for row in rows if "published" in row]
    assert len(compared) == sum(case.published is not None for case in CASES.values())
    known = published_rows()
    for row in compared:
        key, figure = CASES[row["id"]].published or ("", "")
        assert row["published"]["measured_bytes"] == known[key]["measured"][figure]
        assert row["published"]["predicted_bytes"] == row["as_it_is"]["reserved_bytes"]


def test_a_command_that_is_wrong_is_no_row(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="typo"):
        row_of("typo", Case("hf:gpt2 --device no-such-gpu"))


def test_a_line_says_what_to_do_and_what_was_published() -> None:
    plain = {
        "optimizer": "adamw", "spread": "", "way": "as it is", "peak_bytes": 2**31, "reserved_bytes": 3 * 2**30,
        "host_bytes": 0, "fits": True, "over_bytes": 0, "step_ms": 1.0,
    }  # fmt: skip
    over = {**plain, "fits": False, "over_bytes": 2**30, "reserved_bytes": None}
    row: Row = {"id": "1B", "command": "sacplan fit hf:x --device y", "as_it_is": plain, "recommended": plain}
    published = {"measured_bytes": 2**31, "error": 0.5}
    page = with_table(
        f"before\n{MARK}\nold\n{END}\nafter",
        [
            row,
            {**row, "as_it_is": over, "recommended": {**plain, "spread": "DDP", "way": "plan"}},
            {**row, "as_it_is": over, "recommended": None, "published": published},
        ],
    )
    lines = page.splitlines()
    assert lines[0] == "before"
    assert lines[-1] == "after"
    assert "old" not in lines
    assert "| 1B | `x --device y` | fits | nothing | 3.0 GiB |  |" in lines
    assert "| 1B | `x --device y` | 1.0 GiB too much | adamw, DDP, plan | 3.0 GiB |  |" in lines
    assert (
        "| 1B | `x --device y` | 1.0 GiB too much | nothing fits |  | 2.0 GiB (+50.0% predicted) |" in lines
    )
