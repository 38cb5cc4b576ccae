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
