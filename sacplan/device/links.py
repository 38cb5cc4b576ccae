"""Links between ranks: their bandwidths and latencies, and the table of them.

Bandwidths are what a collective reaches, in one direction, for each rank that takes part (NCCL's "bus bandwidth"),
not what is printed on the box:

- NVLink and PCIe: what NCCL itself assumes when it chooses an algorithm (``src/graph/topo.h``: 20 GB/s a link of
  NVLink 2 and 3, 20.6 of NVLink 4, 40.1 of NVLink 5; 12 for PCIe 3.0 x16, doubled with each generation), times the
  links of a GPU (6, 12, 18, 18).
- Infinity Fabric: 48 of the 64 GB/s of each of the 7 links of an MI300X (AMD, "Understanding RCCL Bandwidth and xGMI
  Performance on AMD Instinct MI300X", 2025), the same share of the 76.8 GB/s of an MI350X; the MI250X is rough.
- Networks: what is printed less 4 % (NCCL: 12 GB/s for 100 Gbit/s), by the ranks that share an adapter: in the vendors'
  own machines (DGX-1, A100, H100, B200; Frontier for the MI250X), in the largest that clouds rent out for others.

Latencies are those of NCCL's ring with protocol LL128 (``src/graph/tuning.cc``): 1.9 us for NVLink, 2.5 for PCIe, 4.0
for a network. Links of a CPU are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from sacplan.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Link:
    """The link by which one rank reaches others.

    Attributes:
        name: for people.
        bandwidth_bytes_per_s: that collectives reach, in one direction, for each rank.
        latency_s: of one step from rank to rank.

    Raises:
        DeviceError: a bandwidth that is not positive, or a negative latency.
    """

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise DeviceError(
                f"Link {self.name!r}: bandwidth_bytes_per_s must be positive, got {self.bandwidth_bytes_per_s!r}"
            )
        if not self.latency_s >= 0:
            raise DeviceError(f"Link {self.name!r}: latency_s must not be negative, got {self.latency_s!r}")


def _by_name(*links: tuple[str, float, float]) -> dict[str, Link]:
    return {name: Link(name, gb_per_s * 1e9, us * 1e-6) for name, gb_per_s, us in links}


LINKS = _by_name(
    # name, GB/s for each rank in one direction, us a step
    ("NVLink 2", 120, 1.9),
    ("NVLink 3", 240, 1.9),
    ("NVLink 4", 370.8, 1.9),
    ("NVLink 5", 721.8, 1.9),
    ("Infinity Fabric MI250X", 100, 1.9),
    ("Infinity Fabric MI300X", 336, 1.9),
    ("Infinity Fabric MI350X", 403, 1.9),
    ("PCIe 3.0", 12, 2.5),
    ("PCIe 4.0", 24, 2.5),
    ("PCIe 5.0", 48, 2.5),
    ("PCIe through the host", 12, 2.5),  # cards of consumers do not reach each other's memory
    ("shared memory", 5, 10),
    ("InfiniBand 400 Gbit", 48, 4.0),
    ("InfiniBand 200 Gbit", 24, 4.0),
    ("InfiniBand 50 Gbit", 6, 4.0),  # DGX-1: four adapters of 100 Gbit for eight GPUs
    ("Slingshot 100 Gbit", 12, 4.0),  # Frontier: four adapters of 200 Gbit for eight dies
    ("Ethernet 50 Gbit", 6, 4.0),  # 400 Gbit for eight
    ("Ethernet 12 Gbit", 1.5, 4.0),  # 100 Gbit for eight
    ("Ethernet 10 Gbit", 1.2, 30),
)
"""By name, as ``devices.csv`` says them."""
