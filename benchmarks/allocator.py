"""The CUDA caching allocator, played through on a recording: what a step reserves, and what really counts.

A block is at least 512 bytes and comes out of a segment: 2 MiB for requests up to 1 MiB, 20 MiB for those under
10 MiB, else the request rounded up to 2 MiB. The smallest free block that fits is taken (small and large ones
apart), and split if what is left is of use: any multiple of 512 in a small segment, more than 1 MiB in a
large one. What is not split off counts as allocated, so ``max_memory_allocated`` lies above the sum of the
tensors; freed neighbours merge; segments stay reserved.

``Profile.peak_bytes`` is the sum of tensors, each rounded to 512 bytes. The difference is fragmentation.

Rules: ``c10/cuda/CUDACachingAllocator.cpp``, with its default settings (no expandable segments, no
``max_split_size_mb``), one stream. Not compared with a GPU by us; ``benchmarks/gpu.py`` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from sacplan._program.program import Event, Program

MIB = 2**20
MIN_BLOCK_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_OWN_SEGMENT_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """What the allocator's statistics would say after a step."""

    allocated_bytes: int
    """``torch.cuda.max_memory_allocated()``."""
    reserved_bytes: int
    """``torch.cuda.max_memory_reserved()``."""


class _Block:
    """A part of a segment, between its neighbours."""

    __slots__ = ("address", "after", "before", "free", "nbytes", "small")

    def __init__(self, address: int, nbytes: int, small: bool) -> None:
        self.address = address
        self.nbytes = nbytes
        self.small = small
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """Blocks in and out; ``allocated_bytes`` and ``reserved_bytes`` now, and the most there was."""

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (bytes, address), sorted
        self._at: dict[int, _Block] = {}

    def allocate(self, nbytes: int) -> _Block:
        """A block of at least ``nbytes``."""
        nbytes = max(MIN_BLOCK_BYTES, -(-nbytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
        small = nbytes <= SMALL_BYTES
        block = self._best_fit(nbytes, small) or self._new_segment(nbytes, small)
        rest = block.nbytes - nbytes
        if rest >= MIN_BLOCK_BYTES if small else rest > SMALL_BYTES:
            self._split(block, nbytes)
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back; it merges with free neighbours."""
        self.allocated_bytes -= block.nbytes
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

    def _best_fit(self, nbytes: int, small: bool) -> _Block | None:
        pool = self._free[small]
        at = bisect_left(pool, (nbytes, -1))
        if at == len(pool):
            return None
        block = self._at.pop(pool.pop(at)[1])
        block.free = False
        return block

    def _new_segment(self, nbytes: int, small: bool) -> _Block:
        if small:
            size = SMALL_SEGMENT_BYTES
        elif nbytes < MIN_OWN_SEGMENT_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = -(-nbytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        address = self.reserved_bytes  # segments lie one after the other; blocks of two never merge
        self.reserved_bytes += size
        return _Block(address, size, small)

    def _split(self, block: _Block, nbytes: int) -> None:
        rest = _Block(block.address + nbytes, block.nbytes - nbytes, block.small)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.nbytes = rest, nbytes
        self._remember(rest)

    def _remember(self, block: _Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.small], (block.nbytes, block.address))

    def _forget(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.nbytes, block.address))]
        del self._at[block.address]


def allocator_peaks(program: Program) -> AllocatorPeaks:
    """Play a recorded step, without a plan, on an empty allocator: first what was there before it, then the step.

    An op's workspace counts as one block that is there together with its outputs.
    """
    allocator = CachingAllocator()
    holders = [0] * len(program.storage_bytes)
    blocks: dict[int, _Block] = {}

    def hold(storage: int) -> None:
        holders[storage] += 1
        if holders[storage] == 1 and program.storage_bytes[storage]:
            blocks[storage] = allocator.allocate(program.storage_bytes[storage])

    def release(storage: int) -> None:
        holders[storage] -= 1
        if holders[storage] == 0 and storage in blocks:
            allocator.free(blocks.pop(storage))

    for storage in program.initial:
        hold(storage)
    handles, instances = program.handle_storages, program.instance_handles
    for code, arg in program.events:
        if code == Event.OP:
            op = program.ops[arg]
            for storage in op.writes:
                hold(storage)
            if op.workspace_bytes:
                allocator.free(allocator.allocate(op.workspace_bytes))
        elif code == Event.ALLOC:
            hold(arg)
        elif code == Event.FREE:
            release(arg)
        elif code == Event.PACK:
            hold(handles[arg])
        elif code == Event.RELEASE:
            release(handles[arg])
        elif code == Event.UNPACK:
            hold(handles[instances[arg]])
        elif code == Event.DROP:
            release(handles[instances[arg]])
    return AllocatorPeaks(allocator.peak_allocated_bytes, allocator.reserved_bytes)
