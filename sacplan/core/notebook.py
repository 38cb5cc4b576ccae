"""Write titles and rows as text for a terminal and as HTML for a notebook, in the colours of either."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from sacplan.core.budget import format_bytes

if TYPE_CHECKING:
    import pandas as pd

_CELL = "text-align:left;vertical-align:top;padding:.15em .8em .15em 0;background:none;color:inherit"


@dataclass(frozen=True, slots=True)
class Section:
    """A title with rows below it.

    Attributes:
        title: one line.
        rows: labels, each with its text.
    """

    title: str
    rows: tuple[tuple[str, str], ...]

    def text(self, width: int) -> str:
        """Return lines of at most ``width`` characters, except for words that are longer."""
        # Two spaces before each label, and two behind the longest one.
        margin = max((len(label) for label, _ in self.rows), default=0) + 4
        lines = [self.title]
        for label, said in self.rows:
            lines += textwrap.wrap(
                said,
                width,
                initial_indent=f"  {label}".ljust(margin),
                subsequent_indent=" " * margin,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)


def as_html(sections: Sequence[Section]) -> str:
    """Return HTML for ``_repr_html_``: names are escaped, nothing is loaded, and colours are those of the page."""
    parts = []
    for section in sections:
        rows = "".join(
            f'<tr style="background:none"><th style="{_CELL};font-weight:normal;opacity:.7">{escape(label)}</th>'
            f'<td style="{_CELL}">{escape(said)}</td></tr>'
            for label, said in section.rows
        )
        parts.append(f"<div><b>{escape(section.title)}</b></div><table>{rows}</table>")
    return f'<div style="color:inherit">{"".join(parts)}</div>'


def frame_html(frame: pd.DataFrame) -> str:
    """Return a table as HTML, with bytes and shares as people write them; pandas escapes names."""
    shown = frame.copy()
    for column in shown.columns:
        if str(column).endswith("_bytes"):
            # NaN, a cell without a figure, is the one value that does not equal itself.
            shown[column] = [format_bytes(int(n)) if n == n else "" for n in shown[column]]
        elif str(column).endswith("_share"):
            shown[column] = [f"{share:.1%}" for share in shown[column]]
    shown.columns = [str(column).removesuffix("_bytes") for column in shown.columns]
    html: str = shown.to_html(float_format="{:.2f}".format, na_rep="", border=0)
    return html
