"""Are predicted peaks of compiled steps those of the CPU's allocator, without a plan and with one?

    python -m benchmarks.compiled [--names gpt2 t5 bert resnet] [--backends inductor aot_eager] [--json FILE]

A row is a step of a model of ``benchmarks.ground_truth``, compiled as a whole or layer by layer, dropout on: predicted
by a dry run of the compiler, without kernels, and measured by the profiler's allocation events in a real compiled step,
after warm-up. With a budget, the plan that holds it is applied first. Inductor needs a C++ compiler here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import sacplan
from benchmarks.ground_truth import CASES
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.results import MIB, Row
from benchmarks.harness.table import Table

LAYERS = {
    "gpt2": "transformer.h.*", "t5": "*.block.*", "bert": "bert.encoder.layer.*",
    "resnet": "resnet.encoder.stages.*.layers.*", "vocabulary-128k": "layers.*",
}  # fmt: skip

_TABLE = Table(
    ("model", ">16"), ("backend", ">10"), ("compiled", ">9"), ("budget", ">7"), ("predicted", ">10.2f"),
    ("measured", ">10.2f"), ("error", ">+8.3%"), ("holds", ">6"),
)  # fmt: skip


def rows_of(name: str, backend: str, budgets: list[str]) -> Iterator[Row]:
    """Yield a row for each way to compile a model and each budget; "100%" is no plan."""
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.train()
    for how, modules in (("whole", ""), ("layers", LAYERS[name])):
        profile = sacplan.profile(
            case.model,
            case.batch,
            case.loss_fn,
            device="cpu",
            compile={"modules": modules, "backend": backend},
        )
        for budget in budgets:
            plan = sacplan.plan(profile, budget)
            seen = sacplan.verify(case.model, case.batch, plan, case.loss_fn, run="real")
            yield {
                "model": name,
                "backend": backend,
                "compiled": how,
                "budget": budget,
                "budget_bytes": plan.budget_bytes,
                "predicted": plan.peak_bytes,
                "measured": seen.peak_bytes,
                "holds": seen.within_budget,
            }


def _line(row: Row) -> str:
    predicted, measured = row["predicted"], row["measured"]
    return _TABLE.row(
        row["model"], row["backend"], row["compiled"], row["budget"], predicted / MIB, measured / MIB,
        predicted / measured - 1, str(row["holds"]),
    )  # fmt: skip


def main() -> None:
    parser = Parser(__doc__)
    parser.choice("--names", CASES)
    parser.choice("--backends", ("aot_eager", "inductor"))
    parser.choice("--budgets", ("100%", "80%", "60%", "45%"), ("100%", "80%"))
    torch.set_num_threads(1)
    arguments = parser.begin()
    cases = [(name, backend) for backend in arguments.backends for name in arguments.names]
    print("figures in MiB")
    print(_TABLE.head)
    run_cases(cases, lambda case: rows_of(*case, arguments.budgets), _line, arguments.json)


if __name__ == "__main__":
    main()
