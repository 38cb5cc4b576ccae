"""The ops that a rank runs beside the recorded ones: what they allocate, and how long computation waits for them.

ops = RankOps(program, spec, shards=4, replicas=2)
(buffer,) = ops.add("fsdp.all_gather_copy_in.default", Phase.FORWARD, scope, reads, [n_bytes], StorageKind.OTHER)
running = ops.start("all_gather", n_bytes, ranks=4)
ops.wait(running)    # the exposed time becomes that of the op
ops.free(buffer)
ops.out              # the events, in order
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from sacplan._device.devices import DeviceSpec
from sacplan._program.program import Event, Op, Phase, Program, StorageKind
from sacplan._program.rewriting import PatchBuilder
from sacplan._shard.costs import Collective, Costs
from sacplan._shard.mesh import Mesh
from sacplan._shard.overlap import Overlap

_FREE, _OP = int(Event.FREE), int(Event.OP)


@dataclass(frozen=True, slots=True)
class Running:
    """A collective that computation has not waited for yet."""

    op: int
    end_ms: float


class RankOps:
    """A patch in the making, with the clocks of the rank.

    Args:
        program: the step of the whole model.
        spec: the device of a rank.
        shards: ranks that parameters are sharded over; they are neighbours.
        replicas: groups of ranks with the same shards.

    Attributes:
        draft: the patch.
        clock: the clocks of computation and of the links.
        out: events that take the place of the one that is rewritten now.
    """

    def __init__(self, program: Program, spec: DeviceSpec, shards: int, replicas: int) -> None:
        self.draft = PatchBuilder(program)
        self.clock = Overlap.of(shards * replicas, spec)
        self.out: list[tuple[int, int]] = []
        self._spec = spec
        self._shards, self._replicas = shards, replicas

    def add(
        self,
        name: str,
        phase: Phase,
        scope: int,
        reads: Iterable[int],
        sizes: Iterable[int],
        kind: StorageKind,
        *,
        workspace_bytes: int = 0,
        time_ms: float = 0.0,
        mutates: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        """Add an op that allocates storages of these sizes, rounded up, and return them."""
        storages = tuple(self.draft.new_storage(self._spec.round_up(n_bytes), kind) for n_bytes in sizes)
        op = Op(
            name=name,
            phase=phase,
            scope=scope,
            time_ms=time_ms,
            flops=0,
            workspace_bytes=workspace_bytes,
            reads=tuple(reads),
            writes=storages,
            mutates=mutates,
            # A collective must run on all ranks in the same order, so a plan may never run it again on its own.
            recomputable=False,
        )
        self.out.append((_OP, self.draft.ops.add(op)))
        return storages

    def free(self, storage: int) -> None:
        """Free a storage."""
        self.out.append((_FREE, storage))

    def copy_ms(self, n_bytes: float) -> float:
        """Copy on the device, and return the time that it takes; no time for no bytes."""
        return self.clock.copy(n_bytes) if n_bytes else 0.0

    def start(
        self,
        kind: Collective,
        n_bytes: int,
        ranks: int,
        since: float | None = None,
        *,
        before_ms: float = 0.0,
        among_replicas: bool = False,
    ) -> Running:
        """Start the collective of the op that was added last.

        Args:
            kind: of the collective.
            n_bytes: of all ranks together.
            ranks: that take part.
            since: when it may start; None: now.
            before_ms: time of a copy from the host before it, which uses the links, too.
            among_replicas: whether those are the ranks with the same shards, and not neighbours.
        """
        at_once = self._spec.kind == "cpu"
        others = self._replicas * self._shards // ranks
        if among_replicas:
            axes, axis = Mesh.of({"ranks": ranks, "others": others}), 0
        else:
            axes, axis = Mesh.of({"others": others, "ranks": ranks}), 1
        time_ms = before_ms + Costs.of(axes, self._spec).collective_ms(kind, n_bytes, axis)
        running = Running(len(self.draft.ops) - 1, self.clock.send(time_ms, None if at_once else since))
        # Without streams (``_fsdp_param_group.py`` on a CPU) nothing overlaps: the collective is waited for where it
        # starts.
        if at_once:
            self.wait(running)
        return running

    def send(self, ms: float) -> Running:
        """Start a copy to the host of the op that was added last, behind what uses the links now."""
        return Running(len(self.draft.ops) - 1, self.clock.send(ms))

    def wait(self, running: Running) -> None:
        """Have computation wait for a collective, and add the wait to the time of its op."""
        op = self.draft.ops[running.op]
        exposed = self.clock.wait(running.end_ms)
        self.draft.ops[running.op] = msgspec.structs.replace(op, time_ms=op.time_ms + exposed)
