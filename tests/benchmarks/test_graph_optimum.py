"""The programs that bound plans, the graphs they are solved on, and the recordings that those become."""

from __future__ import annotations

import itertools

import pytest

import sacplan
from benchmarks.graphs.opgraph import (
    BackwardOp,
    Builder,
    ForwardOp,
    OpGraph,
    as_graph,
    as_recording,
    profile_of,
)
from benchmarks.graphs.optimum import (
    backward_bound,
    boundary_bound,
    checkmate,
    half_layer_of,
    layer_of,
    selective_contexts,
    whole_regions,
)
from benchmarks.graphs.stacks import gpt, mlp
from sacplan._program.program import Event
from sacplan._recompute.rewrite import recomputed
from tests.zoo.language_models import LM, cross_entropy, tokens

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")

GRAPHS = [
    gpt(2),
    gpt(3, fused=False),
    gpt(2, coarse=True),
    gpt(4, ratios=(4, 8)),
    gpt(2, vocab=50000),
    mlp(5),
]

# layers, share of the peak, and recompute over forward time: Checkmate's relaxation, the boundary bound, selective
# contexts on layers and on halves, whole layers and how many. From separate programs over the same graphs.
REFERENCE = [
    (2, 0.9, 0.0224, 0.0, 0.1209, 0.0847, 0.3519, 1),
    (2, 0.7, 0.0705, 0.0516, None, 0.3553, None, None),
    (2, 0.4, 0.3536, 0.2818, None, None, None, None),
    (4, 0.8, 0.044, 0.0324, 0.073, 0.0584, 0.3542, 2),
    (4, 0.5, 0.1762, 0.1807, 0.4217, 0.3937, 0.5313, 3),
]

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


@pytest.mark.parametrize("graph", GRAPHS, ids=_named)
def test_replay_of_recording_has_the_store_all_peak(graph: OpGraph) -> None:
    run = as_recording(graph).footprint
    assert run.peak_bytes == graph.store_all_peak
    assert run.end_bytes == 0


def test_store_all_peak_of_a_chain_by_hand() -> None:
    build = Builder("chain")
    a = build.forward("a", 10, 1.0)
    b = build.forward("b", 20, 1.0, [a])  # nobody saves a: it goes here
    c = build.forward("c", 5, 1.0, [b])
    d = build.backward("dc", 7, 1.0, [c])  # b 20, c 5, dc 7
    build.backward("db", 4, 1.0, [b], [d])  # b 20, dc 7, db 4
    assert build.graph().store_all_peak == 32
    assert profile_of(build.graph()).peak_bytes == 32


@pytest.mark.parametrize("graph", GRAPHS, ids=_named)
def test_a_recording_becomes_the_graph_it_was_made_from(graph: OpGraph) -> None:
    assert as_graph(as_recording(graph), graph.name) == graph


def test_module_calls_of_a_recording() -> None:
    program = as_recording(gpt(2))
    assert [scope.fqn for scope in program.scopes] == [
        "",
        "layers.0",
        "layers.0.attn",
        "layers.0.mlp",
        "layers.1",
        "layers.1.attn",
        "layers.1.mlp",
    ]
    names = [program.ops[i].name for i in program.sites(3)]
    assert names == ["ln2", "fc1", "gelu", "fc2", "add2"]
    backward = [program.scopes[scope].fqn for scope in program.backward_order]
    assert backward == [
        "",
        "layers.1",
        "layers.1.mlp",
        "layers.1.attn",
        "layers.0",
        "layers.0.mlp",
        "layers.0.attn",
    ]
    # a layer's input is packed where it is normalised, in the layer itself, though the layer before made it
    made_in = {s: op.scope for op in program.ops for s in op.writes}
    elsewhere = {
        (program.scopes[made_in[s]].fqn, program.scopes[scope].fqn)
        for s, scope in zip(program.handle_storages, program.liveness.handle_scopes, strict=True)
        if made_in[s] != scope
    }
    assert elsewhere == {
        ("", "layers.0.attn"),
        ("layers.0.attn", "layers.0.mlp"),
        ("layers.0.mlp", "layers.1.attn"),
        ("layers.1.attn", "layers.1.mlp"),
        ("layers.1.mlp", ""),
    }


def test_a_graph_of_a_recording_is_not_made_into_a_recording() -> None:
    profile = sacplan.profile(LM(1), tokens(), cross_entropy, device="h100")
    with pytest.raises(ValueError, match="plan for that recording itself"):
        as_recording(as_graph(profile.program))


@pytest.mark.parametrize("row", REFERENCE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_reference_figures(row: tuple[float | None, ...]) -> None:
    layers, share, relaxed, boundary, layer, half, full, full_layers = row
    graph = gpt(layers)
    budget = int(share * graph.store_all_peak)

    def close(value: float | None) -> object:
        return None if value is None else pytest.approx(value, abs=6e-5)

    assert checkmate(graph, budget, relax=True).bound == close(relaxed)
    assert boundary_bound(graph, budget).recompute_ratio == close(boundary)
    assert selective_contexts(graph, budget, layer_of).recompute_ratio == close(layer)
    assert selective_contexts(graph, budget, half_layer_of).recompute_ratio == close(half)
    assert whole_regions(graph, budget) == (None if full is None else (close(full), full_layers))


@pytest.mark.parametrize(("graph", "share", "optimum"), EXACT, ids=lambda v: getattr(v, "name", v))
def test_exact_optimum_and_what_is_below_and_above_it(graph: OpGraph, share: float, optimum: float) -> None:
    budget = int(share * graph.store_all_peak)
    exact = checkmate(graph, budget)
    assert exact.status == "Optimal"
    assert exact.recompute_ratio == pytest.approx(optimum, rel=2e-4)
    boundary, backward = boundary_bound(graph, budget).bound, backward_bound(graph, budget).bound
    assert boundary <= backward + 1e-9
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
    between = _cheapest_by_trying(graph, budget, set(), set(graph.saved))
    assert boundary_bound(graph, budget).recompute_ratio == pytest.approx(between, rel=2e-4, abs=1e-9)
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


def test_a_second_output_costs_its_op_and_can_be_kept_alone() -> None:
    """An op of 10 ms with outputs of 8 and 2 bytes, from a source of 1 ms and 1 byte; backward reads all three."""
    graph = OpGraph(
        "two outputs",
        (
            ForwardOp("source", 1, 1.0, ()),
            ForwardOp("pair", 8, 10.0, (0,)),
            ForwardOp("pair", 2, 0.0, (0,), made_with=1),
        ),
        (BackwardOp("use", 1, 1.0, (0, 1, 2), ()),),
    )
    assert boundary_bound(graph, 11).bound == pytest.approx(0.0)
    assert boundary_bound(graph, 10).bound == pytest.approx(1 / 11)  # the source runs again
    assert boundary_bound(graph, 9).bound == pytest.approx(10 / 11)  # the pair does, for either output
    assert backward_bound(graph, 12).bound == pytest.approx(0.0)
    assert backward_bound(graph, 11).status == "Infeasible"  # the gradient needs a byte too


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


@pytest.mark.parametrize("share", [0.9, 0.8, 0.6, 0.5])
def test_no_plan_is_under_the_bounds(share: float) -> None:
    graph = gpt(3)
    budget = int(share * graph.store_all_peak)
    plan = sacplan.plan(profile_of(graph), f"{budget}B")
    assert plan.peak_bytes <= budget
    ratio = plan.recompute_ms / graph.forward_ms
    assert backward_bound(graph, budget).bound <= ratio + 1e-9
    assert checkmate(graph, budget, relax=True).bound <= ratio + 1e-9


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_no_plan_of_a_traced_model_is_under_the_bounds(share: float) -> None:
    profile = sacplan.profile(LM(3, dim=64), tokens(8, 256), cross_entropy, device="h100")
    graph = as_graph(profile.program)
    parameters = sum(
        profile.program.storage_bytes[s]
        for s in profile.program.initial
        if (int(Event.FREE), s) not in profile.program.events
    )
    assert graph.fixed_bytes == parameters
    assert graph.forward_ms == pytest.approx(
        sum(op.time_ms for op in profile.program.ops if op.phase == 0 and op.writes)
    )
    # the graph lets go as soon as nobody reads, and knows no workspace
    assert graph.store_all_peak <= profile.peak_bytes
    budget = int(share * profile.peak_bytes)
    plan = sacplan.plan(profile, f"{budget}B")
    bound = backward_bound(graph, budget).bound
    assert bound is not None
    assert bound * graph.forward_ms <= plan.recompute_ms * (1 + 1e-6)


def test_infeasible_where_one_backward_op_alone_needs_more() -> None:
    graph = gpt(2)
    unit = graph.forward[0].nbytes
    # d_gelu takes fc1 (4 units) and its gradient (4), makes one (4), and the residual's gradient (1) waits
    assert backward_bound(graph, 13 * unit).status == "Optimal"
    assert backward_bound(graph, 13 * unit - unit // 1000).status == "Infeasible"
