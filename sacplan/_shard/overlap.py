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

from sacplan._device.devices import DeviceSpec
from sacplan._shard.costs import Collective, Costs
from sacplan._shard.mesh import Mesh


@dataclass(slots=True)
class Overlap:
    """The clocks of one rank, in ms.

    Attributes:
        costs: of collectives among all ranks.
        now: the time of the computation so far.
        free: when the links are free again.
    """

    costs: Costs
    now: float = 0.0
    free: float = 0.0

    @classmethod
    def of(cls, world_size: int, spec: DeviceSpec) -> Overlap:
        """Return the clocks at the start of a step on so many ranks."""
        return cls(Costs.of(Mesh.of(world_size), spec))

    def compute(self, ms: float) -> float:
        """Compute for a time, which is returned."""
        self.now += ms
        return ms

    def copy(self, n_bytes: float) -> float:
        """Copy on the device, and return the time that it takes."""
        return self.compute(self.costs.copy_ms(n_bytes))

    def start(self, kind: Collective, n_bytes: float, since: float | None = None) -> float:
        """Start a collective over all ranks, at ``since`` (None: now) or when the links are free; returns its end."""
        return self.send(self.costs.collective_ms(kind, n_bytes, 0), since)

    def send(self, ms: float, since: float | None = None) -> float:
        """Start a collective that takes so long; returns its end."""
        # One link: a collective starts when it may and the one before is over.
        self.free = max(self.free, self.now if since is None else since) + ms
        return self.free

    def wait(self, end: float) -> float:
        """Have computation wait until a time, and return the exposed part: 0.0 if that time is past."""
        exposed = max(0.0, end - self.now)
        self.now += exposed
        return exposed
