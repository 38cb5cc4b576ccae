"""The integer program finds the optimum: equal to brute force over all choices of random problems.

The other searches have the same test in their rooms: cuts in ``recompute/test_closure.py``, Rotor in
``rotor/test_rotor.py``, the bound in ``planning/test_lower_bound.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import sacplan
from sacplan.solvers.problem import DEVICE_MEMORY, Problem
from tests.support.problems import all_picks, cheapest, layers, problems


@settings(max_examples=150, deadline=None)
@given(problem=st.one_of(problems(), layers()))
def test_the_program_finds_the_cheapest(problem: Problem) -> None:
    best = cheapest(problem)
    found = sacplan.Milp(gap=0.0).solve(problem)
    if best is None:
        event("infeasible")
        assert found is None
    else:
        assert problem.fits(found.picks)
        assert problem.cost(found.picks) == pytest.approx(best)
        assert found.status == "optimal"
        assert found.bound == pytest.approx(best, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(problem=st.one_of(problems(), layers()))
def test_the_program_finds_the_smallest_peak(problem: Problem) -> None:
    free = problem.with_limit(DEVICE_MEMORY, 10**9)
    smallest = min(problem.peak(picks) for picks in all_picks(problem) if free.fits(picks))
    found = sacplan.Milp(gap=0.0).smallest(problem)
    assert free.fits(found.picks)
    assert problem.peak(found.picks) <= 1.001 * smallest
    assert problem.peak(sacplan.Milp(peak_gap=0.0).smallest(problem).picks) == smallest
