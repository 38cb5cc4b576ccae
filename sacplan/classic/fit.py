"""Fit the trade-off of a unit by a maximum of lines: recompute share against discard ratio.

A linear program reads a trade-off as ``recompute >= slope * ratio + intercept`` for each line. Two fits:

- ``"hull"``: the lower convex hull of the reachable points (Andrew's monotone chain): the largest convex
  function with no reachable point below it. At its vertices the cost is exact; in between it is that of the
  cheapest mix of two vertices, which equal layers can realize.
- ``"pwlf"``: continuous least squares with free breakpoints (Jekel and Venter, "pwlf: A Python Library for
  Fitting 1D Continuous Piecewise Linear Functions", 2019), as used by PyTorch's prototype. It has few
  segments, but on most staircases it lies below the hull somewhere, and a plan based on it promises a
  saving at too low a cost. Its slopes need not increase: the maximum of its lines may differ from the fitted
  curve.

The hull takes a sort and one pass, O(n log n). Known inefficiencies: ``pwlf`` searches its breakpoints by differential
evolution, 20 to 200 ms a fit, and does not promise the best ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sacplan.core.arguments import checked
from sacplan.errors import PlanError

FitKind = Literal["hull", "pwlf"]

# Relative: well above the rounding of doubles (1e-16), and far below any share that matters.
_ROUNDING = 1e-12
_GOOD_R_SQUARED = 0.99


@dataclass(frozen=True, slots=True)
class Fit:
    """A piecewise linear trade-off. Without segments nothing can be discarded."""

    n_segments: int
    slopes: tuple[float, ...]
    intercepts: tuple[float, ...]
    breakpoints: tuple[float, ...]
    """Ratios where segments begin and end, including 0 and the largest ratio: one more than there are segments."""
    kind: FitKind

    def at(self, ratio: float) -> float:
        """Return the recompute share at a discard ratio: the highest of the lines, and never less than 0."""
        lines = zip(self.slopes, self.intercepts, strict=True)
        return max(0.0, max((slope * ratio + intercept for slope, intercept in lines), default=0.0))


@checked(PlanError)
def fit_tradeoff(
    points_xy: Iterable[tuple[float, float]], kind: FitKind = "hull", segments: int | None = None
) -> Fit:
    """Fit (discard ratio, recompute share) points by one of the two methods.

    Args:
        points_xy: the reachable points, in any order; (0, 0) is always one of them.
        segments: for ``"pwlf"`` only, see ``pwlf_fit``.

    Raises:
        PlanError: unknown kind, ``segments`` with a hull, or a point that is negative or not finite.
    """
    if kind == "hull":
        if segments is not None:
            raise PlanError(
                f"segments={segments} with kind='hull': leave it out, a hull has as many as it needs"
            )
        return hull_fit(points_xy)
    if kind == "pwlf":
        return pwlf_fit(points_xy, segments)
    raise PlanError(f"unknown kind of fit {kind!r}: use 'hull' or 'pwlf'")


def hull_fit(points_xy: Iterable[tuple[float, float]]) -> Fit:
    """Fit the lower convex hull of the points and (0, 0), up to the largest ratio; its slopes increase."""
    return _through(_lower_hull(_clean(points_xy)), "hull")


def pwlf_fit(points_xy: Iterable[tuple[float, float]], segments: int | None = None) -> Fit:
    """Fit the points and (0, 0) by continuous least squares; deterministic.

    Args:
        segments: 2 to 4. By default the fewest that explain 99 % of the variance, else 4. Fewer if there are
            not enough distinct ratios to determine them.

    Raises:
        PlanError: ``segments`` is out of range, or a point is negative or not finite.
    """
    if segments is not None and not 2 <= segments <= 4:
        raise PlanError(f"segments={segments}: use 2, 3 or 4")
    points = _clean(points_xy)
    # Each segment needs a further ratio to determine it.
    most = len({x for x, _ in points}) - 1
    # Ratio 0 alone: nothing can be discarded, so there is no line.
    if most < 1:
        return Fit(0, (), (), (), "pwlf")
    if most == 1:
        # Least squares through (0, 0) and the mean at the other ratio.
        end = points[-1][0]
        return _through(
            [(0.0, 0.0), (end, math.fsum(y for x, y in points if x == end) / (len(points) - 1))], "pwlf"
        )

    import numpy as np
    import pwlf

    x, y = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    counts = range(2, 5) if segments is None else (segments,)
    tried = sorted({min(count, most) for count in counts})
    spread = float(((y - y.mean()) ** 2).sum())
    state = np.random.get_state()  # pwlf seeds the global generator, which is the caller's
    try:
        # From the fewest segments up: the first fit that explains enough is taken, else the last one.
        for count in tried:
            model = pwlf.PiecewiseLinFit(x, y, seed=0)
            breakpoints = model.fit(count)
            if float(model.ssr) <= (1 - _GOOD_R_SQUARED) * spread:
                break
    finally:
        np.random.set_state(state)
    return Fit(
        n_segments=count,
        slopes=tuple(float(slope) for slope in model.slopes),
        intercepts=tuple(float(intercept) for intercept in model.intercepts),
        breakpoints=tuple(float(ratio) for ratio in breakpoints),
        kind="pwlf",
    )


def _clean(points_xy: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the distinct points, sorted, with (0, 0) as the only one at ratio 0."""
    points = {(0.0, 0.0)}
    for x, y in points_xy:
        if not (math.isfinite(x) and math.isfinite(y) and x >= 0 and y >= 0):
            raise PlanError(f"point ({x}, {y}): ratio and recompute share must be finite and not negative")
        # A point at ratio 0 discards nothing, which (0, 0) does at no cost.
        if x > 0:
            points.add((float(x), float(y)))
    return sorted(points)


def _lower_hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the vertices by increasing ratio, without those on a line between two others, up to rounding.

    Andrew's monotone chain: a vertex is dropped as soon as the next point shows that it is not below the chord.
    """
    # A vertex that lies on the chord up to rounding would make a segment with a slope of noise.
    straight = _ROUNDING * max(y for _, y in points)
    hull: list[tuple[float, float]] = []
    for x, y in points:
        if hull and hull[-1][0] == x:  # of equal ratios the lowest comes first
            continue
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            # How far the last vertex lies below the chord from the one before it to the new point.
            depth = y0 + (y - y0) * (x1 - x0) / (x - x0) - y1
            if depth > straight:
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _through(vertices: list[tuple[float, float]], kind: FitKind) -> Fit:
    """Return the fit with a segment between each two neighbouring vertices."""
    slopes, intercepts = [], []
    for (x0, y0), (x1, y1) in itertools.pairwise(vertices):
        slopes.append((y1 - y0) / (x1 - x0))
        intercepts.append(y0 - slopes[-1] * x0)
    # A single vertex has no segment that could begin or end.
    breakpoints = tuple(x for x, _ in vertices) if slopes else ()
    return Fit(len(slopes), tuple(slopes), tuple(intercepts), breakpoints, kind)
