"""The solvers that ``plan`` asks: limits and ties. ``invariants/test_optimum.py`` has the optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings

import sacplan
from sacplan.errors import SolverError
from sacplan.solvers.alike import Alike, TiedProblem
from sacplan.solvers.local import descend
from sacplan.solvers.mip import LinearProgram, LinearSolution
from sacplan.solvers.problem import DEVICE_MEMORY, Choice, Problem, Solution
from sacplan.solvers.solvers import Solver
from tests.support.problems import Options, cheapest, choice_of, problem_of, problems, rows_of

SOLVERS: list[Solver] = [sacplan.Milp(gap=0.0), sacplan.Greedy()]
TIED = Alike(groups=1, milp=sacplan.Milp(gap=0.0))


@pytest.mark.parametrize("solver", [*SOLVERS[1:], TIED], ids=lambda solver: solver.name)
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


def test_the_descent_is_not_misled_by_a_move_that_only_shifts_the_peak() -> None:
    problem = problem_of(
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
            rows_of([DEVICE_MEMORY, "host memory"]),
            np.array([500, 0]),
            np.array([300, room]),
            tuple(choice_of(0, [offload, recompute], 2) for _ in range(2)),
        )
        found = solver.solve(problem)
        assert found is not None
        assert problem.cost(found.picks) == cost
        smallest = solver.smallest(problem)
        assert problem.total(smallest.picks)[1] <= room


def test_limits_of_other_resources_that_nothing_keeps() -> None:
    problem = Problem(
        rows_of([DEVICE_MEMORY, "host memory"]), np.array([5, 5]), np.array([9, 3]), (choice_of(0, [], 2),)
    )
    for solver in SOLVERS:
        assert solver.solve(problem) is None
        with pytest.raises(SolverError, match="limit of host memory"):
            solver.smallest(problem)


@pytest.mark.parametrize("kinds", [1, 4])
def test_units_hidden_by_a_tolerance_are_found(kinds: int) -> None:
    """One byte of 400 GiB is below every tolerance; shared variables or not, the optimum is exact."""
    n_bytes = 100 * 2**30
    options: Options = [(1.0, [1 - n_bytes]), (9.0, [-n_bytes])]
    choices = tuple(choice_of(i % kinds, options, 1) for i in range(4))
    for limit, full in ((4, 0), (3, 1), (1, 3)):
        problem = Problem(rows_of([DEVICE_MEMORY]), np.array([4 * n_bytes]), np.array([limit]), choices)
        found = sacplan.Milp(gap=1e-4).solve(problem)
        assert found is not None
        assert (problem.cost(found.picks), found.status) == (4 - full + 9 * full, "optimal")


def test_where_work_ends_the_search_the_descent_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearProgram, "solve", lambda self, **kwargs: LinearSolution("unknown"))
    problem = problem_of([1000], [[(1.0, [-400])], [(2.0, [-300])]], 650)
    assert sacplan.Milp().solve(problem) == Solution({0: 1}, "feasible", None, limited=True)
    assert problem.peak(sacplan.Milp().smallest(problem).picks) == 300


def test_nothing_to_choose() -> None:
    problem = problem_of([1000], [], 1000)
    for solver in SOLVERS:
        found = solver.solve(problem)
        assert found is not None
        assert found.picks == solver.smallest(problem).picks == {}
        assert solver.solve(problem.with_limit(DEVICE_MEMORY, 999)) is None
    assert descend(problem) == {}


def test_problems_are_checked() -> None:
    with pytest.raises(SolverError, match="costs and uses of the first option must be 0"):
        Problem(
            rows_of([DEVICE_MEMORY]),
            np.array([1]),
            np.array([1]),
            (Choice(0, np.array([1.0]), np.zeros((1, 1), dtype=np.int64), np.array([0])),),
        )
    with pytest.raises(SolverError, match="1 rows, but 2 base uses"):
        Problem(rows_of([DEVICE_MEMORY]), np.array([1, 2]), np.array([1]), ())


def test_equal_layers_take_one_option_together() -> None:
    """However many there are: a run of four."""
    layers = 16
    rows = [1000 + 10 * layer - less for layer in range(layers) for less in (0, 5)]
    at = [layer for layer in range(layers) for _ in range(2)]
    uses = [[-10 * (row > layer) - 50 * (row == layer) for row in at] for layer in range(layers)]
    problem = problem_of(rows, [[(1.0, own), (3.0, [2 * use for use in own])] for own in uses], 1000)
    problem = replace(problem, choices=tuple(replace(c, kind="layer") for c in problem.choices))
    tied = TiedProblem.of(problem, 4)
    assert [len(run) for run in tied.runs] == [4] * 4
    found = Alike(groups=4).solve(problem)
    assert found is not None
    assert problem.fits(found.picks)
    assert problem.cost(found.picks) <= 1.05 * problem.cost(sacplan.Milp().solve(problem).picks)  # type: ignore[union-attr]
    assert problem.peak(Alike(groups=4).smallest(problem).picks) == problem.least_uses().max()
