"""The rooms of the package: imports only go down, and the pages about them are right."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "docs" / "rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_folder_and_file_is_in_a_room(rooms: ModuleType) -> None:
    package = ROOT / "sacplan"
    found = {path.name.removesuffix(".py") for path in package.iterdir() if path.suffix == ".py"}
    found |= {path.name for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert found - {"__init__", "__main__"} == set(rooms.ROOMS)


def test_tests_lie_in_the_same_rooms(rooms: ModuleType) -> None:
    found = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert found - {"invariants", "project", "benchmarks", "compiled"} <= {
        room.lstrip("_") for room in rooms.ROOMS
    }


def test_no_two_models_of_tests_have_the_same_name() -> None:
    """One of a single test is a function and its parts (``tests/zoo/layers.py``); what two files need is in the zoo."""
    models = defaultdict(list)
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(b).endswith("nn.Module") for b in node.bases
            ):
                models[node.name].append(str(path.relative_to(ROOT)))
    assert len(models) > 50
    assert not {name: paths for name, paths in models.items() if len(paths) > 1}


def test_imports_between_rooms_only_go_down(rooms: ModuleType) -> None:
    assert len(rooms.imports()) > len(rooms.ROOMS)
    assert not rooms.arrows_up()


def test_no_two_modules_import_each_other(rooms: ModuleType) -> None:
    assert not rooms.module_circles()


def test_no_executor_imports_another(rooms: ModuleType) -> None:
    executors = {path.parent for path in rooms.files() if path.parent.name == "executor"}
    assert len(executors) >= 3
    for folder in executors:
        others = {f"sacplan.{other.parent.name}.executor" for other in executors - {folder}}
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not [other for other in others if other in text], path


def test_a_wrong_import_is_noticed(
    rooms: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two tests above can fail."""
    for name, text in {
        "_torch/a.py": "def f():\n    from sacplan._plan import b\n",
        "_plan/b.py": "from sacplan._plan.c import x\n",
        "_plan/c.py": "import sacplan._plan.b\n",
        "_program/d.py": "if TYPE_CHECKING:\n    from sacplan._plan import b\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(rooms, "PACKAGE", tmp_path)
    assert sorted(rooms.arrows_up()) == [("_program", "_plan"), ("_torch", "_plan")]
    assert rooms.module_circles() == [["sacplan._plan.b", "sacplan._plan.c"]]


def test_every_room_is_in_the_picture_above_those_that_it_uses(rooms: ModuleType) -> None:
    floors = {room: rooms.floor_of(room) for room in rooms.ROOMS}
    assert None not in floors.values()
    assert not [(above, below) for above, below in rooms.imports() if floors[above] <= floors[below]]
    picture = (ROOT / "docs" / "images" / "rooms.svg").read_text(encoding="utf-8")
    assert all(f">{room}</text>" in picture for room in rooms.ROOMS)


def test_every_room_is_in_the_table(rooms: ModuleType) -> None:
    rows = re.findall(r"^\| (`.+?) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(rooms.ROOMS)


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_five_jumps_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").partition("in five jumps\n")[2].partition("\n## ")[0]
    jumps = re.findall(r"^\d\..*?`([\w.]+)` in\s+`(sacplan/[\w/.]+)`", text, flags=re.MULTILINE)
    assert len(set(jumps)) == len(re.findall(r"^\d\.", text, flags=re.MULTILINE)) == 5
    for name, path in jumps:
        assert name in functions(ROOT / path), f"{page}: there is no {name} in {path}"


def functions(path: Path) -> set[str]:
    """Functions of a file, and methods as ``Class.method``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found
