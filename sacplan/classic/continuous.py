"""``sac_milp`` with choices "continuous": a unit may discard any share on its piecewise linear fit.

With y_i "module i is a unit", r_i the share of its largest discard and t_i its recompute time,

    minimise    sum of t_i
    subject to  t_i >= T_i (slope r_i + intercept y_i)         for each segment of the fit
                r_i <= y_i
                sum of freed_i r_i over the units that have ended >= row - budget      for each memory row
                sum of y_i <= 1                                on each path from the root: units do not nest

This is the perspective reformulation (Frangioni & Gentile, Math. Program. 106, 2006): its relaxation is the convex hull
of each unit alone, so there is no big M. Memory rows are written as prefix sums. To break symmetry, of units with the
same trade-off the earlier one discards no less: its memory is free at least as long.

Optimal for the fits, to the asked gap. A fit may promise what no set of ops reaches; see ``fit.py``.
"""

from __future__ import annotations

from sacplan.classic.tree import TreePlan, TreeSolution, UnitTree, cost_ms
from sacplan.solvers.milp import Milp
from sacplan.solvers.mip import LinearProgram, LinearSolution

_SCALE = 1000.0  # coefficients are scaled to this size
_SLACK = 1e-6  # by how much rows are relaxed: a solver must not call a plan infeasible that just fits
_ROUNDS = 8  # solves: one, and more for what a tolerance hid


def solve_continuous(tree: UnitTree, budget_bytes: int, options: Milp) -> TreeSolution:
    """Return the cheapest plan under the budget, to the gap.

    Within a solver's tolerance, a plan may exceed the budget by some bytes. Then solve again with the same units, and
    the budget lowered by the excess. The bound is that of the first solve.
    """
    work = options.work_limit
    asked, bound_ms, allowed = budget_bytes, None, None
    for _ in range(_ROUNDS):
        program = _LinearProgram(tree, asked, allowed)
        solution = program.solve(options, max(1, work))
        work -= solution.work
        # Only the first program is a relaxation of the problem. Later ones have fewer units and a smaller
        # budget.
        if allowed is None and solution.bound is not None:
            bound_ms = solution.bound * program.ms_scale
        if not solution.values:
            no_plan = allowed is None and solution.status == "infeasible"
            return TreeSolution(None, proved=no_plan, bound_ms=bound_ms)
        plan = program.read(solution)
        excess = int(tree.used(plan).max()) - budget_bytes
        if excess <= 0:
            break
        # With the same units only the shares are left, so a few rounds suffice; other units could exceed the budget
        # again each time.
        asked, allowed = asked - excess, frozenset(plan)
    else:  # still over the budget
        return TreeSolution(None, proved=False, bound_ms=bound_ms)
    cost = cost_ms(plan)
    proved = bound_ms is not None and cost - bound_ms <= max(options.gap * cost, _SLACK * program.largest_ms)
    return TreeSolution(plan, proved, bound_ms)


class _LinearProgram:
    def __init__(self, tree: UnitTree, budget_bytes: int, allowed: frozenset[int] | None = None) -> None:
        self._tree = tree
        self._program = program = LinearProgram()
        # Rows rise, so this is the most that any of them is over the budget.
        largest_need = int(tree.base[-1]) - budget_bytes
        self._offered = [
            # beyond what is needed there is nothing to gain
            unit.at(largest_need / unit.memory)
            # Lines of a least-squares fit may fall. The largest discard, which may then be cheaper, stays.
            if unit.options[-1].freed > largest_need and all(slope >= 0 for slope, _ in unit.segments)
            else unit.options[-1]
            for unit in tree.units
        ]
        self.largest_ms = max((offered.ms for offered in self._offered), default=0.0)
        self.ms_scale = self.largest_ms / _SCALE or 1.0
        # Rows ask for what is over the budget, so the largest such need gives the scale.
        self._byte_scale = largest_need / _SCALE
        self._chosen, self._shares = [], []
        for i, (unit, offered) in enumerate(zip(tree.units, self._offered, strict=True)):
            y = program.variable(upper=float(allowed is None or i in allowed), integer=True)
            share, ms = program.variable(upper=1.0), program.variable(cost=1.0)
            # Only a unit that is chosen discards a share.
            program.row([(y, 1.0), (share, -1.0)], lower=0.0)
            # The time is at least that of each line, so at least their maximum. If a unit is not chosen, they are 0.
            for slope, intercept in unit.segments:
                terms = [(ms, self.ms_scale), (share, -slope * offered.ratio), (y, -intercept)]
                program.row([(variable, factor / self.ms_scale) for variable, factor in terms], lower=0.0)
            self._chosen.append(y)
            self._shares.append(share)
        self._cliques()
        self._memory_rows(budget_bytes)
        self._order()

    def solve(self, options: Milp, work_limit: int) -> LinearSolution:
        return options.run(self._program, work_limit=work_limit)

    def read(self, solution: LinearSolution) -> TreePlan:
        plan = {}
        for i, (unit, offered) in enumerate(zip(self._tree.units, self._offered, strict=True)):
            if solution.values[self._chosen[i]] > 0.5:
                share = min(1.0, max(0.0, solution.values[self._shares[i]]))
                discard = unit.at(share * offered.ratio)
                # A share of less than half a byte is none.
                if discard.freed > 0:
                    plan[i] = discard
        return plan

    def _cliques(self) -> None:
        """Allow at most one unit on each path from the root."""
        # The row of an innermost unit covers those around it.
        around = {above for unit in self._tree.units for above in unit.above}
        for i, unit in enumerate(self._tree.units):
            if unit.above and i not in around:
                self._program.row([(self._chosen[j], 1.0) for j in (i, *unit.above)], upper=1.0)

    def _memory_rows(self, budget_bytes: int) -> None:
        """Require that the units which end before a row free what the row is over the budget."""
        before: list[tuple[int, float]] = []
        added = 0
        for n_units, n_bytes in zip(self._tree.n_units.tolist(), self._tree.base.tolist(), strict=True):
            # Nothing to free: the row holds for every plan.
            if n_bytes <= budget_bytes:
                continue
            # Each row adds its units to the total of the row before, which keeps the program sparse.
            total = self._program.variable(lower=(n_bytes - budget_bytes) / self._byte_scale - _SLACK)
            terms = [
                (self._shares[i], self._offered[i].freed / self._byte_scale) for i in range(added, n_units)
            ]
            self._program.row([(total, -1.0), *before, *terms], lower=0.0)
            before, added = [(total, 1.0)], n_units

    def _order(self) -> None:
        """Break the symmetry of units with the same trade-off, such as repeated layers: the earlier discards no less.

        The row is slack if a unit around the first one or inside it is in use: the first is then not free to take a
        share.
        """
        units = self._tree.units
        last_alike: dict[object, int] = {}
        for i, unit in enumerate(units):
            key = (unit.memory, unit.options, unit.segments)
            first = last_alike.get(key)
            last_alike[key] = i
            # Nothing alike before it, or one is inside the other: only one of them can be taken, so no order
            # holds between them.
            if first is None or first in unit.above or i in units[first].above:
                continue
            in_use = [
                (self._chosen[j], 1.0)
                for j, other in enumerate(units)
                if (j in units[first].above and j not in unit.above) or first in other.above
            ]
            self._program.row([(self._shares[first], 1.0), *in_use, (self._shares[i], -1.0)], lower=0.0)
