"""``Uniform``: choices of one kind all take the same option, as people do by hand.

At a price of ``p`` ms per byte each choice takes the option that minimises cost + p * kept_bytes. That is a vertex of
its lower hull, and the vertex changes only at the slopes of the hull. So the path over all prices has one point for
each distinct slope. Not optimal: of the plans that treat repeated layers alike, only those on the path are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from sacplan.solvers.local import starts
from sacplan.solvers.problem import DEVICE_MEMORY, Choice, Problem, Solution


@dataclass(frozen=True, slots=True)
class Uniform:
    """One price per byte for the whole step: every choice takes the option that is cheapest at that price."""

    @property
    def name(self) -> str:
        """``"uniform"``."""
        return "uniform"

    def solve(self, problem: Problem) -> Solution | None:
        """Return the cheapest options on the path of prices that keep all limits; None if none do."""
        fitting = [picks for picks in _path(problem) if problem.fits(picks)]
        return Solution(min(fitting, key=problem.cost), "feasible") if fitting else None

    def smallest(self, problem: Problem) -> Solution:
        """Return the lowest peak on the path."""
        start = starts(problem)
        highest = problem.with_limit(DEVICE_MEMORY, problem.peak(start))
        # ``start`` keeps the limits of the other resources, so there is always one that fits.
        fitting = [picks for picks in (*_path(problem), start) if highest.fits(picks)]
        return Solution(min(fitting, key=problem.peak), "feasible")


def _path(problem: Problem) -> list[dict[int, int]]:
    prices = sorted({price for choice in problem.choices for price in _prices(choice)})
    path: list[dict[int, int]] = [{}]
    for price in prices:
        best = [int((choice.costs + price * choice.kept_bytes).argmin()) for choice in problem.choices]
        picks = {i: option for i, option in enumerate(best) if option}
        if picks != path[-1]:
            path.append(picks)
    return path


def _prices(choice: Choice) -> list[float]:
    """Return prices just above those at which a choice steps down its hull.

    Walk the hull from the first option: the next vertex is the option below with the least slope, and of equal slopes
    the furthest.
    """
    options = list(zip(choice.costs.tolist(), choice.kept_bytes.tolist(), strict=True))
    found, at = [], 0
    while at < len(options) - 1:
        cost, kept = options[at]
        steps = [((c - cost) / (kept - k), -i) for i, (c, k) in enumerate(options) if i > at and k < kept]
        if not steps:
            break
        # ``-i`` breaks ties, so of equal slopes the furthest vertex wins.
        price, place = min(steps)
        # A little above the slope, where the next vertex is cheaper by more than rounding.
        found.append(price * (1 + 1e-9))
        at = -place
    return found
