"""Names that a mistyped one may stand for, for messages of errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_MOST = 3  # names in a message


def near_names(name: str, known: Iterable[str] | Mapping[str, str]) -> list[str]:
    """Return known names that are spelled like one, then those that have it in them or are in it; three at most.

    Args:
        name: what is not known; stars and dots around it do not matter.
        known: the names, or by spelling the name to show. The last part of a dotted name counts as a spelling, too.
    """
    shown = dict(known) if isinstance(known, Mapping) else {each: each for each in known}
    spelled = {each.lower(): one for each, one in shown.items() if each}
    for each, one in shown.items():
        spelled.setdefault(each.rpartition(".")[2].lower(), one)
    core = name.strip("*.").lower()
    close = difflib.get_close_matches(core, spelled, n=_MOST)
    close += [each for each in spelled if len(core) > 1 < len(each) and (core in each or each in core)]
    return list(dict.fromkeys(spelled[each] for each in close))[:_MOST]


def did_you_mean(name: str, known: Iterable[str] | Mapping[str, str]) -> str:
    """Return near names as a sentence behind a space; nothing where there are none."""
    near = near_names(name, known)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
