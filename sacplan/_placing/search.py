"""Strategies on all axes of a mesh: one axis after the other, the slowest first, until nothing improves.

All axes in one program take minutes where turns take seconds. Turns start from what people name (``roles.py``): on
each axis data or tensor parallelism, which are small programs, so that nothing found is worse than these. What turns
prove is about one axis; for a mesh of several, the time below which nothing is comes from each class alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sacplan._device.devices import DeviceSpec
from sacplan._placing.axis_program import SOLVER, AxisProgram, Solved
from sacplan._placing.evaluation import ClassChoices, Evaluation, Figures
from sacplan._placing.graph import StrategyGraph
from sacplan._placing.options import Allowed, AxisOptions, everything
from sacplan._placing.roles import ROLES
from sacplan._program.program import Program
from sacplan._ranks.shards import Parameter
from sacplan._shard.costs import Costs
from sacplan._shard.mesh import Mesh
from sacplan._solve.milp import Milp

_TURNS = 3
"""Of each axis, at most."""

_BETTER = 1e-3
"""By what share a turn must improve to count."""

_STARTS = ("data", "tensor")
"""Roles of an axis from which turns start."""

_MOST_STARTS = 8


@dataclass(frozen=True, slots=True)
class ShardingSolution:
    """A choice for all axes.

    Attributes:
        choice: by axis and class, which strategy.
        figures: time and peak on one rank.
        status: ``"optimal"``: proved, to the gap; ``"feasible"``: no turn of an axis improved it.
        bound_ms: no choice that keeps the limit is faster; None where nothing is known.
        limited: whether a limit of work ended a solve on the way.
    """

    choice: ClassChoices
    figures: Figures
    status: str
    bound_ms: float | None = None
    limited: bool = False


class ShardingSearch:
    """Strategies for a step on a mesh.

    Args:
        program: of the whole model on one device, as recorded.
        parameters: of the model.
        mesh: the ranks.
        spec: the device of a rank, and its links.
        allowed: by name of an axis, what is offered on it.
        options: of the solver; the work is that of one turn.

    Attributes:
        evaluation: costs of choices.
    """

    def __init__(
        self,
        program: Program,
        parameters: Sequence[Parameter],
        mesh: Mesh,
        spec: DeviceSpec,
        allowed: Mapping[str, Allowed] | None = None,
        options: Milp = SOLVER,
    ) -> None:
        self.mesh = mesh
        self.options = options
        self.graph = program.derived(
            ("placing", tuple(parameters)), lambda: StrategyGraph(program, parameters)
        )
        axes = [self._axis(axis, allowed or {}) for axis in range(len(mesh.axes))]
        self.evaluation = Evaluation(self.graph, Costs.of(mesh, spec), axes)
        self._programs: dict[tuple[int, str, str], AxisProgram] = {}
        self._subsets: dict[tuple[int, str], list[frozenset[int]]] = {}
        self._known: dict[float, ShardingSolution | None] = {}
        self._first: dict[tuple[tuple[str, ...], float], Solved | None] = {}
        self._ended: set[float] = set()
        """Limits for which a solve with roles was ended by its limit of work."""

    def _axis(self, axis: int, allowed: Mapping[str, Allowed]) -> AxisOptions:
        name, ranks = self.mesh.axes[axis]
        slower = self.mesh.ranks[:axis]
        nested = {math.prod(some) for k in range(1, axis + 1) for some in itertools.combinations(slower, k)}
        return AxisOptions(self.graph, name, ranks, nested - {1}, allowed.get(name, everything))

    # --- one turn ------------------------------------------------------------------------------------

    def _program(self, choice: ClassChoices, axis: int, role: str = "") -> AxisProgram:
        only = None
        if role:
            if (axis, role) not in self._subsets:
                self._subsets[axis, role] = self.evaluation.options[axis].subset(ROLES[role])
            only = self._subsets[axis, role]
        key = axis, role, repr(choice)
        if key not in self._programs:
            self._programs[key] = AxisProgram(self.evaluation, choice, axis, self.options, only)
        return self._programs[key]

    def in_roles(self, roles: Sequence[str], limit: float = math.inf) -> ShardingSolution | None:
        """The fastest choice with a role for each axis whose peak is at most ``limit`` bytes; None if none was found.

        Each axis in its turn, the slowest first. Those that still are to come are counted as if they cut everything.
        """
        solved = self._in_roles(tuple(roles), limit)
        if solved is None or solved.figures.peak_bytes > limit:
            return None
        return ShardingSolution(solved.choice, solved.figures, "feasible")

    def _in_roles(self, roles: tuple[str, ...], limit: float) -> Solved | None:
        if (roles, limit) not in self._first:
            axis = len(roles) - 1
            before = self._in_roles(roles[:-1], limit) if axis else None
            solved = None
            if before is not None or not axis:
                choice = self.evaluation.replicated() if before is None else before.choice
                later = math.prod(self.mesh.ranks[axis + 1 :])
                program = self._program(choice, axis, roles[-1])
                solved = program.cheapest(limit * later)
                if program.limited:
                    self._ended.add(limit)
            self._first[roles, limit] = solved
        return self._first[roles, limit]

    @cached_property
    def starts(self) -> Mapping[tuple[str, ...], ShardingSolution]:
        """What is found with roles for all axes, without a limit."""
        axes = len(self.mesh.axes)
        all_roles = itertools.islice(itertools.product(_STARTS, repeat=axes), _MOST_STARTS)
        found = {roles: self.in_roles(roles) for roles in all_roles}
        return {roles: one for roles, one in found.items() if one is not None}

    # --- turns ---------------------------------------------------------------------------------------

    def cheapest(self, limit: float = math.inf) -> ShardingSolution | None:
        """The fastest choice found whose peak on a rank is at most ``limit`` bytes; None if none was found."""
        if math.inf not in self._known:
            self._known[math.inf] = self._cheapest(math.inf)
        fastest = self._known[math.inf]
        if fastest is not None and fastest.figures.peak_bytes <= limit:
            return fastest
        if limit not in self._known:
            self._known[limit] = self._cheapest(limit)
        return self._known[limit]

    def _cheapest(self, limit: float) -> ShardingSolution | None:
        if len(self.mesh.axes) == 1:
            return self._on_one_axis(limit)
        fitting = [found for found in self.starts.values() if found.figures.peak_bytes <= limit]
        if not fitting:
            tight = [self.in_roles(roles, limit) for roles in self.starts]
            fitting = [found for found in tight if found is not None]
        if not fitting and self.smallest.figures.peak_bytes <= limit:
            fitting = [self.smallest]
        best = min(fitting, key=lambda found: found.figures.ms, default=None)
        return None if best is None else self._turns(best, limit)

    def _on_one_axis(self, limit: float) -> ShardingSolution | None:
        program = self._program(self.evaluation.replicated(), 0)
        solved = program.cheapest(limit)
        if solved is not None:
            status = "optimal" if solved.optimal else "feasible"
            return ShardingSolution(solved.choice, solved.figures, status, solved.bound, program.limited)
        if program.infeasible or self.smallest.figures.peak_bytes > limit:
            return None
        return replace(self.smallest, status="feasible", limited=self.smallest.limited or program.limited)

    def _turns(self, start: ShardingSolution, limit: float) -> ShardingSolution:
        """Axis after axis from a choice that keeps the limit, until none improves."""
        best, axes, idle = start, len(self.mesh.axes), 0
        limited = start.limited or not self._ended.isdisjoint((limit, math.inf))
        for turn in range(_TURNS * axes):
            if idle >= axes:
                break
            program = self._program(best.choice, turn % axes)
            solved = program.cheapest(limit)
            limited = limited or program.limited
            better = solved is not None and solved.figures.ms < best.figures.ms * (1 - _BETTER)
            if solved is not None and better:
                best = ShardingSolution(solved.choice, solved.figures, "feasible")
            idle = 0 if better else idle + 1
        return replace(best, bound_ms=self._bound_ms, limited=limited)

    @cached_property
    def smallest(self) -> ShardingSolution:
        """The choice with the smallest peak on a rank that was found."""
        choice, axes = self.evaluation.replicated(), len(self.mesh.axes)
        best = ShardingSolution(choice, self.evaluation.figures(choice), "feasible")
        if axes > 1:
            best = min(self.starts.values(), key=lambda found: found.figures.peak_bytes, default=best)
        limited = math.inf in self._ended
        idle = 0
        for turn in range(_TURNS * axes):
            if idle >= axes:
                break
            program = self._program(best.choice, turn % axes)
            solved = program.smallest()
            limited = limited or program.limited
            figures = None if solved is None else solved.figures
            smaller = figures is not None and figures.peak_bytes < best.figures.peak_bytes * (1 - _BETTER)
            if solved is not None and smaller:
                proved = axes == 1 and solved.bound is not None and solved.optimal
                best = ShardingSolution(solved.choice, solved.figures, "optimal" if proved else "feasible")
            idle = 0 if smaller and axes > 1 else idle + 1
        return replace(best, limited=limited)

    @cached_property
    def _bound_ms(self) -> float:
        """Each class as fast as it can run, and nothing moved."""
        evaluation, total = self.evaluation, self.graph.rest_ms
        for c in range(len(self.graph.classes)):
            offered = itertools.product(*(options.strategies[c] for options in evaluation.options))
            total += min(evaluation.class_ms(c, s) for s in offered if evaluation.is_valid(c, s))
        return total
