"""Find what a plan keeps from the forward to the backward pass, what it discards, and what either costs.

Both costs are those of ops that run for the given storages alone. ``cost_paid`` walks from discarded storages towards
the inputs, over ops that run again and that no other recomputed op needs. ``cost_of_discarding`` walks from kept
storages to what is still held. It subtracts the outputs of ops that cannot run again, which would have to be held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from sacplan.core.decisions import Discarded
from sacplan.core.program import ROOT_SCOPE, Event, Phase, Program
from sacplan.techniques.recompute.rewrite import discarded_ops, recompute_ops

_NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of recomputing some storages.

    Attributes:
        recompute_ms: time of the ops that have to run again for these storages and for nothing else.
        n_bytes: bytes that are freed, less those that have to be held instead.
        ops: these ops, the longest first.
    """

    recompute_ms: float
    n_bytes: int
    ops: tuple[int, ...]

    @property
    def us_per_mib(self) -> float:
        """Microseconds of recomputation per MiB."""
        return self.recompute_ms * 1e3 / (self.n_bytes / 2**20)


class KeptAndDiscarded:
    """The storages that a step with a plan holds from the forward to the backward pass, and those that it discards.

    Args:
        program: the step with the chunks of the plan, but without its recomputation.
        planned: the step with the whole plan.
        discarded: call sites that the plan discards.

    Attributes:
        asked: storages that autograd asks for.
        kept: storages made in the forward pass that are held for the backward pass or for a recipe.
        discarded: those that autograd asked for and that are held nowhere.
        again: the ops that run a second time, one entry per run.
    """

    def __init__(self, program: Program, planned: Program, discarded: Discarded) -> None:
        self.program = program
        self.ops_discarded = discarded_ops(program, discarded)
        self.footprint = planned.footprint
        self.again = self.footprint.again
        self._again = frozenset(self.again)
        self.made = {s: op for s, op in program.writer.items() if program.ops[op].phase == Phase.FORWARD}
        # Packed without the plan: autograd asks for it. Packed with it: the plan holds it.
        asked, held = (
            {p.handle_storages[arg] for code, arg in p.events if code == Event.PACK}
            for p in (program, planned)
        )
        self.asked = frozenset(asked)
        self.kept = frozenset(held & self.made.keys())
        self.discarded = frozenset((asked - held) & self.made.keys())

    @cached_property
    def written(self) -> Mapping[int, str]:
        """Storages that an op writes in place before the optimizer step, with the name of such an op."""
        return {s: op.name for op in self.program.ops if op.phase != Phase.OPTIMIZER for s in op.mutates}

    @cached_property
    def _readers_again(self) -> Mapping[int, frozenset[int]]:
        readers: dict[int, set[int]] = defaultdict(set)
        for op in self._again:
            for s in self.program.ops[op].reads:
                readers[s].add(op)
        return {s: frozenset(ops) for s, ops in readers.items()}

    def n_bytes(self, storages: Iterable[int]) -> int:
        """Return the bytes of these storages together."""
        return sum(self.program.storage_bytes[s] for s in storages)

    def cost_paid(self, storages: Collection[int]) -> Cost:
        """Return the cost that keeping these discarded storages would save."""
        ops = self.program.ops
        wanted = set(storages)
        candidates = [self.made[s] for s in wanted]
        only: set[int] = set()
        # Towards the inputs. An op is counted once all that reads its other outputs again is counted too.
        while candidates:
            op = candidates.pop()
            # Counted already, or it runs once anyway.
            if op in only or op not in self._again:
                continue
            others = [s for s in ops[op].writes if s not in wanted]
            # It also runs for another discarded storage, or for an op that would run again in any case:
            # keeping these storages would not save it. It comes back as a candidate when its other readers
            # have been counted.
            if any(s in self.discarded or not self._readers_again.get(s, _NOBODY) <= only for s in others):
                continue
            only.add(op)
            candidates.extend(self.made[s] for s in ops[op].reads if s in self.made and s not in self.kept)
        return self._cost(only, self.n_bytes(wanted))

    def cost_of_discarding(self, storages: Collection[int]) -> Cost | None:
        """Return the cost of discarding these kept storages as well, or None if that would free nothing.

        Their recipes would start from what is held already, and from outputs of ops that cannot run again, which would
        have to be held instead.
        """
        program, gone = self.program, set(storages)
        more: set[int] = set()
        instead: set[int] = set()
        stack = [self.made[s] for s in gone]
        while stack:
            op = stack.pop()
            # Walked already, or running again anyway, so at no further cost.
            if op in more or op in self._again:
                continue
            more.add(op)
            for s in program.ops[op].reads:
                maker = self.made.get(s)
                if (
                    maker is None
                    or (s in self.kept and s not in gone)
                    or s in program.liveness.outlives_forward
                ):
                    continue
                # Go on towards the inputs, or stop at what cannot run again: its output has to be held
                # instead.
                if program.ops[maker].recomputable:
                    stack.append(maker)
                else:
                    instead.add(s)
        # A discarded tensor's recipe may start from one of these: then that one's inputs are asked for as well,
        # which the walk above has covered, since it goes on until something is held.
        freed = self.n_bytes(gone) - self.n_bytes(instead)
        # Holding what recipes start from may take as much as is freed.
        return self._cost(more, freed) if freed > 0 else None

    def discardable(self, storage: int) -> bool:
        """Return whether a kept storage could be discarded, and whether that would free it."""
        op = self.program.ops[self.made[storage]]
        return op.recomputable and storage not in self.program.liveness.outlives_forward

    def peak_with(self, ops: Collection[int]) -> int:
        """Return the peak if the outputs of these ops were discarded as well, with the whole model as one unit."""
        program = self.program
        units = {i for i, scope in enumerate(program.scopes) if scope.parent == ROOT_SCOPE}
        # The plan's own numbers of times win over 1.
        discarded = dict.fromkeys(ops, 1) | self.ops_discarded
        return program.with_(recompute_ops(program, discarded, units)).footprint.peak_bytes

    def _cost(self, ops: Collection[int], n_bytes: int) -> Cost:
        times = {op: self.program.ops[op].time_ms for op in ops}
        ordered = tuple(sorted(ops, key=lambda op: (-times[op], op)))
        return Cost(sum(times[op] for op in ordered), n_bytes, ordered)
