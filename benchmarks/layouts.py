"""Which parallelism is fastest for a large model, on every mesh of some devices, and how long does planning take?

    python -m benchmarks.layouts [--runs tiny-4 8b-1 8b-8 8b-64 70b-8 70b-64 70b-1024]

Models: Llama-3-8B's shape and a 70B shape (80 layers of 8,192, 28,672 inside, 64 heads, 8 for keys and values, 128,256
words), sequences of 8,192 tokens, bfloat16, fused AdamW, on the meta device; everything is predicted. A step of the 8B
is 16 sequences, 131,072 tokens; one device gets one at a time, of which 16 make a step (accumulated). The budget
of a rank is the memory of an H100 less a headroom of 15 %. A tiny Llama of three layers in 112 MiB shows what planning
costs that is not for size.

A row is a way to run the step: the mesh, how the step is spread, peak per rank without and with a plan,
ms of a step, of recomputation and of exposed communication, and samples per second: those of ``sacplan.layouts``.
Processor seconds are of all plans of ``layouts`` together.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from textwrap import fill

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import GIB, ROOT, Row, as_text
from benchmarks.harness.table import markdown_table
from benchmarks.models.cases import empty_text, fused_adamw, published
from sacplan.core.files import table_of
from sacplan.planning.limits import DEFAULT_HEADROOM

DEVICE = "h100"
LENGTH = 8192
STEP = 16
"""Sequences."""

SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "tiny": (
        "meta-llama/Meta-Llama-3-8B",
        {
            "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8,
            "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 256,
        },
    ),
    "8b": ("meta-llama/Meta-Llama-3-8B", {}),
    "70b": ("meta-llama/Meta-Llama-3-70B", {}),
}  # fmt: skip
"""Configurations, and what is changed in them."""

BUDGETS = {"tiny": "112MiB"}
LENGTHS = {"tiny": 1024}

RUNS: dict[str, tuple[str, int, int]] = {
    "tiny-4": ("tiny", 4, 8),
    "8b-1": ("8b", 1, 1),
    "8b-8": ("8b", 8, STEP),
    "8b-64": ("8b", 64, STEP),
    "70b-8": ("70b", 8, STEP),
    "70b-64": ("70b", 64, 64),
    "70b-1024": ("70b", 1024, 1024),
}
"""Shape, devices, and sequences in a step of all ranks together."""

FORMER = ROOT / "benchmarks" / "data" / "own_runtime.csv"

HEADS = "mesh | spread as | peak, no plan | with a plan | step | of it recomputed | of it waiting"


def profiled(shape: str, sequences: int) -> sacplan.Profile:
    """Profile the step of the whole model on one device."""
    batch, (name, changes) = empty_text(sequences, LENGTHS.get(shape, LENGTH)), SHAPES[shape]
    return sacplan.profile(published(name, **changes), batch, optimizer=fused_adamw, device=DEVICE)


_OF_A_ROW = (
    "mesh", "name", "fits", "unplanned_peak_bytes", "peak_bytes", "step_ms", "recompute_ms", "collective_ms",
    "samples_per_s",
)  # fmt: skip


def looked(shape: str, devices: int, sequences: int) -> Row:
    """Return a run: all ways to spread a step over a number of devices."""
    profile, began = profiled(shape, sequences), time.process_time()
    limit = {"budget": BUDGETS[shape]} if shape in BUDGETS else {"headroom": DEFAULT_HEADROOM}
    found = sacplan.layouts(profile, devices=devices, **limit)
    seconds = time.process_time() - began
    rows = [{name: getattr(row, name) for name in _OF_A_ROW} for row in found.rows]
    return {
        "shape": shape,
        "devices": devices,
        "sequences": sequences,
        "length": LENGTHS.get(shape, LENGTH),
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


def planning(runs: Sequence[Row]) -> str:
    """Write what a search and its best mesh took before PyTorch ran the ranks, and take now."""
    known = {(row["case"], row["figure"]): row for row in table_of(FORMER)}
    rows = []
    for run in runs:
        case = f"{run['shape']}, {run['devices']} GPUs"
        search = known.get((case, "planning, s"))
        if search is not None:
            step = known.get((case, "fastest step, ms"), {"before": ""})
            seconds = f"{run['processor_seconds']:.0f} s"
            now = f"{run['rows'][0]['step_ms']:,.0f}" if step["before"] else ""
            steps = [f"{ms} ms" if ms else "" for ms in (step["before"], now)]
            rows.append([case, *steps, f"{search['before']} s", seconds])
    return markdown_table("what | step before | step | planning before | planning", rows)


def refusals(run: Row) -> Iterator[str]:
    """Yield the meshes that are refused, each with the first reason."""
    for text in run["refused"]:
        mesh = re.search(r"over mesh ([^.]*)\.", text)
        reason = re.search(r": ([^:(]*)", text)
        yield f"{mesh[1]}: {reason[1].strip()}." if mesh and reason else text


def main() -> None:
    parser = Parser(__doc__, "layouts.json")
    parser.choice("--runs", RUNS)
    arguments = parser.begin(note=f"; predicted for {DEVICE}", silence=True)
    runs = run_cases(arguments.runs, lambda name: [looked(*RUNS[name])], arguments.json, device=DEVICE)
    for run in runs:
        print(f"\n{as_text(run)}\n{table(run)}", *refusals(run), sep="\n")


if __name__ == "__main__":
    main()
