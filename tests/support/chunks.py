"""What the tests of chunked steps share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from msgspec import structs
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from sacplan.core.decisions import Chunk
from sacplan.techniques.chunk.entries import loss_chunks
from sacplan.techniques.chunk.executor.forward import ChunkedForward
from sacplan.techniques.chunk.executor.install import InstalledChunks
from sacplan.torch_compat.allocations import allocation_events

VOCAB = 517


def loss_in_slices(profile: sacplan.Profile, slices: int) -> sacplan.Plan:
    """The plan that only runs the loss in slices, from the module on with which that saves most."""
    step = profile.uncompiled
    chunk = loss_chunks(step.program, step.spec).chunks[0]
    return plan_with(profile, [structs.replace(chunk, slices=slices)])


@contextmanager
def chunked(
    model: nn.Module, unit: str = "head", slices: int = 8, **how: object
) -> Iterator[InstalledChunks]:
    decision = Chunk(unit, how.pop("span", "rest"), slices, how.pop("dim", 1), **how)  # type: ignore[arg-type]
    installed = InstalledChunks(model, [decision])
    try:
        yield installed
    finally:
        installed.check_removable()
        installed.remove()


def step(model: nn.Module, batch: object, loss_fn: Callable[..., torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = loss_fn(model, batch)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert all(type(g) is torch.Tensor for g in found.values())
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach() + 0, **found}


def close(
    got: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    near: tuple[str, ...] = (),
    rtol: float = 1e-6,
) -> None:
    """All bits are equal, but those of the loss and of what is near."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name == "loss":
            assert (got[name] - value).abs() <= 2e-6 * value.abs()
        elif name.startswith(near):
            assert (got[name] - value).norm() <= rtol * value.norm(), name
        else:
            assert torch.equal(got[name], value), name


def loops_of(model: nn.Module, unit: str = "head") -> int:
    forward = model.get_submodule(unit).forward
    assert isinstance(forward, ChunkedForward)
    assert not forward.differences.by_unit
    return forward.tally.loops


def allocations(run: Callable[[], object]) -> tuple[list[int], int]:
    """What is allocated, and the peak over what was alive before, in bytes."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        run()
    deltas = [int(delta) for delta in allocation_events(profiler)]
    live = peak = 0
    for delta in deltas:
        live += delta
        peak = max(peak, live)
    return [delta for delta in deltas if delta > 0], peak
