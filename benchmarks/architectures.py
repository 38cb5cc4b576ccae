"""Plan many architectures and verify each plan with a fake step.

    python -m benchmarks.architectures                     # all, on an h100, bfloat16, at 75 % and 50 %
    python -m benchmarks.architectures --names gpt2 t5 --budgets 60%
    python -m benchmarks.architectures --real --size small # on this CPU, measured, gradients compared

One row for each budget. "smallest" as a budget means that the one asked for is infeasible, and that the
smallest feasible one, which the error reports, was planned for instead.
"""

from __future__ import annotations

import argparse
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import sacplan
from benchmarks import hf_models
from benchmarks.common import GIB, on_one_thread, plan_or_smallest, real_step


@dataclass(frozen=True, slots=True)
class Row:
    """One plan. ``recompute`` is a share of the step's time; ``seconds`` are for profile, plan and verify."""

    name: str
    parameters: int
    unplanned_bytes: int
    budget: str
    budget_bytes: int
    predicted_bytes: int
    seen_bytes: int
    recompute: float
    seconds: float
    bit_equal: bool | None

    @property
    def holds(self) -> bool:
        """Whether the step seen is within the budget and its peak is the predicted one."""
        return self.seen_bytes <= self.budget_bytes and self.seen_bytes == self.predicted_bytes


def rows(
    name: str, size: str, device: str, budgets: list[str], dtype: torch.dtype, real: bool
) -> Iterator[Row]:
    """Profile once, then plan and verify for each budget."""
    torch.manual_seed(0)
    model, batch, loss_fn = hf_models.build(name, size, "cpu" if real else "meta", dtype)
    began = time.perf_counter()
    profile = sacplan.profile(model, batch, loss_fn=loss_fn, device=device)
    seconds = time.perf_counter() - began
    for budget in budgets:
        began = time.perf_counter()
        plan, found = plan_or_smallest(profile, budget)
        seen = sacplan.verify(model, batch, plan, loss_fn=loss_fn, run="real" if real else "fake")
        yield Row(
            name=name,
            parameters=sum(p.numel() for p in model.parameters()),
            unplanned_bytes=profile.peak_bytes,
            budget=found,
            budget_bytes=plan.budget_bytes or 0,
            predicted_bytes=plan.peak_bytes,
            seen_bytes=seen.peak_bytes,
            recompute=plan.recompute_ms / profile.step_ms,
            seconds=seconds + time.perf_counter() - began,
            bit_equal=same_bits(model, batch, loss_fn, plan) if real else None,
        )


@on_one_thread
def same_bits(model: torch.nn.Module, batch: Any, loss_fn: Any, plan: sacplan.Plan) -> bool:
    """Whether loss, gradients and buffers are the same bits with the plan as without, dropout on."""
    return real_step(model, batch, loss_fn, plan=plan).same_bits(real_step(model, batch, loss_fn))


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is the number of failures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", nargs="*", default=list(hf_models.NAMES))
    parser.add_argument("--budgets", nargs="*", default=["75%", "50%"])
    parser.add_argument("--size", choices=["small", "medium"], default="medium")
    parser.add_argument("--device", default=None, help="h100, or cpu with --real")
    parser.add_argument("--dtype", default=None, help="bfloat16, or float32 with --real")
    parser.add_argument("--real", action="store_true", help="run on this CPU and measure")
    parser.add_argument("--traceback", action="store_true")
    parser.add_argument("--warnings", action="store_true", help="show what the fake trace assumed")
    args = parser.parse_args(argv)
    device = args.device or ("cpu" if args.real else "h100")
    dtype = getattr(torch, args.dtype or ("float32" if args.real else "bfloat16"))
    if not args.warnings:
        warnings.simplefilter("ignore")
    print(f"{'name':20} {'parameters':>10} {'unplanned':>10} {'budget':>8} {'GiB':>8}", end=" ")
    print(f"{'predicted':>9} {'seen':>8} {'recompute':>9} {'seconds':>7}")
    failures = 0
    for name in args.names:
        try:
            for row in rows(name, args.size, device, args.budgets, dtype, args.real):
                verdict = "" if row.holds else f"seen {row.seen_bytes - row.predicted_bytes:+d} B"
                if row.seen_bytes > row.budget_bytes:
                    verdict += " OVER BUDGET"
                if row.bit_equal is not None:
                    verdict += " bit-equal" if row.bit_equal else " GRADIENTS DIFFER"
                failures += not (row.holds if row.bit_equal is None else row.bit_equal)
                gib = [row.unplanned_bytes, row.budget_bytes, row.predicted_bytes, row.seen_bytes]
                unplanned, budget, predicted, seen = (n / GIB for n in gib)
                print(f"{name:20} {row.parameters / 1e6:9.1f}M {unplanned:10.4f} {row.budget:>8}", end=" ")
                print(f"{budget:8.4f} {predicted:9.4f} {seen:8.4f} {row.recompute:9.2%}", end=" ")
                print(f"{row.seconds:7.1f} {verdict}", flush=True)
        except Exception as error:
            failures += 1
            print(f"{name:20} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            if args.traceback:
                traceback.print_exc()
    return failures


if __name__ == "__main__":
    raise SystemExit(main())
