"""Solvers: from a problem made of numbers to one option for each of its choices.

A solver is a small frozen object, and solvers are interchangeable. What the options stand for is the caller's
business: ``plan`` measures what a solver finds on the rewritten program, and asks again where that disagrees.
"""

from __future__ import annotations

from typing import Protocol

from sacplan.solvers.problem import Problem, Solution


class Solver(Protocol):
    """The interface of a solver."""

    @property
    def name(self) -> str:
        """As it appears in ``Plan.solver``."""
        ...

    def solve(self, problem: Problem) -> Solution | None:
        """Return options that keep all limits, as cheap as this solver can; None if it finds none."""
        ...

    def smallest(self, problem: Problem) -> Solution:
        """Return the options with the smallest peak of device memory that this solver can find.

        The limits of device memory do not count; those of other resources are kept.

        Raises:
            SolverError: no options are found that keep these.
        """
        ...
