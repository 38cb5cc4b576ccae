"""How many seconds does planning take, stage by stage, beside PyTorch's prototype (torch.distributed._tools)?

    python -m benchmarks.planning_time [--layers 4 16 32 126] [--json FILE]

Model: the example's transformer (dim 768, 12 heads, vocabulary 8192) with batch 8 x 1024, kernels of an H100, budget 60
% of the unplanned peak. A row is a planner at a number of layers, with the seconds of its stages: one plain fake step
(for comparison), tracing, options of the regions and their effects (fit), solving and replaying (solve). Each row is
one run in a process of its own. The prototype's roofline refuses to run without CUDA, so its op times are replaced by a
constant; that takes time off it, not on. It is stopped after 120 s of processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import timed
from benchmarks.harness.processes import Limits, in_workers
from benchmarks.harness.results import Row
from benchmarks.models import cases
from benchmarks.rivals import prototype_traced
from examples.transformer import Transformer

BUDGET = 0.6


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 32, 126])
    arguments = parser.begin()

    def rows_of(who_and_layers: tuple[str, int]) -> list[Row]:
        who, layers = who_and_layers
        limit = 120.0 if who == "prototype" else 600.0
        (found,) = in_workers([str(layers)], RUNS[who], _stopped, jobs=1, limits=Limits(seconds=limit))
        return [{"layers": layers, "who": who} | found]

    run_cases([(who, n) for n in arguments.layers for who in RUNS], rows_of, arguments.json)


def _stopped(layers: str, reason: str, seconds: float) -> Row:
    """Return the result of a planner whose process did not end well."""
    return {"result": reason.replace("not done", "stopped")}


# --- planners ---------------------------------------------------------------------------------------------


def run_sacplan(layers: str) -> Row:
    """Run one plain fake step, then each stage of profile and plan."""
    with sacplan.fake_device("h100"):
        fake, tokens = Transformer(n_layers=int(layers)), torch.randint(0, 8192, (8, 1024))
        _, step = timed(lambda: fake(tokens).sum().backward())
    return {"step": step} | _stages(cases.example(int(layers)))


def _stages(case: cases.Case) -> Row:
    from sacplan.planning.context import planning_context
    from sacplan.techniques.base.step import PlanStep

    profile, trace = timed(case.profile)
    _, replay_one = timed(lambda: profile.program.footprint)
    # The plan finds these effects in the program's cache, so that ``solve`` is without them.
    _, fit = timed(lambda: planning_context(PlanStep(profile.program)).effects(1))
    plan, solve = timed(lambda: sacplan.plan(profile, f"{BUDGET:.0%}"))
    share, recompute = plan.peak_bytes / profile.peak_bytes, plan.recompute_ms / plan.step_ms
    bound = plan.lower_bound_ms / plan.step_ms
    return {
        "trace": trace, "fit": fit, "solve": solve, "replay": replay_one, "all": trace + fit + solve,
        "result": f"{share:.3f} of the peak, recompute {recompute:.2%} of the step (bound {bound:.2%})",
    }  # fmt: skip


def run_prototype(layers: str) -> Row:
    """Plan the same through torch.distributed._tools, as its example drives it."""
    from torch.distributed._tools.ilp_utils import (
        aggregate_stats,
        get_peak_memory_runtime_baseline,
        parse_module_info,
    )
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.distributed._tools.sac_ilp import sac_milp

    def constant(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        return func(*args, **(kwargs or {})), 1e-3

    RuntimeEstimator._roofline_estimate = constant  # type: ignore[assignment, method-assign]
    with sacplan.fake_device("h100"):
        model, batch = Transformer(n_layers=int(layers)), torch.randint(0, 8192, (8, 1024))

        def step() -> None:
            model(batch).sum().backward()

        _, seconds = timed(step)

        sac = SACEstimator()
        (tracker, runtime), traced = timed(lambda: prototype_traced(model, step, sac, lambda: model(batch)))
        info, fit = timed(lambda: aggregate_stats(model, tracker, runtime, sac, torch.device("cpu")))
    graph = parse_module_info(info)
    peak, _ = get_peak_memory_runtime_baseline(graph)
    (_, _, planned), solve = timed(lambda: sac_milp(graph, memory_budget=BUDGET * peak / 2**30))
    return {
        "step": seconds, "trace": traced, "fit": fit, "solve": solve, "all": traced + fit + solve,
        "result": f"{planned / peak:.3f} of its own peak" if planned > 0 else "no plan found",
    }  # fmt: skip


RUNS: dict[str, Callable[[str], Row]] = {"sacplan": run_sacplan, "prototype": run_prototype}


if __name__ == "__main__":
    main()
