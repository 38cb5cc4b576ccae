"""Measure a real step: peak bytes, wall time, FLOPs.

The peak on a CPU is that of the allocator itself, from the memory events of ``torch.profiler``, added
to the storages that were alive before; on CUDA it is ``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from sacplan._step import Step


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured step. ``flops`` is 0 unless they were counted."""

    peak_bytes: int
    wall_ms: float
    flops: int
    source: str


def measured_step(step: Step, batch_tensors: Iterable[torch.Tensor], *, count_flops: bool = False) -> Measured:
    """Run a step and measure it. With an optimizer a first step makes its state.

    The caller puts the model's state back; gradients are gone after the call. Counting FLOPs puts a
    dispatch mode over the step, so the peak of such a run is not to be quoted.
    """
    _clear(step)
    if step.optimizer is not None:
        step.run()
        _clear(step)
    first = next(iter(step.model.parameters()), None)
    on_cuda = first is not None and first.device.type == "cuda"
    if count_flops:
        with FlopCounterMode(display=False) as counter:
            step.run()
        _clear(step)
        return Measured(0, 0.0, counter.get_total_flops(), "FlopCounterMode")
    seen = _run_cuda(step) if on_cuda else _run_cpu(step, batch_tensors)
    _clear(step)
    return seen


def _clear(step: Step) -> None:
    for p in step.model.parameters():
        p.grad = None


def _run_cuda(step: Step) -> Measured:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step.run()
    torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - began) * 1e3
    return Measured(torch.cuda.max_memory_allocated(), wall_ms, 0, "torch.cuda.max_memory_allocated")


def _run_cpu(step: Step, batch_tensors: Iterable[torch.Tensor]) -> Measured:
    before = bytes_alive(step, batch_tensors)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        began = time.perf_counter()
        step.run()
        wall_ms = (time.perf_counter() - began) * 1e3
    live = peak = 0
    for delta in _allocation_events(profiler):
        live += delta
        peak = max(peak, live)
    return Measured(before + peak, wall_ms, 0, "profiler's allocation events")


def _allocation_events(profiler: torch.profiler.profile) -> list[int]:
    """Bytes allocated (positive) and freed (negative) on the CPU, in the order of time."""
    kineto = profiler.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    events = []
    stack = list(kineto.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(events, key=lambda e: e[0])]


def bytes_alive(step: Step, batch_tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages of parameters, buffers, optimizer state and batch."""
    tensors = [*step.model.parameters(), *step.model.buffers(), *batch_tensors]
    if step.optimizer is not None:
        for state in step.optimizer.state.values():
            tensors.extend(v for v in state.values() if isinstance(v, torch.Tensor))
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
