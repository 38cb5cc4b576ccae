"""The programs that bound plans, the graphs they are solved on, and the recordings that those become."""

from __future__ import annotations

import itertools

import pytest

import sacplan
from benchmarks.graphs.opgraph import (
    OpGraph,
    as_recording,
    profile_of,
)
from benchmarks.graphs.optimum import (
    backward_bound,
    checkmate,
)
from benchmarks.graphs.stacks import gpt, mlp
from sacplan.techniques.recompute.rewrite import recomputed

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")

# graph, share of the peak, exact optimum of Checkmate's program as two other solvers found it (CBC and HiGHS)
EXACT = [
    (mlp(3), 0.7, 0.363148),
    (mlp(3), 0.5, 1.089445),
    (gpt(1, coarse=True), 0.7, 0.299094),
    (gpt(2, coarse=True), 0.6, 0.329501),
    (gpt(2), 0.8, 0.051557),
]


def _named(graph: OpGraph) -> str:
    return graph.name


@pytest.mark.slow
@pytest.mark.parametrize(("graph", "share", "optimum"), EXACT, ids=lambda v: getattr(v, "name", v))
def test_exact_optimum_and_what_is_below_and_above_it(graph: OpGraph, share: float, optimum: float) -> None:
    budget = int(share * graph.store_all_peak)
    exact = checkmate(graph, budget)
    assert exact.status == "Optimal"
    assert exact.recompute_ratio == pytest.approx(optimum, rel=2e-4)
    backward = backward_bound(graph, budget).bound
    assert backward <= exact.recompute_ratio * (1 + 1e-9)


def _cheapest_by_trying(graph: OpGraph, room: int, now: set[int], later: set[int]) -> float:
    """Least time of ops that run again, over all sets of forward tensors that may be alive at a moment."""
    best = float("inf")
    count = len(graph.forward)
    for bits in itertools.product((False, True), repeat=count):
        alive = {i for i in range(count) if bits[i]}
        if not now <= alive or sum(graph.forward[i].nbytes for i in alive) > room:
            continue
        again: set[int] = set()
        pending = list(later - alive)
        while pending:
            i = pending.pop()
            if i not in again:
                again.add(i)
                pending.extend(u for u in graph.forward[i].reads if u not in alive)
        best = min(best, sum(graph.forward[i].time_ms for i in again))
    return best / graph.forward_ms


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85])
@pytest.mark.parametrize("graph", [mlp(3), gpt(1)], ids=_named)
def test_bounds_against_every_set_of_tensors(graph: OpGraph, share: float) -> None:
    budget = int(share * graph.store_all_peak)
    within = []
    for j, op in enumerate(graph.backward):
        later = {i for after in graph.backward[j + 1 :] for i in after.saved}
        read_later = {p for after in graph.backward[j:] for p in after.reads} | {j}
        gradients = sum(graph.backward[p].nbytes for p in read_later if p <= j)
        within.append(_cheapest_by_trying(graph, budget - gradients, set(op.saved), later))
    found = backward_bound(graph, budget, moments=len(graph.backward))
    if max(within) == float("inf"):
        assert found.status == "Infeasible"
    else:
        assert found.recompute_ratio == pytest.approx(max(within), rel=2e-4, abs=1e-9)


@pytest.mark.parametrize(("layers", "share"), [(2, 0.5), (2, 0.7), (4, 0.3), (4, 0.6), (8, 0.6)])
def test_the_bound_within_backward_is_attained(layers: int, share: float) -> None:
    """What its program says to run again, replayed as a plan for the whole model: within the budget, at that price."""
    graph = gpt(layers)
    program = as_recording(graph)
    budget = int(share * graph.store_all_peak)
    found = backward_bound(graph, budget)
    sites = program.sites(program.calls[""][0])
    run = recomputed(program, {"": {sites[i]: 1 for i in found.rerun}}).footprint
    assert run.peak_bytes <= budget
    assert run.recompute_ms / graph.forward_ms == pytest.approx(found.bound, rel=2e-4)


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_no_plan_is_under_the_bounds(share: float) -> None:
    graph = gpt(3)
    budget = int(share * graph.store_all_peak)
    plan = sacplan.plan(profile_of(graph), f"{budget}B")
    assert plan.peak_bytes <= budget
    ratio = plan.recompute_ms / graph.forward_ms
    assert backward_bound(graph, budget).bound <= ratio + 1e-9
