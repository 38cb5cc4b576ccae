"""The loops of a chunk of a training step, rehearsed.

If the span is a module, one loop at the end of its call computes the outputs. In any case one loop runs in the place of
the backward op that was deferred last. It computes the forward ops (again), the backward ops, all gradients that leave,
and the numbers that somebody still refers to, as the executor's entry node does.

What is alive decides what a loop computes. So each function here lets go of lazy tensors just when the step would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sacplan.core.program import Event, Phase
from sacplan.record.rehearsal import RehearsedOps
from sacplan.techniques.base.step import backward_ops
from sacplan.techniques.chunk.chunk_entry import CannotChunk
from sacplan.techniques.chunk.deferral import DeferredRun
from sacplan.techniques.chunk.executor.lazy import Lazy
from sacplan.techniques.chunk.executor.loop import compute, compute_whole, compute_with_memory, needed_nodes
from sacplan.techniques.chunk.executor.values import Held
from sacplan.torch_compat.ops import is_computation

_FREE = int(Event.FREE)


@dataclass(frozen=True, slots=True)
class RehearsedLoop:
    """A loop that ran.

    Attributes:
        results: by tensor of the program, what the loop has made for it.
        seen: what ran.
    """

    results: dict[int, torch.Tensor]
    seen: RehearsedOps


@dataclass(frozen=True, slots=True)
class FinalLoop:
    """The loop in the backward pass.

    Attributes:
        loop: its results are those that leave the chunk.
        reads: storages of the program that it reads.
        ops: deferred ops that run in it.
        handles: handles of the program that autograd has on lazy tensors, so that they keep no storage.
    """

    loop: RehearsedLoop
    reads: frozenset[int]
    ops: frozenset[int]
    handles: frozenset[int]


def leave_module(run: DeferredRun) -> RehearsedLoop:
    """Compute the module's outputs, and expect their gradients in slices.

    Raises:
        CannotChunk: nobody reads an output, or one is not sliced, or the gradient of one goes through unchanged.
    """
    program, span, lazy = run.program, run.span, run.tensors.lazy
    unit = span.unit
    outputs: dict[int, None] = {}
    views: set[int] = set()  # of outputs, taken outside: lazy as well if the module took the same view
    # Outputs are what others read after the call. Backward ops of the module itself read its inside, which is
    # lazy again by then.
    for op in program.ops[span.end_op :]:
        if not (op.phase is Phase.BACKWARD and op.forward_of in span.forward):
            outputs.update(dict.fromkeys(t for t in op.inputs if t in lazy and t not in views))
            views.update(op.outputs)
    if not outputs:
        raise CannotChunk(f"nobody reads what {unit!r} returns")
    values = [lazy[t].value for t in outputs]
    if not all(value.sliced for value in values):
        raise CannotChunk(f"{unit!r} returns something that is not sliced")
    run_outputs = compute_whole if span.runs_whole else compute
    made, seen = run.rehearsal.seen(lambda: run_outputs(values))
    if span.runs_whole:
        _check_same_ops(run, seen)
    maker = {t: i for i in run.ran for t in program.ops[i].outputs}
    lazy.clear()  # those that autograd keeps are in ``saved``
    if any(maker[t] not in backward_ops(program) for t in outputs):
        # A residual sum, for one: ops inside and outside would read the gradient that comes in.
        raise CannotChunk(f"the gradient of what {unit!r} returns goes through its last op as it is")
    for t, value, tensor in zip(outputs, values, made, strict=True):
        run.is_there(t, tensor)
        run.expected[maker[t]] = program.tensors[t].shape, value.window
    return RehearsedLoop(dict(zip(outputs, made, strict=True)), seen)


def _check_same_ops(run: DeferredRun, seen: RehearsedOps) -> None:
    """Refuse outputs that are computed by other ops than those that were recorded, or by fewer."""
    names = [name for i in run.ran if is_computation(name := run.program.ops[i].name)]
    if [op.name for op in seen.ops if is_computation(op.name)] != names:
        raise CannotChunk(f"{run.span.unit!r} computes more than its outputs")


def run_final_loop(run: DeferredRun, exits: dict[int, Lazy], outputs: frozenset[int]) -> FinalLoop:
    """Compute what leaves the chunk.

    Args:
        run: with all ops deferred. Its lazy tensors are let go of.
        exits: by tensor of the program, what leaves. Empty afterwards: its tensors are let go of.
        outputs: tensors that the module returns.
    """
    died, tensors = run.program.liveness.died, run.program.tensors
    end = int(run.program.liveness.op_events[run.last])
    handles = _lazy_handles(run, outputs)
    # Numbers that code still refers to at the end of the loop, such as a loss, are computed along; not the gradient
    # with which the backward pass began (``given``), which was there before.
    numbers = {
        t: lazy.value
        for t, lazy in run.tensors.lazy.items()
        if not tensors[t].shape
        and t not in exits
        and tensors[t].storage not in run.tensors.given
        and died[tensors[t].storage] > end
    }
    _check_let_go(run, exits, end)
    names = list(exits)
    gradients = [lazy.value for lazy in exits.values()]
    run.tensors.let_go()
    exits.clear()
    reads: set[int] = set()
    ops: set[int] = set()

    def loop() -> dict[int, torch.Tensor]:
        """Compute what leaves and, as an entry node does, the numbers that are still referred to, which are kept."""
        pending = [value for value in run.region.pending if value not in gradients]
        nodes = needed_nodes([*gradients, *pending])
        inputs = [x for node in nodes for x in node.inputs]
        held = [x.tensor if isinstance(x, Held) else x.data for x in inputs]
        reads.update(run.rehearsal.stands_for(t) for t in held if t is not None)
        ops.update(run.op_of(node.number) for node in nodes)
        del nodes, inputs, held  # else nothing that the loop has used would be freed in it
        made = compute_with_memory([*gradients, *pending])
        for value, data in zip(pending, made[len(gradients) :], strict=True):
            value.settle(data)
        gradients.clear()
        found = dict(zip(names, made, strict=False))
        found.update((t, value.data) for t, value in numbers.items() if value.data is not None)
        return found

    results, seen = run.rehearsal.seen(loop)
    return FinalLoop(RehearsedLoop(results, seen), frozenset(reads), frozenset(ops), handles)


def _lazy_handles(run: DeferredRun, outputs: frozenset[int]) -> frozenset[int]:
    """Return the handles that autograd has on lazy tensors instead of storages."""
    program, span, tensors = run.program, run.span, run.tensors
    found = set()
    for handle, (t, op) in enumerate(zip(program.handle_tensors, program.handle_ops, strict=True)):
        if op not in span.forward or t in outputs:
            continue  # taken by an op outside, or on an output, which is real
        lazy_inside = op < span.end_op and (
            t in tensors.inside or program.handle_storages[handle] in tensors.storages
        )
        if lazy_inside or t in tensors.lazy:
            found.add(handle)
    return frozenset(found)


def _check_let_go(run: DeferredRun, exits: dict[int, Lazy], end: int) -> None:
    """Refuse a result that code still refers to when the loop is over, such as logits.

    If the code reads it, all of it is computed, in memory that the program would not show.
    """
    program, liveness = run.program, run.program.liveness
    kept = {program.tensors[t].storage for t in exits}
    lazy = run.tensors.lazy.items()
    for s in {program.tensors[t].storage for t, each in lazy if each.value.sliced} - kept:
        made_by = program.writer.get(s, -1)
        if made_by not in run.ran or program.ops[made_by].phase is not Phase.FORWARD:
            continue  # only what the forward pass made: autograd's references to other results end with the loop
        freed = [at for at in liveness.events_of[s] if program.events[at] == (_FREE, s)]
        if not freed or freed[-1] > end:
            what = f"what {program.ops[made_by].name} makes, {program.storage_bytes[s]} bytes,"
            raise CannotChunk(f"{what} is sliced, and referred to when the backward pass is over")
