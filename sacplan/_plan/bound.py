"""What no schedule can undercut: the least recomputation of any step with a given peak.

Take one moment of the step, an op. Whatever is recomputed when: the tensors of the forward pass that are in
memory then, and are alive for no other reason than a later use in the backward pass, fit in what the peak
leaves beside everything else that is alive. From those, all that the rest of the step needs has to be made, and
each op that makes a missing tensor runs at least once more. Each moment gives a bound; the largest counts, of
some moments at which most is alive without a plan.

The least time of that is at least what the lower hull of kept bytes against time says (``_recompute/closure.py``), of
one problem over the whole forward pass; a few cuts find the edge of the hull that counts. Every op counts as one
that could run again, and what is written in place as available at no cost: both only lower the bound.

The bound holds for schedules that run the recorded ops in their order, recompute tensors, and hold between ops
what code holds; it is "boundary" in the tables of ``benchmarks/bound.py``. It is not tight where the working
set of the recomputation binds.

Ops that are pinned do not run again: what they made and autograd holds is in memory at every moment anyway, and
what else of theirs is read by an op that runs again has to be kept for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from sacplan._program.liveness import Liveness
from sacplan._program.program import Phase
from sacplan._recompute.closure import ClosureOp, ClosureProblem, Hull

_MOMENTS, _EFFORT = 6, 20_000  # how many, and how many ops they may look at together
_APART = 8  # ops between two moments, at least
_ROUNDED = 1 - Fraction(1, 2**40)  # the bound is exact, and the times of a plan are added up as floats


class Bound:
    """Lower bounds on the recomputation of a recorded step, by peak.

    Args:
        liveness: of the recorded step.
        costs: what running each op again costs.
        pinned: forward ops that must not run again.
    """

    def __init__(
        self, liveness: Liveness, costs: Sequence[float], pinned: frozenset[int] = frozenset()
    ) -> None:
        self._liveness, self._costs, self._pinned = liveness, costs, pinned
        count = max(2, min(_MOMENTS, _EFFORT // max(1, len(liveness.at_op))))
        self._ops: list[int] = []
        for op in np.argsort(-liveness.at_op, kind="stable").tolist():
            if all(abs(op - other) >= _APART for other in self._ops):
                self._ops.append(op)
                if len(self._ops) == count:
                    break
        self._moments: dict[int, _OpBound] = {}
        self._known: dict[int, float] = {}

    def at(self, peak_bytes: int) -> float:
        """The least that any schedule with that peak recomputes, in the unit of the costs."""
        if peak_bytes not in self._known:
            self._known[peak_bytes] = float(self._largest(peak_bytes) * _ROUNDED)
        return self._known[peak_bytes]

    def _largest(self, peak_bytes: int) -> Fraction:
        best = Fraction(0)
        for op in self._ops:
            if op not in self._moments:
                self._moments[op] = _OpBound(self._liveness, self._costs, op, self._pinned)
            best = max(best, self._moments[op].at(peak_bytes, best))
        return best


class _OpBound:
    """The bound at one op."""

    def __init__(
        self, liveness: Liveness, costs: Sequence[float], moment: int, pinned: frozenset[int]
    ) -> None:
        program = liveness.program
        pending = liveness.held_for_later(moment)
        fixed = {s for s in pending if program.writer.get(s) in pinned}
        held = [s for s in pending if s not in fixed]
        self._all = sum(program.storage_bytes[s] for s in held)
        self._rest = int(liveness.at_op[moment]) - self._all

        writers: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(program.ops[:moment]):
            if op.phase == Phase.FORWARD:
                for s in (*op.writes, *op.mutates):
                    writers[s].append(i)
        free = liveness.held_otherwise(moment) | fixed
        makers: dict[int, int] = {}  # storage to the op that makes it
        reads: dict[int, list[int]] = {}  # op that can run again to the storages that it needs
        wanted, stack = set(held), list(held)
        while stack:
            s = stack.pop()
            if len(writers[s]) != 1 or writers[s][0] in pinned:
                continue
            maker = makers[s] = writers[s][0]
            reads[maker] = [
                read for read in program.ops[maker].reads if read not in free and len(writers[read]) <= 1
            ]
            stack += (read for read in reads[maker] if read not in wanted)
            wanted.update(reads[maker])
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
        """The bound, which is on the hull; something that is not larger than ``worth`` if the bound is not."""
        room, vertices = peak_bytes - self._rest, self._vertices
        if room >= vertices[0].kept:
            return Fraction(0)
        if room < vertices[-1].kept:  # no schedule has this peak
            return Fraction(vertices[-1].cost, self._hull.units_per_ms)
        while True:
            at = next(i for i, vertex in enumerate(vertices) if vertex.kept <= room)
            left, right = vertices[at - 1], vertices[at]
            slope = Fraction(right.cost - left.cost, left.kept - right.kept)
            line = (left.cost + slope * (left.kept - room)) / self._hull.units_per_ms
            pair = left.kept, right.kept
            if line <= worth or pair in self._adjacent:  # the hull is nowhere above the line
                return line
            found = self._hull.between(left, right)
            if found is None:
                self._adjacent.add(pair)
            else:
                vertices.insert(at, found[1])
