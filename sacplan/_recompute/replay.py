"""Replay a recorded step with a plan applied: what would be alive, op by op, and what would run again.

The replay follows the executor (``_recompute/executor``) rule for rule: a discarded op leaves a
node that holds its arguments, a node's outputs are slots, a slot is computed when autograd first asks for it
and its value goes when nobody pending refers to it. So the peak is that of the real step, not a
bound on it; ``tests/test_recipes.py`` holds one against the other, byte for byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sacplan._program.program import ROOT_SCOPE, CallSite, Event, Phase, Program, StorageKind, times_of

Decisions = Mapping[str, Collection[CallSite]]
"""Unit (fqn) to the call sites in it whose outputs are discarded.

As a mapping it says how often: 1 is for once, when the forward pass has run; each further time, what was made again is
let go as well, after those have run that it was made again for.
"""


@dataclass(frozen=True, slots=True)
class Moment:
    """One op of the replayed step: what is alive while it runs.

    Attributes:
        op: index of the recorded op (the one that runs, or that asks for a recomputation).
        live_bytes: everything alive, its outputs and workspace included.
        by_kind: the same, by ``StorageKind``; the workspace counts as temporary.
        recomputed: this is an op that runs a second time.
    """

    op: int
    live_bytes: int
    by_kind: tuple[int, ...]
    recomputed: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of a replay.

    Attributes:
        peak_bytes: the most that is alive at any op of the step.
        peak_by_kind: what it is made of, by ``StorageKind``.
        peak_op: the recorded op at which it happens.
        peak_phase, peak_fqn: where that is ("" for outside of any module, or in the model itself).
        end_bytes: alive when the step is over.
        recompute_ms, recompute_flops, recomputed_ops: what ran a second time.
        again: which ops that were, in their order.
        moments: the whole timeline, if it was asked for.
        boundaries: with the timeline, bytes by ``StorageKind`` at each (``Event.ENTER`` or ``EXIT``, scope).
    """

    peak_bytes: int
    peak_by_kind: tuple[int, ...]
    peak_op: int
    peak_phase: Phase
    peak_fqn: str
    end_bytes: int
    recompute_ms: float
    recompute_flops: int
    recomputed_ops: int
    again: tuple[int, ...] = ()
    moments: tuple[Moment, ...] = ()
    boundaries: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


class _Node:
    """A discarded op of one module call, until it has run again."""

    __slots__ = ("args", "drops", "live_slots", "op", "pending", "slots")

    def __init__(self, op: int, drops: int) -> None:
        self.op = op
        self.drops = drops
        self.args: list[_Slot | int] = []  # slots of other nodes, or storages that are held
        self.pending = True
        self.live_slots = 0
        self.slots: list[_Slot] = []


class _Slot:
    """One output of a node: who still refers to it, and whether it has a value."""

    __slots__ = ("cached", "instances", "node", "readers", "refs", "storage")

    def __init__(self, node: _Node, storage: int) -> None:
        self.node = node
        self.storage = storage
        self.refs = 1  # the table of the module call that is being recorded, while the original lives
        self.cached = False
        self.instances = 0
        self.readers = 0


def replay(program: Program, decisions: Decisions, *, timeline: bool = False) -> Replay:
    """Replay the step with the given call sites discarded; nothing is computed.

    Args:
        recording: the step, as it ran without a plan.
        decisions: unit to call sites. Units must not nest. A call site that the unit does not have,
            or whose op cannot run again, is ignored, as the executor ignores it.
        timeline: keep one ``Moment`` per op.
    """
    units = {scope for fqn, sites in decisions.items() if sites for scope in program.calls.get(fqn, ())}
    return Replayer(program, discarded_ops(program, decisions), units, timeline=timeline).run()


def discarded_ops(program: Program, decisions: Decisions) -> Mapping[int, int]:
    """The recorded ops that decisions discard, and how often."""
    found: dict[int, int] = {}
    ops = program.ops
    for fqn, sites in decisions.items():
        wanted = times_of(sites)
        if not wanted:
            continue
        for scope in program.calls.get(fqn, ()):
            for i, site in program.sites(scope).items():
                if site in wanted and ops[i].recomputable and ops[i].phase == Phase.FORWARD:
                    found[i] = wanted[site]
    return found


class Replayer:
    """Goes through the events of a recording with some ops discarded.

    Args:
        recording: the step.
        discarded: ops that leave a recipe, if they run inside one of the ``units``; as a mapping, how often they
            are discarded.
        units: scopes (module calls) in which recipes are made.
        initial: storages alive when the step begins; by default the recording's.
        timeline: keep one ``Moment`` per op.
    """

    def __init__(
        self,
        program: Program,
        discarded: Collection[int],
        units: Collection[int] = (),
        initial: Collection[int] | None = None,
        *,
        timeline: bool = False,
    ) -> None:
        self.r = program
        self.timeline = timeline
        self.last_op = 0
        self.discarded = discarded
        self.unit_scopes = units
        self.initial = program.initial if initial is None else initial
        self.noted = 0  # alive at the op that ran last
        self.again = 0  # the most that was alive at an op that ran again, until somebody sets it to 0
        self.count = [0] * len(program.storage_bytes)  # holders of the original storage
        self.by_kind = [0] * len(StorageKind)
        self.live = 0
        self.table: dict[int, _Slot] = {}  # storage to slot, for the module call that is running
        self.current_unit = ROOT_SCOPE
        self.handle_slot: dict[int, _Slot] = {}
        self.loose: dict[int, int] = {}  # instance to the storage that it alone holds
        self.passing: dict[
            _Slot, int
        ] = {}  # while something runs again: slots whose values are let go after it
        self.peak = 0
        self.peak_kinds: tuple[int, ...] = tuple(self.by_kind)
        self.peak_op = 0
        self.recompute_ms = 0.0
        self.recompute_flops = 0
        self.recomputed: list[int] = []
        self.moments: list[Moment] = []
        self.boundaries: dict[tuple[int, int], tuple[int, ...]] = {}

    def begin(self) -> None:
        """The state before the first event."""
        for s in self.initial:
            self._hold(s)
        self._note(0, 0, False)

    def run(self) -> Replay:
        r = self.r
        self.begin()
        for code, arg in r.events:
            self.step(code, arg)
        peak_op = r.ops[self.peak_op] if r.ops else None
        scope = peak_op.scope if peak_op else ROOT_SCOPE
        return Replay(
            peak_bytes=self.peak,
            peak_by_kind=self.peak_kinds,
            peak_op=self.peak_op,
            peak_phase=peak_op.phase if peak_op else Phase.FORWARD,
            peak_fqn=r.scopes[scope].fqn if scope != ROOT_SCOPE else "",
            end_bytes=self.live,
            recompute_ms=self.recompute_ms,
            recompute_flops=self.recompute_flops,
            recomputed_ops=len(self.recomputed),
            again=tuple(self.recomputed),
            moments=tuple(self.moments),
            boundaries=self.boundaries,
        )

    def step(self, code: int, arg: int) -> None:
        """One event of the recording."""
        r = self.r
        if code == Event.OP:
            self.last_op = arg
            op = r.ops[arg]
            discards = arg in self.discarded and self.current_unit != ROOT_SCOPE
            if discards and op.replaces >= 0 and op.replaces not in self.table:
                discards = False  # what it writes in place was kept
            if discards:
                self._keep_state(op.state_bytes)
            for s in op.writes:
                self.count[s] += 1
                self._add(s)
            self._note(arg, r.inside_bytes[arg], False)
            if discards:
                self._make_node(arg)
        elif code == Event.FREE:
            self._release(arg)
        elif code == Event.PACK:
            slot = self.table.get(r.handle_storages[arg])
            if slot is None:
                self._hold(r.handle_storages[arg])
            else:
                slot.refs += 1
                self.handle_slot[arg] = slot
        elif code == Event.RELEASE:
            slot = self.handle_slot.pop(arg, None)
            if slot is None:
                self._release(r.handle_storages[arg])
            else:
                self._unref(slot)
        elif code == Event.UNPACK:
            handle = r.instance_handles[arg]
            slot = self.handle_slot.get(handle)
            if slot is None:
                self._hold(r.handle_storages[handle])
            else:
                if not slot.cached and self._compute(slot, self.last_op):
                    self.loose[arg] = slot.storage
                else:
                    slot.instances += 1
                    self.handle_slot[-1 - arg] = slot
        elif code == Event.DROP:
            slot = self.handle_slot.pop(-1 - arg, None)
            if arg in self.loose:
                self._remove(self.loose.pop(arg))
            elif slot is None:
                self._release(r.handle_storages[r.instance_handles[arg]])
            else:
                slot.instances -= 1
                self._maybe_free(slot)
        elif code == Event.ALLOC:
            self._hold(arg)
        elif code == Event.ENTER:
            if self.timeline:
                self.boundaries[code, arg] = tuple(self.by_kind)
            if arg in self.unit_scopes and self.current_unit == ROOT_SCOPE:
                self.current_unit = arg
        elif code == Event.EXIT:
            if self.timeline:
                self.boundaries[code, arg] = tuple(self.by_kind)
            if arg == self.current_unit:
                self._leave_unit()

    def _leave_unit(self) -> None:
        self.current_unit = ROOT_SCOPE
        slots = list(self.table.values())
        self.table.clear()
        for slot in slots:
            self._unref(slot)

    def _note(self, op: int, workspace: int, recomputed: bool) -> None:
        total = self.live + workspace
        if recomputed:
            self.again = max(self.again, total)
        else:
            self.noted = total
        if total > self.peak or self.timeline:
            kinds = list(self.by_kind)
            kinds[StorageKind.TEMPORARY] += workspace
            if total > self.peak:
                self.peak, self.peak_op, self.peak_kinds = total, op, tuple(kinds)
            if self.timeline:
                self.moments.append(Moment(op, total, tuple(kinds), recomputed))

    def _hold(self, s: int) -> None:
        self.count[s] += 1
        if self.count[s] == 1:
            self._add(s)

    def _release(self, s: int) -> None:
        self.count[s] -= 1
        if self.count[s] == 0:
            self._remove(s)
            slot = self.table.pop(s, None)
            if slot is not None:
                self._unref(slot)

    def _add(self, s: int) -> None:
        size = self.r.storage_bytes[s]
        self.live += size
        self.by_kind[self.r.storage_kinds[s]] += size

    def _remove(self, s: int) -> None:
        size = self.r.storage_bytes[s]
        self.live -= size
        self.by_kind[self.r.storage_kinds[s]] -= size

    def _keep_state(self, n_bytes: int) -> None:
        """A node of a random op keeps the generator's state until it has run, or nobody needs it."""
        self.live += n_bytes
        self.by_kind[StorageKind.OTHER] += n_bytes

    def _make_node(self, index: int) -> None:
        op = self.r.ops[index]
        drops = self.discarded[index] - 1 if isinstance(self.discarded, Mapping) else 0
        node = _Node(index, drops)
        for s in op.reads:
            slot = self.table.get(s)
            if slot is None:
                self._hold(s)
                node.args.append(s)
            else:
                slot.refs += 1
                slot.readers += 1
                node.args.append(slot)
        for s in op.writes:
            slot = _Slot(node, s)
            node.slots.append(slot)
            node.live_slots += 1
            self.table[s] = slot

    def _unref(self, slot: _Slot) -> None:
        stack = [slot]
        while stack:
            slot = stack.pop()
            slot.refs -= 1
            if slot.refs:
                continue
            self._maybe_free(slot)
            node = slot.node
            node.live_slots -= 1
            if node.pending and node.live_slots == 0:
                node.pending = False
                self._keep_state(-self.r.ops[node.op].state_bytes)
                stack.extend(self._drop_args(node))

    def _drop_args(self, node: _Node) -> list[_Slot]:
        slots = []
        for arg in node.args:
            if isinstance(arg, _Slot):
                slots.append(arg)
            else:
                self._release(arg)
        node.args = []
        return slots

    def _maybe_free(self, slot: _Slot) -> None:
        if slot.cached and slot.refs == 0 and slot.instances == 0:
            slot.cached = False
            self._remove(slot.storage)

    def _compute(self, wanted: _Slot, asked_by: int) -> bool:
        """Run the pending nodes that a slot needs, arguments first; whether its value is not remembered."""
        order = self._needed(wanted.node)
        if any(node.drops for node in order):
            for node in order:
                for arg in node.args:
                    if isinstance(arg, _Slot) and not arg.cached and arg.node.drops:
                        self.passing[arg] = self.passing.get(arg, 0) + 1
            if wanted.node.drops:
                self.passing[wanted] = self.passing.get(wanted, 0) + 1
        for node in order:
            self._run(node, asked_by)
        loose = wanted in self.passing
        if loose:
            wanted.cached = False
        self.passing.clear()
        return loose

    def _needed(self, node: _Node) -> list[_Node]:
        order: dict[_Node, None] = {}
        stack: list[tuple[_Node, bool]] = [(node, False)]
        while stack:
            current, ready = stack.pop()
            if not current.pending or current in order:
                continue
            if not ready:
                stack.append((current, True))
                stack.extend(
                    (arg.node, False)
                    for arg in reversed(current.args)
                    if isinstance(arg, _Slot) and not arg.cached
                )
                continue
            order[current] = None
        return list(order)

    def _run(self, node: _Node, asked_by: int) -> None:
        op = self.r.ops[node.op]
        last = not node.drops
        if op.replaces >= 0:
            self._take_over(node, op.replaces)
        for s in op.writes:
            self._add(s)
        self._note(asked_by, op.workspace_bytes + op.state_bytes, True)
        self.recompute_ms += op.time_ms
        self.recompute_flops += op.flops
        self.recomputed.append(node.op)
        taken = [arg for arg in node.args if isinstance(arg, _Slot) and arg in self.passing]
        for slot in node.slots:
            if slot.refs if last else slot in self.passing:
                slot.cached = True
            else:
                self._remove(slot.storage)
        if last:
            node.pending = False
            for slot in self._drop_args(node):
                self._unref(slot)
            self._keep_state(-op.state_bytes)
        else:
            node.drops -= 1
        for slot in taken:
            self.passing[slot] -= 1
            if not self.passing[slot] and slot.cached:
                slot.cached = False
                self._remove(slot.storage)

    def _take_over(self, node: _Node, storage: int) -> None:
        """What an op writes in place is gone, if nobody else will want it; else it writes a copy."""
        slot = next(arg for arg in node.args if isinstance(arg, _Slot) and arg.storage == storage)
        if slot.readers == 1 and (not node.drops or slot.node.pending):
            slot.cached = False
            self._remove(storage)
