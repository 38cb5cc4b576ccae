"""Call sites: where ops run within one call of a unit, relative to the module calls inside it.

A place is the stretch between two boundaries, each the beginning or the end of a module call. Ops are counted from the
beginning of their place, not of the call. So one more op in one place leaves the call sites in all others as they are.
The recorded program and the executor find places by the same code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sacplan.core.elements import CallSite

Call = tuple[str, int]
"""A module's name relative to the unit, and the number of this call of it within the call of the unit, from 0."""

OpSequence = tuple[tuple[str, str, tuple[str, ...]], ...]
"""The ops of one call of a unit in order, without views: (module call around them, place, ops as ``described``)."""


def described(op: str, ranks: Sequence[int]) -> str:
    """Describe an op by the ranks of its tensors, which no batch size changes: ``"aten.mm.default(2, 2)"``."""
    return f"{op}({', '.join(map(str, ranks))})"


def op_of(description: str) -> str:
    """Return the name in a description of an op."""
    return description.partition("(")[0]


def ops_of(sequence: OpSequence) -> Iterator[tuple[str, str, CallSite]]:
    """Yield the ops of a call in order: the module call around each, the op as ``described``, and its call site."""
    # Counted by place and name as in ``Program.sites``, so that both give the same call sites.
    seen: dict[tuple[str, str], int] = defaultdict(int)
    for caller, place, descriptions in sequence:
        for description in descriptions:
            name = op_of(description)
            yield caller, description, CallSite(name, seen[place, name], place)
            seen[place, name] += 1


@dataclass(frozen=True, slots=True)
class StepDifference:
    """The first difference between the ops of a call and the recorded ones.

    Attributes:
        unit: fqn of the module.
        place: in the call, see ``CallSite``.
        ran, recorded: the op that ran and the recorded one, as ``described``; None where there was none.
    """

    unit: str
    place: str
    ran: str | None
    recorded: str | None

    def __str__(self) -> str:
        where = f"unit {self.unit!r}" + (f", place {self.place!r}" if self.place else "")
        ran = f"ran {self.ran}" if self.ran else "ended"
        recorded = f"ran {self.recorded}" if self.recorded else "had ended"
        return f"{where}: the step {ran} where the recorded step {recorded}"


class CallSites:
    """Finds the place of each op of one call of a unit, in the order in which they run.

    Attributes:
        calls: the module calls around the last op, outermost first.
        caller: the innermost of them; ``""`` is the unit's own.
        place: of the last op.
    """

    def __init__(self) -> None:
        self.calls: tuple[Call, ...] = ()
        self.caller = self.place = ""
        self._keys: tuple[tuple[Hashable, str], ...] = ()
        self._seen: dict[str, int] = defaultdict(int)

    def at(self, around: Sequence[tuple[Hashable, str]]) -> str:
        """Return the place of the next op.

        Args:
            around: the module calls around the op, outermost first, each as a key that tells calls apart, and a name.
        """
        keys = tuple(around)
        # Keys tell a new call of a module from its last one. Calls around the last op keep their numbers, others get
        # new ones. After ``forget`` there may be fewer keys than calls.
        if keys != self._keys or len(keys) < len(self.calls):
            common = _n_common(keys, self._keys)
            new = tuple((name, self._seen[name]) for _, name in keys[common:])
            self._move((*self.calls[:common], *new))
            self._keys = keys
        return self.place

    def forget(self, around: Sequence[tuple[Hashable, str]]) -> None:
        """Forget the keys of calls that are over; ``around`` has the calls that still run."""
        self._keys = self._keys[: _n_common(self._keys, tuple(around))]

    def follow(self, calls: tuple[Call, ...]) -> str:
        """Return the place of the next op, whose calls are known by number."""
        if calls != self.calls:
            self._move(calls)
        return self.place

    def candidates(self, names: Sequence[str], likely: Sequence[Call]) -> Iterator[tuple[Call, ...]]:
        """Yield what numbered calls these names may stand for around the next op; to be used after ``follow``.

        Any call that the last op was in may have ended and begun again. ``likely`` comes first if its names fit.
        """
        if [name for name, _ in likely] == list(names):
            yield tuple(likely)
        # From all common calls still running to none: the outermost ``n_kept`` calls around the last op run on, and
        # the rest are new calls.
        common = _n_common(names, [name for name, _ in self.calls])
        for n_kept in range(common, -1, -1):
            yield (*self.calls[:n_kept], *((name, self._seen[name]) for name in names[n_kept:]))

    def place_in(self, calls: tuple[Call, ...]) -> str:
        """Return the place that the next op has if it is in these calls.

        If the op enters a call, the place is the innermost one. If it only leaves calls: after the outermost of these.
        """
        if calls == self.calls:
            return self.place
        common = _n_common(calls, self.calls)
        return _named(calls[-1]) if common < len(calls) else f"after {_named(self.calls[common])}"

    def resume(self, around: Sequence[tuple[Hashable, str]], calls: tuple[Call, ...]) -> None:
        """Go back from ``follow`` to ``at``, given the calls around the next op in the forms of both."""
        self.follow(calls)
        self._keys = tuple(around)

    def _move(self, calls: tuple[Call, ...]) -> None:
        # The place first, since it depends on the calls around the last op. Then the calls that are entered are
        # counted, so that the next call of the same module gets the next number.
        self.place = self.place_in(calls)
        for name, number in calls[_n_common(calls, self.calls) :]:
            self._seen[name] = max(self._seen[name], number + 1)
        self.caller = _named(calls[-1]) if calls else ""
        self.calls = calls


def _n_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    n = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        n += 1
    return n


def _named(call: Call) -> str:
    # Most modules are called once, so the first call goes without its number. People count from 1.
    name, number = call
    return f"{name} ({number + 1})" if number else name
