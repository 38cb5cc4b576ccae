"""The simulated allocator against recordings of the real one: every address, segment and ``empty_cache()``.

``tests/data/allocator_traces.npz`` has twelve snapshots of ``torch.cuda.memory._dump_snapshot`` that others published
while they trained or ran language models (CS336, assignment 2) with default settings: ``medium_*``, of 420 million
parameters, from github.com/Wedsonlin/assignment2-systems (results/medium_*_memory_snapshot.pickle, commit 87b0864), the
others, of a larger model, from github.com/kkaitlyn111/cs336-a2-systems (memory_files/memory_ctx*_.pickle, commit
c1272e1). Only numbers are kept: the segments (address, bytes, whether small) and the blocks in use (address, bytes) at
the end, and all events (0 allocation, 1 free, 2 new segment, 3 segment given back; address, bytes).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest

from sacplan.device.caching_allocator import (
    MIB,
    MIN_BLOCK_BYTES,
    SMALL_SEGMENT_BYTES,
    Block,
    CachingAllocator,
    Segment,
)

ALLOCATED, FREED, RESERVED, GIVEN_BACK = range(4)
RECORDED = np.load(Path(__file__).parents[1] / "data" / "allocator_traces.npz")
NAMES = sorted({name.partition(".")[0] for name in RECORDED})


class Replayed(CachingAllocator):
    """The allocator in the state in which a recording begins, which follows from its end and its events."""

    def __init__(self, name: str) -> None:
        super().__init__()
        segments = {at: (n, small) for at, n, small in RECORDED[f"{name}.segments"].tolist()}
        used = dict(RECORDED[f"{name}.blocks"].tolist())
        self.events = RECORDED[f"{name}.events"].tolist()
        for kind, at, n in reversed(self.events):
            if kind == ALLOCATED:
                used.pop(at)
            elif kind == FREED:
                used[at] = max(MIN_BLOCK_BYTES, -(-n // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)
            elif kind == RESERVED:
                del segments[at]
            else:
                segments[at] = n, n == SMALL_SEGMENT_BYTES
        self.blocks: dict[int, Block] = {}
        order = sorted(used)
        for at, (n, small) in sorted(segments.items()):
            inside = order[bisect_left(order, at) : bisect_left(order, at + n)]
            edges = [at]
            for block, after in pairwise([*inside, at + n]):
                edges += [block, self._end_of(block, used[block], after, small=bool(small))]
            parts = [Block(begin, end - begin, (0, bool(small))) for begin, end in pairwise([*edges, at + n])]
            parts = [part for part in parts if part.nbytes]
            for before, part in pairwise(parts):
                before.after, part.before = part, before
            for part in parts:
                if part.address in used:
                    self.blocks[part.address] = part
                    self.allocated_bytes += part.nbytes
                else:
                    self._remember(part)
            self.segments.append(Segment(at, n, parts[0]))
            self.reserved_bytes += n

    def _end_of(self, block: int, n_bytes: int, after: int, *, small: bool) -> int:
        """Return where a block ends. A rest of up to 1 MiB that was not split off belongs to it.

        A recording does not say how long the rest is, but the next block that begins there does.
        """
        end = block + n_bytes
        if small or after == end:
            return end
        begun = (at for kind, at, _ in self.events if kind == ALLOCATED and end <= at <= end + MIB)
        return after if after - end <= MIB else next(begun, end)


@pytest.mark.parametrize("name", NAMES)
def test_every_address_is_the_recorded_one(name: str) -> None:
    allocator = Replayed(name)
    reserved = None
    for kind, events in groupby(allocator.events, lambda event: event[0]):
        if kind == GIVEN_BACK:
            before = {segment.address for segment in allocator.segments}
            allocator.empty_cache()
            assert before - {segment.address for segment in allocator.segments} == {at for _, at, _ in events}
            continue
        for _, at, n in events:
            if kind == RESERVED:
                # Where a new segment lies is the driver's affair.
                allocator._end = at
                reserved = at, n
            elif kind == ALLOCATED:
                count = len(allocator.segments)
                block = allocator.blocks[at] = allocator.allocate(n)
                new = [(segment.address, segment.nbytes) for segment in allocator.segments[count:]]
                assert (block.address, new) == (at, [reserved] if reserved else [])
                reserved = None
            else:
                allocator.free(allocator.blocks.pop(at))
    ends = RECORDED[f"{name}.segments"]
    assert {(one.address, one.nbytes) for one in allocator.segments} == {
        (at, n) for at, n, _ in ends.tolist()
    }
    assert allocator.allocated_bytes == RECORDED[f"{name}.blocks"][:, 1].sum()
