"""What do the checkpointing modes of today cost, beside a plan for the same bytes?

    python -m benchmarks.modes [--models gpt2 resnet50] [--json FILE]
    python -m benchmarks.modes --table      # puts the tables on docs/modes.md

Two models on an H100; nothing is computed, times are those of the cost model: GPT-2 of transformers (12 layers,
16 x 1024 tokens, bfloat16, AdamW with states in bfloat16 too, ``use_cache=False``), and ResNet-50 (16 blocks, 128
images of 224 x 224, float32, SGD with momentum).

A row is a mode of ``sacplan.policy``, as ``sacplan.frontier`` lists them: its peak, and what it recomputes. A fake step
with the mode applied must have the peak and the FLOPs that are predicted. Beside it, for the mode's peak as the budget,
stand the plans of "best" and "rotor"; ``-`` where a solver finds no plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import plan_or_least, timed
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models import cases
from benchmarks.models.cases import Case
from tests.zoo import convnets

DEVICE = "h100"
MODES: dict[str, tuple[str, int | str | None]] = {
    "none": ("none", None),
    "every 3rd layer": ("selective", 3),
    "every 2nd layer": ("selective", 2),
    "op, all matmuls kept": ("selective", "op-keep-matmuls"),
    "op": ("selective", "op"),
    "full": ("full", None),
}
"""What ``sacplan.policy`` takes, by the names of ``sacplan.frontier``."""

SOLVERS = ("best", "rotor")


def resnet50() -> Case:
    """Build ResNet-50, 26 M parameters, ReLUs in place."""
    with torch.device("meta"):
        model, batch = convnets.resnet50(), torch.empty(128, 3, 224, 224)
    return Case(model, batch, optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9))


MODELS: dict[str, tuple[str, Callable[[], Case]]] = {
    "gpt2": (
        "GPT-2 (12 layers, 16 x 1024 tokens, bfloat16, AdamW)",
        functools.partial(cases.gpt2, use_cache=False),
    ),
    "resnet50": ("ResNet-50 (128 images of 224 x 224, float32, SGD)", resnet50),
}


# --- figures ----------------------------------------------------------------------------------------------


def rows_of(name: str) -> list[Row]:
    """Return one row for each mode.

    Raises:
        AssertionError: a fake step does not do what its mode predicts.
    """
    title, build = MODELS[name]
    case = build()
    profile = case.profile(DEVICE)
    table = sacplan.frontier(profile, points=2, solvers=("best",))
    figures = {row["solver"]: row for row in table.to_dict("records")}
    figures["none"] = figures.pop("best")  # the last row of a solver is the unplanned step
    rows = []
    for mode, (kind, option) in MODES.items():
        if mode not in figures:  # the model has too few layers, or the mode discards nothing
            continue
        plan = sacplan.policy(kind, option, profile=profile)
        seen = case.verify(plan)
        predicted = tuple(figures[mode][k] for k in ("peak_bytes", "recompute_flops"))
        if predicted != (seen.peak_bytes, seen.recompute_flops):
            raise AssertionError(
                f"{name}, {mode}: predicted {predicted}, seen {(seen.peak_bytes, seen.recompute_flops)}"
            )
        rows.append(
            {"model": name, "title": title, "mode": mode, "unplanned_bytes": profile.peak_bytes}
            | {k: figures[mode][k] for k in _FIGURES}
            | {solver: _for_bytes(profile, plan.peak_bytes, solver) for solver in SOLVERS}
        )
    return rows


_FIGURES = ("peak_bytes", "recompute_ms", "recompute_share", "recompute_flops", "recompute_flops_share")


def _for_bytes(profile: sacplan.Profile, budget_bytes: int, solver: str) -> Row | None:
    """Return the figures of a solver's plan for a budget, or None where it finds none."""
    (plan, _), seconds = timed(lambda: plan_or_least(profile, budget_bytes, solver))
    if plan is None:
        return None
    return {
        "peak_bytes": plan.peak_bytes,
        "recompute_ms": plan.recompute_ms,
        "recompute_share": plan.recompute_ms / plan.step_ms,
        "recompute_flops": plan.recompute_flops,
        "recompute_flops_share": plan.recompute_flops / plan.step_flops,
        "lower_bound_share": plan.lower_bound_ms / plan.step_ms,
        "seconds": seconds,
    }


# --- tables -----------------------------------------------------------------------------------------------


def markdown(rows: list[Row], name: str) -> str:
    """Write the table of one model, under its title."""
    rows = [row for row in rows if row["model"] == name]
    heads = ["mode", "peak GiB", "recompute, % of time", "% of FLOPs"]
    heads += [f"{solver}: {share}" for solver in SOLVERS for share in ("% of time", "% of FLOPs")]
    lines = (
        (
            row["mode"],
            f"{row['peak_bytes'] / GIB:.2f}",
            *_shares(row),
            *(s for solver in SOLVERS for s in _shares(row[solver])),
        )
        for row in rows
    )
    return f"**{rows[0]['title']}**\n\n{markdown_table(' | '.join(heads), lines)}"


def _shares(figures: Row | None) -> tuple[str, str]:
    if figures is None:
        return "-", "-"
    return f"{100 * figures['recompute_share']:.1f}", f"{100 * figures['recompute_flops_share']:.1f}"


TABLE = PageTable("modes", "modes.md", lambda rows: "\n\n".join(markdown(rows, name) for name in MODELS))


def main() -> None:
    parser = Parser(__doc__, "modes.json", TABLE)
    parser.choice("--models", MODELS)
    arguments = parser.begin(silence=True)
    run_cases(arguments.models, rows_of, arguments.json, device=DEVICE)


if __name__ == "__main__":
    main()
