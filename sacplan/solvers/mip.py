"""Mixed-integer programs, solved by HiGHS.

The only file that imports ``highspy`` (tried with 1.16).

What ends a search is a limit of work, not of time: with a given seed the answer is the same on a
machine that is slow or busy. Work is the nodes of branch and bound, each counted as the nonzeros of its
program, so that a limit takes about as long for small programs as for large ones. The first node is
always seen through. A limit in seconds may be given as well; to reach it is an error, not another answer.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import highspy

from sacplan.errors import PlanError, SolverError

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
_Ended = Status | Literal["late", "failed"]

_OPTIONS = {
    "output_flag": False,
    "threads": 1,  # HiGHS refuses to change it within one process, and more would not be deterministic
    "mip_allow_restart": False,  # with these two our programs take longer, for the same gap
    "mip_heuristic_run_feasibility_jump": False,
}

WORK_LIMIT = 10_000_000
"""The default for one problem."""


@dataclass(frozen=True, slots=True)
class LinearSolution:
    """A solver's answer.

    ``status`` is "optimal" (proved, within the asked gap), "feasible" (a limit ended the search with
    this incumbent), "infeasible", or "unknown" (a limit ended it with nothing). ``bound`` is a proved
    lower bound of the objective, None where the solver told none; ``gap`` is relative to the objective.
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
        _let_highs_introduce_itself()
        self._highs = highspy.Highs()
        for name, value in _OPTIONS.items():
            self._highs.setOptionValue(name, value)
        self._costs: list[float] = []
        self._is_mixed = False
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
        self._highs.addCol(cost, *_bounds(lower, upper), 0, [], [])
        if integer:
            self._is_mixed = True
            self._highs.changeColIntegrality(len(self._costs), highspy.HighsVarType.kInteger)
        self._costs.append(cost)
        return len(self._costs) - 1

    def binary(self, *, cost: float = 0.0) -> int:
        """Add a variable that is 0 or 1, and return its number."""
        return self.variable(upper=1.0, integer=True, cost=cost)

    def row(
        self, terms: Iterable[tuple[int, float]], *, lower: float | None = None, upper: float | None = None
    ) -> None:
        """Add lower <= sum of coefficient * variable <= upper; terms are (variable, coefficient)."""
        given = {column: factor for column, factor in terms if factor}
        self._nonzeros += len(given)
        self._highs.addRow(*_bounds(lower, upper), len(given), list(given), list(given.values()))

    def solve(
        self,
        *,
        gap: float = 1e-4,
        work_limit: int = WORK_LIMIT,
        seed: int = 0,
        time_limit_s: float | None = None,
    ) -> LinearSolution:
        """Minimise.

        Args:
            gap: relative gap at which a solution counts as optimal.
            work_limit: nodes times nonzeros after which the search ends with what it has.
            seed: of the solver's own random choices.
            time_limit_s: seconds of wall clock after which it fails; None: no such limit.

        Raises:
            PlanError: an option out of range.
            SolverError: HiGHS failed, or has run for ``time_limit_s``.
        """
        check_options(gap, work_limit, seed, time_limit_s)
        highs, nonzeros = self._highs, max(1, self._nonzeros)
        highs.setOptionValue("mip_rel_gap", gap)
        # HiGHS knows a limit of nodes and none of work, so the work is divided by what one node counts.
        highs.setOptionValue("mip_max_nodes", max(1, work_limit // nonzeros))
        highs.setOptionValue("random_seed", seed)
        highs.setOptionValue("time_limit", math.inf if time_limit_s is None else float(time_limit_s))
        # HiGHS 1.15's presolve calls programs infeasible that just fit, and may fail.
        status = self._run("choose")
        if status in ("infeasible", "failed"):
            again = self._run("off")
            status = status if again == "unknown" else again
        if status == "failed":
            raise SolverError(f"HiGHS failed: {highs.getModelStatus().name}")
        if status == "late":
            raise SolverError(
                f"the search was not done in {time_limit_s} s; raise time_limit, or leave it out: the limit of work "
                "ends every search, with the same answer on every machine"
            )
        info = highs.getInfo()
        # A program that is solved without branching may report no node at all.
        work = max(1, int(info.mip_node_count)) * nonzeros
        # Without integer variables there is no branch and bound: the optimum itself is the bound.
        bound = float(info.mip_dual_bound if self._is_mixed else info.objective_function_value)
        known = math.isfinite(bound) and (self._is_mixed or status == "optimal")
        if status in ("infeasible", "unknown"):
            return LinearSolution(status, bound=bound if known else None, work=work)
        values = tuple(highs.getSolution().col_value)
        objective = math.fsum(cost * value for value, cost in zip(values, self._costs, strict=True))
        # By a tolerance, a bound may come in above the objective.
        return LinearSolution(status, values, objective, min(bound, objective) if known else None, work)

    def _run(self, presolve: str) -> _Ended:
        highs, ended = self._highs, highspy.HighsModelStatus
        highs.clearSolver()
        highs.setOptionValue("presolve", presolve)
        highs.run()
        there = highs.getInfo().primal_solution_status == highspy.kSolutionStatusFeasible
        at_limit: _Ended = "feasible" if there else "unknown"
        known: dict[Any, _Ended] = {
            ended.kOptimal: "optimal",
            ended.kInfeasible: "infeasible",
            ended.kUnboundedOrInfeasible: "infeasible",
            ended.kSolutionLimit: at_limit,
            ended.kModelEmpty: "optimal",
            ended.kTimeLimit: "late",
        }
        return known.get(highs.getModelStatus(), "failed")


def _bounds(lower: float | None, upper: float | None) -> tuple[float, float]:
    return -math.inf if lower is None else lower, math.inf if upper is None else upper


def check_options(gap: float, work_limit: int, seed: int, time_limit_s: float | None = None) -> None:
    """Check the options that all programs share.

    Raises:
        PlanError: an option out of range.
    """
    if not 0 <= gap < math.inf:
        raise PlanError(f"gap is {gap!r}; it must be a share, such as 1e-4")
    if not _is_int(work_limit) or work_limit <= 0:
        raise PlanError(f"the work limit is {work_limit!r}; it must be a positive int, such as {WORK_LIMIT}")
    if time_limit_s is not None and not time_limit_s > 0:
        raise PlanError(f"the time limit is {time_limit_s!r} s; it must be positive, or None")
    if not _is_int(seed) or not 0 <= seed < 2**31:
        raise PlanError(f"seed is {seed!r}; it must be an int from 0 to 2**31 - 1")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@functools.cache
def _let_highs_introduce_itself() -> None:
    """HiGHS 1.16 prints two lines when a process first makes a solver, before it can be told not to.

    Standard output may be JSON that somebody reads, so these lines go nowhere.
    """
    flush = ctypes.CDLL(None).fflush if os.name == "posix" else ctypes.cdll.msvcrt.fflush
    sys.stdout.flush()
    # C has a buffer of its own. It is emptied before, so that nothing is lost, and after, so that HiGHS's lines are.
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
