"""``Milp``: the mixed-integer program that takes an option of every choice.

With x_co "choice c takes option o" (see ``problem.py``),

    minimise    sum of cost_co x_co + costs paid once
    subject to  base_r + sum of uses_cor x_co <= limit_r       for every row r
                sum over o of x_co = 1                         for every choice c

Optimal to the asked gap, unless the limit of work or of rounds comes first. A cost paid once is a binary variable that
is at least each x_co of its pairs.

Block decomposition. Choices of one kind form a block b and share variables: n_bo says how many choices of the block
take option o. Only rows that treat the choices of each block alike can be written with these variables. At first those
are the rows outside of all repeated layers, so the program does not grow with the depth. ``Refinement`` then repeats:

1. Solve the program. It leaves out rows, so it is a relaxation and its bound holds for the problem.
2. Lay the counts out over the choices of each block, those that keep least first or last (``_lay_out``).
3. If no row is over its limit, the relaxation's optimum is the optimum. Done.
4. Otherwise split the blocks whose choices differ in the tightest row (``_split``), so that it can be written.
5. If none differ, the solver's tolerance hid the excess. Repair the answer for an incumbent, and cut it off: some
   block must use less in that row (``_cut_off``). The cut is valid for every answer that keeps the row's limit.

Known inefficiencies: each round starts the solver from scratch, and a split is never undone. Where every layer ends up
in a block of its own, the program is the plain one above.

Neighbouring rows differ in few blocks, so each is written as the row before plus the difference.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sacplan.solvers.local import descend, give_back, starts
from sacplan.solvers.mip import WORK_LIMIT, LinearProgram, LinearSolution
from sacplan.solvers.problem import DEVICE_MEMORY, NO_LIMIT, Picks, Problem, Solution

_SCALE = 1000.0  # rows are scaled so that what is over the limit is this
_SLACK = 1e-6  # by how much rows are relaxed: a solver must not call options infeasible that just fit
_ROUNDS = 60  # of splitting blocks and cutting off, at most


@dataclass(frozen=True, slots=True)
class Milp:
    """The mixed-integer program over the options of all choices (PuLP and HiGHS).

    Attributes:
        gap: relative gap at which a solution counts as optimal.
        work_limit: of all solves for one problem together: nodes of branch and bound, each counted as the nonzeros of
            its program. The answer does not depend on how fast the machine is.
        seed: of the solver's own random choices.
        peak_gap: relative gap at which a peak counts as the smallest.
    """

    gap: float = 1e-3
    work_limit: int = WORK_LIMIT
    seed: int = 0
    peak_gap: float = 1e-3

    @property
    def name(self) -> str:
        """``"milp"``."""
        return "milp"

    def solve(self, problem: Problem) -> Solution | None:
        """Return the cheapest options that keep all limits.

        None: there are none, or none were found. Status "unknown": the limit of work came before either was known.
        """
        search = Refinement(self, problem)
        found = search.cheapest()
        if found is None and search.limited and not search.infeasible:
            return Solution({}, "unknown", limited=True)
        return found

    def run(
        self,
        program: LinearProgram,
        *,
        gap: float | None = None,
        work_limit: int | None = None,
    ) -> LinearSolution:
        """Solve a program with these options; ``gap`` and ``work_limit`` replace those of this object."""
        return program.solve(
            gap=self.gap if gap is None else gap,
            work_limit=self.work_limit if work_limit is None else work_limit,
            seed=self.seed,
        )

    def smallest(self, problem: Problem) -> Solution:
        """Return the options with the smallest peak (to ``peak_gap``), as cheap as that peak allows."""
        search = Refinement(self, problem)
        picks, _ = search.smallest()
        found = self.solve(problem.with_limit(DEVICE_MEMORY, problem.peak(picks)))
        # The second search may end without an answer. That of the first search keeps the limits all the same.
        if found is None or found.status == "unknown":
            return Solution(picks, "feasible", limited=search.limited or found is not None)
        return replace(found, limited=found.limited or search.limited)


class _AtLeast(NamedTuple):
    """At least ``number`` of some choices (of one block) take one of some options."""

    choices: frozenset[int]
    options: frozenset[int]
    number: int


class Refinement:
    """The search of ``Milp``: solve, lay out, split, until what is laid out fits.

    Attributes:
        infeasible: whether it is proved that nothing keeps the limits.
        limited: whether the limit of work ended a solve.
    """

    def __init__(self, options: Milp, problem: Problem) -> None:
        self.options = options
        self.problem = problem
        self.infeasible = False
        self.limited = False
        self._work = options.work_limit  # what is left of it
        self._cuts: list[list[_AtLeast]] = []
        # Choices share variables only if every term of the costs treats them alike: same options, costs paid once and
        # uses of priced rows. A choice with one option has nothing to decide.
        blocks: dict[Hashable, list[int]] = {}
        for i, choice in enumerate(problem.choices):
            if len(choice.costs) > 1:
                once = tuple(
                    tuple((i, option) in once.pairs for option in range(len(choice.costs)))
                    for once in problem.once_costs
                )
                priced = choice.uses[:, problem.priced].tobytes()
                blocks.setdefault((choice.kind, once, priced), []).append(i)
        self._blocks = list(blocks.values())

    def cheapest(self) -> Solution | None:
        """Return the cheapest options that keep all limits, to the gap; see ``Milp.solve``."""
        problem = self.problem
        # Cheap, and where a row cannot keep its limit at all, it spares a call of the solver.
        if (problem.least_uses() > problem.limits).any():
            self.infeasible = True
            return None
        best: dict[int, int] | None = None
        picks: dict[int, int] = {}
        bound: float | None = None
        for _ in range(_ROUNDS):
            found, encoding = self._solve(problem, self.options.gap)
            if found.bound is not None:
                # Each round solves a tighter relaxation, so the best bound of all rounds holds.
                least = problem.least_cost() if bound is None else bound
                bound = max(least, found.bound * encoding.cost_scale)
            if not found.values:
                self.infeasible = found.status == "infeasible" and best is None
                break
            counts = encoding.counts(found)
            picks = self._lay_out(counts, problem)
            over = problem.tightest(picks)
            if problem.excess(picks)[over] <= 0:
                best = self._cheaper(best, picks)
                break
            # Split first: only if no block differs in that row was the row in the program, and the excess is due to
            # the solver's tolerance.
            if self._split(over):
                continue
            best = self._cheaper(best, descend(problem, picks))
            if self._close(best, bound) or not self._cut_off(counts, over):
                break
        else:  # all rounds are used up
            self.limited = True
        # The last layout is near the optimum, if there was one: go down from there for a feasible answer.
        if best is None and not self.infeasible:
            best = self._cheaper(None, descend(problem, picks, beyond=True))
        if best is None:
            return None
        close = self._close(best, bound)
        return Solution(best, "optimal" if close else "feasible", bound, self.limited and not close)

    def smallest(self) -> tuple[dict[int, int], bool]:
        """Return the options with the smallest peak of device memory, and whether that is proved (to ``peak_gap``).

        The same refinement, with the peak as a variable that is minimised. Half of the gap is the solver's, the rest is
        for what the layout adds to the peak.
        """
        gap, problem = self.options.peak_gap, self.problem
        lowest = problem.with_limit(DEVICE_MEMORY, 0)
        device = problem.resources[DEVICE_MEMORY]
        best = starts(problem)
        proved = False
        for _ in range(_ROUNDS):
            found, encoding = self._solve(lowest, gap / 2, minimise_peak=True)
            if not found.values:
                break
            counts = encoding.counts(found)
            picks = self._lay_out(counts, lowest)
            # The layout must keep the other resources; device memory is what is minimised.
            others = problem.with_limit(DEVICE_MEMORY, NO_LIMIT)
            over = others.tightest(picks)
            if others.fits(picks):
                best = min(best, picks, key=problem.peak)
                scale = float(lowest.scales[device[0]]) / _SCALE
                bound = scale * (0.0 if found.bound is None else found.bound)
                # ``_add_rows`` relaxes each row by half a byte or by ``_SLACK``: the bound may be too low by that much.
                proved = problem.peak(best) <= bound * (1 + gap) + max(0.75, 2 * _SLACK * scale)
                over = int(device[problem.total(picks)[device].argmax()])
                if proved or not self._split(over):
                    proved = proved or found.status == "optimal"
                    break
            elif not (self._split(over) or self._cut_off(counts, over)):
                break
        else:  # all rounds are used up
            self.limited = True
        if not proved:
            greedy = descend(lowest, starts(problem), beyond=True)
            best = min(best, greedy, key=problem.peak)
            # No option lowers a row below its least use, so a peak of that size is the smallest.
            proved = problem.peak(best) <= problem.least_uses()[device].max()
        return best, proved

    def _solve(
        self, problem: Problem, gap: float, *, minimise_peak: bool = False
    ) -> tuple[LinearSolution, _Encoding]:
        encoding = _Encoding(problem, self._blocks, self._cuts, minimise_peak=minimise_peak)
        # All rounds share one limit of work: the rounds before may have used it up.
        if self._work <= 0:
            self.limited = True
            return LinearSolution("unknown"), encoding
        found = self.options.run(encoding.program, gap=gap, work_limit=self._work)
        self._work -= found.work
        self.limited = self.limited or found.limited
        return found, encoding

    def _cheaper(self, best: dict[int, int] | None, picks: Picks) -> dict[int, int] | None:
        """Return the better of ``best`` and ``picks`` after ``give_back``; ``best`` if ``picks`` do not fit."""
        problem = self.problem
        if not problem.fits(picks):
            return best
        found = give_back(problem, picks)
        return found if best is None or problem.cost(found) < problem.cost(best) else best

    def _close(self, best: Picks | None, bound: float | None) -> bool:
        if best is None or bound is None:
            return False
        cost = self.problem.cost(best)
        largest = max((float(choice.costs.max()) for choice in self.problem.choices), default=0.0)
        # Near a cost of 0 a relative gap allows nothing, so a small part of the largest cost is allowed as well.
        return cost - bound <= max(self.options.gap * cost, _SLACK * largest)

    def _lay_out(self, counts: list[list[int]], problem: Problem) -> dict[int, int]:
        """Return picks with these counts in each block; options that keep least are first or last: what fits better."""
        layouts = []
        for first in (1, -1):
            picks: dict[int, int] = {}
            for block, own in zip(self._blocks, counts, strict=True):
                kept = problem.choices[block[0]].kept_bytes
                taken = [option for option, count in enumerate(own) for _ in range(count)]
                taken.sort(key=lambda option: first * kept[option])
                picks.update((choice, option) for choice, option in zip(block, taken, strict=True) if option)
            layouts.append(picks)
        return min(layouts, key=lambda picks: float((problem.excess(picks) / problem.scales).max()))

    def _split(self, row: int) -> bool:
        """Split the blocks whose choices differ in a row; return whether any did."""
        blocks: list[list[int]] = []
        for block in self._blocks:
            groups: dict[bytes, list[int]] = {}
            for choice in block:
                groups.setdefault(self.problem.choices[choice].uses[:, row].tobytes(), []).append(choice)
            blocks.extend(groups.values())
        changed = len(blocks) > len(self._blocks)
        self._blocks = blocks
        return changed

    def _cut_off(self, counts: list[list[int]], row: int) -> bool:
        """Cut off an answer that is over the limit in a row of the program; return whether anything uses less there.

        An answer that uses less in the row has, in some block and for some amount, more choices that use at most that
        amount. The cut says just that, so it excludes no answer that keeps the limit.
        """
        cut = []  # alternatives, of which at least one has to hold
        for block, own in zip(self._blocks, counts, strict=True):
            uses = self.problem.choices[block[0]].uses[:, row]
            # By how many choices now use at most ``amount``. Amounts ascend, so with equal counts the larger set of
            # options overwrites the smaller. Nothing is lost: an answer that raises the count of the smaller set raises
            # that of the larger.
            options_by_count: dict[int, frozenset[int]] = {}
            for amount in np.unique(uses):
                options = np.flatnonzero(uses <= amount).tolist()
                options_by_count[sum(own[option] for option in options)] = frozenset(options)
            # All choices of the block may use at most that amount already. Then no more of them can.
            cut += [
                _AtLeast(frozenset(block), options, count + 1)
                for count, options in options_by_count.items()
                if count < len(block)
            ]
        self._cuts.append(cut)
        return bool(cut)


class _Encoding:
    """The program for some blocks of equal choices."""

    def __init__(
        self,
        problem: Problem,
        blocks: Sequence[Sequence[int]],
        cuts: Sequence[Sequence[_AtLeast]],
        *,
        minimise_peak: bool,
    ) -> None:
        self.program = LinearProgram()
        self._problem = problem
        self._blocks = blocks
        self._minimise_peak = minimise_peak
        costs = [problem.choices[block[0]].costs for block in blocks]
        self.cost_scale = max((float(each.max()) for each in costs), default=0.0) or 1.0
        self._variables = [self._variables_of(block) for block in blocks]
        # Where the peak is minimised, costs count nothing, so what only adds costs is left out.
        if not minimise_peak:
            self._add_once_costs()
            self._add_priced_rows()
        self._add_rows()
        for cut in cuts:
            self._add_cut(cut)

    def counts(self, solution: LinearSolution) -> list[list[int]]:
        """Return, by block and option, how many choices take it."""
        # The first option has no variable: the choices that take none of the others take it.
        others = [[round(solution.values[n]) for n in own] for own in self._variables]
        return [[len(block) - sum(own), *own] for block, own in zip(self._blocks, others, strict=True)]

    def _cost(self, cost: float) -> float:
        return 0.0 if self._minimise_peak else float(cost) / self.cost_scale

    def _variables_of(self, block: Sequence[int]) -> list[int]:
        """Make the variables of a block: for each option but the first, how many choices take it."""
        size = float(len(block))
        own = [
            self.program.variable(upper=size, integer=True, cost=self._cost(cost))
            for cost in self._problem.choices[block[0]].costs[1:]
        ]
        # For a single variable, its upper bound says the same.
        if len(own) > 1:
            self.program.row([(n, 1.0) for n in own], upper=size)
        return own

    def _add_once_costs(self) -> None:
        for once in self._problem.once_costs:
            paid = self.program.binary(cost=self._cost(once.cost))
            for block, own in zip(self._blocks, self._variables, strict=True):
                for option, n in enumerate(own, start=1):
                    if (block[0], option) in once.pairs:
                        # One row for the block: any of its choices that takes the option makes ``paid``
                        # positive, so 1.
                        self.program.row([(paid, float(len(block))), (n, -1.0)], lower=0.0)

    def _add_priced_rows(self) -> None:
        """Let what is over the limit in a priced row cost its price."""
        problem = self._problem
        columns = [n for own in self._variables for n in own]
        for row in problem.priced:
            scale = float(max(1, problem.limits[row]))
            uses = [use for b in self._blocks for use in problem.choices[b[0]].uses[1:, row] / scale]
            over = self.program.variable(cost=self._cost(problem.rows[row].price * scale))
            room = float(problem.limits[row] - problem.base[row]) / scale
            self.program.row([(over, -1.0), *zip(columns, uses, strict=True)], upper=room)

    def _add_rows(self) -> None:
        """Require that options free, in each row, what the first options together are over its limit."""
        problem = self._problem
        scales = problem.scales / _SCALE
        # Uses are whole numbers, so half a one less asks for the same.
        needs = (problem.base - problem.limits) / scales - np.maximum(_SLACK, 0.5 / scales)
        columns = [n for own in self._variables for n in own]
        freed = np.zeros((0, len(scales)))
        if self._blocks:
            freed = -np.concatenate([problem.choices[block[0]].uses[1:] for block in self._blocks]) / scales
        wanted = self._wanted()
        for resource, rows in problem.resources.items():
            peak = None
            if self._minimise_peak and resource == DEVICE_MEMORY:
                peak = self.program.variable(cost=1.0)
            before: tuple[int, int] | None = None
            for row in rows[wanted[rows]]:
                # ``total`` is what is freed in this row: the total of the row before, plus the difference of the two.
                need = float(needs[row])
                total = self.program.variable(lower=None if peak is not None else need)
                difference = freed[:, row] if before is None else freed[:, row] - freed[:, before[0]]
                terms = [(columns[i], float(difference[i])) for i in np.flatnonzero(difference)]
                if before is not None:
                    terms.append((before[1], 1.0))
                self.program.row([(total, -1.0), *terms], lower=0.0, upper=0.0)
                if peak is not None:
                    # What is not freed in this row is part of the peak.
                    self.program.row([(total, 1.0), (peak, 1.0)], lower=need)
                before = int(row), total

    def _wanted(self) -> npt.NDArray[np.bool_]:
        """Return, by row, whether it treats each block's choices alike and some options put it over the limit."""
        problem = self._problem
        wanted = np.ones(len(problem.rows), dtype=bool)
        worst = problem.base.copy()
        for block in self._blocks:
            first = problem.choices[block[0]].uses
            for choice in block[1:]:
                wanted &= (problem.choices[choice].uses == first).all(axis=0)
            worst += len(block) * np.maximum(first.max(axis=0), 0)
        # Only a row that some choice of options puts over its limit says anything.
        wanted &= worst > problem.limits
        wanted[problem.priced] = False
        return wanted

    def _add_cut(self, cut: Sequence[_AtLeast]) -> None:
        """Add a cut: at least one of its statements is true."""
        true = [self.program.binary() for _ in cut]
        self.program.row([(t, 1.0) for t in true], lower=1.0)
        for t, (choices, options, number) in zip(true, cut, strict=True):
            inside = 0 not in options  # else count the choices outside: the first option has no variable
            terms = [
                (n, 1.0)
                for block, own in zip(self._blocks, self._variables, strict=True)
                if block[0] in choices
                for option, n in enumerate(own, start=1)
                if (option in options) == inside
            ]
            if inside:
                self.program.row([*terms, (t, -float(number))], lower=0.0)
            else:
                self.program.row([*terms, (t, float(number))], upper=float(len(choices)))
