"""A hull is never optimistic and exact at its vertices; least squares is not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sacplan.classic.fit import Fit, FitKind, fit_tradeoff, hull_fit, pwlf_fit
from sacplan.errors import PlanError

STAIRCASE = [
    (0.2, 0.01),
    (0.25, 0.08),
    (0.4, 0.09),
    (0.45, 0.2),
    (0.6, 0.22),
    (0.7, 0.4),
    (0.9, 0.45),
    (0.95, 0.8),
    (1.0, 1.0),
]

POINTS = st.lists(
    st.tuples(st.integers(0, 20).map(lambda n: n / 20), st.integers(0, 50).map(lambda n: n / 50)), max_size=12
)


@settings(max_examples=300)
@given(POINTS)
def test_hull_bounds_the_points_and_is_convex(points: list[tuple[float, float]]) -> None:
    fitted = hull_fit(points)
    assert len(fitted.slopes) == len(fitted.intercepts) == fitted.n_segments
    assert list(fitted.slopes) == sorted(set(fitted.slopes))
    for x, y in points:
        assert fitted.at(x) <= y + 1e-11
    assert fitted.at(0.0) == 0.0
    if not any(x > 0 for x, _ in points):
        assert fitted == Fit(0, (), (), (), "hull")
        return
    assert fitted.breakpoints[0] == 0.0
    assert fitted.breakpoints[-1] == max(x for x, _ in points)
    for x in fitted.breakpoints[1:]:
        lowest = min(y for other, y in points if other == x)
        assert fitted.at(x) == pytest.approx(lowest, abs=1e-11)


@settings(max_examples=200)
@given(POINTS, st.floats(0, 1))
def test_hull_is_the_cheapest_mix_of_two_points(points: list[tuple[float, float]], share: float) -> None:
    best: dict[float, float] = {0.0: 0.0}
    for x, y in points:
        if x > 0:
            best[x] = min(y, best.get(x, y))
    ratio = share * max(best)
    mixes = [best[ratio]] if ratio in best else []
    for (x0, y0), (x1, y1) in itertools.combinations(sorted(best.items()), 2):
        if x0 <= ratio <= x1:
            mixes.append(y0 + (y1 - y0) * (ratio - x0) / (x1 - x0))
    assert hull_fit(points).at(ratio) == pytest.approx(min(mixes), abs=1e-9)


def test_hull_by_hand() -> None:
    # (0.75, 0.375) lies on the last segment and is no vertex.
    fitted = hull_fit([(0.5, 0.125), (0.25, 0.2), (1.0, 0.625), (0.75, 0.375), (1.0, 0.9)])
    assert fitted == Fit(2, (0.25, 1.0), (0.0, -0.375), (0.0, 0.5, 1.0), "hull")
    assert fitted.at(0.25) == 0.0625
    assert fitted.at(1.0) == 0.625


@pytest.mark.parametrize("kind", ["hull", "pwlf"])
def test_few_points(kind: FitKind) -> None:
    for nothing in ([], [(0.0, 0.0)], [(0.0, 0.3)]):
        assert fit_tradeoff(nothing, kind) == Fit(0, (), (), (), kind)
        assert fit_tradeoff(nothing, kind).at(0.5) == 0.0
    one = fit_tradeoff([(0.5, 0.25)], kind)
    assert (one.n_segments, one.slopes, one.intercepts, one.breakpoints) == (1, (0.5,), (0.0,), (0.0, 0.5))
    two = fit_tradeoff([(0.5, 0.1), (1.0, 0.5)], kind)
    assert two.n_segments == 2
    assert (two.breakpoints[0], two.breakpoints[-1]) == (0.0, 1.0)
    assert two.at(1.0) == pytest.approx(0.5, abs=1e-3)
    assert fit_tradeoff([(0.5, 0.1), (0.5, 0.3)], kind).breakpoints == (0.0, 0.5)


@pytest.mark.parametrize("segments", [2, 3])
def test_least_squares_is_optimistic_on_a_staircase(segments: int) -> None:
    fitted = pwlf_fit(STAIRCASE, segments)
    assert fitted.n_segments == segments
    assert (fitted.breakpoints[0], fitted.breakpoints[-1]) == (0.0, 1.0)
    hull = hull_fit(STAIRCASE)
    assert max(hull.at(x / 1000) - fitted.at(x / 1000) for x in range(1001)) > 1e-3


def test_least_squares_repeats_and_leaves_the_global_generator_alone() -> None:
    np.random.seed(5)
    expected = np.random.random(3)
    np.random.seed(5)
    first = pwlf_fit(STAIRCASE)
    assert (np.random.random(3) == expected).all()
    assert pwlf_fit(list(reversed(STAIRCASE))) == first
    assert hull_fit(list(reversed(STAIRCASE))) == hull_fit(STAIRCASE)


def test_wrong_questions() -> None:
    with pytest.raises(PlanError, match="'spline'"):
        fit_tradeoff(STAIRCASE, "spline")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="segments=7"):
        fit_tradeoff(STAIRCASE, "pwlf", segments=7)
    with pytest.raises(PlanError, match="kind='hull'"):
        fit_tradeoff(STAIRCASE, "hull", segments=3)
    for bad in [(-0.1, 0.0), (0.1, -0.5), (float("nan"), 0.0), (0.5, float("inf"))]:
        with pytest.raises(PlanError, match="not negative"):
            hull_fit([bad])
