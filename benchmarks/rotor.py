"""How long does the Rotor solver take, and how good are its plans beside those of the other solvers?

    python -m benchmarks.rotor [--sections engines plans]
                               [--stages 20 80 150] [--slots 500] [--engines fast reference] [--json FILE]
                               [--models resnet50 densenet121 gpt2 vit] [--plans-json FILE]

engines: a row is an engine on a chain of so many stages. Chains are random, from a fixed seed: 4 to 12 KB for the
output of a stage and up to 20 KB more saved. The budget is a share of what the step keeps without recomputation. Each
row is one run in a process of its own. Memory is the growth of the peak resident size while the solver ran (Linux), and
the most bytes that Python and numpy had allocated (the fast engine; traced in a second run, since tracing takes time).
Engines must agree on a digest of table, choices and operations.

plans: a row is a solver at a budget of a model, on an H100, nothing computed: what it recomputes, or the smallest peak
that rotor and best reach. Models: ResNet-50 at 4000 and DenseNet-121 at 8080 MiB (128 images of 224 x 224, the cases of
ColossalAI's test of its Rotor), GPT-2 (12 layers, 16 x 1024 tokens) and ViT-B/16 (128 images), both bfloat16, at 70 and
55 % of the unplanned peak. Every plan is run as a fake step: peak and FLOPs must be those of the plan.

- ``most``: how often the op that runs most often does so again.
- ``asked``: what Rotor itself thinks that its sequence recomputes for that budget; ``-`` where it finds none. It counts
  whole stages, in slots, and gradients that are not there.
- ``bound``: what no schedule with the plan's peak undercuts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import timed
from benchmarks.harness.processes import in_own_process
from benchmarks.harness.results import MIB, RESULTS, Row, write_results
from benchmarks.harness.table import Table
from benchmarks.models import cases
from benchmarks.rotor_reference import ENGINES
from sacplan._recompute.rewrite import recomputed
from sacplan._rotor.stages import stages_of
from tests.zoo import convnets

DEVICE = "h100"
SECTIONS = ("engines", "plans")
SOLVERS = ("rotor", "best", "greedy")


def main() -> None:
    parser = Parser(__doc__, "rotor.json")
    parser.choice("--sections", SECTIONS)
    parser.add_argument("--stages", type=int, nargs="+", default=[20, 80, 150])
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--share", type=float, default=0.4, help="budget, of what the step takes unplanned")
    parser.choice("--engines", ENGINES)
    parser.choice("--models", MODELS)
    parser.add_argument("--plans-json", type=Path, default=RESULTS / "rotor_plans.json")
    arguments = parser.begin(silence=True)
    if "engines" in arguments.sections:
        _engines(arguments)
    if "plans" in arguments.sections:
        _plans(arguments)


# --- engines ----------------------------------------------------------------------------------------------

_FIGURES = ("seconds", "cpu_seconds", "peak_growth_mb", "traced_mb")
_ENGINES = Table(("stages", ">6"), ("engine", ">10"), *((name, ">15.2f") for name in _FIGURES))


def _engines(arguments: argparse.Namespace) -> None:
    def rows_of(stages: int) -> Iterator[Row]:
        digests = set()
        for engine in arguments.engines:
            row: Row = {}
            for trace in (False, True) if engine == "fast" else (False,):
                row |= in_own_process(run, engine, stages, arguments.slots, arguments.share, trace)
            yield row
            digests.add(row["digest"])
        if len(digests) > 1:
            raise SystemExit(f"the engines disagree on {stages} stages")

    def line(row: Row) -> str:
        cells = _ENGINES.row(row["stages"], row["engine"], *map(row.get, _FIGURES))
        return f"{cells}  {100 * (row['total_ms'] / row['step_ms'] - 1):.1f} %"

    print(f"{_ENGINES.head}  recomputation")
    # Written at the end: where engines disagree, there are no figures.
    write_results(arguments.json, run_cases(arguments.stages, rows_of, line, None))


def random_chain(stages: int, seed: int = 1) -> sacplan.Chain:
    """Make a chain of unlike stages."""
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


def run(engine: str, stages: int, slots: int, share: float, trace: bool) -> Row:
    """Solve once, in this process, and return the figures."""
    chain = random_chain(stages)
    whole = chain.output_bytes[0] + sum(chain.saved_bytes[1:]) + chain.output_bytes[-1]
    if trace:
        tracemalloc.start()  # slows Python down: such a run is not timed
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


# --- plans ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """A case, and the budgets that it is planned for."""

    case: cases.Case
    budgets: tuple[str, ...]


def _convnet(make: Callable[[], torch.nn.Module], *budgets: str) -> Planned:
    with torch.device("meta"):
        return Planned(cases.Case(make(), torch.empty(128, 3, 224, 224)), budgets)


def gpt2() -> Planned:
    """Build GPT-2, 124 M parameters."""
    return Planned(dataclasses.replace(cases.gpt2(use_cache=False), optimizer=None), ("70%", "55%"))


def vit() -> Planned:
    """Build ViT-B/16, 87 M parameters."""
    import transformers

    model = cases.on_meta(transformers.ViTForImageClassification, transformers.ViTConfig(num_labels=1000))
    images = torch.empty(128, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    batch = {"pixel_values": images, "labels": torch.randint(0, 1000, (128,))}
    return Planned(cases.Case(model, batch), ("70%", "55%"))


MODELS: dict[str, Callable[[], Planned]] = {
    "resnet50": lambda: _convnet(convnets.resnet50, "4000MiB"),
    "densenet121": lambda: _convnet(convnets.densenet121, "8080MiB"),
    "gpt2": gpt2,
    "vit": vit,
}


def plan_rows(name: str) -> Iterator[Row]:
    """Yield a row for each budget and solver, then the smallest peaks of rotor and best.

    Raises:
        AssertionError: a fake step with a plan applied does something else than the plan says.
    """
    planned = MODELS[name]()
    case, profile = planned.case, planned.case.profile(DEVICE)
    sacplan.plan(profile, "99%")  # what solvers share is not part of their seconds
    for budget in (*planned.budgets, "smallest"):
        for solver in SOLVERS if budget != "smallest" else SOLVERS[:2]:
            row: Row = {
                "model": name, "budget": budget, "solver": solver, "unplanned_bytes": profile.peak_bytes,
                "step_ms": profile.step_ms,
            }  # fmt: skip
            try:
                plan, seconds = timed(functools.partial(_plan, profile, budget, solver))
            except sacplan.InfeasibleBudget as error:
                yield row | {"plan": None, "smallest_feasible_bytes": error.smallest_feasible_bytes}
                continue
            seen = case.verify(plan)
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


def _plan(profile: sacplan.Profile, budget: str, solver: str) -> sacplan.Plan:
    if budget == "smallest":
        return sacplan.plan(profile, "smallest", solver)
    return sacplan.plan(profile, budget, solver)


def _asked(profile: sacplan.Profile, budget_bytes: int) -> float | None:
    """Return what Rotor thinks that it recomputes for a budget; None where it thinks that there is no sequence."""
    stages = stages_of(profile.program)
    try:
        found = sacplan.rotor(stages.chain, budget_bytes - stages.fixed_bytes)
    except sacplan.InfeasibleBudget:
        return None
    return found.total_ms - stages.chain.step_ms


_PLANS = Table(
    ("model", ">12"), ("unplanned", ">9.1f"), ("budget", ">8"), ("solver", ">7"), ("peak", ">9.1f"),
    ("recompute ms", ">12.3f"), ("% of step", ">9.2%"), ("% FLOPs", ">8.2%"), ("most", ">4d"), ("asked ms", ">8.3f"),
    ("s", ">6.1f"), ("bound ms", ">8.3f"),
)  # fmt: skip


def _plans(arguments: argparse.Namespace) -> None:
    print(f"peaks in MiB, planned for: {DEVICE}\n{_PLANS.head}")
    run_cases(arguments.models, plan_rows, _plan_line, arguments.plans_json, device=DEVICE)


def _plan_line(row: Row) -> str:
    about = row["model"], row["unplanned_bytes"] / MIB, row["budget"], row["solver"]
    plan = row["plan"]
    if plan is None:
        return f"{_PLANS.row(*about)} finds no plan; the smallest peak is {row['smallest_feasible_bytes'] / MIB:.1f}"
    return _PLANS.row(
        *about, plan["peak_bytes"] / MIB, plan["recompute_ms"], plan["recompute_share"], plan["recompute_flops_share"],
        plan["most_again"], row["asked_ms"], row["seconds"], plan["lower_bound_ms"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
