"""The packages in ``sacplan/``: imports only go down, and the way to a plan is as short as the page says."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import sacplan

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packages() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "packages.py")))


def test_imports_between_packages_only_go_down(packages: SimpleNamespace) -> None:
    assert len(packages.imports()) > len(packages.PACKAGES)
    assert not packages.arrows_up()


def test_no_two_modules_import_each_other(packages: SimpleNamespace) -> None:
    assert not packages.module_circles()


def test_no_executor_imports_another(packages: SimpleNamespace) -> None:
    executors = {path.parent for path in packages.files() if path.parent.name == "executor"}
    assert len(executors) >= 3
    for folder in executors:
        others = {packages.module_name(other) for other in executors - {folder}}
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not [other for other in others if other in text], path


def _ways(call: Callable[[], Any], end: str) -> tuple[Any, set[tuple[str, ...]]]:
    """Return what a call returns, and through which functions of sacplan it comes to another one."""
    found = set()

    def is_function(frame: FrameType) -> bool:
        *classes, name = frame.f_code.co_qualname.split(".")
        inside: Any = frame.f_globals
        for each in classes:
            inside = vars(inside[each]) if each in inside else {}
        return not name.startswith("__") and inspect.isfunction(inside.get(name))

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        if event == "call" and frame is not None and frame.f_code.co_qualname == end:
            way = []
            while frame is not None:
                if frame.f_globals.get("__name__", "").startswith("sacplan.") and is_function(frame):
                    path = Path(frame.f_code.co_filename).relative_to(Path(sacplan.__file__).parent)
                    way.append(f"{path.as_posix()}: {frame.f_code.co_qualname}")
                frame = frame.f_back
            found.add(tuple(way[::-1]))

    sys.setprofile(note)
    try:
        return call(), found
    finally:
        sys.setprofile(None)


def test_the_way_to_a_plan_is_as_short_as_the_page_says() -> None:
    lines = re.findall(r"^    (\S+\.py): (.+)$", (ROOT / "docs" / "architecture.md").read_text("utf-8"), re.M)
    written = tuple(f"{path}: {name}" for path, names in lines for name in names.split(", "))
    layers = [[torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)] for _ in range(4)]
    model = torch.nn.Sequential(*(torch.nn.Sequential(*layer) for layer in layers))
    profile, recorded = _ways(lambda: sacplan.profile(model, torch.zeros(4096, 64)), "Recorder.program")
    _, planned = _ways(lambda: sacplan.plan(profile, "80%"), "rewritten")
    assert recorded == {written[:9]}
    assert written[9:] in planned
    assert max(map(len, planned)) == len(written[9:])
    assert len(written) <= 20
