"""Checks of versions: a few files of the test suite, run by pytest, and how many of their tests passed.

check = run("chunks", "tests/chunk/test_losses.py", "-m", "not slow")
check.cell                                      # "72 passed"
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.harness.results import ROOT


@dataclass(frozen=True, slots=True)
class Check:
    """The tests of one check: how many there were of each outcome, and the names of those that failed."""

    name: str
    passed: int
    failed: tuple[str, ...]
    skipped: int

    @property
    def cell(self) -> str:
        """Its cell of the table."""
        if self.failed:
            return f"**{len(self.failed)} of {self.passed + len(self.failed)} fail**"
        return f"{self.passed} passed" if self.passed else "refused" if self.skipped else "**not run**"


def run(name: str, *tests: str) -> Check:
    """Run one check in a process of its own; ``tests`` is what pytest is given."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            *["-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"],
        ]
        done = subprocess.run([*command, *tests, f"--junitxml={report}"], cwd=ROOT, check=False)
        if not report.exists():
            return Check(name, 0, (f"pytest ended with {done.returncode}",), 0)
        return read(name, ElementTree.parse(report).getroot())


def read(name: str, report: Any) -> Check:
    """Read pytest's report of one check."""
    cases = list(report.iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    names = tuple(f"{c.get('classname')}::{c.get('name')}" for c in failed)
    return Check(name, len(cases) - len(failed) - len(skipped), names, len(skipped))
