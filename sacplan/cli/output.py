"""Write to the terminal: results to stdout, everything else to stderr.

No cell is cut off: in a narrow terminal it folds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from sacplan.core.budget import format_bytes
from sacplan.core.files import table_of
from sacplan.core.progress import stages_go_to
from sacplan.errors import SacplanWarning

_COLUMNS = Path(__file__).with_name("columns.csv")
_UNLIMITED = 10_000  # columns in a pipe, so that each row stays one line for grep


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command.

    Attributes:
        facts: for ``--json``.
        shown: tables and lines for people, on stdout.
        notes: remarks for people, on stderr.
        exit_code: of the process, for a command whose answer may be no.
    """

    facts: dict[str, Any]
    shown: Sequence[Table | str]
    notes: Sequence[str] = ()
    exit_code: int = 0

    def print(self, *, as_json: bool) -> None:
        """Print the result to stdout, as JSON or for people."""
        # Nothing but the object: neither tables nor notes.
        if as_json:
            print_json(self.facts)
            return
        for part in self.shown:
            if isinstance(part, str):
                typer.echo(part)
            else:
                _print_table(part)
        for text in self.notes:
            note(text)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object to stdout."""
    # NaN and infinity are not JSON. An error here is better than output that other programs cannot read.
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _console(*, stderr: bool = False) -> Console:
    # In a pipe there is no terminal whose width could be asked for, and rich would take 80.
    has_width = stderr or sys.stdout.isatty() or "COLUMNS" in os.environ
    # Under NO_COLOR rich still writes bold and dim. Without a color system it writes no escape codes at all.
    plain: dict[str, Any] = {"no_color": True, "color_system": None} if os.environ.get("NO_COLOR") else {}
    # Markup is off because names of modules may contain brackets.
    return Console(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if has_width else _UNLIMITED,
        **plain,
    )


def say(text: str, style: str | None = None) -> None:
    """Write one line to stderr."""
    _console(stderr=True).print(text, style=style, soft_wrap=True)


def note(text: str) -> None:
    """Write a remark to stderr."""
    say(f"note: {text}")


def warn(text: str) -> None:
    """Write a warning to stderr, about something that the user may not have meant."""
    say(f"warning: {text}", "yellow")


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a Python warning in one line, in place of ``warnings.showwarning``.

    Warnings of sacplan are sentences for users, so they have neither file nor category.
    """
    if issubclass(category, SacplanWarning):
        warn(str(message))
    else:
        note(f"{filename}:{lineno}: {category.__name__}: {message}")


@contextlib.contextmanager
def stage(name: str, *, long: bool = False) -> Iterator[None]:
    """Show on stderr which stage is running, what ``begins`` in it, and what ``is_known`` already.

    Args:
        name: of the stage.
        long: whether it may take a minute. Such a stage is reported in logs too, others only on a terminal.
    """
    # A spinner in a log would be a line for each turn.
    if not sys.stderr.isatty():
        if long:
            say(f"{name} ...")
        with stages_go_to(None, say):
            yield
        return
    with (
        _console(stderr=True).status(f"{name} ...", spinner="line") as status,
        stages_go_to(lambda text: status.update(f"{name} ... {text}"), say),
    ):
        yield


def rows_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of rows.

    Args:
        name: The table of ``columns.csv``.
        rows: Figures by name.
    """
    # A column that is 0 or empty in every row says nothing.
    columns = [
        column
        for column in table_of(_COLUMNS)
        if column["table"] == name and any(row[column["figure"]] for row in rows)
    ]
    table = Table(box=None, pad_edge=False, safe_box=True)
    for column in columns:
        table.add_column(column["title"], justify="right" if column["is_number"] else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(column["figure"], row[column["figure"]]) for column in columns))
    return table


def _cell(name: str, value: Any) -> str:
    """Return a figure as text, in the unit that its name ends with."""
    # Not known, or left out because it would mislead: the cell stays empty.
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    if name.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Make a table of labels and texts. A long text folds next to its label."""
    grid = Table.grid(Column(style="bold", overflow="fold"), Column(overflow="fold"), padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return grid


def _print_table(table: Table) -> None:
    console = _console()
    if table.show_header:
        # A line under the header is for people. In a pipe it would be one more line to skip.
        table.box = box.SIMPLE_HEAD if console.is_terminal else None
    with console.capture() as text:
        console.print(table)
    typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))  # rich pads lines with blanks
