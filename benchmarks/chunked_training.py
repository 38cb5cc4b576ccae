"""How much memory do chunks save beyond recomputation when the head is large, and what gradients do they give?

    python -m benchmarks.chunked_training [--models llama gpt2 large-vocabulary]

Models: twelve small language models of transformers with the loss inside, and one with the loss outside over 128,256
words; float32 on a CPU, dropout on. A row is a model, with its plain step and three plans: the smallest peak by
recomputation alone, a budget half way between that and the smallest peak with chunks, and that smallest peak. A plan's
peak is given as predicted, of a fake step, and as measured by the profiler's allocation events of a real one.

``gradients`` compares with the plain step: by how much the loss and the gradients of the head, and of what is tied to
it, are off (norm of the difference over norm), and how many of the other gradients have other bits. Added time is that
of the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import as_budget
from benchmarks.harness.results import MIB, Row
from benchmarks.harness.table import Table
from benchmarks.models.cases import Case
from benchmarks.models.chunk_models import TRAINING, large_vocabulary

CASES: dict[str, Callable[[], Case]] = {**TRAINING, "large-vocabulary": large_vocabulary}
BOTH = ("recompute", "chunk")

_TABLE = Table(
    ("MiB", ">17"), *((name, ">8.2f") for name in ("plain", "recomp.", "budget", "meas.", "smallest")),
    ("pred.err", ">9.4%"), ("loss", ">8.1e"), ("head", ">8.1e"), ("others", ">6"), ("+ms", ">8.2f"),
)  # fmt: skip


def step(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a step from a fixed seed; return the loss, and the gradients by name."""
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = case.model(**case.batch).loss if case.loss_fn is None else case.loss_fn(case.model, case.batch)
    loss.backward()
    found = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    case.model.zero_grad(set_to_none=True)
    return loss.detach() + 0, found


def gradients(case: Case, plan: sacplan.Plan) -> dict[str, Any]:
    """Return how far the loss and the gradients with a plan are from the plain step's."""
    loss, expected = step(case)
    with sacplan.apply(case.model, plan):
        got_loss, got = step(case)
    # Slices add up what a whole matmul adds in another order: the parameters of the units in slices are only close.
    units = [case.model.get_submodule(chunk.unit) for chunk in plan.chunks]
    inside = {id(p) for unit in units for p in unit.parameters()}
    near = {name for name, p in case.model.named_parameters() if id(p) in inside}
    off = [
        float((got[name].double() - expected[name].double()).norm() / expected[name].double().norm())
        for name in near
        if name in expected
    ]
    return {
        "loss": float((got_loss - loss).abs() / loss.abs()),
        "head": max(off, default=0.0),
        "others_with_other_bits": sum(
            not torch.equal(got[n], g) for n, g in expected.items() if n not in near
        ),
    }


def verified(case: Case, plan: sacplan.Plan) -> dict[str, Any]:
    """Return what a plan says, and what a fake and a real step with it take."""
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "fake_peak_bytes": case.verify(plan).peak_bytes,
        "measured_peak_bytes": case.verify(plan, run="real").peak_bytes,
        "recompute_ms": plan.recompute_ms,
        "added_ms": plan.added_ms,
        "slices": [chunk.slices for chunk in plan.chunks],
        "units": [chunk.unit for chunk in plan.chunks],
    }


def rows_of(name: str) -> Iterator[Row]:
    """Yield the row of a model."""
    case = CASES[name]()
    profile = case.profile("cpu")
    alone = sacplan.plan(profile, "smallest")
    smallest = sacplan.plan(profile, "smallest", techniques=BOTH)
    budget = (alone.peak_bytes + smallest.peak_bytes) // 2
    plan = sacplan.plan(profile, as_budget(budget), techniques=BOTH)
    yield {
        "model": name,
        "plain_peak_bytes": profile.peak_bytes,
        "step_ms": profile.step_ms,
        "recomputed": verified(case, alone),
        "half_way": verified(case, plan),
        "smallest": verified(case, smallest),
        "gradients": gradients(case, plan),
        "gradients_of_smallest": gradients(case, smallest),
    }


def _line(row: Row) -> str:
    peaks = [row["plain_peak_bytes"], row["recomputed"]["peak_bytes"], row["half_way"]["budget_bytes"]]
    peaks += [row["half_way"]["measured_peak_bytes"], row["smallest"]["measured_peak_bytes"]]
    worst = max(
        abs(row[kind]["peak_bytes"] / row[kind]["measured_peak_bytes"] - 1)
        for kind in ("recomputed", "half_way", "smallest")
    )
    off = row["gradients"]
    differences = off["loss"], off["head"], off["others_with_other_bits"]
    return _TABLE.row(
        row["model"], *(n / MIB for n in peaks), worst, *differences, row["half_way"]["added_ms"]
    )


def main() -> None:
    parser = Parser(__doc__, "chunked_training.json")
    parser.choice("--models", CASES)
    arguments = parser.begin(silence=True)
    print(_TABLE.head)
    run_cases(arguments.models, rows_of, _line, arguments.json)


if __name__ == "__main__":
    main()
