"""``Uniform``: regions of one kind all do the same, as people do by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacplan._plan.effects import Additive
from sacplan._recompute.regions import Option
from sacplan._solve.solvers import Proposal


@dataclass(frozen=True, slots=True)
class Uniform:
    """One price per byte for the whole step: every region takes the option that is cheapest at that price.

    So repeated layers are treated alike. Of all prices, the lowest whose choice holds the budget.
    """

    @property
    def name(self) -> str:
        """``"uniform"``."""
        return "uniform"

    def propose(self, effects: Additive, budget_bytes: int) -> Proposal | None:
        """The cheapest choice on the path of prices that holds the budget; None if none does."""
        path = _path(effects)
        holding = [choice for choice in path if effects.peak(choice)[0] <= budget_bytes]
        return Proposal(min(holding, key=effects.cost), "feasible") if holding else None

    def smallest(self, effects: Additive) -> Proposal:
        """The lowest peak on the path."""
        return Proposal(min(_path(effects), key=lambda choice: effects.peak(choice)[0]), "feasible")


def _path(effects: Additive) -> list[dict[int, int]]:
    prices = sorted({price for region in effects.regions for price in _prices(region.options)})
    choices: list[dict[int, int]] = [{}]
    for price in prices:
        choice = {}
        for i, region in enumerate(effects.regions):
            best = min(
                range(len(region.options)),
                key=lambda o: (region.options[o].cost + price * region.options[o].kept_bytes, o),
            )
            if best:
                choice[i] = best
        if choice != choices[-1]:
            choices.append(choice)
    return choices


def _prices(options: Sequence[Option]) -> list[float]:
    """Just above each price at which a region steps down its hull."""
    found, at = [], 0
    while at < len(options) - 1:
        here = options[at]
        steps = [
            ((o.cost - here.cost) / (here.kept_bytes - o.kept_bytes), -i)
            for i, o in enumerate(options)
            if i > at and o.kept_bytes < here.kept_bytes
        ]
        if not steps:
            break
        price, place = min(steps)
        found.append(price * (1 + 1e-9))
        at = -place
    return found
