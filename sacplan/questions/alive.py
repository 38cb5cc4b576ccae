"""The storages that are alive at an op, and the modules and ops that made them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sacplan.core.elements import pattern_of
from sacplan.core.names import (
    OPTIMIZER,
    OUTSIDE,
    natural_key,
    pattern_over,
    short_op,
    shown_module,
)
from sacplan.core.program import Phase, Program, StorageKind
from sacplan.profiling.profile import Profile

WORKSPACE = "workspace"
GENERATOR_STATE = "generator state"


def alive_at(program: Program, op: int) -> frozenset[int]:
    """Return the storages on the device that are alive while an op runs.

    Outputs of the op are among them; the storage that it replaces is not.
    """
    return frozenset(program.liveness.alive(op)) - {program.ops[op].replaces} - program.on_host


@dataclass(frozen=True, slots=True)
class AliveGroup:
    """Storages of the same size, made by the same op in modules with the same pattern of names.

    Attributes:
        module: Names of the modules, with ``*`` for numbers that differ.
        op: The op that made them, in a few words.
        kind: Their kind in words; ``"workspace"`` and ``"generator state"`` are no storages of the recorded step.
        recomputed: Whether they were made a second time.
        count: Number of storages.
        each_bytes: Size of one of them.
    """

    module: str
    op: str
    kind: str
    recomputed: bool
    count: int
    each_bytes: int

    @property
    def n_bytes(self) -> int:
        """Bytes of all of them together."""
        return self.count * self.each_bytes


def peak_groups(profile: Profile, program: Program) -> list[AliveGroup]:
    """Return what is alive at the peak in groups, the largest first. Their bytes add up to the peak exactly.

    Args:
        profile: The profile of the step.
        program: The program of the step, with a plan or without.
    """
    at, origins = program.footprint.peak_op, Origins(profile, program)
    sizes = program.liveness.alive(at)
    # Grouped by the pattern of the module, so that equal layers share a group, and by size, so that a group has one.
    grouped: dict[tuple[str, str, str, bool, int], list[str]] = defaultdict(list)
    for s in alive_at(program, at):
        module, op, kind, recomputed = origins.of(s)
        grouped[pattern_of(module), op, kind, recomputed, sizes[s]].append(module)
    workspace = program.ops[at].workspace_bytes
    # The workspace of the op is no storage, but it is part of the peak.
    if workspace:
        module, op, recomputed = origins.made_by(at)
        grouped[pattern_of(module), op, WORKSPACE, recomputed, workspace].append(module)
    groups = [
        AliveGroup(pattern_over(modules), op, kind, recomputed, len(modules), size)
        for (_, op, kind, recomputed, size), modules in grouped.items()
        if size
    ]
    return sorted(groups, key=lambda g: (-g.n_bytes, natural_key(g.module), g.op, g.kind, g.each_bytes))


class Origins:
    """Says which module and op made a storage."""

    def __init__(self, profile: Profile, program: Program) -> None:
        self.program = program
        self.n_recorded = len(profile.program.storage_bytes)
        self.model = profile.fingerprint.model_class
        self.on_cpu = profile.device == "cpu"
        self.initial = frozenset(program.initial)
        # By storage, the first op that reads it: a storage that no op writes gets the module of this op.
        self.reader: dict[int, int] = {}
        for i, op in enumerate(program.ops):
            for s in op.reads:
                self.reader.setdefault(s, i)

    def made_by(self, op: int) -> tuple[str, str, bool]:
        """Return module and name of an op, for display, and whether it is one that runs again."""
        again = self.program.ops[op].recomputes
        recorded = again if again >= 0 else op
        return (
            shown_module(self.program, recorded, self.model),
            short_op(self.program.ops[recorded].name),
            again >= 0,
        )

    def of(self, s: int) -> tuple[str, str, str, bool]:
        """Return module, op and kind of a storage, for display, and whether it was made a second time."""
        program, kind = self.program, self.program.storage_kinds[s]
        for_what = kind.name.lower().replace("_", " ")
        writer = program.writer.get(s)
        if writer is not None:
            module, name, recomputed = self.made_by(writer)
            # Not for ops that a plan adds, such as a copy back from the host: their name says what they do.
            if not recomputed and s < self.n_recorded and program.ops[writer].phase == Phase.BACKWARD:
                name = _once(f"{name} backward")
            return module, name, for_what, recomputed
        # From here on, no op of the program has written the storage.
        if s >= self.n_recorded:  # added by a plan: recipes save the state of random number generators
            return self.model, "recipes", GENERATOR_STATE, False
        if kind == StorageKind.OPTIMIZER_STATE:
            return OPTIMIZER, "state", for_what, False
        reader = self.reader.get(s)
        # On a GPU, what no op writes or reads is the workspace of a library.
        if s not in self.initial and reader is None and not self.on_cpu:
            return OUTSIDE, "matmul library's workspace", for_what, False
        if kind == StorageKind.OTHER:
            return OUTSIDE, "batch" if s in self.initial else "made unseen", for_what, False
        where = OUTSIDE if reader is None else shown_module(program, reader, self.model)
        return where, for_what, for_what, False


def _once(name: str) -> str:
    """Drop a second ``backward``, as in ``"layer norm backward backward"``."""
    return name.removesuffix(" backward") if "backward" in name.removesuffix(" backward") else name
