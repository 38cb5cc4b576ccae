"""How long a sequence fits one GPU with offloading, chunks and the optimizer on the host, and what does it cost?

    python -m benchmarks.offloaded_sequences [--cases llama-3-8b-h100 gemma-2-2b-h100] [--steps short long longest]
    python -m benchmarks.offloaded_sequences --table    # puts the table on docs/offload.md

Models: the shapes of Llama-3-8B and Gemma-2-2B for an H100, and of Llama-3.2-1B and 3B for an RTX 4090, with all their
layers, in bfloat16, one sequence, on the meta device; nothing is computed. The optimizer is torchao's AdamW on the
host, which moves each gradient there as soon as it is there. Techniques: recomputation, chunks and offloading. The
budget is the device's memory less 15 %. The host's is what the device's row says of it, or all that a machine with
eight such devices has (``-node``), for the optimizer and for what waits there together.

A row is a step of a model:

- ``short``: the smallest peak of a step of 8,192 tokens.
- ``long``: the plan for the budget at a length that is given.
- ``longest``: the plan for the budget at the longest of a few lengths. They are tried in rising order, each with a
  search of its own, up to the first that does not fit, whose smallest peak is in the row. So a length between two of
  them may fit as well, and if the last one fits, so may a longer one.

Each has the figures of the plan, and the peaks of a fake step with it, on the device and on the host. ``planning_s`` is
processor time. The file keeps the rows that a run does not make again.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models import chunk_models
from benchmarks.models.cases import Case
from sacplan.device.devices import resolve_device
from sacplan.planning.limits import DEFAULT_HEADROOM

TECHNIQUES = ("recompute", "chunk", "offload")
OPTIMIZER = "adamw-offload-gradients"
SHORT = 8192


@dataclass(frozen=True, slots=True)
class Asked:
    """A model and a device.

    Attributes:
        model: One of ``chunk_models.OFFLOADED``.
        device: The name of a device.
        tokens: The length of the step ``long``.
        lengths: Lengths to try for the step ``longest``, in rising order; the first one fits.
        shares: Of the host's memory, how many devices' shares the step may take.
    """

    model: str
    device: str
    tokens: int
    lengths: tuple[int, ...]
    shares: int = 1

    def case(self, tokens: int) -> Case:
        """Build the step of so many tokens."""
        return dataclasses.replace(chunk_models.OFFLOADED[self.model](tokens), optimizer=OPTIMIZER)

    @property
    def host_budget_bytes(self) -> int:
        """The memory of the host that the step may take."""
        return self.shares * resolve_device(self.device).host_memory_bytes


STEPS = ("short", "long", "longest")
CASES = {
    "llama-3-8b-h100": Asked("llama-3-8b", "h100", 262144, (262144, 393216, 524288)),
    "llama-3-8b-h100-node": Asked("llama-3-8b", "h100", 524288, (655360,), shares=8),
    "gemma-2-2b-h100": Asked("gemma-2-2b", "h100", 16384, (16384, 32768)),
    "llama-3.2-1b-4090": Asked("llama-3.2-1b", "rtx-4090", 262144, (262144, 393216)),
    "llama-3.2-3b-4090": Asked("llama-3.2-3b", "rtx-4090", 131072, (131072, 196608)),
}


def figures(asked: Asked, tokens: int, plan_of: Callable[[sacplan.Profile], sacplan.Plan]) -> Row:
    """Plan a step of so many tokens; return the plan's figures, and the peaks of a fake step with it."""
    case = asked.case(tokens)
    profile = case.profile(asked.device)
    began = time.process_time()
    plan = plan_of(profile)
    took = time.process_time() - began
    fake = case.verify(plan)
    return {
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


def longest(asked: Asked, plan_of: Callable[[sacplan.Profile], sacplan.Plan]) -> Row:
    """Return the figures of the longest step that fits, and the smallest peak of the first one that does not.

    Raises:
        InfeasibleBudget: Not even the first one fits.
    """
    row: Row = {}
    over: dict[int, int] = {}
    for tokens in asked.lengths:
        try:
            row = figures(asked, tokens, plan_of)
        except sacplan.InfeasibleBudget as error:
            if not row:
                raise
            over[tokens] = error.smallest_feasible_bytes
            break
    return row | {"over": over}


def measured(name: str, step: str) -> Row:
    """Return the row of a step of a case."""
    asked = CASES[name]
    spec = resolve_device(asked.device)
    budget_bytes = spec.memory_bytes - int(DEFAULT_HEADROOM * spec.memory_bytes)
    options = {"techniques": TECHNIQUES, "host_budget": as_budget(asked.host_budget_bytes)}

    def smallest(profile: sacplan.Profile) -> sacplan.Plan:
        return sacplan.plan(profile, "smallest", **options)

    def within(profile: sacplan.Profile) -> sacplan.Plan:
        return sacplan.plan(profile, as_budget(budget_bytes), **options)

    row: Row = {
        "row": f"{name}, {step}",
        "case": name,
        "step": step,
        "model": asked.model,
        "device": spec.name,
        "budget_bytes": budget_bytes,
        "host_budget_bytes": asked.host_budget_bytes,
    }
    if step == "short":
        return row | figures(asked, SHORT, smallest)
    if step == "long":
        return row | figures(asked, asked.tokens, within)
    return row | longest(asked, within)


def _cells(row: Row) -> tuple[str, ...]:
    what = {"short": ", smallest peak", "long": "", "longest": ", the longest"}[row["step"]]
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
    ordered = sorted(rows, key=lambda row: (names.index(row["case"]), STEPS.index(row["step"])))
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
    parser.choice("--steps", STEPS)
    arguments = parser.begin(silence=True)
    asked = itertools.product(arguments.cases, arguments.steps)
    run_cases(asked, lambda one: [measured(*one)], arguments.json, key="row")


if __name__ == "__main__":
    main()
