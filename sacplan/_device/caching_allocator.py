"""The CUDA caching allocator, simulated: the address of each block, and the bytes that are reserved.

The algorithm of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings (no expandable segments, no
``max_split_size_mb``) and one stream:

1. ``round_size``: a request is rounded up to a multiple of 512 bytes. Up to 1 MiB it is *small*, else *large*; each
   kind has its own pool of free blocks.
2. ``get_free_block``: best fit, that is the smallest free block of the pool that is large enough, and among equals the
   one at the lowest address.
3. ``get_allocation_size``: if there is none, a new segment is reserved: 2 MiB for a small request, 20 MiB for a large
   one under 10 MiB, else the request rounded up to 2 MiB.
4. ``should_split``: the remainder of the block is split off if it is of use: 512 bytes or more in a small segment,
   more than 1 MiB in a large one. A remainder that stays counts as allocated, so ``max_memory_allocated`` can lie
   above the sum of the tensors.
5. ``free_block``: a freed block merges with free neighbours of its segment. Segments stay reserved.

Invariant: the blocks of a segment cover it without gaps, and no two neighbours are both free.

PyTorch returns cached segments to the driver and tries again where an allocation fails. That is not simulated: here
memory has no end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

MIB = 2**20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB


class Block:
    """A part of a segment, between its neighbours."""

    __slots__ = ("address", "after", "before", "free", "nbytes", "small")

    def __init__(self, address: int, nbytes: int, small: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.small = small
        self.free = False
        self.before: Block | None = None
        self.after: Block | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that is reserved at once, and stays reserved.

    Attributes:
        address, nbytes: where.
        first: the first of its blocks.
    """

    address: int
    nbytes: int
    first: Block

    def __iter__(self) -> Iterator[Block]:
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.after


class CachingAllocator:
    """The allocator's state: segments, free blocks by pool, and the bytes allocated and reserved."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address), sorted
        self._at: dict[int, Block] = {}

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``."""
        nbytes = max(MIN_BLOCK_BYTES, -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        # As in torch, the pool is chosen by the rounded request.
        small = nbytes <= SMALL_BYTES
        block = self._best_fit(nbytes, small) or self._new_segment(nbytes, small)
        rest = block.nbytes - nbytes
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_BYTES:
            self._split(block, nbytes)
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it merges with free neighbours."""
        self.allocated_bytes -= block.nbytes
        # Neighbours are unlisted before their size changes: the free list is sorted by size. The block takes in the one
        # before it first, and then whatever lies behind the two.
        before, after = block.before, block.after
        if before is not None and before.free:
            self._forget(before)
            before.nbytes += block.nbytes
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.free:
            self._forget(after)
            block.nbytes += after.nbytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._remember(block)

    def _best_fit(self, nbytes: int, small: bool) -> Block | None:
        pool = self._free[small]
        at = bisect_left(
            pool, (nbytes, -1)
        )  # addresses start at 0: the first block of the smallest size that fits
        if at == len(pool):
            return None
        block = self._at.pop(pool.pop(at)[1])
        block.free = False
        return block

    def _new_segment(self, nbytes: int, small: bool) -> Block:
        if small:
            size = SMALL_SEGMENT_BYTES
        elif nbytes < MIN_OWN_SEGMENT_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = -(-nbytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        address = self.reserved_bytes  # segments lie one after the other; blocks of two never merge
        self.reserved_bytes += size
        block = Block(address, size, small)
        self.segments.append(Segment(address, size, block))
        return block

    def _split(self, block: Block, nbytes: int) -> None:
        rest = Block(block.address + nbytes, block.nbytes - nbytes, block.small)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.nbytes = rest, nbytes
        self._remember(rest)

    def _remember(self, block: Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.small], (block.nbytes, block.address))

    def _forget(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.nbytes, block.address))]
        del self._at[block.address]
