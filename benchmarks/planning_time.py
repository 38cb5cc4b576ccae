"""Seconds that planning takes, stage by stage, beside PyTorch's prototype (torch.distributed._tools).

    python -m benchmarks.planning_time [--layers 4 16 32 126] [--prototype-limit 120] [--json FILE]

Model: the example's transformer (dim 768, 12 heads, vocabulary 8192) with batch 8 x 1024, kernels of an H100, budget
60 % of the unplanned peak. Stages: one plain fake step (for comparison), tracing, options of the regions and their
effects (fit), solving and replaying (solve). Each figure is one run in a process of its own. The prototype's roofline
refuses to run without CUDA, so its op times are replaced by a constant; that takes time off it, not on. It is
stopped at the limit. The last rows are Llama-3-8B's shape, and ``sac_milp`` alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import describe, machine, write_results

BUDGET = 0.6
_COLUMNS = ("step", "trace", "fit", "solve", "replay", "all", "MiB")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 32, 126])
    parser.add_argument("--prototype-limit", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument(
        "--loops", type=int, nargs="+", metavar="STEPS",
        help="recurrences of so many steps in one module instead: 1750 are 100,000 ops",
    )  # fmt: skip
    parser.add_argument("--one", nargs=2, metavar=("WHO", "LAYERS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        who, layers = arguments.one
        run = {
            "sacplan": run_sacplan,
            "prototype": run_prototype,
            "llama": run_llama,
            "sac_milp": run_sac_milp,
            **{name: partial(run_loop, name) for name in _LOOPS},
        }
        print(json.dumps(run[who](int(layers))))
        return
    rows = []
    print(describe(machine()))
    if arguments.loops:
        _loops(arguments.loops, arguments.json)
        return
    print(f"{'layers':>6} {'who':>10} " + " ".join(f"{k:>7}" for k in _COLUMNS) + "  result")
    for who, layers in [
        *((w, n) for n in arguments.layers for w in ("sacplan", "prototype")),
        ("llama", 32),
        ("sac_milp", 126),
    ]:
        row = _run_one(who, layers, arguments.prototype_limit if who == "prototype" else 600.0)
        rows.append({"layers": layers, "who": who} | row)
        cells = [f"{row[k]:7.2f}" if k in row else f"{'-':>7}" for k in _COLUMNS]
        print(f"{layers:>6} {who:>10} {' '.join(cells)}  {row['result']}", flush=True)
    write_results(arguments.json, rows)


_LOOPS = ("gru feasible", "gru infeasible", "gates feasible", "gates infeasible")


def _loops(steps: list[int], path: Path | None) -> None:
    """Times and memory by steps of a recurrence, for a budget that can be held and one that cannot."""
    rows = []
    print(f"{'steps':>6} {'ops':>7} {'loop':>18} {'profile s':>9} {'plan s':>7} {'MiB':>6}  result")
    for who in _LOOPS:
        for n in steps:
            row = _run_one(who, n, 600.0)
            rows.append({"steps": n, "who": who} | row)
            cells = f"{n:>6} {row.get('ops', '-'):>7} {who:>18}"
            times = f"{row.get('profile', 0):9.2f} {row.get('plan', 0):7.2f} {row.get('MiB', 0):6.0f}"
            print(f"{cells} {times}  {row['result']}", flush=True)
    write_results(path, rows)


def run_loop(who: str, steps: int) -> dict[str, Any]:
    """Profile and plan of a recurrence that is unrolled in one module, in processor seconds of one thread."""
    import sacplan

    torch.set_num_threads(1)
    torch.manual_seed(0)
    name, _, kind = who.partition(" ")
    model, batch = Recurrence(steps, name), torch.randn(16, 32)
    began = time.process_time()
    profile = sacplan.profile(model, batch, lambda m, b: m(b).pow(2).mean(), device="cpu")
    profiled = time.process_time()
    try:
        plan = sacplan.plan(profile, "75%" if kind == "feasible" else "1%")
        result = f"{plan.peak_bytes / profile.peak_bytes:.4f} of the peak, {plan.status}"
    except sacplan.InfeasibleBudget as error:
        result = f"infeasible; smallest {error.smallest_feasible_bytes / profile.peak_bytes:.4f} of the peak"
        str(error)  # the message asks Rotor
    return {
        "ops": len(profile.program.ops), "profile": profiled - began, "plan": time.process_time() - profiled,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "result": result,
    }  # fmt: skip


class Recurrence(torch.nn.Module):
    """A cell in a loop: ``torch.nn.GRUCell``, or gates that are written out and have no module of their own."""

    def __init__(self, steps: int, name: str) -> None:
        super().__init__()
        self.steps = steps
        self.cell = torch.nn.GRUCell(32, 32) if name == "gru" else None
        self.gate, self.value = (torch.nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(self.steps):
            if self.cell is not None:
                h = self.cell(x, h)
            else:
                z = torch.sigmoid(x + h @ self.gate)
                h = z * h + (1 - z) * torch.tanh(x + h @ self.value)
        return h


def _run_one(who: str, layers: int, limit: float) -> dict[str, Any]:
    try:
        found: dict[str, Any] = common.in_own_process("planning_time", "--one", who, layers, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"result": f"stopped after {limit:.0f} s"}
    except subprocess.CalledProcessError as error:
        return {"result": "failed: " + (error.stderr.strip().splitlines() or ["?"])[-1][:80]}
    return found


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def run_sacplan(layers: int) -> dict[str, Any]:
    """One plain fake step, then each stage of profile and plan."""
    import sacplan
    from examples.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(n_layers=layers)
    batch = torch.randint(0, 8192, (8, 1024))
    with sacplan.fake_device("h100"):
        fake, tokens = Transformer(n_layers=layers), torch.randint(0, 8192, (8, 1024))
        step, _ = _timed(lambda: fake(tokens).sum().backward())
    return {"step": step} | _stages(model, batch)


def run_llama(layers: int) -> dict[str, Any]:
    """Llama-3-8B's shape, bfloat16, 4096 tokens, with loss; the budget is 75 %: gradients alone need 66 %."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    tokens = torch.randint(0, 128256, (1, 4096))
    return _stages(model, {"input_ids": tokens, "labels": tokens}, 0.75)


def run_sac_milp(layers: int) -> dict[str, Any]:
    """The classical program alone, on the module tree of the example's transformer."""
    import sacplan
    from examples.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(n_layers=layers)
    trace, profile = _timed(lambda: sacplan.profile(model, torch.randint(0, 8192, (8, 1024)), device="h100"))
    fit, graph = _timed(lambda: profile.graph)
    solve, found = _timed(lambda: sacplan.sac_milp(graph, f"{BUDGET:.0%}", gap=1e-2))
    finer, _ = _timed(lambda: sacplan.sac_milp(graph, f"{BUDGET:.0%}", gap=1e-4))
    return {
        "trace": trace, "fit": fit, "solve": solve, "all": trace + fit + solve,
        "result": f"{len(graph.nodes)} nodes, {found.status}; at a gap of 1e-4 instead of 1e-2 {finer:.2f} s",
    }  # fmt: skip


def _stages(model: torch.nn.Module, batch: Any, budget: float = BUDGET) -> dict[str, Any]:
    import sacplan
    from sacplan._plan.context import planning_context
    from sacplan._technique.step import PlanStep

    trace, profile = _timed(lambda: sacplan.profile(model, batch, device="h100"))
    replay_one, _ = _timed(lambda: profile.program.footprint)
    fit, _ = _timed(lambda: planning_context(PlanStep(profile.program)).effects(1))
    solve, plan = _timed(lambda: sacplan.plan(profile, f"{budget:.0%}"))
    share, recompute = plan.peak_bytes / profile.peak_bytes, plan.recompute_ms / plan.step_ms
    bound = plan.lower_bound_ms / plan.step_ms
    return {
        "trace": trace, "fit": fit, "solve": solve, "replay": replay_one, "all": trace + fit + solve,
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "result": f"{share:.3f} of the peak, recompute {recompute:.2%} of the step (bound {bound:.2%})",
    }  # fmt: skip


def run_prototype(layers: int) -> dict[str, Any]:
    """The same through torch.distributed._tools, as its example drives it."""
    from torch.distributed._tools.ilp_utils import (
        aggregate_stats,
        get_peak_memory_runtime_baseline,
        parse_module_info,
    )
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.distributed._tools.sac_ilp import sac_milp

    import sacplan
    from examples.transformer import Transformer

    def constant(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        return func(*args, **(kwargs or {})), 1e-3

    RuntimeEstimator._roofline_estimate = constant  # type: ignore[assignment, method-assign]
    with sacplan.fake_device("h100"):
        model, batch = Transformer(n_layers=layers), torch.randint(0, 8192, (8, 1024))

        def step() -> None:
            model(batch).sum().backward()

        seconds, _ = _timed(step)

        def trace() -> tuple[Any, Any, Any]:
            tracker = MemTracker()
            tracker.track_external(model)
            with tracker:
                step()
            runtime = RuntimeEstimator()
            with runtime(estimate_mode_type="operator-level-cost-model"):
                step()
            sac = SACEstimator()
            with sac(estimate_mode_type="operator-level-cost-model"):
                model(batch)
            return tracker, runtime, sac

        traced, (tracker, runtime, sac) = _timed(trace)
        fit, info = _timed(lambda: aggregate_stats(model, tracker, runtime, sac, torch.device("cpu")))
    graph = parse_module_info(info)
    peak, _ = get_peak_memory_runtime_baseline(graph)
    solve, (_, _, planned) = _timed(lambda: sac_milp(graph, memory_budget=BUDGET * peak / 2**30))
    return {
        "step": seconds, "trace": traced, "fit": fit, "solve": solve, "all": traced + fit + solve,
        "result": f"{planned / peak:.3f} of its own peak" if planned > 0 else "no plan found",
    }  # fmt: skip


if __name__ == "__main__":
    main()
