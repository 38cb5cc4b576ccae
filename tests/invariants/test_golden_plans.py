"""The same step and budget give the same plan, whatever the clock says: four models, against committed files."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden import CASES, file_of, rows_of

ROOT = Path(__file__).parents[2]
MARKS = {name: [pytest.mark.slow, pytest.mark.exhaustive] for name in ("block", "layers", "spread")}
"""``transformer`` is slow. ``block`` has a test of its own below; meshes are planned in many others."""


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The plans of all cases that this run asks for, from one process: importing torch takes longer than many."""
    asked = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in asked if "made" in item.fixturenames]  # type: ignore[attr-defined]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.golden", *names, "--print"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout[run.stdout.index("{") :])  # behind the banner of a solver
    return found


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, [pytest.mark.slow])) for name in CASES]
)
def test_plans_are_those_of_the_file(name: str, made: dict[str, Any]) -> None:
    """As a command makes them: not in the process of the tests."""
    assert made[name] == json.loads(file_of(name).read_text())


def test_plans_do_not_hang_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is an hour after the one before. What a search may do is counted, not timed."""
    hours = itertools.count(step=3600)
    for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: float(next(hours)))
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert rows_of("block") == json.loads(file_of("block").read_text())
