"""Which op of the recorded step an op of a running call is, though the call may run others.

As long as a call runs the ops that were recorded, in their order, each is the next one. From the first that differs
on, the ops that run directly in a module call are matched with those that were recorded in it: one that was not
recorded is passed over, and so are recorded ones that do not run. Which of the two it is, only what follows can tell,
so a match that skips ops is taken back if the skipped ones run after all, and each place that was recorded is a new
beginning. A wrong match moves decisions in that place only, and never changes a value.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sacplan._program.elements import CallSite
from sacplan._program.places import OpSequence, StepDifference, op_of, ops_of
from sacplan.errors import SacplanWarning


@dataclass(slots=True)
class Differences:
    """Of the units of a model with a plan, by unit: the first since ``clear``."""

    by_unit: dict[str, StepDifference] = field(default_factory=dict)
    warned: bool = False
    told_of_compiled: bool = False

    def note(self, difference: StepDifference, *, may_warn: bool) -> None:
        """A call differed. Says so once: ``SacplanWarning``."""
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
        """Modules in a unit that runs uncompiled are compiled. Says so once: ``SacplanWarning``."""
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
        """A new step begins."""
        self.by_unit.clear()


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """An op of the recorded call.

    Attributes:
        caller, place: where it runs, see ``Places``.
        description, site: which it is.
        times: how often its values are discarded; 0: they are kept.
    """

    caller: str
    place: str
    description: str
    site: CallSite
    times: int


class RecordedUnit:
    """The calls of a unit in the recorded step, with what a plan discards in them.

    Args:
        fqn: the unit.
        sequences: the ops of its calls; calls that ran the same are one.
        times: the call sites that are discarded, and how often.
    """

    def __init__(self, fqn: str, sequences: Sequence[OpSequence], times: Mapping[CallSite, int]) -> None:
        self.fqn = fqn
        self.calls = tuple(
            tuple(
                RecordedOp(caller, site.place, description, site, times.get(site, 0))
                for caller, description, site in ops_of(sequence)
            )
            for sequence in sequences
        )
        self._times = times

    def discarded_by_name(self) -> dict[tuple[str, int], int]:
        """What is discarded, by op and its occurrence in the whole call, and how often."""
        found: dict[tuple[str, int], int] = {}
        for call in self.calls:
            seen: dict[str, int] = {}
            for op in call:
                occurrence = seen.get(op.site.op, 0)
                seen[op.site.op] = occurrence + 1
                if op.times:
                    found[op.site.op, occurrence] = op.times
        return found

    def not_recorded(self) -> set[CallSite]:
        """What is discarded, but runs in none of the recorded calls."""
        return set(self._times) - {op.site for call in self.calls for op in call}


class Alignment:
    """Of one running call.

    Attributes:
        difference: the first, if there is one.
    """

    def __init__(self, recorded: RecordedUnit) -> None:
        self.difference: StepDifference | None = None
        self._recorded = recorded
        self._call: Sequence[RecordedOp] = recorded.calls[0] if recorded.calls else ()
        self._at = 0
        self._by_caller: dict[str, _CallerAlignment] = {}

    def next(self, caller: str, place: str, description: str) -> RecordedOp | None:
        """The recorded op that the next one is; None if it is none of them."""
        if self.difference is None:
            op = self._expected(place, description)
            if op is not None:
                self._at += 1
                return op
            self._differs(place, description)
        aligned = self._by_caller.get(caller)
        return aligned.next(place, description) if aligned is not None else None

    def expects(self, place: str, description: str) -> bool:
        """Whether this op would be the next one, of a call without differences so far."""
        return self.difference is None and self._expected(place, description) is not None

    def end(self) -> None:
        """The call is over."""
        if self.difference is not None or self._at == len(self._call):
            return
        if not any(len(call) == self._at and self._agrees(call) for call in self._recorded.calls):
            self._differs(self._call[self._at].place, None)

    def _expected(self, place: str, description: str) -> RecordedOp | None:
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
            one.description == other.description and one.place == other.place
            for one, other in zip(call[: self._at], self._call[: self._at], strict=True)
        )

    def _differs(self, place: str, ran: str | None) -> None:
        expected = self._call[self._at].description if self._at < len(self._call) else None
        self.difference = StepDifference(self._recorded.fqn, place, ran, expected)
        for i, op in enumerate(self._call):
            self._by_caller.setdefault(op.caller, _CallerAlignment()).add(op, done=i < self._at)


class _CallerAlignment:
    """Of what runs directly in one module call."""

    def __init__(self) -> None:
        self._ops: list[RecordedOp] = []
        self._first: dict[str, int] = {}  # by place
        self._at = 0
        self._place = ""
        self._skipped: int | None = None  # where the last match jumped from, until the next one confirms it

    def add(self, op: RecordedOp, *, done: bool) -> None:
        """One more op of the recorded call; ``done``: it has run."""
        self._first.setdefault(op.place, len(self._ops))
        self._ops.append(op)
        if done:
            self._at, self._place = len(self._ops), op.place

    def next(self, place: str, description: str) -> RecordedOp | None:
        """As ``Alignment.next``."""
        if place != self._place:
            self._place, self._skipped = place, None
            self._at = self._first.get(place, self._at)
        skipped, self._skipped = self._skipped, None
        if self._is(self._at, description):
            return self._take(self._at)
        if skipped is not None and self._is(skipped, description):
            return self._take(skipped)
        for i in range(self._at, len(self._ops)):
            if self._ops[i].place != place:
                break
            if self._is(i, description):
                self._skipped = self._at
                return self._take(i)
        site = self._ops[self._at].site if self._at < len(self._ops) else None
        if site is not None and (site.op, site.place) == (op_of(description), place):
            return self._take(self._at)  # on tensors of another rank
        self._skipped = skipped
        return None

    def _is(self, i: int, description: str) -> bool:
        return i < len(self._ops) and self._ops[i].description == description

    def _take(self, i: int) -> RecordedOp:
        self._at = i + 1
        return self._ops[i]
