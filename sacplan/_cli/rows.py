"""Show rows of figures as a table, whatever the question of the sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from sacplan._cli.output import table
from sacplan._program.budget import format_bytes


def rows_table(
    titles: Mapping[str, Column | str], rows: Sequence[Mapping[str, Any]], optional: Sequence[str] = ()
) -> Table:
    """Return a table of rows.

    Args:
        titles: Name of each figure to its title, or to a column made by ``number``; in the order of the columns.
        rows: Figures by name.
        optional: Titles of columns to leave out if the terminal is too narrow, the first one first.
    """
    # A time or a share that is 0 in every row says nothing.
    titles = {
        name: title
        for name, title in titles.items()
        if not name.endswith(("_ms", "_share")) or any(row[name] for row in rows)
    }
    return table(
        list(titles.values()), [[_cell(name, row[name]) for name in titles] for row in rows], optional
    )


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
