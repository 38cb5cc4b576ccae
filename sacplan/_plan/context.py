"""Everything that planning derives from a program once, whatever the budget: costs, regions, effects, bounds."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

from sacplan._chunk.entries import LossChunks
from sacplan._device.devices import DeviceSpec
from sacplan._plan.bound import Bound
from sacplan._plan.effects import LocalEffects, RegionProblem, effects_of
from sacplan._program.program import Phase, Program
from sacplan._program.regions import Option, Region
from sacplan._recompute.pins import NO_PINS, Pins
from sacplan._recompute.regions import Regions
from sacplan._techniques import DEFAULT_TECHNIQUES, TECHNIQUES
from sacplan.errors import PlanError

Objective = Literal["time", "flops"]
"""What a plan recomputes the least of: predicted time, or floating-point operations."""

_TIE = 1e-3  # share of the time in the cost of an op where FLOPs are minimised: most ops have none
_WIDE = 2e-3
"""What a unit around several regions is taken to cost, as a share of the forward pass.

The executor looks at every op in a unit, also at those of layers that keep everything.
"""

_SIZES = (3, 4, 6, 8, 12, 16, 24, 32)


class PlanningContext:
    """What planning looks at; made once for a program, objective, pins and techniques."""

    def __init__(
        self,
        program: Program,
        objective: Objective,
        pins: Pins = NO_PINS,
        techniques: tuple[str, ...] = DEFAULT_TECHNIQUES,
        device: DeviceSpec | None = None,
        chunks: LossChunks | None = None,
    ) -> None:
        self.program = program
        self.device = device
        self._chunks = chunks
        self.techniques = techniques
        self.objective = objective
        self.pins = pins
        self.costs = op_costs(program, objective)
        self._local_effects: LocalEffects = {}
        self._kinds: dict[tuple[object, ...], int] = {}  # of regions with options of several techniques
        self._effects: dict[int, RegionProblem] = {}

    @cached_property
    def regions(self) -> Regions:
        """The forward pass in regions, with what each could discard."""
        return Regions(self.program, self.costs, self.program.liveness.unpacked_before_peak, self.pins)

    @cached_property
    def bound(self) -> Bound:
        """Lower bounds in the unit of the costs; of schedules that keep what is pinned.

        Where there are chunks, of schedules of the step in the most slices.
        """
        if self._chunks is None:
            return Bound(self.program.liveness, self.costs, self.pins.kept_ops)
        patch = self._chunks.options[-1][1].patch
        return Bound(self.program.with_(patch).liveness, self.costs, self.pins.kept_ops)

    @property
    def may_chunk(self) -> bool:
        """Whether there is a choice of slices."""
        return self._chunks is not None

    @cached_property
    def floor_bytes(self) -> int:
        """No plan has a lower peak."""
        return floor_bytes(self.program, self._chunks)

    @cached_property
    def _chunk_region(self) -> Region | None:
        """The choice of slices, beside the regions that may recompute."""
        chunks = self._chunks
        if chunks is None:
            return None
        options = [Option(0.0, 0, (), "chunk")]
        for decision, rewrite in chunks.options:
            options.append(Option(self.added_cost(rewrite.added_ms), 0, (), "chunk", decision, rewrite.patch))
        return Region(
            unit=chunks.unit,
            members=tuple((op,) for op in sorted(chunks.forward_ops)),
            kind=-1,
            options=tuple(options),
            units=((), *((chunks.unit,),) * len(chunks.options)),
            wide=(False,) * len(options),
        )

    def added_cost(self, added_ms: float) -> float:
        """What ops cost that a technique adds and that run nothing again; what it saves does not count."""
        return max(0.0, added_ms) * (1.0 if self.objective == "time" else _TIE)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many neighbouring regions it makes sense to join: none, two, all of a kind, and what is between."""
        run = self.regions.longest_run
        sizes = (1, 2, run, *_SIZES)
        return tuple(dict.fromkeys(size for size in sizes if size <= run))

    def effects(self, size: int) -> RegionProblem:
        """Of the regions, joined to that size."""
        if size not in self._effects:
            forward = sum(
                c for c, op in zip(self.costs, self.program.ops, strict=True) if op.phase == Phase.FORWARD
            )
            self._effects[size] = effects_of(
                self.program, self._regions(size), _WIDE * forward, self._local_effects
            )
        return self._effects[size]

    def _regions(self, size: int) -> list[Region]:
        """The regions, joined to that size, with the options of all techniques."""
        found = []
        for region in self.regions.joined(size):
            if "recompute" not in self.techniques:
                region = region.only([0])
            more = [
                option
                for name in self.techniques
                for option in TECHNIQUES[name].options(self.program, region, self.costs)
            ]
            if more:
                known = (region.kind, tuple((o.technique, o.members, o.cost, o.kept_bytes) for o in more))
                region = region.extended(more, self._kinds.setdefault(known, -1 - len(self._kinds)))
            found.append(region)
        if self._chunk_region is not None:
            found.append(self._chunk_region)
        return found


def planning_context(
    program: Program,
    objective: Objective = "time",
    pins: Pins = NO_PINS,
    techniques: tuple[str, ...] = DEFAULT_TECHNIQUES,
    device: DeviceSpec | None = None,
    chunks: LossChunks | None = None,
) -> PlanningContext:
    """The context of a program; made once, so that several budgets share it.

    ``device``: what the step runs on, for techniques that ask (see ``rewritten``).
    """
    if objective not in ("time", "flops"):
        raise PlanError(f"unknown objective {objective!r}; known are 'time' and 'flops'.")
    return program.derived(
        ("planning", objective, techniques, device, chunks is None, *pins.key),
        lambda: PlanningContext(program, objective, pins, techniques, device, chunks),
    )


def floor_bytes(program: Program, chunks: LossChunks | None) -> int:
    """What is alive at some op whatever is recomputed, in any of these numbers of slices or in none."""
    programs = [program]
    if chunks is not None:
        programs += [program.with_(rewrite.patch) for _, rewrite in chunks.options]
    return min(each.liveness.floor_bytes for each in programs)


def op_costs(program: Program, objective: Objective) -> tuple[float, ...]:
    """By op, what running it again costs, in ms; FLOPs are counted in ms at the step's mean rate."""
    times = tuple(op.time_ms for op in program.ops)
    if objective == "time":
        return times
    forward = [op for op in program.ops if op.phase == Phase.FORWARD]
    flops = sum(op.flops for op in forward)
    rate = math.fsum(op.time_ms for op in forward) / flops if flops else 0.0
    return tuple(op.flops * rate + _TIE * ms for op, ms in zip(program.ops, times, strict=True))
