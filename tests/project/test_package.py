"""The wheel: what is in it, what it requires, and that its version is the one of the change log."""

from __future__ import annotations

import re
import zipfile
from email import message_from_string
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


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    found = next(n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(found).decode()


def test_it_has_every_file_of_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    there = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "sacplan").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == there
    assert {
        "sacplan/py.typed",
        "sacplan/device/devices.csv",
        "sacplan/integrations/hf/architectures.json",
        "sacplan/schemas/fit-1.json",
    } <= there


def test_the_command_line_needs_no_extra(wheel: zipfile.ZipFile) -> None:
    requires = message_from_string(metadata(wheel, "METADATA")).get_all("Requires-Dist") or []
    always = {re.split(r"[^\w-]", line)[0] for line in requires if "extra ==" not in line}
    assert {"torch", "highspy", "typer", "rich"} <= always
    assert always.isdisjoint({"transformers", "matplotlib"})
    assert "sacplan = sacplan.cli.main:main" in metadata(wheel, "entry_points.txt")
