"""Schedules: the ops that a call of a unit runs, in order, and what to do about each.

A schedule saves lookups. It is checked op by op while it is followed, and abandoned at the first difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from sacplan.core.call_sites import Call, StepDifference
from sacplan.core.elements import CallSite
from sacplan.techniques.runtime.saved import Mark
from sacplan.techniques.runtime.tensors import TAKES_A_NUMBER
from sacplan.torch_compat.ops import OpTraits


class Action(Enum):
    """The recorder's action for one op."""

    KEEP = auto()
    NOTE_WRITE = auto()
    """The output is kept and the write noted, even if nothing is discarded yet: other calls may need the old value."""
    DISCARD = auto()
    FOLLOW = auto()
    """The op was not recorded. Its output is discarded if an input is: it then takes the place of a discarded op."""


@dataclass(slots=True)
class ScheduledOp:
    """One op of a unit's call.

    Attributes:
        traits, site, times: of an op to discard; ``times`` as in ``RecipeNode``.
        marks: what else is done when it has run.
        differs: whether the call is known from here on not to run what was recorded.
    """

    action: Action
    traits: OpTraits | None = None
    site: CallSite | None = None
    times: int = 1
    marks: tuple[Mark, ...] = ()
    differs: bool = False


Known = tuple[tuple[Call, ...], str]
"""The module calls around an op in the unit, and the op's description."""

ScheduledOps = Sequence[tuple[Any, ScheduledOp | None]]

NO_OPS: ScheduledOps = ((None, None),)
NOTE_WRITE = ScheduledOp(Action.NOTE_WRITE)
_KEEP = ScheduledOp(Action.KEEP)


@dataclass(slots=True)
class Schedule:
    """The ops of a call.

    Attributes:
        ops: the ops (``OpOverload`` or the like), each with what to do; None: nothing. Once the call is over, the last
            entry is no op and marks the end.
        known: for each op, what identifies it among the recorded ones; None if it cannot be one of them.
        difference: from the recorded step.
    """

    ops: list[tuple[Any, ScheduledOp | None]] = field(default_factory=list)
    known: list[Known | None] = field(default_factory=list)
    difference: StepDifference | None = None

    def add(self, func: Any, op: ScheduledOp | None, known: Known | None) -> None:
        """Note the next op."""
        # With None the recorder passes on the arguments that it gets; a number has to be replaced (``TAKES_A_NUMBER``).
        self.ops.append((func, _KEEP if op is None and func in TAKES_A_NUMBER else op))
        self.known.append(known)

    def end(self, difference: StepDifference | None) -> None:
        """Note that the call is over, and its first difference from the recorded step."""
        self.add(None, None, None)
        self.difference = difference

    def calls_around(self, at: int) -> tuple[Call, ...]:
        """Return the module calls around op ``at``; none if it cannot be a recorded op, or is the end."""
        known = self.known[at]
        return () if known is None else known[0]

    def beginning(self, done: int) -> Schedule:
        """Return a new schedule of the first ``done`` ops, to which others can be added."""
        return Schedule(self.ops[:done], self.known[:done])
