"""The solvers that ``plan`` asks, against brute force over all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import sacplan
from sacplan._solve.local import descend, give_back
from sacplan._solve.mip import LinearProgram, LinearSolution
from sacplan._solve.problem import DEVICE_MEMORY, Choice, OnceCost, PairCost, Problem, ResourceRow, Solution
from sacplan._solve.solvers import Solver
from sacplan.errors import SolverError

SOLVERS: list[Solver] = [sacplan.Milp(gap=0.0), sacplan.Greedy(), sacplan.Uniform()]
Options = list[tuple[float, list[int]]]
"""Cost and uses by row, of the options but the first."""


def _choice(kind: object, options: Options, n_rows: int) -> Choice:
    uses = np.array([[0] * n_rows, *(uses for _, uses in options)], dtype=np.int64)
    costs = np.array([0.0, *(cost for cost, _ in options)])
    return Choice(kind, costs, uses, 1000 + uses.min(axis=1))


def _rows(resources: list[str]) -> tuple[ResourceRow, ...]:
    return tuple(ResourceRow(resource, i, i + 1) for i, resource in enumerate(resources))


def _problem(base: list[int], options: list[Options], limits: list[int] | int = 0) -> Problem:
    """Device memory only."""
    choices = tuple(_choice(i, own, len(base)) for i, own in enumerate(options))
    limit = np.broadcast_to(np.array(limits, dtype=np.int64), len(base))
    return Problem(_rows([DEVICE_MEMORY] * len(base)), np.array(base, dtype=np.int64), limit, choices)


def all_picks(problem: Problem) -> list[dict[int, int]]:
    each = [range(len(choice.costs)) for choice in problem.choices]
    return [{i: o for i, o in enumerate(picked) if o} for picked in itertools.product(*each)]


def cheapest(problem: Problem) -> float | None:
    """By brute force, and with arithmetic of its own."""

    def fits(picks: dict[int, int]) -> bool:
        uses = [problem.choices[i].uses[o] for i, o in picks.items()]
        return all(
            base + sum(int(use[row]) for use in uses) <= limit
            for row, (base, limit) in enumerate(zip(problem.base, problem.limits, strict=True))
        )

    def cost(picks: dict[int, int]) -> float:
        own = sum(problem.choices[i].costs[o] for i, o in picks.items())
        links = sum(k.costs[picks.get(k.first, 0)][picks.get(k.second, 0)] for k in problem.links)
        once = sum(c.cost for c in problem.once_costs if any(picks.get(i, 0) == o for i, o in c.pairs))
        return float(own + links + once)

    return min((cost(picks) for picks in all_picks(problem) if fits(picks)), default=None)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A few choices with invented uses of one to three resources, links and costs paid once."""
    resources = draw(
        st.lists(st.sampled_from([DEVICE_MEMORY, "host memory", "link time"]), min_size=1, max_size=4)
    )
    resources[0] = DEVICE_MEMORY
    sizes = [1 if resource == DEVICE_MEMORY else draw(st.sampled_from([1, 10**6])) for resource in resources]
    amount = st.integers(-300, 60)

    def option() -> tuple[float, list[int]]:
        cost = draw(st.integers(0, 40)) / 8
        return cost, [draw(amount) * s * (1 if s == 1 else -1) for s in sizes]

    kinds: list[Options] = [
        [option() for _ in range(draw(st.integers(0, 3)))] for _ in range(draw(st.integers(1, 3)))
    ]
    places = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=4))
    choices = tuple(_choice(kind, kinds[kind], len(resources)) for kind in places)
    base = np.array([draw(st.integers(1000, 1500)) * s for s in sizes], dtype=np.int64)
    room = [draw(st.integers(0, 400)) * s for s in sizes]
    limits = [
        int(b) - r // 2 if resource == DEVICE_MEMORY else int(b) + r
        for b, r, resource in zip(base, room, resources, strict=True)
    ]
    links = []
    pairs = list(itertools.combinations(range(len(choices)), 2))
    for first, second in draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []:
        shape = (len(choices[first].costs), len(choices[second].costs))
        costs = [[draw(st.integers(0, 16)) / 8 for _ in range(shape[1])] for _ in range(shape[0])]
        links.append(PairCost(first, second, np.array(costs)))
    taken = [(i, o) for i, choice in enumerate(choices) for o in range(1, len(choice.costs))]
    once = [
        OnceCost(draw(st.integers(0, 16)) / 8, frozenset(some))
        for some in (
            draw(st.lists(st.lists(st.sampled_from(taken), min_size=1), max_size=2)) if taken else []
        )
    ]
    return Problem(
        _rows(resources), base, np.array(limits, dtype=np.int64), choices, tuple(links), tuple(once)
    )


@st.composite
def layers(draw: st.DrawFn) -> Problem:
    """Equal layers: each saves memory between its forward and its backward, and needs some in its backward."""
    n_layers = draw(st.integers(2, 5))
    options = draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 90), st.integers(-20, 90)), min_size=1, max_size=3
        )
    )
    gradient = draw(st.sampled_from([0, 30, 120]))
    n_rows = 2 * n_layers + 1  # intervals: each forward, the loss, each backward
    choices = []
    for layer in range(n_layers):
        own = 2 * n_layers - layer
        taken = [
            (cost / 8, [-freed * (layer < s < own) + working * (s == own) for s in range(n_rows)])
            for cost, freed, working in options
        ]
        choice = _choice(0, taken, n_rows)
        kept = np.array([1000, *(1000 - freed for _, freed, _ in options)])
        choices.append(Choice(0, choice.costs, choice.uses, kept))
    forward = [1000 + 100 * i for i in range(n_layers + 1)]
    base = np.array([*forward, *(forward[-1] + (gradient - 100) * (i + 1) for i in range(n_layers))])
    limit = int(draw(st.floats(0.3, 1.0)) * base.max())
    return Problem(_rows([DEVICE_MEMORY] * n_rows), base, np.full(n_rows, limit), tuple(choices))


@pytest.mark.parametrize("backend", ["highs", "cbc"])
@settings(max_examples=150, deadline=None)
@given(problem=st.one_of(problems(), layers()))
def test_the_program_finds_the_cheapest(backend: str, problem: Problem) -> None:
    best = cheapest(problem)
    found = sacplan.Milp(backend=backend, gap=0.0).solve(problem)  # type: ignore[arg-type]
    if best is None:
        event("infeasible")
        assert found is None
    else:
        assert found is not None
        assert problem.fits(found.picks)
        assert problem.cost(found.picks) == pytest.approx(best)
        assert found.status == "optimal"
        assert found.bound == pytest.approx(best, abs=2e-3 if backend == "cbc" else 1e-6)


@settings(max_examples=100, deadline=None)
@given(problem=st.one_of(problems(), layers()))
def test_the_program_finds_the_smallest_peak(problem: Problem) -> None:
    free = problem.with_limit(DEVICE_MEMORY, 10**9)
    smallest = min(problem.peak(picks) for picks in all_picks(problem) if free.fits(picks))
    found = sacplan.Milp(gap=0.0).smallest(problem)
    assert free.fits(found.picks)
    assert problem.peak(found.picks) <= 1.001 * smallest
    assert problem.peak(sacplan.Milp(peak_gap=0.0).smallest(problem).picks) == smallest


@pytest.mark.parametrize("solver", SOLVERS[1:], ids=lambda solver: solver.name)
@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_heuristics_keep_the_limits(solver: Solver, problem: Problem) -> None:
    found = solver.solve(problem)
    if found is not None:
        event("found")
        assert problem.fits(found.picks)
        best = cheapest(problem)
        assert best is not None
        assert problem.cost(found.picks) >= best - 1e-9
    smallest = solver.smallest(problem)
    assert isinstance(smallest, Solution)
    assert problem.with_limit(DEVICE_MEMORY, 10**9).fits(smallest.picks)
    assert problem.peak(smallest.picks) <= problem.peak({})


@settings(max_examples=100, deadline=None)
@given(problem=problems(), data=st.data())
def test_giving_back_never_breaks_a_limit_nor_costs(problem: Problem, data: st.DataObject) -> None:
    picks = data.draw(st.sampled_from(all_picks(problem)))
    before = problem.excess(picks)
    found = give_back(problem, picks)
    assert (problem.excess(found) <= np.maximum(before, 0)).all()
    assert problem.cost(found) <= problem.cost(picks) + 1e-9


def test_the_descent_is_not_misled_by_a_move_that_only_shifts_the_peak() -> None:
    problem = _problem(
        [1000, 1000],
        [[(1.0, [-400, 0]), (2.0, [-500, -100])], [(1.0, [0, -400]), (0.5, [300, -500])]],
        650,
    )
    found = sacplan.Greedy().solve(problem)
    assert found is not None
    assert found.picks == {0: 1, 1: 1}


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.name)
def test_each_row_has_its_limit(solver: Solver) -> None:
    """To move a tensor to the host is cheap, but the host has room for one."""
    offload, recompute = (1.0, [-100, 100]), (5.0, [-100, 0])
    for room, cost in ((0, 10.0), (100, 6.0), (200, 2.0)):
        problem = Problem(
            _rows([DEVICE_MEMORY, "host memory"]),
            np.array([500, 0]),
            np.array([300, room]),
            tuple(_choice(0, [offload, recompute], 2) for _ in range(2)),
        )
        found = solver.solve(problem)
        if solver.name == "uniform":
            assert found is None or problem.cost(found.picks) >= cost
        else:
            assert found is not None
            assert problem.cost(found.picks) == cost
        smallest = solver.smallest(problem)
        assert problem.total(smallest.picks)[1] <= room


@pytest.mark.parametrize("solver", SOLVERS[:2], ids=lambda solver: solver.name)
def test_neighbours_agree_where_it_pays(solver: Solver) -> None:
    """Two layouts cost the same; a link makes it expensive that neighbours differ, also at the reference's side."""
    options: Options = [(1.0, [-100]), (1.0, [-100])]
    apart = np.where(np.eye(3, dtype=bool), 0.0, 4.0)
    choices = tuple(_choice(0, options, 1) for _ in range(3))
    problem = Problem(
        _rows([DEVICE_MEMORY]),
        np.array([500]),
        np.array([300]),
        choices,
        (PairCost(0, 1, apart), PairCost(1, 2, apart)),
    )
    found = solver.solve(problem)
    assert found is not None
    assert problem.cost(found.picks) == cheapest(problem) == 3.0
    assert len(set(found.picks.values())) == 1


def test_limits_of_other_resources_that_nothing_keeps() -> None:
    problem = Problem(
        _rows([DEVICE_MEMORY, "host memory"]), np.array([5, 5]), np.array([9, 3]), (_choice(0, [], 2),)
    )
    for solver in SOLVERS:
        assert solver.solve(problem) is None
        with pytest.raises(SolverError, match="limit of host memory"):
            solver.smallest(problem)


@pytest.mark.parametrize("backend", ["highs", "cbc"])
@pytest.mark.parametrize("kinds", [1, 4])
def test_units_hidden_by_a_tolerance_are_found(backend: str, kinds: int) -> None:
    """One byte of 400 GiB is below every tolerance; shared variables or not, the optimum is exact."""
    n_bytes = 100 * 2**30
    options: Options = [(1.0, [1 - n_bytes]), (9.0, [-n_bytes])]
    choices = tuple(_choice(i % kinds, options, 1) for i in range(4))
    for limit, full in ((4, 0), (3, 1), (1, 3)):
        problem = Problem(_rows([DEVICE_MEMORY]), np.array([4 * n_bytes]), np.array([limit]), choices)
        found = sacplan.Milp(backend=backend, gap=1e-4).solve(problem)  # type: ignore[arg-type]
        assert found is not None
        assert (problem.cost(found.picks), found.status) == (4 - full + 9 * full, "optimal")


def test_where_work_ends_the_search_the_descent_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearProgram, "solve", lambda self, **kwargs: LinearSolution("unknown"))
    problem = _problem([1000], [[(1.0, [-400])], [(2.0, [-300])]], 650)
    assert sacplan.Milp().solve(problem) == Solution({0: 1}, "feasible", None, limited=True)
    assert problem.peak(sacplan.Milp().smallest(problem).picks) == 300


def test_nothing_to_choose() -> None:
    problem = _problem([1000], [], 1000)
    for solver in SOLVERS:
        found = solver.solve(problem)
        assert found is not None
        assert found.picks == solver.smallest(problem).picks == {}
        assert solver.solve(problem.with_limit(DEVICE_MEMORY, 999)) is None
    assert descend(problem) == {}


def test_problems_are_checked() -> None:
    with pytest.raises(SolverError, match="costs and uses of the first option must be 0"):
        Problem(
            _rows([DEVICE_MEMORY]),
            np.array([1]),
            np.array([1]),
            (Choice(0, np.array([1.0]), np.zeros((1, 1), dtype=np.int64), np.array([0])),),
        )
    with pytest.raises(SolverError, match="1 rows, but 2 base uses"):
        Problem(_rows([DEVICE_MEMORY]), np.array([1, 2]), np.array([1]), ())
