"""``Alike``: the integer program in which neighbours that are alike take the same option.

The choices of one kind (the layers of a model) stand in the order of the step. They are cut into at most ``groups``
runs of about equal length, and the choices of a run take one option together. So the program has at most ``groups``
choices for each kind, however deep the model is. If no kind has more choices, the program is that of ``Milp``.

An answer to the smaller program is one to the whole problem. From there single choices move:

    solve      give back, where the limits have room: single layers take cheaper options
    smallest   lower the peak further (``descend``), then take the cheapest options with the peak that was reached

Limits hold exactly, since each choice uses what it uses in the whole problem. The optimum of the smaller program is no
bound for the larger one, so an answer that is not ``Milp``'s has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from sacplan.solvers.local import descend, give_back, starts
from sacplan.solvers.milp import Milp, Refinement
from sacplan.solvers.problem import DEVICE_MEMORY, Choice, OnceCost, Picks, Problem, Solution

_GROUPS = 4  # few, so that the integer program does not grow with the depth
_GAP = 1e-2  # of the smaller program, whose optimum is not that of the whole problem: single moves improve it anyway


@dataclass(frozen=True, slots=True)
class Alike:
    """The mixed-integer program in which runs of choices of one kind take the same option.

    Attributes:
        groups: runs of each kind, at most.
        milp: solves the smaller program.
    """

    groups: int = _GROUPS
    milp: Milp = field(default_factory=Milp)

    @property
    def name(self) -> str:
        """``"alike"``."""
        return "alike"

    def solve(self, problem: Problem) -> Solution | None:
        """Return options that keep all limits, as cheap as runs and then single moves get; None if none are found."""
        tied = TiedProblem.of(problem, self.groups)
        if tied.is_whole:
            return self.milp.solve(problem)
        found = replace(self.milp, gap=max(self.milp.gap, _GAP)).solve(tied.problem)
        if found is not None and found.status != "unknown":
            return Solution(give_back(problem, tied.spread(found.picks)), "feasible", limited=found.limited)
        # Even the smallest peak of runs may be over the limits; single moves from there may still keep them.
        lowest = self._lowest(problem, tied)
        picks = descend(problem, lowest)
        return Solution(give_back(problem, picks), "feasible") if problem.fits(picks) else found

    def smallest(self, problem: Problem) -> Solution:
        """Return the options with the smallest peak that runs, and then single moves, get to."""
        tied = TiedProblem.of(problem, self.groups)
        if tied.is_whole:
            return self.milp.smallest(problem)
        picks = self._lowest(problem, tied)
        # This peak can be reached, so what is left is to reach it for less.
        return self.solve(problem.with_limit(DEVICE_MEMORY, problem.peak(picks))) or Solution(
            picks, "feasible"
        )

    def _lowest(self, problem: Problem, tied: TiedProblem) -> Picks:
        # With a limit of 0 every byte is too many, so a descent goes on until no move lowers the peak.
        lowest = problem.with_limit(DEVICE_MEMORY, 0)
        picks, _ = Refinement(self.milp, tied.problem).smallest()
        runs = tied.spread(picks)
        # From the answer for the runs and from the plain start, since either may end lower.
        found = [descend(lowest, start, beyond=True) for start in (runs, starts(problem))]
        return min(found, key=problem.peak)


@dataclass(frozen=True, slots=True, eq=False)
class TiedProblem:
    """A smaller problem, each of whose choices stands for a run of choices of the whole problem.

    Attributes:
        problem: the smaller problem.
        runs: by choice of ``problem``, the choices of the whole problem that take its option.
    """

    problem: Problem
    runs: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(problem: Problem, groups: int) -> TiedProblem:
        """Return the problem in which neighbours of one kind are tied, in at most ``groups`` runs of each kind."""
        runs = _runs(problem, groups)
        choices = []
        for run in runs:
            # Costs are the same all over a run. Uses are not: they depend on where in the step a choice lies.
            first = problem.choices[run[0]]
            uses = np.sum([problem.choices[c].uses for c in run], axis=0)
            # Runs of different lengths have different costs, so they are of different kinds.
            kind = (first.kind, len(run))
            choices.append(Choice(kind, first.costs * len(run), uses, first.kept_bytes * len(run)))
        run_of = {choice: i for i, run in enumerate(runs) for choice in run}
        tied = replace(
            problem,
            choices=tuple(choices),
            once_costs=tuple(
                # What is paid once is the same for a run as for one choice.
                OnceCost(once.cost, frozenset((run_of[choice], option) for choice, option in once.pairs))
                for once in problem.once_costs
            ),
        )
        return TiedProblem(tied, runs)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is tied."""
        return all(len(run) == 1 for run in self.runs)

    def spread(self, picks: Picks) -> dict[int, int]:
        """Return picks of the smaller problem as those of the whole problem."""
        return {choice: option for run, option in picks.items() for choice in self.runs[run]}


def _runs(problem: Problem, groups: int) -> tuple[tuple[int, ...], ...]:
    """Return the choices that take an option together."""
    kinds: dict[Hashable, list[int]] = defaultdict(list)
    for i, choice in enumerate(problem.choices):
        # Costs that are paid once are part of what makes choices alike.
        once = tuple(
            tuple((i, option) in once.pairs for option in range(len(choice.costs)))
            for once in problem.once_costs
        )
        kinds[choice.kind, once].append(i)
    runs = [
        tuple(map(int, run))
        for same in kinds.values()
        for run in np.array_split(same, min(groups, len(same)))
    ]
    return tuple(sorted(runs))
