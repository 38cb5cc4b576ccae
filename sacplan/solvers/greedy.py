"""``Greedy``: at the peak, take the cheapest milliseconds per byte, until the budget holds.

Each step of the descent looks at all options of all choices over all rows, and there are at most as many steps as
options: O(options^2 rows) in the worst case, in NumPy. No bound on the distance to the optimum: two cheap options may
be taken where one dear one would do, and an option that frees memory at two peaks gets credit for one. ``give_back``
often repairs the first case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sacplan.solvers.local import descend, give_back, starts
from sacplan.solvers.problem import DEVICE_MEMORY, Problem, Solution


@dataclass(frozen=True, slots=True)
class Greedy:
    """Descend from 'keep everything', without an integer program.

    Each step looks at the interval with the peak. It takes the option of one choice that costs least for each byte
    freed there (bytes below the budget do not count), unless that raises another interval over the peak. At the end,
    choices go back to cheaper options as far as the budget has room (``give_back``).
    """

    @property
    def name(self) -> str:
        """``"greedy"``."""
        return "greedy"

    def solve(self, problem: Problem) -> Solution | None:
        """Return options that keep all limits; None if the descent does not get there."""
        ways = _with_and_without(problem)
        without_once = replace(problem, once_costs=())  # paid once: they count when the descents are compared
        # If the cheap path gets stuck, the path to the smallest peak is tried, whose moves may free more than needed.
        for beyond in (False, True):
            descents = [descend(problem, once=once, beyond=beyond) for once in ways]
            candidates = [give_back(without_once, picks) for picks in descents if problem.fits(picks)]
            if candidates:
                return Solution(min(candidates, key=problem.cost), "feasible")
        return None

    def smallest(self, problem: Problem) -> Solution:
        """Return the options with the lowest peak that a descent reaches, or cheaper ones with no higher peak."""
        start, lowest = starts(problem), problem.with_limit(DEVICE_MEMORY, 0)
        descents = [descend(lowest, start, once=once, beyond=True) for once in _with_and_without(problem)]
        picks = min(descents, key=problem.peak)
        # The same peak may be had for less: these descents free bytes whether or not they are needed.
        at_peak = problem.with_limit(DEVICE_MEMORY, problem.peak(picks))
        return self.solve(at_peak) or Solution(picks, "feasible")


def _with_and_without(problem: Problem) -> tuple[bool, ...]:
    """Return the values of ``once`` to try: a cost paid once looks too high to the first choice that has to pay it."""
    return (True, False) if problem.once_costs else (True,)
