"""One step of a model: losses, all that it gives, and comparing that bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

import sacplan
from sacplan.torch_compat.allocations import allocation_events


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss for models without one."""
    return model(*batch if isinstance(batch, tuple) else (batch,)).square().mean()


def total(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The sum of the outputs: its gradient is a view of one number."""
    found: torch.Tensor = model(batch).sum()
    return found


def grads_of(model: nn.Module, batch: object, loss_fn, seed: int = 0) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """Loss and all gradients of one step; the model's gradients and buffers are put back."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = loss_fn(model, batch)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad(set_to_none=True)
    for b, old in buffers:
        b.copy_(old)
    return found


def bit_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two lists hold the same bits."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def peaks_of_steps(build: Any, steps: int, loss_fn: Any = mean_square) -> list[int]:
    """Return the peaks of the first steps of a training loop, by the allocator's events alone.

    ``build()`` returns a model, a batch and an optimizer. It runs under the profiler, so that all they hold is counted.
    """
    names = [f"step {i}" for i in range(steps)]
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, batch, optimizer = build()
        for name in names:
            with torch.profiler.record_function(name):
                pass
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    live, peaks = 0, []
    for event in allocation_events(profiler, names):
        if isinstance(event, str):
            peaks.append(live)
            continue
        live += event
        if peaks:
            peaks[-1] = max(peaks[-1], live)
    return peaks


def assert_predicted(
    model: nn.Module, batch: Any, plan: sacplan.Plan, loss_fn: Any = None, optimizer: Any = None
) -> None:
    """The peak is that of the fake step and of the real one, which run what was recorded."""
    for run in ("fake", "real"):
        seen = sacplan.verify(model, batch, plan, loss_fn, optimizer, run=run)  # type: ignore[arg-type]
        assert seen.peak_bytes == plan.peak_bytes, run
        assert not seen.differences


def assert_carried_out(
    model: nn.Module, batch: Any, plan: sacplan.Plan, loss_fn: Any = mean_square, steps: int = 2
) -> None:
    """The peak is that of the fake step and of the real one, and no bit of the steps is another."""
    assert_predicted(model, batch, plan, loss_fn)
    plain = grads_of(model, batch, loss_fn)
    with sacplan.apply(model, plan):
        for _ in range(steps):  # looked up, and by the schedule
            assert bit_equal(grads_of(model, batch, loss_fn), plain)
