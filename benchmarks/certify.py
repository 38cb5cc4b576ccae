"""Is the peak of a whole run what ``sacplan.certify`` predicts from the lengths of its samples, and what do plans cost?

    python -m benchmarks.certify --data Alpaca ShareGPT --models gpt2
    python -m benchmarks.certify --table                        # what the file has, on docs/fit.md

A row is 300 steps of a small model of transformers on samples of one data set, with fused AdamW, the model's dropout,
and the loader's usual rules. The loop runs for real: once as it is, and once with the plans that ``certify`` finds. The
budget is what the largest batch takes with every layer checkpointed. There are up to three plans, each for a range of
lengths; one where all batches are about as large.

The measured peak is that of the profiler's allocation events over the whole run, from the first step on, plus the
model. ``over`` counts the steps of the planned run whose own peak is over the budget. The cost of a run is the FLOPs
that are recomputed, as a share of all FLOPs of the run without a plan: with these plans, with one plan for the largest
batch, and with every layer checkpointed in every step.

Lengths are drawn from published statistics (``benchmarks/data/lengths.json``). All are divided by one number for each
data set, with which the longest sample has 64 tokens: so a step takes milliseconds.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np
import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget
from benchmarks.harness.results import ROOT, Row
from benchmarks.harness.steps import run_peaks, seed_everything
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models import hf_models
from benchmarks.models.cases import fused_adamw
from sacplan.device.devices import resolve_device
from sacplan.questions.batch_sizes import Recordings
from sacplan.questions.lengths import Drawing, Shape, read_lengths
from sacplan.questions.scaled import SizedStep

STEPS, BATCH, LONGEST, BUCKETS = 300, 4, 64, 3
MODELS = ("gpt2", "llama", "gemma2", "bert", "t5")

Lengths = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Data:
    """A data set.

    Attributes:
        parts: Mean and standard deviation of the tokens in what a turn is made of.
        turns: In a sample, on average.
        cut: Tokens at which samples are cut.
        rules: How the loader makes batches, where that is not ``BATCH`` samples, padded.
        source: Where the statistics were published.
    """

    parts: list[tuple[float, float]]
    source: str
    turns: float = 1.0
    cut: int = 2048
    rules: dict[str, Any] = field(default_factory=dict)

    def lengths(self, rng: np.random.Generator, n: int) -> list[int]:
        """Draw tokens: turns are geometric, parts lognormal, as conversations and texts are found to be, nearly."""
        found = (
            sum(_drawn(rng, p) for p in self.parts * turns) for turns in rng.geometric(1 / self.turns, n)
        )
        return [math.ceil(LONGEST * min(tokens / self.cut, 1)) for tokens in found]


def _drawn(rng: np.random.Generator, part: tuple[float, float]) -> float:
    variance = np.log1p((part[1] / part[0]) ** 2)
    return rng.lognormal(np.log(part[0]) - variance / 2, np.sqrt(variance))


_TABLE = json.loads((ROOT / "benchmarks" / "data" / "lengths.json").read_text(encoding="utf-8"))
DATA = {name: Data(**row) for name, row in _TABLE.items()}


def drawing_of(name: str) -> Drawing:
    """Return the samples of a run and the rules of its loader."""
    data = DATA[name]
    rules = {"batch": BATCH} | data.rules
    rng = np.random.default_rng(list(DATA).index(name))
    lengths = read_lengths(data.lengths(rng, 2 * STEPS * BATCH), None)

    def steps(n: int) -> int:
        return len(Drawing(lengths[:n], **rules).shapes()) if n >= BATCH else 0

    return Drawing(lengths[: bisect_left(range(len(lengths)), STEPS, key=steps)], **rules)


def made(name: str) -> tuple[torch.nn.Module, Callable[[int, int], Any]]:
    """Return a model, and what makes its batches."""
    seed_everything(0)
    model_class, config, make = hf_models.ARCHITECTURES[name]("small")
    if name == "gpt2":
        config.n_positions = LONGEST
    if name == "t5":  # its steps take the longest
        config.num_layers = config.num_decoder_layers = 1
    masked = "attention_mask" in make()

    def make_batch(n: int, seq: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, config.vocab_size, (n, seq))
        batch = {"input_ids": ids, "labels": ids}
        if masked:  # the first row is the longest, the others are padded
            batch["attention_mask"] = (torch.arange(seq) < torch.randint(1, seq + 1, (n, 1))).long()
            batch["attention_mask"][0] = 1
        return batch

    return model_class(config).train(), make_batch


def _peaks(name: str, shapes: Sequence[Shape], plans: Sequence[sacplan.Plan]) -> list[int]:
    model, make_batch = made(name)
    return run_peaks(model, itertools.starmap(make_batch, shapes), len(shapes), fused_adamw, plans=plans)


@functools.cache
def _checkpointed(name: str) -> Callable[[Shape], int]:
    """Return what checkpointing every layer recomputes in a step of a shape."""
    model, make_batch = made(name)
    recordings = Recordings(model, make_batch, resolve_device("cpu"), {"optimizer": fused_adamw})
    steps = SizedStep(recordings.at, [(1, 1), (BATCH, LONGEST)])
    full = sacplan.policy("full", profile=steps.recorded(BATCH, LONGEST)).decisions
    return functools.cache(lambda shape: steps.at(*shape).with_plan(full).footprint.recompute_flops)


def row_of(data: str, name: str) -> Row:
    """Run one model on one data set."""
    drawing = drawing_of(data)
    shapes = drawing.shapes()
    model, make_batch = made(name)
    rules = {"batch": BATCH} | DATA[data].rules
    largest = make_batch(*max(shapes, key=lambda shape: (math.prod(shape), shape[1])))
    profile = sacplan.profile(model, largest, optimizer=fused_adamw, device="cpu")
    budget = sacplan.policy("full", profile=profile).peak_bytes
    found = sacplan.certify(
        model, make_batch, drawing.lengths, "cpu", optimizer=fused_adamw, budget=as_budget(budget),
        buckets=1 if {"tokens", "pack"} & {*rules} else BUCKETS, **rules,
    )  # fmt: skip
    plain, one, last = found.rows[0], found.rows[1], found.rows[-1]
    peaks, planned = (_peaks(name, shapes, plans) for plans in ((), [plan for _, plan in found.plans]))
    return {
        "case": f"{data}, {name}", "data": data, "model": name, "steps": len(shapes), "shapes": len(set(shapes)),
        "median": median(seq for _, seq in shapes), "longest": max(seq for _, seq in shapes),
        "predicted": plain.allocated_bytes, "measured": max(peaks), "budget": budget, "plans": len(found.plans),
        "planned_predicted": last.allocated_bytes, "planned_measured": max(planned),
        "over": sum(peak > budget for peak in planned), "one": one.recompute_flops / plain.run_flops,
        "by_length": last.recompute_flops / plain.run_flops,
        "checkpointed": sum(map(_checkpointed(name), shapes)) / plain.run_flops,
    }  # fmt: skip


def _cells(data: str, rows: list[Row]) -> list[str]:
    mine = [row for row in rows if row["data"] == data]
    sizes = (f"{mine[0][key]:.0f}" for key in ("shapes", "median", "longest"))
    costs = (f"{mean(row[key] for row in mine):.1%}" for key in ("by_length", "one", "checkpointed"))
    return [data, *sizes, *costs]


def table(rows: list[Row]) -> str:
    """Write the table of the page: a line for each data set."""
    heads = "lengths as in | shapes | median length | longest | plans by length | one plan | checkpointing"
    return markdown_table(heads, (_cells(data, rows) for data in DATA))


TABLE = PageTable("certify", "fit.md", table)


def main() -> None:
    parser = Parser(__doc__, "certify.json", TABLE)
    parser.choice("--data", DATA)
    parser.choice("--models", MODELS)
    torch.set_num_threads(1)
    arguments = parser.begin(silence=True)
    cases = itertools.product(arguments.data, arguments.models)
    run_cases(cases, lambda case: [row_of(*case)], arguments.json, key="case", row_a_line=True)


if __name__ == "__main__":
    main()
