"""``alive_at_peak``: the storages that make up the peak, and which module and op made each."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._program.program import Phase, Program, StorageKind
from sacplan._recompute.replay import Replayer, _Node, discarded_ops
from sacplan._report.inputs import check_plan, decisions_of_plan
from sacplan._report.names import (
    OPTIMIZER,
    OUTSIDE,
    natural_key,
    pattern_of,
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is alive at one op.

    Attributes:
        op: the recorded op that runs; for a recomputed one, that one.
        recomputed: it runs a second time.
        storages: by storage, how many of it are alive, and how many of these were made a second time. (An original
            can still be held by code while autograd already has another.)
        workspace_bytes: what the op's kernel takes inside.
        state_bytes: generator states that recipes keep.
    """

    op: int
    recomputed: bool
    storages: dict[int, tuple[int, int]]
    workspace_bytes: int
    state_bytes: int

    def total_bytes(self, program: Program) -> int:
        """Everything together."""
        held = sum(n * program.storage_bytes[s] for s, (n, _) in self.storages.items())
        return held + self.workspace_bytes + self.state_bytes


class _Watcher(Replayer):
    """A replay that stops when so much is alive, and says what that is."""

    def snapshot(self, live_bytes: int) -> Snapshot:
        self.wanted = live_bytes
        self.found: Snapshot | None = None
        self.copies: dict[int, int] = defaultdict(int)
        self.states = 0
        self.running: int | None = None  # the op that runs a second time
        self.begin()
        for code, arg in self.r.events:
            if self.found is not None:
                return self.found
            self.step(code, arg)
        if self.found is None:
            raise PlanError(f"nothing in the step has {live_bytes} bytes alive; the most is {self.peak}.")
        return self.found

    def _add(self, s: int) -> None:
        super()._add(s)
        self.copies[s] += 1

    def _remove(self, s: int) -> None:
        super()._remove(s)
        self.copies[s] -= 1

    def _keep_state(self, n_bytes: int) -> None:
        super()._keep_state(n_bytes)
        self.states += n_bytes

    def _run(self, node: _Node, asked_by: int) -> None:
        self.running = node.op
        super()._run(node, asked_by)
        self.running = None

    def _note(self, op: int, workspace: int, recomputed: bool) -> None:
        super()._note(op, workspace, recomputed)
        if self.found is not None or self.live + workspace < self.wanted:
            return
        running = op if self.running is None else self.running
        copies = dict(self.copies)
        replaced = self.r.ops[running].replaces
        if replaced >= 0 and not recomputed:  # its bytes are what the op's output is made of
            copies[replaced] -= 1
            workspace += self.r.storage_bytes[replaced]
        # A random op that runs again sets the generator back: its own copy of the state counts as a state.
        own_state = self.r.ops[running].state_bytes if recomputed else 0
        self.found = Snapshot(
            op=running,
            recomputed=recomputed,
            storages={s: (n, n - (self.count[s] > 0)) for s, n in copies.items() if n},
            workspace_bytes=workspace - own_state,
            state_bytes=self.states + own_state,
        )


def peak_snapshot(profile: Profile, plan: Plan | None = None) -> Snapshot:
    """What is alive when the replayed step is at its peak, storage by storage."""
    program = profile.program
    decisions = decisions_of_plan(plan)
    replayed = profile.replay(decisions) if plan is not None else profile.baseline
    check_plan(profile, plan, replayed.peak_bytes)
    units = {scope for fqn, sites in decisions.items() if sites for scope in program.calls.get(fqn, ())}
    watcher = _Watcher(program, discarded_ops(program, decisions), units)
    return watcher.snapshot(replayed.peak_bytes)


@dataclass(frozen=True, slots=True)
class AliveGroup:
    """Storages of one size that the same op of modules of one pattern made.

    Attributes:
        module: the modules, numbers that differ left open.
        op: what made them, in few words.
        kind: what they are for; ``"workspace"`` or ``"generator state"`` for what is no storage.
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


def peak_groups(profile: Profile, snapshot: Snapshot) -> list[AliveGroup]:
    """Everything that is alive, in groups, the largest first; their bytes sum up to the peak exactly."""
    program = profile.program
    origin = _Origins(profile)
    grouped: dict[tuple[str, str, str, bool, int], list[str]] = defaultdict(list)
    for s, (count, again) in snapshot.storages.items():
        module, op = origin.of(s)
        kind = program.storage_kinds[s].name.lower().replace("_", " ")
        for recomputed, n in ((False, count - again), (True, again)):
            key = (pattern_of(module), op, kind, recomputed, program.storage_bytes[s])
            grouped[key].extend([module] * n)
    groups = [
        AliveGroup(pattern_over(modules), op, kind, recomputed, len(modules), size)
        for (_, op, kind, recomputed, size), modules in grouped.items()
        if modules and size
    ]
    running = shown_module(program, snapshot.op, origin.model)
    name = short_op(program.ops[snapshot.op].name)
    if snapshot.workspace_bytes:
        groups.append(AliveGroup(running, name, WORKSPACE, snapshot.recomputed, 1, snapshot.workspace_bytes))
    if snapshot.state_bytes:
        groups.append(AliveGroup(origin.model, "recipes", GENERATOR_STATE, False, 1, snapshot.state_bytes))
    return sorted(groups, key=lambda g: (-g.n_bytes, natural_key(g.module), g.op, g.kind, g.each_bytes))


def alive_at_peak(profile: Profile, plan: Plan | None = None, top: int | None = 20) -> pd.DataFrame:
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
    import pandas as pd

    if top is not None and top < 1:
        raise PlanError(f"top={top}: ask for at least 1 row, or None for all.")
    groups = peak_groups(profile, peak_snapshot(profile, plan))
    rows = [(g.module, g.op, g.kind, g.recomputed, g.count, g.each_bytes, g.n_bytes) for g in groups[:top]]
    rest = groups[top:] if top is not None else []
    if rest:
        n_bytes = sum(g.n_bytes for g in rest)
        rows.append((REST, "", "", False, sum(g.count for g in rest), 0, n_bytes))
    return pd.DataFrame(rows, columns=["module", "op", "kind", "recomputed", "count", "each_bytes", "bytes"])


class _Origins:
    """Which module and op a storage comes from."""

    def __init__(self, profile: Profile) -> None:
        self.program = program = profile.program
        self.model = profile.fingerprint.model_class
        self.on_cpu = profile.device == "cpu"
        self.initial = frozenset(program.initial)
        self.reader: dict[int, int] = {}
        for i, op in enumerate(program.ops):
            for s in op.reads:
                self.reader.setdefault(s, i)

    def of(self, s: int) -> tuple[str, str]:
        """(module, op), as shown."""
        program, kind = self.program, self.program.storage_kinds[s]
        writer = program.writer.get(s)
        if writer is not None:
            op = program.ops[writer]
            name = short_op(op.name) + (" backward" if op.phase == Phase.BACKWARD else "")
            return shown_module(program, writer, self.model), _once(name)
        if kind == StorageKind.OPTIMIZER_STATE:
            return OPTIMIZER, "state"
        reader = self.reader.get(s)
        if s not in self.initial and reader is None and not self.on_cpu:
            return OUTSIDE, "matmul library's workspace"
        if kind == StorageKind.OTHER:
            return OUTSIDE, "batch" if s in self.initial else "made unseen"
        where = OUTSIDE if reader is None else shown_module(program, reader, self.model)
        return where, kind.name.lower().replace("_", " ")


def _once(name: str) -> str:
    """``"layer norm backward"`` need not say backward twice."""
    return name.removesuffix(" backward") if "backward" in name.removesuffix(" backward") else name
