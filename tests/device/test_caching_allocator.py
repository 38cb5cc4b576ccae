"""The caching allocator's rules by hand, its invariants by random use, and whole steps."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from torch import nn, randn

import sacplan
from benchmarks.allocator import allocator_peaks
from sacplan._device.caching_allocator import MIB, CachingAllocator

KIB = 2**10


def test_segments() -> None:
    for request, segment, counted in [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),  # what is left is over 1 MiB: split
        (11 * MIB, 12 * MIB, 12 * MIB),  # what is left is 1 MiB: not split, and counts
        (19 * MIB + 1, 20 * MIB, 20 * MIB),
    ]:
        allocator = CachingAllocator()
        block = allocator.allocate(request)
        assert (allocator.reserved_bytes, allocator.allocated_bytes) == (segment, counted), request
        allocator.free(block)
        assert (allocator.reserved_bytes, allocator.allocated_bytes) == (segment, 0)
        assert allocator.peak_allocated_bytes == counted


def test_the_smallest_block_that_fits_is_taken_and_neighbours_merge() -> None:
    allocator = CachingAllocator()
    large = allocator.allocate(40 * MIB)
    medium = allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(medium)
    again = allocator.allocate(24 * MIB)  # out of the 30, of which 6 are left
    assert allocator.reserved_bytes == 70 * MIB
    rest = allocator.allocate(6 * MIB)
    assert allocator.reserved_bytes == 70 * MIB
    allocator.free(again)
    allocator.free(rest)
    allocator.allocate(30 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 70 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 90 * MIB


def test_small_and_large_blocks_do_not_mix() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(512 * KIB)
    assert allocator.reserved_bytes == 22 * MIB


@given(st.lists(st.tuples(st.integers(1, 30 * MIB), st.integers(0, 9)), max_size=60))
def test_bytes_are_neither_lost_nor_made(steps: list[tuple[int, int]]) -> None:
    allocator = CachingAllocator()
    held = []
    for nbytes, drop in steps:
        held.append((nbytes, allocator.allocate(nbytes)))
        if drop < 5 and held:
            allocator.free(held.pop(drop % len(held))[1])
        blocks = sorted((b.address, b.nbytes) for _, b in held)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(blocks))
        assert allocator.allocated_bytes == sum(n for _, n in blocks)
        assert all(nbytes <= b.nbytes <= nbytes + MIB + 511 for nbytes, b in held)
        free = sum(n for pool in allocator._free.values() for n, _ in pool)
        assert allocator.allocated_bytes + free == allocator.reserved_bytes
    for _, block in held:
        allocator.free(block)
    assert allocator.allocated_bytes == 0


def test_a_step() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))
    profile = sacplan.profile(model, randn(1024, 512), device="h100")
    peaks = allocator_peaks(profile.program)
    # Everything is a multiple of 512 bytes, and of 1 MiB or far under it: nothing is left over.
    assert peaks.allocated_bytes == profile.peak_bytes
    assert profile.peak_bytes <= peaks.reserved_bytes < profile.peak_bytes + 24 * MIB
    odd = sacplan.profile(model, randn(5800, 512), device="h100")
    peaks = allocator_peaks(odd.program)
    assert odd.peak_bytes < peaks.allocated_bytes <= peaks.reserved_bytes
