"""Tables of the pages, in Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.results import ROOT, Row


def markdown_table(heads: str, rows: Iterable[Iterable[str]]) -> str:
    """Write a table in Markdown; ``heads`` are separated as in one, ``"model | peak"``."""
    lines = [heads.split(" | "), ["---"] * (heads.count(" | ") + 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def csv_text(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Write a table as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(rows)
    return out.getvalue()


class PageTable(NamedTuple):
    """The table of a benchmark on a page of the docs, between two marks; the first names the command.

    Attributes:
        command: the module's name in ``benchmarks``.
        page: the page's name in ``docs``.
        write: makes the table of the rows of the file.
        which: of several tables of a module, as the mark says it.
    """

    command: str
    page: str
    write: Callable[[list[Row]], str]
    which: str = ""

    @property
    def path(self) -> Path:
        """The page."""
        return ROOT / "docs" / self.page

    def put(self, rows: list[Row]) -> None:
        """Put the table of these rows on the page."""
        begin = f"<!-- table: python -m benchmarks.{self.command} --table{self.which} -->\n"
        end = "<!-- end of table -->"
        before, _, rest = self.path.read_text(encoding="utf-8").partition(begin)
        text = f"{before}{begin}\n{self.write(rows)}\n\n{end}{rest.partition(end)[2]}"
        self.path.write_text(text, encoding="utf-8")
