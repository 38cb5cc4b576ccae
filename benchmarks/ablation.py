"""How much more do the greedy and the uniform solver recompute than milp, for the same budgets?

    python -m benchmarks.ablation [--names gpt2 t5 ...]

Models: the example's transformer with 4 and 32 layers, and eight of transformers ("medium", bfloat16), with the kernels
of an H100; nothing is computed. A row is a model at a budget. For each solver it has the recompute time as a share of
the step's, ``-`` where it finds no plan, and the seconds that planning took. ``bound`` is what no schedule with the
peak of milp's plan undercuts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.plans import timed
from benchmarks.harness.results import Row
from benchmarks.harness.table import Table
from benchmarks.models import hf_models
from benchmarks.models.cases import Case, example

SOLVERS = ("milp", "greedy", "uniform")
BUDGETS = ("85%", "70%", "55%")
_SAME = 1.005  # times the cheapest: counts as equally cheap

_TABLE = Table(
    ("model", ">20"), ("budget", ">7"),
    *(column for solver in SOLVERS for column in ((solver, ">8"), ("s", ">5.2f"))),
    ("bound", ">8"),
)  # fmt: skip


def cases(names: list[str]) -> Iterator[tuple[str, Case]]:
    """Yield the models by name."""
    for layers in (4, 32):
        yield f"example, {layers} layers", example(layers)
    for name in names:
        torch.manual_seed(0)
        model, batch, loss_fn = hf_models.build(name, "medium", "meta", torch.bfloat16)
        yield name, Case(model, batch, loss_fn)


def rows_of(named: tuple[str, Case]) -> Iterator[Row]:
    """Yield a row for each budget of a model."""
    name, case = named
    profile = case.profile()
    sacplan.plan(profile, "99%")  # what all solvers share is not part of their seconds
    for budget in BUDGETS:
        row: Row = {"model": name, "budget": budget}
        for solver in SOLVERS:
            plan, row[f"{solver}_s"] = timed(
                lambda solver=solver, budget=budget: _plan(profile, budget, solver)
            )
            row[solver] = None if plan is None else plan.recompute_ms / plan.step_ms
            if plan is not None:
                row.setdefault("bound", plan.lower_bound_ms / plan.step_ms)
        yield row


def _plan(profile: sacplan.Profile, budget: str, solver: str) -> sacplan.Plan | None:
    try:
        return sacplan.plan(profile, budget, solver)
    except sacplan.InfeasibleBudget:
        return None


def _line(row: Row) -> str:
    figures = (cell for s in SOLVERS for cell in (_percent(row[s]), row[f"{s}_s"]))
    return _TABLE.row(row["model"], row["budget"], *figures, _percent(row.get("bound")))


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.2%}"


def main() -> None:
    parser = Parser(__doc__, "ablation.json")
    parser.choice("--names", hf_models.ARCHITECTURES, hf_models.EIGHT)
    arguments = parser.begin(silence=True)
    print(_TABLE.head)
    rows = run_cases(cases(arguments.names), rows_of, _line, arguments.json)
    solved = [row for row in rows if row["milp"] is not None]
    for solver in SOLVERS[1:]:
        there = [row for row in solved if row[solver] is not None]
        same = sum(row[solver] <= _SAME * min(row["milp"], row[solver]) for row in there)
        worst = max((row[solver] / row["milp"] for row in there if row["milp"]), default=1.0)
        print(
            f"{solver}: a plan in {len(there)} of {len(solved)}; as cheap as milp's, or cheaper, in {same}; at worst "
            f"{worst:.2f} times as much recomputation"
        )


if __name__ == "__main__":
    main()
