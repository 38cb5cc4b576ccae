"""Settle what only the whole step tells: what each storage was for, and which ops may not run again after all."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from sacplan.core.program import Event, Op, Phase, Program, StorageKind


def settled(program: Program, named: Collection[int], born: Sequence[Phase]) -> Program:
    """Return the program with final kinds of storages and final ``Op.recomputable``.

    Args:
        program: as recorded, with in-place versions.
        named: storages that were known by name (parameters, the batch and the like); the others become activations if
            the backward pass needs them, else temporaries.
        born: by storage, the phase in which it was first seen; versions are left out.
    """
    # A version is what the split storage is (its base): kinds and births were noted when there were no versions.
    base = list(range(len(program.storage_bytes)))
    for op in program.ops:
        if op.replaces >= 0:
            base[op.writes[0]] = base[op.replaces]
    # What the backward pass needs is what autograd saved, and what backward ops read: a custom function may keep a
    # tensor on its context without a handle.
    needed = set(program.handle_storages)
    backward_at = next(
        (i for i, op in enumerate(program.ops) if op.phase is Phase.BACKWARD), len(program.ops)
    )
    for op in program.ops[backward_at:]:
        needed.update(op.reads)
    kinds = tuple(
        kind
        if base[s] in named
        else StorageKind.ACTIVATION
        if born[base[s]] is Phase.FORWARD and s in needed
        else StorageKind.TEMPORARY
        for s, kind in enumerate(program.storage_kinds)
    )
    return msgspec.structs.replace(program, storage_kinds=kinds, ops=final_ops(program))


_COPIES_OUT = ("fsdp.split_with_sizes_copy.default", "aten.cat.out", "aten.copy_.default")
"""The ops by which ``fully_shard`` fills the parameters that it has gathered; on one rank it copies them."""


def final_ops(program: Program) -> tuple[Op, ...]:
    """Return the ops, with those no longer recomputable whose inputs or outputs are written in place later.

    An op that runs again must find the values that it read, and must not bring back a value that was overwritten.
    Writes by the optimizer do not matter, since nothing is recomputed after its step.

    A storage that is resized counts as written by the op that runs next: its contents may be gone until then. A
    parameter that ``fully_shard`` gathers again has the values of before: while it is not gathered, no unit runs an op
    again (``distributed/ranks/unit_limits.py``).

    Where a write made a new version of the storage (``Op.replaces``), the old version has an index of its own that is
    never written again. An op that reads it may run again if its maker may.
    """
    written: dict[int, int] = {}  # storage to the last op that writes it in place
    ops, ran = program.ops, -1
    kinds = program.storage_kinds
    gathered = {s for s, _, _ in program.resizes if program.gathering and kinds[s] is StorageKind.PARAMETER}
    for code, arg in program.events:
        if code == Event.OP:
            ran = arg
            if ops[arg].phase is not Phase.OPTIMIZER:
                refilled = gathered if ops[arg].name in _COPIES_OUT else ()
                written.update(dict.fromkeys((s for s in ops[arg].mutates if s not in refilled), arg))
        elif code == Event.RESIZE and program.resizes[arg][0] not in gathered:
            written[program.resizes[arg][0]] = ran + 1
    # One pass suffices, since a version is made before it is read. The invariant: ``kept`` holds the overwritten
    # versions of makers seen so far that will not run again.
    overwritten = {op.replaces for op in ops if op.replaces >= 0}
    kept: set[int] = set()
    final = []
    for i, op in enumerate(ops):
        # Run again, it would read another value, or overwrite a later one, if the storage is written later.
        may = op.recomputable and not any(written.get(s, -1) > i for s in (*op.reads, *op.writes))
        may = may and kept.isdisjoint(op.reads)
        if not may:
            kept.update(s for s in op.writes if s in overwritten)
        final.append(op if may or not op.recomputable else msgspec.structs.replace(op, recomputable=False))
    return tuple(final)
