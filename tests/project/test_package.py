"""What is in the wheel; ``.ci/wheel`` tries it without an extra."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    built = next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"]))
    return zipfile.ZipFile(built)


def test_it_has_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "sacplan").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == there
    assert "sacplan/py.typed" in there
