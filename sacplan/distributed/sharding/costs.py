"""The time of collectives between the ranks of a mesh.

    costs = Costs(mesh, spec)
    costs.collective_ms("all_gather", 2**20, axis=0)

A collective takes a latency for each of its steps and a time for what each rank sends (alpha and beta), by the
algorithms of NCCL (``src/graph/tuning.cc``), the faster one where it has two:

- all-gather, reduce-scatter: ring; where each rank is in a node of its own, also PAT, in log2(ranks) steps.
- all-reduce: ring (a reduce-scatter and an all-gather), or a tree: a chain in each node, a binary tree of
  nodes, up and down at 90 % of the bandwidth.
- broadcast: ring. All-to-all: each rank sends to each of the others in turn.

A ring that goes through several nodes has an adapter for each of its ranks in a node, and is as fast as these
adapters together, but no faster than the links inside a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from sacplan.device.devices import DeviceSpec
from sacplan.device.links import Link
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.errors import PlanError

Collective: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]

TREE_BANDWIDTH = 0.9
"""Share of a ring's bandwidth that a tree reaches (NCCL)."""


def sent(kind: Collective, n: int) -> float:
    """Return the share of the full buffer that each of ``n`` ranks sends."""
    if kind == "all_reduce":
        return 2 * (n - 1) / n
    if kind == "all_to_all":
        return (n - 1) / n**2
    return 1.0 if kind == "broadcast" and n > 1 else (n - 1) / n


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of collectives on a mesh of equal devices.

    Attributes:
        mesh: the ranks; nodes are filled in their order, ``spec.ranks_per_node`` each.
        spec: the device of a rank, with its links.
    """

    mesh: Mesh
    spec: DeviceSpec

    def nodes(self, axis: int) -> tuple[int, int]:
        """Return how many nodes the ranks of one group of an axis span, and how many ranks share a node."""
        n = self.mesh.ranks[axis]
        # Ranks of a group are ``stride`` apart, so this many of them are in one node.
        inside = max(1, min(n, self.spec.ranks_per_node // self.mesh.stride(axis)))
        return math.ceil(n / inside), inside

    def link(self, axis: int) -> Link:
        """Return the link by which the ranks of an axis reach each other.

        The inner link if they are in one node, else the outer one: as fast as the adapters of all the ranks of a
        group that are in one node, up to what the links inside carry.
        """
        inner, outer = self.spec.inner_link, self.spec.outer_link
        nodes, inside = self.nodes(axis)
        if nodes == 1:
            return inner
        # One rank in each node: it has its own adapter.
        if inside == 1:
            return outer
        together = min(inner.bandwidth_bytes_per_s, inside * outer.bandwidth_bytes_per_s)
        return Link(f"{outer.name}, {inside} a node", together, outer.latency_s)

    def collective_ms(self, kind: Collective, n_bytes: float, axis: int) -> float:
        """Return the time of a collective on an axis.

        Args:
            kind: of the collective.
            n_bytes: of the full buffer: what is gathered, scattered or reduced; all ranks' parts in an all-to-all.
            axis: of the mesh.

        Raises:
            PlanError: there is no such collective.
        """
        n = self.mesh.ranks[axis]
        if n == 1:
            return 0.0
        nodes, inside = self.nodes(axis)
        link, inner, outer = self.link(axis), self.spec.inner_link, self.spec.outer_link
        # Latency of a ring: n - 1 steps, of which those that leave a node cost more.
        around = (nodes - 1) * outer.latency_s + (n - nodes) * inner.latency_s
        seconds = n_bytes * sent(kind, n) / link.bandwidth_bytes_per_s
        if kind in ("all_gather", "reduce_scatter"):
            # NCCL uses PAT only with one rank in a node.
            steps = (n - 1).bit_length() * outer.latency_s if inside == 1 else around
            time_s = min(around, steps) + seconds
        elif kind == "all_reduce":
            # A ring sends 2 (n - 1) / n of the buffer in 2 (n - 1) steps; a tree sends the buffer up and down, each
            # time in as many steps as it is deep.
            depth = (inside - 1) * inner.latency_s + (nodes - 1).bit_length() * outer.latency_s
            tree = 2 * n_bytes / (TREE_BANDWIDTH * link.bandwidth_bytes_per_s)
            time_s = min(2 * around + seconds, 2 * depth + tree)
        elif kind == "broadcast":
            time_s = around + seconds
        elif kind == "all_to_all":
            part = n_bytes / n**2
            within = (inside - 1) * part / inner.bandwidth_bytes_per_s
            across = (n - inside) * part / outer.bandwidth_bytes_per_s
            time_s = around + max(within, across)
        else:
            raise PlanError(
                f"collective {kind!r} is not known; it is one of {', '.join(get_args(Collective))}."
            )
        return time_s * 1e3 + self.spec.kernel_launch_us * 1e-3
