"""The commands of the page on CI end with the exit codes that it names, and print what the schema says."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from sacplan.cli.answers import FIT_PATH
from sacplan.cli.app import app
from tests.project.test_docs import Block, blocks_of


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


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


def test_the_workflow_of_the_page_gates(page: Path) -> None:
    workflow = yaml.safe_load(titled("fits.yml").code)
    assert len([line for line in titled("fits.yml").code.splitlines() if line.strip()]) == 10
    lines = [step["run"] for step in steps_of(workflow) if step.get("run", "").startswith("sacplan")]
    assert len(lines) == 1
    assert sacplan(lines[0]).exit_code == 0
    assert sacplan(f"{lines[0]} --budget 1MiB").exit_code == 3
    assert sacplan(f"{lines[0]} --device h1000").exit_code == 2


def test_the_scripts_of_the_page_are_for_bash_and_gate(page: Path) -> None:
    submit, job = titled("submit.sh").code, titled("train.sbatch").code
    for code in (submit, job):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
    assert job.startswith("#!/bin/bash\n#SBATCH ")
    assert sacplan(submit.strip()).exit_code == 0
    assert "&& sbatch train.sbatch" in submit
    plan = next(line for line in job.splitlines() if line.startswith("sacplan"))
    assert sacplan(plan).exit_code == 0
    assert json.loads((page / "plan.json").read_text())["what"] == "plan"
    assert sacplan(f"{plan} --budget 1MiB").exit_code == 3
    assert "set -e\n" in job.partition(plan)[0]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--budget 1GiB", 0),
        ("--budget 1MiB", 3),
        ("--budget 1MiB --no-sizes --batch 4", 3),
        ("--budget many", 2),
    ],
)
def test_what_fit_prints_is_as_its_schema_says(page: Path, arguments: str, code: int) -> None:
    result = sacplan(f"sacplan fit train.py:make --device cpu --json {arguments}")
    assert result.exit_code == code
    found = json.loads(result.stdout)
    schema = json.loads(FIT_PATH.read_text(encoding="utf-8"))
    jsonschema.validate(found, schema)
    kind = "Failed" if code == 2 else "Verdict"
    known = schema["$defs"][kind]["properties"]
    assert found.keys() <= known.keys()
    if code != 2:
        assert known.keys() - found.keys() <= {"hf"}
        assert found["fits"] == (code == 0)
        assert found["rows"][0].keys() == schema["$defs"]["FitRow"]["properties"].keys()
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**found, "fits": "yes"}, schema)


def test_the_published_schema_is_that_of_the_types() -> None:
    """If this fails, run ``python -m sacplan.cli.answers``."""
    from sacplan.cli.answers import fit_schema

    assert json.loads(FIT_PATH.read_text(encoding="utf-8")) == json.loads(json.dumps(fit_schema()))
