"""Is the time of an eager step predicted where the CPU that issues its ops decides, with a plan and without?

    python -m benchmarks.gpu_times [--json FILE]

The steps are those of ``benchmarks.gpu`` that ``benchmarks/data/h100_steps.csv`` has, in up to three runs, whose median
counts. Predicted are their like on a fake H100: today's plans for as many bytes. Two models are left out: what cuDNN
takes for recurrent layers is no matter of the CPU, and T5 of transformers has another configuration since.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict

import torch

import sacplan
from benchmarks.harness.command import Parser
from benchmarks.harness.plans import as_budget
from benchmarks.harness.results import ROOT, Row, as_text, write_results
from benchmarks.models import gpu_models

DATA = ROOT / "benchmarks" / "data" / "h100_steps.csv"
CHANGED = ("transformers/t5",)
"""Models whose configuration in transformers is another one than when they were measured."""


def profiled(name: str, kind: str) -> sacplan.Profile:
    """Profile a model of ``benchmarks.gpu`` on a fake H100."""
    if name.startswith("transformers/"):
        from benchmarks.models import hf_models  # needs transformers

        built = hf_models.build(name.split("/")[1], dtype=torch.bfloat16)
    else:
        built = gpu_models.build(name, "meta", torch.bfloat16, kind == "autocast")
    return sacplan.profile(*built, torch.optim.AdamW, device="h100")


def in_words(rows: list[Row]) -> str:
    """Say how far predicted times are from measured ones."""
    said = []
    for how in ("without", "with"):
        some = [row for row in rows if bool(row["plan"]) is (how == "with")]
        errors = [100 * abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in some]
        half, most = statistics.median(errors), statistics.quantiles(errors, n=10)[-1]
        said.append(
            f"of {len(some)} steps {how} a plan half are within {half:.1f} %, and 90 % within {most:.1f} %"
        )
    return "; ".join(said)


def main(arguments: list[str] | None = None) -> None:
    """Predict the steps, and print the errors."""
    options = Parser(__doc__, "gpu_times_h100.json").begin(arguments, silence=True)
    steps: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    with DATA.open(encoding="utf-8") as lines:
        for line in csv.DictReader(lines):
            if line["model"] not in ("lstm", *CHANGED):
                steps[line["model"], line["kind"]][line["plan"]].append(line)
    rows: list[Row] = []
    for (name, kind), of_plan in steps.items():
        profile = profiled(name, kind)
        for plan, ran in of_plan.items():
            measured = statistics.median(float(line["measured_ms"]) for line in ran)
            budget = ran[0]["budget_bytes"]
            ms = sacplan.plan(profile, as_budget(int(budget))).planned_ms if plan else profile.step_ms
            about = {"model": name, "kind": kind, "plan": plan}
            rows.append(about | {"measured_ms": measured, "predicted_ms": ms})
            print(as_text(rows[-1]), flush=True)
    write_results(options.json, rows, row_a_line=True)
    print(in_words(rows))


if __name__ == "__main__":
    main()
