"""The command line of a benchmark, and its loop over cases."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.results import RESULTS, Row, as_text, describe, machine, read_results, write_results
from benchmarks.harness.table import PageTable

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser that starts with ``--json``, and describes itself by the module's docstring.

    With tables of the docs, there is ``--table``: it only puts the figures of the file on the pages.
    """

    def __init__(self, doc: str | None, results: str | None = None, *tables: PageTable) -> None:
        """Make the parser.

        Args:
            doc: the module's docstring, whose first line is the description.
            results: the file under ``benchmarks/results`` that figures go to by default; None: to no file.
            tables: of the docs, made of this file.
        """
        super().__init__(description=(doc or "").splitlines()[0])
        self._tables = tables
        default = RESULTS / results if results else None
        self.add_argument(
            "--json", type=Path, default=default, help="file for the figures (default: %(default)s)"
        )
        if tables:
            self.add_argument("--table", action="store_true", help="only put the file's figures on the page")

    def choice(self, option: str, known: Collection[str], default: Iterable[str] | None = None) -> None:
        """Add an option that takes some of the known names, all of them by default."""
        names = list(known)
        self.add_argument(
            option, nargs="+", choices=names, default=names if default is None else list(default)
        )

    def begin(
        self, argv: list[str] | None = None, *, note: str = "", silence: bool = False
    ) -> argparse.Namespace:
        """Parse the command line, and print the machine and the versions. ``--table`` ends here.

        Args:
            argv: the words; by default those of the process.
            note: printed after the versions.
            silence: show no warnings, for benchmarks whose steps are known to give some.
        """
        arguments = self.parse_args(argv)
        if self._tables and arguments.table:
            for each in self._tables:
                each.put(read_results(arguments.json)[1])
            raise SystemExit
        if silence:
            warnings.simplefilter("ignore")
        print(describe(machine()) + note, flush=True)
        return arguments


def run_cases(
    cases: Iterable[T],
    rows_of: Callable[[T], Iterable[Row]],
    path: Path | None,
    *,
    key: str | None = None,
    **more: Any,
) -> list[Row]:
    """Print the rows of each case as they come, and return all rows.

    A run that is stopped leaves the cases that it has finished in the file, and with ``key`` the rows.

    Args:
        cases: The cases to run.
        rows_of: Yields the rows of a case.
        path: The file; None writes nothing.
        key: What in a row names its case, if each case has one row. With it, a row takes the place of the one that the
            file has of the same case, and rows of other cases stay.
        **more: What the file says besides.
    """
    rows = known_rows(path) if key is not None else []
    for case in cases:
        for row in rows_of(case):
            at = next(
                (i for i, one in enumerate(rows) if key is not None and one[key] == row[key]), len(rows)
            )
            rows[at : at + 1] = [row]
            print(as_text(row), flush=True)
            if key is not None:
                write_results(path, rows, **more)
        write_results(path, rows, **more)
    return rows


def known_rows(path: Path | None) -> list[Row]:
    """Return the rows that a file has already.

    Raises:
        SystemExit: They were made on another machine or with other versions, and a file names one of each.
    """
    if path is None or not path.exists():
        return []
    about, rows = read_results(path)
    if about["machine"] != machine():
        raise SystemExit(
            f"{path} has figures of another machine ({describe(about['machine'])}); write to another file with --json."
        )
    return rows
