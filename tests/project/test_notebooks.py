"""The notebooks show what a run of them shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install 'sacplan[notebook]'")

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def execute() -> Any:
    """The function of ``notebooks/execute.py``."""
    pytest.importorskip("nbclient", reason="pip install 'sacplan[notebook]'")
    pytest.importorskip("ipykernel", reason="pip install 'sacplan[notebook]'")
    return runpy.run_path(str(FOLDER / "execute.py"))["main"]


def texts_of(path: Path) -> list[list[str]]:
    """What the cells of a notebook print and show as text, without times: those of a CPU are those of its cores."""
    notebook = nbformat.read(path, as_version=4)
    outputs = [
        [o.get("text") or o.data.get("text/plain", "") for o in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    return [[re.sub(r"[\d.,]+ (ms|us)\b", r"... \1", text) for text in cell] for cell in outputs]


@pytest.mark.slow
@pytest.mark.exhaustive  # `make notebook` runs all of them as well, in CI
@pytest.mark.parametrize("name", [path.stem for path in NOTEBOOKS])
def test_stored_outputs_are_those_of_a_run(
    name: str, execute: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures from ``benchmarks/results`` are those that lie there now."""
    monkeypatch.chdir(FOLDER.parent)
    execute(FOLDER / f"{name}.ipynb", tmp_path / "out.ipynb")
    assert texts_of(tmp_path / "out.ipynb") == texts_of(FOLDER / f"{name}.ipynb")
