"""The same step and budget give the same plan, whatever the clock says: four models, against committed files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.golden import CASES, file_of

ROOT = Path(__file__).parents[2]
QUICK = ("block",)
MARKS = {"block": [], "layers": [pytest.mark.slow, pytest.mark.exhaustive]}
"""The others are slow. ``layers`` is the model of ``spread`` on one device, with more layers."""
BUSY = "while True: sum(range(10**6))"
FAST, SLOW = "200", "0.005"
RATES = {name: (FAST, SLOW)[i % 2] for i, name in enumerate(CASES) if name not in QUICK}
"""How fast the clock runs while a case is planned. The quick ones have the machine's own clock."""


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, clock: Path | None) -> dict[str, Any]:
    """The plans of all cases that this run asks for.

    From one process for each rate of the clock: importing torch takes longer than many.
    """
    asked = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in asked if "made" in item.fixturenames]  # type: ignore[attr-defined]
    found = {}
    for rate in (None, FAST, SLOW):
        here = [name for name in names if (RATES.get(name) if clock is not None else None) == rate]
        if here:
            found |= printed(*here, **at_rate(clock, rate))
    return found


@pytest.mark.every_case
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, [pytest.mark.slow])) for name in CASES]
)
def test_plans_are_those_of_the_file(name: str, made: dict[str, Any]) -> None:
    """As a command makes them: not in the process of the tests, and whether its clock is fast or slow."""
    assert made[name] == in_file(name)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """What makes the clocks of a process run at another rate, compiled; None without a C compiler or LD_PRELOAD."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    built = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).parents[1] / "support" / "clock.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source, "-ldl"], check=True)
    return built


def in_file(name: str) -> Any:
    return json.loads(file_of(name).read_text())


def printed(*names: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.golden", *names, "--print"]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(run.stdout[run.stdout.index("{") :])  # behind the banner of a solver
    return found


def at_rate(clock: Path | None, rate: str | None) -> dict[str, str]:
    """The environment of a process with such a clock; None: the machine's own."""
    if rate is None:
        return {}
    if clock is None:
        pytest.skip("no C compiler, or no LD_PRELOAD: clocks cannot be slowed here")
    return {"LD_PRELOAD": str(clock), "CLOCK_RATE": rate}


def test_the_clock_of_the_other_tests_is_another_one(clock: Path | None) -> None:
    code = "import time; a = time.monotonic(); time.sleep(0.2); print(time.monotonic() - a)"
    environment = os.environ | at_rate(clock, "100")
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert float(run.stdout) > 10


@pytest.mark.slow
@pytest.mark.exhaustive  # each with the clock that it does not have above, and with the machine's own
@pytest.mark.parametrize("name", ["spread", "transformer"])
@pytest.mark.parametrize("rate", [FAST, SLOW, None])
def test_plans_do_not_hang_on_the_clock(name: str, rate: str | None, clock: Path | None) -> None:
    assert printed(name, **at_rate(clock, rate)) == {name: in_file(name)}


@pytest.fixture
def busy_processes() -> Iterator[None]:
    """Twice as many as there are cores."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.exhaustive  # a clock that runs 200 times as fast is more of a hurry than other processes make
@pytest.mark.usefixtures("busy_processes")
def test_plans_do_not_hang_on_other_processes() -> None:
    assert printed("layers") == {"layers": in_file("layers")}
