"""The patch that a rehearsed chunk of a training step makes.

- An op that was deferred is replaced by what ran when it was deferred, which is nothing for most. If the forward pass
  runs whole, its ops stay; what they make is freed after its last use in the module, unless the module returns it.
- The storages of lazy tensors are neither allocated nor freed, and autograd's handles on them are gone. The storage of
  a result begins where a loop makes it.
- A loop runs at the end of the module's call (span ``"module"``), and one in the place of the backward op that was
  deferred last.
- What a loop reads is held by a handle from the deferred op that reads it until that loop is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from sacplan.core.program import Event, Phase
from sacplan.core.rewriting import PatchBuilder
from sacplan.record.rehearsal import RehearsedOps
from sacplan.techniques.chunk.deferral import DeferredRun
from sacplan.techniques.chunk.families import Rewrite
from sacplan.techniques.chunk.training_loops import FinalLoop, RehearsedLoop
from sacplan.techniques.chunk.training_ops import BackwardWalk

_ALLOC, _FREE, _OP = map(int, (Event.ALLOC, Event.FREE, Event.OP))
_PACK, _RELEASE = int(Event.PACK), int(Event.RELEASE)
_UNPACK, _DROP = int(Event.UNPACK), int(Event.DROP)

_Events = dict[int, list[tuple[int, int]]]
"""By position in the program, what takes the place of the event there."""


class ChunkPatch:
    """Writes the patch of a rehearsed chunk.

    Args:
        run: the deferred ops.
        left: the loop at the end of the module's call; None if the span is not a module.
        final: the loop in the backward pass.
        backward: what has been deferred, and what has not.
    """

    def __init__(
        self, run: DeferredRun, left: RehearsedLoop | None, final: FinalLoop, backward: BackwardWalk
    ) -> None:
        self.run, self.left, self.final, self.backward = run, left, final, backward
        self.program, self.span = run.program, run.span
        # The ops that stay, and the others.
        self.whole = tuple(i for i in run.ran if i < self.span.end_op) if self.span.runs_whole else ()
        self.deferred = tuple(i for i in run.ran if i not in self.whole)
        self.draft = PatchBuilder(self.program)
        self.events: _Events = {}
        self.held: set[int] = set()  # see ``Rewrite``
        liveness = self.program.liveness
        self.end = int(liveness.op_events[run.last])
        self.exit = liveness.exited[self.span.scope]

    def write(self) -> Rewrite:
        """Return the rewrite. Storages and handles are numbered in the order in which things are added here."""
        program, draft, events = self.program, self.draft, self.events
        outputs = self.left.results if self.left is not None else {}
        results = self.final.loop.results
        summed = self._name_results([*results.items(), *(() if self.whole else outputs.items())])
        for i in self.whole:
            events[self._at(i)] = [(_OP, i)]
        for i in self.deferred:
            op = program.ops[i]
            events[self._at(i)] = self._put(self.run.ran[i], op.phase, op.scope)
        made_at = {program.tensors[t].storage: self.end for t in results}
        made_at |= {program.tensors[t].storage: -1 if self.whole else self.exit for t in outputs}
        # After the deferred ops above: ``_drop_lazy`` leaves alone the events that have taken their place.
        self._drop_lazy(made_at)
        self._free_after_use({program.tensors[t].storage for t in outputs})
        if self.left is not None:
            events[self.exit] = []
            if not self.whole:
                events[self.exit] = self._put(self.left.seen, Phase.FORWARD, self.span.scope)
        for i in self.backward.copied:
            events[self._at(i)] = self._out_of_place(i)
        until_end = self._hold()
        last_of = {program.ops[i].forward_of: i for i in self.deferred}
        for s, forward in self.backward.temporaries.items():
            events[self._at(last_of[forward])].append((_FREE, s))
        # The loop unpacks what enters, as the executor's entry node does: a plan may have it recomputed.
        instance = draft.instance_handles.add(until_end[0])
        if self.left is not None:
            events[self.exit].append(program.events[self.exit])
        body = self._put(self.final.loop.seen, Phase.BACKWARD, self.span.scope)
        # First what the loop held goes, then the additions that wait for its results run.
        after = [(_DROP, instance), *((_RELEASE, handle) for handle in until_end)]
        moved = self._put_off()
        # Gradients that are let go of as soon as they are there, as by a hook of the optimizer, go after the loop.
        early = [(_FREE, s) for s in self._freed_early(made_at)]
        after += [*moved, *(free for free in early if free not in moved)]
        after += [(_FREE, self.run.rehearsal.stands_for(made)) for made in summed]
        events[self.end] += [(_UNPACK, instance), *body, *after]
        gone = frozenset(self.deferred)
        draft.events.update((at, tuple(replacing)) for at, replacing in events.items())
        removed_ms = sum(program.ops[i].time_ms for i in gone)
        added_ms = sum(op.time_ms for op in draft.ops.new) - removed_ms
        return Rewrite(draft.patch(), gone, added_ms, frozenset(self.held))

    def _at(self, op: int) -> int:
        return int(self.program.liveness.op_events[op])

    def _put(self, seen: RehearsedOps, phase: Phase, scope: int) -> list[tuple[int, int]]:
        return self.run.sampled.into(self.draft, seen, phase, scope)

    def _name_results(self, results: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Let what the loops make stand for the program's storages; return those that cannot.

        The program may add to an incoming gradient in place, so that the sum has the storage of that gradient. The loop
        reads the gradient and makes the sum in memory of its own. After the loop the program's storage stands for the
        sum, and what the loop has made is freed.
        """
        summed: dict[int, torch.Tensor] = {}  # by storage: several may be views of one
        for t, made in results:
            storage = self.program.tensors[t].storage
            if storage in self.run.tensors.given:
                if self.run.rehearsal.stands_for(made) != storage:
                    summed.setdefault(storage, made)
                continue
            n_bytes = self.run.rehearsal.is_made(made, storage)
            if n_bytes != self.program.storage_bytes[storage]:
                # A kernel may leave a scalar in memory that was large.
                self.draft.storage_bytes[storage] = n_bytes
        return list(summed.values())

    def _drop_lazy(self, made_at: Mapping[int, int]) -> None:
        """Drop the events of storages that nobody holds, since they are not computed.

        Args:
            made_at: by storage of a result, where a loop makes it. It is held from there on.
        """
        program, tensors = self.program, self.run.tensors
        # Of the activation that enters (``begins``) only the handles go: its storage is real.
        for s in (*tensors.storages, tensors.begins):
            for at in program.liveness.events_of[s]:
                code, arg = program.events[at]
                # Handles on lazy tensors keep no storage; those that others have on the same storage stay.
                if code in (_PACK, _RELEASE):
                    drops = arg in self.final.handles
                elif code in (_UNPACK, _DROP):
                    drops = program.instance_handles[arg] in self.final.handles
                else:
                    # A result lives as in the program once its loop has made it, so later events of it stay.
                    made_before = s in made_at and at > made_at[s]
                    drops = code != _OP and s in tensors.storages and not made_before
                if drops:
                    self.events.setdefault(at, [])

    def _freed_early(self, made_at: Mapping[int, int]) -> list[int]:
        """Return results of the final loop that the program frees before that loop makes them."""
        program = self.program
        return [
            s
            for s in self.run.tensors.storages
            if made_at.get(s) == self.end
            for at in program.liveness.events_of[s]
            if at <= self.end and program.events[at][0] == _FREE
        ]

    def _free_after_use(self, outputs: Collection[int]) -> None:
        """Free what ops of a forward pass that runs whole make for each other, where ``compute_whole`` lets it go."""
        last = {s: i for i in self.whole for s in (*self.program.ops[i].reads, *self.program.ops[i].writes)}
        for s, i in last.items():
            if s in self.run.tensors.storages and s not in outputs:
                self.events[self._at(i)].append((_FREE, s))

    def _hold(self) -> list[int]:
        """Take handles on what the loops read and do not make: what enters, and what else deferred ops read.

        What only an earlier loop reads, one for a number or for a module's outputs, is let go of after that loop.

        Returns:
            Handles that are held until the final loop is over; the first is that on what enters.
        """
        program, draft, events, given = self.program, self.draft, self.events, self.run.tensors.given
        begins = self.run.tensors.begins
        until_end = [draft.new_handle(begins, self.span.first_op)]
        at = program.liveness.entered[self.span.scope]
        events[at] = [program.events[at], (_PACK, until_end[0])]
        initial: Collection[int] = set(program.initial)
        backward = program.liveness.end_of_forward
        held: set[tuple[int, int]] = set()  # (storage, event at which it is let go of, or -1)
        for s, op in self.run.held:
            if s in initial or s == begins:
                continue  # outlives the step; or has its handle
            if s in given and s not in self.final.reads:
                continue  # a gradient from which all was computed before the loop
            over = self._over(s, op)
            if (s, over) in held or (s, -1) in held:
                continue  # held by an earlier op, as long or longer
            held.add((s, over))
            if program.ops[op].phase is Phase.FORWARD and (over < 0 or over >= backward):
                self.held.add(s)
            handle = draft.new_handle(s)
            events[self._at(op)].append((_PACK, handle))
            if over < 0:
                until_end.append(handle)
            else:
                events[over].append((_RELEASE, handle))
        return until_end

    def _over(self, storage: int, op: int) -> int:
        """Return the event at which the last loop that reads a storage for an op is over; -1: the final loop."""
        if storage in self.run.tensors.given or op in self.final.ops:
            return -1
        for i in self.run.computed:
            if i >= op:
                return self._at(i)
        return self.exit if self.left is not None and op < self.span.end_op else -1

    def _out_of_place(self, op: int) -> list[tuple[int, int]]:
        """Return the events of an op that writes in place in the program, and makes another tensor in the step."""
        (target,) = self.program.ops[op].mutates
        made = self.draft.new_storage(self.draft.storage_bytes[target])
        return [(_ALLOC, made), (_OP, op), (_FREE, made)]

    def _put_off(self) -> list[tuple[int, int]]:
        """Move additions to a gradient that leaves the chunk to after the loop that makes it; return their events.

        The program may run them earlier, when the gradient of another use was there. What they read and write is freed
        after them.
        """
        program = self.program
        freed: set[int] = set()
        moved: list[tuple[int, tuple[int, int]]] = []
        for i in self.backward.boundary:
            at, op = self._at(i), program.ops[i]
            if at < self.end and (op.writes or op.mutates):  # a view takes nothing
                moved += [(at, event) for event in self.events.get(at, [(_OP, i)])]
                self.events[at] = []
                freed.update((*op.reads, *op.writes, *(program.tensors[t].storage for t in op.inputs)))
        first = moved[0][0] if moved else self.end
        for s in freed:
            for at in program.liveness.events_of[s]:
                if first < at <= self.end and program.events[at] == (_FREE, s):
                    self.events[at] = []
                    moved.append((at, program.events[at]))
        return [event for _, event in sorted(moved, key=lambda each: each[0])]
