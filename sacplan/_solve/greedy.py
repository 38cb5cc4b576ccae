"""``Greedy``: where the peak is, the cheapest milliseconds per byte, until the budget holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sacplan._plan.effects import Additive
from sacplan._solve.local import give_back
from sacplan._solve.solvers import Proposal


@dataclass(frozen=True, slots=True)
class Greedy:
    """Descends from 'keep everything': no program is solved.

    At each step it looks at the interval with the peak and takes the dearer option of one region that costs least
    for each byte freed there (bytes beyond what is over the budget do not count), if it raises no other
    interval over the peak. At the end, what the budget has room
    for is given back. No promise on how far from the optimum that is.
    """

    @property
    def name(self) -> str:
        """``"greedy"``."""
        return "greedy"

    def propose(self, effects: Additive, budget_bytes: int) -> Proposal | None:
        """A choice whose peak is at most there; None if the descent does not get there."""
        ways = _with_and_without(effects)
        descents = [_descend(effects, budget_bytes, budget_bytes, wide) for wide in ways]
        if all(
            peak > budget_bytes for _, peak in descents
        ):  # the path to the smallest peak may still get there
            descents = [_descend(effects, budget_bytes, 0, wide) for wide in ways]
        found = [
            give_back(effects, choice, budget_bytes) for choice, peak in descents if peak <= budget_bytes
        ]
        return Proposal(min(found, key=effects.cost), "feasible") if found else None

    def smallest(self, effects: Additive) -> Proposal:
        """The lowest peak on the way down."""
        peak = min(_descend(effects, 0, 0, wide)[1] for wide in _with_and_without(effects))
        return self.propose(effects, peak) or Proposal({}, "feasible")


def _with_and_without(effects: Additive) -> tuple[bool, ...]:
    """Whether to use options that make a module around several regions a unit: both ways, if there are any."""
    return (True, False) if any(any(region.wide) for region in effects.regions) else (True,)


def _descend(effects: Additive, budget_bytes: int, aim_bytes: int, wide: bool) -> tuple[dict[int, int], int]:
    """The first choice on the way that holds the budget, else the one with the lowest peak; with its peak.

    What a move frees below ``aim_bytes`` does not count for it.
    """
    allowed = np.concatenate([[wide or not w for w in region.wide] for region in effects.regions])
    regions = np.concatenate([np.full(len(c), i) for i, c in enumerate(effects.costs)])
    options = np.concatenate([np.arange(len(c)) for c in effects.costs])
    costs = np.concatenate(effects.costs)
    changes = np.concatenate(effects.changes)
    first = np.concatenate([[0], np.cumsum([len(c) for c in effects.costs])[:-1]])
    taken = first.copy()  # by region, the column that it takes
    total = effects.base.copy()
    best, best_peak = taken.copy(), int(total.max())
    for _ in range(len(costs)):
        at = int(total.argmax())
        if total[at] < best_peak:
            best, best_peak = taken.copy(), int(total[at])
        if best_peak <= budget_bytes:
            break
        change = changes - changes[taken[regions]]
        freed = np.minimum(-change[:, at], total[at] - aim_bytes)
        dearer = costs - costs[taken[regions]]
        price = np.full(len(costs), np.inf)
        np.divide(dearer, freed, out=price, where=(freed > 0) & (dearer > 0) & allowed)
        for move in price.argsort(kind="stable"):
            if not np.isfinite(price[move]):
                break
            if (total + change[move]).max() <= total[at]:
                total += change[move]
                taken[regions[move]] = move
                break
        else:
            break
        if not np.isfinite(price[move]):
            break
    return {region: int(options[column]) for region, column in enumerate(best) if options[column]}, best_peak
