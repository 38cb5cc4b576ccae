"""Links between ranks: their bandwidths and latencies, and the table of them.

Bandwidths are what a collective reaches, in one direction, for each rank that takes part (NCCL's "bus bandwidth"),
not what is printed on the box:

- NVLink and PCIe: what NCCL itself assumes when it chooses an algorithm (``src/graph/topo.h``: 20 GB/s a link of
  NVLink 2 and 3, 20.6 of NVLink 4, 40.1 of NVLink 5; 12 for PCIe 3.0 x16, doubled with each generation), times the
  links of a GPU (6, 12, 18, 18).
- Infinity Fabric: 48 of the 64 GB/s of each of the 7 links of an MI300X (AMD, "Understanding RCCL Bandwidth and xGMI
  Performance on AMD Instinct MI300X", 2025), the same share of the 76.8 GB/s of an MI350X; the MI250X is rough.
- Networks: what is printed less 4 % (NCCL: 12 GB/s for 100 Gbit/s), by the ranks that share an adapter: in the vendors'
  own machines (DGX-1, A100, H100, B200; Frontier for the MI250X), for other GPUs in the largest that clouds rent out.

Latencies are those of NCCL's ring with protocol LL128 (``src/graph/tuning.cc``): 1.9 us for NVLink, 2.5 for PCIe, 4.0
for a network. Links of a CPU are assumed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from sacplan.core.files import table_of
from sacplan.device.files import Duration, Rate
from sacplan.errors import DeviceError


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link by which one rank reaches others.

    Attributes:
        name: for people.
        bandwidth_bytes_per_s: that collectives reach, in one direction, for each rank.
        latency_s: of one step from rank to rank.

    Raises:
        DeviceError: a bandwidth that is not positive, or a negative latency.
    """

    name: str
    bandwidth_bytes_per_s: Rate
    latency_s: Duration

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise DeviceError(
                f"Link {self.name!r}: bandwidth_bytes_per_s must be positive, got {self.bandwidth_bytes_per_s!r}"
            )
        if not self.latency_s >= 0:
            raise DeviceError(f"Link {self.name!r}: latency_s must not be negative, got {self.latency_s!r}")


LINKS = {
    row["name"]: Link(row["name"], float(row["gb_per_s"]) * 1e9, float(row["us"]) * 1e-6)
    for row in table_of(Path(__file__).with_name("links.csv"))
}
"""The links by the names that ``devices.csv`` uses."""
