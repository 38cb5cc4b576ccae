"""How far is a plan's recomputation from what no schedule can beat, on the same graph, bytes and times?

    python -m benchmarks.bound [--layers 2 4 8 16 32] [--shares .9 .8 .7 .6 .5 .4 .3] [--no-exact]

A row is a graph at a budget, which is a share of its peak with everything kept. Figures are recompute time over forward
time:

- ``bound``: no schedule that runs the backward ops once, in this order, recomputes less. "none": no schedule fits.
- ``plan``: ``sacplan.plan`` at exactly these bytes, by its own replay, with the seconds it took, the fit included.
- ``layer``: the optimum of ``torch.utils.checkpoint`` with selective contexts on layers.
- ``k full``: as many whole layers fully checkpointed as it takes.

"-": nothing of that class fits. ``peak`` is the plan's over the budget; where it is over 1, it is the smallest peak
that the search found. The second table has small graphs, whose exact optimum Checkmate's program finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import sacplan
from benchmarks.graphs.opgraph import OpGraph, profile_of
from benchmarks.graphs.optimum import backward_bound, checkmate, selective_contexts, whole_regions
from benchmarks.graphs.stacks import gpt, mlp
from benchmarks.harness.command import Parser
from benchmarks.harness.plans import plan_or_least, timed
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.table import Table

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Checkmate's relaxation is solved up to here; its size is quadratic in the ops."""

EXACT: tuple[tuple[OpGraph, tuple[float, ...]], ...] = (
    (mlp(3), (0.7, 0.5)),
    (mlp(5), (0.7, 0.5)),
    (gpt(1, coarse=True), (0.7,)),
    (gpt(2, coarse=True), (0.8, 0.7, 0.6, 0.5)),
    (gpt(3, coarse=True), (0.6,)),
    (gpt(4, coarse=True), (0.6,)),
    (gpt(2), (0.8, 0.6, 0.5)),
)
"""Graphs of up to about 40 ops, and shares of their peaks."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for a budget; ratio and status are None where nothing fits.

    Attributes:
        ratio: recompute time over forward time.
        peak_bytes: of the plan; the smallest peak that the search reached, if that is over the budget.
        seconds: of ``sacplan.plan``, its fit of the graph included.
    """

    ratio: float | None
    peak_bytes: int
    status: str | None
    seconds: float


def plan_for(profile: sacplan.Profile, budget_bytes: int) -> Planned:
    """Plan for exactly these bytes."""
    (plan, peak_bytes), seconds = timed(lambda: plan_or_least(profile, budget_bytes))
    if plan is None:
        return Planned(None, peak_bytes, None, seconds)
    return Planned(plan.recompute_ms / profile.forward_ms, peak_bytes, plan.status, seconds)


def rows_of(layers: int, shares: list[float]) -> Iterator[Row]:
    """Apply all methods to a graph at the same bytes; ratios are None where nothing fits."""
    graph = gpt(layers)
    for share in shares:
        budget = int(share * graph.store_all_peak)
        full = whole_regions(graph, budget) or (None, None)
        plan = plan_for(profile_of(graph), budget)
        row: Row = {
            "graph": graph.name, "layers": layers, "share": share, "budget_bytes": budget,
            "bound": backward_bound(graph, budget).bound, "plan": asdict(plan),
            "layer": selective_contexts(graph, budget).recompute_ratio, "full": full[0], "full_layers": full[1],
        }  # fmt: skip
        bound = "none" if row["bound"] is None else row["bound"]
        print(_STACKS.row(graph.name, share, bound, *_cells(plan, budget), row["layer"], *full), flush=True)
        yield row


def exact_rows(time_limit: float) -> Iterator[Row]:
    """Beside Checkmate's exact optimum, the best schedule that its program found and its lower bound."""
    for graph, shares in EXACT:
        for share in shares:
            budget = int(share * graph.store_all_peak)
            best, plan = checkmate(graph, budget, time_limit=time_limit), plan_for(profile_of(graph), budget)
            row: Row = {
                "graph": graph.name, "ops": len(graph.ops), "share": share, "budget_bytes": budget,
                "optimum": best.recompute_ratio, "proved": best.bound, "status": best.status,
                "backward": backward_bound(graph, budget).bound, "seconds": best.seconds, "plan": asdict(plan),
            }  # fmt: skip
            cells = graph.name, row["ops"], share, row["backward"], row["optimum"], *_cells(plan, budget)
            print(f"{_EXACT.row(*cells)}  {best.status.lower()} in {best.seconds:.1f} s", flush=True)
            yield row


_PLAN = (("plan", ">7.4f"), ("peak", ">7.4f"), ("seconds", ">7.2f"))
_STACKS = Table(
    ("graph", ">8"),
    ("share", ">5.2f"),
    ("bound", ">7.4f"),
    *_PLAN,
    ("layer", ">7.4f"),
    ("k full", ">7.4f"),
    ("k", ">7"),
)
_EXACT = Table(
    ("graph", ">12"), ("ops", ">4"), ("share", ">5.2f"), ("bound", ">7.4f"), ("exact", ">7.4f"), *_PLAN
)


def _cells(planned: Planned, budget_bytes: int) -> tuple[float | None, float, float]:
    return planned.ratio, planned.peak_bytes / budget_bytes, planned.seconds


def main() -> None:
    parser = Parser(__doc__, "bound.json")
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument(
        "--time-limit", type=float, default=300.0, help="seconds for one program of Checkmate"
    )
    parser.add_argument("--no-exact", action="store_true", help="leave out the small graphs")
    arguments = parser.begin(note="\n")
    print(_STACKS.head)
    rows = [row for layers in arguments.layers for row in rows_of(layers, arguments.shares)]
    print(f"\n{_EXACT.head}  Checkmate")
    exact = [] if arguments.no_exact else list(exact_rows(arguments.time_limit))
    write_results(arguments.json, rows, exact=exact)


if __name__ == "__main__":
    main()
