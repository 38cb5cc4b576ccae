"""Problems, in numbers only: choices, how much their options use of limited resources, and what these cost.

    minimise    cost of the options taken + costs paid once + sum over priced rows of price_r max(0, use_r - limit_r)
    subject to  use_r = base_r + sum of uses_cor over the options o taken by the choices c <= limit_r   for other rows r

A row is a resource over an interval of the step. Exactly one option is taken of each choice. The first option of a
choice is its reference: uses and costs are counted from it, so both are zero there, and ``base`` is the use of all
first options together.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from sacplan.errors import SolverError

Amounts = npt.NDArray[np.int64]
Costs = npt.NDArray[np.float64]

Picks = Mapping[int, int]
"""Choice (its place in the problem) to option; choices that take their first option may be left out."""

DEVICE_MEMORY = "device memory"
"""The resource, in bytes, that a plan's budget limits."""

HOST_MEMORY = "host memory"
"""The memory of the host, in bytes, as one device's share."""


NO_LIMIT = 2**62
"""Above any use, and with room below the largest 64-bit integer for differences."""


@dataclass(frozen=True, slots=True)
class ResourceRow:
    """A resource over the ops ``start`` to ``end`` (not included) of the step.

    What is over the limit costs ``price`` for each unit, such as the time for which computation waits for a link.
    """

    resource: str
    start: int
    end: int
    price: float = math.inf
    """Infinite: the limit has to be kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """A set of options; exactly one is taken.

    Attributes:
        kind: equal for choices with the same options: same costs, same ``kept_bytes``, and the same uses, but elsewhere
            in the step.
        costs: by option; the first is 0.
        uses: options x rows, in the unit of each row's resource; the first option's are 0.
        kept_bytes: by option, what is held for the backward pass; orders options where memory has a price per byte.
    """

    kind: Hashable
    costs: Costs
    uses: Amounts
    kept_bytes: Amounts


@dataclass(frozen=True, slots=True)
class OnceCost:
    """A cost (not negative) that is paid once if any of some pairs (choice, option) is taken."""

    cost: float
    pairs: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Solution:
    """An option for each choice, and what the solver has proved about it.

    Attributes:
        picks: the options.
        status: "optimal" (proved, to the solver's gap), "feasible", or "unknown" (there are no picks: the search ended
            before it had any, and before it had proved that there are none).
        bound: no options that keep the limits cost less; None where the solver proved nothing.
        limited: whether a limit of work ended the search before that was proved.
    """

    picks: Picks
    status: Literal["optimal", "feasible", "unknown"]
    bound: float | None = None
    limited: bool = False


@dataclass(frozen=True, eq=False)
class Problem:
    """Choices under limits.

    Attributes:
        rows: resources over intervals.
        base: by row, the use if all choices take their first option.
        limits: by row, the largest use that is allowed.
        choices, once_costs: see their classes.

    Raises:
        SolverError: arrays whose shapes do not match, or a first option with a cost or a use.
    """

    rows: tuple[ResourceRow, ...]
    base: Amounts
    limits: Amounts
    choices: tuple[Choice, ...]
    once_costs: tuple[OnceCost, ...] = ()

    def __post_init__(self) -> None:
        n_rows = len(self.rows)
        if not len(self.base) == len(self.limits) == n_rows:
            raise SolverError(f"{n_rows} rows, but {len(self.base)} base uses and {len(self.limits)} limits")
        for i, choice in enumerate(self.choices):
            n_options = len(choice.costs)
            if choice.uses.shape != (n_options, n_rows) or len(choice.kept_bytes) != n_options:
                raise SolverError(f"choice {i}: {n_options} costs, but uses of shape {choice.uses.shape}")
            if choice.costs[0] or choice.uses[0].any():
                raise SolverError(f"choice {i}: costs and uses of the first option must be 0; see Problem")

    def with_limit(self, resource: str, limit: int) -> Problem:
        """Return the same problem with another limit for all rows of a resource."""
        return replace(self, limits=np.where(self.rows_of(resource), np.int64(limit), self.limits))

    def rows_of(self, resource: str) -> npt.NDArray[np.bool_]:
        """Return, by row, whether it belongs to a resource."""
        return np.array([row.resource == resource for row in self.rows], dtype=bool)

    @cached_property
    def resources(self) -> dict[str, npt.NDArray[np.intp]]:
        """The rows of each resource."""
        return {
            name: np.flatnonzero(self.rows_of(name)) for name in dict.fromkeys(r.resource for r in self.rows)
        }

    def total(self, picks: Picks) -> Amounts:
        """Return the use of each row."""
        total: Amounts = self.base.copy()
        for choice, option in picks.items():
            total += self.choices[choice].uses[option]
        return total

    def excess(self, picks: Picks) -> Amounts:
        """Return by how much each row is over its limit; negative where there is room, as always in priced rows."""
        excess: Amounts = self.total(picks) - self.limits
        excess[self.priced] = -NO_LIMIT
        return excess

    @cached_property
    def priced(self) -> npt.NDArray[np.intp]:
        """The rows whose limits need not be kept."""
        return np.flatnonzero([row.price < math.inf for row in self.rows])

    @cached_property
    def _prices(self) -> Costs:
        return np.array([self.rows[row].price for row in self.priced])

    def over_cost(self, totals: Amounts) -> Costs:
        """Return the price of uses (... x priced rows) that are over their limits."""
        over = np.maximum(totals - self.limits[self.priced], 0)
        # Not a matrix product, whose rounding depends on how many uses there are.
        return np.asarray((over * self._prices).sum(axis=-1))

    def tightest(self, picks: Picks) -> int:
        """Return the row with the largest excess relative to the scale of its resource."""
        return int((self.excess(picks) / self.scales).argmax())

    def fits(self, picks: Picks) -> bool:
        """Whether all limits are kept."""
        return bool((self.excess(picks) <= 0).all())

    def peak(self, picks: Picks) -> int:
        """Return the largest use in a row of device memory, in bytes."""
        return int(self.total(picks)[self.resources[DEVICE_MEMORY]].max())

    def cost(self, picks: Picks) -> float:
        """Return the objective: costs of options, costs paid once, and prices of what is over the limits of rows."""
        own = sum(float(self.choices[choice].costs[option]) for choice, option in picks.items())
        # A choice that ``picks`` leaves out takes its first option, so no pair may name a first option.
        once = sum(once.cost for once in self.once_costs if not once.pairs.isdisjoint(picks.items()))
        return own + once + float(self.over_cost(self.total(picks)[self.priced]))

    def least_uses(self) -> Amounts:
        """Return a lower bound of the use of each row: every choice takes the option that uses least there."""
        total: Amounts = self.base.copy()
        for choice in self.choices:
            total += choice.uses.min(axis=0)
        total[self.priced] = -NO_LIMIT
        return total

    def least_cost(self) -> float:
        """Return a lower bound of the cost: every choice at its cheapest."""
        # Costs that are paid once or for priced rows are never negative, so the bound holds without them.
        return sum(float(choice.costs.min()) for choice in self.choices)

    @cached_property
    def scales(self) -> Costs:
        """The scale of each row's resource: the largest excess of the first options, or else the most room."""
        scales = np.ones(len(self.rows))
        excess = self.excess({})
        for rows in self.resources.values():
            largest = excess[rows].max()
            # Bytes and counts of other resources become comparable: 1 is the largest excess of the first
            # options.
            scales[rows] = max(1, largest if largest > 0 else -excess[rows].min())
        return scales
