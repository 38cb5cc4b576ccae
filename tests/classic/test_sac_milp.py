"""The mixed-integer program against brute force over all antichains, with both solvers."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sacplan.classic import subtrees
from sacplan.classic.graph import ExactTradeoff, Graph, MemorySegment, ModuleStats, SACStats
from sacplan.classic.policy import get_optimal_checkpointing_policy_per_module
from sacplan.classic.sac_milp import SacMilpResult, sac_milp
from sacplan.errors import BudgetError, InfeasibleBudget, PlanError, SolverError
from sacplan.solvers.mip import LinearProgram, LinearSolution

# Independent reference -----------------------------------------------------------------------------


def inside(inner: str, outer: str) -> bool:
    """Strictly, for graphs whose root is ''."""
    a, b = (name.split(".") if name else [] for name in (inner, outer))
    return len(a) > len(b) and a[: len(b)] == b


def antichains(names: list[str]) -> Iterator[tuple[str, ...]]:
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    yield from antichains(rest)
    for chosen in antichains([n for n in rest if not inside(n, first) and not inside(first, n)]):
        yield (first, *chosen)


def candidates(
    graph: Graph, ac_units: list[str] | None = None, fsdp_units: tuple[str, ...] = ()
) -> list[str]:
    return [
        node.fqn
        for node in graph.nodes
        if not node.is_leaf
        and (ac_units is None or node.fqn in ac_units)
        and not any(inside(unit, node.fqn) for unit in fsdp_units)
    ]


def rows_of(graph: Graph, world_size: int) -> list[tuple[int, int]]:
    if graph.segments:
        return [(s.position, math.ceil(s.sharded_bytes / world_size) + s.local_bytes) for s in graph.segments]
    parameters = graph.nodes[0].param_per_module
    return [
        (
            graph.fw_post_order.index(n.fqn),
            math.ceil((parameters + n.grad_total) / world_size) + n.act_total + n.act_grad_per_module,
        )
        for n in graph.nodes
    ]


def peak_of(graph: Graph, freed: dict[str, int], world_size: int) -> int:
    return max(
        n_bytes - sum(freed.get(fqn, 0) for fqn in graph.fw_post_order[:position])
        for position, n_bytes in rows_of(graph, world_size)
    )


def all_plans(graph: Graph, names: list[str], world_size: int) -> Iterator[tuple[int, float]]:
    """(peak, ms) of every plan over reachable points."""
    stats = {node.fqn: node for node in graph.nodes}
    for units in antichains(names):
        for picks in itertools.product(*(stats[fqn].points for fqn in units)):
            freed = {
                fqn: round(stats[fqn].sac_memory * point.discard_ratio)
                for fqn, point in zip(units, picks, strict=True)
            }
            yield peak_of(graph, freed, world_size), sum(point.recompute_ms for point in picks)


# Random trees --------------------------------------------------------------------------------------


def random_graph(rng: random.Random, *, continuous: bool = False) -> Graph:
    """A tree with up to six units. Siblings are told apart by their last component, 1 and 10 among them."""
    unit = 10**6 if continuous else 1
    parents = [rng.randint(max(0, i - 4), i) for i in range(rng.randint(2, 11))]
    children: dict[int, list[int]] = {i: [] for i in range(len(parents) + 1)}
    for i, parent in enumerate(parents, start=1):
        children[parent].append(i)
    repeated = tuple(ExactTradeoff(rng.randint(1, 4) / 4, rng.randint(0, 40) / 4) for _ in range(2))
    labels = ["1", "10", "a", "11", "b", "100", "c", "d", "e", "f", "g"]
    nodes: list[ModuleStats] = []
    post: list[str] = []
    alive, inner = 0, 0

    def walk(i: int, fqn: str) -> None:
        nonlocal alive, inner
        at = len(nodes)
        nodes.append(ModuleStats(fqn))
        before = alive
        for label, child in zip(labels, children[i], strict=False):
            walk(child, f"{fqn}.{label}" if fqn else label)
        alive += rng.randint(0, 20) * unit
        is_leaf = (not children[i] and rng.random() < 0.5) or inner >= 6
        inner += not is_leaf
        # mostly the memory that the rows see, at times more or less
        memory = max(1, rng.choice([1, 1, 1, 0.5, 1.5]) * (alive - before)).__floor__()
        trade_off: dict[str, object] = {}
        if not is_leaf and continuous:
            n = rng.randint(1, 3)
            trade_off = {
                "n_segments": n,
                "slopes": tuple(rng.randint(0, 20) / 10 for _ in range(n)),
                "intercepts": tuple(rng.randint(-10, 2) / 10 for _ in range(n)),
                "breakpoints": (0.0, rng.choice([0.5, 0.8, 1.0])),
                "sac_runtime": rng.randint(1, 9) / 2,
            }
            if rng.random() < 0.3:  # a layer that repeats
                memory = 8 * unit
                trade_off |= {"n_segments": 1, "slopes": (1.5,), "intercepts": (-0.2,), "sac_runtime": 2.0}
                trade_off["breakpoints"] = (0.0, 1.0)
        elif not is_leaf and rng.random() < 0.4:
            memory = 8
            trade_off = {"points": repeated}
        elif not is_leaf:
            trade_off = {
                "points": tuple(
                    ExactTradeoff(rng.randint(0, memory) / memory, rng.randint(0, 40) / 4)
                    for _ in range(rng.randint(0, 3))
                )
            }
        nodes[at] = ModuleStats(
            fqn,
            param_per_module=10 * unit if i == 0 else 0,
            grad_total=rng.randint(0, 10) * unit,
            act_total=alive,
            act_grad_per_module=rng.randint(0, 6) * unit,
            is_leaf=is_leaf,
            sac_memory=memory,
            **trade_off,  # type: ignore[arg-type]
        )
        post.append(fqn)

    walk(0, "")
    segments: tuple[MemorySegment, ...] = ()
    if rng.random() < 0.5:
        n = len(post)
        segments = tuple(
            MemorySegment(p, rng.randint(1, 20) * unit, (alive * p // n) + rng.randint(0, 20) * unit)
            for p in (rng.randint(0, n) for _ in range(10))
        )
    return Graph(tuple(nodes), tuple(post), "", segments)


def interesting_budget(rng: random.Random, graph: Graph, world_size: int = 1, **units: object) -> int:
    """The peak of some plan, or a byte less; now and then one that no plan or every plan fits."""
    peaks = sorted({peak for peak, _ in all_plans(graph, candidates(graph, **units), world_size)})  # type: ignore[arg-type]
    return max(1, rng.choice([*peaks[:-1], *peaks[:-1], peaks[0] - 1, peaks[-1]]) - rng.randint(0, 1))


SEEDS = st.integers(0, 2**32 - 1)


def solve(graph: Graph, budget_bytes: int, **kwargs: object) -> SacMilpResult | InfeasibleBudget:
    try:
        return sac_milp(graph, f"{budget_bytes}B", **kwargs)  # type: ignore[arg-type]
    except InfeasibleBudget as error:
        return error


def check_against_brute_force(graph: Graph, budget: int, world_size: int = 1, **units: object) -> None:
    names = candidates(graph, **units)  # type: ignore[arg-type]
    plans = list(all_plans(graph, names, world_size))
    feasible = [ms for peak, ms in plans if peak <= budget]
    untouched = copy.deepcopy(graph)
    result = solve(graph, budget, world_size=world_size, gap=1e-6, **units)
    assert graph == untouched
    if not feasible:
        assert isinstance(result, InfeasibleBudget)
        event("infeasible")
        assert result.budget_bytes == budget
        assert result.smallest_feasible_bytes == min(peak for peak, _ in plans)
        if result.smallest_feasible_bytes > 0:
            check_against_brute_force(graph, result.smallest_feasible_bytes, world_size, **units)
        return
    assert isinstance(result, SacMilpResult)
    event(f"units: {len(result.ac_decisions)}")
    decisions, ms, peak = result
    assert result.status == "optimal"
    assert ms == pytest.approx(min(feasible), rel=2e-6, abs=1e-9)
    assert result.bound_ms is not None
    assert result.bound_ms <= min(feasible) + 1e-9
    # what is returned is a plan, and costs and frees what it says
    assert set(decisions) <= set(names)
    assert not any(inside(a, b) for a in decisions for b in decisions)
    assert list(decisions) == sorted(decisions, key=graph.index)
    freed = {fqn: round(graph[fqn].sac_memory * ratio) for fqn, ratio in decisions.items()}
    assert peak == peak_of(graph, freed, world_size) <= budget
    assert all(n_bytes > 0 for n_bytes in freed.values())
    paid = 0.0
    for fqn, ratio in decisions.items():
        paid += min(p.recompute_ms for p in graph[fqn].points if p.discard_ratio == ratio)
    assert ms == pytest.approx(paid)


@settings(max_examples=400, deadline=None)
@given(SEEDS)
def test_equals_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    world_size = rng.choice([1, 1, 2, 8])
    units: dict[str, object] = {}
    if rng.random() < 0.5:
        names = [node.fqn for node in graph.nodes]
        units["ac_units"] = rng.choice([None, rng.sample(names, rng.randint(0, len(names)))])
        units["fsdp_units"] = tuple(rng.sample(names, rng.randint(0, 2)))
    budget = interesting_budget(rng, graph, world_size, **units)
    check_against_brute_force(graph, budget, world_size, **units)


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.sampled_from([0, 4, 12]))
def test_equals_brute_force_where_subtrees_are_too_rich(seed: int, most: int) -> None:
    """Then units are choices, and that they do not nest is rows."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    budget = interesting_budget(rng, graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subtrees, "_MOST_COMBINED", most)
        check_against_brute_force(graph, budget)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_same_input_same_plan(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    budget = interesting_budget(rng, graph)
    first, second = (solve(graph, budget, gap=1e-2) for _ in range(2))
    assert isinstance(first, InfeasibleBudget) or first == second


# Units by name -------------------------------------------------------------------------------------


def transformer(n_layers: int = 12, root: str = "Net") -> Graph:
    """Layers of an attention each; every layer can discard 40 or 100 of its 100 MiB."""
    mib = 2**20
    nodes = [ModuleStats(root, param_per_module=100 * mib, act_total=n_layers * 100 * mib)]
    post = []
    for i in range(n_layers):
        layer = f"{root}.layers.{i}" if root else f"layers.{i}"
        nodes.append(
            ModuleStats(
                layer,
                act_total=(i + 1) * 100 * mib,
                sac_memory=100 * mib,
                points=(ExactTradeoff(0.4, 1.0), ExactTradeoff(1.0, 4.0)),
            )
        )
        nodes.append(
            ModuleStats(
                f"{layer}.attn",
                act_total=i * 100 * mib + 60 * mib,
                sac_memory=60 * mib,
                points=(ExactTradeoff(1.0, 2.0),),
            )
        )
        post += [f"{layer}.attn", layer]
    return Graph(tuple(nodes), (*post, root), root)


@pytest.mark.parametrize("root", ["Net", ""])
def test_names_are_matched_whole(root: str) -> None:
    graph = transformer(root=root)
    prefix = f"{root}." if root else ""
    decisions, _, _ = sac_milp(graph, "1200MiB", ac_units=["layers.1"])
    assert decisions == {f"{prefix}layers.1": 1.0}
    decisions, _, _ = sac_milp(graph, "1100MiB", ac_units=["layers.1", f"{prefix}layers.10"])
    assert decisions == {f"{prefix}layers.1": 1.0, f"{prefix}layers.10": 1.0}


def test_fsdp_units_keep_their_ancestors_from_being_units() -> None:
    graph = transformer()
    # what contains layers.1.attn is layers.1 and the root, not layers.10 or layers.11
    decisions, _, _ = sac_milp(graph, "240MiB", fsdp_units=["layers.1.attn"])
    assert "Net.layers.1" not in decisions
    assert "Net.layers.1.attn" in decisions
    decisions, _, _ = sac_milp(
        graph, "1200MiB", ac_units=["layers.1", "layers.10"], fsdp_units=["layers.1.attn"]
    )
    assert decisions == {"Net.layers.10": 1.0}
    # a unit that is itself sharded may be checkpointed
    layers = [f"Net.layers.{i}" for i in range(12)]
    decisions, _, _ = sac_milp(graph, "200MiB", ac_units=layers, fsdp_units=layers)
    assert decisions == dict.fromkeys(layers[:11], 1.0)


def test_an_empty_list_of_units_allows_none() -> None:
    with pytest.raises(InfeasibleBudget, match="no module may be checkpointed") as caught:
        sac_milp(transformer(), "90%", ac_units=[])
    assert caught.value.smallest_feasible_bytes == 1300 * 2**20
    assert caught.value.binding == "Net.layers.11"


def test_unknown_units() -> None:
    with pytest.raises(PlanError, match=r"ac_units: unknown module 'layers.12'.*'Net.layers.1'"):
        sac_milp(transformer(), "90%", ac_units=["layers.12"])
    with pytest.raises(PlanError, match=r"fsdp_units: unknown module 'ayers.1'"):
        sac_milp(transformer(), "90%", fsdp_units=["ayers.1"])


def test_world_size_divides_parameters() -> None:
    graph = transformer()
    one, four = sac_milp(graph, "1250MiB"), sac_milp(graph, "1250MiB", world_size=4)
    assert one.recomputation_time_ms > four.recomputation_time_ms == 0.0
    assert four == ({}, 0.0, 1225 * 2**20)
    with pytest.raises(PlanError, match="world_size"):
        sac_milp(graph, 1, world_size=0)


# Results, options and errors -----------------------------------------------------------------------


def test_result_unpacks_and_carries_its_quality() -> None:
    result = sac_milp(transformer(), 0.5)
    decisions, ms, peak = result
    assert len(result) == 3
    assert result.ac_decisions is decisions
    assert (result.recomputation_time_ms, result.peak_bytes) == (ms, peak)
    assert result.status == "optimal"
    assert result.bound_ms is not None
    assert result.bound_ms <= ms
    assert result.gap is not None
    assert result.gap <= 1e-4
    assert "status='optimal'" in repr(result)
    for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert other == result
        assert (other.status, other.bound_ms, other.gap) == (result.status, result.bound_ms, result.gap)


def test_a_budget_that_fits_needs_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearProgram, "solve", None)
    result = sac_milp(transformer(), "100%")
    assert result == ({}, 0.0, 1300 * 2**20)
    assert (result.status, result.bound_ms, result.gap) == ("optimal", 0.0, 0.0)


def test_infeasible_says_what_binds_and_what_would_do() -> None:
    with pytest.raises(
        InfeasibleBudget, match=r"no plan fits 50.00 MiB .*the peak is 1.27 GiB, .* it is 200.00 MiB, at 'Net"
    ) as caught:
        sac_milp(transformer(), "50MiB")
    assert caught.value.budget_bytes == 50 * 2**20
    assert f'"{caught.value.smallest_feasible_bytes}B"' in str(caught.value)
    segment = MemorySegment(0, 500 * 2**20, 0, "optimizer step")
    graph = transformer()
    graph = Graph(graph.nodes, graph.fw_post_order, graph.root, (segment,))
    with pytest.raises(InfeasibleBudget, match="at 'optimizer step'") as caught:
        sac_milp(graph, "90%")
    assert caught.value.binding == "optimizer step"


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"choices": "convex"}, PlanError, "unknown choices 'convex'"),
        ({"gap": -1.0}, PlanError, "gap is -1.0"),
        ({"gap": math.nan}, PlanError, "gap is nan"),
        ({"work_limit": 0}, PlanError, "work limit is 0"),
        ({"work_limit": 1e6}, PlanError, "work_limit must be int"),
        ({"seed": -1}, PlanError, "seed is -1"),
        ({"memory_budget": "1 GiBi"}, BudgetError, "unknown unit"),
        ({"memory_budget": math.nan}, BudgetError, "not finite"),
    ],
)
def test_options_are_checked(kwargs: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sac_milp(transformer(), **({"memory_budget": 1.0} | kwargs))  # type: ignore[arg-type]


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    sac_milp(transformer(), 0.5, gap=1e-2)
    assert capfd.readouterr() == ("", "")


def hard_program() -> LinearProgram:
    """A market split of Cornuéjols and Dawande: small, and out of reach for branch and bound."""
    rng = np.random.default_rng(0)
    program = LinearProgram()
    xs = [program.binary() for _ in range(40)]
    for _ in range(5):
        row = rng.integers(0, 100, len(xs))
        over, under = program.variable(cost=1.0), program.variable(cost=1.0)
        terms = [(x, float(w)) for x, w in zip(xs, row, strict=True)]
        program.row(
            [*terms, (over, -1.0), (under, 1.0)], lower=float(row.sum() // 2), upper=float(row.sum() // 2)
        )
    return program


@pytest.mark.slow
def test_a_limit_of_work_ends_a_search_with_what_it_has() -> None:
    short, longer = (hard_program().solve(work_limit=work) for work in (30_000, 200_000))
    assert (short.status, longer.status) == ("feasible", "feasible")
    assert short.limited
    assert short.objective is not None
    assert longer.objective is not None
    assert longer.objective < short.objective
    assert 20_000 < short.work < longer.work
    assert hard_program().solve(work_limit=30_000) == short


def test_sac_milp_passes_on_that_the_work_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    solve_really = LinearProgram.solve

    def timed_out(self: LinearProgram, **kwargs: object) -> LinearSolution:
        found = solve_really(self, **kwargs)  # type: ignore[arg-type]
        assert found.objective is not None
        return LinearSolution("feasible", found.values, found.objective, found.objective / 2)

    monkeypatch.setattr(LinearProgram, "solve", timed_out)
    result = sac_milp(transformer(), 0.5)
    assert result.status == "feasible"
    assert result.gap == pytest.approx(0.5)


def test_no_incumbent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearProgram, "solve", lambda self, **kwargs: LinearSolution("unknown"))
    # what each row needs at least is known without a program, and the descent gets there
    layers = [f"layers.{i}" for i in range(12)]
    result = sac_milp(transformer(), 0.5, ac_units=layers)
    assert (result.status, result.bound_ms, result.gap) == ("feasible", None, None)
    assert result.peak_bytes <= 2**29
    with pytest.raises(InfeasibleBudget):
        sac_milp(transformer(), "50MiB", ac_units=layers)
    # the cheap root keeps the descent from its children, which alone free enough
    monkeypatch.setattr(subtrees, "_MOST_COMBINED", 0)
    nodes = (
        ModuleStats("", sac_memory=40, points=(ExactTradeoff(1.0, 1.0),)),
        *(ModuleStats(fqn, sac_memory=30, points=(ExactTradeoff(1.0, 100.0),)) for fqn in ("a", "b")),
    )
    graph = Graph(nodes, ("a", "b", ""), "", (MemorySegment(3, 0, 100),))
    assert sac_milp(graph, "60B").status == "feasible"
    with pytest.raises(SolverError, match="raise work_limit"):
        sac_milp(graph, "59B")


@pytest.mark.parametrize("choices", ["reachable", "continuous"])
def test_bytes_hidden_by_a_tolerance_are_found(choices: str) -> None:
    """One byte of 400 GiB is below every solver's tolerance, and yet the peak may not exceed the budget."""
    memory = 100 * 2**30
    fit = {"sac_runtime": 9.0, "n_segments": 1, "slopes": (1.0,), "intercepts": (0.0,)}
    almost = ExactTradeoff((memory - 1) / memory, 1.0)
    nodes = [ModuleStats("", act_total=4 * memory)]
    nodes += [
        ModuleStats(f"{i}", sac_memory=memory, points=(almost, ExactTradeoff(1.0, 9.0)), **fit)  # type: ignore[arg-type]
        for i in range(4)
    ]
    graph = Graph(tuple(nodes), ("0", "1", "2", "3", ""), "")
    for budget, full in ((4, 0), (3, 1), (1, 3)):
        result = sac_milp(graph, f"{budget}B", choices=choices)  # type: ignore[arg-type]
        assert result.peak_bytes <= budget
        if choices == "reachable":
            assert result.recomputation_time_ms == 4 - full + 9 * full
            assert result.status == "optimal"


def test_a_node_without_points_is_no_unit_where_others_have_some() -> None:
    fit = {"sac_runtime": 1.0, "n_segments": 1, "slopes": (1.0,), "intercepts": (0.0,)}
    a = ModuleStats("a", sac_memory=100, act_total=100, **fit)  # type: ignore[arg-type]
    b = ModuleStats("b", sac_memory=100, act_total=100, points=(ExactTradeoff(1.0, 3.0),), **fit)  # type: ignore[arg-type]
    root = ModuleStats("", act_total=200)
    graph = Graph((root, a, b), ("a", "b", ""), "")
    assert sac_milp(graph, "100B").ac_decisions == {"b": 1.0}
    assert sac_milp(Graph((root, a), ("a", ""), ""), "150B").recomputation_time_ms == pytest.approx(0.5)


# One module's ops ----------------------------------------------------------------------------------


def best_policy(stats: SACStats, share: float) -> float | None:
    """Most ms saved by any policy that keeps the rules; None if there is none."""
    limit = math.ceil(share * sum(stats.memory))
    best = None
    for policy in itertools.product((0, 1), repeat=len(stats.func_names)):
        if follows_rules(stats, policy) and sum(np.multiply(policy, stats.memory)) <= limit:
            value = float(np.dot(policy, stats.runtimes))
            best = value if best is None else max(best, value)
    return best


def follows_rules(stats: SACStats, policy: tuple[int, ...]) -> bool:
    rand = {policy[i] for i in stats.rand_ops}
    return (
        (rand <= {1} if stats.force_store_random else len(rand) <= 1)
        and not any(policy[i] for i in stats.view_like_ops)
        and all(policy[op] == (1 if op == parent else policy[parent]) for op, parent in stats.inplace_ops)
    )


@st.composite
def op_stats(draw: st.DrawFn) -> SACStats:
    n = draw(st.integers(0, 8))
    some = st.lists(st.integers(0, n - 1), max_size=3, unique=True) if n else st.just([])
    views = draw(some)
    return SACStats(
        tuple(f"op{i}" for i in range(n)),
        tuple(draw(st.integers(0, 50)) / 8 for _ in range(n)),
        tuple(0 if i in views else draw(st.integers(0, 30)) for i in range(n)),
        view_like_ops=tuple(views),
        rand_ops=tuple(draw(some)),
        inplace_ops=tuple((i, draw(st.integers(0, i))) for i in draw(some)),
        force_store_random=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(op_stats(), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]))
def test_policy_equals_brute_force(stats: SACStats, share: float) -> None:
    expected = best_policy(stats, share)
    if expected is None:
        # either no policy follows the rules, or what must be saved is too much
        error = PlanError if best_policy(stats, 1.0) is None else InfeasibleBudget
        with pytest.raises(error) as caught:
            get_optimal_checkpointing_policy_per_module(stats, share)
        if isinstance(caught.value, InfeasibleBudget):
            needed = caught.value.smallest_feasible_bytes
            assert best_policy(stats, needed / sum(stats.memory)) is not None
            assert best_policy(stats, (needed - 1.5) / sum(stats.memory)) is None  # rounded up: one byte less
        return
    policy = get_optimal_checkpointing_policy_per_module(stats, share, gap=1e-6)
    assert follows_rules(stats, tuple(policy))
    assert sum(np.multiply(policy, stats.memory)) <= math.ceil(share * sum(stats.memory))
    assert np.dot(policy, stats.runtimes) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, True])
def test_policy_budget_is_a_share(share: float) -> None:
    with pytest.raises(BudgetError, match=r"not a share in \[0, 1\]"):
        get_optimal_checkpointing_policy_per_module(SACStats(("mm",), (1.0,), (8,)), share)


def test_policy_statistics_are_checked() -> None:
    with pytest.raises(PlanError, match="1 func_names, 2 runtimes and 1 sizes"):
        get_optimal_checkpointing_policy_per_module(SACStats(("mm",), (1.0, 2.0), (8,)), 0.5)
    with pytest.raises(PlanError, match=r"op indices \[3\]"):
        get_optimal_checkpointing_policy_per_module(SACStats(("mm",), (1.0,), (8,), rand_ops=(3,)), 0.5)
    both = SACStats(("relu_",), (1.0,), (8,), view_like_ops=(0,), inplace_ops=((0, 0),))
    with pytest.raises(PlanError, match=r"op 0 \(relu_\)"):
        get_optimal_checkpointing_policy_per_module(both, 0.5)


def test_policy_that_must_store_more_than_it_may() -> None:
    stats = SACStats(("mm", "dropout"), (1.0, 1.0), (60, 40), rand_ops=(1,), force_store_random=True)
    with pytest.raises(InfeasibleBudget, match=r"op 1, dropout.*0\.4000") as caught:
        get_optimal_checkpointing_policy_per_module(stats, 0.2)
    assert caught.value.smallest_feasible_bytes == 40
    assert get_optimal_checkpointing_policy_per_module(stats, 0.4) == [0, 1]
