"""The integer program of one axis of a mesh, with the strategies of the other axes fixed.

With x_cs "class c takes strategy s" and e_vpq "value v, in layout p, is redistributed to q",

    minimise    compute of x + visible redistributions of e + exposed part of the hidden ones
    subject to  sum over s of x_cs = 1                                for every class c
                sum over q of e_vpq = x of the strategies that leave v as p    (v has one user)
                sum over p of e_vpq = x of the user's strategies that want q
                bytes alive on a rank <= limit                        for the moments at which more was found

A value with several users is moved once to each layout that any of them wants. Equal layers share the variables of
their classes, so the program does not grow with the depth. Moments are added as they are needed: the program is solved,
its solution is evaluated, and the moments at which most is alive become rows. There are far too many moments to state
them all at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sacplan._placing.evaluation import ClassChoices, Evaluation, Figures, half_of
from sacplan._placing.graph import GRADIENT, OpClass, User, ValueUse
from sacplan._shard.placements import Placements
from sacplan._shard.strategies import AxisStrategy
from sacplan._solve.milp import Milp
from sacplan._solve.mip import LinearProgram, LinearSolution

_ROUNDS = 40
_TIE = 1e-5
"""The weight of all bytes of parameters and outputs, as a share of the step: of two ways as fast, the smaller wins."""

Terms = dict[int, float]


SOLVER = Milp(gap=4e-3)
"""The solver of the program of an axis, and its gap."""


@dataclass(frozen=True, slots=True)
class Solved:
    """The best choice that a program found.

    Attributes:
        choice: for all axes.
        figures: of it.
        optimal: whether it is proved to be the best for this axis, to the gap.
        bound: below which no choice for this axis is: milliseconds, or bytes of the peak; None where none is known.
    """

    choice: ClassChoices
    figures: Figures
    optimal: bool
    bound: float | None


class AxisProgram:
    """Finds the strategies of one axis, by the integer program above.

    Args:
        evaluation: costs.
        choice: of all axes; that of ``axis`` is looked for.
        axis: which.
        options: of the solver; its limit of work is for all solves together.
        only: by class, the strategies on the axis that may be taken; None: all.

    Attributes:
        infeasible: whether it is proved that nothing keeps the limit that was asked for last.
        limited: whether the limit of work ended a solve for it.
        size: variables, integer ones, and rows of the program solved last.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        choice: ClassChoices,
        axis: int,
        options: Milp,
        only: Sequence[frozenset[int]] | None = None,
    ) -> None:
        self.evaluation = evaluation
        self.graph = evaluation.graph
        self.axis = axis
        self.options = options
        self.infeasible = False
        self.limited = False
        self.size = (0, 0, 0)
        self._choice = [list(picks) for picks in choice]
        self._rows: list[int] = []  # moments
        self._known: dict[tuple[float, bool], tuple[Solved | None, bool, bool]] = {}
        self._relaxed: tuple[_AxisProgram, LinearSolution] | None = None  # the fastest without any row
        self._excess: dict[int, float] = {}  # by which a row is tightened where a tolerance hid something
        self._only = only
        self._valid = [self._strategies_of(c) for c in range(len(self.graph.classes))]
        self._moments = {m: key for key, moments in self.graph.at.items() for m in moments}
        self._flow_of = {
            (f.value, f.phase, u): f for f in self.graph.flows for u in f.users
        }  # fmt: skip

    # A role may leave nothing that is valid beside the other axes. Then all valid strategies are offered, so
    # that the program always has a variable for each class (strategy 0, replicated, is always valid).
    def _strategies_of(self, c: int) -> list[int]:
        offered = self.evaluation.options[self.axis].strategies[c]
        valid = [k for k in range(len(offered)) if self.evaluation.is_valid(c, self._with(c, k))]
        return [k for k in valid if self._only is None or k in self._only[c]] or valid

    def _with(self, c: int, k: int) -> tuple[AxisStrategy, ...]:
        strategies = list(self.evaluation.strategies(self._choice, c))
        strategies[self.axis] = self.evaluation.options[self.axis].strategies[c][k]
        return tuple(strategies)

    # --- solving -------------------------------------------------------------------------------------

    def cheapest(self, limit: float = math.inf) -> Solved | None:
        """Return the fastest strategies whose peak is at most ``limit`` bytes; None if none were found."""
        return self._once(limit, smallest=False)

    def smallest(self) -> Solved | None:
        """Return the strategies with the smallest peak."""
        return self._once(math.inf, smallest=True)

    def _once(self, limit: float, *, smallest: bool) -> Solved | None:
        """Return what was found for these arguments before, or find it; the attributes are set accordingly."""
        if (limit, smallest) not in self._known:
            solved = self._refined(limit, smallest=smallest)
            self._known[limit, smallest] = solved, self.infeasible, self.limited
        solved, self.infeasible, self.limited = self._known[limit, smallest]
        return solved

    def _refined(self, limit: float, *, smallest: bool) -> Solved | None:
        work = self.options.work_limit
        best: Solved | None = None
        bound: float | None = None
        # The loop: solve with the rows known so far; evaluate what was found exactly; stop if it keeps the
        # limit, else add rows and solve again. A program with fewer rows is a relaxation of the full one, so
        # its bound holds for that. The loop ends when nothing is over the limit, when no row can be added, or
        # when the work or ``_ROUNDS`` are used up.
        self._excess.clear()
        self._rows.clear()
        self.infeasible = self.limited = False
        for _ in range(_ROUNDS):
            if work <= 0:
                self.limited = True
                break
            encoding, found = self._solved(limit, work, smallest=smallest)
            work -= found.work
            self.limited = self.limited or found.limited
            if found.bound is not None:
                told = encoding.bound(found.bound)
                # Every round's bound holds, so the largest does. (A row that ``_excess`` tightened makes it
                # too high by about the solver's tolerance.)
                bound = told if bound is None else max(bound, told)
            # No solution. It proves infeasibility only for the true rows: not if a row was tightened by
            # ``_excess``, and not after an earlier round had found something.
            if not found.values:
                self.infeasible = found.status == "infeasible" and best is None and not self._excess
                break
            solved = self._read(encoding, found, bound, smallest=smallest)
            figures = solved.figures
            # Minimising the peak: a round's solution may have a higher true peak than an earlier one, since
            # moments without a row are not seen. The best by its true peak is kept.
            if smallest:
                if best is None or figures.peak_bytes < best.figures.peak_bytes:
                    best = solved
                if bound is not None and figures.peak_bytes <= bound * (1 + self.options.gap) + 1024:
                    break
            # The cheapest under fewer rows that keeps the limit is the cheapest under all rows.
            elif figures.peak_bytes <= limit:
                best = solved
                break
            if not self._refine(solved.choice, limit if not smallest else bound or 0.0):
                break
        else:
            self.limited = True
        return best

    def _solved(self, limit: float, work: int, *, smallest: bool) -> tuple[_AxisProgram, LinearSolution]:
        # Without rows the limit is not in the program. So that solution is the same for all limits, and is
        # kept.
        if self._rows or smallest:
            encoding = _AxisProgram(self, limit, smallest=smallest)
            return encoding, encoding.solve(work)
        if self._relaxed is None:
            encoding = _AxisProgram(self, math.inf, smallest=False)
            self._relaxed = encoding, encoding.solve(work)
        return self._relaxed

    def _refine(self, choice: ClassChoices, limit: float) -> bool:
        """Add rows for the moments of the highest peaks, one in each third of the step; False if all keep the limit."""
        live = self.evaluation.live(choice)
        n = len(live)
        found = False
        for part in range(3):
            start, end = part * n // 3, (part + 1) * n // 3
            if start == end:
                continue
            moment = start + int(live[start:end].argmax())
            # Nothing to add in this third; others may still be over.
            if live[moment] <= limit:
                continue
            found = True
            # The row is there and yet the moment is over: the solver's tolerance hid it. The row is tightened
            # by what it missed. This may cut off valid choices, so infeasibility proves nothing any more (see
            # ``_refined``).
            if moment in self._rows:
                if math.isfinite(limit):
                    self._excess[moment] = self._excess.get(moment, 0.0) + float(live[moment]) - limit
            else:
                self._rows.append(moment)
        return found

    def _read(
        self, encoding: _AxisProgram, found: LinearSolution, bound: float | None, *, smallest: bool
    ) -> Solved:
        choice = [list(picks) for picks in self._choice]
        # The largest, since integers come back as floats, and classes of one strategy are no integers.
        for c, variables in enumerate(encoding.x):
            choice[self.axis][c] = max(variables, key=lambda k: found.values[variables[k]])
        figures = self.evaluation.figures(choice)
        return Solved(choice, figures, found.status == "optimal", bound)

    @property
    def variables(self) -> int:
        """The number of variables of the program without a limit."""
        return _AxisProgram(self, math.inf, smallest=False).size[0]


class _AxisProgram:
    """The linear program, with rows for the moments known so far."""

    def __init__(self, program: AxisProgram, limit: float, *, smallest: bool) -> None:
        self.program = program
        self.evaluation = program.evaluation
        self.graph = program.graph
        self.smallest = smallest
        self._step_ms = self.graph.program.step_ms
        self.linear = LinearProgram()
        self._n = [0, 0, 0]
        self.constant = self.graph.rest_ms
        self.x: list[dict[int, int]] = []
        self._edges: dict[ValueUse, dict[tuple[Placements, Placements], int]] = {}
        self._strategies = [{k: program._with(c, k) for k in valid} for c, valid in enumerate(program._valid)]
        # For each half: exposed >= hidden collectives - computation, exposed >= 0. ``_beside`` collects the
        # terms of the row; minimising makes the inequality tight.
        self._exposed = [self._variable(cost=self._cost(1.0), upper=None) for _ in range(2)]
        self._beside: list[Terms] = [{x: -1.0} for x in self._exposed]
        # Classes first: flows and memory refer to their variables.
        self._choose()
        for c in self.graph.classes:
            if c.follows:
                self._follow(c)
        for flow, count in self.graph.flows.items():
            self._flow(flow, count)
        for terms in self._beside:  # hidden communication less the computation that hides it is exposed
            self._row(terms, None, 0.0)
        if limit < math.inf or smallest:
            self._memory(limit)
        program.size = self.size

    @property
    def size(self) -> tuple[int, int, int]:
        """The numbers of variables, of integer ones, and of rows."""
        return self._n[0], self._n[1], self._n[2]

    def solve(self, work_limit: int) -> LinearSolution:
        here = self.program._choice[self.program.axis]
        # The choice so far, as a start for a solver that can use one. It need not keep the rows of memory.
        start = {
            x: float(k == here[c]) for c, own in enumerate(self.x) if here[c] in own for k, x in own.items()
        }
        return self.program.options.run(self.linear, work_limit=work_limit, start=start)

    def bound(self, told: float) -> float:
        """Return the solver's bound of the objective in milliseconds, or in bytes."""
        # The objective is the peak in ``_unit``, plus ties. What ties can add is taken off, so that it is a
        # bound of the peak.
        if self.smallest:
            return told * self._unit - self._unit * _TIE * 10
        return told + self.constant - _TIE * self._step_ms

    # --- variables -----------------------------------------------------------------------------------

    def _variable(self, *, cost: float = 0.0, integer: bool = False, upper: float | None = 1.0) -> int:
        self._n[0] += 1
        self._n[1] += integer
        return self.linear.variable(upper=upper, integer=integer, cost=cost)

    def _row(self, terms: Mapping[int, float], lower: float | None, upper: float | None) -> None:
        self._n[2] += 1
        self.linear.row(terms.items(), lower=lower, upper=upper)

    def _cost(self, ms: float) -> float:
        """Return the weight of a time in the objective: if the peak is minimised, it only breaks ties."""
        return ms / max(self._step_ms, 1e-9) * _TIE if self.smallest else ms

    def _choose(self) -> None:
        evaluation = self.evaluation
        sizes = [
            sum(math.prod(s) * d.itemsize for s, d in zip(c.shapes, c.dtypes, strict=True)) * c.count
            for c in self.graph.classes
        ]
        # All sizes together weigh ``_TIE`` of a step.
        tie = _TIE * self._step_ms / max(1, sum(sizes))
        for c, strategies in enumerate(self._strategies):
            own: dict[int, int] = {}
            subject = self.graph.classes[c]
            for k, chosen in strategies.items():
                held = 0.0
                for i, (shape, dtype) in enumerate(zip(subject.shapes, subject.dtypes, strict=True)):
                    layout = tuple(s.outputs[i] for s in chosen)
                    held += math.prod(shape) * dtype.itemsize * evaluation.share(layout) * subject.count
                ms = evaluation.class_ms(c, chosen)
                # A single strategy is fixed by the row below: it needs no branching.
                own[k] = self._variable(cost=self._cost(ms + tie * held), integer=len(strategies) > 1)
                if not subject.is_parameter:
                    self._beside[half_of(subject.phase)][own[k]] = -ms
            self._row(dict.fromkeys(own.values(), 1.0), 1.0, 1.0)
            self.x.append(own)

    def _makers(self, value: int) -> dict[Placements, list[int]]:
        """Return, by layout of a value, the variables of the strategies of its producer that leave it so."""
        base = self.graph.values[value]
        found: dict[Placements, list[int]] = defaultdict(list)
        for k, x in self.x[base.producer].items():
            outputs = [s.outputs[base.output] for s in self._strategies[base.producer][k]]
            found[self.evaluation.followed(value, outputs)].append(x)
        return found

    def _wanted(self, flow: ValueUse, user: User) -> dict[Placements, list[int]]:
        """Return, by layout of an argument, the variables of the strategies of its user that want it so."""
        found: dict[Placements, list[int]] = defaultdict(list)
        for k, x in self.x[user.user].items():
            found[self.evaluation.target(self._strategies[user.user][k], flow, user.position)].append(x)
        return found

    def _follow(self, subject: OpClass) -> None:
        """Let ops that nothing can be asked of be cut only where one of the arguments to cut arrives cut."""
        axis, values = self.program.axis, self.graph.values
        rows = dict.fromkeys(subject.inputs)
        for k, x in self.x[subject.index].items():
            strategy = self._strategies[subject.index][k][axis]
            cuts = [i for i, p in enumerate(strategy.inputs) if p.is_cut]
            # Row: x <= sum of the producers' strategies that leave one of the cut inputs cut. If no producer
            # can, x is 0.
            for row in rows if cuts else ():
                terms: Terms = defaultdict(float)
                terms[x] = -1.0
                for i in cuts:
                    v = row[i]
                    if v is None:
                        continue
                    for j, y in self.x[values[v].producer].items():
                        base = self._strategies[values[v].producer][j][axis].outputs[values[v].output]
                        here = self.evaluation.options[axis].placement(v, base)
                        if here is not None and here.is_cut:
                            terms[y] = 1.0
                self._row(terms, 0.0, None)

    # --- flows ---------------------------------------------------------------------------------------

    def _flow(self, flow: ValueUse, count: int) -> None:
        made = self._makers(flow.value)
        wanted = {user: self._wanted(flow, user) for user in sorted(flow.users)}
        targets = dict.fromkeys(q for by_layout in wanted.values() for q in by_layout)
        edges = self._edges[flow] = {}
        # An op that nothing is asked of cannot have a replicated value turned into summands for it: the rule
        # never does this by itself.
        follows = flow.phase != GRADIENT and any(self.graph.classes[u.user].follows for u in flow.users)
        for p in made:
            for q in targets:
                ms = self.evaluation.moved_ms(flow.value, p, q)
                # No edge: the rows below then forbid the two strategies together.
                if ms == math.inf or (follows and self._is_summand(p, q)):
                    continue
                hidden = self.graph.is_hidden(flow)
                waited = self.evaluation.copied_ms(flow.value, p, q) + (0.0 if hidden else ms)
                edges[p, q] = self._variable(cost=self._cost(waited * count))
                if hidden:
                    self._beside[half_of(flow.phase)][edges[p, q]] = ms * count
        # With one user the edges are a transport: what leaves p is the producer's x, what arrives at q the
        # user's. For integral x its vertices are integral, so edges need no branching. With several users a
        # value may be moved to several layouts.
        if len(wanted) == 1:
            (only,) = wanted.values()
            self._transport(made, only, edges)
        else:
            self._shared(made, wanted, edges)
        for user, by_layout in wanted.items():
            if flow.phase != GRADIENT and user.position in self.evaluation.written(user.user):
                for q, xs in by_layout.items():  # a tensor that is written in place cannot be moved first
                    self._row({**dict.fromkeys(xs, 1.0), **dict.fromkeys(made.get(q, []), -1.0)}, None, 0.0)

    def _is_summand(self, source: Placements, target: Placements) -> bool:
        """Whether a full value would become a partial one: itself on one rank, and zeros on the others."""
        axis = self.program.axis
        return target[axis].is_partial and not source[axis].is_partial

    def _transport(
        self,
        made: Mapping[Placements, list[int]],
        wanted: Mapping[Placements, list[int]],
        edges: Mapping[tuple[Placements, Placements], int],
    ) -> None:
        for p, xs in made.items():
            terms: Terms = dict.fromkeys(xs, -1.0)
            terms |= {edges[p, q]: 1.0 for q in wanted if (p, q) in edges}
            self._row(terms, 0.0, 0.0)
        for q, xs in wanted.items():
            terms = dict.fromkeys(xs, -1.0)
            terms |= {edges[p, q]: 1.0 for p in made if (p, q) in edges}
            self._row(terms, 0.0, 0.0)

    def _shared(
        self,
        made: Mapping[Placements, list[int]],
        wanted: Mapping[User, Mapping[Placements, list[int]]],
        edges: Mapping[tuple[Placements, Placements], int],
    ) -> None:
        # Each layout that a user wants needs an edge into it ...
        for by_layout in wanted.values():
            for q, xs in by_layout.items():
                terms: Terms = dict.fromkeys(xs, -1.0)
                for p in made:
                    if (p, q) in edges:
                        terms[edges[p, q]] = 1.0
                self._row(terms, 0.0, None)
        # ... and edges leave only the layout that the producer has chosen.
        for (p, _), edge in edges.items():
            self._row({edge: -1.0, **dict.fromkeys(made[p], 1.0)}, 0.0, None)

    # --- memory --------------------------------------------------------------------------------------

    def _memory(self, limit: float) -> None:
        rows = self.program._rows
        if self.smallest:
            self._unit = float(max(1, self.graph.program.footprint.peak_bytes))
            peak = self._variable(cost=1.0, upper=None)
            # Without any row the peak would be 0. Begin with the moment of the peak of the current choice.
            if not rows:
                rows.append(self.evaluation.figures(self.program._choice).moment)
            for moment in rows:
                terms, constant = self._alive(moment)
                scaled = {x: b / self._unit for x, b in terms.items()}
                self._row({**scaled, peak: -1.0}, None, -constant / self._unit)
            return
        for moment in rows:
            terms, constant = self._alive(moment)
            # Rows are scaled: coefficients in bytes beside 0 and 1 would fall below the tolerances of a
            # solver.
            unit = max(1.0, limit) / 1000
            room = limit - constant - self.program._excess.get(moment, 0.0)
            self._row({x: b / unit for x, b in terms.items()}, None, room / unit)

    def _alive(self, moment: int) -> tuple[Terms, float]:
        """Return the bytes alive at a moment: by variable, and those that no choice changes."""
        evaluation, constant = self.evaluation, 0.0
        terms: Terms = defaultdict(float)
        held: dict[int, list[int]] = defaultdict(list)
        for hold in self.graph.holds:
            if hold.start <= moment < hold.end:
                if hold.value is None:
                    constant += float(evaluation.rounded(np.array([hold.n_bytes]))[0])
                else:
                    held[hold.value].append(hold.n_bytes)
        for value, sizes in held.items():
            whole = np.array(sizes, dtype=np.float64)
            for layout, xs in self._makers(value).items():
                n_bytes = float(evaluation.rounded(whole * evaluation.share(layout)).sum())
                for x in xs:
                    terms[x] += n_bytes
        self._add_copies(moment, terms)
        return terms, constant

    def _add_copies(self, moment: int, terms: Terms) -> None:
        """Add the redistributed arguments of the op of a moment, and the gradient that is moved then."""
        evaluation = self.evaluation
        c, inputs = self.program._moments.get(moment, (0, ()))
        phase = self.graph.classes[c].phase
        # Two arguments of one flow that want the same layouts share one copy.
        seen = set()
        for i, v in enumerate(inputs):
            if v is None:
                continue
            user = User(c, i)
            flow = self.program._flow_of[v, phase, user]
            key = tuple(sorted((q, tuple(xs)) for q, xs in self._wanted(flow, user).items()))
            if (flow, key) not in seen:
                seen.add((flow, key))
                self._add_copy(flow, user, terms)
        for move in self.graph.gradient_moves:
            if move.moment == moment:
                home = self.graph.values[move.home].producer
                flow = self.program._flow_of[move.value, GRADIENT, User(home, 0)]
                for (p, q), edge in self._edges[flow].items():
                    if p != q:
                        terms[edge] += evaluation.n_bytes(flow.value) * evaluation.share(p)

    def _add_copy(self, flow: ValueUse, user: User, terms: Terms) -> None:
        evaluation, n_bytes = self.evaluation, self.evaluation.n_bytes(flow.value)
        # The edges say exactly what is moved. With several users an edge says that somebody wants a layout,
        # and not that this op does: so a variable is 1 where this user wants q and the producer does not
        # leave it so.
        if len(flow.users) == 1:
            for (p, q), edge in self._edges[flow].items():
                if p != q:
                    terms[edge] += n_bytes * evaluation.share(q)
            return
        made = self._makers(flow.value)
        for q, xs in self._wanted(flow, user).items():
            copied = self._variable()
            self._row(
                {copied: 1.0, **dict.fromkeys(xs, -1.0), **dict.fromkeys(made.get(q, []), 1.0)}, 0.0, None
            )
            terms[copied] += n_bytes * evaluation.share(q)
