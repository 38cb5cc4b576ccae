"""Alignment: which op of the recorded step each op of a running call is, though the call may run others.

As long as a call runs the recorded ops in their order, each is the next one. From the first difference on, the ops that
run directly in one module call are matched with those that were recorded in that call:

- An op that was not recorded matches nothing, and recorded ops that do not run are skipped.
- Only the ops that follow can tell which of the two it was. So a match that skips ops is taken back if the skipped
  ones run after all, and each recorded place is a new beginning.

This is a greedy matching in one pass, not the longest common subsequence: the ops to come are not known. A wrong match
moves decisions within that place only, and never changes a value.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sacplan.core.call_sites import OpSequence, StepDifference, op_of, ops_of
from sacplan.core.elements import CallSite
from sacplan.errors import SacplanWarning
from sacplan.techniques.runtime.saved import Mark


@dataclass(slots=True)
class Differences:
    """For each unit of a model with a plan, the first difference from the recorded step since ``clear``."""

    by_unit: dict[str, StepDifference] = field(default_factory=dict)
    warned: bool = False
    told_of_compiled: bool = False

    def note(self, difference: StepDifference, *, may_warn: bool) -> None:
        """Note that a call differed, and warn about it once (``SacplanWarning``)."""
        self.by_unit.setdefault(difference.unit, difference)
        if may_warn and not self.warned:
            self.warned = True
            warnings.warn(
                f"the step is not the one that was planned for. {difference}. What runs as recorded is discarded as "
                "planned; for the rest the peak may be another. Make the profile of a step as it is trained, or see "
                "what this one takes with sacplan.verify.",
                SacplanWarning,
                stacklevel=2,
            )

    def note_compiled(self, unit: str, modules: Sequence[str]) -> None:
        """Warn once (``SacplanWarning``) that compiled modules run uncompiled, inside a unit that is not compiled."""
        if self.told_of_compiled or not modules:
            return
        self.told_of_compiled = True
        names = ", ".join(repr(f"{unit}.{name}" if unit else name) for name in modules[:3])
        more = ", ..." if len(modules) > 3 else ""
        where = f"unit {unit!r} of the plan" if unit else "the model, which is one unit of the plan"
        warnings.warn(
            f"{names}{more}: compiled on their own, but called in {where}. Inside a unit that is not compiled as a "
            "whole nothing runs compiled, so they run as if they were not. Compile the whole unit or model instead; "
            "or compile them before sacplan.profile, and the plan has no unit around them.",
            SacplanWarning,
            stacklevel=3,
        )

    def clear(self) -> None:
        """Begin a new step."""
        self.by_unit.clear()


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """An op of the recorded call.

    Attributes:
        caller, place: where it runs, see ``CallSites``.
        description, site: which op it is.
        times: how often its values are discarded; 0: they are kept.
        marks: what is done when it has run.
    """

    caller: str
    place: str
    description: str
    site: CallSite
    times: int
    marks: tuple[Mark, ...] = ()


@dataclass(eq=False)
class RecordedUnit:
    """The calls of a unit in the recorded step, with what a plan discards in them.

    Args:
        fqn: the unit.
        sequences: the ops of its calls; calls that ran the same are one.
        times: the call sites that are discarded, and how often.
        marks: by call site, what is done when an op has run; None: nothing that the unit saves is taken away.
    """

    fqn: str
    sequences: Sequence[OpSequence]
    times: Mapping[CallSite, int]
    marks: Mapping[CallSite, tuple[Mark, ...]] | None = None

    def __post_init__(self) -> None:
        marks = self.marks or {}
        self.calls = tuple(
            tuple(
                RecordedOp(
                    caller, site.place, description, site, self.times.get(site, 0), marks.get(site, ())
                )
                for caller, description, site in ops_of(sequence)
            )
            for sequence in self.sequences
        )

    def discarded_by_name(self) -> dict[tuple[str, int], int]:
        """Return how often ops are discarded, by name and occurrence in the whole call."""
        times: dict[tuple[str, int], int] = {}
        for call in self.calls:
            seen: dict[str, int] = {}
            for op in call:
                occurrence = seen.get(op.site.op, 0)
                seen[op.site.op] = occurrence + 1
                if op.times:
                    times[op.site.op, occurrence] = op.times
        return times

    def not_recorded(self) -> set[CallSite]:
        """Return the call sites that the plan discards and that run in none of the recorded calls."""
        return set(self.times) - {op.site for call in self.calls for op in call}


class Alignment:
    """The alignment of one running call.

    Attributes:
        difference: the first difference from the recorded step, if there is one.
    """

    def __init__(self, recorded: RecordedUnit) -> None:
        self.difference: StepDifference | None = None
        self._recorded = recorded
        self._call: Sequence[RecordedOp] = recorded.calls[0] if recorded.calls else ()
        self._at = 0
        self._by_caller: dict[str, _CallerAlignment] = {}

    def next(self, caller: str, place: str, description: str) -> RecordedOp | None:
        """Return the recorded op that the next op is; None if it was not recorded."""
        # In the order of the whole call until something differs. From then on each module call is followed by itself,
        # so that a difference in one leaves the others aligned.
        if self.difference is None:
            op = self._expected(place, description)
            if op is not None:
                self._at += 1
                return op
            self._differs(place, description)
        # None for a module call that the recorded step does not have: its ops were not recorded.
        aligned = self._by_caller.get(caller)
        return None if aligned is None else aligned.next(place, description)

    def expects(self, place: str, description: str) -> bool:
        """Whether the call has not differed so far, and this op is recorded as the next one."""
        return self.difference is None and self._expected(place, description) is not None

    def end(self) -> None:
        """End the call: recorded ops that did not run are a difference."""
        if self.difference is not None or self._at == len(self._call):
            return  # the call ended as it was recorded, or is known to differ
        if not any(len(call) == self._at and self._agrees(call) for call in self._recorded.calls):
            self._differs(self._call[self._at].place, None)

    def _expected(self, place: str, description: str) -> RecordedOp | None:
        # The recorded call that is followed comes first; another one may take over if it began alike.
        for call in (self._call, *self._recorded.calls):
            if self._at >= len(call):
                continue
            op = call[self._at]
            same = op.description == description and op.place == place
            if same and (call is self._call or self._agrees(call)):
                self._call = call
                return op
        return None

    def _agrees(self, call: Sequence[RecordedOp]) -> bool:
        """Whether another recorded call began with what ran so far."""
        return all(
            theirs.description == ours.description and theirs.place == ours.place
            for theirs, ours in zip(call[: self._at], self._call[: self._at], strict=True)
        )

    def _differs(self, place: str, ran: str | None) -> None:
        expected = self._call[self._at].description if self._at < len(self._call) else None
        self.difference = StepDifference(self._recorded.fqn, place, ran, expected)
        # Recorded ops that have run are marked as done, so that each module call goes on where it is.
        for i, op in enumerate(self._call):
            self._by_caller.setdefault(op.caller, _CallerAlignment()).add(op, done=i < self._at)


class _CallerAlignment:
    """The alignment of the ops that run directly in one module call, from the first difference on."""

    def __init__(self) -> None:
        self._ops: list[RecordedOp] = []
        self._first: dict[str, int] = {}  # by place
        self._at = 0
        self._place = ""
        self._skipped: int | None = None  # where the last match jumped from, until the next one confirms it

    def add(self, op: RecordedOp, *, done: bool) -> None:
        """Add an op of the recorded call; ``done`` says whether it has run already."""
        self._first.setdefault(op.place, len(self._ops))
        self._ops.append(op)
        if done:
            self._at, self._place = len(self._ops), op.place

    def next(self, place: str, description: str) -> RecordedOp | None:
        """Return the recorded op, as ``Alignment.next`` does.

        In order: the next recorded op; the ones that the last match skipped; a later one at this place, which skips
        those between; at last the next one if only the ranks of its tensors differ. Otherwise the op was not recorded.
        """
        if place != self._place:
            self._place, self._skipped = place, None
            # Each recorded place is a new beginning: what was skipped before it stays skipped.
            self._at = self._first.get(place, self._at)
        skipped, self._skipped = self._skipped, None
        if self._is(self._at, description):
            return self._take(self._at)
        if skipped is not None and self._is(skipped, description):
            return self._take(skipped)
        for i in range(self._at, len(self._ops)):
            # A match never jumps over another place: the op there may still run.
            if self._ops[i].place != place:
                break
            if self._is(i, description):
                self._skipped = self._at
                return self._take(i)
        site = self._ops[self._at].site if self._at < len(self._ops) else None
        if site is not None and (site.op, site.place) == (op_of(description), place):
            return self._take(self._at)  # on tensors of another rank
        # An op that was not recorded says nothing about the last match, which still waits to be confirmed.
        self._skipped = skipped
        return None

    def _is(self, i: int, description: str) -> bool:
        return i < len(self._ops) and self._ops[i].description == description

    def _take(self, i: int) -> RecordedOp:
        self._at = i + 1
        return self._ops[i]
