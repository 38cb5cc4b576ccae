"""Files of figures: JSON with the machine and the date, under ``benchmarks/results``."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
GIB = 2**30
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Return what figures depend on: the machine and the versions."""
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
    """Write what ``machine`` returns as one line."""
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
    versions = ", ".join(f"{k} {found[k]}" for k in ("torch", "transformers") if k in found)
    return f"{versions}, {found['machine']}, {found['cores']} cores, {threads}"


def as_text(row: Row) -> str:
    """Write a row in a line. Bytes are in MiB; what is nested is in the file alone."""

    def said(name: str, value: Any) -> str:
        if isinstance(value, int) and value > MIB:
            return f"{name} {value / MIB:,.2f} MiB"
        return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"

    return ", ".join(said(*each) for each in row.items() if not isinstance(each[1], (dict, list, tuple)))


def write_results(path: Path | None, rows: Sequence[Row], *, row_a_line: bool = False, **more: Any) -> None:
    """Write rows as JSON, with the machine and the date.

    Args:
        path: the file; None writes nothing.
        rows: values that JSON has.
        row_a_line: write one row in a line, for files of many rows.
        **more: what the file says besides.
    """
    if path is None:
        return
    data = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    if row_a_line:
        head = json.dumps(data, indent=1).removesuffix("\n}")
        text = head + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n"
    else:
        text = json.dumps({**data, "rows": list(rows)}, indent=1) + "\n"
    path.write_text(text, encoding="utf-8")


def read_results(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Read a file of figures: what it says of the run, and its rows."""
    about = json.loads(path.read_text(encoding="utf-8"))
    return about, about.pop("rows")
