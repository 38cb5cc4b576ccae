"""The caching allocator's rules by hand, and its invariants by random use."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sacplan.device.caching_allocator import (
    MIB,
    CachingAllocator,
    ExpandableAllocator,
    OutOfDeviceMemory,
)

KIB = 2**10


def test_where_memory_ends_cached_segments_go_back() -> None:
    allocator = CachingAllocator(60 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(30 * MIB)  # out of the 40, which are a segment in use from here on
    allocator.allocate(20 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (60 * MIB, 0)
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(12 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (60 * MIB, 1)
    other = CachingAllocator(60 * MIB)
    other.free(other.allocate(40 * MIB))
    other.allocate(50 * MIB)
    assert (other.reserved_bytes, other.allocated_bytes, other.retries) == (50 * MIB, 50 * MIB, 1)


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB, stream=1))
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(20 * MIB, stream=1)
    assert allocator.reserved_bytes == 40 * MIB


def test_an_expandable_segment_grows_by_pages() -> None:
    allocator = ExpandableAllocator()
    for request, reserved in [(512, 2), (MIB + 1, 22), (10 * MIB, 22), (40 * MIB, 62), (2 * MIB, 62)]:
        allocator.allocate(request)
        assert allocator.reserved_bytes == reserved * MIB, request
    # 22 MiB lie free at the end: 20 - (1 + 10) of the first large page, and so on, and nothing is lost to rounding.
    assert allocator.allocated_bytes == 512 + (MIB + 512) + 10 * MIB + 40 * MIB + 2 * MIB


def test_an_expandable_segment_merges_what_segments_would_keep_apart() -> None:
    plain, expandable = CachingAllocator(), ExpandableAllocator()
    for allocator in (plain, expandable):
        for block in [allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)]:
            allocator.free(block)
        allocator.allocate(80 * MIB)
    assert (plain.reserved_bytes, expandable.reserved_bytes) == (160 * MIB, 80 * MIB)


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = ExpandableAllocator()
    hole, _, end = (allocator.allocate(n * MIB) for n in (30, 2, 8))
    allocator.free(end)
    allocator.free(hole)
    # 8 MiB at the end would be the best fit, but it could grow.
    assert allocator.allocate(6 * MIB).address == hole.address


@pytest.mark.parametrize("make", [CachingAllocator, ExpandableAllocator])
@given(st.lists(st.tuples(st.integers(1, 30 * MIB), st.integers(0, 9)), max_size=60))
def test_bytes_are_neither_lost_nor_made(make: type[CachingAllocator], steps: list[tuple[int, int]]) -> None:
    allocator = make()
    held = []
    for nbytes, drop in steps:
        held.append((nbytes, allocator.allocate(nbytes)))
        if drop < 5 and held:
            allocator.free(held.pop(drop % len(held))[1])
        blocks = sorted((b.address, b.nbytes) for _, b in held)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(blocks))
        assert allocator.allocated_bytes == sum(n for _, n in blocks)
        most = MIB if make is CachingAllocator else 0  # that is not split off
        assert all(nbytes <= b.nbytes <= nbytes + most + 511 for nbytes, b in held)
        free = sum(n for pool in allocator._free.values() for n, _ in pool)
        assert allocator.allocated_bytes + free == allocator.reserved_bytes
    for _, block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0
