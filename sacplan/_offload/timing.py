"""How long computation waits for the copies of a program: three clocks, of computation and of the link each way.

    exposed = exposed_ms(program.ops.__getitem__, program.events, program.storage_bytes.__getitem__, spec)

The copies of one direction follow on each other. A copy back begins when the one out has ended. Waiting is exact for
these rules, with the predicted times of the ops and ``PLANNED_SHARE`` of the link's bandwidth: a schedule that leaves
the link no room is late as soon as anything is slower than predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sacplan._device.clocks import Clocks
from sacplan._device.devices import DeviceSpec
from sacplan._offload.rewrite import TO_DEVICE, TO_HOST, WAIT_BACK, WAIT_OUT
from sacplan._program.program import Event, Op

PLANNED_SHARE = 0.8
"""Share of the bandwidth of the link to the host with which copies are planned."""

_OP = int(Event.OP)


def copy_ms(spec: DeviceSpec, n_bytes: int) -> float:
    """Return the time of a copy between device and host, either way."""
    link = spec.host_link
    return (n_bytes / (PLANNED_SHARE * link.bandwidth_bytes_per_s) + link.latency_s) * 1e3


def exposed_ms(
    op_of: Callable[[int], Op],
    events: Iterable[tuple[int, int]],
    bytes_of: Callable[[int], int],
    spec: DeviceSpec,
) -> dict[int, float]:
    """Return by op that waits for a copy how long it waits.

    Args:
        op_of: gives the ops of a program by index.
        events: its events.
        bytes_of: the size of a storage on the device.
        spec: the device, with its link.
    """
    clocks = Clocks()
    arrives: dict[int, float] = {}  # by storage of a copy
    found: dict[int, float] = {}
    for code, arg in events:
        if code != _OP:
            continue
        op = op_of(arg)
        if op.name == TO_HOST:
            arrives[op.writes[0]] = clocks.send(copy_ms(spec, bytes_of(op.reads[0])), link="out")
        elif op.name == TO_DEVICE:
            since = max(clocks.now, arrives[op.reads[0]])
            arrives[op.writes[0]] = clocks.send(copy_ms(spec, bytes_of(op.writes[0])), since, "back")
        elif op.name in (WAIT_OUT, WAIT_BACK):
            found[arg] = clocks.wait(arrives[op.reads[0]])
        else:
            clocks.compute(op.time_ms)
    return found
