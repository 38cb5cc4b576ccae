"""Clocks of a step: one of computation, and one of each link, which work side by side.

    clocks = Clocks()
    there = clocks.send(2.0, link="to the host")
    clocks.compute(1.5)
    exposed_ms = clocks.wait(there)  # 0.5: computation waits for the rest

Transfers over one link follow on each other in the order in which they start, and do not slow down computation. The
time that computation waits is the exposed part of a transfer; that alone is time of the step, which is then a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Clocks:
    """The clocks of one device, in ms.

    Attributes:
        now: the time of the computation so far.
        free: by link, when it is free again; 0.0 for one that was not used.
    """

    now: float = 0.0
    free: dict[str, float] = field(default_factory=dict)

    def compute(self, ms: float) -> float:
        """Compute for a time, which is returned."""
        self.now += ms
        return ms

    def send(self, ms: float, since: float | None = None, link: str = "") -> float:
        """Start a transfer that takes so long, at ``since`` (None: now) or when the link is free; returns its end."""
        end = max(self.free.get(link, 0.0), self.now if since is None else since) + ms
        self.free[link] = end
        return end

    def wait(self, end: float) -> float:
        """Have computation wait until a time, and return the exposed part: 0.0 if that time is past."""
        exposed = max(0.0, end - self.now)
        self.now += exposed
        return exposed
