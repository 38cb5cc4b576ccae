"""What collectives take: closed formulas, and what NCCL and others publish."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from sacplan import DeviceSpec
from sacplan.device.devices import resolve_device
from sacplan.device.links import LINKS, Link
from sacplan.distributed.sharding.costs import Collective, Costs
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.errors import DeviceError, PlanError

H100 = resolve_device("h100")
FREE = replace(H100, kernel_launch_us=0.0)
GIB = 2**30
KINDS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def costs(spec: DeviceSpec = FREE, **axes: int) -> Costs:
    return Costs(Mesh.of(axes), spec)


def with_links(inner: Link, outer: Link, ranks_per_node: int = 8) -> DeviceSpec:
    return replace(FREE, inner_link=inner, outer_link=outer, ranks_per_node=ranks_per_node)


# --- devices ------------------------------------------------------------------------------------------


def test_links_are_part_of_a_saved_device(tmp_path: Path) -> None:
    mine = replace(H100, inner_link=Link("mine", 1e9, 1e-6), ranks_per_node=4)
    mine.save(tmp_path / "spec.json")
    assert DeviceSpec.load(tmp_path / "spec.json") == mine
    with pytest.raises(DeviceError, match="bandwidth_bytes_per_s must be positive"):
        Link("none", 0.0, 0.0)
    with pytest.raises(DeviceError, match="latency_s must not be negative"):
        Link("before", 1.0, -1.0)
    with pytest.raises(DeviceError, match="ranks_per_node"):
        replace(H100, ranks_per_node=0)


# --- links of axes ------------------------------------------------------------------------------------


def test_an_axis_has_the_link_that_its_ranks_are_on() -> None:
    c = costs(dp=8, tp=8)
    assert (c.link(0), c.link(1)) == (LINKS["InfiniBand 400 Gbit"], LINKS["NVLink 4"])
    assert costs(dp=2, tp=4).link(0) == LINKS["NVLink 4"]
    # Groups of 16 with every fourth rank: two of eight are in a node, each with an adapter of its own.
    c = costs(dp=16, tp=4)
    assert c.nodes(0) == (8, 2)
    assert c.link(0).bandwidth_bytes_per_s == 2 * LINKS["InfiniBand 400 Gbit"].bandwidth_bytes_per_s
    # Eight adapters together are faster than NVLink.
    assert costs(dp=64).link(0).bandwidth_bytes_per_s == LINKS["NVLink 4"].bandwidth_bytes_per_s
    assert Costs(Mesh.of(64), replace(FREE, ranks_per_node=1)).link(0) == LINKS["InfiniBand 400 Gbit"]


# --- collectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_bus_bandwidth_is_that_of_the_link(kind: Collective, n: int) -> None:
    """NCCL's tests: time is size over algorithm bandwidth, and bus bandwidth that times a factor."""
    factor = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}.get(kind, (n - 1) / n)
    n_bytes = 64 * GIB
    # nccl-tests count, for an all-to-all, what one rank has; here it is what all have together.
    one = n_bytes / n if kind == "all_to_all" else n_bytes
    bus = one / (costs(r=n).collective_ms(kind, n_bytes, 0) / 1e3) * factor
    assert bus == pytest.approx(LINKS["NVLink 4"].bandwidth_bytes_per_s, rel=1e-3)


def test_closed_formulas() -> None:
    inner, outer = Link("inner", 100e9, 2e-6), Link("outer", 10e9, 5e-6)
    one = Costs(Mesh.of(4), with_links(inner, outer))
    assert one.collective_ms("all_gather", 4e6, 0) == pytest.approx(3 * 0.002 + 0.03)
    assert one.collective_ms("all_reduce", 4e6, 0) == pytest.approx(6 * 0.002 + 0.06)
    assert one.collective_ms("all_to_all", 4e6, 0) == pytest.approx(3 * 0.002 + 0.0075)
    two = Costs(Mesh.of(8), with_links(inner, outer, ranks_per_node=4))  # two nodes, 40 GB/s between them
    assert two.collective_ms("reduce_scatter", 8e6, 0) == pytest.approx(6 * 0.002 + 0.005 + 7e6 / 40e6)
    # Each rank sends 1/8 of its part to each of 3 in its node and 4 in the other, both at the same time.
    assert two.collective_ms("all_to_all", 64e6, 0) == pytest.approx(6 * 0.002 + 0.005 + 4e6 / 10e6)
    far = Costs(Mesh.of(64), with_links(inner, outer, ranks_per_node=1))
    assert far.collective_ms("all_gather", 64e3, 0) == pytest.approx(6 * 0.005 + 63e3 / 10e6)
    assert far.collective_ms("all_reduce", 9.0, 0) == pytest.approx(2 * 6 * 0.005 + 2 * 10 / 10e6)  # tree
    assert far.collective_ms("all_reduce", 64e9, 0) == pytest.approx(126 * 0.005 + 2 * 63e9 / 10e6)  # ring
    assert costs(r=1).collective_ms("all_reduce", 1e9, 0) == 0.0


def test_an_all_reduce_is_at_most_a_reduce_scatter_and_an_all_gather() -> None:
    for n, size in itertools.product((2, 8, 24, 64, 256), (1e3, 1e6, 1e9)):
        c = costs(r=n)
        both = c.collective_ms("reduce_scatter", size, 0) + c.collective_ms("all_gather", size, 0)
        if c.nodes(0)[1] > 1:  # PAT is not for all-reduces
            assert c.collective_ms("all_reduce", size, 0) <= both * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_take_longer_and_never_no_time(kind: Collective) -> None:
    for axes in ({"r": 2}, {"r": 64}, {"a": 8, "b": 8}):
        c = Costs(Mesh.of(axes), H100)
        times = [c.collective_ms(kind, float(2**i), 0) for i in range(36)]
        assert times == sorted(times)
        assert times[0] > 0
        assert times[-1] > times[0]


def test_no_such_collective() -> None:
    with pytest.raises(PlanError, match=r"'gossip' is not known.*all_gather"):
        costs(r=2).collective_ms("gossip", 1.0, 0)  # type: ignore[arg-type]
