"""Look up which ops of the recorded step the ops of a call are, where the call follows no schedule.

Each op is described by its name and the ranks of its tensors, and by the module calls around it, which are read from
the Python frames. ``Alignment`` says which recorded op it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from sacplan.core.call_sites import Call, CallSites, StepDifference, described
from sacplan.core.elements import CallSite
from sacplan.techniques.recompute.executor.schedule import NOTE_WRITE, Action, Known, ScheduledOp
from sacplan.techniques.runtime.alignment import Alignment, RecordedUnit
from sacplan.torch_compat.autograd import in_backward
from sacplan.torch_compat.ops import OpTraits, is_computation, op_traits, tensors_in
from sacplan.torch_compat.private import is_plain, module_calls


@dataclass(frozen=True, slots=True)
class FuncFacts:
    """The facts about an op that do not depend on the call.

    Attributes:
        name: of the overload, if the op may be one of the recorded step.
        traits: of the op, if it may run again.
        kept: what to do if the output is kept.
    """

    name: str | None
    traits: OpTraits | None
    kept: ScheduledOp | None


@functools.cache
def func_facts(func: Any) -> FuncFacts:
    """Return the facts about an op; remembered, since a step calls few ops many times."""
    if not isinstance(func, torch._ops.OpOverload):
        return FuncFacts(str(func), None, None)  # a higher-order op: recorded by name, and never run again
    traits = op_traits(func)
    kept = NOTE_WRITE if traits.written_names else None
    name = traits.name if is_computation(traits.name) else None
    return FuncFacts(name, traits if traits.rerunnable else None, kept)


def description_of(name: str, args: Any, kwargs: Any) -> str:
    """Return an op's name and the ranks of its tensors, which tell it from others in the same place."""
    return described(name, [t.dim() for t in tensors_in((args, kwargs)) if is_plain(t)])


class Lookup:
    """Which recorded op each op of a call is, from where the call leaves its schedule.

    Args:
        recorded: the unit's calls in the recorded step, with what is discarded.
        names: gives the names, relative to the unit, of the modules in it, by ``id``.

    Attributes:
        differs: whether the call is known by now not to run what was recorded.
    """

    def __init__(self, recorded: RecordedUnit, names: Callable[[], Mapping[int, str]]) -> None:
        self.differs = False
        self._names_of_modules = names
        self._names: Mapping[int, str] = {}
        self._alignment = Alignment(recorded)
        self._places = CallSites()
        self._n_described = 0
        self._outer_frame: FrameType | None = None
        self._frames: dict[FrameType, torch.nn.Module] = {}  # of the module calls around the last op
        self._in_backward = False
        self._likely: tuple[Call, ...] | None = None  # see ``_resume``

    def enter(self, outer_frame: FrameType) -> None:
        """Begin a call. Module calls around an op are searched for in the frames up to ``outer_frame``."""
        self._outer_frame = outer_frame
        self._in_backward = in_backward()  # a checkpoint around the unit runs its forward in a backward pass

    def leave(self) -> None:
        """End the call, and forget its frames, which keep everything that the forward pass had in its variables."""
        self._outer_frame = None
        self._frames, self._places = {}, CallSites()

    @property
    def difference(self) -> StepDifference | None:
        """The first difference from the recorded step, if there is one."""
        return self._alignment.difference

    def begin(self, known: Sequence[Known | None], likely: tuple[Call, ...] | None, *, differs: bool) -> None:
        """Continue after ops that a schedule knew.

        Args:
            known: what identifies each of them.
            likely: the module calls around the op that the schedule had next; None if there is no schedule.
            differs: whether the schedule says that the call differs from the recorded step.
        """
        self._names = self._names_of_modules()
        self._likely = likely
        self.differs = differs
        for calls, description in filter(None, known):
            self._n_described += 1
            place = self._places.follow(calls)
            self._alignment.next(self._places.caller, place, description)

    def end(self) -> None:
        """Note the end of the call: recorded ops that did not run are a difference, too."""
        self._alignment.end()

    def next(self, func: Any, args: Any, kwargs: Any) -> tuple[ScheduledOp | None, Known | None]:
        """Return what to do about the next op, and what identifies it; None for an op that cannot be a recorded one."""
        facts = func_facts(func)
        if facts.name is None or (in_backward() and not self._in_backward):
            # No computation; or a gradient inside a forward pass, which is not recomputed.
            return facts.kept, None
        description = description_of(facts.name, args, kwargs)
        around = self._module_calls()
        # Only for the first op after a schedule; see ``_resume``.
        if self._likely is not None:
            self._resume(around, description)
        place = self._places.at(around)
        recorded = self._alignment.next(self._places.caller, place, description)
        self.differs = self._alignment.difference is not None
        op = facts.kept
        # Without traits an op cannot run again, whatever the plan says.
        if facts.traits is not None and recorded is None:
            op = ScheduledOp(Action.FOLLOW, facts.traits, CallSite(facts.name, self._n_described, place))
        elif facts.traits is not None and recorded is not None and recorded.times:
            op = ScheduledOp(Action.DISCARD, facts.traits, recorded.site, recorded.times)
        self._n_described += 1
        if recorded is not None and recorded.marks:
            op = replace(op or ScheduledOp(Action.KEEP), marks=recorded.marks)
        return op, (self._places.calls, description)

    def forget_calls(self) -> None:
        """Let go of module calls that are over, whose frames keep their arguments."""
        if self._frames:
            self._places.forget(self._module_calls())

    def _module_calls(self) -> list[tuple[FrameType, str]]:
        """Return the calls of the unit's modules that run now, outermost first, and the names of the modules."""
        assert self._outer_frame is not None
        self._frames = module_calls(self._outer_frame, self._frames)
        return [(frame, self._names[id(m)]) for frame, m in self._frames.items() if id(m) in self._names]

    def _resume(self, around: list[tuple[FrameType, str]], description: str) -> None:
        """Find the module calls that the first op after the schedule is in.

        Frames were not looked at while the schedule was followed, so a module's frame may be that of a call which the
        schedule knew or of a new call. Of these candidates, take the one in which this op was recorded, else the first.
        """
        assert self._likely is not None
        candidates = list(self._places.candidates([name for _, name in around], self._likely))
        expected = (c for c in candidates if self._alignment.expects(self._places.place_in(c), description))
        self._places.resume(around, next(expected, candidates[0]))
        self._likely = None
