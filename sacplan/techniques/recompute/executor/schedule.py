"""Schedules: the ops that a call of a unit runs, in order, and where autograd saves a discarded tensor.

A schedule saves lookups. It is checked op by op while it is followed, and abandoned at the first difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from sacplan.core.elements import CallSite
from sacplan.core.places import Call, StepDifference
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
        hooks: whether the saved-tensor hooks are switched on (True) or off after the op; None leaves them.
        marks: what else is done when it has run.
        differs: whether the call is known from here on not to run what was recorded.
    """

    action: Action
    traits: OpTraits | None = None
    site: CallSite | None = None
    times: int = 1
    hooks: bool | None = None
    marks: tuple[Mark, ...] = ()
    differs: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do about it, but for the hooks."""
        return self.action is Action.KEEP and not self.marks and not self.differs

    def without_hooks(self) -> ScheduledOp | None:
        """Return the op as it was looked up; None if there is nothing to do about it."""
        if self.is_idle:
            return None
        return self if self.hooks is None else replace(self, hooks=None)


ScheduledOps = Sequence[tuple[Any, ScheduledOp | None]]
"""The ops (``OpOverload`` or the like) of a call, each with what to do; None: nothing."""

Known = tuple[tuple[Call, ...], str]
"""The module calls around an op in the unit, and its description."""

NO_OPS: ScheduledOps = ((None, None),)
NOTE_WRITE = ScheduledOp(Action.NOTE_WRITE)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ops of a call; the last entry is no op and marks the end.

    Attributes:
        ops: as above.
        switches: whether saved-tensor hooks are off at the start, and are switched on and off along the way.
        known: what tells which recorded op each is; None where it cannot be one.
        handles, kept: gaps in which autograd saved discarded tensors, and kept ones. Gap ``i`` is before op ``i``.
        difference: from the recorded step.
    """

    ops: ScheduledOps
    known: Sequence[Known | None]
    switches: bool
    handles: frozenset[int]
    kept: frozenset[int]
    difference: StepDifference | None = None

    def goes_on(self, ops: ScheduledOps, done: int, func: Any) -> bool:
        """Whether the first ``done`` ops are the same as those, and the next is ``func`` (None: the end)."""
        if len(self.ops) <= done or self.ops[done][0] is not func:
            return False
        return all(one[0] is other[0] for one, other in zip(self.ops[:done], ops[:done], strict=True))

    def calls_around(self, at: int) -> tuple[Call, ...]:
        """Return the module calls around op ``at``; none if it cannot be a recorded op, or is the end."""
        known = self.known[at] if at < len(self.known) else None
        return () if known is None else known[0]

    def beginning(self, done: int) -> ScheduleDraft:
        """Return a draft with the first ``done`` ops, as if they had been looked up."""
        return ScheduleDraft(
            [(func, op and op.without_hooks()) for func, op in self.ops[:done]],
            list(self.known[:done]),
            {gap for gap in self.handles if gap <= done},
            {gap for gap in self.kept if gap <= done},
        )

    def differs_before(self, done: int) -> bool:
        """Whether the first ``done`` ops are known not to be those of the recorded step."""
        return any(op is not None and op.differs for _, op in self.ops[:done])

    def hooks_before(self, done: int) -> bool:
        """Whether the hooks are on after the first ``done`` ops."""
        flags = (op.hooks for _, op in reversed(self.ops[:done]) if op is not None and op.hooks is not None)
        return next(flags, False)


@dataclass(slots=True)
class ScheduleDraft:
    """The schedule of a call that is still running; fields as in ``Schedule``, without the end."""

    ops: list[tuple[Any, ScheduledOp | None]] = field(default_factory=list)
    known: list[Known | None] = field(default_factory=list)
    handles: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    def add(self, func: Any, op: ScheduledOp | None, known: Known | None) -> None:
        """Note the next op."""
        self.ops.append((func, op))
        self.known.append(known)

    def note_saved(self, *, discarded: bool) -> None:
        """Note that autograd saves a tensor before the next op."""
        (self.handles if discarded else self.kept).add(len(self.ops))

    def schedule(self, *, switches: bool, difference: StepDifference | None = None) -> Schedule:
        """Compile what the call was seen to do.

        The hooks are switched on before the first gap with a discarded tensor, and off before the next gap that has
        only kept ones. Where autograd saves nothing they stay as they are: a switch costs more than it gains there.

        Args:
            switches: whether the hooks may be switched at all.
            difference: from the recorded step.
        """
        on = False
        made: list[tuple[Any, ScheduledOp | None]] = []
        for gap, (func, op) in enumerate(self.ops, start=1):  # the gap behind this op
            hooks = None
            # A gap with both kinds needs the hooks: kept tensors pass through them unharmed, discarded ones
            # would be missed.
            if switches and gap in self.handles and not on:
                hooks = on = True
            elif switches and gap in self.kept and gap not in self.handles and on:
                hooks = on = False
            if op is None or op.is_idle:
                # None is the fast path of the recorder: it only runs the op, with the arguments that it gets.
                idle = hooks is None and func not in TAKES_A_NUMBER
                made.append((func, None if idle else ScheduledOp(Action.KEEP, hooks=hooks)))
            else:
                made.append((func, replace(op, hooks=hooks)))
        made.append((None, None))
        return Schedule(
            tuple(made),
            (*self.known, None),
            switches,
            frozenset(self.handles),
            frozenset(self.kept),
            difference,
        )
