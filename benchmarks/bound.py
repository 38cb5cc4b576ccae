"""How far is a plan's recomputation from what no schedule can beat, on the same graph, bytes and times?

    python -m benchmarks.bound [--layers 2 4 8 16 32] [--shares .9 .8 .7 .6 .5 .4 .3] [--no-exact] [--no-models]

A row is a graph at a budget, which is a share of its peak with everything kept. Figures are recompute time over forward
time:

- ``bound``: no schedule recomputes less. It is the largest of Checkmate's linear relaxation (up to 8 layers) and two
  bounds: from what is alive between the passes, and from what is alive at an op of the backward pass. "none": no
  schedule fits at all.
- ``before``: the same without the last of the three.
- ``plan``: ``sacplan.plan`` at exactly these bytes, by its own replay, with the seconds it took, the fit included.
- ``half``, ``layer``: the optimum of ``torch.utils.checkpoint`` with selective contexts on halves of layers, and on
  layers.
- ``k full``: as many whole layers fully checkpointed as it takes.

"-": nothing of that class fits. ``peak`` is the plan's over the budget; where it is over 1, it is the smallest peak
that the search found.

The second table has small graphs, whose exact optimum Checkmate's program finds. The third has models that were traced.
Their bounds know nothing of kernel workspaces and of the optimizer's step, so they are loose where the peak is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import sacplan
from benchmarks.graphs.opgraph import OpGraph, as_graph, profile_of
from benchmarks.graphs.optimum import (
    Optimum,
    backward_bound,
    boundary_bound,
    checkmate,
    half_layer_of,
    layer_of,
    selective_contexts,
    whole_regions,
)
from benchmarks.graphs.stacks import gpt, mlp
from benchmarks.harness.command import Parser
from benchmarks.harness.plans import plan_or_least, timed
from benchmarks.harness.results import write_results
from benchmarks.harness.table import Table
from benchmarks.models.cases import example, gpt2

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
RELAXED_LAYERS = 8
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


@dataclass(frozen=True, slots=True)
class Row:
    """One graph at one budget. Ratios are recompute over forward time, None where nothing fits.

    ``relaxed``, ``boundary`` and ``backward`` are the three bounds, None where one was not computed or says that
    no schedule fits at all (``possible`` is False then).
    """

    graph: str
    layers: int
    share: float
    budget_bytes: int
    possible: bool
    relaxed: float | None
    boundary: float | None
    backward: float | None
    plan: Planned
    half: float | None
    layer: float | None
    full: float | None
    full_layers: int | None

    @property
    def bound(self) -> float | None:
        """Return the largest of the three."""
        return _largest(self.relaxed, self.boundary, self.backward) if self.possible else None


def _largest(*bounds: float | None) -> float | None:
    return max((bound for bound in bounds if bound is not None), default=None)


def compare(graph: OpGraph, layers: int, share: float, time_limit: float) -> Row:
    """Apply all methods to a graph at the same bytes."""
    budget = int(share * graph.store_all_peak)
    bounds = [boundary_bound(graph, budget), backward_bound(graph, budget)]
    if layers <= RELAXED_LAYERS:
        bounds.append(checkmate(graph, budget, relax=True, time_limit=time_limit))
    boundary, backward, *relaxed = bounds
    full = whole_regions(graph, budget)
    return Row(
        graph=graph.name,
        layers=layers,
        share=share,
        budget_bytes=budget,
        possible=_possible(*bounds),
        relaxed=relaxed[0].bound if relaxed else None,
        boundary=boundary.bound,
        backward=backward.bound,
        plan=plan_for(profile_of(graph), budget),
        half=selective_contexts(graph, budget, half_layer_of).recompute_ratio,
        layer=selective_contexts(graph, budget, layer_of).recompute_ratio,
        full=full[0] if full else None,
        full_layers=full[1] if full else None,
    )


def _possible(*bounds: Optimum) -> bool:
    return all(bound.status != "Infeasible" for bound in bounds)


@dataclass(frozen=True, slots=True)
class ExactRow:
    """One small graph at one budget, beside Checkmate's exact optimum.

    Attributes:
        optimum, proved: the best schedule that the program found, and its lower bound.
        backward: the bound from what is alive at an op of the backward pass, which takes milliseconds.
    """

    graph: str
    ops: int
    share: float
    budget_bytes: int
    optimum: float | None
    proved: float | None
    backward: float | None
    status: str
    seconds: float
    plan: Planned


def compare_exact(graph: OpGraph, share: float, time_limit: float) -> ExactRow:
    """Find the exact optimum and the plan at the same bytes."""
    budget = int(share * graph.store_all_peak)
    best = checkmate(graph, budget, time_limit=time_limit)
    return ExactRow(
        graph=graph.name,
        ops=len(graph.ops),
        share=share,
        budget_bytes=budget,
        optimum=best.recompute_ratio,
        proved=best.bound,
        backward=backward_bound(graph, budget).bound,
        status=best.status,
        seconds=best.seconds,
        plan=plan_for(profile_of(graph), budget),
    )


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A traced model at one budget: the two bounds from what is alive, and the plan."""

    model: str
    ops: int
    share: float
    budget_bytes: int
    possible: bool
    boundary: float | None
    backward: float | None
    plan: Planned


def compare_model(name: str, profile: sacplan.Profile, shares: list[float]) -> Iterator[ModelRow]:
    """Yield a row for each budget; shares are of the profile's peak, parameters included."""
    graph = as_graph(profile.program, name)
    for share in shares:
        budget = int(share * profile.peak_bytes)
        boundary, backward = boundary_bound(graph, budget), backward_bound(graph, budget)
        yield ModelRow(
            model=name,
            ops=len(profile.program.ops),
            share=share,
            budget_bytes=budget,
            possible=_possible(boundary, backward),
            boundary=boundary.bound,
            backward=backward.bound,
            plan=plan_for(profile, budget),
        )


def _traced() -> Iterator[tuple[str, sacplan.Profile]]:
    yield "example, 4 layers", example(4).profile()
    yield "GPT-2 of transformers", gpt2().profile()


# --- tables -----------------------------------------------------------------------------------------------

_PLAN = (("plan", ">7.4f"), ("peak", ">7.4f"), ("seconds", ">7.2f"))
_BOUNDS = (("before", ">7.4f"), ("bound", ">7.4f"))
_STACKS = Table(
    ("graph", ">8"), ("share", ">5.2f"), *_BOUNDS, *_PLAN,
    *((name, ">7.4f") for name in ("half", "layer", "k full")), ("k", ">7"),
)  # fmt: skip
_EXACT = Table(
    ("graph", ">12"), ("ops", ">4"), ("share", ">5.2f"), ("bound", ">7.4f"), ("exact", ">7.4f"), *_PLAN
)
_MODELS = Table(("model", ">22"), ("share", ">5.2f"), *_BOUNDS, *_PLAN)


def _plan_cells(planned: Planned, budget_bytes: int) -> tuple[float | None, float, float]:
    return planned.ratio, planned.peak_bytes / budget_bytes, planned.seconds


def _or_none(bound: float | None) -> float | str:
    return "none" if bound is None else bound


def _print_stacks(layers: list[int], shares: list[float], time_limit: float) -> Iterator[Row]:
    print(_STACKS.head)
    for n in layers:
        graph = gpt(n)
        for share in shares:
            row = compare(graph, n, share, time_limit)
            bounds = _largest(row.relaxed, row.boundary), _or_none(row.bound)
            contexts = row.half, row.layer, row.full, row.full_layers
            cells = graph.name, share, *bounds, *_plan_cells(row.plan, row.budget_bytes), *contexts
            print(_STACKS.row(*cells), flush=True)
            yield row
    print()


def _print_exact(time_limit: float) -> Iterator[ExactRow]:
    print(f"{_EXACT.head}  Checkmate")
    for graph, shares in EXACT:
        for share in shares:
            row = compare_exact(graph, share, time_limit)
            plan = _plan_cells(row.plan, row.budget_bytes)
            cells = _EXACT.row(graph.name, row.ops, share, row.backward, row.optimum, *plan)
            print(f"{cells}  {row.status.lower()} in {row.seconds:.1f} s", flush=True)
            yield row
    print()


def _print_models(shares: list[float]) -> Iterator[ModelRow]:
    print(_MODELS.head)
    for name, profile in _traced():
        for row in compare_model(name, profile, shares):
            bound = _largest(row.boundary, row.backward) if row.possible else None
            plan = _plan_cells(row.plan, row.budget_bytes)
            print(_MODELS.row(name, row.share, row.boundary, _or_none(bound), *plan), flush=True)
            yield row


def main() -> None:
    parser = Parser(__doc__, "bound.json")
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument(
        "--time-limit", type=float, default=300.0, help="seconds for one program of Checkmate"
    )
    parser.add_argument("--no-exact", action="store_true", help="leave out the small graphs")
    parser.add_argument("--no-models", action="store_true", help="leave out the traced models")
    arguments = parser.begin(note="\n")
    rows = list(_print_stacks(arguments.layers, arguments.shares, arguments.time_limit))
    exact = [] if arguments.no_exact else list(_print_exact(arguments.time_limit))
    models = [] if arguments.no_models else list(_print_models(arguments.shares))
    write_results(
        arguments.json,
        [asdict(row) | {"bound": row.bound} for row in rows],
        exact=[asdict(row) for row in exact],
        models=[asdict(row) for row in models],
    )


if __name__ == "__main__":
    main()
