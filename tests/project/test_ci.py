"""The commands of the page on CI end with the exit codes that it names, and print the fields that it lists."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from sacplan.cli.app import app
from tests.project.test_docs import DOCS, Block, blocks_of


def titled(title: str) -> Block:
    return next(block for block in blocks_of("ci.md") if block.options.get("title") == title)


def sacplan(line: str) -> Any:
    """Run the first command of a line, as a shell does before ``&&``."""
    words = shlex.split(line.partition("&&")[0])
    assert words[0] == "sacplan"
    return CliRunner().invoke(app, words[1:])


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's ``train.py``."""
    (tmp_path / "train.py").write_text(titled("train.py").code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_workflow_and_the_scripts_of_the_page_gate(page: Path) -> None:
    (job,) = yaml.safe_load(titled("fits.yml").code)["jobs"].values()
    (line,) = (step["run"] for step in job["steps"] if step.get("run", "").startswith("sacplan"))
    submit, batch = titled("submit.sh").code, titled("train.sbatch").code
    for code in (submit, batch):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
    plan = next(line for line in batch.splitlines() if line.startswith("sacplan"))
    assert "set -e\n" in batch.partition(plan)[0]
    for command in (line, submit.strip(), plan):
        assert sacplan(command).exit_code == 0
    assert json.loads((page / "plan.json").read_text())["what"] == "plan"
    assert sacplan(f"{plan} --budget 1MiB").exit_code == 3


def test_fit_prints_the_fields_of_the_page(page: Path) -> None:
    text = (DOCS / "ci.md").read_text(encoding="utf-8")
    of_verdict, of_row, of_error = (
        set(re.findall(r"`(\w+)`", line.split(" | ")[1])) for line in re.findall(r"^\| .*` \|$", text, re.M)
    )
    for arguments, code in (
        ("--budget 1GiB", 0),
        ("--budget 1MiB --no-sizes --batch 4", 3),
        ("--budget many", 2),
    ):
        result = sacplan(f"sacplan fit train.py:make --device cpu --json {arguments}")
        assert result.exit_code == code
        found = json.loads(result.stdout)
        if code == 2:
            assert of_error <= found["error"].keys()
            continue
        assert of_verdict <= found.keys()
        assert all(of_row <= row.keys() for row in found["rows"])
        assert found["fits"] == (code == 0)
