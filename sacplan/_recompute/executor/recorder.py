"""The recorder of one call of a unit: sees its ops, makes nodes for the discarded ones, and gives autograd handles.

The first call of a unit looks up every op among those of the recorded step (``alignment.py``), and leaves a
``Schedule``. Later calls compare each op with it, which is all that happens to a kept op. Saved-tensor hooks are on
only where autograd is about to save a discarded tensor; what it saves in between is kept and checked by autograd as
usual.

A call that departs from the schedule is looked up from there on, and leaves a schedule of its own. A schedule decides
what a lookup would decide. Only the gaps at which hooks are on are an assumption; a tensor saved
at another gap is kept.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from sacplan._executor.alignment import Alignment, RecordedUnit
from sacplan._executor.recording import here
from sacplan._executor.tensors import (
    TAKES_A_NUMBER,
    digest,
    history_free_aliases,
    is_ordinary,
    version_of,
    view_of,
    with_lent_number,
)
from sacplan._program.places import Call, CallSites, StepDifference, described
from sacplan._program.program import CallSite
from sacplan._recompute.executor.draws import Draw, draw_of
from sacplan._recompute.executor.handles import (
    FirstStep,
    Kept,
    PassedOn,
    RecipeHandle,
    Wrapped,
    base_without_history,
    unpack,
)
from sacplan._recompute.executor.nodes import (
    RecipeNode,
    Slot,
    last_writes,
    note_write,
    tensors_of,
)
from sacplan._recompute.executor.schedule import (
    NO_OPS,
    NOTE_WRITE,
    Action,
    Known,
    Schedule,
    ScheduledOp,
    ScheduledOps,
    schedule_of,
)
from sacplan._torch.local_tensors import Watching, is_deferred, local_part, wrapping_of
from sacplan._torch.ops import OpTraits, is_computation, op_traits, tensors_in
from sacplan._torch.private import (
    autograd_sequence_number,
    current_saved_tensors_hooks,
    in_backward,
    is_plain,
    module_calls,
    storage_key,
)
from sacplan.errors import RecipeError

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_why_no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message

_DETACH = torch.ops.aten.detach.default
_RANDOM_DEVICES = ("cpu", "cuda", "meta")


@dataclass(frozen=True, slots=True)
class _Func:
    """What is known of an op before it is called.

    Attributes:
        name: of the overload, where it may be an op of the recorded step.
        traits: where it may run again.
        kept: what to do where the output is kept.
    """

    name: str | None
    traits: OpTraits | None
    kept: ScheduledOp | None


class UnitRecorder(Watching):
    """On while one call of a unit's forward runs.

    Args:
        recorded: the unit's calls in the recorded step, with what is discarded.
        names: gives the names, relative to the unit, of the modules in it, by ``id``.
        first_step: whether checksums are wanted.
        schedules: what earlier calls did, the likely one first.

    Attributes:
        paused: ops that run now are no part of the unit's forward.
        learned: after the call, its schedule; None if it did what one of the given says, or failed.
        followed: that one.
        difference: after the call, where it first differs from the recorded step, if it does.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        recorded: RecordedUnit,
        names: Callable[[], Mapping[int, str]],
        first_step: FirstStep | None = None,
        schedules: Sequence[Schedule] = (),
    ) -> None:
        super().__init__()
        self.paused = False
        self.learned: Schedule | None = None
        self.followed: Schedule | None = None
        self.difference: StepDifference | None = None
        self._unit = recorded.fqn
        self._recorded = recorded
        self._names_of_modules = names
        self._first_step = first_step or FirstStep(False, False)
        self._schedule = schedules[0] if schedules else None
        self._others = schedules[1:]
        self._ops: ScheduledOps = NO_OPS
        self._at = 0
        self._looked_up: list[tuple[Any, ScheduledOp | None]] | None = None  # None while the schedule holds
        self._known: list[Known | None] = []  # of what was looked up
        self._named = -1  # position of the last op among those that are known
        self._alignment = Alignment(recorded)
        self._differs = False  # whether this call is known not to run what was recorded
        self._last: tuple[int, bool, CallSite | None] | None = None  # see _saved_by_custom_function
        self._places = CallSites()
        self._outer_frame: FrameType | None = None
        self._in_backward = False
        self._frames: dict[FrameType, torch.nn.Module] = {}  # of the module calls around the last op
        self._names: Mapping[int, str] = {}
        self._likely: tuple[Call, ...] | None = None  # around the next op, of which the schedule was left
        self._table: dict[int, Slot] = {}
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
                f"unit {self._unit!r} cannot discard anything here, since saved-tensor hooks are disabled "
                f"({_why_no_hooks()}). Remove the plan for this call, handle.remove(), or plan with "
                f"never=[{self._unit or '*'!r}]."
            )
        self._outer = current_saved_tensors_hooks()
        self._in_backward = in_backward()  # as in a checkpoint around the unit
        self._outer_frame = sys._getframe(1)
        self._pack_hook = self._pack  # made once, so that it can be recognized
        schedule = self._schedule
        if schedule is not None:
            self._ops = schedule.ops
            self._differs = schedule.difference is not None
        # With hooks around the unit, kept tensors go through ours, so that ops of those hooks are not counted.
        self._switches = self._outer is None and (schedule is None or schedule.switches)
        if schedule is None or not self._switches:
            self._set_hooks(True)
        super().__enter__()
        here.recorder = self
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        here.recorder = None
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None:
            self._learn()
        self._set_hooks(False)
        self._outer = self._pack_hook = self._outer_frame = None
        self._frames, self._places = {}, CallSites()  # frames hold this
        self._table.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_deferred(types):
            return NotImplemented
        if self.paused:
            return func(*args, **(kwargs or {}))
        given = with_lent_number(args) if func in TAKES_A_NUMBER else args
        expected, op = self._ops[self._at]
        if expected is func:
            self._at += 1
        elif func is not _DETACH and self._follows_another(func):
            op = self._ops[self._at][1]
            self._at += 1
        else:
            op = self._look_up(func, args, kwargs)
        if self._differs and _func(func).name is not None:  # autograd asks for devices, and detaches outputs
            self._last = (autograd_sequence_number(), torch.is_grad_enabled(), op.site if op else None)
        if op is None:
            return func(*given, **kwargs) if kwargs else func(*given)
        kwargs = kwargs or {}
        action = op.action
        if action is Action.FOLLOW:
            reads = any(self._slot_of(t) is not None for t in tensors_in((args, kwargs)) if is_plain(t))
            kept = _func(func).kept
            action = Action.DISCARD if reads else Action.KEEP if kept is None else kept.action
        if action is Action.DISCARD:
            traits = op.traits
            assert traits is not None
            draw = draw_of(func, args, kwargs) if traits.random else None
            before = self._before_write(traits, args, kwargs) if traits.written_names else None
            out = func(*given, **kwargs)
            if draw is None or draw.is_pinned(func, args, kwargs):
                self._note(traits, op, args, kwargs, out, draw, before)
        else:
            if action is not Action.KEEP:
                self._note_write(func, args, kwargs)
            out = func(*given, **kwargs)
        if op.hooks is not None:
            self._set_hooks(op.hooks)
        return out

    # --- looking up, and learning ---

    def _look_up(self, func: Any, args: Any, kwargs: Any) -> ScheduledOp | None:
        if func is _DETACH:
            return None  # autograd calls it for an output that it keeps itself, and so where hooks are off
        if self._looked_up is None:
            self._leave_schedule()
        found = _func(func)
        op, known = found.kept, None
        inner = in_backward() and not self._in_backward
        if found.name is not None and not inner:  # a gradient inside a forward pass is not recomputed
            ranks = [t.dim() for t in tensors_in((args, kwargs)) if is_plain(t)]
            description = described(found.name, ranks)
            around = self._module_calls()
            if self._likely is not None:
                self._resume(around, description)
            place = self._places.at(around)
            known = (self._places.calls, description)
            self._named += 1
            recorded = self._alignment.next(self._places.caller, place, description)
            self._differs = self._alignment.difference is not None
            if found.traits is None:
                pass
            elif recorded is None:
                site = CallSite(found.name, self._named, place)
                op = ScheduledOp(Action.FOLLOW, found.traits, site)
            elif recorded.times:
                op = ScheduledOp(Action.DISCARD, found.traits, recorded.site, recorded.times)
        assert self._looked_up is not None
        self._looked_up.append((func, op))
        self._known.append(known)
        if self._switches and (in_backward() or not self._ours_on_top()):
            self._switches = False  # other hooks come and go inside the unit
        return op

    def _module_calls(self) -> list[tuple[FrameType, str]]:
        """The calls of the unit's modules that run now, outermost first, and the names of the modules."""
        assert self._outer_frame is not None
        names = self._names
        self._frames = module_calls(self._outer_frame, self._frames)
        return [(frame, names[id(m)]) for frame, m in self._frames.items() if id(m) in names]

    def _follows_another(self, func: Any) -> bool:
        """Whether another schedule began with the same ops, and goes on with this one; it is followed from here on."""
        if self._looked_up is not None or self._schedule is None:
            return False
        done = self._at
        for other in self._others:
            if other.switches == self._switches and other.goes_on(self._ops, done, func):
                self._schedule, self._ops = other, other.ops
                self._differs = other.difference is not None
                if other.switches:
                    self._set_hooks(other.hooks_before(done))
                return True
        return False

    def _leave_schedule(self) -> None:
        """Continue as if every op so far had been looked up."""
        done, schedule = self._at, self._schedule
        self._names = self._names_of_modules()
        self._looked_up = [(func, op and op.without_hooks()) for func, op in self._ops[:done]]
        if schedule is not None:
            self._known = list(schedule.known[:done])
            for known in self._known:
                if known is not None:
                    self._named += 1
                    place = self._places.follow(known[0])
                    self._alignment.next(self._places.caller, place, known[1])
            expected = schedule.known[done] if done < len(schedule.known) else None
            self._likely = () if expected is None else expected[0]
            self._handle_gaps = {gap for gap in schedule.handles if gap <= done}
            self._kept_gaps = {gap for gap in schedule.kept if gap <= done}
        self._ops, self._at = NO_OPS, 0
        self._set_hooks(True)

    def _resume(self, around: list[tuple[FrameType, str]], description: str) -> None:
        """Tell which module calls the first op after the schedule is in: if possible, those where it was recorded."""
        assert self._likely is not None
        candidates = list(self._places.candidates([name for _, name in around], self._likely))
        expected = (c for c in candidates if self._alignment.expects(self._places.place_in(c), description))
        self._places.resume(around, next(expected, candidates[0]))
        self._likely = None

    def _learn(self) -> None:
        """The call is over."""
        if self._looked_up is None:
            if self._ops[self._at][0] is None or self._follows_another(None):  # it did what the schedule says
                self.followed = self._schedule
                self.difference = self.followed.difference if self.followed is not None else None
                return
            self._leave_schedule()
        assert self._looked_up is not None
        self._alignment.end()
        self.difference = self._alignment.difference
        self.learned = schedule_of(
            self._looked_up,
            self._known,
            self._handle_gaps,
            self._kept_gaps,
            switches=self._switches,
            difference=self.difference,
        )

    def _ours_on_top(self) -> bool:
        top = current_saved_tensors_hooks()
        return top is not None and top[0] is self._pack_hook

    def _set_hooks(self, on: bool) -> None:
        """Only if nobody else has changed the hooks: autograd's engine has its own, and code inside may have too.

        Where ours are not on, tensors are kept.
        """
        top = current_saved_tensors_hooks()
        ours = top is not None and top[0] is self._pack_hook
        if ours and not on:
            _pop_hooks()
        elif on and not ours and top == self._outer and _why_no_hooks() is None:
            _push_hooks(self._pack_hook, unpack)

    # --- nodes ---

    def _before_write(self, traits: OpTraits, args: Any, kwargs: Any) -> Slot | None:
        """The slot that an op is about to write in place, if it writes the slot's own tensor. The write is noted.

        A write through an alias may not bump the version of the tensor itself (``t.data``).
        """
        slot = self._slot_of(args[0]) if traits.in_place and is_plain(args[0]) else None
        self._note_write(traits.func, args, kwargs)
        return slot if slot is not None and slot.tensor() is args[0] else None

    def _note(
        self,
        traits: OpTraits,
        op: ScheduledOp,
        args: Any,
        kwargs: Any,
        out: Any,
        draw: Draw | None,
        overwritten: Slot | None,
    ) -> None:
        """Make a node for the op, unless something about this call requires its output to be kept."""
        outputs = tensors_of(out)
        in_place = traits.in_place
        if in_place and overwritten is None:
            return
        left_out = traits.left_out(args)
        if left_out:
            args = [None if i in left_out else a for i, a in enumerate(args)]
        args, kwargs, places, inputs = traits.split(args, kwargs)
        if not all(map(is_ordinary, outputs)) or not all(map(is_ordinary, inputs)) or not outputs:
            return
        if kwargs.get("non_blocking"):
            return  # nothing would wait for the second copy
        if traits.random and not _has_one_generator(inputs):
            return
        input_storages = [t.untyped_storage() for t in inputs]
        taken = [storage_key(s) for s in input_storages]
        output_storages = [t.untyped_storage() for t in outputs]
        keys = [storage_key(s) for s in output_storages]
        if not in_place and not set(keys).isdisjoint(taken):
            return  # an input is also an output: the node would hold what it makes
        assert op.site is not None
        node = RecipeNode(self._unit, traits, op.site, op.times, draw)
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
            aliases = history_free_aliases([t for _, t, _ in held])
            for alias, (place, t, key) in zip(aliases, held, strict=True):
                if t.requires_grad:
                    alias.requires_grad_()
                digested = digest(t) if self._first_step.digests else None
                node.held.append((place, alias, t._version, last_writes.get(key, 0), digested))
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

    def _slot_of(self, t: torch.Tensor) -> Slot | None:
        """The slot of this tensor's storage, if it still holds what the op wrote."""
        storage = t.untyped_storage()
        slot = self._table.get(storage_key(storage))
        if slot is None or slot.storage() is not storage or slot.version != version_of(t):
            return None
        return slot

    def _note_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """A storage that is written in place is kept from here on; unpacking an earlier handle is an error."""
        traits = op_traits(func)
        for t in tensors_in(traits.written(args, kwargs)):
            if is_plain(t):
                storage = t.untyped_storage()
                key = storage_key(storage)
                note_write(key)
                slot = self._table.pop(key, None)
                if slot is not None and slot.storage() is storage:  # else the address was reused
                    slot.written = True

    # --- what autograd saves ---

    def _pack(self, t: torch.Tensor) -> Any:
        local = local_part(t)
        plain = is_plain(t)
        slot = self._slot_of(local) if plain or is_plain(local) else None
        if slot is not None and self._differs and self._saved_by_custom_function(slot):
            slot = None  # its backward pass was not recorded, and may overwrite what it saved
        if self._looked_up is not None:
            (self._kept_gaps if slot is None else self._handle_gaps).add(len(self._looked_up))
        if slot is not None:
            handle = RecipeHandle(slot, local, self._first_step)
            if local is t:
                return handle
        paused, self.paused = self.paused, True  # what runs now is not part of the unit
        try:
            if slot is not None:
                return Wrapped(handle, wrapping_of(t), base_without_history(t, local))
            if self._outer is not None:
                pack_hook, unpack_hook = self._outer
                return PassedOn(pack_hook(t), unpack_hook)
            return Kept(t, plain, self._unit)
        finally:
            self.paused = paused

    def _saved_by_custom_function(self, slot: Slot) -> bool:
        """Whether a custom ``autograd.Function`` saves this slot's tensor now, rather than an op.

        PyTorch does not say who calls a pack hook. But an op's node takes its sequence number just before it saves the
        inputs, so the number has moved on since the last op ran; and outputs are saved right after the op, which ran
        with gradients enabled. A custom function saves after its forward, whose ops ran with gradients disabled.
        Where this is wrong, a tensor is kept that need not be, or ``Slot.take`` notices the write.
        """
        if self._last is None:
            return False  # no op since the call departed from the recorded step
        number, with_gradients, site = self._last
        if autograd_sequence_number() != number:
            return False  # a node has been made since: an op saves its inputs
        return not with_gradients or slot.node.site is not site


@functools.cache
def _func(func: Any) -> _Func:
    if not isinstance(func, torch._ops.OpOverload):
        return _Func(str(func), None, None)
    traits = op_traits(func)
    kept = NOTE_WRITE if traits.written_names else None
    name = traits.name if is_computation(traits.name) else None
    return _Func(name, traits if traits.rerunnable else None, kept)


def _has_one_generator(inputs: list[torch.Tensor]) -> bool:
    return len({t.device for t in inputs}) == 1 and inputs[0].device.type in _RANDOM_DEVICES
