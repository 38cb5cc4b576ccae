"""Moves of single regions: what the heuristics are made of, and the last pass of the program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sacplan._plan.effects import Additive


def give_back(effects: Additive, choice: Mapping[int, int], budget_bytes: int) -> dict[int, int]:
    """Single regions to cheaper options, the largest saving first, as long as the peak stays under the budget.

    Exact, and never worse than what it begins with.
    """
    now = dict(choice)
    room = budget_bytes - effects.total(now)
    moves = sorted(
        (
            (float(effects.costs[region][option] - cost), region, other)
            for region, option in now.items()
            for other, cost in enumerate(effects.costs[region])
            if cost < effects.costs[region][option]
        ),
        key=lambda move: (-move[0], move[1]),
    )
    for _, region, other in moves:
        option = now.get(region, 0)
        if effects.costs[region][other] >= effects.costs[region][option]:
            continue  # already better off
        more = effects.changes[region][other] - effects.changes[region][option]
        if np.all(more <= room):
            room = room - more
            now[region] = other
    return {region: option for region, option in now.items() if option}
