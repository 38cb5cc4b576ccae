"""What a plan runs in slices, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sacplan.core.decisions import Chunk, Decision
from sacplan.core.elements import pattern_of
from sacplan.core.names import pattern_over
from sacplan.core.program import Program
from sacplan.planning.layers import what_runs
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.techniques.chunk.entries import entry_size


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """Chunks that are alike.

    Attributes:
        module: the one at whose call they begin, with ``*`` for numbers that differ.
        count: how many.
        what: the ops that run in slices, in words.
        slices: how many.
        rows: size of the axis that is sliced.
        dim: dimension of that axis.
        added_ms: how much longer the step takes with these chunks alone.
        peak_bytes: peak of the step with the rest of the plan, but without these chunks.
    """

    module: str
    count: int
    what: str
    slices: int
    rows: int
    dim: int
    added_ms: float
    peak_bytes: int


def chunk_rows(profile: Profile, plan: Plan | None) -> list[ChunkRow]:
    """Return the chunks of a plan; those of modules that are alike share a row."""
    alike: dict[tuple[object, ...], list[Chunk]] = defaultdict(list)
    for chunk in () if plan is None else plan.chunks:
        # Everything that a row shows must be equal in the chunks of a group.
        what = chunk.span, len(chunk.sites), chunk.slices, chunk.dim
        alike[pattern_of(chunk.unit), what, _rows(profile.program, chunk)].append(chunk)
    return [_row(profile, () if plan is None else plan.decisions, same) for same in alike.values()]


def _row(profile: Profile, decisions: Sequence[Decision], same: Sequence[Chunk]) -> ChunkRow:
    program, first = profile.program, same[0]
    with_these = profile.with_plan(same)
    return ChunkRow(
        module=pattern_over(chunk.unit for chunk in same),
        count=len(same),
        what=what_runs(first),
        slices=first.slices,
        rows=_rows(program, first),
        dim=first.dim,
        added_ms=with_these.step_ms - program.step_ms,
        peak_bytes=profile.footprint([one for one in decisions if one not in same]).peak_bytes,
    )


def _rows(program: Program, chunk: Chunk) -> int:
    # All other spans begin at a module's call, whose input has the axis.
    if chunk.span != "stretch":
        return entry_size(program, chunk)
    (last, *_) = program.call_sites(chunk.unit)[chunk.sites[-1]]
    # A stretch of ops: the axis is that of what it leaves. ``outer`` and ``inner`` are the parts of the
    # dimension around it.
    shape = program.tensors[program.ops[last].outputs[0]].shape
    return shape[chunk.dim] // (chunk.outer * chunk.inner)
