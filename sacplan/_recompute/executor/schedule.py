"""What a call of a unit is known to do: its ops in their order, and where autograd takes a discarded tensor.

A schedule saves looking things up. It is checked op by op while it is followed, and left at the first difference.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sacplan._recompute.executor.nodes import Op


class Action(Enum):
    """What the recorder does about an op."""

    KEEP = auto()
    NOTE_WRITE = auto()
    NOTE_UNVERSIONED = auto()
    """Of a write that counts no version: also where nothing is discarded yet, for other calls' sake."""
    DISCARD = auto()


class Step:
    """One op of a unit's call.

    Attributes:
        op, occurrence, drops: for ops to discard; ``drops`` is ``Node.drops``.
        hooks: after the op the saved-tensor hooks go on (True) or off; None leaves them.
    """

    __slots__ = ("action", "drops", "hooks", "occurrence", "op")

    def __init__(
        self,
        action: Action,
        op: Op | None = None,
        occurrence: int = 0,
        drops: int = 0,
        hooks: bool | None = None,
    ) -> None:
        self.action = action
        self.op = op
        self.occurrence = occurrence
        self.drops = drops
        self.hooks = hooks


Steps = Sequence[tuple[Any, Step | None]]
"""The ops (``OpOverload`` or the like) of a call, each with what to do; None: nothing at all."""

NO_STEPS: Steps = ((None, None),)
NOTE_WRITE = Step(Action.NOTE_WRITE)
NOTE_UNVERSIONED = Step(Action.NOTE_UNVERSIONED)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a call; the last one is no op, and stands for the end.

    Attributes:
        steps: as above.
        switches: whether saved-tensor hooks are off at the start and go on and off on the way.
        handles, kept: gaps in which autograd took discarded tensors, and kept ones. Gap ``i`` is before op ``i``.
    """

    steps: Steps
    switches: bool
    handles: frozenset[int]
    kept: frozenset[int]


def schedule_of(steps: Steps, handles: Collection[int], kept: Collection[int], *, switches: bool) -> Schedule:
    """Compile what a call was seen to do.

    Args:
        steps: without the end.
        handles, kept: gaps, see ``Schedule``. Where autograd took neither, the hooks stay as they are.
        switches: whether the hooks may be switched at all.
    """
    on = False
    made: list[tuple[Any, Step | None]] = []
    for gap, (func, step) in enumerate(steps, start=1):
        hooks = None
        if switches and gap in handles and not on:
            hooks = on = True
        elif switches and gap in kept and gap not in handles and on:
            hooks = on = False
        if step is None or step.action is Action.KEEP:
            made.append((func, None if hooks is None else Step(Action.KEEP, hooks=hooks)))
        else:
            made.append((func, Step(step.action, step.op, step.occurrence, step.drops, hooks)))
    made.append((None, None))
    return Schedule(tuple(made), switches, frozenset(handles), frozenset(kept))
