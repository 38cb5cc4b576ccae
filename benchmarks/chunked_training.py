"""Training with a large head: what plans with chunks reach beyond recomputation, and what gradients they give.

    python -m benchmarks.chunked_training [--models llama gpt2 large-vocabulary]

Twelve small language models of transformers with the loss inside, and one with the loss outside over 128,256 words;
float32 on a CPU, dropout on. For each: the peak of the plain step; the smallest peak by recomputation alone; a plan
with chunks for a budget half way between that and the smallest peak with chunks; and that smallest one. Peaks are
predicted, those of a fake step, and measured by the profiler's allocation events of a real one. ``gradients`` compares
with the plain step: by how much the loss and the gradients of the head, and of what is tied to it, are off (norm of the
difference over norm), and how many of the other gradients have other bits. Added time is that of the cost model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import sacplan
from benchmarks import common
from benchmarks.chunk_models import TRAINING, Case, large_vocabulary
from benchmarks.common import MIB, describe, machine, write_results

CASES: dict[str, Callable[[], Case]] = {**TRAINING, "large-vocabulary": large_vocabulary}
BOTH = ("recompute", "chunk")


def step(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients by name."""
    case.model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = case.model(**case.batch).loss if case.loss_fn is None else case.loss_fn(case.model, case.batch)
    loss.backward()
    found = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    case.model.zero_grad(set_to_none=True)
    return loss.detach() + 0, found


def gradients(case: Case, plan: sacplan.Plan) -> dict[str, Any]:
    """How far they are from the plain step's."""
    loss, expected = step(case)
    with sacplan.apply(case.model, plan):
        got_loss, got = step(case)
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
    """A plan, and what its step takes."""
    fake = sacplan.verify(case.model, case.batch, plan, case.loss_fn)
    real = sacplan.verify(case.model, case.batch, plan, case.loss_fn, run="real")
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "fake_peak_bytes": fake.peak_bytes,
        "measured_peak_bytes": real.peak_bytes,
        "recompute_ms": plan.recompute_ms,
        "added_ms": plan.added_ms,
        "slices": [chunk.slices for chunk in plan.chunks],
        "units": [chunk.unit for chunk in plan.chunks],
    }


def compared(name: str) -> dict[str, Any]:
    """One model."""
    case = CASES[name]()
    profile = sacplan.profile(case.model, case.batch, case.loss_fn, device="cpu")
    alone = sacplan.plan_smallest(profile)
    smallest = sacplan.plan_smallest(profile, techniques=BOTH)
    budget = (alone.peak_bytes + smallest.peak_bytes) // 2
    plan = sacplan.plan(profile, f"{budget}B", techniques=BOTH)
    return {
        "model": name,
        "plain_peak_bytes": profile.peak_bytes,
        "step_ms": profile.step_ms,
        "recomputed": verified(case, alone),
        "half_way": verified(case, plan),
        "smallest": verified(case, smallest),
        "gradients": gradients(case, plan),
        "gradients_of_smallest": gradients(case, smallest),
    }


def _line(row: dict[str, Any]) -> str:
    peaks = [row["plain_peak_bytes"], row["recomputed"]["peak_bytes"], row["half_way"]["budget_bytes"]]
    peaks += [row["half_way"]["measured_peak_bytes"], row["smallest"]["measured_peak_bytes"]]
    worst = max(
        abs(row[kind]["peak_bytes"] / row[kind]["measured_peak_bytes"] - 1)
        for kind in ("recomputed", "half_way", "smallest")
    )
    off = row["gradients"]
    return (
        f"{row['model']:>17}"
        + "".join(f"{n / MIB:9.2f}" for n in peaks)
        + f"{worst:10.4%} {off['loss']:8.1e} {off['head']:8.1e} {off['others_with_other_bits']:6} "
        f"{row['half_way']['added_ms']:8.2f}"
    )


def main() -> None:
    warnings.simplefilter("ignore")
    parser = common.parser(__doc__, "chunked_training.json")
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    print(describe(machine()))
    print(
        f"{'MiB':>17}{'plain':>9}{'recomp.':>9}{'budget':>9}{'meas.':>9}{'smallest':>9}"
        f"{'pred.err':>10} {'loss':>8} {'head':>8} {'others':>6} {'+ms':>8}"
    )
    rows = []
    for name in arguments.models:
        rows.append(compared(name))
        print(_line(rows[-1]), flush=True)
        write_results(arguments.json, rows)


if __name__ == "__main__":
    main()
