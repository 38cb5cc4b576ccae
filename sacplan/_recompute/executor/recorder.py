"""The recorder of one call of a unit: sees its ops, leaves nodes for those to discard, and gives autograd handles.

The first call of a unit looks every op up; it leaves a ``Schedule``. Later calls compare each op with it, and
that is all that happens to a kept one. Saved-tensor hooks are on where autograd is about to take a discarded
tensor; what it takes in between it keeps, and checks, as it always does.

A call that does something else than the schedule is looked up from there on, and leaves a schedule itself.
What a schedule decides is what looking up would decide. Only the gaps at which hooks are on are an assumption; a
tensor that comes at another one is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sacplan._recompute.executor.handles import FirstStep, Handle, Kept, PassedOn, unpack
from sacplan._recompute.executor.nodes import (
    Node,
    Op,
    Slot,
    generator_state,
    here,
    op_of,
    tensors_of,
    unversioned_writes,
)
from sacplan._recompute.executor.schedule import (
    NO_STEPS,
    NOTE_UNVERSIONED,
    NOTE_WRITE,
    Action,
    Schedule,
    Step,
    Steps,
    schedule_of,
)
from sacplan._recompute.executor.tensors import history_free_aliases, is_ordinary, version_of, view_of
from sacplan._torch.ops import op_traits, tensors_in
from sacplan._torch.private import current_saved_tensors_hooks, in_backward, is_plain, storage_key
from sacplan.errors import RecipeError

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_why_no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message

_DETACH = torch.ops.aten.detach.default
_RANDOM_DEVICES = ("cpu", "cuda", "meta")


class _Count:
    """An op of which some occurrences are discarded: how many of it the call has run."""

    __slots__ = ("op", "others", "seen", "wanted")

    def __init__(self, op: Op, wanted: Mapping[int, int], others: Step | None) -> None:
        self.op = op
        self.wanted = wanted
        self.others = others
        self.seen = 0

    def next(self) -> Step | None:
        occurrence = self.seen
        self.seen += 1
        drops = self.wanted.get(occurrence)
        return self.others if drops is None else Step(Action.DISCARD, self.op, occurrence, drops)


class UnitRecorder(TorchDispatchMode):
    """On while one call of a unit's forward runs.

    Args:
        unit: fqn, for messages.
        wanted: op name to the occurrences that are discarded, and how often each once more (``Node.drops``).
        first_step: whether checksums are wanted.
        schedule: what an earlier call did.

    Attributes:
        paused: ops that run now are no part of the unit's forward.
        learned: after the call, its schedule; None if it did what the given one says, or failed.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        unit: str,
        wanted: Mapping[str, Mapping[int, int]],
        first_step: FirstStep | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        super().__init__()
        self.paused = False
        self.learned: Schedule | None = None
        self._unit = unit
        self._wanted = wanted
        self._first_step = first_step or FirstStep(False)
        self._schedule = schedule
        self._steps: Steps = NO_STEPS
        self._at = 0
        self._looked_up: list[tuple[Any, Step | None]] | None = None  # None while the schedule holds
        self._counts: dict[Any, _Count | Step | None] = {}
        self._table: dict[int, Slot] = {}
        self._writes: dict[int, int] = {}  # storage to how often it was written
        self._any_node = False
        self._outer: tuple[Any, Any] | None = None
        self._pack_hook: Any = None
        self._switches = False
        self._handle_gaps: set[int] = set()
        self._kept_gaps: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each op goes through a wrapper; Dynamo is kept out of this code (``recipes.py``)

    def __enter__(self) -> UnitRecorder:
        if _why_no_hooks() is not None:
            raise RecipeError(
                f"unit {self._unit!r} cannot discard anything here, since saved-tensor hooks are switched off "
                f"({_why_no_hooks()}). Remove the plan for this call, handle.remove(), or plan with "
                f"never=[{self._unit or '*'!r}]."
            )
        self._outer = current_saved_tensors_hooks()
        self._pack_hook = self._pack  # made once, so that it can be recognized
        schedule = self._schedule
        if schedule is not None:
            self._steps = schedule.steps
        # With other hooks around, tensors that are kept go through ours, so that ops of theirs are not counted.
        self._switches = self._outer is None and (schedule is None or schedule.switches)
        if schedule is None or not self._switches:
            self._set_hooks(True)
        super().__enter__()
        here.recorder = self
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        here.recorder = None
        super().__exit__(exc_type, exc_value, traceback)
        self._set_hooks(False)
        if self._looked_up is not None and exc_type is None:
            self.learned = schedule_of(
                self._looked_up, self._handle_gaps, self._kept_gaps, switches=self._switches
            )
        self._outer = self._pack_hook = None
        self._table.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.paused:
            return func(*args, **(kwargs or {}))
        expected, step = self._steps[self._at]
        if expected is func:
            self._at += 1
        else:
            step = self._look_up(func)
        if step is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if step.action is Action.DISCARD:
            op = step.op
            assert op is not None
            rng = generator_state(args, kwargs) if op.traits.random else None
            before = self._before_write(op, args, kwargs) if op.traits.written_names else None
            out = func(*args, **kwargs)
            self._note(op, step, args, kwargs, out, rng, before)
        else:
            action = step.action
            if action is Action.NOTE_UNVERSIONED or (action is Action.NOTE_WRITE and self._any_node):
                self._note_write(func, args, kwargs)
            out = func(*args, **kwargs)
        if step.hooks is not None:
            self._set_hooks(step.hooks)
        return out

    # --- looking up, and learning ---

    def _look_up(self, func: Any) -> Step | None:
        if func is _DETACH:
            return None  # autograd calls it for an output that it keeps itself, and so where hooks are off
        if self._looked_up is None:
            self._leave_schedule()
        step = self._step_of(func)
        assert self._looked_up is not None
        self._looked_up.append((func, step))
        if self._switches and (in_backward() or not self._ours_on_top()):
            self._switches = False  # inside of the unit somebody else's hooks come and go
        return step

    def _step_of(self, func: Any) -> Step | None:
        try:
            found = self._counts[func]
        except KeyError:
            found = self._counts[func] = self._read(func)
        return found.next() if isinstance(found, _Count) else found

    def _read(self, func: Any) -> _Count | Step | None:
        if not isinstance(func, torch._ops.OpOverload):
            return None
        traits = op_traits(func)
        others = None
        if traits.written_names:
            others = NOTE_UNVERSIONED if traits.unversioned else NOTE_WRITE
        wanted = self._wanted.get(traits.name) if traits.rerunnable else None
        return _Count(op_of(func), wanted, others) if wanted else others

    def _leave_schedule(self) -> None:
        """Go on as if every op so far had been looked up."""
        done, schedule = self._at, self._schedule
        self._looked_up = [(func, self._step_of(func)) for func, _ in self._steps[:done]]
        if schedule is not None:
            self._handle_gaps = {gap for gap in schedule.handles if gap <= done}
            self._kept_gaps = {gap for gap in schedule.kept if gap <= done}
        self._steps, self._at = NO_STEPS, 0
        self._set_hooks(True)

    def _ours_on_top(self) -> bool:
        top = current_saved_tensors_hooks()
        return top is not None and top[0] is self._pack_hook

    def _set_hooks(self, on: bool) -> None:
        """Only if they are where the unit has left them: autograd's engine has its own, and so may code inside.

        Where hooks do not come on, tensors are kept.
        """
        top = current_saved_tensors_hooks()
        ours = top is not None and top[0] is self._pack_hook
        if ours and not on:
            _pop_hooks()
        elif on and not ours and top == self._outer and _why_no_hooks() is None:
            _push_hooks(self._pack_hook, unpack)

    # --- nodes ---

    def _before_write(self, op: Op, args: Any, kwargs: Any) -> Slot | None:
        """The slot that an op is about to write in place, if it writes just the slot's tensor. The write is noted.

        Through an alias it may be that PyTorch counts no version of the tensor itself (``t.data``).
        """
        slot = self._slot_of(args[0]) if op.traits.in_place and is_plain(args[0]) else None
        self._note_write(op.func, args, kwargs)
        return slot if slot is not None and slot.tensor() is args[0] else None

    def _note(
        self, op: Op, step: Step, args: Any, kwargs: Any, out: Any, rng: Any, overwritten: Slot | None
    ) -> None:
        """Leave a node, unless something about this call says that it had better be kept (see ``can_run_again``)."""
        outputs = tensors_of(out)
        in_place = op.traits.in_place
        if in_place and overwritten is None:
            return
        left_out = op.traits.left_out(args)
        if left_out:
            args = [None if i in left_out else a for i, a in enumerate(args)]
        args, kwargs, places, inputs = op.split(args, kwargs)
        if not all(map(is_ordinary, outputs)) or not all(map(is_ordinary, inputs)) or not outputs:
            return
        if kwargs.get("non_blocking"):
            return  # nobody would wait for the second copy
        if op.traits.random and not _has_one_generator(inputs):
            return
        input_storages = [t.untyped_storage() for t in inputs]
        taken = [storage_key(s) for s in input_storages]
        output_storages = [t.untyped_storage() for t in outputs]
        keys = [storage_key(s) for s in output_storages]
        if not in_place and not set(keys).isdisjoint(taken):
            return  # it hands an input on: the node would hold what it makes
        node = Node(self._unit, op, step.occurrence, step.drops, rng, self._writes)
        node.args, node.kwargs = args, kwargs
        table = self._table
        held = []
        for place, t, storage, key in zip(places, inputs, input_storages, taken, strict=True):
            slot = table.get(key)
            if in_place and key == keys[0]:
                slot = overwritten
            elif slot is not None and (slot.storage() is not storage or slot.version != t._version):
                slot = None
            if slot is None:
                held.append((place, t, key))
            else:
                slot.readers += all(slot is not arg[1] for arg in node.slot_args)
                node.slot_args.append((place, slot, slot.view_of(t), t.requires_grad))
        if held:
            writes = self._writes
            aliases = history_free_aliases([t for _, t, _ in held])
            for alias, (place, t, key) in zip(aliases, held, strict=True):
                if t.requires_grad:
                    alias.requires_grad_()
                before = writes.get(key, 0) + unversioned_writes.get(key, 0)
                node.held.append((place, alias, t._version, before))
        made: dict[int, Slot] = {}
        for t, storage, key in zip(outputs, output_storages, keys, strict=True):
            if key in made:  # two outputs on one storage
                node.outputs.append(None)
            else:
                if overwritten is None:
                    made[key] = slot = Slot(node, t, view_of(t), t._version, storage, key, table)
                else:  # PyTorch counts the write when it is done
                    made[key] = slot = Slot(node, t, overwritten.view, t._version + 1, storage, key, table)
                node.outputs.append(weakref.ref(slot))
        table.update(made)
        self._any_node = True

    def _slot_of(self, t: torch.Tensor) -> Slot | None:
        """The slot whose storage this tensor is on, if it is still what the op made."""
        storage = t.untyped_storage()
        slot = self._table.get(storage_key(storage))
        if slot is None or slot.storage() is not storage or slot.version != version_of(t):
            return None
        return slot

    def _note_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """Storages written in place are kept from here on; a handle given out before is refused."""
        traits = op_traits(func)
        for t in tensors_in(traits.written(args, kwargs)):
            if is_plain(t):
                storage = t.untyped_storage()
                key = storage_key(storage)
                writes = unversioned_writes if traits.unversioned else self._writes
                writes[key] = writes.get(key, 0) + 1
                slot = self._table.pop(key, None)
                if slot is not None and slot.storage() is storage:  # else the address was used again
                    slot.written = True

    # --- what autograd takes ---

    def _pack(self, t: torch.Tensor) -> Any:
        plain = is_plain(t)
        slot = self._slot_of(t) if plain else None
        if self._looked_up is not None:
            (self._kept_gaps if slot is None else self._handle_gaps).add(len(self._looked_up))
        if slot is not None:
            return Handle(slot, t, self._first_step)
        paused, self.paused = self.paused, True  # what runs now is no op of the unit
        try:
            if self._outer is not None:
                pack_hook, unpack_hook = self._outer
                return PassedOn(pack_hook(t), unpack_hook)
            return Kept(t, plain, self._unit)
        finally:
            self.paused = paused


def _has_one_generator(inputs: list[torch.Tensor]) -> bool:
    return len({t.device for t in inputs}) == 1 and inputs[0].device.type in _RANDOM_DEVICES
