"""Recomputation as a rewrite: the events of a program in which some ops are discarded.

    patch = recompute(program, {"layers.0": {("aten.mm.default", 2): 1}})
    program.with_(patch).footprint.peak_bytes

It follows the executor (``executor/slots.py``, ``executor/nodes.py``) rule for rule, by reference counts:

- A discarded op leaves a node that holds its arguments: handles on kept storages, references to slots of other nodes.
  The outputs of a node are slots.
- Autograd's handle on a slot holds no memory, so the handle's ``PACK`` and ``RELEASE`` are left out. The original
  tensor is freed where code frees it.
- The first ``UNPACK`` of a slot runs the nodes that it needs, arguments first, into new storages.
- A value is freed when no pending node, handle or unpacked tensor refers to it. A node that has run for the last time
  releases its arguments, which may free others.

So the peak of the rewritten program is that of the real step, not a bound on it:
``tests/invariants/test_predicted_is_measured.py`` compares them, byte for byte.

A rewrite is local: it looks at the events of the storages that discarded ops write, and changes no others. Its cost is
that of these events.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sacplan.core.decisions import Discarded
from sacplan.core.program import ROOT_SCOPE, Event, Op, Patch, Phase, Program, StorageKind
from sacplan.core.rewriting import PatchBuilder

_ALLOC, _FREE, _OP, _PACK, _RELEASE, _UNPACK, _DROP, _ENTER, _EXIT, _ = map(int, Event)


def recomputed(program: Program, discarded: Discarded) -> Program:
    """Return the program of the step with the given call sites discarded.

    Args:
        program: the step, as it ran without a plan.
        discarded: unit to call sites, and how often each is dropped. Units must not nest. A call site that the unit
            does not have is ignored, as the executor ignores it; so is one whose op cannot run again, which no plan
            may name (``Recomputation.patch``).
    """
    return program.with_(recompute(program, discarded))


def recompute(program: Program, discarded: Discarded) -> Patch:
    """Return the patch of ``recomputed``."""
    ops = discarded_ops(program, discarded)
    units = frozenset(
        scope for fqn, sites in discarded.items() if sites for scope in program.calls.get(fqn, ())
    )
    return recompute_ops(program, ops, units)


def discarded_ops(program: Program, discarded: Discarded) -> dict[int, int]:
    """Return the recorded ops that are discarded, and how often."""
    return {
        op: times[site]
        for fqn, times in discarded.items()
        if times
        for scope in program.calls.get(fqn, ())
        for op, site in program.sites(scope).items()
        if site in times and program.ops[op].recomputable and program.ops[op].phase == Phase.FORWARD
    }


def recompute_ops(
    program: Program,
    discarded: Mapping[int, int],
    units: Collection[int],
) -> Patch:
    """Return the patch that discards ops.

    Args:
        program: the step.
        discarded: ops that leave a node, if they run inside one of the ``units``, and how often they are discarded.
        units: scopes (module calls) in which nodes are made.
    """
    if not discarded:
        return Patch()
    rewriter = _RecomputeRewriter(program, discarded, units)
    for position, code, arg in _events_that_matter(program, discarded, units):
        rewriter.step(position, code, arg)
    return rewriter.draft.patch()


def _events_that_matter(
    program: Program, discarded: Collection[int], units: Collection[int]
) -> list[tuple[int, int, int]]:
    liveness = program.liveness
    # Discarded ops, all events of the storages that they write, and where units begin and end. Nothing else
    # changes.
    positions = {int(liveness.op_events[op]) for op in discarded}
    for op in discarded:
        for s in program.ops[op].writes:
            positions.update(liveness.events_of[s])
    for scope in units:
        positions.update((liveness.entered[scope], liveness.exited[scope]))
    return [(p, *program.events[p]) for p in sorted(positions)]


class _DiscardedOp:
    """A discarded op of one module call, until it has run again for the last time."""

    __slots__ = ("args", "held", "live_slots", "op", "pending", "slots", "state", "times")

    def __init__(self, op: int, times: int) -> None:
        self.op = op
        self.times = times  # how many times its values are still to be dropped
        self.args: list[_DiscardedOutput] = []
        self.held: list[int] = []  # handles on arguments that are kept
        self.pending = True
        self.live_slots = 0
        self.slots: list[_DiscardedOutput] = []
        self.state = -1  # storage of the generator's state


class _DiscardedOutput:
    """One output of a node: who still refers to it, and the storage of its value, if it has one."""

    __slots__ = ("instances", "node", "readers", "refs", "storage", "value")

    def __init__(self, node: _DiscardedOp, storage: int) -> None:
        self.node = node
        self.storage = storage
        self.refs = 1  # the table of the module call that is being recorded, while the original lives
        self.value = -1
        self.instances = 0  # unpacked tensors on the value that are alive
        self.readers = 0  # nodes that have it as an argument


class _RecomputeRewriter:
    """Follows the events of the storages that discarded ops write, and notes what takes their place."""

    def __init__(self, program: Program, discarded: Mapping[int, int], units: Collection[int]) -> None:
        self.program = program
        self.discarded = discarded
        self.units = units
        self.unit = ROOT_SCOPE  # the call of a unit that runs
        self.table: dict[int, _DiscardedOutput] = {}  # storage to slot, for that call
        self.handles: dict[int, _DiscardedOutput] = {}
        self.instances: dict[int, _DiscardedOutput] = {}
        self.loose: dict[int, int] = {}  # instance to the storage that it alone holds
        # What a backward formula saves again, for a second derivative: handles and instances that take their places.
        self.saved_again: dict[int, int] = {}
        self.unpacked_again: dict[int, int] = {}
        # By unpacked instance, the storage that was discarded, and that of its value.
        self.in_use: dict[int, tuple[int, int]] = {}
        # While something runs again: slots whose values are dropped after it, and how many times they are read before.
        self.passing: dict[_DiscardedOutput, int] = {}
        self.draft = PatchBuilder(program)
        self.out: list[tuple[int, int]] = []  # what takes the place of the event that is looked at

    def step(self, position: int, code: int, arg: int) -> None:
        """Follow one event. A return without an entry in ``draft.events`` leaves the event as it is."""
        self.out = out = []
        if code == _OP:
            op = self.program.ops[arg]
            if arg not in self.discarded or self.unit == ROOT_SCOPE:
                return  # kept; or it runs outside of the units, where no recorder is on
            if op.replaces >= 0 and op.replaces not in self.table:
                return  # what it writes in place was kept
            self._discard(arg, op)
        elif code == _FREE:
            # The original dies here with or without a plan. The table's reference dies with it (``Slot.storage``).
            out.append((code, arg))
            slot = self.table.pop(arg, None)
            if slot is not None:
                self._unref(slot)
        elif code == _PACK:
            storage = self.program.handle_storages[arg]
            in_use = self._value_in_use(storage)
            if in_use >= 0:
                self.saved_again[arg] = again = self.draft.new_handle(in_use, self.program.handle_ops[arg])
                self.draft.events[position] = ((code, again),)
                return
            slot = self.table.get(storage)
            if slot is None or self._is_held_by_code(arg):
                return  # a kept tensor; or a handle for which no pack hook is called
            # Nothing is put in place of the event: a handle on a slot holds no memory.
            slot.refs += 1
            self.handles[arg] = slot
        elif code == _RELEASE:
            if arg in self.saved_again:
                self.draft.events[position] = ((code, self.saved_again.pop(arg)),)
                return
            slot = self.handles.pop(arg, None)
            if slot is None:
                return  # a handle on a kept tensor
            self._unref(slot)
        elif code == _UNPACK:
            handle = self.program.instance_handles[arg]
            if handle in self.saved_again:
                instance = self.draft.instance_handles.add(self.saved_again[handle])
                self.unpacked_again[arg] = instance
                on_value = self.draft.handle_storages[self.saved_again[handle]]
                self.in_use[arg] = self.program.handle_storages[handle], on_value
                self.draft.events[position] = ((code, instance),)
                return
            slot = self.handles.get(handle)
            if slot is None:
                return  # a kept tensor
            # A value that the slot forgets again belongs to this instance alone, and dies with it. Otherwise
            # all instances share the slot's value.
            if slot.value < 0 and (value := self._compute(slot, position)) is not None:
                self.loose[arg] = value
                self.in_use[arg] = slot.storage, value
            else:
                slot.instances += 1
                self.instances[arg] = slot
                self.in_use[arg] = slot.storage, slot.value
        elif code == _DROP:
            self.in_use.pop(arg, None)
            if arg in self.loose:
                out.append((_FREE, self.loose.pop(arg)))
            elif arg in self.unpacked_again:
                out.append((code, self.unpacked_again.pop(arg)))
            elif arg in self.instances:
                slot = self.instances.pop(arg)
                slot.instances -= 1
                self._free_unused(slot)
            else:
                return  # an instance of a kept tensor
        elif code == _ENTER:
            if arg in self.units and self.unit == ROOT_SCOPE:
                self.unit = arg  # a unit inside a unit belongs to the outer one
            return
        elif code == _EXIT:
            if arg != self.unit:
                return  # the end of a unit inside it
            out.append((code, arg))
            self.unit = ROOT_SCOPE
            # As ``SlotTable.clear``: from here on only handles, nodes and instances refer to slots.
            # Unreferencing may free nodes, which changes slots but not this list.
            slots = list(self.table.values())
            self.table.clear()
            for slot in slots:
                self._unref(slot)
        else:
            return
        # A patch holds only what changes.
        if out != [(code, arg)]:
            self.draft.events[position] = tuple(out)

    def _value_in_use(self, storage: int) -> int:
        """Return the value of a discarded storage that a backward formula has unpacked and works on; -1 if none has.

        A formula that saves the storage again saves this value, and no hook of the unit discards it.
        """
        return next((value for of, value in reversed(self.in_use.values()) if of == storage), -1)

    def _is_held_by_code(self, handle: int) -> bool:
        """Whether code holds this handle rather than autograd: an op that runs in slices holds what it will read."""
        return self.program.handle_ops[handle] < 0 and self.program.handle_tensors[handle] < 0

    def _discard(self, index: int, op: Op) -> None:
        node = _DiscardedOp(index, self.discarded[index])
        if op.state_bytes:
            # As ``Draw``: the state before the op stays until the node has run; room for the state after it is
            # held while the op runs.
            node.state = self.draft.new_storage(op.state_bytes, StorageKind.OTHER)
            room = self.draft.new_storage(op.state_bytes, StorageKind.OTHER)  # for the state after the op
            self.out += [(_ALLOC, node.state), (_ALLOC, room), (_OP, index), (_FREE, room)]
        else:
            self.out.append((_OP, index))
        for s in op.reads:
            slot = self.table.get(s)
            if slot is None:
                handle = self.draft.new_handle(s, index)  # with an op: it does not pass for code's own
                self.out.append((_PACK, handle))
                node.held.append(handle)
            else:
                slot.refs += 1
                slot.readers += 1
                node.args.append(slot)
        for s in op.writes:
            slot = _DiscardedOutput(node, s)
            node.slots.append(slot)
            node.live_slots += 1
            self.table[s] = slot

    def _unref(self, slot: _DiscardedOutput) -> None:
        stack = [slot]
        while stack:
            slot = stack.pop()
            slot.refs -= 1
            if slot.refs:
                continue
            self._free_unused(slot)
            node = slot.node
            node.live_slots -= 1
            # Nobody can ask for an output any more, so the node will never run: release its arguments.
            if node.pending and node.live_slots == 0:
                stack.extend(self._finish(node))

    def _finish(self, node: _DiscardedOp) -> list[_DiscardedOutput]:
        """Let go of what a node that will not run any more holds; return the slots that it referred to."""
        node.pending = False
        if node.state >= 0:
            self.out.append((_FREE, node.state))
        self.out.extend((_RELEASE, handle) for handle in node.held)
        args, node.args, node.held = node.args, [], []
        return args

    def _free_unused(self, slot: _DiscardedOutput) -> None:
        if slot.value >= 0 and slot.refs == 0 and slot.instances == 0:
            self._free(slot)

    def _free(self, slot: _DiscardedOutput) -> None:
        self.out.append((_FREE, slot.value))
        slot.value = -1

    def _compute(self, wanted: _DiscardedOutput, position: int) -> int | None:
        """Run the pending nodes that a slot needs, arguments first, as ``nodes.compute`` does.

        Return the value if the slot's node will run again: the slot forgets the value, and only the caller holds it.
        None: the slot keeps its value.
        """
        order = self._needed(wanted.node)
        if any(node.times > 1 for node in order):
            for node in order:
                for arg in node.args:
                    if arg.value < 0 and arg.node.times > 1:
                        self.passing[arg] = self.passing.get(arg, 0) + 1
            if wanted.node.times > 1:
                self.passing[wanted] = self.passing.get(wanted, 0) + 1
        asked_by = self._op_before(position)
        for node in order:
            self._run(node, asked_by)
        loose = None
        if wanted in self.passing:
            loose, wanted.value = wanted.value, -1
        self.passing.clear()
        return loose

    def _op_before(self, position: int) -> Op:
        """Return the last op that ran before an event. Ops that run again at this event get its phase and scope.

        Optimizer ops inside the backward pass are skipped.
        """
        events, ops = self.program.events, self.program.ops
        while events[position][0] != _OP or ops[events[position][1]].phase is Phase.OPTIMIZER:
            position -= 1
        return ops[events[position][1]]

    def _needed(self, node: _DiscardedOp) -> list[_DiscardedOp]:
        order: dict[_DiscardedOp, None] = {}
        stack: list[tuple[_DiscardedOp, bool]] = [(node, False)]
        while stack:
            current, ready = stack.pop()
            if not current.pending or current in order:
                continue
            if not ready:
                stack.append((current, True))
                stack.extend((arg.node, False) for arg in reversed(current.args) if arg.value < 0)
                continue
            order[current] = None
        return list(order)

    def _run(self, node: _DiscardedOp, asked_by: Op) -> None:
        op = self.program.ops[node.op]
        last = node.times == 1
        # Before anything is freed: an op that overwrites its argument in place still reads that storage.
        values = {arg.storage: arg.value for arg in node.args}
        if op.replaces >= 0:
            self._overwrite(node, op.replaces)
        outputs = [
            self.draft.new_storage(self.program.storage_bytes[s], self.program.storage_kinds[s])
            for s in op.writes
        ]
        again = Op(
            op.name,
            asked_by.phase,
            asked_by.scope,
            op.time_ms,
            op.flops,
            # As ``Draw.again``: the generator's current state is held while the state after the op is read.
            max(op.workspace_bytes, op.state_bytes) + op.state_bytes,
            tuple(values.get(s, s) for s in op.reads),
            tuple(outputs),
            (),
            False,
            recomputes=node.op,
        )
        self.out.append((_OP, self.draft.ops.add(again)))
        # Before ``_finish``, which empties the arguments.
        taken = [arg for arg in node.args if arg in self.passing]
        for slot, storage in zip(node.slots, outputs, strict=True):
            slot.value = storage
            # An output that nobody waits for dies at once. In a run that is not the last, only readers in this
            # recomputation count.
            if not (slot.refs if last else slot in self.passing):
                self._free(slot)
        if last:
            for slot in self._finish(node):
                self._unref(slot)
        else:
            node.times -= 1
        for slot in taken:
            self.passing[slot] -= 1
            if not self.passing[slot] and slot.value >= 0:
                self._free(slot)

    def _overwrite(self, node: _DiscardedOp, storage: int) -> None:
        """Free the value that an op writes in place, if nobody else will want it; else the op writes a copy."""
        slot = next(arg for arg in node.args if arg.storage == storage)
        if slot.readers == 1 and (node.times == 1 or slot.node.pending):
            self._free(slot)
