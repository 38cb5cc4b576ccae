"""Exposed communication, by two clocks: one of computation, and one of the links.

    overlap = Overlap.of(world_size, spec)
    there = overlap.start("all_gather", n_bytes)
    overlap.compute(1.5)
    exposed_ms = overlap.wait(there)   # computation waits; 0.0 if it took longer

Collectives use the links one after the other, in the order in which they start, and do not slow down computation. The
time of a collective in a program is its exposed part alone, so that the time of a step is a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from sacplan._device.clocks import Clocks
from sacplan._device.devices import DeviceSpec
from sacplan._shard.costs import Collective, Costs
from sacplan._shard.mesh import Mesh


@dataclass(slots=True, kw_only=True)
class Overlap(Clocks):
    """The clocks of one rank, in ms. All collectives use one link.

    Attributes:
        costs: of collectives among all ranks.
    """

    costs: Costs

    @classmethod
    def of(cls, world_size: int, spec: DeviceSpec) -> Overlap:
        """Return the clocks at the start of a step on so many ranks."""
        return cls(costs=Costs.of(Mesh.of(world_size), spec))

    def copy(self, n_bytes: float) -> float:
        """Copy on the device, and return the time that it takes."""
        return self.compute(self.costs.copy_ms(n_bytes))

    def start(self, kind: Collective, n_bytes: float, since: float | None = None) -> float:
        """Start a collective over all ranks, at ``since`` (None: now) or when the links are free; returns its end."""
        return self.send(self.costs.collective_ms(kind, n_bytes, 0), since)
