"""``Greedy``: where the peak is, the cheapest milliseconds per byte, until the budget holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sacplan._solve.local import descend, give_back, starts
from sacplan._solve.problem import DEVICE_MEMORY, Problem, Solution


@dataclass(frozen=True, slots=True)
class Greedy:
    """Descends from 'keep everything': no program is solved.

    At each step it looks at the interval with the peak and takes the more expensive option of one choice that costs
    least for each byte freed there (bytes beyond what is over the budget do not count), if it raises no other
    interval over the peak. At the end, what the budget has room for is given back. No promise on how far from the
    optimum that is.
    """

    @property
    def name(self) -> str:
        """``"greedy"``."""
        return "greedy"

    def solve(self, problem: Problem) -> Solution | None:
        """Options that keep all limits; None if the descent does not get there."""
        ways = _with_and_without(problem)
        free = replace(problem, once_costs=())  # they count where the descents are compared
        for beyond in (False, True):  # the path to the smallest peak may still get there
            descents = [descend(problem, once=once, beyond=beyond) for once in ways]
            found = [give_back(free, picks) for picks in descents if problem.fits(picks)]
            if found:
                return Solution(min(found, key=problem.cost), "feasible")
        return None

    def smallest(self, problem: Problem) -> Solution:
        """The lowest peak on the way down."""
        start, lowest = starts(problem), problem.with_limit(DEVICE_MEMORY, 0)
        descents = [descend(lowest, start, once=once, beyond=True) for once in _with_and_without(problem)]
        picks = min(descents, key=problem.peak)
        at_peak = problem.with_limit(DEVICE_MEMORY, problem.peak(picks))
        return self.solve(at_peak) or Solution(picks, "feasible")


def _with_and_without(problem: Problem) -> tuple[bool, ...]:
    """Whether to take options with a cost that is paid once: both ways, if there are any."""
    return (True, False) if problem.once_costs else (True,)
