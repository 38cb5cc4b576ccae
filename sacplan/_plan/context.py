"""Everything that planning derives from a program once, whatever the budget: costs, regions, effects, bounds."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

from msgspec import structs

from sacplan._chunk.entries import ChunkOptions
from sacplan._device.devices import DeviceSpec
from sacplan._plan.bound import Bound
from sacplan._plan.effects import LocalEffects, RegionProblem, effects_of
from sacplan._program.pins import NO_PINS, Pins
from sacplan._program.program import Phase, Program
from sacplan._program.regions import Option, Region
from sacplan._recompute.regions import Regions
from sacplan._techniques import DEFAULT_TECHNIQUES, TECHNIQUES, rewritten
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
        chunks: tuple[ChunkOptions, ...] = (),
    ) -> None:
        self.program = program
        self.device = device
        self.chunks = chunks
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
        return Bound(self._floor_program.liveness, self.costs, self.pins.kept_ops)

    @property
    def floor_bytes(self) -> int:
        """No plan of the context has a lower peak."""
        return self._floor_program.liveness.floor_bytes

    @cached_property
    def _floor_program(self) -> Program:
        """The step; where there are chunks, in the most slices."""
        most = [chunks.options[-1][0] for chunks in self.chunks]
        return rewritten(self.program, most, self.device)

    @cached_property
    def _chunk_regions(self) -> tuple[Region, ...]:
        """The choices of slices, beside the regions that may recompute."""
        found = []
        for chunks in self.chunks:
            options = [Option(0.0, 0, (), "chunk")]
            for decision, rewrite in chunks.options:
                cost = self.added_cost(rewrite.added_ms)
                options.append(Option(cost, 0, (), "chunk", decision, rewrite.patch))
            offered = tuple(
                (structs.replace(o.decision, unit=""), f"{o.cost:.9g}") for o in options if o.decision
            )
            found.append(
                Region(
                    unit=chunks.unit,
                    members=tuple((op,) for op in sorted(chunks.ops)),
                    kind=self._kinds.setdefault(offered, -1 - len(self._kinds)),
                    options=tuple(options),
                    units=((), *((chunks.unit,),) * len(chunks.options)),
                    wide=(False,) * len(options),
                )
            )
        return tuple(found)

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
        return [*found, *self._chunk_regions]


def planning_context(
    program: Program,
    objective: Objective = "time",
    pins: Pins = NO_PINS,
    techniques: tuple[str, ...] = DEFAULT_TECHNIQUES,
    device: DeviceSpec | None = None,
    chunks: tuple[ChunkOptions, ...] = (),
) -> PlanningContext:
    """The context of a program; made once, so that several budgets share it.

    ``device``: what the step runs on, for techniques that ask (see ``rewritten``).
    """
    if objective not in ("time", "flops"):
        raise PlanError(f"unknown objective {objective!r}; known are 'time' and 'flops'.")
    return program.derived(
        ("planning", objective, techniques, device, tuple(each.options[0][0] for each in chunks), *pins.key),
        lambda: PlanningContext(program, objective, pins, techniques, device, chunks),
    )


def op_costs(program: Program, objective: Objective) -> tuple[float, ...]:
    """By op, what running it again costs, in ms; FLOPs are counted in ms at the step's mean rate."""
    times = tuple(op.time_ms for op in program.ops)
    if objective == "time":
        return times
    forward = [op for op in program.ops if op.phase == Phase.FORWARD]
    flops = sum(op.flops for op in forward)
    rate = math.fsum(op.time_ms for op in forward) / flops if flops else 0.0
    return tuple(op.flops * rate + _TIE * ms for op, ms in zip(program.ops, times, strict=True))
