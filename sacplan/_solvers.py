"""Solvers: from a profile and a surrogate budget to units and the trade-off point each takes.

A solver is a small frozen object. It proposes; ``planning.py`` replays what it proposes on the
recording and asks again with a tighter or wider surrogate. Solvers do not see that loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from sacplan._graph import is_submodule
from sacplan._milp import sac_milp
from sacplan._profile import Profile
from sacplan._units import UnitPoint
from sacplan.errors import InfeasibleBudget, PlanError

Choice = Mapping[str, UnitPoint]
"""Unit to the point it takes. Units do not nest."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a solver proposes: a choice, and what the solver can say of it."""

    choice: Choice
    status: str
    gap: float | None = None


class Solver(Protocol):
    """What ``plan`` needs of a solver."""

    @property
    def name(self) -> str:
        """As it appears in ``Plan.solver``."""
        ...

    def propose(self, profile: Profile, surrogate_bytes: int) -> Proposal | None:
        """A choice whose peak the solver's own model puts at most there; None if its model has none."""
        ...

    def sweep(self, profile: Profile) -> Iterator[Choice]:
        """Choices from mild to as small as this solver knows, for the search of the smallest peak."""
        ...


@dataclass(frozen=True, slots=True)
class Milp:
    """The mixed-integer program over modules, each at one of its reachable points (``sac_milp``).

    Optimal for its memory rows, which take a unit's working set as what it keeps without a plan.

    Attributes:
        backend: "auto" (HiGHS where installed, else CBC), "highs", "cbc".
        gap, time_limit_s, seed: of each solve.
    """

    backend: Literal["auto", "highs", "cbc"] = "auto"
    gap: float = 1e-3
    time_limit_s: float = 20.0
    seed: int = 0

    @property
    def name(self) -> str:
        """``"milp"``."""
        return "milp"

    def propose(self, profile: Profile, surrogate_bytes: int) -> Proposal | None:
        """Solve the program at that budget."""
        try:
            result = sac_milp(
                profile.graph,
                f"{surrogate_bytes}B",
                solver=self.backend,
                gap=self.gap,
                time_limit=self.time_limit_s,
                seed=self.seed,
            )
        except InfeasibleBudget:
            return None
        choice = {fqn: point_at(profile, fqn, ratio) for fqn, ratio in result.ac_decisions.items()}
        return Proposal(choice, result.status, result.gap)

    def sweep(self, profile: Profile) -> Iterator[Choice]:
        """The program's solutions at budgets down to the least that its rows allow."""
        smallest = self._smallest(profile)
        largest = profile.peak_bytes
        for step in range(5):
            proposal = self.propose(profile, smallest + (largest - smallest) * step // 8)
            if proposal is not None:
                yield proposal.choice

    def _smallest(self, profile: Profile) -> int:
        try:
            sac_milp(profile.graph, "1B", solver=self.backend, time_limit=self.time_limit_s, seed=self.seed)
        except InfeasibleBudget as error:
            return error.smallest_feasible_bytes
        raise AssertionError("a step cannot fit in one byte")


@dataclass(frozen=True, slots=True)
class Lagrangian:
    """One price for all: every unit takes the hull point that is best at so many milliseconds per byte.

    Tried on several choices of units (the whole model as one unit; the outermost repeated layers; the
    innermost modules with children), and the price lowered until the replayed peak fits. No solver
    runs, so it is fast; it is optimal for kept bytes, not for the peak.
    """

    @property
    def name(self) -> str:
        """``"lagrangian"``."""
        return "lagrangian"

    def propose(self, profile: Profile, surrogate_bytes: int) -> Proposal | None:
        """Not by a surrogate budget: ``sweep`` has all that it knows."""
        return None

    def sweep(self, profile: Profile) -> Iterator[Choice]:
        """For each family of units, the choices at falling prices."""
        for units in unit_families(profile):
            yield from _price_path(profile, units)


def _price_path(profile: Profile, units: tuple[str, ...], most: int = 24) -> Iterator[Choice]:
    hulls = {fqn: _hull(profile, fqn) for fqn in units}
    prices = sorted({price for hull in hulls.values() for price, _ in hull})
    if len(prices) > most:
        prices = [prices[round(i * (len(prices) - 1) / (most - 1))] for i in range(most)]
    for limit in prices:
        choice = {}
        for fqn, hull in hulls.items():
            taken = [point for price, point in hull if price <= limit]
            if taken:
                choice[fqn] = taken[-1]
        yield choice


def _hull(profile: Profile, fqn: str) -> list[tuple[float, UnitPoint]]:
    """Points on the lower hull of a unit, each with the price (ms per byte) at which it pays."""
    tradeoff = profile.tradeoffs[fqn]
    hull: list[tuple[float, UnitPoint]] = []
    at_bytes, at_ms = 0.0, 0.0
    rest = list(tradeoff.points)
    while rest:
        best = min(
            rest,
            key=lambda p: (
                (p.recompute_ms - at_ms) / (p.discard_ratio * tradeoff.saved_bytes - at_bytes),
                -p.discard_ratio,
            ),
        )
        freed = best.discard_ratio * tradeoff.saved_bytes
        hull.append(((best.recompute_ms - at_ms) / (freed - at_bytes), best))
        at_bytes, at_ms = freed, best.recompute_ms
        rest = [p for p in rest if p.discard_ratio * tradeoff.saved_bytes > at_bytes]
    return hull


def unit_families(profile: Profile) -> list[tuple[str, ...]]:
    """Choices of units that do not nest: by how deep in the tree they are taken."""
    candidates = [fqn for fqn, t in profile.tradeoffs.items() if t.points]
    families: list[tuple[str, ...]] = []
    level = [fqn for fqn in candidates if not any(is_submodule(fqn, other) for other in candidates)]
    while level:
        family = tuple(level)
        if family not in families:
            families.append(family)
        deeper: list[str] = []
        for fqn in level:
            inside = [c for c in candidates if is_submodule(c, fqn)]
            inside = [c for c in inside if not any(is_submodule(c, other) for other in inside)]
            deeper.extend(inside or [fqn])
        if tuple(deeper) == family:
            break
        level = deeper
    return families


def point_at(profile: Profile, fqn: str, ratio: float) -> UnitPoint:
    """The reachable point of a unit with that discard ratio."""
    for point in profile.tradeoffs[fqn].points:
        if point.discard_ratio == ratio:
            return point
    raise PlanError(
        f"unit {fqn!r} cannot discard exactly {ratio:.4f} of its activations; it reaches "
        + ", ".join(f"{p.discard_ratio:.4f}" for p in profile.tradeoffs[fqn].points)
    )


SOLVERS: dict[str, Solver] = {"milp": Milp(), "lagrangian": Lagrangian()}


def resolve_solver(solver: str | Solver) -> list[Solver]:
    """Solvers by name: ``"best"`` is all of them."""
    if isinstance(solver, str):
        if solver == "best":
            return list(SOLVERS.values())
        if solver not in SOLVERS:
            raise PlanError(
                f"unknown solver {solver!r}; known are 'best', {', '.join(map(repr, SOLVERS))}, or a solver object."
            )
        return [SOLVERS[solver]]
    return [solver]
