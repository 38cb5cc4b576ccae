"""What does a plan for LoRA training on a small GPU cost, and what does swapping blocks by hand cost there?

    python -m benchmarks.swapping [--models 'flux, 512'] [--devices 12GB 16GB]
    python -m benchmarks.swapping --table      # puts the table on docs/offload.md

Models: the denoisers of Flux, for images of 512 and 1,024 pixels, and of Wan, for 33 frames of 832 x 480, from their
published configurations, in bfloat16, with adapters of rank 16; nothing is computed. A row is a model on a GPU of 12,
16 or 24 GB, without a budget: the step has to fit the device. The plan may recompute and offload.

By hand: every block is checkpointed, as trainers that swap blocks do, and N blocks keep their frozen weights on the
host. The best N is looked for: the cheapest of the first N, the last N and N at even distances, fetched ahead or when
they are needed, whose peak is no higher than the plan's limit. Both are priced by the same clocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import GIB, Row
from benchmarks.harness.table import PageTable, markdown_table
from sacplan.cli.targets import load_target
from sacplan.core.decisions import Decision
from sacplan.core.program import Program
from sacplan.integrations.hf.target import ModelOptions
from sacplan.planning.candidate import Candidate
from sacplan.planning.request import Request
from sacplan.techniques.base.regions import Option, Region
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.registry import TECHNIQUES as ALL
from sacplan.techniques.registry import regions, rewritten

TARGETS = {
    "flux, 512": "diffusers:FLUX.1-dev@512x512",
    "flux, 1024": "diffusers:FLUX.1-dev@1024x1024",
    "wan-14b, 33 frames": "diffusers:Wan2.1-T2V-14B-Diffusers@832x480x33",
}
DEVICES = ("12GB", "16GB", "24GB")
TECHNIQUES = ("recompute", "offload")


def row_of(model: str, device: str) -> Row:
    """Return the row of a model on a GPU."""
    target = load_target(TARGETS[model], ModelOptions(dtype="bfloat16", lora="r=16"))
    profile = sacplan.profile(target.model, target.batch, target.loss_fn, target.optimizer, device=device)
    row: Row = {
        "case": f"{model} on {device}",
        "model": model,
        "target": TARGETS[model],
        "device": device,
        "plain_peak_bytes": profile.peak_bytes,
        "plain_step_ms": profile.step_ms,
    }
    began = time.process_time()
    try:
        plan = sacplan.plan(profile, techniques=TECHNIQUES)
    except sacplan.InfeasibleBudget as error:
        return row | {"held": False, "smallest_bytes": error.smallest_feasible_bytes}
    return row | {
        "held": True,
        "planning_cpu_s": time.process_time() - began,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "longer_ms": plan.recompute_ms + plan.added_ms,
        "host_bytes": plan.host_bytes,
        "by_hand": best_within(ways_by_hand(profile), plan.budget_bytes),
    }


@dataclass(frozen=True)
class Swapped:
    """A step with every block checkpointed, of which some keep their frozen weights on the host."""

    step: PlanStep
    checkpointed: tuple[Decision, ...]
    program: Program
    blocks: list[Region]

    def with_weights_of(self, blocks: Iterable[Region], *, ahead: bool) -> Candidate:
        """Return the step with the weights of these blocks on the host."""
        taken = [(block, _all_weights(block, ahead=ahead)) for block in blocks]
        weights = ALL["offload"].decisions(self.program, taken)
        return Candidate(self.step, (*self.checkpointed, *weights), "feasible")


def swapped(profile: sacplan.Profile) -> Swapped:
    """Return the step whose blocks can be swapped by hand."""
    step = Request(techniques=TECHNIQUES).planner(profile).basis.recorded
    checkpointed = sacplan.policy("full", profile=profile).decisions
    program = rewritten(step.program, checkpointed, step.device)
    found = regions(step, 1, TECHNIQUES)
    blocks = [region for region in found if not region.members and "blocks." in region.unit]
    return Swapped(step, checkpointed, program, blocks)


def ways_by_hand(profile: sacplan.Profile) -> list[Row]:
    """Return all ways to swap N blocks, each with its time and its peak."""
    by_hand = swapped(profile)
    blocks = by_hand.blocks
    rows: list[Row] = []
    for n, ahead in product(range(len(blocks) + 1), (True, False)):
        even = [blocks[i * len(blocks) // n] for i in range(n)]
        for which, chosen in {"first": blocks[:n], "last": blocks[len(blocks) - n :], "even": even}.items():
            one = by_hand.with_weights_of(chosen, ahead=ahead)
            about = {"blocks": n, "of": len(blocks), "which": which, "ahead": ahead}
            rows.append(about | {"longer_ms": one.cost, "peak_bytes": one.footprint.peak_bytes})
    return rows


def best_within(ways: list[Row], limit_bytes: int) -> Row | None:
    """Return the cheapest of these ways whose peak is within a limit; None if there is none."""
    fitting = (row for row in ways if row["peak_bytes"] <= limit_bytes)
    return min(fitting, key=lambda row: row["longer_ms"], default=None)


def _all_weights(region: Region, *, ahead: bool) -> Option:
    most = max(option.host_bytes for option in region.options)
    whole = [option for option in region.options if option.host_bytes == most]
    return (min if ahead else max)(whole, key=lambda option: option.cost)


def _cells(row: Row) -> list[str]:
    """Return the step as it is, with the plan, and with the best N blocks by hand."""
    plain = f"{row['plain_peak_bytes'] / GIB:.1f} GiB, {row['plain_step_ms'] / 1e3:.2f} s"
    cells = [f"`{row['model']}`", row["device"], plain]
    if not row["held"]:
        return [*cells, f"smallest {row['smallest_bytes'] / GIB:.1f} GiB", *["-"] * 4]
    step, hand = row["plain_step_ms"] + row["longer_ms"], row["by_hand"]
    cells += [f"{step / 1e3:.2f} s, {row['peak_bytes'] / GIB:.1f} GiB", f"{row['host_bytes'] / GIB:.1f} GiB"]
    if hand is None:
        return [*cells, "none fits", "-", "-"]
    by_hand = row["plain_step_ms"] + hand["longer_ms"]
    cells += [f"{hand['blocks']} of {hand['of']} ({hand['which']})", f"{by_hand / 1e3:.2f} s"]
    return [*cells, f"{by_hand / step - 1:.0%}"]


def table(rows: Iterable[Row]) -> str:
    """Return the table of the page."""
    heads = "model | GPU | as it is | plan: step, peak | on the host | best by hand | its step | longer"
    return markdown_table(heads, map(_cells, rows))


TABLE = PageTable("swapping", "offload.md", table)


def main() -> None:
    parser = Parser(__doc__, "swapping.json", TABLE)
    parser.choice("--models", TARGETS)
    parser.choice("--devices", DEVICES)
    arguments = parser.begin(silence=True)
    cases = product(arguments.models, arguments.devices)
    run_cases(cases, lambda case: [row_of(*case)], arguments.json, key="case")


if __name__ == "__main__":
    main()
