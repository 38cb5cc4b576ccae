"""What does ``sacplan fit`` say of twelve things that people train, and what have others measured of them?

    python -m benchmarks.verdicts [--only ID ...]

Full training, LoRA and QLoRA of models from 1B to 70B parameters, on one GPU of 12 GB up to eight of 80 GB. Each case
is a command, run in a process of its own. Where somebody has published what the same step reserves, the row has both
figures; ``benchmarks/data/peaks.jsonl`` says who, and how they came about. The table in ``docs/fit.md`` is made from
the results (``--table``). With ``--only``, the rows of other cases stay as they are.
"""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import GIB, ROOT, Row
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.published import published_rows

with (ROOT / "benchmarks" / "data" / "verdicts.csv").open(encoding="utf-8", newline="") as _file:
    CASES = {case["id"]: case for case in csv.DictReader(_file)}
"""By what is trained: the arguments of ``sacplan fit``, and the id and name of a published figure of the step."""


def row_of(name: str) -> Row:
    """Return what the command says, and what was published."""
    case = CASES[name]
    words = [sys.executable, "-m", "sacplan", "fit", *shlex.split(case["command"]), "--no-sizes", "--json"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    facts = json.loads(done.stdout)
    if "error" in facts:
        raise RuntimeError(f"{name}: {facts['error']['message']}")
    row: Row = {
        "id": name,
        "command": f"sacplan fit {case['command']}",
        "fits": facts["fits"],
        "verdict": facts["verdict"],
    }
    row |= {"as_it_is": _figures(facts["rows"][0]), "recommended": _figures(facts["recommended"])}
    # What recomputation alone does: the first such row that fits.
    row["plan"] = next((_figures(one) for one in facts["rows"] if one["way"] == "plan" and one["fits"]), None)
    row["remarks"] = facts["remarks"]
    if key := case["published"]:
        entry, predicted = published_rows()[key], facts["rows"][0]["reserved_bytes"]
        measured = entry["measured"][case["figure"]]
        row["published"] = {
            "id": key, "measured_bytes": measured, "predicted_bytes": predicted, "error": predicted / measured - 1,
        }  # fmt: skip
    return row


def _figures(row: dict[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    names = "optimizer spread way peak_bytes reserved_bytes host_bytes fits over_bytes step_ms"
    return {name: row[name] for name in names.split()}


# --- the table on the page


def markdown(rows: Sequence[Row]) -> str:
    """Return the table: a line for each case."""
    heads = "training | `sacplan fit ...` | as it is | what to do | reserved | published"
    return markdown_table(heads, map(_cells, rows))


def _cells(row: Row) -> tuple[str, ...]:
    first, best = row["as_it_is"], row["recommended"]
    command = row["command"].removeprefix("sacplan fit ").removeprefix("hf:")
    as_it_is = "fits" if first["fits"] else f"{_gib(first['over_bytes'])} too much"
    todo, reserved = "nothing fits", ""
    if best is not None:
        named = ", ".join(filter(None, (best["optimizer"], best["spread"], best["way"])))
        todo = "nothing" if best == first and not best["spread"] else named
        reserved = _gib(best["reserved_bytes"])
    published, beside = row.get("published"), ""
    if published is not None:
        beside = f"{_gib(published['measured_bytes'])} ({published['error']:+.1%} predicted)"
    return row["id"], f"`{command}`", as_it_is, todo, reserved, beside


TABLE = PageTable("verdicts", "fit.md", markdown)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB"


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__, "verdicts.json", TABLE)
    parser.choice("--only", CASES)
    arguments = parser.begin(argv)
    run_cases(arguments.only, lambda name: [row_of(name)], arguments.json, key="id")


if __name__ == "__main__":
    main()
