"""Names that a mistyped one may stand for, for messages of errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

_MOST = 3  # names in a message


def near_names(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> list[str]:
    """Return up to three known names like an unknown one: those of similar spelling, then those that contain it.

    Names that the unknown one contains come with the latter.

    Args:
        name: the unknown name; stars and dots around it do not matter.
        known: the names. Of a dotted one, the last part is compared as well, unless it is a number.
        shown: how to write one of them.
    """
    names = [each for each in known if each]
    spelled = {each.lower(): each for each in names}
    for each in names:
        last = each.rpartition(".")[2].lower()
        if not last.isdigit():
            spelled.setdefault(last, each)
    core = name.strip("*.").lower()
    close = difflib.get_close_matches(core, spelled, n=_MOST)
    close += [each for each in spelled if len(core) > 1 < len(each) and (core in each or each in core)]
    return list(dict.fromkeys(shown(spelled[each]) for each in close))[:_MOST]


def did_you_mean(name: str, known: Iterable[str], shown: Callable[[str], str] = str) -> str:
    """Return near names as a sentence behind a space; nothing where there are none."""
    near = near_names(name, known, shown)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
