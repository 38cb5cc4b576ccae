"""How long computation waits for the copies of a program: three clocks, of computation and of the link each way.

    waits = clocked(program.ops.__getitem__, program.events, program.storage_bytes.__getitem__, spec)
    waits[op]  # ms

The copies of one direction follow one another. A copy back begins at the earliest when the same tensor's copy out has
ended. Waiting is exact for these rules, with the predicted times of the ops and ``PLANNED_SHARE`` of the link's
bandwidth: a schedule that leaves the link no room is late as soon as anything is slower than predicted.

Copies do not slow down computation. The time that computation waits is the exposed part of a copy; that alone is time
of the step, which is then a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sacplan.core.program import Event, Op
from sacplan.device.devices import DeviceSpec
from sacplan.techniques.offload.rewrite import TO_DEVICE, TO_HOST, WAIT_BACK, WAIT_OUT

PLANNED_SHARE = 0.8
"""Share of the link's bandwidth with which copies are planned: without slack, anything slower makes copies late."""

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
    now = out_free = back_free = 0.0  # the time of computation, and when each direction of the link is free
    arrives: dict[int, float] = {}  # by storage of a copy, when the copy is complete
    waits: dict[int, float] = {}
    for code, arg in events:
        if code != _OP:
            continue
        op = op_of(arg)
        # Copies are sent and waited for by two ops each, so computation between them hides the link.
        if op.name == TO_HOST:
            arrives[op.writes[0]] = out_free = max(out_free, now) + copy_ms(spec, bytes_of(op.reads[0]))
        elif op.name == TO_DEVICE:
            # What is not on the host yet cannot come back, though the other direction of the link may be free.
            # A parameter is there from the beginning.
            begins = max(back_free, now, arrives.get(op.reads[0], 0.0))
            arrives[op.writes[0]] = back_free = begins + copy_ms(spec, bytes_of(op.writes[0]))
        elif op.name in (WAIT_OUT, WAIT_BACK):
            waits[arg] = max(0.0, arrives[op.reads[0]] - now)
            now += waits[arg]
        else:
            now += op.time_ms
    return waits
