"""Turn a recorded step into a chain of stages for Rotor: times, sizes, and the role of each op in its stage.

    stages = stages_of(profile.program)
    found = sacplan.rotor(stages.chain, budget_bytes - stages.fixed_bytes)
    drops_of(stages, found.operations)  # op to how often its output is dropped

``cuts.py`` finds the stages. Here each storage gets one home: the sizes of a stage, ``fixed_bytes``, the input, or the
extra memory of every stage that runs while it is alive (``_homes``).

So the model is safe: if everything is kept, Rotor's memory of the chain plus ``fixed_bytes`` is never less than the
memory of the recorded step at any op of the forward and the backward pass. Rotor's is larger where the gradient of a
boundary takes no memory (the loss is a sum), and before a fixed storage has been made.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sacplan.core.derived import derived
from sacplan.core.liveness import Bytes
from sacplan.core.program import ROOT_SCOPE, Event, Phase, Program, StorageKind
from sacplan.solvers.rotor.chain import Chain
from sacplan.solvers.rotor.cuts import ForwardCuts, coarser, find_cuts
from sacplan.solvers.rotor.rotor import Operation, OperationKind

_NOT_INPUT = frozenset(
    (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)
)

# Homes of storages that are in no stage's sizes.
_FIXED = -1  # in ``fixed_bytes``
_INPUT = -2  # in x_0
_EXTRA = -3  # in ftmp and btmp of every stage that runs while it is alive


@dataclass(frozen=True, slots=True)
class Stages:
    """A recorded step as a chain: L stages and the loss after them.

    Attributes:
        chain: times in milliseconds, whole bytes.
        ops: the forward ops of each stage, then those of the loss (L + 1).
        boundary: by stage, the storage that crosses to the next stage (L); the last is what the loss reads.
        fixed_bytes: alive throughout and in none of the chain's sizes: parameters, buffers, optimizer state, library
            workspaces, masks that several stages read, what autograd saves of ops that cannot run again.
        unit: the innermost module around all stages that a sequence could run again (the loss never is).
        makers: by stage, the ops that write its boundary, those that write it in place included (L).
        path: by stage, the other ops that the boundary needs (L).
        side: by stage, the ops that only the stage's backward needs (L).

    ``makers``, ``path`` and ``side`` are without ops that cannot run again, that run outside of ``unit``, or that make
    what is fixed.
    """

    chain: Chain
    ops: tuple[tuple[int, ...], ...] = field(repr=False)
    boundary: tuple[int, ...] = field(repr=False)
    fixed_bytes: int
    unit: str
    makers: tuple[tuple[int, ...], ...] = field(repr=False)
    path: tuple[tuple[int, ...], ...] = field(repr=False)
    side: tuple[tuple[int, ...], ...] = field(repr=False)

    def __len__(self) -> int:
        """Return the number of stages, without the loss."""
        return len(self.boundary)


@derived
def stages_of(program: Program, most: int | None = None) -> Stages:
    """Return the chain of a recorded step; neighbouring stages are joined where there are more than ``most``.

    With L the number of stages:

    - ``f_i`` and ``b_i``: times of the ops. Backward of stage i lasts until autograd first asks for what an earlier
      stage saved, or runs an op of a module, or reads an input, that only earlier stages ran or read. The loss is all
      that runs after the last cut, in the model and outside of it; both its passes are in ``b_L``. The optimizer is in
      no stage.
    - ``x_i``: the boundary, and what the op that makes it has to keep for autograd with it (the indices of a max-pool);
      ``x_0`` is what the first stage reads of the batch.
    - ``xbar_{i+1}``: what stage i made and autograd holds, and ``x_{i+1}``.
    - ``ftmp_i``: the most that forward of the stage needs in addition to ``x_i`` and ``x_{i+1}`` if autograd holds
      nothing, or to ``x_i`` and ``xbar_{i+1}`` if it holds everything: the larger. Workspaces are in it.
    - ``btmp_i``: the most that is alive in backward of the stage in addition to what earlier stages made,
      ``xbar_{i+1}`` and room for one gradient of the size of ``x_{i+1}``. Parameter gradients made so far are in it.

    A storage that code, but not autograd, holds beyond its stage (an output of the model that is no boundary) is in
    ftmp and btmp as long as it lives. All boundaries count as if they could be dropped. Some cannot: code holds them
    beyond the stage that reads them, or their op cannot run again. But ``fixed_bytes`` would charge for them
    throughout, though most are gone once the backward pass has come past them.

    Raises:
        PlanError: the model was not called exactly once, or its forward has no cut.
    """
    cuts = find_cuts(program)
    if most is not None:
        cuts = coarser(cuts, most)
    stage_of = {op: i for i, ops in enumerate(cuts.ops) for op in ops}
    unit = _unit(program, cuts)
    inside = program.ops_in(unit)
    droppable = frozenset(i for i in stage_of if program.ops[i].recomputable and i in inside)
    homes = _homes(program, cuts, stage_of, droppable)
    makers, path, side = _roles(program, cuts, droppable, homes)
    last, size = len(cuts.boundary), program.storage_bytes
    x, xbar = [0] * (last + 1), [0] * (last + 1)
    for s, home in enumerate(homes):
        if home == _INPUT:
            x[0] = xbar[0] = x[0] + size[s]
        elif 0 <= home < last:
            xbar[home + 1] += size[s]
            # What the boundary's op makes along with it (indices of a max-pool) exists whenever the boundary does.
            if s == cuts.boundary[home] or program.writer[s] in makers[home]:
                x[home + 1] += size[s]
    backward_of = _backward_of(program, stage_of)
    forward_extra, backward_extra = _extra_bytes(program, cuts, homes, backward_of, x, xbar)
    forward_ms = [sum(program.ops[op].time_ms for op in ops) for ops in cuts.ops]
    backward_ms = [0.0] * (last + 1)
    for op, stage in backward_of.items():
        backward_ms[stage] += program.ops[op].time_ms
    # The loss runs once, forward and backward: so both times are one entry.
    backward_ms[last] += forward_ms.pop()
    chain = Chain(
        tuple(forward_ms),
        tuple(backward_ms),
        tuple(x),
        tuple(xbar),
        tuple(forward_extra[:last]),
        tuple(backward_extra),
    )
    return Stages(
        chain=chain,
        ops=cuts.ops,
        boundary=cuts.boundary,
        fixed_bytes=sum(size[s] for s, home in enumerate(homes) if home == _FIXED),
        unit=program.scopes[unit].fqn,
        makers=makers,
        path=path,
        side=side,
    )


def drops_of(stages: Stages, operations: Sequence[Operation]) -> dict[int, int]:
    """Return how often the output of each forward op is dropped in a sequence; ops that never lose it are left out.

    - ``path``: an op that the boundary needs runs each time that its stage does; only the last run keeps the output.
    - ``makers``: the boundary itself is made again only if it was dropped, by the next stage's forward keeping nothing.
    - ``side``: an op that only the stage's own backward needs is dropped in the first run, and runs once more when
      backward asks for it.
    """
    runs: Counter[int] = Counter()
    dropped: Counter[int] = Counter()
    for before, operation in zip((None, *operations), operations, strict=False):
        if operation.kind in (OperationKind.LOSS, OperationKind.BACKWARD):
            continue
        # Each forward of a stage is a run. It also drops the boundary before it, if it keeps nothing and the
        # stage before has just made that boundary.
        runs[operation.stage] += 1
        if (
            operation.kind is OperationKind.FORWARD_KEEP_NOTHING
            and before is not None
            and before.stage == operation.stage - 1
            and before.kind not in (OperationKind.LOSS, OperationKind.BACKWARD)
        ):
            dropped[before.stage] += 1
    drops: dict[int, int] = {}
    for k in range(len(stages)):
        drops.update(dict.fromkeys(stages.makers[k], dropped[k]))
        drops.update(dict.fromkeys(stages.path[k], runs[k] - 1))
        # At most once: the stage's backward asks for these ops, and no later run of its forward does.
        drops.update(dict.fromkeys(stages.side[k], int(runs[k] > 1)))
    return {op: times for op, times in sorted(drops.items()) if times > 0}


def _homes(
    program: Program, cuts: ForwardCuts, stage_of: Mapping[int, int], droppable: Collection[int]
) -> list[int]:
    """Return, by storage, the stage in whose sizes it is, or one of the three homes above."""
    homes = [_EXTRA] * len(program.storage_bytes)
    initial = frozenset(program.initial)
    # Each rule overwrites those before it: what autograd saves; boundaries; what is there throughout; the input.
    for stage, ops in enumerate(cuts.ops):
        for op in ops:
            stays = op not in droppable and stage < len(cuts.boundary)  # it cannot run again
            home = _FIXED if stays else stage
            for s in program.ops[op].writes:
                if s in cuts.saved:
                    homes[s] = home
    for stage, s in enumerate(cuts.boundary):
        homes[s] = stage
    for s in (*program.initial, *cuts.shared, *_left_over(program, stage_of)):
        homes[s] = _FIXED
    for op in cuts.ops[0]:
        for s in program.ops[op].reads:
            if s in initial and program.storage_kinds[s] not in _NOT_INPUT:
                homes[s] = _INPUT
    return homes


def _left_over(program: Program, stage_of: Mapping[int, int]) -> list[int]:
    """Return the storages that no op made and that outlive the stage in which they appeared (library workspaces)."""
    liveness = program.liveness
    stages = sorted((int(liveness.op_events[op]), stage) for op, stage in stage_of.items())

    def stage_at(position: int) -> int:
        return stages[max(0, bisect(stages, (position,)) - 1)][1]

    return [
        s
        for s, (made, freed) in enumerate(zip(liveness.made, liveness.freed, strict=True))
        if 0 <= made < liveness.end_of_forward
        and s not in program.writer
        and not (freed < liveness.end_of_forward and stage_at(freed) == stage_at(made))
    ]


def _backward_of(program: Program, stage_of: Mapping[int, int]) -> dict[int, int]:
    """Return, by op of the backward pass, the stage to whose backward it belongs.

    The stage only falls: once autograd has asked for a tensor of an earlier stage, later stages are done.
    """
    latest = _Latest(program, stage_of)
    now = loss = max(stage_of.values())
    backward_of: dict[int, int] = {}
    for code, arg in program.events:
        if code == Event.UNPACK:
            # A handle of no forward op counts as the loss's, so it does not lower the stage.
            now = min(now, stage_of.get(program.handle_ops[program.instance_handles[arg]], loss))
        elif code == Event.OP and arg not in stage_of and program.ops[arg].phase is not Phase.OPTIMIZER:
            now = backward_of[arg] = min(now, latest.stage(arg))
    return backward_of


def _extra_bytes(
    program: Program,
    cuts: ForwardCuts,
    homes: Sequence[int],
    backward_of: Mapping[int, int],
    x: Sequence[int],
    xbar: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Return ``ftmp`` and ``btmp`` by stage, the loss last: the most that is alive beyond the sizes, without a plan."""
    liveness, loss = program.liveness, len(cuts.boundary)
    inside = np.array(program.inside_bytes, dtype=np.int64)
    at_home: dict[int, list[int]] = defaultdict(list)
    for s, home in enumerate(homes):
        at_home[home].append(s)
    backward_ops: dict[int, list[int]] = defaultdict(list, {loss: list(cuts.ops[loss])})
    for op, stage in backward_of.items():
        backward_ops[stage].append(op)

    def most(ops: Sequence[int], held: Bytes) -> int:
        at = np.array(ops, dtype=np.int64)
        return int((held[liveness.op_events[at]] + inside[at]).max(initial=0))

    elsewhere = liveness.bytes_held(at_home[_EXTRA])
    elsewhere_unsaved = liveness.bytes_held(at_home[_EXTRA], but_for_autograd=True)
    from_here_on = elsewhere.copy()
    forward_extra, backward_extra = [0] * (loss + 1), [0] * (loss + 1)
    for stage in reversed(range(loss + 1)):
        held = liveness.bytes_held(at_home[stage])
        from_here_on += held
        output, saved = (0, 0) if stage == loss else (x[stage + 1], xbar[stage + 1])
        backward_extra[stage] = max(0, most(backward_ops[stage], from_here_on) - output - saved)
        if stage < loss:
            unsaved = liveness.bytes_held(at_home[stage], but_for_autograd=True)
            # Forward runs in two ways, with one number for both: the larger, so that neither way goes over.
            keeping_nothing = most(cuts.ops[stage], unsaved + elsewhere_unsaved) - output
            keeping_all = most(cuts.ops[stage], held + elsewhere) - saved
            forward_extra[stage] = max(0, keeping_nothing, keeping_all)
    return forward_extra, backward_extra


class _Latest:
    """The last stage that an op of the backward pass can belong to, by its module and the inputs that it reads."""

    def __init__(self, program: Program, stage_of: Mapping[int, int]) -> None:
        self._program = program
        self._loss = max(stage_of.values())
        self._of_scope: dict[int, int] = {}
        self._of_input: dict[int, int] = {}
        initial = frozenset(program.initial)
        # ``fully_shard`` reads parameters of one stage while another runs, so they do not tell the stage of an op.
        if program.gathering:
            kinds = program.storage_kinds
            initial = frozenset(s for s in initial if kinds[s] is not StorageKind.PARAMETER)
        # In the order of ops, so that the last stage that uses a module, or an input, counts.
        for i, stage in sorted(stage_of.items()):
            op = program.ops[i]
            self._of_scope[op.scope] = stage
            self._of_input.update((s, stage) for s in op.reads if s in initial)

    def stage(self, index: int) -> int:
        op = self._program.ops[index]
        found = self._loss if op.scope == ROOT_SCOPE else self._of_scope.get(op.scope, self._loss)
        return min(found, *(self._of_input.get(s, self._loss) for s in op.reads), self._loss)


def _unit(program: Program, cuts: ForwardCuts) -> int:
    """Return the innermost module call around all stages but the loss, of a module that is called once."""
    root = program.calls[""][0]
    inside = program.ops_in(root)
    scopes = {program.ops[op].scope for ops in cuts.ops[:-1] for op in ops if op in inside}
    scope = program.common_scope(scopes)
    # A unit is named by its module, so several calls of it could not be told apart.
    while scope != root and program.calls.get(program.scopes[scope].fqn) != (scope,):
        scope = program.scopes[scope].parent
    return scope


def _roles(
    program: Program, cuts: ForwardCuts, droppable: Collection[int], homes: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return ``makers``, ``path`` and ``side`` of ``Stages``, by walking each stage back from its boundary."""
    makers, path, side = [], [], []
    for ops, boundary in zip(cuts.ops, cuts.boundary, strict=False):
        by_role: dict[str, list[int]] = defaultdict(list)
        needed = {boundary}
        # Backwards, so that every reader on the path is known before the op that it reads from.
        for index in reversed(ops):
            op = program.ops[index]
            written = {*op.writes, *op.mutates}
            role = "side"
            if any(cuts.base[s] == cuts.base[boundary] for s in written):
                role = "makers"
            elif written & needed:
                role = "path"
            if role != "side":
                # Fixed storages stay, so the ops that made them are not needed again.
                needed.update(s for s in op.reads if homes[s] != _FIXED)
            if index in droppable and not any(homes[s] == _FIXED for s in op.writes):
                by_role[role].append(index)
        makers.append(tuple(reversed(by_role["makers"])))
        path.append(tuple(reversed(by_role["path"])))
        side.append(tuple(reversed(by_role["side"])))
    return tuple(makers), tuple(path), tuple(side)
