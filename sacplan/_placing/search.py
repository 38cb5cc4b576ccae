"""Strategies on all axes of a mesh: one axis after the other, the slowest first, until nothing improves.

All axes in one program take minutes where turns take seconds. Turns start from what people name (``roles.py``): on
each axis data or tensor parallelism, which are small programs, so that nothing found is worse than these. What turns
prove is about one axis; for a mesh of several, the time below which nothing is comes from each class alone.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sacplan._device.devices import DeviceSpec
from sacplan._placing.axis_program import AxisProgram, Options, Solved
from sacplan._placing.evaluation import Choice, Evaluation, Figures
from sacplan._placing.graph import Graph
from sacplan._placing.options import Allowed, AxisOptions, everything
from sacplan._placing.roles import ROLES
from sacplan._program.program import Program
from sacplan._ranks.shards import Parameter
from sacplan._shard.costs import Costs
from sacplan._shard.mesh import Mesh

_TURNS = 3
"""Of each axis, at most."""

_BETTER = 1e-3
"""By what share a turn must improve to count."""

_STARTS = ("data", "tensor")
"""Roles of an axis from which turns start."""

_MOST_STARTS = 8
_SHARE_OF_START = 0.4
"""Of the time, for each axis of a start."""


@dataclass(frozen=True, slots=True)
class Found:
    """A choice for all axes.

    Attributes:
        choice: by axis and class, which strategy.
        figures: time and peak on one rank.
        status: ``"optimal"``: proved, to the gap; ``"feasible"``: no turn of an axis improved it in time.
        bound_ms: no choice that keeps the limit is faster; None where nothing is known.
    """

    choice: Choice
    figures: Figures
    status: str
    bound_ms: float | None = None


class Search:
    """Strategies for a step on a mesh.

    Args:
        program: of the whole model on one device, as recorded.
        parameters: of the model.
        mesh: the ranks.
        spec: the device of a rank, and its links.
        allowed: by name of an axis, what is offered on it.
        options: of the solver; the time is that of one ``cheapest`` or ``smallest``.

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
        options: Options | None = None,
    ) -> None:
        self.mesh = mesh
        self.options = options or Options()
        self.graph = program.derived(("placing", tuple(parameters)), lambda: Graph(program, parameters))
        axes = [self._axis(axis, allowed or {}) for axis in range(len(mesh.axes))]
        self.evaluation = Evaluation(self.graph, Costs.of(mesh, spec), axes)
        self._subsets: dict[tuple[int, str], list[frozenset[int]]] = {}
        self._known: dict[float, Found | None] = {}
        self._first: dict[tuple[tuple[str, ...], float], Solved | None] = {}

    def _axis(self, axis: int, allowed: Mapping[str, Allowed]) -> AxisOptions:
        name, ranks = self.mesh.axes[axis]
        slower = self.mesh.ranks[:axis]
        nested = {math.prod(some) for k in range(1, axis + 1) for some in itertools.combinations(slower, k)}
        return AxisOptions(self.graph, name, ranks, nested - {1}, allowed.get(name, everything))

    # --- one turn ------------------------------------------------------------------------------------

    def _program(self, choice: Choice, axis: int, seconds: float, role: str = "") -> AxisProgram:
        options = replace(self.options, time_limit_s=max(0.1, min(self.options.time_limit_s, seconds)))
        only = None
        if role:
            if (axis, role) not in self._subsets:
                self._subsets[axis, role] = self.evaluation.options[axis].subset(ROLES[role])
            only = self._subsets[axis, role]
        return AxisProgram(self.evaluation, choice, axis, options, only)

    def in_roles(self, roles: Sequence[str], limit: float = math.inf) -> Found | None:
        """The fastest choice with a role for each axis whose peak is at most ``limit`` bytes; None if none was found.

        Each axis in its turn, the slowest first. Those that still are to come are counted as if they cut everything.
        """
        solved = self._in_roles(tuple(roles), limit)
        if solved is None or solved.figures.peak_bytes > limit:
            return None
        return Found(solved.choice, solved.figures, "feasible")

    def _in_roles(self, roles: tuple[str, ...], limit: float) -> Solved | None:
        if (roles, limit) not in self._first:
            axis = len(roles) - 1
            before = self._in_roles(roles[:-1], limit) if axis else None
            solved = None
            if before is not None or not axis:
                choice = self.evaluation.replicated() if before is None else before.choice
                later = math.prod(self.mesh.ranks[axis + 1 :])
                seconds = self.options.time_limit_s * _SHARE_OF_START
                solved = self._program(choice, axis, seconds, roles[-1]).cheapest(limit * later)
            self._first[roles, limit] = solved
        return self._first[roles, limit]

    @cached_property
    def starts(self) -> Mapping[tuple[str, ...], Found]:
        """What is found with roles for all axes, without a limit."""
        axes = len(self.mesh.axes)
        all_roles = itertools.islice(itertools.product(_STARTS, repeat=axes), _MOST_STARTS)
        found = {roles: self.in_roles(roles) for roles in all_roles}
        return {roles: one for roles, one in found.items() if one is not None}

    # --- turns ---------------------------------------------------------------------------------------

    def cheapest(self, limit: float = math.inf) -> Found | None:
        """The fastest choice found whose peak on a rank is at most ``limit`` bytes; None if none was found."""
        known = self._known.get(math.inf)
        if known is not None and known.figures.peak_bytes <= limit:
            return known
        if limit not in self._known:
            self._known[limit] = self._cheapest(limit)
        return self._known[limit]

    def _cheapest(self, limit: float) -> Found | None:
        deadline = time.monotonic() + self.options.time_limit_s
        if len(self.mesh.axes) == 1:
            return self._on_one_axis(limit)
        fitting = [found for found in self.starts.values() if found.figures.peak_bytes <= limit]
        if not fitting:
            tight = [self.in_roles(roles, limit) for roles in self.starts]
            fitting = [found for found in tight if found is not None]
        if not fitting and self.smallest.figures.peak_bytes <= limit:
            fitting = [self.smallest]
        best = min(fitting, key=lambda found: found.figures.ms, default=None)
        return None if best is None else self._turns(best, limit, deadline)

    def _on_one_axis(self, limit: float) -> Found | None:
        program = self._program(self.evaluation.replicated(), 0, self.options.time_limit_s)
        solved = program.cheapest(limit)
        if solved is not None:
            status = "optimal" if solved.optimal else "feasible"
            return Found(solved.choice, solved.figures, status, solved.bound)
        if program.infeasible or self.smallest.figures.peak_bytes > limit:
            return None
        return replace(self.smallest, status="feasible")

    def _turns(self, start: Found, limit: float, deadline: float) -> Found:
        """Axis after axis from a choice that keeps the limit, until none improves."""
        best, axes, idle = start, len(self.mesh.axes), 0
        for turn in range(_TURNS * axes):
            left = deadline - time.monotonic()
            if left <= 0 or idle >= axes:
                break
            solved = self._program(best.choice, turn % axes, left / 2).cheapest(limit)
            better = solved is not None and solved.figures.ms < best.figures.ms * (1 - _BETTER)
            if solved is not None and better:
                best = Found(solved.choice, solved.figures, "feasible")
            idle = 0 if better else idle + 1
        return replace(best, bound_ms=self._bound_ms)

    @cached_property
    def smallest(self) -> Found:
        """The choice with the smallest peak on a rank that was found."""
        deadline = time.monotonic() + self.options.time_limit_s
        choice, axes = self.evaluation.replicated(), len(self.mesh.axes)
        best = Found(choice, self.evaluation.figures(choice), "feasible")
        if axes > 1:
            best = min(self.starts.values(), key=lambda found: found.figures.peak_bytes, default=best)
        idle = 0
        for turn in range(_TURNS * axes):
            left = deadline - time.monotonic()
            if left <= 0 or idle >= axes:
                break
            solved = self._program(best.choice, turn % axes, left / 2 if axes > 1 else left).smallest()
            figures = None if solved is None else solved.figures
            smaller = figures is not None and figures.peak_bytes < best.figures.peak_bytes * (1 - _BETTER)
            if solved is not None and smaller:
                proved = axes == 1 and solved.bound is not None and solved.optimal
                best = Found(solved.choice, solved.figures, "optimal" if proved else "feasible")
            idle = 0 if smaller and axes > 1 else idle + 1
        return best

    @cached_property
    def _bound_ms(self) -> float:
        """Each class as fast as it can run, and nothing moved."""
        evaluation, total = self.evaluation, self.graph.rest_ms
        for c in range(len(self.graph.classes)):
            offered = itertools.product(*(options.strategies[c] for options in evaluation.options))
            total += min(evaluation.class_ms(c, s) for s in offered if evaluation.is_valid(c, s))
        return total
