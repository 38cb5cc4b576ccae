"""The cost of moving tensors between the ranks of a mesh: collectives, and paths from layout to layout.

    costs = Costs.of(mesh, spec)
    costs.collective_ms("all_gather", 2**20, axis=0)
    costs.redistribution_ms(2**20, (512, 512), parse_layout("S0,R"), parse_layout("R,S1"))

A collective takes a latency for each of its steps and a time for what each rank sends (alpha and beta), by the
algorithms of NCCL (``src/graph/tuning.cc``), the faster one where it has two:

- all-gather, reduce-scatter: ring; where each rank is in a node of its own also by halves (PAT), in log2(ranks) steps.
- all-reduce: ring (a reduce-scatter and an all-gather), or a tree: a chain in each node, a binary tree of
  nodes, up and down at 90 % of the bandwidth.
- broadcast: ring. All-to-all: each rank sends to each other in turn.

A ring that goes through several nodes has an adapter for each of its ranks in a node, and is as fast as these
together, or as the links inside are.

**The path from one layout to another does not depend on the device.** The machine that plans and the ranks that run
may have other links, and all must take the same steps. The path is the cheapest by the elements that are sent, where an
axis counts ``SLOWER`` times as much as the next faster one, so that slow axes move tensors while these are small. Its
time is that of its steps.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

from sacplan._device.devices import DeviceSpec
from sacplan._device.links import Link
from sacplan._shard.mesh import Mesh
from sacplan._shard.placements import PARTIAL, REPLICATED, Placement, Placements, fits
from sacplan.errors import PlanError

Collective: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]

TREE_BANDWIDTH = 0.9
"""Share of a ring's bandwidth that a tree reaches (NCCL)."""

SLOWER = 8
"""How much more an element counts on an axis than on the next faster one when paths are compared.

About the ratio of NVLink to InfiniBand."""

_LOCAL = 1 / 64
"""How much an element counts that is copied and stays on its rank."""


class RedistributeStep(NamedTuple):
    """One step of a redistribution: the placement on one axis changes."""

    axis: int
    source: Placement
    target: Placement

    @property
    def collective(self) -> Collective | None:
        """The collective of the step; None where each rank has what it needs."""
        return _COLLECTIVES.get((self.source.kind, self.target.kind))


_COLLECTIVES: dict[tuple[str, str], Collective] = {
    ("P", "S"): "reduce_scatter",
    ("P", "R"): "all_reduce",
    ("S", "R"): "all_gather",
    ("S", "S"): "all_to_all",
}


def sent(kind: Collective, n: int) -> float:
    """Return the share of the full buffer that each of ``n`` ranks sends."""
    if kind == "all_reduce":
        return 2 * (n - 1) / n
    if kind == "all_to_all":
        return (n - 1) / n**2
    return 1.0 if kind == "broadcast" and n > 1 else (n - 1) / n


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of collectives and redistributions on a mesh of such devices.

    Attributes:
        mesh: the ranks; nodes are filled in their order, ``spec.ranks_per_node`` each.
        spec: the device of a rank; its links.
    """

    mesh: Mesh
    spec: DeviceSpec

    @classmethod
    def of(cls, mesh: Mesh, spec: DeviceSpec) -> Costs:
        """Return the costs on a mesh of these devices."""
        return cls(mesh, spec)

    def nodes(self, axis: int) -> tuple[int, int]:
        """Return how many nodes the ranks of one group of an axis span, and how many of them share one."""
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
        return replace(outer, name=f"{outer.name}, {inside} a node", bandwidth_bytes_per_s=together)

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
            # PAT is used by NCCL with one rank in a node only.
            steps = (n - 1).bit_length() * outer.latency_s if inside == 1 else around
            time_s = min(around, steps) + seconds
        elif kind == "all_reduce":
            # A ring sends 2 (n - 1) / n of the buffer in 2 (n - 1) steps; a tree sends 2 in as many steps as
            # it is deep, up and down.
            deep = (inside - 1) * inner.latency_s + (nodes - 1).bit_length() * outer.latency_s
            tree = 2 * n_bytes / (TREE_BANDWIDTH * link.bandwidth_bytes_per_s)
            time_s = min(2 * around + seconds, 2 * deep + tree)
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

    def copy_ms(self, n_bytes: float) -> float:
        """Return the time that a rank takes to copy so much within its own memory."""
        rate = self.spec.bandwidth_bytes_per_s * self.spec.bandwidth_efficiency
        return 2 * n_bytes / rate * 1e3 + self.spec.kernel_launch_us * 1e-3

    def redistribution_path(
        self, shape: Sequence[int], source: Placements, target: Placements
    ) -> tuple[RedistributeStep, ...] | None:
        """Return the steps from one layout to another; None where there is no path.

        The same for all devices: it depends on the mesh, the shape and the layouts alone.
        """
        return redistribution_path(self.mesh.ranks, tuple(shape), source, target)

    def redistribution_ms(
        self, n_bytes: float, shape: Sequence[int], source: Placements, target: Placements
    ) -> float:
        """Return the time of a redistribution of a tensor of ``n_bytes``, unsharded; infinite if there is no path."""
        path = self.redistribution_path(shape, source, target)
        if path is None:
            return math.inf
        layout, time_ms = source, 0.0
        for step in path:
            time_ms += self._step_ms(step, n_bytes / _others(layout, self.mesh.ranks, step.axis))
            layout = after(layout, step)
        return time_ms

    def _step_ms(self, step: RedistributeStep, n_bytes: float) -> float:
        """Return the time of one step. ``n_bytes``: what the ranks of the axis have together."""
        kind = step.collective
        if kind is not None:
            return self.collective_ms(kind, n_bytes, step.axis)
        return self.copy_ms(n_bytes / self.mesh.ranks[step.axis] if step.target.is_cut else n_bytes)


def sent_along(
    ranks: tuple[int, ...], shape: Sequence[int], source: Placements, target: Placements
) -> tuple[int, ...]:
    """Return the axes on which a redistribution takes collectives."""
    path = redistribution_path(ranks, tuple(shape), source, target) or ()
    return tuple(step.axis for step in path if step.collective is not None)


def after(layout: Placements, step: RedistributeStep) -> Placements:
    """Return the layout after a step."""
    return (*layout[: step.axis], step.target, *layout[step.axis + 1 :])


@functools.lru_cache(maxsize=2**16)
def redistribution_path(
    ranks: tuple[int, ...], shape: tuple[int, ...], source: Placements, target: Placements
) -> tuple[RedistributeStep, ...] | None:
    """Return the cheapest steps from one layout to another, by Dijkstra's algorithm; None where there is no path.

    On the way each axis is as in the source, replicated, or as in the target. Of paths of equal cost, the first in the
    order of axes is taken.
    """
    # A layout that this shape cannot have.
    if not fits(shape, source, ranks) or not fits(shape, target, ranks):
        return None
    # Dijkstra: the heap has the cheapest layout that is not settled yet. The number in each entry breaks ties
    # in the order in which entries were made, so that all ranks, and the machine that plans, find the same
    # path.
    seen: set[Placements] = set()
    numbers = itertools.count()
    heap: list[tuple[float, int, Placements, tuple[RedistributeStep, ...]]] = [
        (0.0, next(numbers), source, ())
    ]
    while heap:
        cost, _, layout, path = heapq.heappop(heap)
        if layout == target:
            return path
        if layout in seen:
            continue
        seen.add(layout)
        for step in _steps(ranks, shape, layout, target):
            total = cost + _weight(ranks, shape, layout, step)
            heapq.heappush(heap, (total, next(numbers), after(layout, step), (*path, step)))
    return None


def _steps(
    ranks: tuple[int, ...], shape: tuple[int, ...], layout: Placements, target: Placements
) -> Iterator[RedistributeStep]:
    """Yield the possible next steps: an axis gets its target placement, or becomes replicated."""
    for axis, (now, then) in enumerate(zip(layout, target, strict=True)):
        # Only these two are tried, which keeps the search small: at most three placements for each axis.
        for placement in dict.fromkeys((then, REPLICATED)):
            step = RedistributeStep(axis, now, placement)
            if now != placement and _is_step(step) and _fits_both(ranks, shape, layout, step):
                yield step


def _is_step(step: RedistributeStep) -> bool:
    """Whether a step exists: only a replicated tensor becomes partial, and only a partial sum."""
    if step.target.is_partial:
        return step.source == REPLICATED and step.target == PARTIAL
    return True


def _fits_both(
    ranks: tuple[int, ...], shape: tuple[int, ...], layout: Placements, step: RedistributeStep
) -> bool:
    """Whether the layout after a step is valid, and in an all-to-all each rank has an equal part for each other."""
    then = after(layout, step)
    # The local part has to divide once more, by the ranks that it is sent to.
    if step.collective == "all_to_all":
        return fits(shape, (*then, step.source), (*ranks, ranks[step.axis]))
    return fits(shape, then, ranks)


def _weight(
    ranks: tuple[int, ...], shape: tuple[int, ...], layout: Placements, step: RedistributeStep
) -> float:
    elements = math.prod(shape) / _others(layout, ranks, step.axis)
    kind, n = step.collective, ranks[step.axis]
    # A step on each rank alone. The 1 is for the step itself: of ways that send the same, the one with fewer
    # steps wins.
    if kind is None:
        return 1 + _LOCAL * elements / (n if step.target.is_cut else 1)
    return 1 + elements * sent(kind, n) * float(SLOWER ** (len(ranks) - 1 - step.axis))


def _others(layout: Placements, ranks: Sequence[int], axis: int) -> int:
    """Return the number of parts into which the other axes cut a tensor."""
    return math.prod(n for i, (p, n) in enumerate(zip(layout, ranks, strict=True)) if i != axis and p.is_cut)
