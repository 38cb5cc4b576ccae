"""The packages in ``sacplan/``: imports only go down."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

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
