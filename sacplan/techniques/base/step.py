"""The step to plan for, which techniques and solvers are asked about."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from sacplan.core.derived import derived
from sacplan.core.pins import NO_PINS, Pins
from sacplan.core.program import Event, Phase, Program
from sacplan.device.devices import DeviceSpec
from sacplan.errors import PlanError

Objective = Literal["time", "flops"]
"""The quantity that recomputation adds and a plan minimises: predicted time, or floating-point operations."""

_TIE = 1e-3  # share of the time in the cost of an op where FLOPs are minimised: most ops have no FLOPs


# Compared by identity, since a program is too large to be compared field by field. Without slots, since cached
# properties and ``derived`` functions keep their results in ``__dict__``.
@dataclass(frozen=True, eq=False)
class PlanStep:
    """A recorded step, and the requirements on a plan for it.

    Attributes:
        program: the step without a plan.
        objective: what is minimised.
        pins: ops and modules that a plan must leave alone.
        device: what the step runs on; None where no technique asks for it.
        gradients: whether the step has a backward pass; False for inference.
        host_budget_bytes: memory of the host that is left for a plan; None: the device's ``host_memory_bytes``.

    Raises:
        PlanError: an unknown objective.
    """

    program: Program
    objective: Objective = "time"
    pins: Pins = NO_PINS
    device: DeviceSpec | None = None
    gradients: bool = True
    host_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        # ``Literal`` is for type checkers. At run time nothing keeps another word out.
        if self.objective not in ("time", "flops"):
            raise PlanError(f"unknown objective {self.objective!r}; known are 'time' and 'flops'.")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """A key that is equal for steps of one program with the same requirements."""
        # Without the program: what is cached by this key is stored with the program.
        return (
            self.objective,
            self.device,
            self.gradients,
            self.host_budget_bytes,
            *self.pins.key,
        )

    @property
    def host_bytes(self) -> int:
        """The memory of the host that a plan may take. Without a device there is none."""
        # A budget of 0 is not None: it allows no memory of the host at all.
        if self.host_budget_bytes is not None:
            return self.host_budget_bytes
        return 0 if self.device is None else self.device.host_memory_bytes

    @cached_property
    def outside(self) -> PlanStep:
        """The step for a technique that must leave alone what is compiled."""
        pins = self.pins.outside
        return self if pins is self.pins else replace(self, pins=pins)

    @cached_property
    def costs(self) -> tuple[float, ...]:
        """The cost of running each op again."""
        return op_costs(self.program, self.objective)

    def added_cost(self, added_ms: float) -> float:
        """Return the cost of time that a technique adds without running an op again. Time that it saves is worth 0."""
        # Where FLOPs are minimised, time only decides between equals.
        return max(0.0, added_ms) * (1.0 if self.objective == "time" else _TIE)


def op_costs(program: Program, objective: Objective) -> tuple[float, ...]:
    """Return the cost of running each op again, in ms; FLOPs are converted at the mean rate of the forward pass."""
    times = tuple(op.time_ms for op in program.ops)
    if objective == "time":
        return times
    forward = [op for op in program.ops if op.phase == Phase.FORWARD]
    flops = sum(op.flops for op in forward)
    # In a forward pass without FLOPs the rate is 0, so that only the share of the time decides.
    rate = math.fsum(op.time_ms for op in forward) / flops if flops else 0.0
    # The share of the time decides between ops of equal FLOPs. Without it, all ops without FLOPs would be free.
    return tuple(op.flops * rate + _TIE * ms for op, ms in zip(program.ops, times, strict=True))


@derived
def backward_ops(program: Program) -> Mapping[int, Sequence[int]]:
    """Return by forward op the ops of its gradient, in the order in which they run; worked out once."""
    found: dict[int, list[int]] = defaultdict(list)
    # Not all ops are among the events: slices may have taken the place of some.
    for i in (arg for code, arg in program.events if code == Event.OP):
        op = program.ops[i]
        if op.phase is Phase.BACKWARD and op.forward_of >= 0:
            found[op.forward_of].append(i)
    return dict(found)
