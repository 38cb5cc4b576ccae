"""sacplan's plans beside what no schedule can beat, on the same op graphs, bytes and times.

    python -m benchmarks.bound [--layers 2 4 8 16 32] [--shares .9 .8 .7 .6 .5 .4 .3] [--no-exact] [--no-models]

Every figure is recompute time over forward time at a budget that is a share of the peak with everything kept:

- ``bound``: no schedule recomputes less: the largest of Checkmate's linear relaxation (up to 8 layers) and the bounds
  from what is alive between the passes, and at an op of the backward pass; "none" where no schedule fits at all;
- ``before``: the same without the last of the three;
- ``plan``: ``sacplan.plan`` at exactly these bytes, by its own replay, with the seconds it took, the fit included;
- ``half``, ``layer``: the optimum of ``torch.utils.checkpoint`` with selective contexts on halves of layers, and on
  layers;
- ``k full``: as many whole layers fully checkpointed as it takes.

``peak`` is the plan's over the budget (of the smallest that the search found, where it is over 1). The second table has
small graphs whose exact optimum Checkmate's program finds. The third has bounds for plans of models that were really
traced; they know nothing of kernel workspaces and of the optimizer's step, so they are loose where the peak is there.
"-" is: nothing of that class fits. Results go to ``benchmarks/results/bound.json``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch

import sacplan
from benchmarks import common
from benchmarks.common import describe, machine, write_results
from benchmarks.graphs import gpt, mlp
from benchmarks.opgraph import OpGraph, as_graph, profile_of
from benchmarks.optimum import (
    Optimum,
    backward_bound,
    boundary_bound,
    checkmate,
    half_layer_of,
    layer_of,
    selective_contexts,
    whole_regions,
)

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
    """What ``sacplan.plan`` made of a budget; ratio and status are None where it found nothing that fits.

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
    began = time.perf_counter()
    try:
        plan = sacplan.plan(profile, f"{budget_bytes}B")
    except sacplan.InfeasibleBudget as error:
        return Planned(None, error.smallest_feasible_bytes, None, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    return Planned(plan.recompute_ms / profile.forward_ms, plan.peak_bytes, plan.status, seconds)


@dataclass(frozen=True, slots=True)
class Row:
    """One graph at one budget; ratios are recompute over forward time, None where nothing fits.

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
        """The largest of the three."""
        return _largest(self.relaxed, self.boundary, self.backward) if self.possible else None


def _largest(*bounds: float | None) -> float | None:
    return max((bound for bound in bounds if bound is not None), default=None)


def compare(graph: OpGraph, layers: int, share: float, time_limit: float) -> Row:
    """All methods at the same bytes."""
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
    """One small graph at one budget, beside Checkmate's exact optimum (``proved`` is its lower bound).

    ``backward`` is the bound that takes milliseconds.
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
    """The exact optimum and the plan at the same bytes."""
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
    """A traced model at one budget: the bounds from what is alive between and within the passes, and the plan."""

    model: str
    ops: int
    share: float
    budget_bytes: int
    possible: bool
    boundary: float | None
    backward: float | None
    plan: Planned


def compare_model(name: str, profile: sacplan.Profile, shares: list[float]) -> Iterator[ModelRow]:
    """Shares are of the profile's peak, parameters included."""
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
    import transformers

    from examples.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(n_layers=4)
    yield "example, 4 layers", sacplan.profile(model, torch.randint(0, 8192, (8, 1024)), device="h100")
    with torch.device("meta"):
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config()).bfloat16()
    tokens = torch.randint(0, 50257, (16, 1024))
    batch = {"input_ids": tokens, "labels": tokens}
    yield "GPT-2 of transformers", sacplan.profile(gpt2, batch, device="h100", optimizer=torch.optim.AdamW)


def _cell(ratio: float | None, none: str = "-") -> str:
    return f"{none:>7}" if ratio is None else f"{ratio:7.4f}"


def _plan_cells(planned: Planned, budget_bytes: int) -> str:
    return f"{_cell(planned.ratio)} {planned.peak_bytes / budget_bytes:7.4f} {planned.seconds:7.2f}"


def _heading(columns: Iterable[str]) -> str:
    return " ".join(f"{column:>7}" for column in columns)


def main() -> None:
    parser = common.parser(__doc__, "bound.json")
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument(
        "--time-limit", type=float, default=300.0, help="seconds for one program of Checkmate"
    )
    parser.add_argument("--no-exact", action="store_true", help="leave out the small graphs")
    parser.add_argument("--no-models", action="store_true", help="leave out the traced models")
    arguments = parser.parse_args()
    print(describe(machine()) + "\n")
    rows = list(_print_stacks(arguments.layers, arguments.shares, arguments.time_limit))
    exact = [] if arguments.no_exact else list(_print_exact(arguments.time_limit))
    models = [] if arguments.no_models else list(_print_models(arguments.shares))
    write_results(
        arguments.json,
        [asdict(row) | {"bound": row.bound} for row in rows],
        exact=[asdict(row) for row in exact],
        models=[asdict(row) for row in models],
    )


def _print_stacks(layers: list[int], shares: list[float], time_limit: float) -> Iterator[Row]:
    columns = ("before", "bound", "plan", "peak", "seconds", "half", "layer", "k full", "k")
    print(f"{'graph':>8} {'share':>5} {_heading(columns)}")
    for n in layers:
        graph = gpt(n)
        for share in shares:
            row = compare(graph, n, share, time_limit)
            cells = [
                _cell(_largest(row.relaxed, row.boundary)),
                _cell(row.bound, "none"),
                _plan_cells(row.plan, row.budget_bytes),
                *map(_cell, (row.half, row.layer, row.full)),
                f"{'-' if row.full_layers is None else row.full_layers:>7}",
            ]
            print(f"{graph.name:>8} {share:5.2f} {' '.join(cells)}", flush=True)
            yield row
    print()


def _print_exact(time_limit: float) -> Iterator[ExactRow]:
    columns = ("bound", "exact", "plan", "peak", "seconds")
    print(f"{'graph':>12} {'ops':>4} {'share':>5} {_heading(columns)}  Checkmate")
    for graph, shares in EXACT:
        for share in shares:
            row = compare_exact(graph, share, time_limit)
            cells = [_cell(row.backward), _cell(row.optimum), _plan_cells(row.plan, row.budget_bytes)]
            print(
                f"{graph.name:>12} {row.ops:4d} {share:5.2f} {' '.join(cells)}"
                f"  {row.status.lower()} in {row.seconds:.1f} s",
                flush=True,
            )
            yield row
    print()


def _print_models(shares: list[float]) -> Iterator[ModelRow]:
    columns = ("before", "bound", "plan", "peak", "seconds")
    print(f"{'model':>22} {'share':>5} {_heading(columns)}")
    for name, profile in _traced():
        for row in compare_model(name, profile, shares):
            bound = _largest(row.boundary, row.backward) if row.possible else None
            cells = [
                _cell(row.boundary),
                _cell(bound, "none"),
                _plan_cells(row.plan, row.budget_bytes),
            ]
            print(f"{name:>22} {row.share:5.2f} {' '.join(cells)}", flush=True)
            yield row


if __name__ == "__main__":
    main()
