"""The hull of kept bytes against recompute time equals the one over all sets, tried one by one."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacplan._recompute import closure
from sacplan._recompute.closure import ClosureOp, ClosureProblem, TradeoffPoint, evaluate, tradeoff
from sacplan.errors import PlanError

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


def chain(
    costs: list[float], sizes: list[int], saved: set[int], free: frozenset[int] = frozenset()
) -> ClosureProblem:
    """Storage 0 is the input; op i reads storage i and writes storage i + 1."""
    ops = tuple(ClosureOp(cost, (i,), (i + 1,), True) for i, cost in enumerate(costs))
    return ClosureProblem(ops, tuple(sizes), frozenset(saved), free)


def figures(points: tuple[TradeoffPoint, ...]) -> list[tuple[int, float, list[int]]]:
    return [(point.kept_bytes, point.recompute_ms, sorted(point.discarded)) for point in points]


def test_chain_by_hand() -> None:
    # input 10 bytes (saved, nobody else keeps it), then a cheap op of 40 bytes and a dear one of 30.
    problem = chain([1.0, 6.0], [10, 40, 30], saved={0, 1, 2})
    assert figures(tradeoff(problem)) == [(80, 0.0, []), (40, 1.0, [0]), (10, 7.0, [0, 1])]
    # Discarding the second op alone would hold 50 bytes for 6 ms.
    assert evaluate(problem, {1}) == TradeoffPoint(50, 6.0, frozenset({1}))


def test_a_held_input_costs_its_bytes_once() -> None:
    # Autograd wants storages 2 and 3 only; both are made from 1, which it does not keep.
    ops = (
        ClosureOp(5.0, (0,), (1,), True),
        ClosureOp(1.0, (1,), (2,), True),
        ClosureOp(1.0, (1,), (3,), True),
    )
    problem = ClosureProblem(ops, (0, 7, 10, 10), frozenset({2, 3}), frozenset())
    assert evaluate(problem, {1}) == TradeoffPoint(17, 1.0, frozenset({1}))
    assert evaluate(problem, {1, 2}) == TradeoffPoint(7, 2.0, frozenset({1, 2}))
    assert evaluate(problem, {0, 1, 2}) == TradeoffPoint(0, 7.0, frozenset({0, 1, 2}))
    assert figures(tradeoff(problem)) == [(20, 0.0, []), (7, 2.0, [1, 2]), (0, 7.0, [0, 1, 2])]


def test_diamond_pays_the_shared_op_once() -> None:
    # 0 -> a -> (b, c) -> d; nothing but d's inputs is saved, the input is alive anyway.
    ops = (
        ClosureOp(4.0, (0,), (1,), True),
        ClosureOp(1.0, (1,), (2,), True),
        ClosureOp(1.0, (1,), (3,), True),
        ClosureOp(9.0, (2, 3), (4,), True),
    )
    problem = ClosureProblem(ops, (50, 100, 8, 8, 8), frozenset({2, 3}), frozenset({0}))
    assert evaluate(problem, {0, 1}) == TradeoffPoint(8, 5.0, frozenset({0, 1}))
    # One branch alone (8 bytes for 5 ms) lies above the line from nothing to both (16 bytes for 6 ms).
    assert figures(tradeoff(problem)) == [(16, 0.0, []), (0, 6.0, [0, 1, 2])]
    assert figures(tradeoff(problem, between=3)) == [(16, 0.0, []), (8, 5.0, [0, 1]), (0, 6.0, [0, 1, 2])]


def test_an_op_of_several_outputs_is_paid_once() -> None:
    ops = (ClosureOp(3.0, (0,), (1, 2), True),)
    problem = ClosureProblem(ops, (1, 5, 6), frozenset({1, 2}), frozenset({0}))
    assert figures(tradeoff(problem)) == [(11, 0.0, []), (0, 3.0, [0])]


def test_ops_that_save_nothing_never_appear() -> None:
    # Op 1's result is saved but alive anyway, op 2's is not saved, op 3 must not run again.
    ops = (
        ClosureOp(1.0, (0,), (1,), True),
        ClosureOp(0.0, (0,), (2,), True),
        ClosureOp(0.0, (0,), (3,), True),
        ClosureOp(0.0, (0,), (4,), False),
    )
    problem = ClosureProblem(ops, (1, 9, 9, 9, 9), frozenset({1, 2, 4}), frozenset({0, 2}))
    assert figures(tradeoff(problem)) == [(18, 0.0, []), (9, 1.0, [0])]


def test_what_is_needed_but_not_asked_for_is_left_out() -> None:
    problem = chain([1.0, 1.0, 1.0], [0, 5, 5, 5], saved={1, 2})
    assert evaluate(problem, {1, 2}).discarded == {1}


def test_of_equal_figures_the_fewer_ops() -> None:
    # Op 0 is free of cost, and its input would have to be held in place of its output: nothing gained.
    problem = chain([0.0, 1.0], [5, 5, 20], saved={2})
    assert figures(tradeoff(problem)) == [(20, 0.0, []), (5, 1.0, [1])]


def test_calls_that_feed_each_other_may_make_a_cycle() -> None:
    # Merged over two calls, the first op reads what the second wrote in the call before.
    ops = (ClosureOp(1.0, (0, 2), (1,), True), ClosureOp(2.0, (1,), (2,), True))
    problem = ClosureProblem(ops, (3, 10, 10), frozenset({1, 2}), frozenset())
    assert figures(tradeoff(problem)) == [(20, 0.0, []), (13, 1.0, [0]), (3, 3.0, [0, 1])]
    assert evaluate(problem, {0}) == TradeoffPoint(13, 1.0, frozenset({0}))


def test_nothing_to_discard() -> None:
    empty = ClosureProblem((), (), frozenset(), frozenset())
    assert tradeoff(empty, between=3) == (TradeoffPoint(0, 0.0, frozenset()),)
    kept = ClosureProblem((ClosureOp(1.0, (0,), (1,), False),), (4, 5), frozenset({1}), frozenset())
    assert tradeoff(kept) == (TradeoffPoint(5, 0.0, frozenset()),)


def test_prices_that_only_exact_arithmetic_tells_apart() -> None:
    # Three ops whose prices per byte differ in the last bit of a double, at gigabytes.
    size = 3 * 2**30
    costs = [0.1, math.nextafter(0.1, 1.0), math.nextafter(math.nextafter(0.1, 1.0), 1.0)]
    ops = tuple(ClosureOp(cost, (), (i,), True) for i, cost in enumerate(reversed(costs)))
    problem = ClosureProblem(ops, (size,) * 3, frozenset({0, 1, 2}), frozenset())
    assert [sorted(point.discarded) for point in tradeoff(problem)] == [[], [2], [1, 2], [0, 1, 2]]


def test_the_cap_takes_the_vertices_furthest_under_the_chord() -> None:
    # Independent storages: the hull discards them by price; the second step is the sharpest bend.
    costs = [1.0, 1.1, 30.0, 33.0]
    ops = tuple(ClosureOp(cost, (), (i,), True) for i, cost in enumerate(costs))
    problem = ClosureProblem(ops, (10,) * 4, frozenset(range(4)), frozenset())
    assert [len(point.discarded) for point in tradeoff(problem, max_points=3)] == [0, 2, 4]
    assert [len(point.discarded) for point in tradeoff(problem)] == [0, 1, 2, 3, 4]


def test_points_between_fill_a_straight_edge() -> None:
    # Equal prices: the hull is one edge, and all points on it are reachable.
    ops = tuple(ClosureOp(1.0, (), (i,), True) for i in range(8))
    problem = ClosureProblem(ops, (10,) * 8, frozenset(range(8)), frozenset())
    assert len(tradeoff(problem)) == 2
    assert [point.kept_bytes for point in tradeoff(problem, between=3)] == [80, 60, 40, 20, 0]
    assert len(tradeoff(problem, between=99)) == 9


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((ClosureOp(1.0, (7,), (0,), True),), (1,), frozenset(), frozenset()), "storage 7"),
        (((), (-1,), frozenset(), frozenset()), "-1 bytes"),
        (((ClosureOp(-1.0, (), (0,), True),), (1,), frozenset(), frozenset()), r"-1\.0 ms"),
        (((ClosureOp(math.nan, (), (0,), True),), (1,), frozenset(), frozenset()), "nan ms"),
        (
            (
                (ClosureOp(1.0, (), (0,), True), ClosureOp(1.0, (), (0,), False)),
                (1,),
                frozenset(),
                frozenset(),
            ),
            "by op 0 and by op 1",
        ),
    ],
)
def test_problems_that_make_no_sense(arguments: tuple, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ClosureProblem(*arguments)


def test_wrong_questions() -> None:
    problem = ClosureProblem((ClosureOp(1.0, (), (0,), False),), (1,), frozenset(), frozenset())
    with pytest.raises(PlanError, match="not discardable"):
        evaluate(problem, {0})
    with pytest.raises(PlanError, match="op 3"):
        evaluate(problem, {3})
    with pytest.raises(PlanError, match="max_points=1"):
        tradeoff(problem, max_points=1)
    with pytest.raises(PlanError, match="between=-1"):
        tradeoff(problem, between=-1)
