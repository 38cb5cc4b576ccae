"""What each module keeps for the backward pass, what it discards, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sacplan.core.elements import pattern_of
from sacplan.core.names import OUTSIDE, module_of, one_name, short_op
from sacplan.core.program import Event, Phase, Program
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.questions.planned import planned

NOTHING = "keeps nothing for the backward pass"
"""The reason for a module that has nothing to discard."""


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module, counting what its own ops make; modules inside it have their own rows.

    Attributes:
        module: its name; "" is the model itself.
        kept_bytes: bytes that are made in the forward pass and held for the backward pass, or for a recipe.
        discarded_bytes: bytes that autograd would save and that the plan discards.
        recompute_ms: time of its ops that run a second time.
        recompute_share: the same as a share of all recomputation.
        forward_ms: time of its ops in the forward pass.
        why: in slices, discarded (the larger part), or kept, and what prevents discarding.
    """

    module: str
    kept_bytes: int
    discarded_bytes: int
    recompute_ms: float
    recompute_share: float
    forward_ms: float
    why: str


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Modules of one pattern with equal rows: ``module`` has the numbers that differ.

    ``row`` is the row of one of them. Sums over the group are ``count`` times its values.
    """

    module: str
    count: int
    row: ModuleRow


def grouped(rows: Iterable[ModuleRow]) -> list[RowGroup]:
    """Group rows that look the same, in the order of their first members."""
    groups: dict[tuple[object, ...], list[ModuleRow]] = defaultdict(list)
    for row in rows:
        n_bytes = (row.kept_bytes, row.discarded_bytes)
        times = (round(row.recompute_ms, 6), round(row.forward_ms, 6))
        groups[pattern_of(row.module), n_bytes, times, row.why].append(row)
    return [RowGroup(one_name([r.module for r in same]), len(same), same[0]) for same in groups.values()]


@dataclass(slots=True)
class _Own:
    """The storages and times of one module."""

    kept: list[int] = field(default_factory=list)
    kept_bytes: int = 0
    discarded_bytes: int = 0
    recompute_ms: float = 0.0
    forward_ms: float = 0.0
    in_slices: bool = False


def module_rows(profile: Profile, plan: Plan | None = None) -> list[ModuleRow]:
    """Return what each module keeps and discards, in the order of execution."""
    with_plan = planned(profile, plan)
    chunks = () if plan is None else plan.chunks
    # With the chunks, but without recomputation. A step that is compiled exists only with the whole plan.
    program = with_plan if profile.runs_compiled else profile.with_plan(chunks)
    by_module = _by_module(program, with_plan)
    written = {s: op.name for op in program.ops if op.phase != Phase.OPTIMIZER for s in op.mutates}
    total = sum(own.recompute_ms for own in by_module.values())
    return [
        ModuleRow(
            module=module,
            kept_bytes=own.kept_bytes,
            discarded_bytes=own.discarded_bytes,
            recompute_ms=own.recompute_ms,
            recompute_share=own.recompute_ms / total if total else 0.0,
            forward_ms=own.forward_ms,
            why=_why(program, own, written),
        )
        for module, own in by_module.items()
    ]


def _by_module(with_chunks: Program, with_plan: Program) -> dict[str, _Own]:
    """Return the storages and times of each module.

    Args:
        with_chunks: the step with only the chunks of the plan.
        with_plan: the step with the whole plan. It gives the ops and storages of ``with_chunks`` the same numbers, and
            its own additions higher ones.
    """
    by_module = {scope.fqn: _Own() for scope in with_chunks.scopes}

    def own_of(op: int) -> _Own:
        module = module_of(with_chunks, op)
        return by_module.setdefault(OUTSIDE if module is None else module, _Own())

    # Not ``with_chunks.ops``: ops that run in slices are listed there, but do not run.
    runs = {i for code, i in with_chunks.events if code == Event.OP}
    for i, op in enumerate(with_chunks.ops):
        if op.phase != Phase.FORWARD:
            continue
        if i in runs:
            own_of(i).forward_ms += op.time_ms
        else:
            own_of(i).in_slices = True
    for i in with_plan.footprint.again:
        own_of(i).recompute_ms += with_chunks.ops[i].time_ms
    # A storage that is packed without the plan is one that autograd asks for; with the plan, one that the plan holds.
    asked, held = (
        {p.handle_storages[arg] for code, arg in p.events if code == Event.PACK}
        for p in (with_chunks, with_plan)
    )
    for s in sorted(asked | held):
        maker = with_chunks.writer.get(s)
        if maker is None or with_chunks.ops[maker].phase != Phase.FORWARD:
            continue
        own = own_of(maker)
        if s in held:
            own.kept.append(s)
            own.kept_bytes += with_chunks.storage_bytes[s]
        else:
            own.discarded_bytes += with_chunks.storage_bytes[s]
    return by_module


def _why(program: Program, own: _Own, written: Mapping[int, str]) -> str:
    """Say what happens to the larger part of what autograd asks for."""
    if own.in_slices:
        return "in slices"
    if own.discarded_bytes > own.kept_bytes:
        return "discarded"
    if own.kept:
        return _why_kept(program, own.kept, written)
    # Autograd asks for none of the module's tensors, but recipes of other modules may go through it.
    return "runs again for other modules" if own.recompute_ms else NOTHING


def _why_kept(program: Program, kept: Sequence[int], written: Mapping[int, str]) -> str:
    """Say that storages are kept, and why if none of them can be discarded.

    Args:
        program: the step.
        kept: the storages.
        written: storages that an op writes in place before the optimizer step, with the name of such an op.
    """
    fixed = program.liveness.outlives_forward
    if any(program.ops[program.writer[s]].recomputable and s not in fixed for s in kept):
        return "kept"
    # The reason is that of the largest storage alone: a cell has room for one.
    largest = max(kept, key=lambda s: (program.storage_bytes[s], -s))
    op = program.ops[program.writer[largest]]
    if largest in written:
        return f"kept: {short_op(written[largest])} writes it in place"
    if op.recomputable:
        return "kept: other code holds it until the backward pass anyway"
    read = next((s for s in op.reads if s in written), None)
    if read is not None:
        return f"kept: {short_op(written[read])} writes in place what {short_op(op.name)} reads"
    return f"kept: {short_op(op.name)} must not run a second time"
