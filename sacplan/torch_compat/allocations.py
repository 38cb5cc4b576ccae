"""Allocations and frees of code on the CPU: the allocator's events, read with a profiler.

Private PyTorch API, tried on 2.11 and 2.13: the event tree of ``torch.profiler``, and the legacy profiler's
``torch.autograd._enable_profiler_legacy``, which the public profiler replaces where it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.profiler import ProfilerActivity


def allocation_events(profiler: torch.profiler.profile, marks: Collection[str] = ()) -> list[int | str]:
    """Return bytes allocated (positive) and freed (negative) on the CPU, and events named in ``marks``, in order.

    The allocator remembers the blocks of earlier profiles, including those freed while no profiler was on. When
    such an address has been reused and is freed now, it reports the old block's size. So a block only counts as
    freed if this profile saw it allocated.
    """
    # Walk the tree in order, with a stack instead of recursion: its depth is that of the calls.
    kineto = profiler.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    events: list[tuple[int, str, int, int]] = []
    stack = list(reversed(kineto.kineto_results.experimental_event_tree()))
    while stack:
        event = stack.pop()
        stack.extend(reversed(event.children))
        fields: Any = event.extra_fields
        if event.name == "[memory]" and fields.device.type == "cpu":
            events.append((event.start_time_ns, "", fields.ptr, fields.alloc_size))
        elif event.name in marks:
            events.append((event.start_time_ns, event.name, 0, 0))
    events.sort(key=lambda e: e[0])  # stable: events of the same nanosecond stay in the order of the tree
    found: list[int | str] = []
    held: set[int] = set()
    for _, mark, ptr, size in events:
        if mark:
            found.append(mark)
            continue
        if size > 0:
            held.add(ptr)
        elif ptr in held:
            held.remove(ptr)
        else:
            # Allocated before this profile, so the size may be that of an older block.
            continue
        found.append(size)
    return found


def profiler_is_on() -> bool:
    """Whether a profiler runs in this thread; there can only be one."""
    return torch._C._autograd._profiler_enabled()


def allocation_deltas(run: Callable[[], object]) -> list[int]:
    """Return the bytes that ``run`` allocates (positive) and frees (negative) on the CPU, in order; for short runs.

    The legacy profiler costs some 30 microseconds, while ``torch.profiler`` takes milliseconds and writes to
    stderr. The legacy one is deprecated; if it is missing, ``torch.profiler`` is used. Legacy events have no addresses,
    so ``run`` should free what it allocates, or a later run may see a block of an earlier run being freed.
    """
    api: Any = torch.autograd
    if not hasattr(api, "_enable_profiler_legacy"):
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        return [delta for delta in allocation_events(profiler) if isinstance(delta, int)]
    # The flags are input shapes, memory, stacks, FLOPs and modules. Only memory is on, since the others cost time.
    config = api.ProfilerConfig(
        api.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    api._enable_profiler_legacy(config)
    try:
        run()
    finally:
        records = api._disable_profiler_legacy()
    return [e.cpu_memory_usage() for thread in records for e in thread if e.kind() == "memory_alloc"]
