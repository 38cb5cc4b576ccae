"""Moves of single cells: what the heuristics are made of, and the last pass of the program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sacplan._plan.effects import Additive


def give_back(effects: Additive, choice: Mapping[int, int], budget_bytes: int) -> dict[int, int]:
    """Single cells to cheaper options, the largest saving first, as long as the peak stays under the budget.

    Exact, and never worse than what it begins with.
    """
    now = dict(choice)
    room = budget_bytes - effects.total(now)
    moves = sorted(
        (
            (float(effects.costs[cell][option] - cost), cell, other)
            for cell, option in now.items()
            for other, cost in enumerate(effects.costs[cell])
            if cost < effects.costs[cell][option]
        ),
        key=lambda move: (-move[0], move[1]),
    )
    for _, cell, other in moves:
        option = now.get(cell, 0)
        if effects.costs[cell][other] >= effects.costs[cell][option]:
            continue  # already better off
        more = effects.changes[cell][other] - effects.changes[cell][option]
        if np.all(more <= room):
            room = room - more
            now[cell] = other
    return {cell: option for cell, option in now.items() if option}
