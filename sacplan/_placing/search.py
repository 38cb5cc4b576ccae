"""The search on a mesh of several axes: coordinate descent, one axis at a time, from the parallelisms people know.

One integer program for all axes takes minutes. A program for one axis, with the strategies of the others fixed, takes
seconds (``axis_program.py``). So:

1. *Starts.* For each way to give every axis the role of data or tensor parallelism (``roles.py``), find the fastest
   choice within these roles, the slowest axis first. The programs are small, since a role leaves few strategies.
2. *Turns.* From the fastest start that keeps the limit, free one axis after the other from its role and solve for it.
   A turn counts if it improves the time by at least ``_BETTER``. Stop when no axis improves, or after ``_TURNS`` each.
3. *Limits.* If no start keeps the limit, the starts are searched for again under it; then the choice with the smallest
   peak is taken. Later axes cut what is alive as well. While they are still to come, the limit of an axis is
   multiplied by their ranks.

Guarantees: a turn never makes the choice slower or lets it leave the limit, so the result is no worse than any start
that keeps it. On one axis it is optimal to the gap of the solver. On several it is a local optimum: no change of one
axis improves it, but one of two axes at once could. The bound there is weak: each class at its fastest, with nothing
moved.
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
from sacplan._program.derived import derived
from sacplan._program.program import Program
from sacplan._ranks.shards import Parameter
from sacplan._shard.costs import Costs
from sacplan._shard.mesh import Mesh
from sacplan._solve.milp import Milp

_TURNS = 3
"""How often each axis is solved for, at most."""

_BETTER = 1e-3
"""The share by which a turn must improve to count."""

_STARTS = ("data", "tensor")
"""Roles of the axes in the starts."""

_MOST_STARTS = 8


@dataclass(frozen=True, slots=True)
class ShardingSolution:
    """A choice for all axes that was found.

    Attributes:
        choice: by axis and class, which strategy.
        figures: time and peak on one rank.
        status: ``"optimal"``: proved, to the gap; ``"feasible"``: no turn of an axis improved it.
        bound_ms: no choice that keeps the limit is faster; None where no bound is known.
        limited: whether the solver's limit of work ended a solve on the way.
    """

    choice: ClassChoices
    figures: Figures
    status: str
    bound_ms: float | None = None
    limited: bool = False


class ShardingSearch:
    """Searches for strategies of a step on a mesh; what it has found is kept.

    Args:
        program: of the whole model on one device, as recorded.
        parameters: of the model.
        mesh: the ranks.
        spec: the device of a rank, and its links.
        allowed: by name of an axis, the strategies that may be taken on it.
        options: of the solver; the limit of work is for one turn.

    Attributes:
        evaluation: the costs of choices.
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
        self.graph = _strategy_graph(program, tuple(parameters))
        axes = [self._axis(axis, allowed or {}) for axis in range(len(mesh.axes))]
        self.evaluation = Evaluation(self.graph, Costs.of(mesh, spec), axes)
        self._programs: dict[tuple[int, str, str], AxisProgram] = {}
        self._subsets: dict[tuple[int, str], list[frozenset[int]]] = {}
        self._known: dict[float, ShardingSolution | None] = {}
        self._first: dict[tuple[tuple[str, ...], float], Solved | None] = {}
        self._ended: set[float] = set()
        """Limits of memory for which the limit of work ended a solve with roles."""

    def _axis(self, axis: int, allowed: Mapping[str, Allowed]) -> AxisOptions:
        name, ranks = self.mesh.axes[axis]
        slower = self.mesh.ranks[:axis]
        # Which of the slower axes cut the same dimension is not known yet: any product of them may be the
        # outer size.
        nested = {math.prod(some) for k in range(1, axis + 1) for some in itertools.combinations(slower, k)}
        return AxisOptions(self.graph, name, ranks, nested - {1}, allowed.get(name, everything))

    # --- one turn ------------------------------------------------------------------------------------

    def _program(self, choice: ClassChoices, axis: int, role: str = "") -> AxisProgram:
        """Return the program of an axis, kept with what it has solved: other limits refine the same rows."""
        only = None
        if role:
            if (axis, role) not in self._subsets:
                self._subsets[axis, role] = self.evaluation.options[axis].subset(ROLES[role])
            only = self._subsets[axis, role]
        # The program depends on the strategies of the other axes, and so on the choice.
        key = axis, role, repr(choice)
        if key not in self._programs:
            self._programs[key] = AxisProgram(self.evaluation, choice, axis, self.options, only)
        return self._programs[key]

    def in_roles(self, roles: Sequence[str], limit: float = math.inf) -> ShardingSolution | None:
        """Return the fastest choice with a role for each axis that keeps a limit in bytes; None if none was found.

        The axes are solved for one by one, the slowest first.
        """
        solved = self._in_roles(tuple(roles), limit)
        # ``_in_roles`` allowed for what later axes cut at best; here all axes are solved for.
        if solved is None or solved.figures.peak_bytes > limit:
            return None
        return ShardingSolution(solved.choice, solved.figures, "feasible")

    def _in_roles(self, roles: tuple[str, ...], limit: float) -> Solved | None:
        """Solve for the last of these axes, given what was found for those before it, and the later ones replicated.

        The later axes can at best divide all memory by their ranks, so this one gets that multiple of the limit.
        ``in_roles`` checks the limit itself at the end.
        """
        if (roles, limit) not in self._first:
            axis = len(roles) - 1
            before = self._in_roles(roles[:-1], limit) if axis else None
            solved = None
            # If the axes before could not keep even their share of the limit, this one cannot either.
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
        """The fastest choice without a limit for each way to give the axes roles (``_MOST_STARTS`` of them)."""
        axes = len(self.mesh.axes)
        all_roles = itertools.islice(itertools.product(_STARTS, repeat=axes), _MOST_STARTS)
        found = {roles: self.in_roles(roles) for roles in all_roles}
        return {roles: one for roles, one in found.items() if one is not None}

    # --- turns ---------------------------------------------------------------------------------------

    def cheapest(self, limit: float = math.inf) -> ShardingSolution | None:
        """Return the fastest choice that keeps a limit of the peak on a rank, in bytes; None if none was found."""
        # The fastest choice without a limit is needed for any limit, and for many is the answer.
        if math.inf not in self._known:
            self._known[math.inf] = self._cheapest(math.inf)
        # The fastest choice of all may keep the limit already.
        fastest = self._known[math.inf]
        if fastest is not None and fastest.figures.peak_bytes <= limit:
            return fastest
        if limit not in self._known:
            self._known[limit] = self._cheapest(limit)
        return self._known[limit]

    def _cheapest(self, limit: float) -> ShardingSolution | None:
        # One program decides, and its bound is one of the problem.
        if len(self.mesh.axes) == 1:
            return self._on_one_axis(limit)
        fitting = [found for found in self.starts.values() if found.figures.peak_bytes <= limit]
        # No start without a limit keeps it: search again within the roles, under the limit.
        if not fitting:
            tight = [self.in_roles(roles, limit) for roles in self.starts]
            fitting = [found for found in tight if found is not None]
        # The last resort, since it is slow, and found without looking at time.
        if not fitting and self.smallest.figures.peak_bytes <= limit:
            fitting = [self.smallest]
        best = min(fitting, key=lambda found: found.figures.ms, default=None)
        return None if best is None else self._turns(best, limit)

    def _on_one_axis(self, limit: float) -> ShardingSolution | None:
        """Return what one program says; where its work ended without a solution, the smallest choice if that fits."""
        program = self._program(self.evaluation.replicated(), 0)
        solved = program.cheapest(limit)
        if solved is not None:
            status = "optimal" if solved.optimal else "feasible"
            return ShardingSolution(solved.choice, solved.figures, status, solved.bound, program.limited)
        # Proved, or the smallest choice that is known does not keep it either.
        if program.infeasible or self.smallest.figures.peak_bytes > limit:
            return None
        return replace(self.smallest, status="feasible", limited=self.smallest.limited or program.limited)

    def _turns(self, start: ShardingSolution, limit: float) -> ShardingSolution:
        """Solve for one axis after the other, from a choice that keeps the limit, until none improves."""
        best, axes, idle = start, len(self.mesh.axes), 0
        limited = start.limited or not self._ended.isdisjoint((limit, math.inf))
        for turn in range(_TURNS * axes):
            # Each axis in turn was solved for without an improvement since the last one.
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
        """The choice with the smallest peak on a rank that was found, by turns that minimise the peak."""
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
            # With one axis a second turn would solve the same program.
            idle = 0 if smaller and axes > 1 else idle + 1
        return replace(best, limited=limited)

    @cached_property
    def _bound_ms(self) -> float:
        """A lower bound of the time: each class as fast as it can run by itself, and nothing moved."""
        # Valid but weak: redistributions cost at least 0, and exposed time as well.
        evaluation, total = self.evaluation, self.graph.rest_ms
        for c in range(len(self.graph.classes)):
            offered = itertools.product(*(options.strategies[c] for options in evaluation.options))
            total += min(evaluation.class_ms(c, s) for s in offered if evaluation.is_valid(c, s))
        return total


@derived
def _strategy_graph(program: Program, parameters: tuple[Parameter, ...]) -> StrategyGraph:
    """Return the graph of a program. It is made once, and all searches of the program share it."""
    return StrategyGraph(program, parameters)
