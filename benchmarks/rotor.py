"""The Rotor solver: seconds and memory, engine by engine, and its plans beside those of the other solvers.

    python -m benchmarks.rotor [--sections engines plans]
                               [--stages 20 80 150] [--slots 500] [--engines fast reference] [--json FILE]
                               [--models resnet50 densenet121 gpt2 vit] [--plans-json FILE]

engines: chains are random, from a fixed seed: 4 to 12 KB for the output of a stage and up to 20 KB more saved. The
budget is a share of what the step keeps without recomputation. Each figure is one run in a process of its own. Memory
is the growth of the peak resident size while the solver ran (Linux), and the bytes that Python and numpy had
allocated at the most (the fast engine; traced in a second run, since tracing takes time). Engines must agree on a
digest of table, choices and operations.

plans: what rotor, best and greedy recompute for the same budgets on an H100, nothing computed, and the smallest peaks
that rotor and best reach. ResNet-50 at 4000 and DenseNet-121 at 8080 MiB (128 images of 224 x 224, the cases of
ColossalAI's test of its Rotor), GPT-2 (12 layers, 16 x 1024 tokens) and ViT-B/16 (128 images), both bfloat16, at 70 and
55 % of the unplanned peak. Every plan is run as a fake step: peak and FLOPs must be those of the plan. ``most`` is how
often the op that runs most often does so again; ``asked`` what Rotor itself, which counts whole stages, in slots, and
gradients that are not there, thinks that its sequence recomputes for that budget; ``-`` where it finds none. In the
last column is what no schedule with the plan's peak undercuts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sacplan
from benchmarks import common
from benchmarks.common import MIB, RESULTS, describe, machine, write_results
from benchmarks.rotor_reference import ENGINES
from sacplan._recompute.rewrite import recomputed
from sacplan._rotor.stages import stages_of
from tests.zoo import convnets

SECTIONS = ("engines", "plans")
DEVICE = "h100"
SOLVERS = ("rotor", "best", "greedy")
_COLUMNS = ("seconds", "cpu_seconds", "peak_growth_mb", "traced_mb")


def main() -> None:
    parser = common.parser(__doc__, "rotor.json")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--stages", type=int, nargs="+", default=[20, 80, 150])
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--share", type=float, default=0.4, help="budget, of what the step takes unplanned")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--plans-json", type=Path, default=RESULTS / "rotor_plans.json")
    parser.add_argument("--one", nargs=3, metavar=("ENGINE", "STAGES", "TRACE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        engine, stages, trace = arguments.one
        print(json.dumps(run(engine, int(stages), arguments.slots, arguments.share, trace == "trace")))
        return
    print(describe(machine()))
    if "engines" in arguments.sections:
        _engines(arguments)
    if "plans" in arguments.sections:
        _plans(arguments)


# --- engines ----------------------------------------------------------------------------------------------


def _engines(arguments: argparse.Namespace) -> None:
    print(f"{'stages':>6} {'engine':>10} " + " ".join(f"{k:>15}" for k in _COLUMNS) + "  recomputation")
    rows = []
    for stages in arguments.stages:
        for engine in arguments.engines:
            row = _in_a_process(engine, stages, arguments.slots, arguments.share)
            rows.append(row)
            print(
                f"{stages:>6} {engine:>10} "
                + " ".join(f"{row[k]:15.2f}" if k in row else f"{'-':>15}" for k in _COLUMNS)
                + f"  {100 * (row['total_ms'] / row['step_ms'] - 1):.1f} %",
                flush=True,
            )
        same = {row["digest"] for row in rows if row["stages"] == stages}
        if len(same) > 1:
            raise SystemExit(f"the engines disagree on {stages} stages")
    write_results(arguments.json, rows)


def random_chain(stages: int, seed: int = 1) -> sacplan.Chain:
    """A chain of unlike stages."""
    rng = random.Random(seed)
    output = [rng.randint(4_000, 12_000) for _ in range(stages + 1)]
    return sacplan.Chain(
        [rng.uniform(1, 10) for _ in range(stages)],
        [rng.uniform(2, 20) for _ in range(stages + 1)],
        output,
        [size + rng.randint(0, 20_000) for size in output],
        [rng.randint(0, 4_000) for _ in range(stages)],
        [rng.randint(0, 12_000) for _ in range(stages + 1)],
    )


def run(engine: str, stages: int, slots: int, share: float, trace: bool) -> dict[str, Any]:
    """One solve, in this process."""
    chain = random_chain(stages)
    whole = chain.output_bytes[0] + sum(chain.saved_bytes[1:]) + chain.output_bytes[-1]
    if trace:
        tracemalloc.start()
        ENGINES[engine](chain, int(share * whole), slots)
        return {"traced_mb": tracemalloc.get_traced_memory()[1] / 1e6}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _peak_resident_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    found = ENGINES[engine](chain, int(share * whole), slots)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    growth = _peak_resident_bytes() - before
    digest = hashlib.sha256(found.table.tobytes() + found.choices.tobytes() + repr(found.operations).encode())
    return {
        "stages": stages, "slots": slots, "engine": engine, "seconds": wall, "cpu_seconds": cpu,
        "peak_growth_mb": growth / 1e6, "total_ms": found.total_ms, "step_ms": chain.step_ms,
        "operations": len(found.operations), "digest": digest.hexdigest()[:16],
    }  # fmt: skip


def _peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _in_a_process(engine: str, stages: int, slots: int, share: float) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for trace in ("plain", "trace") if engine == "fast" else ("plain",):
        arguments = ("--slots", slots, "--share", share, "--one", engine, stages, trace)
        row |= common.in_own_process("rotor", *arguments)
    return row


# --- plans ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a batch on the meta device, and budgets; "smallest" is the least that the solver reaches."""

    model: torch.nn.Module
    batch: Any
    budgets: tuple[str, ...]


def _convnet(make: Callable[[], torch.nn.Module], *budgets: str) -> Case:
    with torch.device("meta"):
        return Case(make(), torch.empty(128, 3, 224, 224), budgets)


def gpt2() -> Case:
    """124 M parameters."""
    import transformers

    config = transformers.GPT2Config(use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).bfloat16()
    ids = torch.randint(0, config.vocab_size, (16, 1024))
    return Case(model, {"input_ids": ids, "labels": ids}, ("70%", "55%"))


def vit() -> Case:
    """87 M parameters."""
    import transformers

    with torch.device("meta"):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)).bfloat16()
        images = torch.empty(128, 3, 224, 224, dtype=torch.bfloat16)
    return Case(model, {"pixel_values": images, "labels": torch.randint(0, 1000, (128,))}, ("70%", "55%"))


MODELS: dict[str, Callable[[], Case]] = {
    "resnet50": lambda: _convnet(convnets.resnet50, "4000MiB"),
    "densenet121": lambda: _convnet(convnets.densenet121, "8080MiB"),
    "gpt2": gpt2,
    "vit": vit,
}


def plan_rows(name: str, case: Case) -> Iterator[dict[str, Any]]:
    """A row for each budget and solver, then the smallest peaks of rotor and best.

    Raises:
        AssertionError: a fake step with a plan applied does something else than the plan says.
    """
    profile = sacplan.profile(case.model, case.batch, device=DEVICE)
    sacplan.plan(profile, "99%")  # what solvers share is not part of their seconds
    for budget in (*case.budgets, "smallest"):
        for solver in SOLVERS if budget != "smallest" else SOLVERS[:2]:
            row: dict[str, Any] = {
                "model": name, "budget": budget, "solver": solver, "unplanned_bytes": profile.peak_bytes,
                "step_ms": profile.step_ms,
            }  # fmt: skip
            began = time.perf_counter()
            try:
                plan = (
                    sacplan.plan_smallest(profile, solver)
                    if budget == "smallest"
                    else sacplan.plan(profile, budget, solver)
                )
            except sacplan.InfeasibleBudget as error:
                yield row | {"plan": None, "smallest_feasible_bytes": error.smallest_feasible_bytes}
                continue
            seconds = time.perf_counter() - began
            seen = sacplan.verify(case.model, case.batch, plan)
            if (seen.peak_bytes, seen.recompute_flops) != (plan.peak_bytes, plan.recompute_flops):
                raise AssertionError(f"{name}, {budget}, {solver}: {seen}")
            asked = plan.budget_bytes or plan.peak_bytes
            again = Counter(recomputed(profile.program, plan.discarded).footprint.again)
            yield row | {
                "budget_bytes": plan.budget_bytes,
                "seconds": seconds,
                "plan": {
                    "peak_bytes": plan.peak_bytes,
                    "recompute_ms": plan.recompute_ms,
                    "recompute_share": plan.recompute_ms / plan.step_ms,
                    "recompute_flops_share": plan.recompute_flops / plan.step_flops,
                    "most_again": max(again.values(), default=0),
                    "lower_bound_ms": plan.lower_bound_ms,
                },
                "asked_ms": _asked(profile, asked) if solver == "rotor" else None,
            }


def _asked(profile: sacplan.Profile, budget_bytes: int) -> float | None:
    """What Rotor thinks that it recomputes for a budget; None where it thinks that there is no sequence."""
    stages = stages_of(profile.program)
    try:
        found = sacplan.rotor(stages.chain, budget_bytes - stages.fixed_bytes)
    except sacplan.InfeasibleBudget:
        return None
    return found.total_ms - stages.chain.step_ms


def _plans(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    print(f"peaks in MiB, planned for: {DEVICE}")
    print(
        f"{'model':>12} {'unplanned':>9} {'budget':>8} {'solver':>7} {'peak':>9} {'recompute ms':>12} {'% of step':>9} "
        f"{'% FLOPs':>8} {'most':>4} {'asked ms':>8} {'s':>6} {'bound ms':>8}"
    )
    rows = []
    for name in arguments.models:
        for row in plan_rows(name, MODELS[name]()):
            rows.append(row)
            print(_plan_line(row), flush=True)
            write_results(arguments.plans_json, rows, device=DEVICE)


def _plan_line(row: dict[str, Any]) -> str:
    left = f"{row['model']:>12} {row['unplanned_bytes'] / MIB:9.1f} {row['budget']:>8} {row['solver']:>7}"
    plan = row["plan"]
    if plan is None:
        return f"{left} finds no plan; the smallest peak is {row['smallest_feasible_bytes'] / MIB:.1f}"
    asked = "-" if row["asked_ms"] is None else f"{row['asked_ms']:.3f}"
    return (
        f"{left} {plan['peak_bytes'] / MIB:9.1f} {plan['recompute_ms']:12.3f} {plan['recompute_share']:9.2%} "
        f"{plan['recompute_flops_share']:8.2%} {plan['most_again']:4d} {asked:>8} {row['seconds']:6.1f} "
        f"{plan['lower_bound_ms']:8.3f}"
    )


if __name__ == "__main__":
    main()
