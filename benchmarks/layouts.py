"""Which parallelism is fastest for a large model, on every mesh of some devices, and how long does planning take?

    python -m benchmarks.layouts [--runs 8b-1 8b-8 8b-64 70b-8 70b-64 70b-1024]
    python -m benchmarks.layouts --table      # puts the tables on docs/which-parallelism.md

Models: Llama-3-8B's shape and a 70B shape (80 layers of 8,192, 28,672 inside, 64 heads, 8 for keys and values, 128,256
words), sequences of 8,192 tokens, bfloat16, fused AdamW, on the meta device; everything is predicted. A step of the 8B
is 16 sequences, 131,072 tokens; one device gets one at a time, of which 16 make a step (accumulated). The budget
of a rank is the memory of an H100 less 15 %.

A row is a way to run the step: the mesh, how the step is spread, peak per rank without and with a plan,
ms of a step, of recomputation and of exposed communication, and samples per second: those of ``sacplan.layouts``.
Processor seconds are of all plans of ``layouts`` together.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator, Sequence
from textwrap import fill

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget, budget_bytes_on
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models.cases import empty_text, fused_adamw, published

DEVICE = "h100"
LENGTH = 8192
STEP = 16
"""Sequences."""

SHAPES = {"8b": "meta-llama/Meta-Llama-3-8B", "70b": "meta-llama/Meta-Llama-3-70B"}

RUNS: dict[str, tuple[str, int, int]] = {
    "8b-1": ("8b", 1, 1),
    "8b-8": ("8b", 8, STEP),
    "8b-64": ("8b", 64, STEP),
    "70b-8": ("70b", 8, STEP),
    "70b-64": ("70b", 64, 64),
    "70b-1024": ("70b", 1024, 1024),
}
"""Shape, devices, and sequences in a step of all ranks together."""


HEADS = "mesh | spread as | peak, no plan | with a plan | step | of it recomputed | of it waiting"


def profiled(shape: str, sequences: int) -> sacplan.Profile:
    """Profile the step of the whole model on one device."""
    batch = empty_text(sequences, LENGTH)
    return sacplan.profile(published(SHAPES[shape]), batch, optimizer=fused_adamw, device=DEVICE)


_OF_A_ROW = (
    "mesh", "name", "fits", "unplanned_peak_bytes", "peak_bytes", "step_ms", "recompute_ms", "collective_ms",
    "samples_per_s",
)  # fmt: skip


def looked(shape: str, devices: int, sequences: int) -> Row:
    """Return a run: all ways to spread a step over a number of devices."""
    profile, began = profiled(shape, sequences), time.process_time()
    found = sacplan.layouts(profile, devices=devices, budget=as_budget(budget_bytes_on(profile.spec)))
    seconds = time.process_time() - began
    rows = [{name: getattr(row, name) for name in _OF_A_ROW} for row in found.rows]
    return {
        "shape": shape,
        "devices": devices,
        "sequences": sequences,
        "length": LENGTH,
        "budget_bytes": found.budget_bytes,
        "one_device_peak_bytes": profile.peak_bytes,
        "ops": len(profile.recorded.ops),
        "processor_seconds": seconds,
        "refused": list(found.refused),
        "rows": sorted(rows, key=_order),
    }


def _order(row: Row) -> tuple[bool, float]:
    return (not row["fits"], row["step_ms"] if row["fits"] else row["peak_bytes"])


# --- tables ---------------------------------------------------------------------------------------------------


def mesh_text(row: Row) -> str:
    """Write a mesh as ``dp 4 x tp 2``."""
    return " x ".join(f"{name} {n}" for name, n in row["mesh"].items()) or "one GPU"


def cells_of(row: Row) -> list[str]:
    """Write the cells of a row that fits."""
    peaks = [f"{row[key] / GIB:.1f} GiB" for key in ("unplanned_peak_bytes", "peak_bytes")]
    times = [f"{row[key]:,.0f} ms" for key in ("step_ms", "recompute_ms", "collective_ms")]
    return [mesh_text(row), row["name"], *peaks, *times]


def table(run: Row) -> str:
    """Write a run as a table in Markdown, the fastest first, and the smallest peaks of the ways that do not fit."""
    fits = [cells_of(row) for row in run["rows"] if row["fits"]]
    others = [
        f"{mesh_text(row)} as {row['name']}, {row['peak_bytes'] / GIB:.1f} GiB"
        for row in run["rows"]
        if not row["fits"]
    ]
    parts = [markdown_table(HEADS, fits)] if fits else []
    if others:
        parts.append(fill(f"Too large: {'; '.join(others)}.", 120))
    return "\n\n".join(parts)


def markdown(runs: Sequence[Row], shape: str = "8b") -> str:
    """Write the tables of one model for ``docs/which-parallelism.md``."""
    found: list[str] = []
    for run in runs:
        if run["shape"] != shape:
            continue
        gpus = f"{run['devices']} GPU{'s' if run['devices'] > 1 else ''}"
        sequences = f"{run['sequences']} sequence{'s' if run['sequences'] > 1 else ''}"
        found += ["", f"**{gpus}, {sequences} a step**", "", table(run)]
        if run["refused"]:
            found += ["", "Not possible: " + " ".join(refusals(run))]
    return "\n".join(found).strip()


def refusals(run: Row) -> Iterator[str]:
    """Yield the meshes that are refused, each with the first reason."""
    for text in run["refused"]:
        mesh = re.search(r"over mesh ([^.]*)\.", text)
        reason = re.search(r": ([^:(]*)", text)
        yield f"{mesh[1]}: {reason[1].strip()}." if mesh and reason else text


TABLES = (
    PageTable("layouts", "which-parallelism.md", markdown),
    PageTable("layouts", "which-parallelism.md", functools.partial(markdown, shape="70b"), ", 70B"),
)


def main() -> None:
    parser = Parser(__doc__, "layouts.json", *TABLES)
    parser.choice("--runs", RUNS)
    arguments = parser.begin(silence=True)
    run_cases(arguments.runs, lambda name: [looked(*RUNS[name])], arguments.json, device=DEVICE)


if __name__ == "__main__":
    main()
