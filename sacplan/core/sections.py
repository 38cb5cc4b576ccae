"""Titles with rows below them, as text for a terminal."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


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
        # Two spaces before each label, and two after the longest one.
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
