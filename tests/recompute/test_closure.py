"""The hull of kept bytes against recompute time equals the one over all sets, tried one by one."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacplan.techniques.recompute import closure
from sacplan.techniques.recompute.closure import ClosureOp, ClosureProblem, TradeoffPoint, evaluate, tradeoff

# Few different values make ties; 0.1 and 0.3 are no short binary fractions.
COSTS = st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.0, 7.5])
SIZES = st.sampled_from([0, 1, 2, 3, 8, 100])


@st.composite
def problems(draw: st.DrawFn, max_ops: int = 9) -> ClosureProblem:
    sizes = [draw(SIZES) for _ in range(draw(st.integers(1, 3)))]
    ops = []
    for _ in range(draw(st.integers(0, max_ops))):
        reads = tuple(draw(st.lists(st.integers(0, len(sizes) - 1), max_size=3)))
        writes = tuple(range(len(sizes), len(sizes) + draw(st.integers(1, 3))))
        sizes += [draw(SIZES) for _ in writes]
        ops.append(ClosureOp(draw(COSTS), reads, writes, draw(st.integers(0, 5)) > 0))
    storages = range(len(sizes))
    saved = frozenset(s for s in storages if draw(st.booleans()))
    free = frozenset(s for s in storages if draw(st.integers(0, 4)) == 0)
    return ClosureProblem(tuple(ops), tuple(sizes), saved, free)


def simulate(problem: ClosureProblem, discarded: frozenset[int]) -> tuple[int, Fraction]:
    """A backward pass that asks for each saved storage, by recursion."""
    makers = {s: op for op in discarded for s in problem.ops[op].writes}
    held: set[int] = set()
    ran: dict[int, Fraction] = {}

    def get(storage: int) -> None:
        op = makers.get(storage)
        if op is None:
            held.add(storage)
        elif op not in ran:
            ran[op] = Fraction(problem.ops[op].cost_ms)
            for needed in problem.ops[op].reads:
                get(needed)

    for storage in problem.saved:
        get(storage)
    return sum(problem.storage_bytes[s] for s in held - problem.free), sum(ran.values(), Fraction(0))


def all_sets(problem: ClosureProblem) -> list[frozenset[int]]:
    able = [index for index, op in enumerate(problem.ops) if op.discardable]
    return [frozenset(c) for n in range(len(able) + 1) for c in itertools.combinations(able, n)]


def brute_hull(points: set[tuple[int, Fraction]], start: tuple[int, Fraction]) -> list[tuple[int, Fraction]]:
    """Gift wrapping from ``start`` to the fewest bytes: the flattest way on, and the furthest of those."""
    hull = [start]
    while True:
        kept, cost = hull[-1]
        ahead = [((c - cost) / (kept - k), k, c) for k, c in points if k < kept]
        if not ahead:
            return hull
        _, k, c = min(ahead)
        hull.append((k, c))


def exact(problem: ClosureProblem, point: TradeoffPoint) -> tuple[int, Fraction]:
    return point.kept_bytes, sum((Fraction(problem.ops[op].cost_ms) for op in point.discarded), Fraction(0))


def check_against_all_sets(problem: ClosureProblem) -> int:
    """The hull and the smallest sets that reach it; returns how many vertices there are."""
    reached: dict[tuple[int, Fraction], int] = {}
    for chosen in all_sets(problem):
        figures = simulate(problem, chosen)
        reached[figures] = min(reached.get(figures, 99), len(evaluate(problem, chosen).discarded))
    hull = brute_hull(set(reached), simulate(problem, frozenset()))
    points = tradeoff(problem, max_points=1000)
    assert [exact(problem, point) for point in points] == hull
    assert [len(point.discarded) for point in points] == [reached[vertex] for vertex in hull]
    assert points[0].discarded == frozenset()
    for before, after in itertools.pairwise(points):
        assert before.discarded < after.discarded
    return len(hull)


@settings(max_examples=300)
@given(problems())
def test_vertices_are_the_hull_of_all_sets(problem: ClosureProblem) -> None:
    check_against_all_sets(problem)


def test_vertices_are_the_hull_of_all_sets_of_nine_ops() -> None:
    assert sum(check_against_all_sets(random_unit(9, seed)) for seed in range(60)) > 200


@settings(max_examples=150)
@given(problems(), st.data())
def test_evaluate_agrees_with_a_simulated_backward(problem: ClosureProblem, data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(all_sets(problem)))
    point = evaluate(problem, chosen)
    kept, cost = simulate(problem, chosen)
    assert (point.kept_bytes, point.recompute_ms) == (kept, float(cost))
    assert point.discarded <= chosen
    assert evaluate(problem, point.discarded) == point


@settings(max_examples=150)
@given(problems(), st.integers(2, 5), st.integers(0, 4))
def test_points_are_reachable_and_none_dominates_another(
    problem: ClosureProblem, max_points: int, between: int
) -> None:
    vertices = tradeoff(problem, max_points=max_points)
    points = tradeoff(problem, max_points=max_points, between=between)
    assert len(vertices) <= max_points
    assert (points[0], points[-1]) == (vertices[0], vertices[-1])
    assert len(points) <= len(vertices) + between * (len(vertices) - 1)
    for point in points:
        assert evaluate(problem, point.discarded) == point
    for before, after in itertools.pairwise(points):
        assert before.kept_bytes > after.kept_bytes
        assert before.recompute_ms <= after.recompute_ms
    for before, after in itertools.pairwise(points[1:]):
        assert before.recompute_ms < after.recompute_ms
    # A capped hull is made of true vertices.
    assert set(vertices) <= set(tradeoff(problem, max_points=1000))


def figures(points: tuple[TradeoffPoint, ...]) -> list[tuple[int, float, list[int]]]:
    return [(point.kept_bytes, point.recompute_ms, sorted(point.discarded)) for point in points]


def random_unit(n_ops: int, seed: int) -> ClosureProblem:
    rng = random.Random(seed)
    ops, sizes, live = [], [2**25], [0]
    saved, free = {0}, set()
    for _ in range(n_ops):
        reads = {rng.choice(live[-4:]), rng.choice(live[-12:])}
        if rng.random() < 0.3:
            free.add(len(sizes))
            reads.add(len(sizes))
            sizes.append(2**24)
        writes = tuple(range(len(sizes), len(sizes) + rng.choice([1, 1, 1, 2, 3])))
        sizes += [int(2**24 * rng.choice([2, 2, 4, 7, 0.01])) for _ in writes]
        saved.update(s for s in writes if rng.random() < 0.5)
        live.append(writes[0])
        ops.append(ClosureOp(rng.uniform(0.001, 2.0), tuple(sorted(reads)), writes, rng.random() < 0.9))
    return ClosureProblem(tuple(ops), tuple(sizes), frozenset(saved), frozenset(free))


def test_the_cuts_of_a_large_unit_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chord contracts what its ends agree on, so all cuts together are hardly more work than a few whole ones."""
    problem = random_unit(800, seed=1)
    cut, edges = closure.source_side, []

    def counted(terminal: list[int], between: list[tuple[int, int, int]]) -> list[bool]:
        edges.append(len(terminal) + len(between))
        return cut(terminal, between)

    monkeypatch.setattr(closure, "source_side", counted)
    points = tradeoff(problem, between=2)
    assert len(points) > 24
    assert len(edges) <= 2 * 24
    assert sum(edges) < 8 * edges[0], edges
    monkeypatch.undo()
    assert tradeoff(problem, between=2) == points
