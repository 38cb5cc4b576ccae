"""Measure a real step: peak bytes, wall time, FLOPs.

On a CPU the peak is that of the allocator: the memory events of ``torch.profiler``, added to the storages that were
alive before. On CUDA it is ``torch.cuda.max_memory_allocated``.

A step may replace tensors that were alive before: a recurrent state, a buffer, an entry of a cache. The profiler does
not see that these are freed, so each storage is watched by a weak reference. If the caller holds the old tensors to
restore them later, the first step cannot free them. Then a second step is measured, which replaces what the first left.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from sacplan.record.alive import AliveStorages
from sacplan.record.state import kept_by
from sacplan.record.step import Step, cached_tensors
from sacplan.torch_compat.allocations import allocation_events
from sacplan.torch_compat.flops import flop_counter
from sacplan.torch_compat.host_memory import device_of
from sacplan.torch_compat.private import storage_key, strided_parts

CUDA_ROUND_BYTES = 512


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured step.

    Attributes:
        peak_bytes, wall_ms: 0 if FLOPs were counted.
        flops: 0 unless FLOPs were counted.
        source: where the peak, or the count of FLOPs, comes from.
        read: storages that the step read, did not make, and left alive; empty unless FLOPs were counted. Apart from the
            model and the batch, these are tensors in the closure of the loss function, or global ones.
        requested_bytes: on CUDA the peak as the sum of tensors; blocks may be larger. None elsewhere.
    """

    peak_bytes: int
    wall_ms: float
    flops: int
    source: str
    read: tuple[torch.UntypedStorage, ...] = ()
    requested_bytes: int | None = None


def measured_step(
    step: Step,
    batch_tensors: Iterable[torch.Tensor],
    *,
    count_flops: bool = False,
    read: Iterable[torch.UntypedStorage] = (),
) -> Measured:
    """Run a step and return what was measured: either its peak and wall time, or its FLOPs.

    FLOPs are counted under a dispatch mode, which takes memory of its own, so the peak is not measured at the same
    time. With an optimizer, other steps run first, to create its state and find its largest step. With accumulation, a
    micro-step runs first, to whose gradients the measured step adds. The caller restores the model's state; gradients
    are gone after the call. ``read``: further storages that are alive, see ``Measured.read``. A step that replaces
    tensors that are held elsewhere runs again, and the second run is measured.
    """
    batch_tensors, read = tuple(batch_tensors), tuple(read)
    _begin(step)
    device = device_of(step.model)

    # Keys alone: whoever holds a storage keeps the step from freeing it, and the peak would be too high.
    def alive() -> set[int]:
        return set(_alive(step, batch_tensors, read))

    if count_flops:
        own = alive()
        with flop_counter() as counter, AliveStorages() as reads:
            step.run()
        _clear(step)
        # What the step read and neither made nor found in the model, the optimizer or the batch.
        from_elsewhere = tuple(s for s in reads.not_made if storage_key(s) not in own)
        return Measured(0, 0.0, counter.get_total_flops(), "FlopCounterMode", from_elsewhere)

    def measured() -> Measured:
        if device.type == "cuda":
            seen = _run_cuda(step, batch_tensors, device, read)
        else:
            seen = _run_cpu(step, batch_tensors, read)
        _clear(step)
        return seen

    # If the step replaced a storage which is nevertheless still there, somebody else holds it
    # (``preserved_state``, to restore it). The old and the new one were alive together, which does not happen
    # in training, so the figure is too high. In the second run the step replaces its own storage, which
    # nobody else holds.
    before = {key: weakref.ref(s) for key, s in _alive(step, batch_tensors, read).items()}
    seen = measured()
    replaced = before.keys() - alive()
    if any(before[key]() is not None for key in replaced):
        _begin(step)
        seen = measured()
    return seen


def _clear(step: Step) -> None:
    for p in step.model.parameters():
        p.grad = None
    step.forget_gradients_of_batch()


def _begin(step: Step) -> None:
    """Make what is there when the step begins: the state of optimizers, and gradients to which the step adds."""
    _clear(step)
    # The first step with an optimizer allocates its state. The measured step is a later one, and the largest of these.
    if step.optimizers:
        step.make_state()
        _clear(step)
    if step.accumulates:
        step.accumulate()


def _run_cuda(
    step: Step,
    batch_tensors: Iterable[torch.Tensor],
    device: torch.device,
    read: Iterable[torch.UntypedStorage],
) -> Measured:
    own_blocks = bytes_alive(step, batch_tensors, read, round_bytes=CUDA_ROUND_BYTES)
    own_tensors = bytes_alive(step, batch_tensors, read)
    torch.cuda.synchronize(device)
    drop_cublas_workspaces()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    requested_before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    began = time.perf_counter()
    step.run()
    torch.cuda.synchronize(device)
    wall_ms = (time.perf_counter() - began) * 1e3
    # Other tensors may be on the device, such as copies of the model's state. They are in both counts and cancel.
    peak = torch.cuda.max_memory_allocated(device) - before + own_blocks
    requested = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - requested_before + own_tensors
    return Measured(peak, wall_ms, 0, "torch.cuda.max_memory_allocated", requested_bytes=requested)


def drop_cublas_workspaces() -> None:
    """Free cuBLAS workspaces, which stay allocated once they are, so that the step allocates and counts its own."""
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if drop is not None:
        drop()


def _run_cpu(
    step: Step, batch_tensors: Iterable[torch.Tensor], read: Iterable[torch.UntypedStorage]
) -> Measured:
    alive = _alive(step, batch_tensors, read)
    before = sum(s.nbytes() for s in alive.values())
    freed = {f"sacplan: freed storage {key}": -s.nbytes() for key, s in alive.items()}
    # The profiler reports frees of what was allocated while it ran. For earlier storages, a weak reference leaves
    # an event when its storage is freed, so that the sum below has all changes in the order in which they came.
    watches = [
        weakref.ref(s, functools.partial(_mark, n)) for n, s in zip(freed, alive.values(), strict=True)
    ]
    # Otherwise this dict itself would keep the storages alive.
    del alive
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        began = time.perf_counter()
        step.run()
        wall_ms = (time.perf_counter() - began) * 1e3
    # Storages that are freed from here on are no part of the step.
    watches.clear()
    live = peak = 0
    for event in allocation_events(profiler, freed):  # a change in bytes, or the name of a freed storage
        live += freed[event] if isinstance(event, str) else event
        peak = max(peak, live)
    return Measured(before + peak, wall_ms, 0, "profiler's allocation events")


def _mark(name: str, _: Any) -> None:
    """Leave an event in the running profile."""
    with torch.profiler.record_function(name):
        pass


def bytes_alive(
    step: Step,
    batch_tensors: Iterable[torch.Tensor],
    read: Iterable[torch.UntypedStorage] = (),
    *,
    round_bytes: int = 1,
) -> int:
    """Return the bytes of the distinct storages of parameters, gradients, buffers, caches, optimizer state and batch.

    Those of ``read`` count too, see ``Measured.read``. Only storages on the device of the parameters count, each
    rounded up to a multiple of ``round_bytes``.
    """
    storages = _alive(step, batch_tensors, read).values()
    return sum(-(-s.nbytes() // round_bytes) * round_bytes for s in storages)


def _alive(
    step: Step, batch_tensors: Iterable[torch.Tensor], read: Iterable[torch.UntypedStorage]
) -> dict[int, torch.UntypedStorage]:
    """Return the storages of ``bytes_alive`` by key."""
    parameters = list(step.model.parameters())
    tensors = [*parameters, *step.model.buffers(), *cached_tensors(step.model), *batch_tensors]
    tensors.extend(p.grad for p in parameters if p.grad is not None)
    tensors.extend(t for optimizer in step.optimizers for t in kept_by(optimizer))
    kind = device_of(step.model).type
    # A subclass has no storage of its own worth counting; its strided inner tensors do. Keys make shared
    # storages count once.
    own = [part.untyped_storage() for t in tensors for part in strided_parts(t)]
    return {storage_key(s): s for s in (*own, *read) if s.device.type == kind}
