"""Is the planned time of a step that offloads the time of its streams, on ten models?

    python -m benchmarks.offload_times [--models llama resnet50] [--device h100]

Models are those of ``benchmarks/offload.py``. A row is a model with up to three plans that offload: offloading alone
and both techniques, by the greedy solver, at a budget 60 % of the way from the smallest peak by recomputation to the
step's own; and random options of all regions, which no solver has chosen. ``planned_ms`` is the time by the plan, and
``simulated_ms`` that of a simulation of streams, event by event, of what the executor does in a fake step
(``harness/streams.py``). ``full_link_ms`` is the same with all of the link's bandwidth, where plans count on 80 %. A
choice that offloads nothing, or does not hold the budget, has no plan.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import sacplan
from benchmarks.harness.command import Parser, run_cases
from benchmarks.harness.mixed_plans import mixed_plan
from benchmarks.harness.plans import as_budget, budget_at
from benchmarks.harness.results import Row
from benchmarks.harness.streams import fake_step, noted_streams, planned_ms, simulated_ms
from benchmarks.models.cases import Case
from benchmarks.offload import MODELS

BOTH = ("recompute", "offload")
_DRAWS = 20


def _plans(profile: sacplan.Profile) -> Iterator[tuple[str, sacplan.Plan]]:
    smallest = sacplan.plan(profile, "smallest", "greedy").peak_bytes
    budget = as_budget(budget_at(0.6, smallest, profile.peak_bytes))
    for what, techniques in (("offload", ("offload",)), ("both", BOTH)):
        try:
            yield what, sacplan.plan(profile, budget, "greedy", techniques=techniques)
        except sacplan.InfeasibleBudget:
            continue
    draws = (mixed_plan(profile, random.Random(seed), BOTH, joined=1) for seed in range(_DRAWS))
    drawn = next((plan for plan in draws if plan.offloaded), None)
    if drawn is not None:
        yield "random", drawn


def _times(case: Case, profile: sacplan.Profile, plan: sacplan.Plan) -> Row:
    with noted_streams() as noted:
        seen = fake_step(case, plan, profile.spec)
    link = profile.spec.host_link
    simulated = simulated_ms(seen.program, noted, link)
    return {
        "offloaded": len(plan.offloaded),
        "planned_ms": planned_ms(plan),
        "simulated_ms": simulated,
        "full_link_ms": simulated_ms(seen.program, noted, link, 1.0),
        "apart": abs(planned_ms(plan) / simulated - 1),
    }


def rows_of(name: str, device: str) -> Iterator[Row]:
    """Yield the row of a model."""
    case = MODELS[name]()
    profile = case.profile(device)
    plans = {what: _times(case, profile, plan) for what, plan in _plans(profile) if plan.offloaded}
    yield {"model": name, "device": device, "plain_ms": profile.step_ms, "plans": plans}


def _line(row: Row) -> str:
    plans = (
        f"{what} {times['planned_ms']:.3f} ms, simulated {times['simulated_ms']:.3f} ({times['apart']:.1e} apart)"
        for what, times in row["plans"].items()
    )
    return f"{row['model']} on {row['device']}, {row['plain_ms']:.1f} ms: {'; '.join(plans)}"


def main() -> None:
    parser = Parser(__doc__, "offload_times.json")
    parser.choice("--models", MODELS)
    parser.add_argument("--device", default="h100")
    arguments = parser.begin(silence=True)
    run_cases(
        arguments.models, lambda name: rows_of(name, arguments.device), _line, arguments.json, key="model"
    )


if __name__ == "__main__":
    main()
