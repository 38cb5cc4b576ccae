"""``chunk_table``, ``loss_table``, ``blocked_ops``: what a plan runs in slices, what else could, what cannot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from sacplan._chunk.alternatives import Alternative, LossRegion, liger, linear_cross_entropy
from sacplan._chunk.entries import ChunkOptions, Refusal, entry_size, loss_chunks, most_bytes
from sacplan._chunk.executor import losses  # noqa: F401  (registers how losses are put together)
from sacplan._chunk.executor.lazy import REWRITTEN
from sacplan._chunk.rest import training_chunk
from sacplan._factors.rule import rule_of
from sacplan._plan.plan import Plan, PlanOrPath
from sacplan._plan.reading import what_runs
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._program.calls import Opaque, call_with
from sacplan._program.decisions import Chunk
from sacplan._program.elements import pattern_of
from sacplan._program.liveness import Fold
from sacplan._program.names import pattern_over, shown_module
from sacplan._program.program import Event, Op, Phase, Program, StorageKind
from sacplan._questions.planned import planned
from sacplan._torch.ops import draws_numbers, op_named
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

_CROSS_ENTROPY = ("aten.nll_loss_forward.", "aten.nll_loss2d_forward.", "aten.cross_entropy_loss.")


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """What chunks do that are alike.

    Attributes:
        module: at whose call they begin, with ``*`` for numbers that differ.
        count: how many.
        what: runs in slices.
        slices: how many.
        rows: how long the axis is of which slices are taken.
        dim: dimension of that axis.
        added_ms: how much longer the step takes with these alone.
        peak_bytes: of the step with the rest of the plan and without these.
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
    """What runs in slices under a plan; chunks of modules that are alike share a row.

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
    """The rows of ``chunk_table``."""
    planned(profile, plan)  # is it of this profile?
    alike: dict[tuple[object, ...], list[Chunk]] = defaultdict(list)
    for chunk in plan.chunks:
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
    if chunk.span != "stretch":
        return entry_size(program, chunk)
    (last, *_) = program.call_sites(chunk.unit)[chunk.sites[-1]]
    shape = program.tensors[program.ops[last].outputs[0]].shape
    return shape[chunk.dim] // (chunk.outer * chunk.inner)


# --- the same loss by other means -------------------------------------------------------------------------------


@checked(PlanError)
def loss_table(profile: ProfileOrPath, plan: PlanOrPath) -> pd.DataFrame:
    """The loss of a plan that runs in slices, beside the plain one and what other libraries offer for it.

        sacplan.loss_table(profile, plan)

    ``F.linear_cross_entropy`` (torch 2.13) and Liger's fused loss are priced by the rules in their source, for a plain
    cross entropy of the head's size; neither knows label smoothing, and the former no soft-capping.

    Args:
        profile: from ``sacplan.profile``.
        plan: made from that profile.

    Returns:
        By ``name``: ``peak_bytes`` of the loss alone (hidden states, weights, targets, gradients and temporaries),
        ``time_ms`` of forward and backward pass (predicted), ``available`` (here: installed, and made for the
        device) and ``note``. Empty where no cross entropy behind a linear head runs in slices.

    Raises:
        PlanMismatch: the plan was made from another profile.
    """
    profile = opened(profile, Profile)
    plan = opened(plan, Plan)
    import pandas as pd

    rows = [asdict(row) for row in loss_rows(profile, plan)]
    return pd.DataFrame(rows, columns=list(Alternative.__dataclass_fields__)).set_index("name")


def loss_rows(profile: Profile, plan: Plan) -> list[Alternative]:
    """The rows of ``loss_table``."""
    planned(profile, plan)
    chunk = next((one for one in plan.chunks if one.span == "rest"), None)
    if chunk is None:
        return []
    program, spec = profile.program, profile.spec
    rewrite = training_chunk(program, chunk, spec)
    head = _head(program, rewrite.deferred)
    if head is None:
        return []
    region, operand_bytes = head
    plain_ms = sum(program.ops[i].time_ms for i in rewrite.deferred)
    plain_bytes = operand_bytes + _plain_bytes(program, rewrite.deferred)
    sliced_bytes = operand_bytes + most_bytes(program, rewrite)
    note = f"slices of {-(-entry_size(program, chunk) // chunk.slices)} rows"
    others = [linear_cross_entropy(region, spec), liger(region, spec)]
    return [
        Alternative("as it is", plain_bytes, plain_ms, True, "whole logits"),
        Alternative(f"in {chunk.slices} slices", sliced_bytes, plain_ms + rewrite.added_ms, True, note),
        *others,
    ]


def _head(program: Program, deferred: Iterable[int]) -> tuple[LossRegion, int] | None:
    """The linear layer before a cross entropy, and the bytes of what it and the loss read; None where there is none."""
    forward = [(i, program.ops[i]) for i in sorted(deferred) if program.ops[i].phase is Phase.FORWARD]
    if not any(op.name.startswith(_CROSS_ENTROPY) for _, op in forward):
        return None
    products = [(op, program.tensors[op.outputs[0]].shape) for _, op in forward if op.flops and op.outputs]
    products = [(op, shape) for op, shape in products if len(shape) >= 2]
    if not products:
        return None
    head, shape = max(products, key=lambda each: math.prod(each[1]))
    made = {s for _, op in forward for s in op.writes}
    read = {s for _, op in forward for s in op.reads} - made
    vocabulary = shape[-1]
    biases = (
        program.tensors[t]
        for _, op in forward
        for t in op.inputs
        if program.storage_kinds[program.tensors[t].storage] is StorageKind.PARAMETER
    )
    region = LossRegion(
        tokens=math.prod(shape[:-1]),
        width=head.flops // (2 * math.prod(shape)),
        vocabulary=vocabulary,
        dtype=getattr(torch, program.tensors[head.outputs[0]].dtype),
        bias=any(t.shape == (vocabulary,) for t in biases),
    )
    return region, sum(program.storage_bytes[s] for s in read)


def _plain_bytes(program: Program, deferred: Iterable[int]) -> int:
    """The most that is alive while these ops run, over what is alive before."""
    wanted = frozenset(deferred)
    fold = Fold(program)
    begins = most = -1
    for code, arg in program.events:
        if code == Event.OP and arg in wanted and begins < 0:
            begins = fold.live
        fold.step(code, arg)
        if code == Event.OP and arg in wanted:
            most = max(most, fold.noted)
    return most - begins


# --- what cannot run in slices -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockedRow:
    """An op that needs whole tensors.

    Attributes:
        op: its name.
        module: that of the largest call.
        calls: how many.
        most_bytes: what the largest call reads and returns.
        why: "no factor rule" or "draws random numbers".
    """

    op: str
    module: str
    calls: int
    most_bytes: int
    why: str


@checked(PlanError)
def blocked_ops(profile: ProfileOrPath, top: int | None = 10) -> pd.DataFrame:
    """Ops that end whatever runs in slices, since no factor rule says how they could; those on most bytes first.

        sacplan.blocked_ops(profile, top=3)

    Args:
        profile: from ``sacplan.profile``.
        top: how many; None for all.

    Returns:
        By ``op``: ``module`` of its largest call, ``calls``, ``most_bytes`` (what the largest call reads and returns),
        ``why``.

    Raises:
        PlanError: ``top`` is less than 1.
    """
    profile = opened(profile, Profile)
    import pandas as pd

    if top is not None and top < 1:
        raise PlanError(f"top={top}: ask for at least 1 row, or None for all.")
    rows = [asdict(row) for row in blocked_rows(profile)[:top]]
    return pd.DataFrame(rows, columns=list(BlockedRow.__dataclass_fields__)).set_index("op")


def blocked_rows(profile: Profile) -> list[BlockedRow]:
    """The rows of ``blocked_ops``, all of them."""
    program = profile.program
    known: dict[object, str | None] = {}
    found: dict[str, tuple[int, int, int, str]] = {}  # calls, bytes and index of the largest, why
    for i, op in enumerate(program.ops):
        if op.phase is Phase.OPTIMIZER or not op.outputs:
            continue
        shapes = tuple(program.tensors[t].shape for t in (*op.inputs, *op.outputs))
        key = (op.name, op.arguments, shapes)
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
    func = op_named(op.name)
    if func in REWRITTEN:
        return None
    outputs = [program.tensors[t] for t in op.outputs]
    if all(math.prod(program.tensors[t].shape) <= 1 for t in (*op.inputs, *op.outputs)):
        return None
    if func is None:
        return "unknown to this process"
    try:
        args, kwargs = call_with(op.arguments, [program.tensors[t] for t in op.inputs])
    except Opaque:  # an argument that the recording does not hold: a generator
        return "draws random numbers"
    if draws_numbers(func, args, kwargs):
        return "draws random numbers"
    return None if rule_of(func, args, kwargs, outputs) is not None else "no factor rule"


def loss_refusals(profile: Profile) -> tuple[Refusal, ...]:
    """Why the loss cannot run in slices, by module at which that could begin; none where it can."""
    if profile.mode == "inference":
        return ()
    found = loss_chunks(profile.program, profile.spec)
    return () if isinstance(found, ChunkOptions) else found
