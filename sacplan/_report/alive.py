"""``alive_at_peak``: the storages that make up the peak, and which module and op made each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan, PlanOrPath
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._program.elements import pattern_of
from sacplan._program.program import Phase, Program, StorageKind
from sacplan._report.inputs import planned
from sacplan._report.names import (
    OPTIMIZER,
    OUTSIDE,
    natural_key,
    pattern_over,
    short_op,
    shown_module,
)
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

WORKSPACE = "workspace"
GENERATOR_STATE = "generator state"
REST = "(smaller ones)"


def alive_at(program: Program, op: int) -> frozenset[int]:
    """Storages alive while an op runs, its outputs included, and without the one that it overwrites."""
    return frozenset(program.liveness.alive(op)) - {program.ops[op].replaces}


@dataclass(frozen=True, slots=True)
class AliveGroup:
    """Storages of one size that the same op of modules of one pattern made.

    Attributes:
        module: the modules, with ``*`` for numbers that differ.
        op: what made them, in a few words.
        kind: what they are for; ``"workspace"`` and ``"generator state"`` are not storages of the step.
        recomputed: they were made a second time.
        count: how many.
        each_bytes: size of one.
    """

    module: str
    op: str
    kind: str
    recomputed: bool
    count: int
    each_bytes: int

    @property
    def n_bytes(self) -> int:
        """All together."""
        return self.count * self.each_bytes


def peak_groups(profile: Profile, program: Program) -> list[AliveGroup]:
    """Everything that is alive at the peak, in groups, the largest first; their bytes sum up to the peak exactly.

    Args:
        profile: of the step.
        program: the step, with a plan or without.
    """
    at, origins = program.footprint.peak_op, _Origins(profile, program)
    grouped: dict[tuple[str, str, str, bool, int], list[str]] = defaultdict(list)
    for s in alive_at(program, at):
        module, op, kind, recomputed = origins.of(s)
        grouped[pattern_of(module), op, kind, recomputed, program.storage_bytes[s]].append(module)
    workspace = program.ops[at].workspace_bytes
    if workspace:
        module, op, recomputed = origins.made_by(at)
        grouped[pattern_of(module), op, WORKSPACE, recomputed, workspace].append(module)
    groups = [
        AliveGroup(pattern_over(modules), op, kind, recomputed, len(modules), size)
        for (_, op, kind, recomputed, size), modules in grouped.items()
        if size
    ]
    return sorted(groups, key=lambda g: (-g.n_bytes, natural_key(g.module), g.op, g.kind, g.each_bytes))


@checked(PlanError)
def alive_at_peak(
    profile: ProfileOrPath, plan: PlanOrPath | None = None, top: int | None = 20
) -> pd.DataFrame:
    """What is alive at the peak of the step, and what made it.

        sacplan.alive_at_peak(profile, plan, top=5)

    Storages that the same op made in modules that differ only by their place in a list are one row. What an
    op makes goes with the module that ran it; parameters go with the module that reads them first.

    Args:
        profile: from ``sacplan.profile``.
        plan: made from that profile; without one, the step as it is.
        top: the largest rows; the others are summed up in a last one. None for all.

    Returns:
        ``module``, ``op``, ``kind``, ``recomputed`` (made a second time), ``count``, ``each_bytes``, ``bytes``; the
        largest first. ``bytes`` sum up to ``peak_bytes``. In the last row, ``each_bytes`` is 0.

    Raises:
        PlanMismatch: the plan was made from another profile.
        PlanError: ``top`` is less than 1.
    """
    profile = opened(profile, Profile)
    plan = opened(plan, Plan)
    import pandas as pd

    if top is not None and top < 1:
        raise PlanError(f"top={top}: ask for at least 1 row, or None for all.")
    groups = peak_groups(profile, planned(profile, plan))
    rows = [(g.module, g.op, g.kind, g.recomputed, g.count, g.each_bytes, g.n_bytes) for g in groups[:top]]
    rest = groups[top:] if top is not None else []
    if rest:
        n_bytes = sum(g.n_bytes for g in rest)
        rows.append((REST, "", "", False, sum(g.count for g in rest), 0, n_bytes))
    return pd.DataFrame(rows, columns=["module", "op", "kind", "recomputed", "count", "each_bytes", "bytes"])


class _Origins:
    """Where what is alive comes from."""

    def __init__(self, profile: Profile, program: Program) -> None:
        self.program = program
        self.n_recorded = len(profile.program.storage_bytes)
        self.model = profile.fingerprint.model_class
        self.on_cpu = profile.device == "cpu"
        self.initial = frozenset(program.initial)
        self.reader: dict[int, int] = {}
        for i, op in enumerate(program.ops):
            for s in op.reads:
                self.reader.setdefault(s, i)

    def made_by(self, op: int) -> tuple[str, str, bool]:
        """Module and name of an op, as shown, and whether it runs a second time."""
        again = self.program.ops[op].recomputes
        recorded = again if again >= 0 else op
        return (
            shown_module(self.program, recorded, self.model),
            short_op(self.program.ops[recorded].name),
            again >= 0,
        )

    def of(self, s: int) -> tuple[str, str, str, bool]:
        """Module, op and kind of a storage, as shown, and whether it was made a second time."""
        program, kind = self.program, self.program.storage_kinds[s]
        for_what = kind.name.lower().replace("_", " ")
        writer = program.writer.get(s)
        if writer is not None:
            module, name, recomputed = self.made_by(writer)
            if not recomputed and program.ops[writer].phase == Phase.BACKWARD:
                name = _once(f"{name} backward")
            return module, name, for_what, recomputed
        if s >= self.n_recorded:
            return self.model, "recipes", GENERATOR_STATE, False
        if kind == StorageKind.OPTIMIZER_STATE:
            return OPTIMIZER, "state", for_what, False
        reader = self.reader.get(s)
        if s not in self.initial and reader is None and not self.on_cpu:
            return OUTSIDE, "matmul library's workspace", for_what, False
        if kind == StorageKind.OTHER:
            return OUTSIDE, "batch" if s in self.initial else "made unseen", for_what, False
        where = OUTSIDE if reader is None else shown_module(program, reader, self.model)
        return where, for_what, for_what, False


def _once(name: str) -> str:
    """``"layer norm backward"`` need not say backward twice."""
    return name.removesuffix(" backward") if "backward" in name.removesuffix(" backward") else name
