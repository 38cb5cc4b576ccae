"""What only the whole step tells: what each storage was for, and which ops may not run again after all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from sacplan._program.program import Op, Phase, StorageKind


def final_kinds(
    kinds: Sequence[StorageKind | None],
    born: Sequence[Phase],
    ops: Sequence[Op],
    handle_storages: Collection[int],
) -> tuple[StorageKind, ...]:
    """The kinds of storages that were not known by name: activations, if the backward pass needs them."""
    needed = set(handle_storages)
    backward_at = next((i for i, op in enumerate(ops) if op.phase is Phase.BACKWARD), len(ops))
    for op in ops[backward_at:]:
        needed.update(op.reads)
    return tuple(
        kind
        if kind is not None
        else StorageKind.ACTIVATION
        if born[s] is Phase.FORWARD and s in needed
        else StorageKind.TEMPORARY
        for s, kind in enumerate(kinds)
    )


def final_ops(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Ops whose inputs or outputs are written in place later, before the optimizer's step, are kept.

    Where that write made a new version of the storage (``Op.replaces``), what reads the old one may run again if
    that can be made again.
    """
    written: dict[int, int] = {}  # storage to the last op that writes it in place
    for i, op in enumerate(ops):
        if op.phase is not Phase.OPTIMIZER:
            written.update(dict.fromkeys(op.mutates, i))
    overwritten = {op.replaces for op in ops if op.replaces >= 0}
    kept: set[int] = set()  # overwritten storages whose makers may not run again
    found = []
    for i, op in enumerate(ops):
        may = op.recomputable and not any(written.get(s, -1) > i for s in (*op.reads, *op.writes))
        may = may and kept.isdisjoint(op.reads)
        if not may:
            kept.update(s for s in op.writes if s in overwritten)
        found.append(op if may or not op.recomputable else replace(op, recomputable=False))
    return tuple(found)
