"""The solvers that ``plan`` asks, against brute force over all choices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sacplan
from sacplan._plan.effects import Additive
from sacplan._recompute.regions import Option, Region
from sacplan._solve.local import give_back
from sacplan._solve.solvers import Proposal


def _additive(base: list[int], regions: list[list[tuple[float, list[int]]]], wide: list[bool]) -> Additive:
    """A few regions with invented effects."""
    made, changes = [], []
    for own, is_wide in zip(regions, wide, strict=True):
        change = np.array([[0] * len(base), *(c for _, c in own)], dtype=np.int64)
        options = [Option(0.0, 1000, ()), *(Option(cost, 1000 + min(c), ()) for cost, c in own)]
        flags = (False, *([is_wide] * len(own)))
        made.append(Region("", (), 0, tuple(options), tuple(() for _ in options), flags))
        changes.append(change)
    return Additive(tuple(made), np.array(base, dtype=np.int64), tuple(changes), wide_cost=0.25)


def choices(effects: Additive) -> list[dict[int, int]]:
    """All of them."""
    each = [range(len(costs)) for costs in effects.costs]
    return [{i: o for i, o in enumerate(picked) if o} for picked in itertools.product(*each)]


@st.composite
def landscapes(draw: st.DrawFn) -> Additive:
    intervals = draw(st.integers(1, 4))
    n_bytes = st.integers(-300, 60)
    regions = draw(
        st.lists(
            st.lists(
                st.tuples(
                    st.integers(1, 40).map(lambda c: c / 8),
                    st.lists(n_bytes, min_size=intervals, max_size=intervals),
                ),
                max_size=3,
            ),
            min_size=1,
            max_size=4,
        )
    )
    base = draw(st.lists(st.integers(1000, 1500), min_size=intervals, max_size=intervals))
    return _additive(
        base, regions, draw(st.lists(st.booleans(), min_size=len(regions), max_size=len(regions)))
    )


@st.composite
def layers(draw: st.DrawFn) -> Additive:
    """Equal layers: each saves memory between its forward and its backward, and needs some in its backward."""
    n_layers = draw(st.integers(2, 5))
    options = draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 90), st.integers(-20, 90)), min_size=1, max_size=3
        )
    )
    gradient = draw(st.sampled_from([0, 30, 120]))
    regions = []
    for layer in range(n_layers):
        own = 2 * n_layers - layer  # intervals: each forward, the loss, each backward
        regions.append(
            [
                (
                    cost / 8,
                    [-freed * (layer < s < own) + working * (s == own) for s in range(2 * n_layers + 1)],
                )
                for cost, freed, working in options
            ]
        )
    forward = [1000 + 100 * i for i in range(n_layers + 1)]
    base = [*forward, *(forward[-1] + (gradient - 100) * (i + 1) for i in range(n_layers))]
    return _additive(base, regions, [False] * n_layers)


@pytest.mark.parametrize("backend", ["highs", "cbc"])
@settings(max_examples=60, deadline=None)
@given(effects=st.one_of(landscapes(), layers()), share=st.floats(0.3, 1.0))
def test_the_program_finds_the_cheapest_choice(backend: str, effects: Additive, share: float) -> None:
    budget = int(share * effects.base.max())
    best = min((effects.cost(c) for c in choices(effects) if effects.peak(c)[0] <= budget), default=None)
    found = sacplan.Milp(backend=backend, gap=0.0).propose(effects, budget)
    if best is None:
        assert found is None
    else:
        assert found is not None
        assert effects.peak(found.choice)[0] <= budget
        assert effects.cost(found.choice) == pytest.approx(best)
        assert found.bound == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(effects=st.one_of(landscapes(), layers()))
def test_the_program_finds_the_smallest_peak(effects: Additive) -> None:
    smallest = min(effects.peak(c)[0] for c in choices(effects))
    found = sacplan.Milp(gap=0.0).smallest(effects)
    assert effects.peak(found.choice)[0] <= 1.001 * smallest


@pytest.mark.parametrize("solver", [sacplan.Greedy(), sacplan.Uniform()])
@settings(max_examples=80, deadline=None)
@given(effects=landscapes(), share=st.floats(0.3, 1.0))
def test_heuristics_hold_the_budget(solver, effects: Additive, share: float) -> None:  # type: ignore[no-untyped-def]
    budget = int(share * effects.base.max())
    found = solver.propose(effects, budget)
    if found is not None:
        assert effects.peak(found.choice)[0] <= budget
        cheapest = min(effects.cost(c) for c in choices(effects) if effects.peak(c)[0] <= budget)
        assert effects.cost(found.choice) >= cheapest - 1e-9
    smallest = solver.smallest(effects)
    assert isinstance(smallest, Proposal)
    assert effects.peak(smallest.choice)[0] <= effects.base.max()


@settings(max_examples=80, deadline=None)
@given(effects=landscapes(), data=st.data())
def test_giving_back_never_breaks_the_budget_nor_costs(effects: Additive, data: st.DataObject) -> None:
    choice = data.draw(st.sampled_from(choices(effects)))
    budget = effects.peak(choice)[0]
    found = give_back(effects, choice, budget)
    assert effects.peak(found)[0] <= budget
    assert effects.cost(found) <= effects.cost(choice)


def test_the_descent_is_not_misled_by_a_move_that_only_shifts_the_peak() -> None:
    effects = _additive(
        [1000, 1000],
        [[(1.0, [-400, 0]), (2.0, [-500, -100])], [(1.0, [0, -400]), (0.5, [300, -500])]],
        [False, False],
    )
    found = sacplan.Greedy().propose(effects, 650)
    assert found is not None
    assert found.choice == {0: 1, 1: 1}
