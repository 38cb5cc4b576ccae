"""What does a step cost that trains all weights of a model which the GPU does not hold?

    python -m benchmarks.whole_models
    python -m benchmarks.whole_models --table      # puts the table on docs/offload.md

A row is a step in bfloat16 on one GPU, with torchao's optimizer on the host, to which gradients leave
at once (``adamw-offload-gradients``). The plan may recompute, slice and offload, weights included, and has to fit the
GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import PageTable, markdown_table
from sacplan.cli.targets import load_target
from sacplan.integrations.hf.target import ModelOptions

CASES = {
    "Llama-3-8B on 24GB": ("meta-llama/Meta-Llama-3-8B", 1, 8192, "24GB", "128GiB"),
    "Qwen2.5-7B on h100": ("Qwen/Qwen2.5-7B", 1, 8192, "h100", "256GiB"),
    "Llama-3-70B on h100": ("meta-llama/Meta-Llama-3-70B", 1, 8192, "h100", "1024GiB"),
    "Llama-3-70B on 24GB": ("meta-llama/Meta-Llama-3-70B", 1, 8192, "24GB", "1024GiB"),
    "Llama-3-8B, 32 x 1,024 on rtx-4090": ("meta-llama/Meta-Llama-3-8B", 32, 1024, "rtx-4090", "256GiB"),
}
"""Model, sequences and their tokens, GPU, and memory of the host. For the last one, DeepSpeed's speed is published."""


def row_of(case: str) -> Row:
    """Return the row of a model on a GPU."""
    model, batch, seq, device, host = CASES[case]
    options = ModelOptions(dtype="bfloat16", seq=seq, batch=batch, optimizer="adamw-offload-gradients")
    target = load_target(f"hf:{model}", options)
    profile = sacplan.profile(target.model, target.batch, target.loss_fn, target.optimizer, device=device)
    parameters = list(target.model.parameters())
    row: Row = {
        "case": case,
        "tokens": batch * seq,
        "parameters": sum(p.numel() for p in parameters),
        "weights_bytes": sum(p.nbytes for p in parameters),
        "plain_peak_bytes": profile.peak_bytes,
        "plain_step_ms": profile.step_ms,
        "host_budget": host,
        "optimizer_host_bytes": profile.optimizer_host_bytes,
    }
    began = time.process_time()
    try:
        plan = sacplan.plan(profile, techniques=("recompute", "chunk", "offload"), host_budget=host)
    except sacplan.InfeasibleBudget as error:
        return row | {"held": False, "smallest_bytes": error.smallest_feasible_bytes}
    return row | {
        "held": True,
        "planning_cpu_s": time.process_time() - began,
        "peak_bytes": plan.peak_bytes,
        "step_ms": plan.planned_ms,
        "host_bytes": plan.host_bytes,
    }


def tflops(row: Row) -> float:
    """Return the rate as it is usually published: six FLOPs for each parameter and token."""
    return float(6e-9 * row["parameters"] * row["tokens"] / row["step_ms"])


def _cells(row: Row) -> list[str]:
    cells = [f"`{row['case']}`", f"{row['weights_bytes'] / GIB:.1f} GiB"]
    cells.append(f"{row['plain_peak_bytes'] / GIB:.1f} GiB, {row['plain_step_ms'] / 1e3:.2f} s")
    if not row["held"]:
        return [*cells, f"smallest {row['smallest_bytes'] / GIB:.1f} GiB", *["-"] * 3]
    return [
        *cells,
        f"{row['peak_bytes'] / GIB:.1f} GiB, {row['step_ms'] / 1e3:.2f} s",
        f"{row['host_bytes'] / GIB:.1f}, {row['optimizer_host_bytes'] / GIB:.1f} GiB",
        f"{1e3 * row['tokens'] / row['step_ms']:,.0f}",
        f"{tflops(row):.0f}",
    ]


def table(rows: Iterable[Row]) -> str:
    """Return the table of the page."""
    heads = "model | weights | as it is | with the plan | on the host: plan, optimizer | tokens/s | TFLOP/s"
    return markdown_table(heads, map(_cells, rows))


TABLE = PageTable("whole_models", "offload.md", table)


def main() -> None:
    parser = Parser(__doc__, "whole_models.json", TABLE)
    parser.choice("--cases", CASES)
    arguments = parser.begin(silence=True)
    run_cases(arguments.cases, lambda case: [row_of(case)], arguments.json, key="case")


if __name__ == "__main__":
    main()
