"""Real steps: run on the model's own tensors, measured by the profiler, and compared bit by bit."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import sacplan
from sacplan.record.state import preserved_state
from sacplan.record.step import Step, default_loss, make_optimizer
from sacplan.running.measure import measured_step
from sacplan.torch_compat.allocations import allocation_deltas

LossFn = Callable[[torch.nn.Module, Any], torch.Tensor]


def seed_everything(seed: int) -> None:
    """Seed torch's generator and numpy's: some models draw their masks with numpy."""
    torch.manual_seed(seed)
    np.random.seed(seed)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a batch or in an output, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def on_one_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch have one thread while the function runs."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return run


@dataclass(frozen=True, slots=True)
class RealStep:
    """One step that was computed.

    Attributes:
        peak_bytes: from the profiler's allocation events.
        wall_ms: of the step, under the profiler.
        values: loss, gradients (None where a parameter has none), buffers.
    """

    peak_bytes: int
    wall_ms: float
    values: tuple[torch.Tensor | None, ...]

    def same_bits(self, other: RealStep) -> bool:
        """Whether the values are the same bits; not-a-number counts as equal to itself."""
        return len(self.values) == len(other.values) and all(
            a is b is None or (a is not None and b is not None and same_bits(a, b))
            for a, b in zip(self.values, other.values, strict=True)
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same type and values; not-a-number counts as equal to itself."""
    return (
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedStep(Step):
    """A step that keeps its gradients: ``measured_step`` clears those of the parameters when it is over."""

    seed: int
    gradients: list[torch.Tensor | None]

    def run(self, *args: Any, **kwargs: Any) -> None:
        seed_everything(self.seed)
        Step.run(self, *args, **kwargs)
        self.gradients[:] = [p.grad for p in self.model.parameters()]


def real_step(
    model: torch.nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    optimizer: Any = None,
    plan: sacplan.Plan | None = None,
    before: Sequence[Any] = (),
    seed: int = 7,
) -> RealStep:
    """Compute one step on the model's own tensors, with a plan or without, and put the model back.

    Compare values on one thread only. With more, a CPU adds up the gradients of an index in an order that changes from
    run to run, plan or not.

    Args:
        model, batch, loss_fn, optimizer, plan: as for ``sacplan.verify``.
        before: batches of steps that run before the measured one, with the same plan.
        seed: what the generators start from.
    """
    losses: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] = []

    def watched_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = (loss_fn or default_loss)(model, batch)
        losses[:] = [loss.detach()]
        return loss

    made = make_optimizer(optimizer, model) if optimizer is not None else None
    gc.collect()  # what earlier steps left behind would go during this one, and lower its peak
    with preserved_state(model, made), contextlib.ExitStack() as stack:
        if plan is not None:
            stack.enter_context(sacplan.apply(model, plan))
        for earlier in before:
            _WatchedStep(model, earlier, watched_loss, made, seed=seed, gradients=gradients).run()
            # As in a training loop: the next step starts without gradients.
            gradients.clear()
            model.zero_grad(set_to_none=True)
        step = _WatchedStep(model, batch, watched_loss, made, seed=seed, gradients=gradients)
        seen = measured_step(step, tensors_of(batch))
        buffers = [b.detach().clone() for b in model.buffers()]
    return RealStep(seen.peak_bytes, seen.wall_ms, (*losses, *gradients, *buffers))


def run_peaks(
    model: torch.nn.Module,
    batches: Iterator[Any],
    steps: int,
    optimizer: Any,
    loss_fn: LossFn | None = None,
    plans: Sequence[sacplan.Plan] = (),
    accumulation: int = 1,
    evaluations: tuple[int, Sequence[Callable[[], Any]]] = (1, ()),
) -> list[int]:
    """Train for real on the CPU, from the first step on, as most loops do it; return the peak of each step.

    A batch is made while that of the step before is there, and held with its loss until the next ones are.

    Args:
        model, batches, steps, optimizer, loss_fn, plans: What runs, for how many batches.
        accumulation: Batches to a step of the optimizer, which steps after the last one, too.
        evaluations: Steps of the optimizer from one evaluation to the next, and what makes each of its batches. An
            evaluation counts as one step.
    """
    gc.collect()
    live = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))
    made, held, peaks = optimizer(model.parameters()), [None, None], []

    def step(first: bool, last: bool) -> None:
        held[0] = next(batches)
        if first:
            made.zero_grad()
        loss = held[1] = (loss_fn or default_loss)(model, held[0])
        loss.backward()
        if last:
            made.step()

    @torch.no_grad()
    def evaluate() -> None:
        model.eval()
        for make in evaluations[1]:
            batch = make()
            _loss = (loss_fn or default_loss)(model, batch)
        model.train()

    with sacplan.apply(model, plans) if plans else contextlib.nullcontext():
        for i in range(1, steps + 1):
            last = i % accumulation == 0 or i == steps
            run = [functools.partial(step, i % accumulation == 1 % accumulation, last)]
            if last and evaluations[1] and -(-i // accumulation) % evaluations[0] == 0:
                run.append(evaluate)
            for each in run:
                # The profiler is on whenever memory is allocated or freed, so it knows the size of each block.
                changes = allocation_deltas(each)
                peaks.append(max(itertools.accumulate(changes, initial=live)))
                live += sum(changes)
    return peaks
