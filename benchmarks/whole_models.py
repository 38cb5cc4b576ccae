"""What does a step cost that trains all weights of a model, or a sequence, which the GPU does not hold?

    python -m benchmarks.whole_models [--cases 'Llama-3-8B on 24GB' 'gemma-2-2b-h100, 16384']
    python -m benchmarks.whole_models --table      # puts both tables on docs/offload.md

A row is a step in bfloat16 (float16 on a V100) on one GPU, with torchao's optimizer on the host, to which gradients
leave at once (``adamw-offload-gradients``), on the meta device; nothing is computed. The plan may recompute, slice and
offload, weights included. The file keeps the rows that a run does not make again. ``planning_s`` is processor time.

A plan of ``MODELS`` has to fit the GPU. One of ``SEQUENCES`` has the device's memory less 15 %, or the smallest peak
for 8,192 tokens; its host is what the device's row says of it, or all that a machine with eight such devices has
(``-node``). Such a row has the peaks of a fake step with the plan, too, on the device and on the host.

Published tokens per second are of other systems in steps of the same model, batch and GPU:

- **MegaTrain**: 272 TFLOP/s for Qwen2.5-7B on one H100 (its README), six FLOPs for each parameter and token of whole
  sequences (``examples/sft/train.py``), batch and length as in its ``qwen_7b_1gpu.yaml`` ("Single GPU0 Benchmark").
- **ZeRO-Offload**: DeepSpeed's tutorial of that name shows the log of GPT-2 with ten billion parameters on a V100:
  .3868 sequences a second, of 1,024 tokens as in ``ds_zero-offload_10B_pretrain_gpt2_model_parallel.sh``.
- **ZeRO-3** with parameters and optimizer on the host, which is ZeRO-Infinity without NVMe: measured by SlideFormer's
  authors (``bench/DeepSpeed/ds_bench_1024_bf16_on_20260224_211132.csv``).
- **ZeRO-Infinity**: 45 TFLOP/s for GPT-3 13B on one RTX 4090, in the abstract of Fuyou (arXiv 2403.06504), whose own
  rate is 156. It does not say the batch, the length, how FLOPs are counted, and what lay on NVMe. Here are 32 sequences
  of 1,024 tokens, as in ``bench/LoHan/run.sh`` of SlideFormer's repository, six FLOPs for each parameter and token, and
  nothing on NVMe. SlideFormer's own rates are charts, and we found no others of ZeRO-Infinity on one GPU.
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
from benchmarks.harness.plans import as_budget, budget_bytes_on
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models import chunk_models
from benchmarks.models.cases import Case
from sacplan.cli.targets import load_target
from sacplan.device.devices import resolve_device
from sacplan.device.links import Link
from sacplan.integrations.hf.target import ModelOptions

TECHNIQUES = ("recompute", "chunk", "offload")
OPTIMIZER = "adamw-offload-gradients"
SHORT = 8192

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
GPT2_10B, GPT3_13B = "benchmarks/data/gpt2-10b.json", "benchmarks/data/gpt3-13b.json"


@dataclass(frozen=True)
class Whole:
    """A model, sequences and their tokens, a GPU, the memory of its host, and published tokens per second."""

    model: str
    batch: int
    seq: int
    device: str | sacplan.DeviceSpec
    host: str
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    published: float | None = None


MODELS = {
    "Llama-3-8B on 24GB": Whole("meta-llama/Meta-Llama-3-8B", 1, 8192, "24GB", "128GiB"),
    "Llama-3-70B on h100": Whole("meta-llama/Meta-Llama-3-70B", 1, 8192, "h100", "1024GiB"),
    "Llama-3-70B on 24GB": Whole("meta-llama/Meta-Llama-3-70B", 1, 8192, "24GB", "1024GiB"),
    "Qwen2.5-7B on h100": Whole("Qwen/Qwen2.5-7B", 1, 8192, "h100", "256GiB"),
    "Qwen2.5-7B, 158 x 1,024 on h100": Whole(
        "Qwen/Qwen2.5-7B", 158, 1024, "h100", "512GiB", published=272e12 / (6 * 7_615_616_512)
    ),
    "GPT-2 10B, 10 x 1,024 on v100": Whole(
        GPT2_10B, 10, 1024, "v100-32gb", "512GiB", "float16", published=0.3868 * 1024
    ),
    "GPT-3 13B, 32 x 1,024 on rtx-4090": Whole(
        GPT3_13B, 32, 1024, "rtx-4090", "512GiB", published=45e12 / (6 * 12_848_143_360)
    ),
    "Llama-3-8B, 8 x 1,024 on rtx-4090": Whole(
        "meta-llama/Meta-Llama-3-8B", 8, 1024, "rtx-4090", "256GiB", published=913.6
    ),
    "Llama-3-8B, 32 x 1,024 on rtx-4090": Whole(
        "meta-llama/Meta-Llama-3-8B", 32, 1024, "rtx-4090", "256GiB", published=1790.9
    ),
    "Qwen3-14B, 4 x 4,096 on gh200": Whole(
        "Qwen/Qwen3-14B", 4, 4096, GH200, "480GiB",
        published=600e12 / (8 * 14_768_307_200 + 16 * 40 * 5120 * 4096),
    ),
}  # fmt: skip

SEQUENCES = {
    "llama-3-8b-h100": ("llama-3-8b", "h100", (262144,), 1),
    "llama-3-8b-h100-node": ("llama-3-8b", "h100", (524288, 655360), 8),
    "gemma-2-2b-h100": ("gemma-2-2b", "h100", (16384,), 1),
    "llama-3.2-1b-4090": ("llama-3.2-1b", "rtx-4090", (262144,), 1),
    "llama-3.2-3b-4090": ("llama-3.2-3b", "rtx-4090", (131072,), 1),
}
"""One of ``chunk_models.OFFLOADED``, a device, lengths, and how many devices' shares of the host a step may take."""

LENGTHS = {
    f"{name}, {tokens}": (name, tokens) for name, of in SEQUENCES.items() for tokens in (SHORT, *of[2])
}


def row_of(case: str) -> Row:
    """Return the row of a model or of a sequence."""
    if case in MODELS:
        of = MODELS[case]
        options = ModelOptions(dtype=of.dtype, seq=of.seq, batch=of.batch, optimizer=OPTIMIZER)
        target = load_target(f"hf:{of.model}", options)
        step = Case(target.model, target.batch, target.loss_fn, target.optimizer)
        return _planned(step, of.device, None, of.host) | {"case": case, "tokens": of.batch * of.seq}
    name, tokens = LENGTHS[case]
    model, device, _, shares = SEQUENCES[name]
    spec = resolve_device(device)
    budget_bytes = budget_bytes_on(spec)
    budget = "smallest" if tokens == SHORT else as_budget(budget_bytes)
    step = dataclasses.replace(chunk_models.OFFLOADED[model](tokens), optimizer=OPTIMIZER)
    row = _planned(step, device, budget, as_budget(shares * spec.host_memory_bytes), runs_fake=True)
    return row | {"case": case, "tokens": tokens, "model": model, "budget_bytes": budget_bytes}


def _planned(
    case: Case,
    device: str | sacplan.DeviceSpec,
    budget: str | None,
    host_budget: str,
    *,
    runs_fake: bool = False,
) -> Row:
    profile = case.profile(device)
    parameters = list(case.model.parameters())
    row: Row = {
        "device": resolve_device(device).name,
        "parameters": sum(p.numel() for p in parameters),
        "weights_bytes": sum(p.nbytes for p in parameters),
        "plain_peak_bytes": profile.peak_bytes,
        "plain_step_ms": profile.step_ms,
        "host_budget": host_budget,
        "optimizer_host_bytes": profile.optimizer_host_bytes,
    }
    began = time.process_time()
    try:
        plan = sacplan.plan(profile, budget, techniques=TECHNIQUES, host_budget=host_budget)
    except sacplan.InfeasibleBudget as error:
        return row | {"held": False, "smallest_bytes": error.smallest_feasible_bytes}
    row |= {
        "held": True,
        "planning_s": time.process_time() - began,
        "peak_bytes": plan.peak_bytes,
        "step_ms": plan.planned_ms,
        "host_bytes": plan.host_bytes,
        "share": (plan.recompute_ms + plan.added_ms) / profile.step_ms,
    }
    if runs_fake:
        fake = case.verify(plan)
        row |= {"fake_peak_bytes": fake.peak_bytes, "fake_host_bytes": fake.host_bytes}
    return row


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
        f"{published:,.0f}" if (published := MODELS[row["case"]].published) else "-",
    ]


def table(rows: Iterable[Row]) -> str:
    """Return the table of models."""
    heads = "model | weights | as it is | with the plan | on the host: plan, optimizer | tokens/s | TFLOP/s | published"
    return markdown_table(heads, [_cells(row) for row in rows if row["case"] in MODELS])


def _cells_of_length(row: Row) -> list[str]:
    is_short = row["tokens"] == SHORT
    host_gib = int(row["host_budget"].removesuffix("B")) / GIB
    about = [
        f"`{row['model']}`",
        f"`{row['device']}`, {row['budget_bytes'] / GIB:.1f} GiB; {host_gib:.0f} GiB",
    ]
    return [
        *(about if is_short else ["", ""]),
        f"{row['tokens']:,} tokens{', smallest peak' * is_short}",
        f"{row['peak_bytes'] / GIB:.2f} GiB",
        f"{row['host_bytes'] / GIB:.1f}, {row['optimizer_host_bytes'] / GIB:.1f} GiB",
        f"{row['share']:+.1%}".replace("%", " %"),
        f"{row['planning_s']:.0f} s",
    ]


def table_of_lengths(rows: Iterable[Row]) -> str:
    """Return the table of sequences; a model is named once."""
    heads = "model | device; host | step | peak | on the host: activations, optimizer | time | planned in"
    found = {row["case"]: row for row in rows}
    return markdown_table(heads, [_cells_of_length(found[case]) for case in LENGTHS])


TABLES = (
    PageTable("whole_models", "offload.md", table),
    PageTable("whole_models", "offload.md", table_of_lengths, ", sequences"),
)


def main() -> None:
    parser = Parser(__doc__, "whole_models.json", *TABLES)
    parser.choice("--cases", [*MODELS, *LENGTHS])
    arguments = parser.begin(silence=True)
    run_cases(arguments.cases, lambda case: [row_of(case)], arguments.json, key="case")


if __name__ == "__main__":
    main()
