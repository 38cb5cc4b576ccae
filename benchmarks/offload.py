"""What does it cost to hold a budget by recomputation, by offloading, by both, and with chunks?

    python -m benchmarks.offload [--models llama resnet50] [--device h100]
    python -m benchmarks.offload --table      # puts the table on docs/offload.md

Models: the nine of ``gpu_models.py`` at the size of the famous ones, and eight layers of Llama-3-8B's shape on 8,192
tokens; bfloat16, on the meta device, nothing is computed. A row is a model with its smallest peak by each choice of
techniques, and three budgets: 60 % and 20 % of the way from the smallest peak by recomputation alone to the step's own
peak, and that smallest peak. For each budget and choice: whether it is held, and by how much the step becomes longer
(recomputation, waits for copies and slices together), with the memory of the host.

A plan with a choice that contains another one must cost no more. ``worse`` lists where it does, beyond 1e-6 ms.
The peaks of the plans that offload are those of a fake step with the plan, on the device and on the host: ``exact``.
``simulated_ms`` is how long that step takes by a simulation of streams (``harness/streams.py``), beside the
``planned_ms`` of the plan; ``apart`` is the largest difference of the row, as a share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import budget_at, plan_or_least
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.streams import planned_ms, simulated
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models import chunk_models, gpu_models
from benchmarks.models.cases import Case

CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": ("recompute",),
    "offload": ("offload",),
    "both": ("recompute", "offload"),
    "all": ("recompute", "offload", "chunk"),
}
BUDGETS = {"60%": 0.6, "20%": 0.2, "smallest": 0.0}
_TIE_MS = 1e-6


def _built(name: str) -> Case:
    return Case(*gpu_models.build(name, "meta", torch.bfloat16, autocast=False))


MODELS: dict[str, Callable[[], Case]] = {
    **{name: lambda name=name: _built(name) for name in gpu_models.MODELS},  # type: ignore[misc]
    "llama-3-8b": lambda: chunk_models.OFFLOADED["llama-3-8b"](8192, num_hidden_layers=8),
}


def planned(case: Case, profile: sacplan.Profile, budget_bytes: int, choice: str) -> Row:
    """Return what a budget costs by a choice of techniques."""
    plan, peak = plan_or_least(profile, budget_bytes, techniques=CHOICES[choice])
    if plan is None:
        return {"held": False, "peak_bytes": peak}
    row: Row = {
        "held": True,
        "peak_bytes": peak,
        "longer_ms": plan.recompute_ms + plan.added_ms,
        "recompute_ms": plan.recompute_ms,
        "host_bytes": plan.host_bytes,
        "offloaded": len(plan.offloaded),
        "chunks": len(plan.chunks),
        "status": plan.status,
    }
    if plan.offloaded:
        seen, row["simulated_ms"] = simulated(case, plan, profile.spec)
        row["planned_ms"] = planned_ms(profile, plan)
        peaks = seen.program.footprint
        row["exact"] = (peaks.peak_bytes, peaks.host_peak_bytes) == (plan.peak_bytes, plan.host_bytes)
    return row


def worse(found: dict[str, Row]) -> list[str]:
    """Return the choices that cost more than one that they contain."""
    return [
        f"{more} costs more than {less}"
        for more in CHOICES
        for less in CHOICES
        if set(CHOICES[less]) < set(CHOICES[more]) and found[less]["held"]
        if not found[more]["held"] or found[more]["longer_ms"] > found[less]["longer_ms"] + _TIE_MS
    ]


def apart(plans: Iterable[Row]) -> float:
    """Return by which share planned and simulated times differ at most."""
    both = [(row["planned_ms"], row["simulated_ms"]) for row in plans if "simulated_ms" in row]
    return max((abs(planned / simulated - 1) for planned, simulated in both), default=0.0)


def rows_of(name: str, device: str) -> Iterator[Row]:
    """Yield the row of a model."""
    case = MODELS[name]()
    profile = case.profile(device)
    smallest = {
        choice: sacplan.plan(profile, "smallest", techniques=techniques).peak_bytes
        for choice, techniques in CHOICES.items()
    }
    budgets = {}
    for budget, share in BUDGETS.items():
        budget_bytes = budget_at(share, smallest["recompute"], profile.peak_bytes)
        found = {choice: planned(case, profile, budget_bytes, choice) for choice in CHOICES}
        budgets[budget] = {"budget_bytes": budget_bytes, **found, "worse": worse(found)}
    yield {
        "apart": apart(found for budget in budgets.values() for found in map(budget.__getitem__, CHOICES)),
        "model": name,
        "device": device,
        "plain_peak_bytes": profile.peak_bytes,
        "plain_step_ms": profile.step_ms,
        "smallest_peak_bytes": smallest,
        "budgets": budgets,
    }


def _cells(row: Row) -> Iterator[str]:
    """Yield the cells of a model: for its three budgets, by how many ms the step becomes longer."""
    of = list(row["budgets"].values())
    yield f"`{row['model']}`"
    yield f"{row['plain_peak_bytes'] / GIB:.2f} GiB, {row['plain_step_ms']:.1f} ms"
    yield ", ".join(f"{each['budget_bytes'] / GIB:.2f}" for each in of)
    for choice in CHOICES:
        yield ", ".join(f"{each[choice]['longer_ms']:.2f}" if each[choice]["held"] else "over" for each in of)
    yield ", ".join(f"{each['both']['host_bytes'] / GIB:.2f}" if each["both"]["held"] else "-" for each in of)


def table(rows: Iterable[Row]) -> str:
    """Return the table of the page."""
    heads = f"model | step | budgets, GiB | {' | '.join(CHOICES)} | host, both, GiB"
    return markdown_table(heads, map(_cells, rows))


TABLE = PageTable("offload", "offload.md", table)


def main() -> None:
    parser = Parser(__doc__, "offload.json", TABLE)
    parser.choice("--models", MODELS)
    parser.add_argument("--device", default="h100")
    arguments = parser.begin(silence=True)
    run_cases(arguments.models, lambda name: rows_of(name, arguments.device), arguments.json, key="model")


if __name__ == "__main__":
    main()
