"""Solvers side by side: what milp, greedy and uniform recompute for the same budgets, over what no schedule undercuts.

    python -m benchmarks.ablation [--names gpt2 t5 ...]

Models: the example's transformer with 4 and 32 layers and eight of transformers ("medium", bfloat16), kernels of an
H100, nothing computed. One row per model and budget: recompute time as a share of the step's, for each solver, and
the bound for the peak that milp's plan has; ``-`` where a solver finds no plan.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch

import sacplan
from benchmarks import common, hf_models
from benchmarks.common import describe, machine, write_results

SOLVERS = ("milp", "greedy", "uniform")
BUDGETS = ("85%", "70%", "55%")
_SAME = 1.005  # times the cheapest: as good


def profiles(names: list[str]) -> dict[str, sacplan.Profile]:
    """By name."""
    from examples.transformer import Transformer

    found = {}
    for layers in (4, 32):
        with torch.device("meta"):
            model: torch.nn.Module = Transformer(n_layers=layers)
        found[f"example, {layers} layers"] = sacplan.profile(model, torch.randint(0, 8192, (8, 1024)))
    for name in names:
        torch.manual_seed(0)
        model, batch, loss_fn = hf_models.build(name, "medium", "meta", torch.bfloat16)
        found[name] = sacplan.profile(model, batch, loss_fn=loss_fn)
    return found


def main() -> None:
    parser = common.parser(__doc__, "ablation.json")
    parser.add_argument(
        "--names", nargs="+", default=list(hf_models.EIGHT), choices=list(hf_models.ARCHITECTURES)
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(describe(machine()))
    print(f"{'model':>20} {'budget':>7} " + " ".join(f"{s:>8} {'s':>5}" for s in SOLVERS) + f" {'bound':>8}")
    rows: list[dict[str, Any]] = []
    for name, profile in profiles(arguments.names).items():
        sacplan.plan(profile, "99%")  # what all solvers share is not part of their seconds
        for budget in BUDGETS:
            row: dict[str, Any] = {"model": name, "budget": budget}
            for solver in SOLVERS:
                began = time.perf_counter()
                try:
                    plan = sacplan.plan(profile, budget, solver)
                except sacplan.InfeasibleBudget:
                    row[solver] = None
                else:
                    row[solver] = plan.recompute_ms / plan.step_ms
                    row["bound"] = row.get("bound", plan.lower_bound_ms / plan.step_ms)
                row[f"{solver}_s"] = time.perf_counter() - began
            rows.append(row)
            shares = " ".join(f"{_percent(row[s]):>8} {row[f'{s}_s']:5.2f}" for s in SOLVERS)
            print(f"{name:>20} {budget:>7} {shares} {_percent(row.get('bound')):>8}", flush=True)
    solved = [row for row in rows if row["milp"] is not None]
    for solver in SOLVERS[1:]:
        there = [row for row in solved if row[solver] is not None]
        same = sum(row[solver] <= _SAME * min(row["milp"], row[solver]) for row in there)
        worst = max((row[solver] / row["milp"] for row in there if row["milp"]), default=1.0)
        print(
            f"{solver}: a plan in {len(there)} of {len(solved)}; as cheap as milp's, or cheaper, in {same}; at worst "
            f"{worst:.2f} times as much recomputation"
        )
    write_results(arguments.json, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


if __name__ == "__main__":
    main()
