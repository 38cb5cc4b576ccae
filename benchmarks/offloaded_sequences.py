"""How long a sequence fits one GPU with offloading, chunks and the optimizer on the host, and what does it cost?

    python -m benchmarks.offloaded_sequences [--cases llama-3-8b-h100 gemma-2-2b-h100]
    python -m benchmarks.offloaded_sequences --table    # puts the table on docs/offload.md

Models: the shapes of Llama-3-8B and Gemma-2-2B for an H100, and of Llama-3.2-1B and 3B for an RTX 4090, with all their
layers, in bfloat16, one sequence, on the meta device; nothing is computed. The optimizer is torchao's AdamW on the
host, which moves each gradient there as soon as it is there. Techniques: recomputation, chunks and offloading. The
budget is the device's memory less 15 %. The host's is what the device's row says of it, or all that a machine with
eight such devices has (``-node``), for the optimizer and for what waits there together.

A case has a row with the smallest peak of a step of 8,192 tokens, and one with the plan for the budget at each of its
lengths. Each has the figures of the plan, and the peaks of a fake step with it, on the device and on the host.
``planning_s`` is processor time. The file keeps the rows that a run does not make again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models import chunk_models
from sacplan.device.devices import resolve_device
from sacplan.planning.limits import DEFAULT_HEADROOM

TECHNIQUES = ("recompute", "chunk", "offload")
OPTIMIZER = "adamw-offload-gradients"
SHORT = 8192

CASES = {
    "llama-3-8b-h100": ("llama-3-8b", "h100", (262144,), 1),
    "llama-3-8b-h100-node": ("llama-3-8b", "h100", (524288, 655360), 8),
    "gemma-2-2b-h100": ("gemma-2-2b", "h100", (16384,), 1),
    "llama-3.2-1b-4090": ("llama-3.2-1b", "rtx-4090", (262144,), 1),
    "llama-3.2-3b-4090": ("llama-3.2-3b", "rtx-4090", (131072,), 1),
}
"""One of ``chunk_models.OFFLOADED``, a device, lengths, and how many devices' shares of the host a step may take."""


def row_of(name: str, tokens: int) -> Row:
    """Return the row of a case: the plan's figures, and the peaks of a fake step with it."""
    model, device, _, shares = CASES[name]
    spec = resolve_device(device)
    host_bytes = shares * spec.host_memory_bytes
    budget_bytes = spec.memory_bytes - int(DEFAULT_HEADROOM * spec.memory_bytes)
    case = dataclasses.replace(chunk_models.OFFLOADED[model](tokens), optimizer=OPTIMIZER)
    profile = case.profile(device)
    budget = "smallest" if tokens == SHORT else as_budget(budget_bytes)
    began = time.process_time()
    plan = sacplan.plan(profile, budget, techniques=TECHNIQUES, host_budget=as_budget(host_bytes))
    took = time.process_time() - began
    fake = case.verify(plan)
    return {
        "row": f"{name}, {tokens}",
        "case": name,
        "model": model,
        "device": spec.name,
        "budget_bytes": budget_bytes,
        "host_budget_bytes": host_bytes,
        "tokens": tokens,
        "plain_peak_bytes": profile.peak_bytes,
        "plain_step_ms": profile.step_ms,
        "peak_bytes": plan.peak_bytes,
        "fake_peak_bytes": fake.peak_bytes,
        "host_bytes": plan.host_bytes,
        "fake_host_bytes": fake.host_bytes,
        "optimizer_host_bytes": profile.optimizer_host_bytes,
        "recompute_ms": plan.recompute_ms,
        "added_ms": plan.added_ms,
        "share": (plan.recompute_ms + plan.added_ms) / profile.step_ms,
        "recomputed": len(plan.decisions) - len(plan.chunks) - len(plan.offloaded),
        "chunks": len(plan.chunks),
        "offloaded": len(plan.offloaded),
        "planning_s": took,
    }


def _cells(row: Row) -> tuple[str, ...]:
    what = ", smallest peak" if row["tokens"] == SHORT else ""
    return (
        f"`{row['model']}`",
        f"`{row['device']}`, {row['budget_bytes'] / GIB:.1f} GiB; {row['host_budget_bytes'] / GIB:.0f} GiB",
        f"{row['tokens']:,} tokens{what}",
        f"{row['peak_bytes'] / GIB:.2f} GiB",
        f"{row['host_bytes'] / GIB:.1f}, {row['optimizer_host_bytes'] / GIB:.1f} GiB",
        f"{row['share']:+.1%}".replace("%", " %"),
        f"{row['planning_s']:.0f} s",
    )


def table(rows: Iterable[Row]) -> str:
    """Return the table of the page; a model is named once."""
    heads = "model | device; host | step | peak | on the host: activations, optimizer | time | planned in"
    names = list(CASES)
    ordered = sorted(rows, key=lambda row: (names.index(row["case"]), row["tokens"]))
    known = [""] + [row["case"] for row in ordered]
    cells = (
        _cells(row) if row["case"] != before else ("", "", *_cells(row)[2:])
        for row, before in zip(ordered, known, strict=False)
    )
    return markdown_table(heads, cells)


TABLE = PageTable("offloaded_sequences", "offload.md", table)


def main() -> None:
    parser = Parser(__doc__, "offloaded_sequences.json", TABLE)
    parser.choice("--cases", CASES)
    arguments = parser.begin(silence=True)
    asked = [(name, tokens) for name in arguments.cases for tokens in (SHORT, *CASES[name][2])]
    run_cases(asked, lambda one: [row_of(*one)], arguments.json, key="row")


if __name__ == "__main__":
    main()
