"""What of the time of collectives computation does not hide: two clocks, one of computation and one of the links.

    overlap = Overlap.of(world_size, spec)
    there = overlap.start("all_gather", n_bytes)
    overlap.compute(1.5)
    exposed_ms = overlap.wait(there)   # computation waits; 0.0 if it took longer

Collectives use the links one after the other, in the order in which they start. Computation is not slowed down by them.
The time of an op in a program is what computation waits, so that the time of a step is a sum.
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
        now: until when has been computed.
        free: from when on the links are free.
    """

    costs: Costs
    now: float = 0.0
    free: float = 0.0

    @classmethod
    def of(cls, world_size: int, spec: DeviceSpec) -> Overlap:
        """At the start of a step on so many ranks."""
        return cls(Costs.of(Mesh.of(world_size), spec))

    def compute(self, ms: float) -> float:
        """Compute so long; returns it."""
        self.now += ms
        return ms

    def copy(self, n_bytes: float) -> float:
        """Copy on the device; returns how long it takes."""
        return self.compute(self.costs.copy_ms(n_bytes))

    def start(self, kind: Collective, n_bytes: float, since: float | None = None) -> float:
        """When a collective over all ranks is over that may start at ``since`` (None: now)."""
        return self.send(self.costs.collective_ms(kind, n_bytes, 0), since)

    def send(self, ms: float, since: float | None = None) -> float:
        """The same for a collective that takes so long."""
        self.free = max(self.free, self.now if since is None else since) + ms
        return self.free

    def wait(self, end: float) -> float:
        """Wait until then; returns how long that is."""
        exposed = max(0.0, end - self.now)
        self.now += exposed
        return exposed
