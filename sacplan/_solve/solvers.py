"""Solvers: from a profile and a surrogate budget to units and the trade-off point each takes.

A solver is a small frozen object. It proposes; ``planning.py`` replays what it proposes on the
recording and asks again with a tighter or wider surrogate. Solvers do not see that loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from sacplan._fit.graph import is_submodule
from sacplan._fit.units import UnitPoint
from sacplan._solve.milp import sac_milp
from sacplan._trace.profile import Profile
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

    def ladder(self, profile: Profile) -> Sequence[Choice]:
        """Choices from mild to as much as this solver can discard, for the search of the smallest peak."""
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
    gap: float = 1e-2
    time_limit_s: float = 10.0
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

    def ladder(self, profile: Profile) -> Sequence[Choice]:
        """The program's solutions at budgets down to the least that its rows allow."""
        smallest = self._smallest(profile)
        largest = profile.peak_bytes
        surrogates = (smallest + (largest - smallest) * step // 8 for step in (4, 3, 2, 1, 0))
        proposals = (self.propose(profile, surrogate) for surrogate in surrogates)
        return [p.choice for p in proposals if p is not None]

    def _smallest(self, profile: Profile) -> int:
        try:
            sac_milp(profile.graph, "1B", solver=self.backend, time_limit=self.time_limit_s, seed=self.seed)
        except InfeasibleBudget as error:
            return error.smallest_feasible_bytes
        raise AssertionError("a step cannot fit in one byte")


@dataclass(frozen=True, slots=True)
class Lagrangian:
    """One price for all: units step down their hulls, the cheapest milliseconds per byte first.

    The units are those at one level of the module tree: 0 is the model as a whole, whose trade-off
    knows every op; 1 its outermost parts that can save anything; and so on. No program is solved.
    Optimal for the bytes kept, up to the last step; the peak is left to the replay.

    Attributes:
        level: how deep in the tree the units are; beyond the deepest it is the deepest.
    """

    level: int = 0

    @property
    def name(self) -> str:
        """``"lagrangian"`` and the level."""
        return f"lagrangian-{self.level}"

    def propose(self, profile: Profile, surrogate_bytes: int) -> Proposal | None:
        """The fewest steps that free what the unplanned peak is over the surrogate; all, if that is not enough."""
        missing: float = profile.peak_bytes - surrogate_bytes
        choice: dict[str, UnitPoint] = {}
        for step in self._steps(profile):
            if missing <= 0:
                break
            choice[step.fqn] = step.point
            missing -= step.freed_bytes
        return Proposal(choice, "feasible") if choice else None

    def ladder(self, profile: Profile) -> Sequence[Choice]:
        """From one step to all."""
        rungs: list[dict[str, UnitPoint]] = []
        for step in self._steps(profile):
            rungs.append({**(rungs[-1] if rungs else {}), step.fqn: step.point})
        return rungs

    def _steps(self, profile: Profile) -> list[_Step]:
        families = unit_families(profile)
        units = families[min(self.level, len(families) - 1)] if families else ()
        steps = [step for fqn in units for step in _hull(profile, fqn)]
        return sorted(steps, key=lambda step: step.ms_per_byte)  # stable: earlier units first


@dataclass(frozen=True, slots=True)
class _Step:
    """One step down the hull of a unit."""

    fqn: str
    point: UnitPoint
    freed_bytes: float
    ms_per_byte: float


def _hull(profile: Profile, fqn: str) -> list[_Step]:
    """The steps down the lower hull of a unit's points, each dearer per byte than the one before."""
    tradeoff = profile.tradeoffs[fqn]
    hull: list[_Step] = []
    freed, ms = 0.0, 0.0
    rest = [(p.discard_ratio * tradeoff.saved_bytes, p) for p in tradeoff.points]
    while rest:
        size, point = min(rest, key=lambda x: ((x[1].recompute_ms - ms) / (x[0] - freed), -x[0]))
        hull.append(_Step(fqn, point, size - freed, (point.recompute_ms - ms) / (size - freed)))
        freed, ms = size, point.recompute_ms
        rest = [x for x in rest if x[0] > freed]
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


def resolve_solver(profile: Profile, solver: str | Solver) -> list[Solver]:
    """Solver objects by name; ``"best"`` is all of them."""
    if not isinstance(solver, str):
        return [solver]
    lagrangian = [Lagrangian(level) for level in range(len(unit_families(profile)))]
    known: dict[str, list[Solver]] = {
        "milp": [Milp()],
        "lagrangian": [*lagrangian],
        "best": [*lagrangian, Milp()],
    }
    if solver not in known:
        raise PlanError(
            f"unknown solver {solver!r}; known are {', '.join(map(repr, known))}, or an object such as "
            "sacplan.Milp()."
        )
    return known[solver]
