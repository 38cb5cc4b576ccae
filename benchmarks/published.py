"""Are predicted peaks and times of whole steps those that others have measured on GPUs?

    python -m benchmarks.published
    python -m benchmarks.published --only mingpt-nano pt-74443-pow2
    python -m benchmarks.published --table       # puts the committed figures on docs/measured.md

The published figures are in ``benchmarks/data/peaks.jsonl`` and ``steps.jsonl``, the steps that they are of in
``benchmarks/models/published_steps.py``. Steps of timm and torchvision need these packages, which are no
dependencies. Each step is recorded as a fake step for its GPU and played on a simulation of the caching allocator
from the start of a run (``benchmarks/harness/played.py``). ``docs/measured.md`` and ``docs/data/measured.csv``
are written from the results. With ``--only``, the rows of the other steps stay as they are.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness.command import Parser
from benchmarks.harness.played import RunFigures, allocator_figures
from benchmarks.harness.results import GIB, MIB, RESULTS, ROOT, Row, as_text, read_results, write_results
from benchmarks.harness.table import PageTable, csv_text, markdown_table
from benchmarks.models.published_step import COMPILE, Point, Step
from benchmarks.models.published_steps import STEPS
from benchmarks.models.published_times import timed_rows
from benchmarks.published_ops import is_counted, peaks_summary
from sacplan.core.files import table_of
from sacplan.core.program import Event, Phase, Program
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.device.eager import FORWARD_US, WITHOUT_AUTOGRAD, eager_ms
from sacplan.device.host_step import copy_ms
from sacplan.techniques.offload import timing
from sacplan.techniques.offload.rewrite import TO_DEVICE, TO_HOST, WAIT_BACK, WAIT_OUT

DATA = ROOT / "benchmarks" / "data" / "peaks.jsonl"
CSV = ROOT / "docs" / "data" / "measured.csv"
OPS = RESULTS / "published_ops.json"
CLASSES = ROOT / "benchmarks" / "data" / "classes.csv"
ASKED_MS = 1e-3 * WITHOUT_AUTOGRAD * FORWARD_US
"""For a value that the loop asks for: the op that makes it, called from Python without autograd."""

FIGURES = {
    "allocated": "max_memory_allocated",
    "active": "peak of active blocks",
    "reserved": "max_memory_reserved",
    "reserved_expandable": "max_memory_reserved, expandable segments",
    "end": "memory_allocated at the end",
}


def published_rows() -> dict[str, dict[str, Any]]:
    """Return the published figures by id."""
    lines = DATA.read_text(encoding="utf-8").splitlines()
    peaks = {row["id"]: row for row in map(json.loads, lines)}
    for name, row in timed_rows().items():
        repo, _, path = row["source"].removeprefix("https://github.com/").partition("/blob/main/")
        peaks[name] = {**row, "measured": row["figure"], "source_repo": repo, "source_path": path}
    return peaks


# --- figures ----------------------------------------------------------------------------------------------


def rows_of(name: str, published: Mapping[str, Any]) -> list[Row]:
    """Return a row for each figure of a step, or one that says why there is none."""
    step = STEPS[name]
    about: Row = {
        "id": name,
        "kind": step.kind,
        "unknown": published.get("unknown", ""),
        "missing": step.missing,
    }
    about["other_card"] = published.get("other_card", "")
    profile, plan = step.recorded()
    program = profile.program if plan is None else profile.with_plan(plan)
    step_ms = eager_ms(program, checkpointed=True) + step.asks * ASKED_MS
    step_ms += _hidden_copies_ms(program, profile.spec) if step.one_stream else 0.0
    played: dict[Any, RunFigures] = {}
    rows = []
    for point in step.points:
        loop = point.loop or step.loop
        of_point = profile if point.build is None else dataclasses.replace(step, build=point.build).profile()
        key = point.build, id(loop)
        if key not in played:
            played[key] = allocator_figures(of_point, plan, loop)
        rows.append(about | _row(point, played[key], published["measured"]))
    if step.group:
        return [*rows, about | _time(step, program, profile.spec, published)] if step.samples else rows
    rate = _rate(step, published)
    if rate is not None:
        rows[-1] |= {"published_per_s": rate, "predicted_per_s": step.samples / step_ms * 1000}
    return rows


def _hidden_copies_ms(program: Program, spec: DeviceSpec) -> float:
    """Return the milliseconds of copies of offloading that computation hides."""
    ran = [program.ops[arg] for code, arg in program.events if code == Event.OP]
    copied = [s for op in ran for s in {TO_HOST: op.reads, TO_DEVICE: op.writes}.get(op.name, ())]
    waited_ms = sum(op.time_ms for op in ran if op.name in (WAIT_OUT, WAIT_BACK))
    return sum(timing.copy_ms(spec, program.storage_bytes[s]) for s in copied) - waited_ms


def _row(point: Point, run: RunFigures, measured: Any) -> Row:
    figures = run.first if point.first else run.steady
    published = point.published_bytes(measured)
    predicted = run.end if point.figure == "end" else getattr(figures, point.predicted_figure)
    return {
        "part": ", ".join(map(str, point.part)),
        "figure": point.figure,
        "when": "first step" if point.first else "",
        "published_bytes": published,
        "predicted_bytes": predicted,
        "error": predicted / published - 1,
        "tensors_bytes": figures.tensors,
        "allocated_bytes": figures.allocated,
        "reserved_bytes": figures.reserved,
        "reserved_expandable_bytes": figures.reserved_expandable,
    }


def _time(step: Step, program: Program, spec: DeviceSpec, published: Mapping[str, Any]) -> Row:
    """Return the published and the predicted time of a step in ms, beside that of the GPU alone."""
    in_ms = published["unit"].startswith("ms")
    measured = published["figure"] if in_ms else 1e3 * step.samples / published["figure"]
    ran = [program.ops[arg] for code, arg in program.events if code == Event.OP]
    spared_ms = (step.accumulation - 1) * sum(op.time_ms for op in ran if op.phase == Phase.OPTIMIZER)
    ms = eager_ms(program, waited=step.pageable_bytes > 0, checkpointed=True)
    outside_ms = copy_ms(step.pageable_bytes, True, spec) + step.asks * ASKED_MS
    predicted = step.accumulation * ms + outside_ms - spared_ms
    return {
        "group": step.group,
        "published_ms": measured,
        "predicted_ms": predicted,
        "gpu_ms": step.accumulation * program.step_ms - spared_ms,
        "time_error": predicted / measured - 1,
    }


def _rate(step: Step, published: Mapping[str, Any]) -> float | None:
    """Return the published tokens or images per second on one GPU."""
    if not step.samples:
        return None
    if "images_per_s" in published:
        return float(published["images_per_s"])
    rates = published.get("tokens_per_s_per_gpu", {})
    return float(next(iter(rates.values()))) if rates else None


# --- the page ---------------------------------------------------------------------------------------------

_RATE = {False: "rate", True: "without"}
_KINDS = {"known": "eager, known", "assumed": "eager, something assumed", "compiled": "compiled"}


def percentile(errors: Sequence[float], share: float) -> float:
    """Return the error that a share of all stay within, without their signs."""
    ordered = sorted(map(abs, errors))
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def classes_table(rows: Sequence[Row]) -> str:
    """Return the errors of times by class: before, as asked, and now (``benchmarks/data/classes.csv``)."""
    errors = [(f"{row['group']} {row['id']}", row["time_error"]) for row in rows if "time_error" in row]
    rated = (row for row in rows if "published_per_s" in row)
    errors += [(f"{_RATE[row['missing'] == COMPILE]} {row['id']}", _rate_error(row)) for row in rated]
    ops = filter(is_counted, read_results(OPS)[1])
    errors += [(f"op {row['op']} {row['gpu']}", row["error"]) for row in ops]
    lines = []
    for each in table_of(CLASSES):
        found = [(error, name) for name, error in errors if re.search(each["rows"], name)]
        asked = [each[f"asked_{what}"] or "-" for what in ("median", "p90", "worst")]
        line = [each["class"], str(len(found)), each["before"] or "-"]
        line.append("-" if set(asked) == {"-"} else " / ".join(asked))
        if not found:
            lines.append((*line, "no given point", "", ""))
            continue
        of_class = [error for error, _ in found]
        worst, of = max(found, key=lambda each: abs(each[0]))
        now = [percentile(of_class, 0.5), percentile(of_class, 0.9), abs(worst)]
        missed = [
            f"{100 * is_:.2f} for {at_most}"
            for is_, at_most in zip(now, asked, strict=True)
            if at_most != "-" and 100 * is_ > float(at_most)
        ]
        said = f"{100 * now[0]:.1f} / {100 * now[1]:.1f} / {100 * worst:+.1f}"
        met = "" if line[-1] == "-" else (", ".join(missed) and f"no: {', '.join(missed)}") or "yes"
        lines.append((*line, said, f"`{of.split()[-2 if of.startswith('op') else -1]}`", met))
    return markdown_table("class | points | before | asked | now | worst | met", lines)


MARGINS = {"FSDP, torchtitan": "titan", "FSDP and checkpointing": "prime", "the same, with adapters": "-r16"}
"""Kinds of steps whose allocator is known, by what their ids have; a step is of the last that fits."""


def beyond_prediction(rows: Sequence[Row]) -> dict[str, list[tuple[float, str]]]:
    """Return what was reserved beyond the prediction, as shares of the card's memory, by kind of step.

    Counted are figures of ``max_memory_reserved`` of which the setting of the allocator and the batch are known.
    """
    found: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        is_known = not row["unknown"] or row["unknown"].startswith("segments are expandable")
        if row["kind"] != "assumed" and is_known and row.get("figure", "").startswith("reserved"):
            kind = [name for name, mark in MARGINS.items() if mark in row["id"]][-1]
            memory = resolve_device(STEPS[row["id"]].device).memory_bytes
            share = (row["published_bytes"] - row["predicted_bytes"]) / memory
            found.setdefault(kind, []).append((share, row["id"]))
    return found


def margins_table(rows: Sequence[Row]) -> str:
    """Return the table of what was reserved beyond the prediction."""
    kinds = beyond_prediction(rows)
    kinds["all"] = [one for found in kinds.values() for one in found]
    lines = [
        (kind, str(len(found)), f"{100 * percentile([max(0.0, share) for share, _ in found], 0.95):.2f} %",
         f"{round(100 * max(found)[0], 2) + 0.0:+.2f} %", f"`{max(found)[1]}`")
        for kind, found in kinds.items()
    ]  # fmt: skip
    return markdown_table("kind of step | points | 95th percentile | most | of", lines)


def peaks_table(rows: Sequence[Row]) -> str:
    """Return the table of errors of peaks: a line for each kind of figure."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for kind, said in _KINDS.items():
        for row in rows:
            if row["kind"] == kind and "error" in row:
                found[f"{said}: {_short(row)} bytes"].append((row["error"], row["id"]))
    lines = []
    for group, of_group in found.items():
        errors = [error for error, _ in of_group]
        worst, of = max(of_group, key=lambda each: abs(each[0]))
        within = (_percent(percentile(errors, share), signed=False) for share in (0.5, 0.9))
        lines.append((group, str(len(errors)), *within, _percent(worst), f"`{of}`"))
    return markdown_table("figures | how many | median error | 90th percentile | worst | of", lines)


def _short(row: Row) -> str:
    return "reserved" if row["figure"].startswith("reserved") else "allocated"


def _rate_error(row: Row) -> float:
    return float(row["predicted_per_s"] / row["published_per_s"] - 1)


def _summary(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row["kind"] == "known" and "error" in row]
    said = []
    for name in ("allocated", "reserved"):
        errors = [abs(row["error"]) for row in known if _short(row) == name]
        within = _percent(max(errors), signed=False)
        said.append(f"{len(errors)} figures of {name} bytes are predicted to within {within}")
    return f"Of eager steps whose setting is known, {', and '.join(said)}."


def csv_table(rows: Sequence[Row]) -> str:
    """Return all figures as CSV, those first that are furthest off, and then those that are not compared."""
    published = published_rows()
    heads = (
        "step", "source", "on", "kind", "figure", "published", "predicted", "error_percent", "not_known_or_missing",
    )  # fmt: skip
    found: list[tuple[float, tuple[str, ...]]] = []
    for row in rows:
        source = published[row["id"]]
        name = row["id"] + (f" ({row['part']})" if row.get("part") else "")
        head = (name, _source(source), _device(source), _KINDS.get(row["kind"], row["kind"]))
        if "error" in row:
            shown = (_bytes(row[key], source["unit"]) for key in ("published_bytes", "predicted_bytes"))
            what = ", ".join(filter(None, (FIGURES[row["figure"]], row["when"])))
            notes = "; ".join(filter(None, (row["unknown"], row["missing"])))
            found.append((row["error"], (*head, what, *shown, f"{100 * row['error']:+.4f}", notes)))
        if "published_per_s" in row:
            unit = "images" if "images_per_s" in source else "tokens"
            shown = (f"{row[key]:.0f}" for key in ("published_per_s", "predicted_per_s"))
            notes = "; ".join(filter(None, (row["other_card"], row["missing"])))
            error = _rate_error(row)
            found.append((error, (*head, f"{unit} per second", *shown, f"{100 * error:+.1f}", notes)))
    cells = [line for _, line in sorted(found, key=lambda each: -abs(each[0]))]
    for name, source in published.items():
        why = source.get("not_built") or source.get("not_compared")
        if why:
            kind = "not compared" if "not_built" in source else "in part not compared"
            cells.append((name, _source(source), _device(source), kind, "", "", "", "", why))
    return csv_text(heads, cells)


def _ops_summary(_: Sequence[Row]) -> str:
    peaks = [row for row in read_results(OPS)[1] if row["metric"] == "memory"]
    found = peaks_summary(peaks)
    most = max(peaks, key=lambda row: abs(row["predicted"] - row["published"]))
    return (
        "Measured by the authors of Liger-Kernel, in plain PyTorch (`benchmarks/data/op_benchmarks.csv`). "
        "`python -m benchmarks.published_ops` compares row by row. "
        f"Of {found['rows']} peaks, {found['within_64_kib']} are predicted to within 64 KiB; the worst is off by "
        f"{found['worst_kib']:.0f} KiB of {most['published']:,.0f} MiB. Times are in the table above."
    )


def _source(row: Mapping[str, Any]) -> str:
    return f"{row['source_repo']}, {row['source_path']}"


def _device(row: Mapping[str, Any]) -> str:
    gpus, device = row.get("gpus", 1), row.get("device", "")
    name = device.partition(",")[0] or "not stated"
    return f"{gpus} x {name}" if gpus > 1 else name


def _percent(share: float, signed: bool = True) -> str:
    digits = 1 if abs(share) >= 0.1 else 2 if abs(share) >= 0.001 else 4
    shown = f"{100 * share:{'+' if signed else ''}.{digits}f} %"
    return "exact" if signed and share == 0 else shown


def _bytes(nbytes: float, unit: str) -> str:
    """Write bytes in the unit in which they were published; shares of a card in GiB."""
    if unit == "bytes":
        return f"{nbytes:,.0f} B"
    if unit.startswith("MB (2**20)") or unit == "MiB":
        return f"{nbytes / MIB:,.0f} MiB"
    if unit == "GB":
        return f"{nbytes / 1e9:,.2f} GB"
    return f"{nbytes / GIB:,.2f} GiB"


# --- the command ------------------------------------------------------------------------------------------


def _in_order(rows: Iterable[Row]) -> list[Row]:
    order = list(STEPS)
    return sorted(rows, key=lambda row: order.index(row["id"]))


TABLES = tuple(
    PageTable("published", "measured.md", write, f", {name}")
    for name, write in (
        ("summary", _summary),
        ("peaks", peaks_table),
        ("rates and times", classes_table),
        ("single ops", _ops_summary),
        ("margin", margins_table),
    )
)


def main() -> None:
    parser = Parser(__doc__, "published.json", *TABLES)
    parser.choice("--only", list(STEPS))
    # Steps that do not fit on their card, and types that it computes in software.
    options = parser.begin(silence=True)
    published = published_rows()
    rows = []
    if options.json.exists():
        rows = [row for row in read_results(options.json)[1] if row["id"] not in options.only]
        rows = [row for row in rows if row["id"] in STEPS]
    for name in options.only:
        found = rows_of(name, published[name])
        for row in found:
            print(as_text(row), flush=True)
        rows = _in_order([*rows, *found])
        write_results(options.json, rows)
    if options.json == RESULTS / "published.json":
        for table in TABLES:
            table.put(rows)
        CSV.write_text(csv_table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
