"""The recorder of one call of a unit: sees its ops, makes nodes for the discarded ones, and gives autograd handles.

The first call of a unit looks up every op among those of the recorded step (``alignment.py``), and leaves a
``Schedule``. Later calls compare each op with the schedule, which is all that happens to a kept op. A schedule decides
what a lookup would decide. If a call departs from it, further ops are looked up, and the call leaves its own schedule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sacplan.core.call_sites import StepDifference
from sacplan.core.elements import CallSite
from sacplan.errors import RecipeError
from sacplan.record.call_arguments import plain_tensors
from sacplan.record.executor_notes import noted
from sacplan.techniques.recompute.executor.draws import draw_of
from sacplan.techniques.recompute.executor.handles import (
    FirstStep,
    Kept,
    PassedOn,
    RecipeHandle,
    Wrapped,
    base_without_history,
    unpack,
)
from sacplan.techniques.recompute.executor.lookup import Lookup, description_of, func_facts
from sacplan.techniques.recompute.executor.nodes import OutsideForward, RecipeNode, Slot
from sacplan.techniques.recompute.executor.schedule import (
    NO_OPS,
    Action,
    Schedule,
    ScheduledOp,
    ScheduledOps,
)
from sacplan.techniques.recompute.executor.slots import SlotTable
from sacplan.techniques.runtime.alignment import RecordedUnit
from sacplan.techniques.runtime.recording import here
from sacplan.techniques.runtime.saved import Mark, SavedStorage, SavedStorages
from sacplan.techniques.runtime.tensors import TAKES_A_NUMBER, with_lent_number
from sacplan.torch_compat.autograd import (
    autograd_sequence_number,
    current_saved_tensors_hooks,
    why_no_hooks,
)
from sacplan.torch_compat.local_tensors import Watching, is_deferred, local_part, wrapping_of
from sacplan.torch_compat.ops import is_composite, run_in_parts, tensors_in
from sacplan.torch_compat.private import is_plain
from sacplan.torch_compat.triton_kernels import TRITON_KERNEL

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks

_UNSCHEDULED = frozenset((torch.ops.aten.detach.default, torch.ops.prim.device.default, TRITON_KERNEL))
"""Ops that only some calls show: autograd's detach of outputs that it keeps; in traced steps, devices and launches."""


@dataclass(frozen=True, slots=True)
class _LastOp:
    """The op that ran last in a call that differs from the recorded step.

    Attributes:
        number: autograd's sequence number then.
        with_gradients: whether gradients were enabled.
        site: the op's call site, if the plan may discard it.
    """

    number: int
    with_gradients: bool
    site: CallSite | None

    def precedes_save_by_custom_function(self, slot: Slot) -> bool:
        """Return whether a custom ``autograd.Function`` saves this slot's tensor now, rather than an op.

        PyTorch does not say who calls a pack hook. But an op's node takes its sequence number just before it saves the
        inputs, so the number has moved on since the last op ran; and outputs are saved right after the op, which ran
        with gradients enabled. A custom function saves after its forward, whose ops ran with gradients disabled.

        Either error is safe: a tensor is kept that need not be, or ``Slot.take`` notices that the function wrote to it.
        """
        if autograd_sequence_number() != self.number:
            return False  # a node has been made since: an op saves its inputs
        return not self.with_gradients or slot.node.site is not self.site


class UnitRecorder(Watching):
    """The dispatch mode that is on while one call of a unit's forward runs.

    Its state is in parts: the ``SlotTable`` of what has been discarded, the schedule that is followed, and, from where
    the call leaves it, the ``Lookup`` and a new schedule.

    Args:
        recorded: the unit's calls in the recorded step, with what is discarded.
        names: gives the names, relative to the unit, of the modules in it, by ``id``.
        first_step: whether checksums are wanted.
        schedule: what an earlier call did.

    Attributes:
        paused: ops that run now are no part of the unit's forward.
        learned: after the call, its schedule; None if it did what the given one says, or failed.
        difference: after the call, where it first differs from the recorded step, if it does.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        recorded: RecordedUnit,
        names: Callable[[], Mapping[int, str]],
        first_step: FirstStep | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        self.paused = False
        self.learned: Schedule | None = None
        self.difference: StepDifference | None = None
        self._unit = recorded.fqn
        self._first_step = first_step or FirstStep(False)
        # By storage, what this call has saved; only where something may be taken away.
        self._saved = SavedStorages() if recorded.marks is not None else None
        self._slots = SlotTable(None if self._saved is None else self._saved.of)
        # The pack and the unpack hook that were there before; None if there were none.
        self._hooks_around: tuple[Any, Any] | None = None
        # The schedule that is followed, its ops, and the index of the next.
        self._schedule = schedule
        self._ops: ScheduledOps = NO_OPS if schedule is None else schedule.ops
        self._at = 0
        # From where the schedule is left: the lookup, and a new schedule, which is None until then.
        self._lookup = Lookup(recorded, names)
        self._draft: Schedule | None = None
        # Whether this call is known to have departed from the recorded step; only then is the last op of interest.
        self._has_departed = False
        self._last: _LastOp | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each op goes through a wrapper; Dynamo is kept out of this code (``recipes.py``)

    def __enter__(self) -> UnitRecorder:
        if why_no_hooks() is not None:
            raise RecipeError(
                f"unit {self._unit!r} cannot discard anything here, since saved-tensor hooks are disabled "
                f"({why_no_hooks()}). Remove the plan for this call, handle.remove(), or plan with "
                f"never=[{self._unit or '*'!r}]."
            )
        self._lookup.enter(sys._getframe(1))
        self._hooks_around = current_saved_tensors_hooks()
        if self._saved is not None:
            self._saved.for_others = self._hooks_around is not None
        _push_hooks(self._pack, unpack)
        super().__enter__()
        here.recorder = self
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        here.recorder = None
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None:
            self._learn()
        # Also after an error: hooks left behind would pack what the rest of the program saves. Other hooks on top,
        # which code in the unit has left, are not ours to remove.
        top = current_saved_tensors_hooks()
        if top is not None and top[0] == self._pack:
            _pop_hooks()
        self._hooks_around = None
        self._lookup.leave()
        self._slots.clear()
        if self._saved is not None:
            self._saved.end()
        self._saved = None

    def saved_on(self, tensor: torch.Tensor) -> SavedStorage | None:
        """Return what the call has saved on the storage of a tensor; None where nothing may be taken away."""
        return None if self._saved is None else self._saved.of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The next op of the schedule, and what to do with it. Where there is none, (None, None): each op is looked up.
        expected, op = self._ops[self._at]
        # Most ops are the schedule's next one, with nothing to do. Each microsecond here is one for each op of a step.
        if expected is func and op is None and not (types or self.paused or self._has_departed):
            self._at += 1
            return func(*args, **kwargs) if kwargs else func(*args)
        if types and is_deferred(types):
            noted.deferred(func, types, args)
            return NotImplemented  # the ops on the tensors that these stand for come here, too
        if self.paused:
            # Frames of finished module calls keep their arguments alive. Drop them first, or they add to the memory of
            # the copy that is made now.
            self._lookup.forget_calls()
            return func(*args, **(kwargs or {}))
        if expected is not func and is_composite(func):  # a schedule has none
            return run_in_parts(self, func, args, kwargs)
        # Passed on unchanged, a Python number would make C++ allocate a second tensor for it.
        given = with_lent_number(args) if func in TAKES_A_NUMBER else args
        if expected is func and not (op is not None and op.differs and self._is_another(func, args, kwargs)):
            self._at += 1
        else:
            op = self._look_up(func, args, kwargs)
        if op is not None and op.differs:
            self._has_departed = True
        # Only computations count: autograd asks for devices and detaches outputs in between.
        if self._has_departed and func_facts(func).name is not None:
            site = op.site if op else None
            self._last = _LastOp(autograd_sequence_number(), torch.is_grad_enabled(), site)
        if op is None:
            return func(*given, **kwargs) if kwargs else func(*given)
        kwargs = kwargs or {}
        action = self._action_of(op, func, args, kwargs)
        if action is Action.DISCARD:
            out = self._run_discarded(op, func, args, given, kwargs)
        else:
            if action is not Action.KEEP:
                self._slots.note_write(func, args, kwargs)
            out = func(*given, **kwargs)
        if op.marks:
            self._tell(op.marks, args, kwargs, out)
        return out

    def _tell(self, marks: Sequence[Mark], args: Any, kwargs: Any, out: Any) -> None:
        """Tell the marks of an op that it has run."""
        assert self._saved is not None
        # Marks name a tensor by its position among those that a recording lists: plain ones, and parts of others.
        tensors = plain_tensors(args, kwargs, out)
        with OutsideForward():
            for mark in marks:
                mark.ran(tensors, self._saved.of)

    def _action_of(self, op: ScheduledOp, func: Any, args: Any, kwargs: Any) -> Action:
        """Return what to do about an op in this call: one that was not recorded follows its inputs."""
        if op.action is not Action.FOLLOW:
            return op.action
        # It reads something discarded, so it may stand for an op that the plan discards. Keeping its output
        # would hold memory that the plan counts as free.
        if any(self._slots.slot_of(t) is not None for t in tensors_in((args, kwargs)) if is_plain(t)):
            return Action.DISCARD
        kept = func_facts(func).kept
        return Action.KEEP if kept is None else kept.action

    def _run_discarded(self, op: ScheduledOp, func: Any, args: Any, given: Any, kwargs: Any) -> Any:
        """Run an op that the plan discards, and note how to run it again.

        ``given`` are the arguments that it runs with now, ``args`` those that it gets again (``with_lent_number``).
        """
        traits, site = op.traits, op.site
        assert traits is not None
        assert site is not None
        # Both before the op runs: it moves the generator, and changes the storages that it writes.
        draw = draw_of(func, args, kwargs) if traits.random else None
        overwritten = self._slots.before_write(traits, args, kwargs) if traits.written_names else None
        out = func(*given, **kwargs)
        recorded = noted.latest
        if draw is not None:
            draw.end()
        node = RecipeNode(self._unit, traits, site, op.times, draw, recorded)
        self._slots.note(node, args, kwargs, out, overwritten)
        return out

    # --- leaving a schedule, and learning one ---

    def _is_another(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op is not the one at which an earlier call began to differ, though both have the same name."""
        known = None if self._schedule is None else self._schedule.known[self._at]
        return known is not None and known[1] != description_of(func_facts(func).name or "", args, kwargs)

    def _look_up(self, func: Any, args: Any, kwargs: Any) -> ScheduledOp | None:
        """Return what to do about an op that the schedule does not expect here, and remember it for the next call."""
        if func in _UNSCHEDULED:
            return None  # they come and go, and the plan decides nothing about them
        draft = self._draft or self._leave_schedule()
        op, known = self._lookup.next(func, args, kwargs)
        # Mark the op at which this call first departs from the recorded step.
        if self._lookup.differs and not self._has_departed:
            op = replace(op or ScheduledOp(Action.KEEP), differs=True)
        draft.add(func, op, known)
        return op

    def _leave_schedule(self) -> Schedule:
        """Continue as if every op so far had been looked up; return the new schedule, which has these ops."""
        done, schedule = self._at, self._schedule
        draft = self._draft = Schedule() if schedule is None else schedule.beginning(done)
        likely = None if schedule is None else schedule.calls_around(done)
        self._lookup.begin(draft.known, likely, differs=self._has_departed)
        # From here on ``NO_OPS`` makes every op a lookup, as in the first call.
        self._ops, self._at = NO_OPS, 0
        return draft

    def _learn(self) -> None:
        """End a call that did not fail: it did what its schedule says, or leaves a new schedule."""
        draft = self._draft
        if draft is None:
            # None marks the end of a schedule: the call ran all of its ops.
            if self._schedule is not None and self._ops[self._at][0] is None:
                self.difference = self._schedule.difference
                return
            draft = self._leave_schedule()  # the call ran fewer ops, or had no schedule
        self._lookup.end()
        self.difference = self._lookup.difference
        draft.end(self.difference)
        self.learned = draft

    # --- what autograd saves ---

    def _pack(self, t: torch.Tensor) -> Any:
        """The pack hook: return a handle for a tensor that is discarded, else the tensor with its version."""
        local = local_part(t)
        plain = is_plain(t)
        slot = self._slots.slot_of(local) if plain or is_plain(local) else None
        if (
            slot is not None
            and self._has_departed
            and self._last is not None  # None: no op has run since the call began to differ
            and self._last.precedes_save_by_custom_function(slot)
        ):
            slot = None  # its backward pass was not recorded, and may overwrite what it saved
        saved = self._saved.of(local) if self._saved is not None and is_plain(local) else None
        if slot is not None:
            handle = RecipeHandle(slot, local, self._first_step, saved)
            if local is t:
                return handle
        paused, self.paused = self.paused, True  # what runs now is not part of the unit
        try:
            if slot is not None:
                return Wrapped(handle, wrapping_of(t), base_without_history(t, local))
            # Hooks around the unit get a kept tensor as they would without ours. Without them, ``Kept`` has the
            # version, which autograd does not check while hooks are on.
            if self._hooks_around is not None:
                pack_hook, unpack_hook = self._hooks_around
                return PassedOn(pack_hook(t), unpack_hook)
            return Kept(t, plain, self._unit, saved if plain and not t.is_inference() else None)
        finally:
            self.paused = paused
