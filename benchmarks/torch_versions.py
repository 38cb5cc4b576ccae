"""Does what sacplan promises hold with the torch that is installed?

    make test-torch TORCH=2.15.0                      # an environment with that torch, and this command in it
    python -m benchmarks.torch_versions               # with the torch of this environment
    python -m benchmarks.torch_versions --table       # the page of the docs again, from the figures that are there

A row is a version of torch. Each check is a few files of the test suite, run by pytest: the README, and the main
invariants. The row says how many of its tests passed. The rows of other versions in the file of results stay as they
are.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import asdict

import torch

from benchmarks.harness.checks import Check, run
from benchmarks.harness.command import Parser
from benchmarks.harness.results import RESULTS, ROOT, Row, read_results
from benchmarks.harness.table import markdown_line, put_on_page

FIGURES = RESULTS / "torch_versions.json"
PAGE = ROOT / "docs" / "versions.md"

CHECKS: dict[str, list[str]] = {
    "README": ["tests/project/test_docs.py", "-k", "README"],
    "prediction = fake step": [
        "tests/recompute/test_recipes.py",
        "tests/invariants/test_predicted_is_measured.py::test_the_replayed_peak_is_that_of_the_step",
        "tests/record/test_trace.py",
        "tests/device/test_kernels.py",
        "tests/torch_compat/test_fake_tensors.py",
    ],
    "prediction = measured": [
        "tests/invariants/test_predicted_is_measured.py",
        "tests/record/test_fake_and_real.py",
    ],
    "same bits": ["tests/runtime/test_steps_that_differ.py", "tests/invariants/test_same_gradients.py"],
    "chunks": ["tests/chunk/test_losses.py", "tests/chunk/test_models.py"],
    "shards on four ranks": ["tests/ranks/test_mesh_plans.py"],
    "DTensors on four ranks": ["tests/ranks/test_dtensors.py::test_a_parallel_step_takes_what_was_planned"],
    "FSDP2 and DDP": ["tests/ranks/test_distributed.py"],
    "torch.compile": ["tests/recompute/test_compiled.py", "tests/recompute/test_compiled_inside.py"],
    "names": ["tests/torch_compat/test_versions.py", "-k", "torch_that_runs"],
}
"""What pytest is given, by what is checked."""

SLOW = ("shards on four ranks", "DTensors on four ranks", "FSDP2 and DDP")
MARKS = {"README": "slow", **dict.fromkeys(SLOW, "not exhaustive")}
"""What is run of checks that consist of tests marked slow. Of the others, only the quick tests are run."""


def rows() -> list[Row]:
    """Read the rows that there are, the oldest torch first."""
    return read_results(FIGURES)[1] if FIGURES.exists() else []


def release(row: Row) -> tuple[int, ...]:
    """Return the version of torch as numbers, without what follows a plus."""
    return tuple(int(n) for n in row["torch"].partition("+")[0].split("."))


def table(found: list[Row]) -> str:
    """Write one column a version, one line a check."""
    checks = [[Check(**c) for c in row["checks"]] for row in found]
    lines = [["check", *(f"torch {row['torch']}" for row in found)]]
    lines.append(["---"] * len(lines[0]))
    lines += [
        [name, *(next((c.cell for c in one if c.name == name), "**not run**") for one in checks)]
        for name in CHECKS
    ]
    lines.append(["Python", *(row["python"] for row in found)])
    lines.append(["date", *(row["date"] for row in found)])
    return "\n".join(map(markdown_line, lines)) + "\n"


def write_page(found: list[Row]) -> None:
    """Put the table into the page of the docs."""
    put_on_page(PAGE, "python -m benchmarks.torch_versions", table(found))


def main() -> None:
    """Run the checks, and write the row and the page."""
    options = Parser(__doc__, FIGURES.name)
    options.add_argument("--table", action="store_true", help="write the page of the docs, and run nothing")
    options.add_argument(
        "--only", nargs="+", choices=tuple(CHECKS), help="run these checks, and write nothing"
    )
    arguments = options.parse_args()
    if arguments.table:
        write_page(rows())
        return
    names = arguments.only or CHECKS
    checks = [run(name, *CHECKS[name], "-m", MARKS.get(name, "not slow")) for name in names]
    for check in checks:
        print(
            f"{check.name:24} {check.passed:4} passed {len(check.failed):3} failed {check.skipped:3} skipped"
        )
        for failed in check.failed:
            print(f"    {failed}")
    if arguments.only is None:
        version = str(torch.__version__)
        row = {
            "torch": version,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "date": time.strftime("%Y-%m-%d"),
            "checks": [asdict(c) for c in checks],
        }
        found = sorted([*(r for r in rows() if r["torch"] != version), row], key=release)
        arguments.json.write_text(json.dumps({"rows": found}, indent=1) + "\n", encoding="utf-8")
        write_page(found)
    if any(check.failed or not check.passed for check in checks):
        sys.exit(1)


if __name__ == "__main__":
    main()
