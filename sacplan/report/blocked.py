"""The ops that cannot run in slices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sacplan.core.calls import Opaque, call_with
from sacplan.core.factors.rule import rule_of
from sacplan.core.names import shown_module
from sacplan.core.program import Op, Phase, Program
from sacplan.profiling.profile import Profile
from sacplan.techniques.chunk.executor import losses  # noqa: F401  # fills REWRITTEN
from sacplan.techniques.chunk.executor.lazy import REWRITTEN
from sacplan.torch_compat.ops import draws_numbers, op_named


@dataclass(frozen=True, slots=True)
class BlockedRow:
    """An op that needs whole tensors.

    Attributes:
        op: its name.
        module: that of the largest call.
        calls: how many.
        most_bytes: bytes that the largest call reads and returns.
        why: "no factor rule" or "draws random numbers".
    """

    op: str
    module: str
    calls: int
    most_bytes: int
    why: str


def blocked_rows(profile: Profile) -> list[BlockedRow]:
    """Return the ops that cannot run in slices, those on the most bytes first."""
    program = profile.program
    known: dict[object, str | None] = {}
    found: dict[str, tuple[int, int, int, str]] = {}  # calls, bytes and index of the largest, why
    for i, op in enumerate(program.ops):
        # Chunks are parts of the forward and backward pass. An op without outputs makes nothing to slice.
        if op.phase is Phase.OPTIMIZER or not op.outputs:
            continue
        shapes = tuple(program.tensors[t].shape for t in (*op.inputs, *op.outputs))
        key = (op.name, op.arguments, shapes)
        # Layers repeat: asking for the rule of a call is slow, so equal calls are asked once.
        if key not in known:
            known[key] = _why_blocked(program, op)
        why = known[key]
        if why is None:
            continue
        n_bytes = sum(program.storage_bytes[s] for s in {*op.reads, *op.writes})
        calls, most, at, _ = found.get(op.name, (0, -1, i, why))
        found[op.name] = (calls + 1, *((n_bytes, i) if n_bytes > most else (most, at)), why)
    model = profile.fingerprint.model_class
    rows = [
        BlockedRow(name, shown_module(program, at, model), calls, most, why)
        for name, (calls, most, at, why) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.most_bytes)


def _why_blocked(program: Program, op: Op) -> str | None:
    """Return why an op cannot run in slices, or None if it can."""
    # The order matters: an op that the executor rewrites may have no rule of its own, and an unknown op has
    # none to ask for.
    func = op_named(op.name)
    if func in REWRITTEN:  # the executor replaces it by ops that can
        return None
    outputs = [program.tensors[t] for t in op.outputs]
    if all(math.prod(program.tensors[t].shape) <= 1 for t in (*op.inputs, *op.outputs)):
        return None  # scalars: there is nothing to slice
    if func is None:  # a custom op whose library is not imported here
        return "unknown to this process"
    try:
        args, kwargs = call_with(op.arguments, [program.tensors[t] for t in op.inputs])
    except Opaque:  # a generator, which a recording does not hold
        return "draws random numbers"
    if draws_numbers(func, args, kwargs):
        return "draws random numbers"
    return None if rule_of(func, args, kwargs, outputs) is not None else "no factor rule"
