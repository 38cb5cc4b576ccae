"""The loop over cases that benchmarks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import command
from benchmarks.harness.results import Row, machine, read_results, write_results


def run(names: list[str], value: int, path: Path, **more: Any) -> list[Row]:
    """Run cases whose rows have this value."""
    return command.run_cases(names, lambda name: [{"case": name, "value": value}], str, path, **more)


def test_a_run_of_some_cases_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run(["a", "b"], 1, path, key="case")
    run(["b", "c"], 2, path, key="case")
    assert [(row["case"], row["value"]) for row in read_results(path)[1]] == [("a", 1), ("b", 2), ("c", 2)]


def test_without_a_key_the_file_has_the_cases_of_the_run_alone(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run(["a", "b"], 1, path)
    assert run(["b"], 2, path) == read_results(path)[1] == [{"case": "b", "value": 2}]


def test_figures_of_another_machine_are_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    write_results(path, [{"case": "a", "value": 1}])
    before = path.read_text(encoding="utf-8")
    monkeypatch.setattr(command, "machine", lambda: {**machine(), "cores": 0})
    with pytest.raises(SystemExit, match="another machine"):
        run(["b"], 2, path, key="case")
    assert path.read_text(encoding="utf-8") == before
