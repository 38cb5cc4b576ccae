"""What does a step cost that trains all weights of a model which the GPU does not hold, and what is published?

    python -m benchmarks.whole_models
    python -m benchmarks.whole_models --table      # puts the table on docs/offload.md

A row is a step on one GPU, in bfloat16 (float16 on a V100), with torchao's optimizer on the host, to which gradients
leave at once (``adamw-offload-gradients``). The plan may recompute, slice and offload, weights included, and has to fit
the GPU.

Published tokens per second are of other systems in steps of the same model, batch and GPU:

- **MegaTrain**: 272 TFLOP/s for Qwen2.5-7B on one H100 (its README), six FLOPs for each parameter and token of whole
  sequences (``examples/sft/train.py``), batch and length as in its ``qwen_7b_1gpu.yaml`` ("Single GPU0 Benchmark").
- **ZeRO-Offload**: DeepSpeed's tutorial of that name shows the log of GPT-2 with ten billion parameters on a V100:
  .3868 sequences a second, of 1,024 tokens as in ``ds_zero-offload_10B_pretrain_gpt2_model_parallel.sh``.
- **ZeRO-3** with parameters and optimizer on the host, which is ZeRO-Infinity without NVMe: measured by SlideFormer's
  authors (``bench/DeepSpeed/ds_bench_1024_bf16_on_20260224_211132.csv``).
- **SuperOffload**: "up to 600 TFLOPS (seq len 4K, batch size 4)" for GPT-OSS-20B and Qwen3-14B on a GH200 (DeepSpeed's
  blog), as ``finetune_zero3.py`` counts them, the recomputed forward pass included.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import PageTable, markdown_table
from sacplan.cli.targets import load_target
from sacplan.device.links import Link
from sacplan.integrations.hf.target import ModelOptions

GH200 = dataclasses.replace(
    sacplan.DeviceSpec.of("h100"),
    name="gh200",
    memory_bytes=int(94.5 * GIB),
    bandwidth_bytes_per_s=4e12,
    host_link=Link("NVLink-C2C", 450e9, 1.9e-6),
    host_bandwidth_bytes_per_s=8e9 * 28 / 0.608,
)
"""NVIDIA's data sheet, the version with 96 GB. The host updates as fast as GraceAdam in DeepSpeed's blog on
SuperOffload: eight billion parameters in .608 s, with 28 bytes read and written for each."""
GPT2_10B = "benchmarks/data/gpt2-10b.json"


@dataclass(frozen=True)
class Case:
    """A model, sequences and their tokens, a GPU, the memory of its host, and published tokens per second."""

    model: str
    batch: int
    seq: int
    device: str | sacplan.DeviceSpec
    host: str
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    published: float | None = None


CASES = {
    "Llama-3-8B on 24GB": Case("meta-llama/Meta-Llama-3-8B", 1, 8192, "24GB", "128GiB"),
    "Llama-3-70B on h100": Case("meta-llama/Meta-Llama-3-70B", 1, 8192, "h100", "1024GiB"),
    "Llama-3-70B on 24GB": Case("meta-llama/Meta-Llama-3-70B", 1, 8192, "24GB", "1024GiB"),
    "Qwen2.5-7B on h100": Case("Qwen/Qwen2.5-7B", 1, 8192, "h100", "256GiB"),
    "Qwen2.5-7B, 158 x 1,024 on h100": Case(
        "Qwen/Qwen2.5-7B", 158, 1024, "h100", "512GiB", published=272e12 / (6 * 7_615_616_512)
    ),
    "GPT-2 10B, 10 x 1,024 on v100": Case(
        GPT2_10B, 10, 1024, "v100-32gb", "512GiB", "float16", published=0.3868 * 1024
    ),
    "Llama-3-8B, 8 x 1,024 on rtx-4090": Case(
        "meta-llama/Meta-Llama-3-8B", 8, 1024, "rtx-4090", "256GiB", published=913.6
    ),
    "Llama-3-8B, 32 x 1,024 on rtx-4090": Case(
        "meta-llama/Meta-Llama-3-8B", 32, 1024, "rtx-4090", "256GiB", published=1790.9
    ),
    "Qwen3-14B, 4 x 4,096 on gh200": Case(
        "Qwen/Qwen3-14B", 4, 4096, GH200, "480GiB",
        published=600e12 / (8 * 14_768_307_200 + 16 * 40 * 5120 * 4096),
    ),
}  # fmt: skip


def row_of(case: str) -> Row:
    """Return the row of a model on a GPU."""
    of = CASES[case]
    options = ModelOptions(dtype=of.dtype, seq=of.seq, batch=of.batch, optimizer="adamw-offload-gradients")
    target = load_target(f"hf:{of.model}", options)
    profile = sacplan.profile(target.model, target.batch, target.loss_fn, target.optimizer, device=of.device)
    parameters = list(target.model.parameters())
    row: Row = {
        "case": case,
        "tokens": of.batch * of.seq,
        "parameters": sum(p.numel() for p in parameters),
        "weights_bytes": sum(p.nbytes for p in parameters),
        "plain_peak_bytes": profile.peak_bytes,
        "plain_step_ms": profile.step_ms,
        "host_budget": of.host,
        "optimizer_host_bytes": profile.optimizer_host_bytes,
    }
    began = time.process_time()
    try:
        plan = sacplan.plan(profile, techniques=("recompute", "chunk", "offload"), host_budget=of.host)
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
        return [*cells, f"smallest {row['smallest_bytes'] / GIB:.1f} GiB", *["-"] * 4]
    return [
        *cells,
        f"{row['peak_bytes'] / GIB:.1f} GiB, {row['step_ms'] / 1e3:.2f} s",
        f"{row['host_bytes'] / GIB:.1f}, {row['optimizer_host_bytes'] / GIB:.1f} GiB",
        f"{1e3 * row['tokens'] / row['step_ms']:,.0f}",
        f"{tflops(row):.0f}",
        f"{published:,.0f}" if (published := CASES[row["case"]].published) else "-",
    ]


def table(rows: Iterable[Row]) -> str:
    """Return the table of the page."""
    heads = "model | weights | as it is | with the plan | on the host: plan, optimizer | tokens/s | TFLOP/s | published"
    return markdown_table(heads, map(_cells, rows))


TABLE = PageTable("whole_models", "offload.md", table)


def main() -> None:
    parser = Parser(__doc__, "whole_models.json", TABLE)
    parser.choice("--cases", CASES)
    arguments = parser.begin(silence=True)
    run_cases(arguments.cases, lambda case: [row_of(case)], arguments.json, key="case")


if __name__ == "__main__":
    main()
