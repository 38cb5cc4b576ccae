"""How fast kernels of each kind run on a device, by ``kernel_kinds.csv``, which says where its figures come from.

The time of one kernel is that of whatever it waits for longest, after its launches:

    ms = 1e3 * max(bytes / (bandwidth * bandwidth_efficiency * share),
                   elements / (rate * multiprocessors * clock),
                   FLOPs / (peak * compute_efficiency * share))

A share is relative to the kernel that does best: for bytes a contiguous elementwise op, for FLOPs a large matrix
product. So ``bandwidth_efficiency`` and ``compute_efficiency`` of a :class:`DeviceSpec` say what a device reaches, and
changing them scales all kernels. The table says how kernels compare, which differs little between devices. A rate is
for kernels that wait for instructions or latency and not for bytes: elements per cycle and multiprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sacplan.core.files import table_of
from sacplan.device.devices import DeviceSpec
from sacplan.errors import DeviceError

KINDS = {row["kind"]: row for row in table_of(Path(__file__).with_name("kernel_kinds.csv"))}
"""The kinds of kernels by name."""

FITTED_BYTES_PER_CYCLE = 12.8
"""Bytes of bandwidth per cycle of a multiprocessor on an H100, and 13.4 on an A100 with 80 GB: the published shares
are of these two. An RTX 3090 has 6.3 and a 4090 has 3.1, and timm's steps show that kernels reach all of it."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast kernels of one kind run on one device.

    Attributes:
        bytes_per_ms: read and written.
        elements_per_ms: infinite where elements do not matter.
        matrix_share: of the FLOP/s of large matrix products.
    """

    bytes_per_ms: float
    elements_per_ms: float
    matrix_share: float


def speeds_of(spec: DeviceSpec) -> dict[str, Speed]:
    """Return the speeds of all kinds of kernels on a CUDA device.

    Raises:
        DeviceError: ``matrix_shares`` has a kind that is unknown, or whose kernels have no FLOPs.
    """
    known = [kind for kind, row in KINDS.items() if row["matrix"]]
    unknown = sorted(set(spec.matrix_shares or ()).difference(known))
    if unknown:
        raise DeviceError(
            f"DeviceSpec {spec.name!r}: matrix_shares has {', '.join(map(repr, unknown))}; it may have the kinds "
            f"{', '.join(known)}."
        )
    return {kind: _speed(row, spec) for kind, row in KINDS.items()}


def _speed(row: Mapping[str, str], spec: DeviceSpec) -> Speed:
    share = float(row["share"] or 1)
    if row["few_bytes"]:
        bytes_per_cycle = spec.bandwidth_bytes_per_s / spec.cycles_per_s
        share = min(1.0, max(1.0, FITTED_BYTES_PER_CYCLE / bytes_per_cycle) * share)
    elements_per_ms = math.inf
    if row["rate"]:
        elements_per_ms = float(row["rate"]) * spec.cycles_per_s * 1e-3
    elif row["block_us"]:
        # Blocks have 1,024 threads, which limits how many run at once.
        elements_per_ms = spec.sm_count * (spec.threads_per_sm // 1024) / (float(row["block_us"]) * 1e-3)
    elif row["us"]:
        elements_per_ms = 1 / (float(row["us"]) * 1e-3)
    hopper = spec.capability is not None and (9, 0) <= spec.capability < (12, 0)
    matrix = (row["matrix_hopper"] if hopper else "") or row["matrix"] or 1
    return Speed(
        spec.bandwidth_bytes_per_s * spec.bandwidth_efficiency * 1e-3 * share,
        elements_per_ms,
        (spec.matrix_shares or {}).get(row["kind"], float(matrix)),
    )
