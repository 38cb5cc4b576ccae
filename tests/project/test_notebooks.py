"""The notebooks as they are read: run from top to bottom, and about nobody's machine. `make notebook` runs them."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import sacplan
import sacplan.integrations  # so that it is an attribute

nbformat = pytest.importorskip("nbformat", reason="pip install 'sacplan[notebook]'")

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|work|tmp|Users|usr|opt|mnt)/|site-packages|\b[A-Z]:\\\\")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def source_of(cell: Any) -> str:
    return "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Any:
    return nbformat.read(request.param, as_version=nbformat.NO_CONVERT)


def test_both_are_there() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {"tradeoff_curves", "plan_8b_without_a_gpu"}


def test_valid(notebook: Any) -> None:
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


def test_run_from_top_to_bottom(notebook: Any) -> None:
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        kinds = {output.output_type for output in cell.outputs}
        assert kinds <= {"stream", "display_data", "execute_result"}, cell.id
        assert not [o.text for o in cell.outputs if o.get("name") == "stderr"], cell.id


def test_figures_are_pictures(notebook: Any) -> None:
    """A cell that ends in a figure shows one; any other expression but a call for its effect shows text."""
    for cell in code_cells(notebook):
        last = ast.parse(source_of(cell)).body[-1]
        shown = {kind for output in cell.outputs for kind in output.get("data", {})}
        draws = isinstance(last, ast.Expr) and "_figure(" in ast.unparse(last)
        assert ("image/png" in shown) == draws, cell.id
        assert cell.outputs or not isinstance(last, ast.Expr) or cell.id == "setup", cell.id


def test_a_plan_is_verified_in_it(notebook: Any) -> None:
    texts = [o.get("data", {}).get("text/plain", "") for cell in code_cells(notebook) for o in cell.outputs]
    assert [text for text in texts if text.startswith("Verification(within budget")]


def test_names_of_the_library_exist(notebook: Any) -> None:
    for cell in notebook.cells:
        for name in re.findall(r"\bsacplan\.([A-Za-z_]\w*)", cell.source):
            assert hasattr(sacplan, name), f"{cell.id}: sacplan.{name}"
        for module in re.findall(r"\b(?:from|import) (sacplan[\w.]*)", cell.source):
            assert importlib.util.find_spec(module), f"{cell.id}: {module}"


def test_nothing_of_a_machine(notebook: Any) -> None:
    for cell in notebook.cells:
        found = MACHINE.search(nbformat.writes(nbformat.v4.new_notebook(cells=[cell])))
        assert found is None, f"{cell.id}: {found}"
    assert "version" not in notebook.metadata.language_info
    assert not any("execution" in cell.metadata for cell in notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_small_enough_to_be_shown_on_the_web(path: Path) -> None:
    assert path.stat().st_size < 1_000_000


@pytest.fixture(scope="module")
def execute() -> Any:
    """``notebooks/execute.py``."""
    pytest.importorskip("nbclient", reason="pip install 'sacplan[notebook]'")
    pytest.importorskip("ipykernel", reason="pip install 'sacplan[notebook]'")
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts_of(path: Path) -> list[list[str]]:
    """What the cells of a notebook print and show as text, without times: those of a CPU are those of its cores."""
    notebook = nbformat.read(path, as_version=4)
    outputs = [
        [o.get("text") or o.data.get("text/plain", "") for o in c.outputs] for c in code_cells(notebook)
    ]
    return [[re.sub(r"[\d.,]+ (ms|us)\b", r"... \1", text) for text in cell] for cell in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "which_parallelism",
        *(
            pytest.param(path.stem, marks=pytest.mark.exhaustive)
            for path in NOTEBOOKS
            if "which" not in path.stem
        ),
    ],
)
def test_stored_outputs_are_those_of_a_run(
    name: str, execute: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures from ``benchmarks/results`` are those that lie there now."""
    monkeypatch.chdir(FOLDER.parent)
    execute.main(FOLDER / f"{name}.ipynb", tmp_path / "out.ipynb")
    assert texts_of(tmp_path / "out.ipynb") == texts_of(FOLDER / f"{name}.ipynb")


def test_execute(execute: Any, tmp_path: Path) -> None:
    """A cell that fails fails the run, and leaves no file."""
    source = tmp_path / "in.ipynb"
    cells = [nbformat.v4.new_code_cell(code) for code in ("x = 20", "print(x + 1)\nx + 2", "1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells[:2]), source)
    execute.main(source, tmp_path / "new" / "out.ipynb")
    done = nbformat.read(tmp_path / "new" / "out.ipynb", as_version=4)
    printed, value = done.cells[1].outputs
    assert (printed.text.strip(), value.data["text/plain"]) == ("21", "22")
    assert not any("execution" in cell.metadata for cell in done.cells)
    nbformat.write(nbformat.v4.new_notebook(cells=cells), source)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        execute.main(source, tmp_path / "failed.ipynb")
    assert not (tmp_path / "failed.ipynb").exists()
