"""Measure a real step: peak bytes, wall time, FLOPs.

The peak on a CPU is that of the allocator itself, from the memory events of ``torch.profiler``, added
to the storages that were alive before; on CUDA it is ``torch.cuda.max_memory_allocated``.

Private PyTorch API, tried on 2.13: the event tree of ``torch.profiler``, and the legacy profiler's
``torch.autograd._enable_profiler_legacy``, for which there is a fallback.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from sacplan._record.step import Step

CUDA_ROUND_BYTES = 512


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured step. ``flops`` is 0 unless counted."""

    peak_bytes: int
    wall_ms: float
    flops: int
    source: str


def measured_step(
    step: Step, batch_tensors: Iterable[torch.Tensor], *, count_flops: bool = False
) -> Measured:
    """Run a step and measure it. With an optimizer a first step makes its state.

    The caller restores the model's state; gradients are gone after the call. Counting FLOPs runs the step under
    a dispatch mode, so the peak is not measured then.
    """
    _clear(step)
    if step.optimizer is not None:
        step.run()
        _clear(step)
    first = next(iter(step.model.parameters()), None)
    if count_flops:
        with FlopCounterMode(display=False) as counter:
            step.run()
        _clear(step)
        return Measured(0, 0.0, counter.get_total_flops(), "FlopCounterMode")
    if first is not None and first.device.type == "cuda":
        seen = _run_cuda(step, batch_tensors, first.device)
    else:
        seen = _run_cpu(step, batch_tensors)
    _clear(step)
    return seen


def _clear(step: Step) -> None:
    for p in step.model.parameters():
        p.grad = None


def _run_cuda(step: Step, batch_tensors: Iterable[torch.Tensor], device: torch.device) -> Measured:
    own = bytes_alive(step, batch_tensors, round_bytes=CUDA_ROUND_BYTES)
    torch.cuda.synchronize(device)
    drop_cublas_workspaces()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    began = time.perf_counter()
    step.run()
    torch.cuda.synchronize(device)
    wall_ms = (time.perf_counter() - began) * 1e3
    # Others may have tensors there, such as the copies that put the model's state back afterwards.
    peak = torch.cuda.max_memory_allocated(device) - before + own
    return Measured(peak, wall_ms, 0, "torch.cuda.max_memory_allocated")


def drop_cublas_workspaces() -> None:
    """So that the step allocates its own, and they count: once allocated they stay."""
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if drop is not None:
        drop()


def _run_cpu(step: Step, batch_tensors: Iterable[torch.Tensor]) -> Measured:
    before = bytes_alive(step, batch_tensors)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        began = time.perf_counter()
        step.run()
        wall_ms = (time.perf_counter() - began) * 1e3
    live = peak = 0
    for delta in allocation_events(profiler):
        assert isinstance(delta, int)
        live += delta
        peak = max(peak, live)
    return Measured(before + peak, wall_ms, 0, "profiler's allocation events")


def allocation_events(profiler: torch.profiler.profile, marks: Collection[str] = ()) -> list[int | str]:
    """Bytes allocated (positive) and freed (negative) on the CPU, and events named in ``marks``, in their order.

    The allocator remembers the blocks of earlier profiles, including those freed while no profiler was on. When
    such an address has been reused and is freed now, it reports the old block's size. So a block only counts as
    freed if this profile saw it allocated.
    """
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
            continue
        found.append(size)
    return found


def profiler_is_on() -> bool:
    """Whether a profiler runs in this thread; there can only be one."""
    return torch._C._autograd._profiler_enabled()


def allocation_deltas(run: Callable[[], object]) -> list[int]:
    """Bytes that ``run`` allocates (positive) and frees (negative) on the CPU, in order; for short runs.

    The legacy profiler costs some 30 microseconds, while ``torch.profiler`` takes milliseconds and writes to
    stderr. It is deprecated; if it is missing, ``torch.profiler`` is used. Its events have no addresses, so
    ``run`` should free what it allocates, or a later run may see a block of an earlier one being freed.
    """
    api: Any = torch.autograd
    if not hasattr(api, "_enable_profiler_legacy"):
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
        return [delta for delta in allocation_events(profiler) if isinstance(delta, int)]
    config = api.ProfilerConfig(
        api.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    api._enable_profiler_legacy(config)
    try:
        run()
    finally:
        records = api._disable_profiler_legacy()
    return [e.cpu_memory_usage() for thread in records for e in thread if e.kind() == "memory_alloc"]


def bytes_alive(step: Step, batch_tensors: Iterable[torch.Tensor], *, round_bytes: int = 1) -> int:
    """Bytes of the distinct storages of parameters, their gradients, buffers, optimizer state and batch.

    Only those on the device of the parameters, each a multiple of ``round_bytes``.
    """
    parameters = list(step.model.parameters())
    tensors = [*parameters, *step.model.buffers(), *batch_tensors]
    tensors.extend(p.grad for p in parameters if p.grad is not None)
    if step.optimizer is not None:
        for state in step.optimizer.state.values():
            tensors.extend(v for v in state.values() if isinstance(v, torch.Tensor))
    kind = parameters[0].device.type if parameters else "cpu"
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type == kind
    }
    return sum(-(-nbytes // round_bytes) * round_bytes for nbytes in storages.values())
