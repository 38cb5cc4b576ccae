"""Are predicted peaks of compiled steps those of the CPU's allocator, without a plan and with one?

    python -m benchmarks.compiled --budgets 100% --backends inductor --ways whole
    python -m benchmarks.compiled --table                      # what the file has, on docs/compiled.md

A row is a step of a model of ``models/compiled_models.py`` with AdamW, compiled as a whole or block by block, dropout
on: predicted by a dry run of the compiler, without kernels, and measured by the profiler's allocation events in a real
compiled step, after warm-up. Budgets are shares of the model's own unplanned peak, compiled; with one below 100 %, the
plan that holds it is applied first. Where none does, ``smallest`` is the least that was reached. Weights, gradients and
AdamW's state are half of such a small step, so at 60 and 45 % its batch is four times as large. Rows that the file has
are not run again. Inductor needs a C++ compiler here.

With a plan, gradients are compared on the same random numbers: ``alone`` is how far those of the step that is only
compiled are from those in eager mode, as a share of the largest entry of a gradient, in the worst parameter;
``planned`` is the same with the plan; ``bits`` whether both compiled steps have the same bits. A planned step may draw
its dropout masks in another order, which its loss shows (``same_loss``). So each is also compared with the slope of its
own loss along its gradients (``slope_eager``, ``slope_alone``, ``slope_planned``: the share by which they differ).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import structs
from torch.utils._pytree import tree_map_only

import sacplan
from benchmarks.harness.command import Parser, known_rows, run_cases
from benchmarks.harness.results import Row
from benchmarks.harness.steps import seed_everything
from benchmarks.harness.table import PageTable, markdown_table
from benchmarks.models.cases import Case
from benchmarks.models.compiled_models import MODELS
from sacplan.core.compilation import Compilation
from sacplan.record.compiled import really_compiled
from sacplan.record.step import Step, call_model, default_loss

BACKENDS, WAYS, BUDGETS = ("inductor", "aot_eager"), ("whole", "blocks"), ("100%", "80%", "60%", "45%")
SMALL = ("60%", "45%")
LARGER = 4
"""How many times as large the batch is for the budgets that are ``SMALL``."""
_SHIFT = 0.001
"""By what share of itself a loss is shifted along its gradients. Curvature and rounding are 1e-4 of the slope then."""


def rows_of(name: str, backend: str, way: str, budgets: list[str]) -> Iterator[Row]:
    """Yield a row for each budget; "100%" is no plan."""
    seed_everything(0)
    given, blocks = MODELS[name]()
    given.model.train()
    # Before it compiles, ``verify`` counts FLOPs. In the first call of some models, transformers installs hooks under a
    # lock, at which Dynamo breaks the graph: a step that is compiled later has fewer graphs than one that begins so.
    call_model(given.model, given.batch)
    head = {"model": name, "backend": backend, "compiled": way}
    asked = {"modules": "" if way == "whole" else blocks, "backend": backend}
    batch = tree_map_only(torch.Tensor, lambda tensor: torch.cat([tensor] * LARGER), given.batch)
    larger = dataclasses.replace(given, batch=batch)
    for case, mine in (
        (given, [b for b in budgets if b not in SMALL]),
        (larger, [b for b in budgets if b in SMALL]),
    ):
        profile: Any = None
        unplanned: list[_Pass] = []
        for budget in mine:
            row: Row = {"case": f"{name} {backend} {way} {budget}", **head, "budget": budget}
            try:
                profile = profile or case.profile("cpu", compile=asked)
                row["unplanned"] = profile.peak_bytes
                plan = sacplan.plan(profile, budget)
                gc.collect()  # what earlier steps left behind would go during this one, and lower its peak
                seen = case.verify(plan, run="real")
            except sacplan.InfeasibleBudget as error:
                yield row | {"budget_bytes": error.budget_bytes, "smallest": error.smallest_feasible_bytes}
                continue
            except Exception as error:  # a row for each: what does not work is a result
                said = str(error).strip().splitlines()[0][:200]
                yield row | {"raised": f"{type(error).__name__}: {said}"}
                continue
            row |= {
                "budget_bytes": plan.budget_bytes,
                "predicted": plan.peak_bytes,
                "measured": seen.peak_bytes,
                "holds": seen.within_budget,
                "recompute_flops": plan.recompute_flops,
            }
            yield row | (_gradients(case, plan, unplanned) if budget != "100%" else {})


@dataclass(frozen=True)
class _Pass:
    """A forward and backward pass: its loss, and by what share gradients differ from the loss's slope along them."""

    loss: float
    gradients: list[torch.Tensor]
    slope: float


def _gradients(case: Case, plan: sacplan.Plan, unplanned: list[_Pass]) -> Row:
    """Compare gradients. ``unplanned`` is filled by the first call, and used by the next."""
    compilation = plan.fingerprint.setup.compiled
    # Inductor has random numbers of its own otherwise.
    options: Any = {"fallback_random": True} if compilation.backend == "inductor" else {}
    compilation = structs.replace(compilation, options=options)
    if not unplanned:
        unplanned += [_pass(case, None, None), _pass(case, None, compilation)]
    (eager, alone), planned = unplanned, _pass(case, plan, compilation)
    return {
        "alone": _distance(alone.gradients, eager.gradients),
        "planned": _distance(planned.gradients, eager.gradients),
        "bits": all(torch.equal(a, p) for a, p in zip(alone.gradients, planned.gradients, strict=True)),
        "same_loss": abs(planned.loss - alone.loss) <= 1e-6 * abs(alone.loss),
        "slope_eager": eager.slope,
        "slope_alone": alone.slope,
        "slope_planned": planned.slope,
    }


def _pass(case: Case, plan: sacplan.Plan | None, compilation: Compilation | None) -> _Pass:
    model = case.model
    step = Step(model, case.batch, case.loss_fn or default_loss, None, "train", 1)
    buffers = [b.clone() for b in model.buffers()]
    weights = [p.detach().clone() for p in model.parameters()]

    def run() -> float:
        model.zero_grad(set_to_none=True)
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        seed_everything(7)
        return float(step.accumulate())

    with contextlib.ExitStack() as stack:
        if plan is not None:
            stack.enter_context(sacplan.apply(model, plan))
        if compilation is not None:
            stack.enter_context(really_compiled(model, compilation, step))
        loss = run()
        along = [p.grad for p in model.parameters()]
        gradients = [gradient for gradient in along if gradient is not None]
        squares = float(sum(gradient.double().square().sum() for gradient in gradients))
        shift = _SHIFT * abs(loss) / squares
        shifted = []
        for sign in (1, -1):
            for parameter, weight, gradient in zip(model.parameters(), weights, along, strict=True):
                if gradient is not None:
                    parameter.data.copy_(weight + sign * shift * gradient)
            shifted.append(run())
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    model.zero_grad(set_to_none=True)
    return _Pass(loss, gradients, abs((shifted[0] - shifted[1]) / (2 * shift * squares) - 1))


def _distance(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(
        float((f - r).abs().max() / r.abs().max().clamp(min=1e-12)) for f, r in zip(found, right, strict=True)
    )


def _cells(rows: list[Row], kind: tuple[str, str, str]) -> list[str]:
    mine = [r for r in rows if (r["backend"], r["compiled"], r["budget"]) == kind]
    cells = (
        *kind, len(mine), sum(r["predicted"] == r["measured"] for r in mine if "measured" in r),
        sum("smallest" in r for r in mine), sum("raised" in r for r in mine),
    )  # fmt: skip
    return list(map(str, cells))


def table(rows: list[Row]) -> str:
    """Write the table of the page: a line for each backend, way and budget."""
    heads = "backend | compiled | budget | steps | to the byte | infeasible | raised"
    known = {(r["backend"], r["compiled"], r["budget"]) for r in rows}
    kinds = (kind for kind in itertools.product(BACKENDS, WAYS, BUDGETS) if kind in known)
    return markdown_table(heads, (_cells(rows, kind) for kind in kinds))


TABLE = PageTable("compiled", "compiled.md", table)


def main() -> None:
    parser = Parser(__doc__, "compiled.json", TABLE)
    parser.choice("--names", MODELS)
    parser.choice("--backends", BACKENDS)
    parser.choice("--ways", WAYS)
    parser.choice("--budgets", BUDGETS)
    torch.set_num_threads(1)
    arguments = parser.begin(silence=True)
    known = {row["case"] for row in known_rows(arguments.json)}
    cases = []
    for kind in itertools.product(arguments.names, arguments.backends, arguments.ways):
        left = [budget for budget in arguments.budgets if " ".join((*kind, budget)) not in known]
        cases += [(*kind, left)] if left else []
    run_cases(cases, lambda case: rows_of(*case), arguments.json, key="case", row_a_line=True)


if __name__ == "__main__":
    main()
