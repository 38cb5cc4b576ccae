"""Tables: aligned columns for a terminal, and Markdown for the pages."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.results import ROOT, Row


class Table:
    """Columns of a printed table, each a heading and a format.

        table = Table(("model", ">16"), ("peak MiB", ">9.2f"))
        print(table.head)
        print(table.row("gpt2", 31.5))

    The format is one of ``str.format``. Its width and alignment hold for the heading, too, and for cells that are text:
    ``-`` where there is no figure.
    """

    def __init__(self, *columns: tuple[str, str]) -> None:
        self._formats = [spec for _, spec in columns]
        # "+8.3%" is 8 wide, ">9.2f" 9, "4d" 4: the first number, whatever stands before it.
        self._widths = [re.match(r"([<>]?)[+ ,]*(\d*)", spec).expand(r"\1\2") for spec in self._formats]  # type: ignore[union-attr]
        self._widths = [w if w.startswith(("<", ">")) else f">{w}" for w in self._widths]
        self.head = self._joined(head for head, _ in columns)

    def row(self, *cells: object) -> str:
        """Write a line. None is a missing figure; text takes the column's width alone."""
        return self._joined(
            ("-" if cell is None else cell) if cell is None or isinstance(cell, str) else format(cell, spec)
            for cell, spec in zip(cells, self._formats, strict=False)
        )

    def _joined(self, texts: Iterable[str]) -> str:
        return " ".join(format(text, width) for text, width in zip(texts, self._widths, strict=False))


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
    """

    command: str
    page: str
    write: Callable[[list[Row]], str]

    @property
    def path(self) -> Path:
        """The page."""
        return ROOT / "docs" / self.page

    def put(self, rows: list[Row]) -> None:
        """Put the table of these rows on the page."""
        begin, end = f"<!-- table: python -m benchmarks.{self.command} --table -->\n", "<!-- end of table -->"
        before, _, rest = self.path.read_text(encoding="utf-8").partition(begin)
        text = f"{before}{begin}\n{self.write(rows)}\n\n{end}{rest.partition(end)[2]}"
        self.path.write_text(text, encoding="utf-8")
