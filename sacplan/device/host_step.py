"""The time of an optimizer that steps on the host, and of copies between host and device.

All figures are assumptions in the device's row: for the memory of a processor
(``DeviceSpec.host_bandwidth_bytes_per_s``), which up to four ranks share; copies of pinned memory take the link
(``host_link``), and others half of it, since the driver copies them into pinned memory first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist

from sacplan.device.devices import DeviceSpec


def ranks_here() -> int:
    """Return the number of ranks of the default process group; 1 if there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def shared_host(n: int, spec: DeviceSpec) -> str:
    """Say what each of ``n`` ranks gets of the memory of their host."""
    return (
        f"{spec.sharers(n)} of {n} ranks share a processor of the host, whose memory moves "
        f"{spec.host_bandwidth_bytes_per_s / 1e9:.0f} GB/s (DeviceSpec.host_bandwidth_bytes_per_s): updates there get "
        "a part each, and copies all of their links"
    )


def rank_step_ms(n_bytes: int, spec: DeviceSpec) -> float:
    """Return the milliseconds in which a rank moves bytes of the memory of its processor, which others share."""
    return 1e3 * n_bytes * spec.sharers(ranks_here()) / spec.host_bandwidth_bytes_per_s


def copy_ms(n_bytes: int, waits: bool, spec: DeviceSpec) -> float:
    """Return the milliseconds of a copy between host and device; twice as many if the host waits (no pinned memory)."""
    return 1e3 * n_bytes / spec.host_link.bandwidth_bytes_per_s * (2 if waits else 1)


def update_and_copy_ms(parameters: Iterable[tuple[int, int]], spec: DeviceSpec) -> float:
    """Return the milliseconds of an update on the host and of the copies that follow it.

    The copy of a parameter runs while the next ones are updated (``torchao/optim/cpu_offload.py``).

    Args:
        parameters: for each, its bytes, and the bytes that its update reads: the parameter, its gradient and its state.
        spec: the device that the parameters are copied to.
    """
    updated_s = copied_s = 0.0
    for n_bytes, read_bytes in parameters:
        updated_s += rank_step_ms(read_bytes, spec) / 1e3
        copied_s = max(copied_s, updated_s) + n_bytes / spec.host_link.bandwidth_bytes_per_s
    return 1e3 * copied_s
