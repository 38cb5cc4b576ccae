"""How long computation waits for the copies of a program: three clocks, of computation and of the link each way.

    waits = clocked(program.ops.__getitem__, program.events, program.storage_bytes.__getitem__, spec)
    waits[op]  # ms

The copies of one direction follow on each other. A copy back begins when the one out has ended. Waiting is exact for
these rules, with the predicted times of the ops and ``PLANNED_SHARE`` of the link's bandwidth: a schedule that leaves
the link no room is late as soon as anything is slower than predicted.

The clocks work side by side:

    clocks = Clocks()
    there = clocks.send(2.0, link="to the host")
    clocks.compute(1.5)
    exposed_ms = clocks.wait(there)  # 0.5: computation waits for the rest

Transfers over one link follow on each other in the order in which they start, and do not slow down computation. The
time that computation waits is the exposed part of a transfer; that alone is time of the step, which is then a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sacplan.core.program import Event, Op
from sacplan.device.devices import DeviceSpec
from sacplan.techniques.offload.rewrite import TO_DEVICE, TO_HOST, WAIT_BACK, WAIT_OUT


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


PLANNED_SHARE = 0.8
"""Share of the bandwidth of the link to the host with which copies are planned."""

_OP = int(Event.OP)


def copy_ms(spec: DeviceSpec, n_bytes: int) -> float:
    """Return the time of a copy between device and host, either way."""
    link = spec.host_link
    return (n_bytes / (PLANNED_SHARE * link.bandwidth_bytes_per_s) + link.latency_s) * 1e3


def clocked(
    op_of: Callable[[int], Op],
    events: Iterable[tuple[int, int]],
    bytes_of: Callable[[int], int],
    spec: DeviceSpec,
) -> dict[int, float]:
    """Run the clocks through a program; return by op that waits for a copy how long it waits, in ms.

    Args:
        op_of: gives the ops of a program by index.
        events: its events.
        bytes_of: the size of a storage on the device.
        spec: the device, with its link.
    """
    clocks = Clocks()
    arrives: dict[int, float] = {}  # by storage of a copy
    waits: dict[int, float] = {}
    for code, arg in events:
        if code != _OP:
            continue
        op = op_of(arg)
        # Copies are sent and waited for by two ops each, so computation between them hides the link.
        if op.name == TO_HOST:
            arrives[op.writes[0]] = clocks.send(copy_ms(spec, bytes_of(op.reads[0])), None, "out")
        elif op.name == TO_DEVICE:
            # What is not on the host yet cannot come back, though the other direction of the link may be free.
            # A parameter is there from the beginning.
            since = max(clocks.now, arrives.get(op.reads[0], 0.0))
            arrives[op.writes[0]] = clocks.send(copy_ms(spec, bytes_of(op.writes[0])), since, "back")
        elif op.name in (WAIT_OUT, WAIT_BACK):
            waits[arg] = clocks.wait(arrives[op.reads[0]])
        else:
            clocks.compute(op.time_ms)
    return waits
