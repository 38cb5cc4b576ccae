"""Do plans hold in the trainers that are installed?

    python -m benchmarks.trainers               # with the versions of this environment
    python -m benchmarks.trainers --table       # the page of the docs again, from the figures that are there

A row is a trainer. Its check is the files of the test suite that train with it on the CPU: predicted and measured
peaks, bits of weights and losses, and what is refused. The row has the versions that it ran with.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from benchmarks.harness.checks import Check, run
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import RESULTS, ROOT, Row, describe, machine, read_results
from benchmarks.harness.table import markdown_head, markdown_line, put_on_page

FIGURES = RESULTS / "trainers.json"
PAGE = ROOT / "docs" / "trainers.md"


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer: the packages whose versions count, and what pytest is given."""

    packages: tuple[str, ...]
    tests: tuple[str, ...]


TRAINERS = {
    "`transformers.Trainer`": Trainer(
        ("transformers", "accelerate"), ("tests/integrations/test_hf_trainer.py", "-m", "not exhaustive")
    ),
    "`Trainer` with `fsdp=`": Trainer(
        ("transformers", "accelerate"), ("tests/integrations/test_trainer_fsdp.py", "-m", "not exhaustive")
    ),
    "TRL": Trainer(
        ("trl", "peft", "transformers"), ("tests/integrations/test_trl.py", "-m", "not exhaustive")
    ),
    "Accelerate": Trainer(("accelerate",), ("tests/integrations/test_accelerate.py", "-m", "not exhaustive")),
    "Lightning": Trainer(("lightning",), ("tests/integrations/test_lightning.py", "-m", "not exhaustive")),
}


def row_of(name: str) -> Row:
    """Run the check of a trainer, if all of its packages are there."""
    trainer = TRAINERS[name]
    try:
        versions = {package: version(package) for package in trainer.packages}
    except PackageNotFoundError as error:
        check = Check(name, 0, (), 0)
        return {"versions": {}, "date": time.strftime("%Y-%m-%d"), "missing": error.name, **asdict(check)}
    return {"versions": versions, "date": time.strftime("%Y-%m-%d"), **asdict(run(name, *trainer.tests))}


def table(found: list[Row]) -> str:
    """Write a line for each trainer."""
    lines = markdown_head(("trainer", "with", "tests", "date"))
    for row in found:
        check = Check(row["name"], row["passed"], tuple(row["failed"]), row["skipped"])
        cell = f"{row['missing']} is not installed" if "missing" in row else check.cell
        versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
        lines.append(markdown_line((row["name"], versions, cell, row["date"])))
    return "\n".join(lines) + "\n"


def write_page(found: list[Row]) -> None:
    """Put the table into the page of the docs."""
    put_on_page(PAGE, "python -m benchmarks.trainers", table(found))


def main() -> int:
    """Run the checks, and write the rows and the page; the exit status is 1 where a test failed."""
    options = Parser(__doc__, FIGURES.name)
    options.add_argument("--table", action="store_true", help="write the page of the docs, and run nothing")
    arguments = options.parse_args()
    if arguments.table:
        write_page(read_results(arguments.json)[1])
        return 0
    shown = ("name", "versions", "passed", "failed", "skipped")
    rows = run_cases(
        TRAINERS,
        lambda name: [row_of(name)],
        lambda row: str({key: row[key] for key in shown}),
        arguments.json,
    )
    print(describe(machine()))
    if arguments.json == FIGURES:
        write_page(rows)
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
