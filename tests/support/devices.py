"""GPUs of any size."""

from __future__ import annotations

from dataclasses import replace

from sacplan.device.devices import resolve_device
from sacplan.device.outside_allocator import outside_allocator


def left_of(memory_bytes: int, communicators: int = 0) -> int:
    """What the allocator of a GPU with this memory may reserve."""
    spec = replace(resolve_device("h100"), memory_bytes=memory_bytes)
    return memory_bytes - sum(one.n_bytes for one in outside_allocator(spec, communicators))


def memory_with_room(room_bytes: int, communicators: int = 0) -> int:
    """The memory of a GPU whose allocator may reserve exactly so much."""
    memory = room_bytes
    while missing := room_bytes - left_of(memory, communicators):
        memory += missing
    return memory
