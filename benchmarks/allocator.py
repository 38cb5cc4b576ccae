"""What a recorded step would reserve on a GPU: the CUDA caching allocator, played through on the recording.

``Profile.peak_bytes`` is the sum of tensors, each rounded to 512 bytes. The difference to what is reserved is
fragmentation.

The allocator's rules are in ``sacplan/_device/caching_allocator.py``. They have not been compared with a GPU by us;
``benchmarks/gpu.py`` does that.
"""

from __future__ import annotations

from dataclasses import dataclass

from sacplan._device.caching_allocator import Block, CachingAllocator
from sacplan._program.program import Event, Program


@dataclass(frozen=True, slots=True)
class AllocatorPeaks:
    """The allocator's statistics after a step."""

    allocated_bytes: int
    """``torch.cuda.max_memory_allocated()``."""
    reserved_bytes: int
    """``torch.cuda.max_memory_reserved()``."""


def allocator_peaks(program: Program) -> AllocatorPeaks:
    """Play a recorded step, without a plan, on an empty allocator: first what was there before it, then the step.

    An op's workspace counts as one block that is there together with its outputs.
    """
    allocator = CachingAllocator()
    holders = [0] * len(program.storage_bytes)
    blocks: dict[int, Block] = {}

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
