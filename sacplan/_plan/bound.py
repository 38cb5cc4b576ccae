"""What no schedule can undercut: the least recomputation of any step with a given peak.

Take one moment of the step, an op. Whatever is recomputed when: the tensors of the forward pass that are in
memory then, and are alive for no other reason than a later use in the backward pass, fit in what the peak
leaves beside everything else that is alive. From those, all that the rest of the step needs has to be made, and
each op that makes a missing tensor runs at least once more. Each moment gives a bound; the largest counts, of
some moments at which most is alive without a plan.

The least time of that is again a minimum cut (see ``_recompute/closure.py``), over the whole forward pass at once.
Its Lagrangian dual is concave in the price of a byte; each price gives a valid bound, and a few cuts find the
best. Capacities are rounded down to integers, so the bound errs to the safe side. Every op counts as one that
could run again, and what is written in place as available at no cost: both only lower the bound.

The bound holds for schedules that run the recorded ops in their order, recompute tensors, and hold between ops
what code holds; it is "boundary" in the tables of ``benchmarks/bound.py``. It is not tight where the working
set of the recomputation binds.

Ops that are pinned do not run again: what they made and autograd holds is in memory at every moment anyway, and
what else of theirs is read by an op that runs again has to be kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from sacplan._program.liveness import Liveness
from sacplan._program.program import Phase

_LARGEST = 2**30  # capacities are 32-bit integers, and so is the flow
_MOMENTS, _EFFORT = 6, 20_000  # how many, and how many ops they may look at together
_APART = 8  # ops between two moments, at least
_WORTH = 0.9  # share of the best bound so far that a moment must reach at its price to be looked at closely
_ROUNDS = 40
_ROUNDING = 1e-6  # of capacities, relative
_DOUBLINGS = 12  # of the price of a byte: beyond, rounding would eat the times


class _Line(NamedTuple):
    """A cut: of all choices, the least cost + price * bytes kept."""

    price: float
    least: float
    """Rounded down, so that a bound made of it is one."""
    kept_bytes: int
    cost: float


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
        self._moments: dict[int, _Moment] = {}

    def at(self, peak_bytes: int) -> float:
        """The least that any schedule with that peak recomputes, in the unit of the costs."""
        best, price = 0.0, 0.0
        for op in self._ops:
            if op not in self._moments:
                self._moments[op] = _Moment(self._liveness, self._costs, op, self._pinned)
            moment = self._moments[op]
            if best and moment.at_price(peak_bytes, price) <= best * _WORTH:
                continue  # not worth looking for the best price here
            found, found_price = moment.at(peak_bytes)
            if found > best:
                best, price = found, found_price
        return best


class _Moment:
    """The bound at one op."""

    def __init__(
        self, liveness: Liveness, costs: Sequence[float], moment: int, pinned: frozenset[int]
    ) -> None:
        program = liveness.program
        self._costs = costs
        self._sizes = program.storage_bytes
        self._lines: list[_Line] = []
        pending = liveness.held_for_later(moment)
        fixed = {s for s in pending if program.writer.get(s) in pinned}
        held = [s for s in pending if s not in fixed]
        self._all = sum(self._sizes[s] for s in held)
        self._rest = int(liveness.at_op[moment]) - self._all

        writers: dict[int, list[int]] = {}
        for i, op in enumerate(program.ops[:moment]):
            if op.phase == Phase.FORWARD:
                for s in (*op.writes, *op.mutates):
                    writers.setdefault(s, []).append(i)
        free = liveness.held_otherwise(moment) | fixed
        self._makers: dict[int, int] = {}  # storage to the op that makes it
        self._edges: dict[
            tuple[int, int], None
        ] = {}  # (op that runs again, storage that it needs), each once
        wanted, stack = set(held), list(held)
        while stack:
            s = stack.pop()
            if len(writers.get(s, ())) != 1 or writers[s][0] in pinned:
                continue
            maker = self._makers[s] = writers[s][0]
            for read in program.ops[maker].reads:
                if read not in free and len(writers.get(read, ())) <= 1:
                    self._edges[maker, read] = None
                    if read not in wanted:
                        wanted.add(read)
                        stack.append(read)
        self._held = [s for s in held if s in self._makers]
        self._storages = sorted(wanted)
        self._ops = sorted(set(self._makers.values()))

    def at_price(self, peak_bytes: int, price: float) -> float:
        """A bound, from one price of a byte."""
        room = peak_bytes - self._rest
        if room >= self._all or not self._held or not price:
            return 0.0
        return self._line(price).least - price * room

    def at(self, peak_bytes: int) -> tuple[float, float]:
        """The largest bound, and the price of a byte that gives it."""
        room = peak_bytes - self._rest
        if room >= self._all or not self._held:
            return 0.0, 0.0
        left, right = self._around(room)
        for _ in range(_ROUNDS):
            # The next price is where the lines of the two neighbouring cuts meet; on them lies the dual's optimum
            # if no other cut is cheaper there.
            span = left.kept_bytes - right.kept_bytes
            if span <= 0:
                break
            price = (right.cost - left.cost) / span
            if not left.price < price < right.price:
                break
            middle = self._line(price)
            if middle.least >= (left.cost + price * left.kept_bytes) * (1 - _ROUNDING):
                break
            if middle.kept_bytes > room:
                left = middle
            else:
                right = middle
        return max(((value - price * room, price) for price, value, _, _ in self._lines), default=(0.0, 0.0))

    def _around(self, room: int) -> tuple[_Line, _Line]:
        """Lines at two prices: at the lower more bytes are kept than there is room for, at the higher fewer."""
        left = _Line(0.0, 0.0, self._all, 0.0)
        for line in self._lines:
            if line.kept_bytes > room and line.price > left.price:
                left = line
        higher = [line for line in self._lines if line.kept_bytes <= room]
        if higher:
            return left, min(higher)
        price = max(left.price, sum(self._costs[op] for op in self._ops) / self._all)
        right = left
        for _ in range(_DOUBLINGS):
            right = self._line(price)
            if right.kept_bytes <= room:
                break
            left, price = right, 2 * price
        return left, right

    def _line(self, price: float) -> _Line:
        for line in self._lines:
            if line.price == price:
                return line
        line = self._cut(price)
        self._lines.append(line)
        return line

    def _cut(self, price: float) -> _Line:
        """The least of cost + price * bytes kept over all choices, rounded down, and the bytes at it."""
        op_at = {op: i for i, op in enumerate(self._ops)}
        storage_at = {s: len(self._ops) + i for i, s in enumerate(self._storages)}
        source, sink = len(self._ops) + len(self._storages), len(self._ops) + len(self._storages) + 1
        worth = {s: price * self._sizes[s] for s in self._storages}
        scale = _LARGEST / max(1e-300, sum(worth[s] for s in self._held) + 1e-300)
        tails, heads, room = [], [], []

        def connect(tail: int, head: int, capacity: float) -> None:
            tails.append(tail)
            heads.append(head)
            room.append(int(min(capacity * scale, _LARGEST)))

        for s in self._held:
            connect(source, storage_at[s], worth[s])
        for s in self._storages:
            connect(storage_at[s], op_at[self._makers[s]] if s in self._makers else sink, worth[s])
        for op in self._ops:
            connect(op_at[op], sink, self._costs[op])
        for op, s in self._edges:
            connect(op_at[op], storage_at[s], _LARGEST / scale)
        graph = csr_array(
            (np.array(room, dtype=np.int32), (np.array(tails), np.array(heads))), shape=(sink + 1, sink + 1)
        )
        result = maximum_flow(graph, source, sink)
        left = graph - result.flow
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, source, return_predecessors=False).tolist())
        again = {op for op in self._ops if op_at[op] in reached}
        needed = {s for s in self._storages if storage_at[s] in reached} | set(self._held)
        kept = sum(self._sizes[s] for s in needed if self._makers.get(s, -1) not in again)
        return _Line(price, result.flow_value / scale, kept, sum(self._costs[op] for op in again))
