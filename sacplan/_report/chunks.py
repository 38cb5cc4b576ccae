"""``chunk_table``: what a plan runs in slices, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from sacplan._chunk.entries import entry_size
from sacplan._plan.layers import what_runs
from sacplan._plan.plan import Plan, PlanOrPath
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._program.decisions import Chunk
from sacplan._program.elements import pattern_of
from sacplan._program.names import pattern_over
from sacplan._program.program import Program
from sacplan._questions.planned import planned
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd


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


@checked(PlanError)
def chunk_table(profile: ProfileOrPath, plan: PlanOrPath) -> pd.DataFrame:
    """List what a plan runs in slices. Chunks of modules that are alike share a row.

        sacplan.chunk_table(profile, plan)

    Args:
        profile: from ``sacplan.profile``.
        plan: made from that profile.

    Returns:
        By ``module``: ``count``, ``what`` runs in slices, ``slices``, ``rows`` (of the axis that is sliced), ``dim``,
        ``added_ms`` (how much longer the step takes with the chunks of the row alone), and ``peak_bytes`` of the step
        with the rest of the plan and without them.

    Raises:
        PlanMismatch: the plan was made from another profile.
    """
    profile = opened(profile, Profile)
    plan = opened(plan, Plan)
    import pandas as pd

    columns = list(ChunkRow.__dataclass_fields__)
    rows = [asdict(row) for row in chunk_rows(profile, plan)]
    return pd.DataFrame(rows, columns=columns).set_index("module")


def chunk_rows(profile: Profile, plan: Plan) -> list[ChunkRow]:
    """Return the rows of ``chunk_table``."""
    planned(profile, plan)  # raises PlanMismatch for a plan of another profile
    alike: dict[tuple[object, ...], list[Chunk]] = defaultdict(list)
    for chunk in plan.chunks:
        # Everything that a row shows must be equal in the chunks of a group.
        what = chunk.span, len(chunk.sites), chunk.slices, chunk.dim
        alike[pattern_of(chunk.unit), what, _rows(profile.program, chunk)].append(chunk)
    return [_row(profile, plan, same) for same in alike.values()]


def _row(profile: Profile, plan: Plan, same: Sequence[Chunk]) -> ChunkRow:
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
        peak_bytes=profile.footprint([one for one in plan.decisions if one not in same]).peak_bytes,
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
