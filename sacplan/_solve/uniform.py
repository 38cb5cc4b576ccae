"""``Uniform``: choices of one kind all take the same option, as people do by hand."""

from __future__ import annotations

from dataclasses import dataclass

from sacplan._solve.local import starts
from sacplan._solve.problem import DEVICE_MEMORY, Choice, Problem, Solution


@dataclass(frozen=True, slots=True)
class Uniform:
    """One price per byte for the whole step: every choice takes the option that is cheapest at that price.

    So repeated layers are treated alike. Of all prices, the lowest whose options keep the limits.
    """

    @property
    def name(self) -> str:
        """``"uniform"``."""
        return "uniform"

    def solve(self, problem: Problem) -> Solution | None:
        """The cheapest on the path of prices that keeps all limits; None if none does."""
        fitting = [picks for picks in _path(problem) if problem.fits(picks)]
        return Solution(min(fitting, key=problem.cost), "feasible") if fitting else None

    def smallest(self, problem: Problem) -> Solution:
        """The lowest peak on the path."""
        start = starts(problem)
        highest = problem.with_limit(DEVICE_MEMORY, problem.peak(start))
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
    """Just above each price at which a choice steps down its hull."""
    options = list(zip(choice.costs.tolist(), choice.kept_bytes.tolist(), strict=True))
    found, at = [], 0
    while at < len(options) - 1:
        cost, kept = options[at]
        steps = [((c - cost) / (kept - k), -i) for i, (c, k) in enumerate(options) if i > at and k < kept]
        if not steps:
            break
        price, place = min(steps)
        found.append(price * (1 + 1e-9))
        at = -place
    return found
