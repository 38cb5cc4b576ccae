"""What the benchmarks share: command lines, results as JSON, plans where a budget may not fit, real steps."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import sacplan
from sacplan._record.state import preserved_state
from sacplan._record.step import Step, default_loss, make_optimizer
from sacplan._verify.measure import measured_step

MIB = 2**20
GIB = 2**30
RESULTS = Path(__file__).parent / "results"

LossFn = Callable[[torch.nn.Module, Any], torch.Tensor]


def machine() -> dict[str, Any]:
    """What figures depend on: the machine and the versions."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    with contextlib.suppress(ImportError):
        import transformers

        found["transformers"] = transformers.__version__
    return found


def describe(found: dict[str, Any]) -> str:
    """``machine()`` as one line."""
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
    versions = ", ".join(f"{k} {found[k]}" for k in ("torch", "transformers") if k in found)
    return f"{versions}, {found['machine']}, {found['cores']} cores, {threads}"


def parser(doc: str | None, results: str | None = None) -> argparse.ArgumentParser:
    """What every benchmark's command line begins with: the first line of its docstring, and ``--json``.

    Args:
        doc: the module's docstring.
        results: the file under ``benchmarks/results`` that figures go to by default; None: to no file.
    """
    found = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    default = RESULTS / results if results else None
    found.add_argument(
        "--json", type=Path, default=default, help="file for the figures (default: %(default)s)"
    )
    return found


def write_results(
    path: Path | None, rows: Sequence[dict[str, Any]], *, row_a_line: bool = False, **more: Any
) -> None:
    """Write rows as JSON, with the machine and the date; nothing without a path."""
    if path is None:
        return
    data = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    if row_a_line:
        head = json.dumps(data, indent=1).removesuffix("\n}")
        text = head + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n"
    else:
        text = json.dumps({**data, "rows": list(rows)}, indent=1) + "\n"
    path.write_text(text)


def in_own_process(benchmark: str, *arguments: object, timeout: float | None = None) -> Any:
    """What a benchmark prints as JSON in its last line, run in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
    """
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{benchmark}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def seed_everything(seed: int) -> None:
    """torch's generator and numpy's: some models draw their masks with numpy."""
    torch.manual_seed(seed)
    np.random.seed(seed)


def plan_or_smallest(profile: sacplan.Profile, budget: str) -> tuple[sacplan.Plan, str]:
    """The plan for a budget, or for the smallest feasible one; and which budget it is."""
    try:
        return sacplan.plan(profile, budget), budget
    except sacplan.InfeasibleBudget as error:
        return sacplan.plan(profile, f"{error.smallest_feasible_bytes}B"), "smallest"


@dataclass(frozen=True, slots=True)
class RealStep:
    """One step that was computed.

    Attributes:
        peak_bytes: from the allocator.
        wall_ms: of the step, under the profiler.
        values: loss, gradients (None where a parameter has none), buffers.
    """

    peak_bytes: int
    wall_ms: float
    values: tuple[torch.Tensor | None, ...]

    def same_bits(self, other: RealStep) -> bool:
        """Whether the values are the same bits; not-a-number counts as equal to itself."""
        return len(self.values) == len(other.values) and all(
            a is b is None or (a is not None and b is not None and _same(a, b))
            for a, b in zip(self.values, other.values, strict=True)
        )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedStep(Step):
    """A step that holds on to its gradients, which a measurement clears."""

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

    The generators start from ``seed``. Compare values on one thread: with more, a CPU adds up the gradients of
    an index in an order of its own, plan or not.

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
    tensors = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)]
    gc.collect()
    with preserved_state(model, made), contextlib.ExitStack() as stack:
        if plan is not None:
            stack.enter_context(sacplan.apply(model, plan))
        for earlier in before:
            _WatchedStep(model, earlier, watched_loss, made, seed=seed, gradients=gradients).run()
            gradients.clear()
            model.zero_grad(set_to_none=True)
        step = _WatchedStep(model, batch, watched_loss, made, seed=seed, gradients=gradients)
        seen = measured_step(step, tensors)
        buffers = [b.detach().clone() for b in model.buffers()]
    return RealStep(seen.peak_bytes, seen.wall_ms, (*losses, *gradients, *buffers))


def on_one_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: torch has one thread inside."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return run
