"""What ``fit`` is asked: a step, optimizers and limits; and the recordings that all of its rows share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sacplan.core.derived import derived
from sacplan.core.progress import begins
from sacplan.device.devices import DeviceSpec
from sacplan.planning.limits import Limit, Room
from sacplan.profiling.optimizer_names import BY_NAME, COMPARED
from sacplan.profiling.optimizer_table import Factory
from sacplan.profiling.optimizers import OptimizerStep, recorded_step
from sacplan.profiling.profile import Profile
from sacplan.questions.batch_sizes import Recordings
from sacplan.questions.cases import SizeAxis


@dataclass
class Asked:
    """What ``fit`` is asked. Recordings are made when they are first needed, and kept.

    Attributes:
        recordings: How the step is recorded at any size.
        optimizer: The optimizer that was asked for.
        limit: The limit on each device.
        batch, seq: The size of the step; with several devices, ``batch`` is for each device.
        longest: The longest sequence to try.
        host_budget_bytes: The limit for the memory of the host, for each device.
        devices: How many devices there are.
        notes: Sentences on what could not be computed. They are added while rows are made.
    """

    recordings: Recordings
    optimizer: Any
    limit: Limit
    batch: int
    seq: int | None
    longest: int | None
    host_budget_bytes: int
    devices: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def spec(self) -> DeviceSpec:
        """The device."""
        return self.recordings.spec

    @cached_property
    def room(self) -> Room:
        """The room of a step on the device."""
        return self.limit.room(self.spec, int(self.devices > 1))

    @derived
    def at(self, batch: int, seq: int | None, name: str | None) -> Profile:
        """Return the step at a size on one device, with the optimizer of this name; None for no optimizer."""
        return self.recordings.at(batch, seq, **({} if name is None else {"optimizer": self.make_of(name)}))

    @cached_property
    def base(self) -> Profile:
        """The step at the size that was asked for, without an optimizer."""
        begins("the step")
        return self.at(self.batch, self.seq, None)

    # --- optimizers

    @cached_property
    def makes(self) -> dict[str, Factory | None]:
        """What makes each optimizer, by name: the one that was asked for, then those to compare with it.

        A step without an optimizer has a single entry, None.
        """
        own = self.optimizer
        if own is None:
            return {"no optimizer": None}
        own = BY_NAME[own].make if isinstance(own, str) else own
        # Optimizers of the table have a name; others are shown by that of their function or class.
        named = (name for name, one in BY_NAME.items() if one.make is own)
        first = next(named, "") or str(getattr(own, "__name__", type(own).__name__))
        # The compared optimizers are variants of Adam: in place of another optimizer, they would change the training.
        others = COMPARED if first.startswith("adam") else ()
        return {first: own, **{name: BY_NAME[name].make for name in others}}

    def make_of(self, name: str) -> Factory | None:
        """Return what makes the optimizer of a name, in ``makes`` or in the table; None for no optimizer."""
        return self.makes[name] if name in self.makes else BY_NAME[name].make

    @derived
    def step_of(self, name: str) -> OptimizerStep | None:
        """Record the step of an optimizer alone, on the whole model; None if there is none, or that is not possible."""
        base, make = self.base, self.make_of(name)
        if make is None:
            return None
        begins(f"the step of {name}")
        return recorded_step(base, make)

    def whole(self, name: str) -> str | None:
        """Return the name itself if the optimizer can only be recorded within a whole step; else None."""
        return name if self.make_of(name) is not None and self.step_of(name) is None else None

    # --- sizes

    def batch_axis(self, record: Callable[[int], Profile], **more: Any) -> SizeAxis:
        """Return the axis of batch sizes of a step."""
        # Not from a batch of one: its dimensions of size 1 broadcast and have arbitrary strides.
        first = max(2, self.batch)
        return SizeAxis("batch", self.batch, (first, first + 2), record, self.notes, **more)
