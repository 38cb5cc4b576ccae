"""A chunk in a step of training, as a rewrite of the recorded step.

From a module's input on, everything is computed in slices: to the module's outputs (span ``"module"``, or
``"backward"`` if the slices are those of the backward pass alone), or until it is reduced to numbers (``"rest"``: a
head, the loss and their gradients). The executor does this with lazy tensors, on
which autograd runs its own formulas. Here the recording says which ops autograd runs, so that they are deferred one by
one:

1. ``training_ops.py`` chooses the ops. A forward op is deferred if it reads what depends on the input, and a backward
   op if it also belongs to a forward op that was deferred.
2. ``deferral.py`` defers them on fake tensors, with the executor's engine, under the recorder.
3. ``training_loops.py`` runs the loops of the engine, of which ``sampling.py`` chooses the slices that stand for all.
4. ``training_patch.py`` puts what the recorder saw in the place of the ops.

Memory and time are thus those of the executor's own code, and not a model of it. If something is in the way, the answer
is a reason (``CannotChunk``) and not an error: an op that the engine would have to run as a whole, or a parameter from
elsewhere, whose gradient would not come through the module.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from sacplan.core.decisions import Chunk
from sacplan.core.derived import derived, settled_from
from sacplan.core.program import Phase, Program
from sacplan.device.devices import DeviceSpec
from sacplan.record.in_place import OUT_OF_PLACE
from sacplan.techniques.chunk.chunk_entry import CannotChunk, ChunkSpan
from sacplan.techniques.chunk.deferral import DeferredRun
from sacplan.techniques.chunk.families import Rewrite, kinship_of_calls, transferred
from sacplan.techniques.chunk.training_loops import leave_module, run_final_loop
from sacplan.techniques.chunk.training_ops import BackwardWalk, ForwardWalk
from sacplan.techniques.chunk.training_patch import ChunkPatch
from sacplan.torch_compat.ops import is_computation


def training_chunk(program: Program, chunk: Chunk, device: DeviceSpec) -> Rewrite:
    """Return the rewrite for a decision that is no stretch; worked out once for a program.

    Raises:
        CannotChunk: there is none; says why.
    """
    found = _tried(program, chunk, device)
    if isinstance(found, CannotChunk):
        raise CannotChunk(str(found))
    return found


@derived
def _tried(program: Program, chunk: Chunk, device: DeviceSpec) -> Rewrite | CannotChunk:
    """Return the rewrite, or why there is none; kept, since searches ask for the modules around every peak again."""
    try:
        return _rewrite(program, chunk, device)
    except CannotChunk as error:
        return CannotChunk(str(error))  # without its traceback, which holds the rehearsal


def _rewrite(program: Program, chunk: Chunk, device: DeviceSpec) -> Rewrite:
    span = ChunkSpan.of(program, chunk)
    _check_plain(span)
    is_rest = chunk.span == "rest"
    # Layers repeat, so the rewrite of one module serves for all that are alike; the rest of a step does not repeat.
    rehearsed = {} if is_rest else _rewrites(program, msgspec.structs.replace(chunk, unit=""), device)
    # With decisions about other modules (``settled_from``), the step as it was recorded is asked first: a chunk that
    # cannot run there is refused here, too, and most rewrites from there can be transferred.
    known = [((step, span.scope), training_chunk(step, chunk, device)) for step in settled_from(program)]
    known += (((program, scope), rewrite) for scope, rewrite in rehearsed.items())
    # One rewrite is known of each kind of module. If none can be transferred, the module is of a new kind: rehearsed.
    here = program, span.scope
    kin = ((kinship_of_calls(call, here, to_end=is_rest), rewrite) for call, rewrite in known)
    found = transferred(kin, span.scope)
    if found is not None:
        return found
    rehearsed[span.scope] = _rehearsed(span, device)
    return rehearsed[span.scope]


def _check_plain(span: ChunkSpan) -> None:
    """Refuse a chunk in which a forward op ran on DTensors: only plain tensors are sliced."""
    program = span.program
    if not program.on_dtensors:
        return
    for i in span.forward:
        op = program.ops[i]
        module = program.scopes[op.scope].fqn if op.scope >= 0 else ""
        # For "rest", ``span.forward`` also holds backward ops. Checking their forward ops is enough.
        if op.phase is Phase.FORWARD and module in program.on_dtensors:
            where = f"module {module!r}" if module else "the loss function"
            raise CannotChunk(f"{where} runs ops on DTensors, and only plain tensors can be sliced")


def _check_whole(run: DeferredRun, own: Collection[int]) -> None:
    """Refuse a module whose forward pass on whole tensors would not be the recorded one.

    The executor runs the ops when the module returns. The recording has them at the same place only if nothing else
    runs in between.
    """
    program, span = run.program, run.span
    for i in run.ran:
        if program.ops[i].scope != span.scope:
            raise CannotChunk(f"{span.unit!r} calls other modules, so its forward cannot run whole")
        if program.ops[i].name in OUT_OF_PLACE or any(is_computation(op.name) for op in run.ran[i].ops):
            raise CannotChunk(f"{program.ops[i].name} runs otherwise on what is deferred")
    for i in own:
        # A cast of a weight, for one, would run before the module's ops instead of between two of them.
        if is_computation(program.ops[i].name):
            raise CannotChunk(f"{span.unit!r} computes something from its parameters alone")


@derived
def _rewrites(program: Program, chunk: Chunk, device: DeviceSpec) -> dict[int, Rewrite]:
    """Return the rewrites for a chunk of any unit by module call, none at first; ``_rewrite`` adds to them."""
    return {}


def _rehearsed(span: ChunkSpan, device: DeviceSpec) -> Rewrite:
    run = DeferredRun(span, device)
    with run.rehearsal.running():
        run.enter()
        forward = ForwardWalk(run)
        forward.walk()
        if span.runs_whole:
            _check_whole(run, forward.own)
        # In the order of the step: the module's outputs are there before its backward begins.
        left = leave_module(run) if span.is_module else None
        outputs = frozenset(left.results) if left is not None else frozenset()
        backward = BackwardWalk(forward, outputs)
        backward.walk()
        final = run_final_loop(run, backward.exits, outputs)
    return ChunkPatch(run, left, final, backward).write()
