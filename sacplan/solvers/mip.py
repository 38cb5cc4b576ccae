"""Mixed-integer programs in PuLP, solved by HiGHS.

The only file that imports PuLP (tried with 3.3). What PuLP gets wrong for our purpose is put right
here: ``LpProblem.status`` calls the incumbent of an ended search optimal, so ``sol_status`` is read;
and PuLP reports no bound, so the bound is read from HiGHS's info.

What ends a search is a limit of work, not of time: with a given seed the answer is the same on a
machine that is slow or busy. Work is the nodes of branch and bound, each counted as the nonzeros of its
program, so that a limit takes about as long for small programs as for large ones. The first node is
always seen through.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pulp

from sacplan.errors import PlanError, SolverError

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_THREADS = 1  # HiGHS refuses to change it within one process, and more would not be deterministic

WORK_LIMIT = 10_000_000
"""Default for one problem. Work in place of seconds: a deadline gave other plans on another machine."""


@dataclass(frozen=True, slots=True)
class LinearSolution:
    """A solver's answer.

    ``status`` is "optimal" (proved, within the asked gap), "feasible" (a limit ended the search with
    this incumbent), "infeasible", or "unknown" (a limit ended it with nothing). ``bound`` is a proved
    lower bound of the objective, None where the solver gave none; ``gap`` is relative to the objective.
    ``work`` is what was done, see the top of this file.
    """

    status: Status
    values: tuple[float, ...] = ()
    objective: float | None = None
    bound: float | None = None
    work: int = 0

    @property
    def limited(self) -> bool:
        """Whether a limit ended the search."""
        return self.status in ("feasible", "unknown")

    @property
    def gap(self) -> float | None:
        """The relative distance of the objective from the bound."""
        return relative_gap(self.objective, self.bound)


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """Return (objective - bound) / |objective|, at least 0; None if either is unknown."""
    if objective is None or bound is None:
        return None
    difference = max(0.0, objective - bound)
    if difference == 0:
        return 0.0
    return difference / abs(objective) if objective else math.inf


class LinearProgram:
    """A sparse minimisation, built row by row and solved at any time; variables are non-negative by default."""

    def __init__(self) -> None:
        self._problem = pulp.LpProblem("sacplan", pulp.LpMinimize)
        self._variables: list[Any] = []
        self._costs: list[float] = []
        self._nonzeros = 0

    def variable(
        self,
        *,
        lower: float | None = 0.0,
        upper: float | None = None,
        integer: bool = False,
        cost: float = 0.0,
    ) -> int:
        """Add a variable, and return its number."""
        kind = pulp.LpInteger if integer else pulp.LpContinuous
        self._variables.append(self._problem.add_variable(f"x{len(self._variables)}", lower, upper, kind))
        self._costs.append(cost)
        return len(self._variables) - 1

    def binary(self, *, cost: float = 0.0) -> int:
        """Add a variable that is 0 or 1, and return its number."""
        return self.variable(upper=1.0, integer=True, cost=cost)

    def row(
        self, terms: Iterable[tuple[int, float]], *, lower: float | None = None, upper: float | None = None
    ) -> None:
        """Add lower <= sum of coefficient * variable <= upper; terms are (variable, coefficient)."""
        given = [(self._variables[i], factor) for i, factor in terms if factor]
        expression = pulp.LpAffineExpression(given)
        self._nonzeros += len(given)
        if lower is not None and lower == upper:
            self._problem.addConstraint(pulp.LpConstraint(expression, pulp.LpConstraintEQ, rhs=lower))
            return
        # A constraint of PuLP has one sense, so a row with two bounds becomes two of them.
        for bound, sense in ((lower, pulp.LpConstraintGE), (upper, pulp.LpConstraintLE)):
            if bound is not None:
                self._problem.addConstraint(pulp.LpConstraint(expression.copy(), sense, rhs=bound))

    def solve(self, *, gap: float = 1e-4, work_limit: int = WORK_LIMIT, seed: int = 0) -> LinearSolution:
        """Minimise, and return the solver's answer.

        Args:
            gap: relative gap at which a solution counts as optimal.
            work_limit: nodes times nonzeros after which the search ends with what it has.
            seed: of the solver's own random choices.

        Raises:
            PlanError: an option out of range.
            SolverError: HiGHS failed.
        """
        check_options(gap, work_limit, seed)
        priced = zip(self._variables, self._costs, strict=True)
        self._problem.setObjective(pulp.LpAffineExpression([(v, cost) for v, cost in priced if cost]))
        # HiGHS can be limited in nodes and not in work, so the limit of work is divided by the work of one node.
        nonzeros = max(1, self._nonzeros)
        try:
            ended = _solve_highs(self._problem, _Options(gap, max(1, work_limit // nonzeros), seed))
        except pulp.PulpSolverError as error:
            raise SolverError(f"HiGHS failed: {error}") from error
        status, bound = ended.status, ended.bound
        # A program that is solved without branching may report no node at all.
        work = max(1, ended.nodes) * nonzeros
        if status in ("infeasible", "unknown"):
            return LinearSolution(status, bound=bound, work=work)
        values = tuple(
            (v.lowBound or 0.0) if v.varValue is None else float(v.varValue)  # None: it is in no row
            for v in self._variables
        )
        objective = math.fsum(cost * value for value, cost in zip(values, self._costs, strict=True))
        # The bound may be above the objective by the solver's tolerance.
        least = None if bound is None else min(bound, objective)
        return LinearSolution(status, values, objective, least, work)


class _Options(NamedTuple):
    gap: float
    nodes: int
    seed: int


class _Ended(NamedTuple):
    """How a solver's search ended."""

    status: Status
    bound: float | None
    nodes: int


def check_options(gap: float, work_limit: int, seed: int) -> None:
    """Check the options that all programs share.

    Raises:
        PlanError: an option out of range.
    """
    if not 0 <= gap < math.inf:
        raise PlanError(f"gap is {gap!r}; it must be a share, such as 1e-4")
    if not _is_int(work_limit) or work_limit <= 0:
        raise PlanError(f"the work limit is {work_limit!r}; it must be a positive int, such as {WORK_LIMIT}")
    if not _is_int(seed) or not 0 <= seed < 2**31:
        raise PlanError(f"seed is {seed!r}; it must be an int from 0 to 2**31 - 1")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _status(problem: pulp.LpProblem) -> Status:
    by_solution: dict[int, Status] = {
        pulp.LpSolutionOptimal: "optimal",
        pulp.LpSolutionIntegerFeasible: "feasible",
        pulp.LpSolutionInfeasible: "infeasible",
        pulp.LpSolutionNoSolutionFound: "unknown",
    }
    if problem.sol_status not in by_solution:
        raise SolverError(f"the solver answered {pulp.LpStatus[problem.status]!r}, which should not happen")
    return by_solution[problem.sol_status]


class _HighsWithNodes(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS, which ends at a number of nodes.

    HiGHS has an option for that as well, but PuLP does not know the status with which HiGHS then ends.

    Args:
        nodes: at most.
        options: of HiGHS.
    """

    def __init__(self, nodes: int, **options: Any) -> None:
        super().__init__(**options)
        self._nodes = nodes

    def callSolver(self, lp: Any) -> None:
        """Solve, with the limit set; PuLP calls this when the model is built."""

        def stop(kind: Any, message: str, seen: Any, answer: Any, data: Any) -> None:
            answer.user_interrupt = seen.mip_node_count >= self._nodes

        # Not through PuLP, which sets callbacks before it silences HiGHS.
        lp.solverModel.setCallback(stop, None)
        lp.solverModel.startCallback(self.hscb.HighsCallbackType.kCallbackMipInterrupt)
        super().callSolver(lp)


def _solve_highs(problem: pulp.LpProblem, options: _Options) -> _Ended:
    """Solve with HiGHS; if that fails, or says "infeasible", again without presolve.

    HiGHS 1.15's presolve calls programs infeasible that just fit.
    """
    ended = _run_highs(problem, "choose", options)
    if ended.status == "infeasible" or problem.solverModel.getModelStatus().name == "kSolveError":
        again = _run_highs(problem, "off", options)
        return ended if again.status == "unknown" else again
    return ended


@functools.cache
def _let_highs_introduce_itself() -> None:
    """Make a first solver with standard output redirected: HiGHS 1.16 prints two lines before it can be told not to.

    Standard output may be JSON that somebody reads, so these lines go nowhere.
    """
    import highspy

    flush = ctypes.CDLL(None).fflush if os.name == "posix" else ctypes.cdll.msvcrt.fflush
    sys.stdout.flush()
    # C has a buffer of its own. Flushed before, nothing of ours is lost; flushed after, HiGHS's lines go nowhere.
    flush(None)
    try:
        shown = os.dup(1)
    except OSError:
        return  # there is no standard output
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        highspy.Highs()
        flush(None)
    finally:
        os.dup2(shown, 1)
        os.close(shown)


def _run_highs(problem: pulp.LpProblem, presolve: str, options: _Options) -> _Ended:
    _let_highs_introduce_itself()
    problem.solve(
        _HighsWithNodes(
            options.nodes,
            msg=False,
            gapRel=options.gap,
            threads=_THREADS,
            random_seed=options.seed,
            presolve=presolve,
            # Both are off: with them on, our programs take longer to reach the same gap.
            mip_allow_restart=False,
            mip_heuristic_run_feasibility_jump=False,
        )
    )
    status = _status(problem)
    info = problem.solverModel.getInfo()
    if status == "feasible" and info.primal_solution_status != 2:  # 2: a feasible point
        status = "unknown"
    # Without integer variables there is no branch and bound: the optimum itself is the bound.
    bound = float(info.mip_dual_bound) if problem.isMIP() else None
    if bound is None and status == "optimal":
        bound = float(info.objective_function_value)
    known = bound is not None and math.isfinite(bound)
    return _Ended(status, bound if known else None, int(info.mip_node_count))
