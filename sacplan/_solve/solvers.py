"""Solvers: from the effects of the regions' options and a budget to one option for each region.

A solver is a small frozen object, and solvers are interchangeable. It sees no recording and no model;
``planning.py`` replays what it proposes and asks again if the replay disagrees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sacplan._plan.effects import Additive

Choice = Mapping[int, int]
"""Region (its place among the regions) to the option that it takes; regions that keep everything are left out."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a solver proposes, and what it can say of it.

    Attributes:
        choice: the options.
        status: "optimal" or "feasible", in the solver's own model.
        bound: no choice of options costs less; None where the solver proved nothing.
    """

    choice: Choice
    status: str
    bound: float | None = None


class Solver(Protocol):
    """What ``plan`` needs of a solver."""

    @property
    def name(self) -> str:
        """As it appears in ``Plan.solver``."""
        ...

    def propose(self, effects: Additive, budget_bytes: int) -> Proposal | None:
        """A choice whose peak is at most there, as cheap as this solver can; None if it finds none."""
        ...

    def smallest(self, effects: Additive) -> Proposal:
        """The choice with the smallest peak that this solver can find."""
        ...
