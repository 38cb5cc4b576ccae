"""Does anybody else's way to trade memory for recomputation beat sacplan's plans, measured with other people's tools?

    python -m benchmarks.frontier [--cases seed seed-dropout gpt2 llama vit] [--json FILE]

For each model, all rivals of ``benchmarks/rivals.py`` run a fake training step; then sacplan plans for each rival's
measured peak, and for budgets in between. A row is one such step: its measured peak, and the FLOPs that it recomputes
as a share of the plain step's. Everything is measured by torch's MemTracker and FlopCounterMode on the same step.
sacplan counts what kernels allocate inside and the allocator's rounding, MemTracker does not; so the budget given to
sacplan is moved until the plan's *measured* peak is at most the rival's.

A verdict stands beside each rival: the FLOPs that sacplan's plan recomputes at no more memory, against the rival's.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import masking_utils

import sacplan
from benchmarks import rivals
from benchmarks.harness.command import Parser
from benchmarks.harness.plans import as_budget
from benchmarks.harness.results import GIB, ROOT, as_text, write_results
from benchmarks.models import hf_models
from benchmarks.rivals import Case, Point
from examples.transformer import Transformer

PICTURE = ROOT / "docs" / "images" / "frontier.png"
_BUDGETS = 8  # of the sweep
_TRIES = 4  # at moving the budget until the measured peak is that of the rival


# --- models -----------------------------------------------------------------------------------------------


def _seed(dropout: float) -> Case:
    return Case(
        name="seed-dropout" if dropout else "seed",
        title=f"the example's transformer, float32, dropout {dropout:g}",
        make_model=lambda: Transformer(dropout=dropout),
        make_batch=lambda: torch.randint(0, 8192, (8, 1024)),
        layers="layers",
    )


def _of_transformers(name: str, title: str, layers: str, dtype: torch.dtype = torch.float32) -> Case:
    model_class, config, make_batch = hf_models.ARCHITECTURES[name]("frontier")

    def make_model() -> torch.nn.Module:
        return model_class._from_config(config, dtype=dtype)

    return Case(name, title, make_model, make_batch, layers)


CASES = {
    case.name: case
    for case in (
        _seed(0.0), _seed(0.1),
        _of_transformers("gpt2", "GPT-2, 6 layers of 768, 4 x 1024 tokens, float32", "transformer.h"),
        _of_transformers(
            "llama", "Llama, 6 layers of 1024, 4 x 2048 tokens, bfloat16", "model.layers", torch.bfloat16
        ),
        _of_transformers("vit", "ViT, 6 layers of 768, 64 images, float32", "vit.layers"),
    )
}  # fmt: skip


# --- figures ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A measured point of one model; ``versus`` is the rival whose peak sacplan planned for."""

    model: str
    who: str
    setting: str
    peak_gib: float
    recompute_percent: float
    versus: str = ""


def rival_points(case: Case) -> Iterator[Point]:
    """Measure all rivals."""
    for k in (1, 2, 3):
        yield rivals.checkpoint_every(case, k)
    for every_second in (True, False):
        yield rivals.checkpoint_by_op(case, every_second=every_second)
    for budget in rivals.COMPILE_BUDGETS:
        yield rivals.compiled(case, budget)
    try:
        yield from rivals.prototype(case)
    except rivals.NotApplicable as error:
        print(f"   prototype: {error}", flush=True)


class Ours:
    """sacplan's plans for one model, each measured once."""

    def __init__(self, case: Case, plain: Point) -> None:
        self.case = case
        self.profile = sacplan.profile(rivals.meta_model(case), case.make_batch(), device=rivals.DEVICE)
        self._unseen = self.profile.peak_bytes - plain.peak_bytes  # what only sacplan counts
        self._measured: dict[Any, Point] = {}

    def at_budget(self, budget_bytes: int) -> tuple[sacplan.Plan, Point]:
        """Plan for a budget, and measure the plan.

        Raises:
            sacplan.InfeasibleBudget: there is no plan.
        """
        plan = sacplan.plan(self.profile, as_budget(budget_bytes), objective="flops")
        key = frozenset(plan.decisions)
        if key not in self._measured:
            self._measured[key] = rivals.planned(self.case, plan, f"{budget_bytes / GIB:.4f} GiB")
        return plan, self._measured[key]

    def under(self, peak_bytes: int) -> Point | None:
        """Find the plan with the fewest FLOPs whose measured peak is at most that; None if no plan gets there.

        The budget is ``peak_bytes`` and what only sacplan counts, which differs from plan to plan. It starts at that of
        the plain step, follows the last plan's, and is bisected once a value that fits and one that does not are known.
        """
        best: Point | None = None
        low = high = None  # bytes over ``peak_bytes`` that were added and fitted, and that did not
        unseen = self._unseen
        for _ in range(_TRIES):
            try:
                plan, point = self.at_budget(peak_bytes + unseen)
            except sacplan.InfeasibleBudget:
                break
            over, now = point.peak_bytes - peak_bytes, plan.peak_bytes - point.peak_bytes
            if over <= 0:
                best = point if best is None or point.flops < best.flops else best
                low, unseen = unseen, max(now, unseen + peak_bytes // 1000)  # room for a cheaper one?
            else:
                high, unseen = unseen, min(now, unseen - over)
            if low is not None and high is not None:
                unseen = (low + high) // 2
        return best

    def sweep(self) -> list[Point]:
        """Measure plans at budgets from the smallest feasible one to the unplanned peak."""
        smallest = sacplan.plan(self.profile, "smallest", objective="flops").peak_bytes
        largest = self.profile.peak_bytes
        budgets = [smallest + (largest - smallest) * i // _BUDGETS for i in range(_BUDGETS + 1)]
        return [self.at_budget(budget)[1] for budget in budgets]


def rows_of(case: Case) -> list[Row]:
    """Measure rivals, sacplan at each rival's peak, and sacplan's own sweep; print as it goes."""
    print(f"\n{case.title}")
    plain = rivals.unplanned(case)

    def row(point: Point, versus: str = "") -> Row:
        share = 100 * (point.flops / plain.flops - 1)
        return Row(case.name, point.who, point.setting, point.peak_bytes / GIB, share, versus)

    rows = [row(plain)]
    _print(rows[0])
    ours = Ours(case, plain)
    for point in rival_points(case):
        theirs, found = row(point), ours.under(point.peak_bytes)
        mine = row(found, f"{point.who} {point.setting}") if found is not None else None
        rows += [theirs] if mine is None else [theirs, mine]
        _print(theirs, verdict(theirs, mine))
    for point in ours.sweep():
        rows.append(row(point))
        _print(rows[-1])
    return rows


def verdict(theirs: Row, mine: Row | None) -> str:
    """Say how sacplan compares with one rival."""
    if mine is None:
        return "ours: no plan at that peak"
    gap = mine.recompute_percent - theirs.recompute_percent
    word = "equal" if abs(gap) < 0.005 else f"below by {-gap:.2f}" if gap < 0 else f"ABOVE by {gap:.2f}"
    return f"ours {mine.recompute_percent:.2f} % at {mine.peak_gib:.4f} GiB: {word}"


def _print(row: Row, words: str = "") -> None:
    print(as_text(dataclasses.asdict(row)), words, flush=True)


# --- picture ----------------------------------------------------------------------------------------------

_STYLE = {  # Okabe and Ito's colours, and a marker of its own for each
    "compile": ("#D55E00", "s", "torch.compile, activation_memory_budget"),
    "prototype": ("#009E73", "^", "torch.distributed._tools (prototype)"),
    "checkpoint": ("#CC79A7", "D", "torch.utils.checkpoint: every 1, 2, 3 layers"),
    "by op": ("#E69F00", "P", "selective contexts: all, every second matmul"),
    "unplanned": ("#000000", "*", "no checkpointing"),
}
_OURS = "#0072B2"


def picture(rows: list[Row]) -> None:
    """Draw one panel per model: rivals as markers, sacplan's measured plans as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.model for row in rows))
    columns = min(3, len(names) + 1)
    lines = -(-(len(names) + 1) // columns)  # one more for the legend
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.9 * lines), squeeze=False)
    panels = list(axes.flat)
    for axis, name in zip(panels, names, strict=False):
        here = [row for row in rows if row.model == name]
        line = _undominated([row for row in here if row.who in ("sacplan", "unplanned")])
        axis.plot(
            [r.peak_gib for r in line], [r.recompute_percent for r in line],
            color=_OURS, marker="o", markersize=4, linewidth=2, label="sacplan", zorder=3,
        )  # fmt: skip
        for who, (colour, marker, label) in _STYLE.items():
            points = [row for row in here if row.who == who]
            axis.scatter(
                [r.peak_gib for r in points], [r.recompute_percent for r in points],
                color=colour, marker=marker, s=90 if marker in "*P" else 48, label=label, zorder=4,
                edgecolors="white", linewidths=0.6,
            )  # fmt: skip
        axis.set_title(CASES[name].title, fontsize=9.5)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.set_ylim(bottom=-1)
        axis.set_xlabel("measured peak, GiB")
        axis.set_ylabel("recompute, % of the step's FLOPs")
    legend = panels[len(names)]
    for axis in panels[len(names) :]:
        axis.axis("off")
    legend.legend(*panels[0].get_legend_handles_labels(), loc="center", fontsize=10, frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def _undominated(rows: list[Row]) -> list[Row]:
    """Return the rows that no other row beats on both axes, by falling peak."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda r: (r.peak_gib, r.recompute_percent)):
        if not kept or row.recompute_percent < kept[-1].recompute_percent:
            kept.append(row)
    return kept[::-1]


def main() -> None:
    parser = Parser(__doc__, "frontier.json")
    parser.choice("--cases", CASES)
    transformers.logging.set_verbosity_error()
    arguments = parser.begin()
    began = time.perf_counter()
    rows: list[Row] = []
    for name in arguments.cases:
        # transformers looks at values to tell whether sequences are packed, and fake tensors have none.
        with mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
            rows += rows_of(CASES[name])
        seconds = round(time.perf_counter() - began, 1)
        write_results(arguments.json, [dataclasses.asdict(row) for row in rows], seconds=seconds)
        picture(rows)


if __name__ == "__main__":
    main()
