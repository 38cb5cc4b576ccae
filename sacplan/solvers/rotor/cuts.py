"""Cut the forward pass of a recorded step into stages, by the ops that ran and not by module classes.

    cuts = find_cuts(profile.program)
    cuts.ops  # forward ops by stage, the loss last

A storage crosses a position between two ops if it is made before the position and read after it. A position is a cut
if exactly one storage crosses it.

- Storages that depend on no parameter (a mask, a rotary table) do not count: like parameters they are input.
- So a branch is one stage, from where it leaves the residual stream to where it comes back. A value that many layers
  share on the gradient path (T5's position bias) makes one stage of them all.
- A storage that is written in place crosses with all its versions: its maker and its last writer are in one stage.
- Where one storage crosses several positions alone, the first of these is the cut. So views, or a mask that is made
  between two layers, are no stage of their own.
- A cut is left out where autograd does not save what crosses and the next cut is as good (``_without_bare_cuts``), as
  between a linear layer and its ReLU.

The crossings of all positions come from one pass: each storage adds 1 where it begins to cross and subtracts 1 where it
ceases, and a running sum counts them. The same sum over storage indices gives the index of a single one that crosses.
Linear in the ops.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from sacplan.core.derived import derived
from sacplan.core.program import Program, StorageKind
from sacplan.errors import PlanError


@dataclass(frozen=True, slots=True)
class ForwardCuts:
    """The cuts of a forward pass.

    Attributes:
        ops: forward ops by stage, the loss last.
        boundary: the storage that crosses after each stage but the last, in its last version.
        base: by storage, its first version (see ``Op.replaces``).
        shared: storages that no parameter has a part in, made in one stage and read in a later one.
        saved: storages that autograd holds when the backward pass begins.
    """

    ops: tuple[tuple[int, ...], ...]
    boundary: tuple[int, ...]
    base: tuple[int, ...]
    shared: frozenset[int]
    saved: frozenset[int]


@derived
def find_cuts(program: Program) -> ForwardCuts:
    """Find the cuts of the forward pass of a recorded step.

    Raises:
        PlanError: the model was not called exactly once, or its forward has no cut.
    """
    calls = program.calls.get("", ())
    if len(calls) != 1:
        raise PlanError(
            f"stages: a chain is one forward pass, but the model itself was called {len(calls)} times in the recorded "
            "step. Give sacplan.profile a loss_fn that calls the model once (gradient accumulation: one micro-batch), "
            "or plan with another solver, which takes any step."
        )
    root = program.scopes[calls[0]]
    liveness = program.liveness
    forward = np.flatnonzero(liveness.op_events < liveness.end_of_forward).tolist()
    lives = _Lives(program, forward)
    crossing, which, blocked = lives.at_positions()
    starts, boundary = [0], list[int]()
    for p in range(1, len(forward)):
        # Only between ops of the model, or right after its last op: the loss is one stage.
        in_root = root.first_op <= forward[p - 1] and forward[p] <= root.end_op
        if in_root and crossing[p] == 1 and not blocked[p]:
            storage = lives.newest[which[p]]
            # If one storage crosses several positions alone, the first of them is the cut.
            if not boundary or boundary[-1] != storage:
                boundary.append(storage)
                starts.append(p)
    if not boundary:
        raise PlanError(_no_cut(program, forward, program.ops_in(calls[0]), crossing, blocked))
    saved = frozenset(liveness.packed_at(liveness.end_of_forward - 1))
    ops = [tuple(forward[a:b]) for a, b in zip(starts, (*starts[1:], len(forward)), strict=True)]
    ops, boundary = _without_bare_cuts(program, ops, boundary, saved)
    stage_of = {op: i for i, stage in enumerate(ops) for op in stage}
    # Made in one stage and read in a later one, without a parameter's part in them, such as a mask.
    shared = {
        s
        for op in forward
        for s in program.ops[op].reads
        if (maker := program.writer.get(s)) in stage_of
        and stage_of[maker] < stage_of[op]
        and lives.base[s] not in lives.learned
    }
    return ForwardCuts(tuple(ops), tuple(boundary), lives.base, frozenset(shared), saved)


def coarser(cuts: ForwardCuts, most: int) -> ForwardCuts:
    """Return the cuts with neighbouring stages joined evenly: at most ``most`` stages, not counting the loss."""
    count = len(cuts.boundary)
    if count <= most:
        return cuts
    # Rounded down one by one, so that lengths differ by at most one. The loss stays a stage by itself.
    ends = [(part + 1) * count // most for part in range(most)]
    ops = [
        tuple(op for stage in cuts.ops[start:end] for op in stage)
        for start, end in zip((0, *ends), ends, strict=False)
    ]
    boundary = tuple(cuts.boundary[end - 1] for end in ends)
    return replace(cuts, ops=(*ops, cuts.ops[-1]), boundary=boundary)


def _without_bare_cuts(
    program: Program, ops: list[tuple[int, ...]], boundary: list[int], saved: Collection[int]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return stages and boundaries without cuts whose storage autograd does not save, where the next cut is as good.

    Rotor's "keeping all" keeps the boundary, too. Between a batch norm, or a linear layer, and a ReLU, backward does
    not need the boundary, and counting it would double what such stages save. So a cut is left out if the next boundary
    is no larger than the cut's storage, and the stage between the two saves less than that storage. If only the loss
    follows, the cut is left out if the stage before it saves less than its storage.
    """
    size = program.storage_bytes

    def saved_besides(stage: Sequence[int], boundary: int) -> int:
        made = (s for op in stage for s in program.ops[op].writes)
        return sum(size[s] for s in made if s in saved and s != boundary)

    # Backwards. stages[0] is the stage after the cut, with all that was joined to it; kept[0] the boundary at its end.
    stages, kept = [ops[-1]], list[int]()
    for at in reversed(range(len(boundary))):
        storage = boundary[at]
        # A boundary that autograd keeps anyway costs nothing. The last cut that is left has to stay, or there
        # would be no chain.
        if storage in saved or (at == 0 and not kept):
            bare = False
        elif kept:
            bare = size[kept[0]] <= size[storage] and saved_besides(stages[0], kept[0]) < size[storage]
        else:  # the loss comes next: what counts is the stage before the cut
            bare = saved_besides(ops[at], storage) < size[storage]
        if bare:
            stages[0] = ops[at] + stages[0]
        else:
            stages.insert(0, ops[at])
            kept.insert(0, storage)
    return stages, kept


class _Lives:
    """The lifetimes of storages in the forward pass, all versions of a storage together.

    Attributes:
        base: by storage, its first version.
        learned: storages (first versions) that a parameter has a part in.
        newest: first version to last version.
        made, written, read: first version to the position, in the forward pass, of the first write, the last write
            and the last read of any version.
    """

    def __init__(self, program: Program, forward: Sequence[int]) -> None:
        self.program = program
        base = list(range(len(program.storage_bytes)))
        for op in program.ops:
            if op.replaces >= 0:
                base[op.writes[0]] = base[op.replaces]
        self.base = tuple(base)
        self.learned: set[int] = set()
        self.newest: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.read: dict[int, int] = {}
        for p, i in enumerate(forward):
            self._follow(p, i, last=i == forward[-1])
        self._length = len(forward)

    def _follow(self, p: int, index: int, last: bool) -> None:
        op, kinds = self.program.ops[index], self.program.storage_kinds
        if last and op.name == "aten.ones_like.default":
            return  # the gradient of the loss, which autograd makes: it reads no value
        learned = any(
            kinds[s] is StorageKind.PARAMETER or self.base[s] in self.learned
            for s in (*op.reads, *op.mutates)
        )
        for s in op.reads:
            # An op that writes in place reads too, but only the write counts, which blocks cuts by itself.
            if s not in op.mutates:
                self.read[self.base[s]] = p
        for s in (*op.writes, *op.mutates):
            # What ``fully_shard`` gathers parameters into is input, as parameters are.
            if self.program.gathering and kinds[s] is StorageKind.PARAMETER:
                continue
            first = self.base[s]
            if s in op.writes or learned:
                self.made.setdefault(first, p)
            if learned:
                self.learned.add(first)
            self.written[first], self.newest[first] = p, s

    def at_positions(self) -> tuple[list[int], list[int], list[int]]:
        """Return three figures for each position (p is right before the p-th op).

        How many storages cross; the sum of their indices, which is the index if one crosses; how many forbid a cut,
        because they are between two of their writes, or are buffers that the model computes.
        """
        crossing, which, blocked = ([0] * (self._length + 1) for _ in range(3))
        initial = frozenset(self.program.initial)

        def add(to: list[int], after: int, until: int, what: int) -> None:
            # A storage crosses from right after op ``after`` to right before op ``until``.
            if until > after:
                to[after + 1] += what
                to[until + 1] -= what

        for s, p in self.made.items():
            # A storage that no parameter has a part in crosses nothing, as if nobody read it.
            read = self.read.get(s, p) if s in self.learned else p
            if s in initial:  # a buffer that the model computes, and reads
                add(blocked, p, read, 1)
                continue
            add(blocked, p, self.written[s], 1)
            add(crossing, p, read, 1)
            add(which, p, read, s)
        return list(accumulate(crossing)), list(accumulate(which)), list(accumulate(blocked))


def _no_cut(
    program: Program, forward: Sequence[int], inside: range, crossing: Sequence[int], blocked: Sequence[int]
) -> str:
    message = (
        "stages: the model's forward is one stage: at no position between two of its ops is there a single tensor "
        "that everything after it depends on."
    )
    within = [p for p in range(1, len(forward)) if forward[p - 1] in inside and forward[p] in inside]
    positions = [p for p in within if crossing[p] > 0]
    if positions:
        # The position nearest to being a cut; of equal ones, that nearest to the middle.
        p = min(positions, key=lambda p: (crossing[p] + blocked[p], abs(2 * p - len(forward))))
        message += f" The fewest cross before {program.ops[forward[p]].name} (op {forward[p]})."
    return message + " Plan with another solver, which needs no chain: sacplan.plan(profile, budget)."
