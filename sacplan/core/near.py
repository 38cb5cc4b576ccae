"""Known names that a mistyped name may stand for, for messages of errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

_MOST = 3  # names in a message


def near_names(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> list[str]:
    """Return up to three known names like an unknown one: by spelling, then those that contain it or that it contains.

    Args:
        name: the unknown name; stars and dots around it do not matter.
        known: all names. Of a dotted one, the last part is compared as well, unless it is a number.
        shown: how to write a known name.
    """
    names = [candidate for candidate in known if candidate]
    by_spelling = {candidate.lower(): candidate for candidate in names}
    for candidate in names:
        last = candidate.rpartition(".")[2].lower()
        if not last.isdigit():
            by_spelling.setdefault(last, candidate)
    core = name.strip("*.").lower()
    close = difflib.get_close_matches(core, by_spelling, n=_MOST)
    close += [text for text in by_spelling if len(core) > 1 < len(text) and (core in text or text in core)]
    return list(dict.fromkeys(shown(by_spelling[text]) for text in close))[:_MOST]


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Return near names as a question that begins with a space; ``""`` if there are none."""
    near = near_names(name, known, shown)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
