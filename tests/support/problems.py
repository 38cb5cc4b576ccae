"""Problems for solvers, made of numbers: random ones, and the best answer by trying all choices."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from sacplan.solvers.problem import DEVICE_MEMORY, Choice, OnceCost, Problem, ResourceRow

Options = list[tuple[float, list[int]]]
"""Cost and uses by row, of the options but the first."""


def choice_of(kind: object, options: Options, n_rows: int) -> Choice:
    uses = np.array([[0] * n_rows, *(uses for _, uses in options)], dtype=np.int64)
    costs = np.array([0.0, *(cost for cost, _ in options)])
    return Choice(kind, costs, uses, 1000 + uses.min(axis=1))


def rows_of(resources: list[str]) -> tuple[ResourceRow, ...]:
    return tuple(ResourceRow(resource, i, i + 1) for i, resource in enumerate(resources))


def problem_of(base: list[int], options: list[Options], limits: list[int] | int = 0) -> Problem:
    """Device memory only."""
    choices = tuple(choice_of(i, own, len(base)) for i, own in enumerate(options))
    limit = np.broadcast_to(np.array(limits, dtype=np.int64), len(base))
    return Problem(rows_of([DEVICE_MEMORY] * len(base)), np.array(base, dtype=np.int64), limit, choices)


def all_picks(problem: Problem) -> list[dict[int, int]]:
    each = [range(len(choice.costs)) for choice in problem.choices]
    return [{i: o for i, o in enumerate(picked) if o} for picked in itertools.product(*each)]


def cheapest(problem: Problem) -> float | None:
    """By brute force, and with arithmetic of its own."""

    def over(picks: dict[int, int], *, priced: bool) -> list[tuple[float, int]]:
        """Return the prices of rows, and what is over their limits."""
        uses = [problem.choices[i].uses[o] for i, o in picks.items()]
        return [
            (row.price, max(0, int(problem.base[r] - problem.limits[r]) + sum(int(use[r]) for use in uses)))
            for r, row in enumerate(problem.rows)
            if (row.price < math.inf) == priced
        ]

    def fits(picks: dict[int, int]) -> bool:
        return not any(amount for _, amount in over(picks, priced=False))

    def cost(picks: dict[int, int]) -> float:
        own = sum(problem.choices[i].costs[o] for i, o in picks.items())
        once = sum(c.cost for c in problem.once_costs if any(picks.get(i, 0) == o for i, o in c.pairs))
        return float(own + once + sum(price * amount for price, amount in over(picks, priced=True)))

    return min((cost(picks) for picks in all_picks(problem) if fits(picks)), default=None)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A few choices with invented uses of one to three resources, and costs paid once."""
    resources = draw(
        st.lists(st.sampled_from([DEVICE_MEMORY, "host memory", "link time"]), min_size=1, max_size=4)
    )
    resources[0] = DEVICE_MEMORY
    sizes = [1 if resource == DEVICE_MEMORY else draw(st.sampled_from([1, 10**6])) for resource in resources]
    amount = st.integers(-300, 60)

    def option() -> tuple[float, list[int]]:
        cost = draw(st.integers(0, 40)) / 8
        return cost, [draw(amount) * s * (1 if s == 1 else -1) for s in sizes]

    kinds: list[Options] = [
        [option() for _ in range(draw(st.integers(0, 3)))] for _ in range(draw(st.integers(1, 3)))
    ]
    places = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=4))
    choices = tuple(choice_of(kind, kinds[kind], len(resources)) for kind in places)
    base = np.array([draw(st.integers(1000, 1500)) * s for s in sizes], dtype=np.int64)
    room = [draw(st.integers(0, 400)) * s for s in sizes]
    limits = [
        int(b) - r // 2 if resource == DEVICE_MEMORY else int(b) + r
        for b, r, resource in zip(base, room, resources, strict=True)
    ]
    taken = [(i, o) for i, choice in enumerate(choices) for o in range(1, len(choice.costs))]
    once = [
        OnceCost(draw(st.integers(0, 16)) / 8, frozenset(some))
        for some in (
            draw(st.lists(st.lists(st.sampled_from(taken), min_size=1), max_size=2)) if taken else []
        )
    ]
    rows = tuple(
        replace(row, price=draw(st.integers(0, 8)) / 8 / s) if row.resource == "link time" else row
        for row, s in zip(rows_of(resources), sizes, strict=True)
    )
    return Problem(rows, base, np.array(limits, dtype=np.int64), choices, tuple(once))


@st.composite
def layers(draw: st.DrawFn) -> Problem:
    """Equal layers: each saves memory between its forward and its backward, and needs some in its backward."""
    n_layers = draw(st.integers(2, 5))
    options = draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 90), st.integers(-20, 90)), min_size=1, max_size=3
        )
    )
    gradient = draw(st.sampled_from([0, 30, 120]))
    n_rows = 2 * n_layers + 1  # intervals: each forward, the loss, each backward
    choices = []
    for layer in range(n_layers):
        own = 2 * n_layers - layer
        taken = [
            (cost / 8, [-freed * (layer < s < own) + working * (s == own) for s in range(n_rows)])
            for cost, freed, working in options
        ]
        choice = choice_of(0, taken, n_rows)
        kept = np.array([1000, *(1000 - freed for _, freed, _ in options)])
        choices.append(Choice(0, choice.costs, choice.uses, kept))
    forward = [1000 + 100 * i for i in range(n_layers + 1)]
    base = np.array([*forward, *(forward[-1] + (gradient - 100) * (i + 1) for i in range(n_layers))])
    limit = int(draw(st.floats(0.3, 1.0)) * base.max())
    return Problem(rows_of([DEVICE_MEMORY] * n_rows), base, np.full(n_rows, limit), tuple(choices))
