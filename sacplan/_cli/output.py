"""What goes to the terminal: results on stdout, all the rest on stderr; nothing is cut off, whatever the width."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sacplan.errors import SacplanWarning

_UNLIMITED = 10_000  # columns in a pipe: one line stays one line, to be searched


def out_console() -> Console:
    """Console on stdout."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if known else _UNLIMITED, **_plain())


def err_console() -> Console:
    """Console on stderr."""
    return Console(stderr=True, highlight=False, **_plain())


def _plain() -> dict[str, Any]:
    # rich keeps bold and dim under NO_COLOR; without a colour system it writes no escape at all
    return {"no_color": True, "color_system": None} if os.environ.get("NO_COLOR") else {}


def print_json(value: dict[str, Any]) -> None:
    """One object on stdout."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


@contextlib.contextmanager
def stage(name: str) -> Iterator[Callable[[str], None]]:
    """Says what is going on, on stderr and only to a person; yields a function that says how far it is."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    with err_console().status(f"{name} ...", spinner="line") as status:
        yield lambda text: status.update(f"{name} ... {text}")


def note(text: str) -> None:
    """A remark on stderr."""
    err_console().print(f"note: {text}", soft_wrap=True, markup=False)


def warn(text: str) -> None:
    """A remark on stderr about what may not have been meant."""
    err_console().print(f"warning: {text}", style="yellow", soft_wrap=True, markup=False)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In the place of ``warnings.showwarning``: our own are sentences for people."""
    ours = issubclass(category, SacplanWarning)
    note(str(message) if ours else f"{filename}:{lineno}: {category.__name__}: {message}")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its title, and whether it holds numbers."""

    title: str
    numbers: bool = False


def print_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    """Labels and what they stand for; the text folds beside its label."""
    console = out_console()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in pairs:
        grid.add_row(_cell(label), _cell(text))
    if max(cell_len(label) for label, _ in pairs) > console.width // 2:
        for label, text in pairs:
            console.print(label, style="bold", markup=False)
            console.print(f"  {text}", soft_wrap=True, markup=False)
    else:
        _print_whole(console, grid)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """A table where it fits without folding, else one record after the other."""
    console = out_console()
    widths = [
        max(cell_len(text) for text in (column.title, *(row[i] for row in rows)))
        for i, column in enumerate(columns)
    ]
    last_may_fold = widths[-1] > 30 and not columns[-1].numbers
    needed = sum(widths[:-1]) + (30 if last_may_fold else widths[-1]) + 2 * len(columns) + 2
    if needed > console.width:
        _print_records(console, columns, rows)
        return
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, safe_box=True)
    for i, column in enumerate(columns):
        foldable = last_may_fold and i == len(columns) - 1
        table.add_column(
            column.title,
            justify="right" if column.numbers else "left",
            no_wrap=not foldable,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(_cell(text) for text in row))
    _print_whole(console, table)


def _print_whole(console: Console, table: Table) -> None:
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as text:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))  # rich fills lines with blanks


def _print_records(console: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    for row in rows:
        console.print(row[0], style="bold", markup=False, soft_wrap=True)
        for column, text in list(zip(columns, row, strict=True))[1:]:
            if text:
                console.print(f"  {column.title}: {text}", markup=False, soft_wrap=True)


def _cell(text: str) -> Text:
    return Text(text)  # a module's name may hold brackets, which are not markup
