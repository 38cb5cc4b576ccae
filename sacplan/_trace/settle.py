"""What only the whole step tells: what each storage was for, and which ops may not run again after all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from sacplan._trace.recording import Kind, Op, Phase


def final_kinds(
    kinds: Sequence[Kind | None], born: Sequence[Phase], ops: Sequence[Op], handle_storages: Collection[int]
) -> tuple[Kind, ...]:
    """The kinds of storages that were not known by name: activations, if the backward pass needs them."""
    needed = set(handle_storages)
    backward_at = next((i for i, op in enumerate(ops) if op.phase is Phase.BACKWARD), len(ops))
    for op in ops[backward_at:]:
        needed.update(op.reads)
    return tuple(
        kind
        if kind is not None
        else Kind.ACTIVATION
        if born[s] is Phase.FORWARD and s in needed
        else Kind.TEMPORARY
        for s, kind in enumerate(kinds)
    )


def final_ops(ops: Sequence[Op], mutated_at: Mapping[int, Sequence[int]]) -> tuple[Op, ...]:
    """Ops whose inputs or outputs are written in place later, before the optimizer's step, are kept.

    ``mutated_at`` says for each storage which ops write it, in order.
    """

    def written_later(index: int, op: Op) -> bool:
        return any(
            at > index and ops[at].phase is not Phase.OPTIMIZER
            for s in (*op.reads, *op.writes)
            for at in mutated_at.get(s, ())
        )

    return tuple(
        replace(op, recomputable=False) if op.recomputable and written_later(i, op) else op
        for i, op in enumerate(ops)
    )
