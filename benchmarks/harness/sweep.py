"""Benchmarks of many models by name: a row is a model, tried in a process with limits of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import transformers

from benchmarks.harness.command import Parser
from benchmarks.harness.processes import Limits, in_workers
from benchmarks.harness.results import RESULTS, ROOT, Row, describe, machine, read_results, write_results
from benchmarks.harness.table import PageTable

Kind = TypeVar("Kind", bound=Any)
"""What became of a model: ``model_type``, a line by ``str``, ``as_row()`` and ``of_row(row)``."""


@dataclass(frozen=True)
class Sweep(Generic[Kind]):
    """Models that are tried one by one. The file is written after each.

    Attributes:
        file: under ``benchmarks/results``.
        outcome: the class of the outcomes.
        work: tries a model.
        lost: the outcome where a process died or was ended by a limit.
        summary: sums up all outcomes in a line.
        limits: of the processes.
        page, csv: what the docs publish: of all that the file says, a part of a page and a table beside it.
    """

    file: str
    outcome: type[Kind]
    work: Callable[[str], Kind]
    lost: Callable[[str, str, float], Kind]
    summary: Callable[[Sequence[Kind]], str]
    limits: Limits | None = None
    page: Callable[[Row, list[Kind]], str] | None = None
    csv: Callable[[Row, list[Kind]], str] | None = None

    @property
    def path(self) -> Path:
        """The file of figures."""
        return RESULTS / f"{self.file}.json"

    @property
    def csv_path(self) -> Path:
        """The table beside the page."""
        return ROOT / "docs" / "data" / f"{self.file}.csv"

    def parse(
        self, doc: str | None, argv: list[str] | None, known: Collection[str] = ()
    ) -> tuple[Parser, argparse.Namespace]:
        """Parse the command line. With ``--table``, publish the figures that are there, and end.

        Args:
            doc: the module's docstring.
            argv: the words.
            known: names that may be asked for; empty if any may.
        """
        parser = Parser(doc)
        parser.add_argument("names", nargs="*", help="of models; their rows are printed (default: all)")
        parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: %(default)s)")
        parser.add_argument(
            "--resume", action="store_true", help="keep the outcomes that the file already has"
        )
        if self.page is not None:
            parser.add_argument("--table", action="store_true", help="publish what is there, run nothing")
        arguments = parser.parse_args(argv)
        if self.page is not None and arguments.table:
            self.publish()
            raise SystemExit
        unknown = {*arguments.names} - {*known}
        if known and unknown:
            parser.error(f"transformers {transformers.__version__} has no {', '.join(sorted(unknown))}")
        return parser, arguments

    def read(self, path: Path | None = None) -> tuple[Row, list[Kind]]:
        """Read a file of figures: what it says of the run, and its outcomes."""
        about, rows = read_results(path or self.path)
        return about, [self.outcome.of_row(row) for row in rows]

    def run(self, arguments: argparse.Namespace, names: Iterable[str], **about: Any) -> list[Kind]:
        """Try models, and return all outcomes by name; ``about`` is what the file says besides."""
        path = arguments.json or (None if arguments.names else self.path)
        found: dict[str, Kind] = {}
        if arguments.resume and path is not None and path.exists():
            then, before = self.read(path)
            here = torch.__version__, transformers.__version__
            # Rows of other versions are not those of this run.
            if (then["machine"]["torch"], then["machine"]["transformers"]) == here:
                found = {o.model_type: o for o in before}
        torch.set_num_threads(1)
        print(describe(machine()))
        ordered = [found[name] for name in sorted(found)]
        left = [name for name in names if name not in found]
        for outcome in in_workers(left, self.work, self.lost, jobs=arguments.jobs, limits=self.limits):
            found[outcome.model_type] = outcome
            print(outcome, flush=True)
            ordered = [found[name] for name in sorted(found)]
            rows = [o.as_row() for o in ordered]
            write_results(path, rows, row_a_line=True, summary=self.summary(ordered), **about)
        print(self.summary(ordered))
        if path == self.path:
            self.publish()
        return ordered

    def publish(self) -> None:
        """Write what the docs have of the committed figures."""
        about, found = self.read()
        if self.page is not None and self.csv is not None:
            text = self.page(about, found)
            PageTable(self.file, f"{self.file}.md", lambda _: text).put([])
            self.csv_path.write_text(self.csv(about, found), encoding="utf-8")
