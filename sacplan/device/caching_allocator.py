"""The CUDA caching allocator, simulated: the address of each block, and the bytes that are reserved.

The algorithm of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings (no ``max_split_size_mb``, no rounding
to powers of two, no garbage collection):

1. ``round_size``: a request is rounded up to a multiple of 512 bytes. Up to 1 MiB it is *small*, else *large*. Each
   kind has its own pool of free blocks, and so has each stream.
2. ``get_free_block``: best fit, that is the smallest free block of the pool that is large enough, and among equals the
   one at the lowest address.
3. ``get_allocation_size``: if there is none, a new segment is reserved: 2 MiB for a small request, 20 MiB for a large
   one under 10 MiB, else the request rounded up to 2 MiB.
4. ``should_split``: the remainder of the block is split off if it is of use: 512 bytes or more in a small segment,
   more than 1 MiB in a large one. A remainder that stays counts as allocated, so ``max_memory_allocated`` can lie
   above the sum of the tensors.
5. ``free_block``: a freed block merges with free neighbours of its segment. Segments stay reserved.
6. ``release_cached_blocks``: where memory runs out, segments that are free as a whole go back to the driver, and the
   request is tried once more.

With ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` (:class:`ExpandableAllocator`) a pool has one segment that
grows at its end:

3. ``try_allocate_expandable_block``: if no block fits, memory is mapped after the last one, in pages of 2 MiB (small)
   or 20 MiB (large). If the last block is free, it becomes part of the new one.
2. ``get_free_block``: the last block counts as large as it could grow, so any other block that fits is taken first.
4. ``should_split``: a remainder of 512 bytes or more is split off in both pools.

Invariant: the blocks of a segment cover it without gaps, and no two neighbours are both free.

Memory ends where ``capacity`` says, and only with the default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

MIB = 2**20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB

PoolKey: TypeAlias = tuple[int, bool]
"""A stream, and whether the pool is the one of small blocks."""

_APART = 1 << 50  # addresses of expandable segments lie this far apart


class Block:
    """A part of a segment, between its neighbours."""

    __slots__ = ("address", "after", "before", "free", "nbytes", "pool")

    def __init__(self, address: int, nbytes: int, pool: PoolKey) -> None:
        self.address = address
        self.nbytes = nbytes
        self.pool = pool
        self.free = False
        self.before: Block | None = None
        self.after: Block | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that is reserved by one request to the driver, and stays reserved.

    Attributes:
        address, nbytes: its place and size.
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


class OutOfDeviceMemory(Exception):
    """A request does not fit the device, even after all cached segments have gone back to the driver.

    Attributes:
        needs: bytes that would have to be reserved in all.
    """

    def __init__(self, needs: int) -> None:
        super().__init__(needs)
        self.needs = needs


class CachingAllocator:
    """The allocator's state: segments, free blocks by pool, and the bytes allocated and reserved.

    Args:
        capacity: bytes that can be reserved; None: as many as are asked for.

    Attributes:
        retries: how often cached segments went back to the driver because memory ran out.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.segments: list[Segment] = []
        self.allocated_bytes = self.reserved_bytes = self.retries = 0
        self._capacity = capacity
        self._end = 0  # the address after the last segment
        self.peak_allocated_bytes = 0
        self._free: defaultdict[PoolKey, list[tuple[int, int]]] = defaultdict(
            list
        )  # (bytes, address), sorted
        self._at: dict[int, Block] = {}

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block of at least ``nbytes``."""
        nbytes = max(MIN_BLOCK_BYTES, -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        # As in torch, the pool is chosen by the rounded request.
        pool = stream, nbytes <= SMALL_BYTES
        block = self._best_fit(nbytes, pool) or self._new_block(nbytes, pool)
        if block.nbytes - nbytes >= self._min_rest(pool):
            self._split(block, nbytes)
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it merges with free neighbours."""
        self.allocated_bytes -= block.nbytes
        # Neighbours are unlisted before their size changes: the free list is sorted by size. The block first becomes
        # part of a free one before it, and then takes in a free one after it.
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

    def _best_fit(self, nbytes: int, pool: PoolKey) -> Block | None:
        blocks = self._free[pool]
        at = self._choose(blocks, bisect_left(blocks, (nbytes, -1)))  # addresses start at 0
        if at == len(blocks):
            return None
        block = self._at.pop(blocks.pop(at)[1])
        block.free = False
        return block

    def _choose(self, blocks: list[tuple[int, int]], at: int) -> int:
        """Return the index in ``blocks`` of the one to take; ``at`` is the index of the first that is large enough."""
        return at

    def _min_rest(self, pool: PoolKey) -> int:
        """Return the fewest bytes of a remainder that is split off."""
        return MIN_BLOCK_BYTES if pool[1] else SMALL_BYTES + 1

    def _new_block(self, nbytes: int, pool: PoolKey) -> Block:
        """Reserve a segment, and return it as one block."""
        if pool[1]:
            size = SMALL_SEGMENT_BYTES
        elif nbytes < MIN_OWN_SEGMENT_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = -(-nbytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        if self._capacity is not None and self.reserved_bytes + size > self._capacity:
            self.retries += 1
            self.empty_cache()
            if self.reserved_bytes + size > self._capacity:
                raise OutOfDeviceMemory(self.reserved_bytes + size)
        address = self._end  # segments lie side by side, but their blocks never merge
        self._end += size
        self.reserved_bytes += size
        block = Block(address, size, pool)
        self.segments.append(Segment(address, size, block))
        return block

    def empty_cache(self) -> None:
        """Give back the segments without a block in use, as ``torch.cuda.empty_cache()`` does."""
        free = [segment for segment in self.segments if segment.first.free and segment.first.after is None]
        for segment in free:
            self._forget(segment.first)
            self.segments.remove(segment)
            self.reserved_bytes -= segment.nbytes

    def _split(self, block: Block, nbytes: int) -> None:
        rest = Block(block.address + nbytes, block.nbytes - nbytes, block.pool)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.nbytes = rest, nbytes
        self._remember(rest)

    def _remember(self, block: Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.pool], (block.nbytes, block.address))

    def _forget(self, block: Block) -> None:
        pool = self._free[block.pool]
        del pool[bisect_left(pool, (block.nbytes, block.address))]
        del self._at[block.address]


class ExpandableAllocator(CachingAllocator):
    """The allocator with expandable segments. ``segments`` stays empty: there is one for each pool, and it grows."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[PoolKey, Block] = {}  # by pool, the block at the end of its segment

    def _choose(self, blocks: list[tuple[int, int]], at: int) -> int:
        # The last block of the segment could grow, so it counts as larger than the others: the next one fits best.
        if at < len(blocks) - 1 and self._at[blocks[at][1]].after is None:
            return at + 1
        return at

    def _min_rest(self, pool: PoolKey) -> int:
        return MIN_BLOCK_BYTES

    def _new_block(self, nbytes: int, pool: PoolKey) -> Block:
        page = SMALL_SEGMENT_BYTES if pool[1] else LARGE_SEGMENT_BYTES
        last = self._last.get(pool)
        if last is not None and last.free:
            self._forget(last)
            last.free = False
            block, missing = last, nbytes - last.nbytes
        else:
            address = len(self._last) * _APART if last is None else last.address + last.nbytes
            block, missing = Block(address, 0, pool), nbytes
            block.before = last
            if last is not None:
                last.after = block
        mapped = -(-missing // page) * page
        block.nbytes += mapped
        self.reserved_bytes += mapped
        self._last[pool] = block
        return block

    def _remember(self, block: Block) -> None:
        super()._remember(block)
        # It has just taken in the last block of the segment, or has been split off it.
        if block.after is None:
            self._last[block.pool] = block


class NoAllocator(CachingAllocator):
    """A device without a caching allocator, such as a CPU: it gives what is asked for, and keeps nothing."""

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Return a block of exactly ``nbytes``."""
        self.allocated_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return Block(0, nbytes, (stream, False))

    def free(self, block: Block) -> None:
        """Give a block back."""
        self.allocated_bytes -= block.nbytes
