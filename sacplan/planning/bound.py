"""A lower bound: every schedule with a given peak recomputes at least this much.

Take one moment of the step, that is, one op. Some tensors are alive then only because the backward pass will need them.
Under any schedule, the tensors kept of these must fit in what the peak leaves after everything else that is alive. The
others must be made again from the kept ones, and each op that makes a missing tensor runs at least once more:

    bytes kept for later at this moment <= peak_bytes - bytes alive for other reasons

The cheapest choice of what to keep is a closure problem over the whole forward pass. Its lower hull of kept bytes
against time (``techniques/recompute/closure.py``) lies below every choice, so the point of the hull at that many bytes
is a valid bound. A few minimum cuts find the edge of the hull around that point. Each moment gives a bound, and the
largest counts. We look at a few moments, those with the most bytes alive without a plan.

The bound holds for schedules that run the recorded ops in their order, recompute tensors, and hold between ops what
the code holds. It is not tight: it ignores the memory that recomputation itself needs, it treats every op as one that
can run again, and it treats storages that are written in place as available at no cost. All three only lower it.

Pinned ops do not run again. If autograd holds their output, it is in memory at every moment anyway. If an op that runs
again reads their output, it has to be kept for that op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from sacplan.core.derived import derived
from sacplan.core.liveness import Liveness
from sacplan.core.program import Phase, Program
from sacplan.techniques.recompute.closure import ClosureOp, ClosureProblem, Hull

_MOMENTS, _EFFORT = 6, 20_000  # how many moments, and how many ops all of them together may look at
_APART = 8  # ops between two moments, at least: neighbours have nearly the same bound
# The bound is exact, but the times of a plan are summed as floats, so an optimal plan could come out just below it.
_ROUNDED = 1 - Fraction(1, 2**40)


class Bound:
    """Lower bounds on the recomputation of a recorded step, by peak.

    Args:
        liveness: Liveness of the recorded step.
        costs: By op, the cost of running it again.
        pinned: Forward ops that must not run again.
    """

    def __init__(
        self, liveness: Liveness, costs: Sequence[float], pinned: frozenset[int] = frozenset()
    ) -> None:
        self._liveness, self._costs, self._pinned = liveness, costs, pinned
        # Building the problem of one moment takes time linear in the ops, so a long step gets fewer moments.
        count = max(2, min(_MOMENTS, _EFFORT // max(1, len(liveness.at_op))))
        self._ops: list[int] = []
        # The moments with most bytes first, without those that are close to a moment already chosen.
        for op in np.argsort(-liveness.at_op, kind="stable").tolist():
            if all(abs(op - other) >= _APART for other in self._ops):
                self._ops.append(op)
                if len(self._ops) == count:
                    break
        self._moments: dict[int, _OpBound] = {}
        self._known: dict[int, float] = {}

    def at(self, peak_bytes: int) -> float:
        """Return the least that any schedule with this peak recomputes, in the unit of the costs."""
        if peak_bytes not in self._known:
            self._known[peak_bytes] = float(self._largest(peak_bytes) * _ROUNDED)
        return self._known[peak_bytes]

    def _largest(self, peak_bytes: int) -> Fraction:
        best = Fraction(0)
        for op in self._ops:
            if op not in self._moments:
                self._moments[op] = _OpBound(self._liveness, self._costs, op, self._pinned)
            # With ``best``, this stops as soon as it is clear that the moment gives no larger bound.
            best = max(best, self._moments[op].at(peak_bytes, best))
        return best


@derived
def bound_of(program: Program, costs: tuple[float, ...], pinned: frozenset[int] = frozenset()) -> Bound:
    """Return the bounds of a program. They are kept with it, so that a search and its plan share them."""
    return Bound(program.liveness, costs, pinned)


class _OpBound:
    """The bound at one op."""

    def __init__(
        self, liveness: Liveness, costs: Sequence[float], moment: int, pinned: frozenset[int]
    ) -> None:
        program = liveness.program
        pending = liveness.held_for_later(moment)
        # The bytes at this moment are split into those that a schedule may choose to keep, and the rest.
        fixed = {s for s in pending if program.writer.get(s) in pinned}
        held = [s for s in pending if s not in fixed]
        self._all = sum(program.storage_bytes[s] for s in held)
        # What is alive at this moment whatever a schedule keeps: the other side of the inequality.
        self._rest = int(liveness.at_op[moment]) - self._all

        # By storage, each op that writes it, in place too: more than one means that it is written in place.
        writers: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(program.ops[:moment]):
            if op.phase == Phase.FORWARD:
                for s in (*op.writes, *op.mutates):
                    writers[s].append(i)
        # Storages that ops can read again at no cost, since something holds them at this moment anyway.
        free = liveness.held_otherwise(moment) | fixed
        makers: dict[int, int] = {}  # storage to the op that makes it
        reads: dict[int, list[int]] = {}  # op that can run again to the storages that it needs
        wanted, stack = set(held), list(held)
        # Walk from the held storages back to everything from which they could be made again.
        while stack:
            s = stack.pop()
            # Nothing can make s again: no forward op has written it so far, several have, or a pinned one has. So it
            # is not in ``saved``, and costs its bytes only if an op that runs again reads it.
            if len(writers[s]) != 1 or writers[s][0] in pinned:
                continue
            maker = makers[s] = writers[s][0]
            # Left out are inputs that are in memory anyway, and inputs that are written in place, which count as
            # available.
            reads[maker] = [
                read for read in program.ops[maker].reads if read not in free and len(writers[read]) <= 1
            ]
            stack += (read for read in reads[maker] if read not in wanted)
            wanted.update(reads[maker])
        # The closure problem numbers its storages from 0, so those that matter here are renumbered.
        place = {s: i for i, s in enumerate(sorted(wanted))}
        made: dict[int, list[int]] = defaultdict(list)
        for s, maker in makers.items():
            made[maker].append(place[s])
        self._hull = Hull(
            ClosureProblem(
                ops=tuple(
                    ClosureOp(costs[op], tuple(place[s] for s in reads[op]), tuple(made[op]), True)
                    for op in sorted(reads)
                ),
                storage_bytes=tuple(program.storage_bytes[s] for s in place),
                saved=frozenset(place[s] for s in held if s in makers),
                free=frozenset(),
            )
        )
        self._vertices = [self._hull.first, self._hull.last]  # found so far, by decreasing bytes
        self._adjacent: set[tuple[int, int]] = set()  # bytes of pairs with no vertex between them

    def at(self, peak_bytes: int, worth: Fraction) -> Fraction:
        """Return the bound, or if it is not larger than ``worth``, any number from the bound up to ``worth``."""
        room, vertices = peak_bytes - self._rest, self._vertices
        if room >= vertices[0].kept:  # everything fits, so nothing has to run again
            return Fraction(0)
        # No schedule has this peak. The cost of keeping the least is still a bound.
        if room < vertices[-1].kept:
            return Fraction(vertices[-1].cost, self._hull.units_per_ms)
        # Refine the edge around ``room``. The chord between two known vertices is never below the hull, which is
        # convex. Once no vertex lies below the chord, the chord is an edge of the hull.
        while True:
            # The two known vertices on either side of ``room``, which is between the first and the last vertex: the
            # checks above have dealt with any other.
            at = next(i for i, vertex in enumerate(vertices) if vertex.kept <= room)
            left, right = vertices[at - 1], vertices[at]
            slope = Fraction(right.cost - left.cost, left.kept - right.kept)
            line = (left.cost + slope * (left.kept - room)) / self._hull.units_per_ms
            pair = left.kept, right.kept
            # Either the bound, being at most ``line``, cannot beat ``worth``; or the chord is an edge of the hull.
            if line <= worth or pair in self._adjacent:
                return line
            found = self._hull.between(left, right)
            if found is None:
                self._adjacent.add(pair)
            else:
                vertices.insert(at, found[1])
