"""Moves of single choices, for the heuristics and for repairing the answers of the integer program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from sacplan.errors import SolverError
from sacplan.solvers.problem import DEVICE_MEMORY, NO_LIMIT, Costs, Picks, Problem


def give_back(problem: Problem, picks: Picks) -> dict[int, int]:
    """Move single choices to cheaper options, the largest saving first, as long as all limits are kept.

    One pass: a move that has no room when its turn comes is not tried again. The result keeps the limits exactly, in
    whole units, and is never more expensive than ``picks``.
    """
    now = dict(picks)
    room, priced = -problem.excess(now), problem.priced
    totals = problem.total(now)[priced]

    def changes(choice: int, option: int) -> Costs:
        """Return, by new option, what moving there from ``option`` costs, apart from costs paid once."""
        costs, uses = problem.choices[choice].costs, problem.choices[choice].uses[:, priced]
        over = problem.over_cost(totals + uses - uses[option]) - problem.over_cost(totals)
        return np.asarray(costs - costs[option] + over)

    moves = sorted(
        (
            (float(-change), choice, other)
            # Choices on their first option have nothing to give back.
            for choice, option in now.items()
            for other, change in enumerate(changes(choice, option))
            if change < 0
        ),
        key=lambda move: (-move[0], move[1]),
    )
    # For each cost that is paid once, how many choices need it now. It is saved when the last of them moves away.
    taken = [sum(pair in once.pairs for pair in now.items()) for once in problem.once_costs]
    for _, choice, other in moves:
        option = now.get(choice, 0)
        # Worked out again, since earlier moves may have changed what is paid once, and for priced rows.
        change = float(changes(choice, option)[other])
        after = [
            count + ((choice, other) in once.pairs) - ((choice, option) in once.pairs)
            for count, once in zip(taken, problem.once_costs, strict=True)
        ]
        for once, count, count_after in zip(problem.once_costs, taken, after, strict=True):
            change += once.cost * (bool(count_after) - bool(count))
        if change >= 0:
            continue
        more = problem.choices[choice].uses[other] - problem.choices[choice].uses[option]
        # Invariant: ``room`` is what each row has left, and never becomes negative if it was not.
        if np.all(more <= room):
            room, totals = room - more, totals + more[priced]
            now[choice] = other
            taken = after
    return {choice: option for choice, option in now.items() if option}


def descend(
    problem: Problem,
    start: Picks | None = None,
    *,
    once: bool = True,
    beyond: bool = False,
) -> dict[int, int]:
    """From ``start``, take the cheapest move per byte freed in the tightest row, until all limits are kept.

    A move takes another option of one choice. It must not raise any row above its limit, or, in a resource that is over
    a limit, above the largest excess of that resource. So the largest excess never grows.

    Args:
        problem: what is chosen.
        start: by default, the first option of every choice.
        once: whether options with a cost that is paid once may be taken.
        beyond: whether what a move frees below the limit counts as well.

    Returns:
        The first picks on the way that keep all limits, else those with the least excess.
    """
    if not problem.choices:
        return {}
    # The options of all choices lie side by side, so that NumPy looks at all moves of a step at once.
    sizes = [len(choice.costs) for choice in problem.choices]
    owner = np.repeat(np.arange(len(sizes)), sizes)  # a column is an option of a choice
    first = np.cumsum([0, *sizes[:-1]])
    costs = np.concatenate([choice.costs for choice in problem.choices])
    uses = np.concatenate([choice.uses for choice in problem.choices])
    by_row = np.ascontiguousarray(uses.T)  # each step reads one row of the problem, for all options
    allowed = np.ones(len(owner), dtype=bool)
    if not once:
        allowed[[first[choice] + option for cost in problem.once_costs for choice, option in cost.pairs]] = (
            False
        )
    start = start or {}
    taken = first + np.array([start.get(choice, 0) for choice in range(len(first))])
    scales, priced = problem.scales, problem.priced
    excess = problem.excess(start)
    totals, priced_uses = problem.total(start)[priced], uses[:, priced]
    best, least = taken.copy(), np.inf
    # Most moves cost more, so a choice makes fewer moves than it has options. Moves that cost nothing could go round in
    # a circle; the bound ends that, too.
    for _ in range(len(costs)):
        at = int((excess / scales).argmax())
        if excess[at] / scales[at] < least:
            best, least = taken.copy(), excess[at] / scales[at]
        if least <= 0:
            break
        # By row, the largest excess that a move may lead to: that of the row's resource now, but at least 0.
        ceiling = np.zeros_like(excess)
        for rows in problem.resources.values():
            ceiling[rows] = max(0, excess[rows].max())
        now = taken[owner]
        freed = by_row[at][now] - by_row[at]
        # What is freed below the limit is of no use for this row, so it must not make a move look cheap.
        if not beyond:
            freed = np.minimum(freed, excess[at])
        more = costs - costs[now]
        worth = (freed > 0) & allowed
        after = totals + priced_uses[worth] - priced_uses[now[worth]]
        more[worth] += problem.over_cost(after) - problem.over_cost(totals)
        dearer = more > 0
        price = np.full(len(costs), np.inf)
        np.divide(more, freed, out=price, where=worth)
        # Moves that cost nothing come last: they may block moves that free more.
        for move in by_price(price, (worth & dearer, worth & ~dearer & (more == 0))):
            after = excess + uses[move] - uses[now[move]]
            # Prices are in order, so the first move that keeps the ceiling is the cheapest.
            if (after <= ceiling).all():
                totals = totals + priced_uses[move] - priced_uses[now[move]]
                excess = after
                taken[owner[move]] = move
                break
        else:
            # Stuck: no move is left, or each would raise some resource above its ceiling.
            break
    return {choice: option for choice, option in enumerate((best - first).tolist()) if option}


def by_price(price: npt.NDArray[np.float64], groups: Iterable[npt.NDArray[np.bool_]]) -> Iterator[int]:
    """Yield the moves group by group, each group by rising price; moves with equal prices in their order."""
    for group in groups:
        moves = np.flatnonzero(group)
        if not len(moves):
            continue
        # The caller mostly takes the cheapest, so the others are sorted only when they are asked for.
        cheapest = int(price[moves].argmin())
        yield int(moves[cheapest])
        in_order = price[moves].argsort(kind="stable")
        yield from moves[in_order[1:]].tolist()


def starts(problem: Problem) -> dict[int, int]:
    """Return picks that keep the limits of all resources but device memory.

    Raises:
        SolverError: none are found.
    """
    others = problem.with_limit(DEVICE_MEMORY, NO_LIMIT)
    picks = descend(others)
    if not others.fits(picks):
        row = problem.rows[others.tightest(picks)]
        raise SolverError(f"no options were found that keep the limit of {row.resource} in {row}; raise it")
    return picks
