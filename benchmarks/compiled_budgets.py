"""Plans for a compiled step against PyTorch's ways to recompute in one: peaks, recomputation and predicted times.

    python -m benchmarks.compiled_budgets [--names nanogpt bert] [--json FILE]

All are run dry for an H100, compiled as a whole with inductor, on models of ``models/compiled_models.py``. Rivals are
``torch._functorch.config.activation_memory_budget``, with each of its solvers and with the estimator that prices all
ops alike, checkpointing of every layer, and selective contexts in every layer. (The estimator that times ops needs the
device.) None of them bounds the peak; each row's plan of sacplan is asked for the peak that the rival leads to. FLOPs
are those of matrix products, attention and convolutions, over those of the step that is only compiled; times are
predicted. A rival that PyTorch itself refuses has its error in the place of figures. Each row is written when it is
there; rows that the file has are not run again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.config as functorch_config

import sacplan
from benchmarks.harness.command import Parser, known_rows, run_cases
from benchmarks.harness.results import Row
from benchmarks.harness.steps import seed_everything
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models.cases import Case
from benchmarks.models.compiled_models import MODELS
from benchmarks.rivals import checkpoint_layers
from sacplan.core.names import matching_modules

_SOLVERS = {
    "": {},
    " greedy": {"activation_memory_budget_solver": "greedy"},
    " ilp": {"activation_memory_budget_solver": "ilp"},
    " hirschberg": {"activation_memory_budget_solver": "dp_knapsack_sliding_hirschberg"},
    " ops alike": {"activation_memory_budget_runtime_estimator": "testing"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    f"{budget}{solver}": {"activation_memory_budget": budget, **options}
    for solver, options in _SOLVERS.items()
    for budget in (0.7, 0.4, 0.1)
}
LAYERS: dict[str, bool | None] = {
    "every layer": None,
    "layers but matmuls": False,
    "layers but every second matmul": True,
}
"""What is checkpointed, as ``rivals.checkpoint_layers`` takes it."""


def rows_of(name: str, rivals: list[str]) -> Iterator[Row]:
    """Yield a row for each rival, with the plan for its peak."""
    case = _case(name)
    alone = case.profile("h100", compile=True)

    def figures(step: sacplan.Profile) -> dict[str, Any]:
        more = {"recompute_flops": step.program.flops - alone.program.flops, "step_ms": step.step_ms}
        return {"peak": step.peak_bytes, **more}

    plans: dict[int, Row] = {}  # by budget
    for setting in rivals:
        row: Row = {"case": f"{name} {setting}", "model": name, "setting": setting}
        row |= {"unplanned": alone.peak_bytes, "theirs": None, "plan": None}
        try:
            with functorch_config.patch(SETTINGS.get(setting, {})):
                rival = (_case(name, setting) if setting in LAYERS else case).profile("h100", compile=True)
        except RuntimeError as error:
            yield row | {"raised": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
            continue
        row["theirs"] = figures(rival)
        try:
            if rival.peak_bytes not in plans:
                plan = sacplan.plan(alone, f"{rival.peak_bytes}B")
                plans[rival.peak_bytes] = figures(alone.run_with(plan))
            row["plan"] = plans[rival.peak_bytes]
        except sacplan.InfeasibleBudget as error:
            row["smallest"] = error.smallest_feasible_bytes
        yield row


def _case(name: str, rival: str = "") -> Case:
    """Return the model, its layers checkpointed if that is the rival."""
    seed_everything(0)
    case, blocks = MODELS[name]()
    case.model.train()
    if rival in LAYERS:
        # As transformers does it with checkpointing: Dynamo breaks the graph where a checkpoint fills a cache.
        if hasattr(case.model, "config"):
            case.model.config.use_cache = False
        named = dict(case.model.named_modules())
        checkpoint_layers(
            [named[fqn] for fqn in matching_modules(list(named), blocks, "modules")], LAYERS[rival]
        )
    return case


def _cells(model: str, rows: list[Row]) -> list[str]:
    mine = [row for row in rows if row["model"] == model]
    pairs = [(row["theirs"], row["plan"]) for row in mine if row["plan"]]
    longer = [theirs["step_ms"] / plan["step_ms"] - 1 for theirs, plan in pairs]
    flops = [theirs["recompute_flops"] - plan["recompute_flops"] for theirs, plan in pairs]
    more, fewer = sum(f > 0 for f in flops), sum(f < 0 for f in flops)
    times = (f"{100 * found:+.1f} %" for found in (min(longer), statistics.median(longer), max(longer)))
    raised = sum("raised" in row for row in mine)
    return [model, str(len(mine)), *times, *map(str, (more, len(flops) - more - fewer, fewer, raised))]


def table(rows: list[Row]) -> str:
    """Write the table of the page: how much longer the rivals' steps take than the plans for their peaks."""
    heads = "model | rivals | least | median | most | recompute more FLOPs | as many | fewer | raise an error"
    models = dict.fromkeys(row["model"] for row in rows)
    return markdown_table(heads, (_cells(model, rows) for model in models))


TABLE = PageTable("compiled_budgets", "alternatives.md", table)


def main() -> None:
    parser = Parser(__doc__, "compiled_budgets.json", TABLE)
    parser.choice("--names", MODELS, ("nanogpt", "bert", "llama", "vit", "resnet", "t5"))
    torch.set_num_threads(1)
    arguments = parser.begin(silence=True)
    known = {row["case"] for row in known_rows(arguments.json)}
    rivals = [*SETTINGS, *LAYERS]
    cases = [(name, [r for r in rivals if f"{name} {r}" not in known]) for name in arguments.names]
    left = [case for case in cases if case[1]]
    run_cases(left, lambda case: rows_of(*case), arguments.json, key="case", row_a_line=True)


if __name__ == "__main__":
    main()
