"""The trade-off of one unit: the exact lower hull of kept bytes against recompute time.

The problem is rematerialization as a minimum cut (Horace He et al., functorch's min-cut partitioner,
``torch/_functorch/partitioners.py``), with two differences. The times of the ops are part of the cut, so
that a price in milliseconds per byte (a Lagrangian multiplier) moves it from "keep everything" to "keep as
little as possible". And an op runs again as a whole: its time is paid once for all that it writes.

For a price ``lam`` the cut minimises ``recompute_ms + lam * kept_bytes`` over

- ``r_v``: op ``v`` runs again in backward; costs its time;
- ``a_s``: storage ``s`` is available in backward: 1 if autograd saved it or an op that runs again reads it.
  Costs its bytes, unless the op that wrote it runs again or it is alive anyway.

Divided by ``lam``, only capacities into the sink depend on the price, and all in the same direction. So the
smallest minimum cuts are nested (Gallo, Grigoriadis and Tarjan 1989): a higher price only discards more. The
hull is found by solving at the slope of the chord between two known vertices; the ops on which both vertices
agree are contracted first, so that later cuts are small.

Optimal: every vertex of the lower hull over *all* sets of discarded ops is found, each with the smallest set
that reaches it. Capacities are Python integers (times as scaled binary fractions), so nothing is rounded. Points
above the hull are reachable too, but finding the best of those is a knapsack problem; ``between`` adds good
ones, without a guarantee.

Known inefficiencies: the flow of each chord starts from zero. The points between two vertices take time
quadratic in the saved storages by which the two differ.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from sacplan.techniques.recompute.min_cut import source_side

_NO_WRITER = -1


@dataclass(frozen=True, slots=True)
class ClosureOp:
    """One call site; if the unit is called several times, that site in all calls."""

    cost_ms: float
    """Cost of running it again, over all calls."""
    reads: tuple[int, ...]
    """Indices of the storages that it needs."""
    writes: tuple[int, ...]
    """Indices of the storages that it allocates."""
    discardable: bool
    """False if it must not run again: it writes in place, communicates, or cannot be repeated."""


@dataclass(frozen=True, slots=True)
class ClosureProblem:
    """The ops of one unit and the storages between them. If a storage has several writers, none is discardable."""

    ops: tuple[ClosureOp, ...]
    storage_bytes: tuple[int, ...]
    saved: frozenset[int]
    """Storages that autograd asks for in backward."""
    free: frozenset[int]
    """Storages that are alive anyway (parameters, inputs that something else keeps alive): they cost nothing."""
    _writer: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """By storage: the discardable op that writes it, or ``_NO_WRITER``."""
    _charge: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """By storage: the bytes that holding it costs."""

    def __post_init__(self) -> None:
        first: list[int] = [_NO_WRITER] * len(self.storage_bytes)
        for index, op in enumerate(self.ops):
            for storage in set(op.writes):
                other = first[storage]
                if other == _NO_WRITER:
                    first[storage] = index
                assert other == _NO_WRITER or not (op.discardable or self.ops[other].discardable), (
                    f"storage {storage} is written by ops {other} and {index}: what is written in place is kept"
                )
        # A storage that no discardable op writes is never made again: what needs it in the backward pass has to
        # hold it.
        writer = tuple(w if w >= 0 and self.ops[w].discardable else _NO_WRITER for w in first)
        charge = tuple(0 if s in self.free else size for s, size in enumerate(self.storage_bytes))
        object.__setattr__(self, "_writer", writer)
        object.__setattr__(self, "_charge", charge)


@dataclass(frozen=True, slots=True)
class TradeoffPoint:
    """One reachable trade-off."""

    kept_bytes: int
    """Bytes held between forward and backward: saved storages, and what recomputation needs in addition."""
    recompute_ms: float
    discarded: frozenset[int]
    """The ops that run again. What they write is not kept."""


def evaluate(problem: ClosureProblem, discarded: Iterable[int]) -> TradeoffPoint:
    """Return the trade-off of any set of discardable ops, less those that backward never needs."""
    chosen = frozenset(discarded)
    writer = problem._writer
    return _point(problem, _needed(problem, chosen, (s for s in problem.saved if writer[s] in chosen)))


def tradeoff(problem: ClosureProblem, max_points: int = 24, between: int = 0) -> tuple[TradeoffPoint, ...]:
    """Return the lower hull of kept bytes against recompute time, by decreasing bytes.

    The first point discards nothing. The last keeps the fewest bytes that any set can reach, as cheaply as
    possible. No vertex in between lies on the line through its neighbours.

    Args:
        max_points: the most vertices, 2 at least; if there are more, those that lie furthest (in ms) below the hull so
            far are taken.
        between: the most reachable points to add between two neighbouring vertices. They lie on or above the
            hull, and no returned point dominates another.
    """
    vertices = _hull(problem, max_points)
    points = [_point(problem, vertex.ops) for vertex in vertices]
    if between:
        inner = [
            point
            for left, right in itertools.pairwise(points)
            for point in _spread(_greedy(problem, left, right), left, right, between)
        ]
        points = _merge(points, inner)
    return tuple(points)


def with_neighbours(
    problem: ClosureProblem, points: Iterable[TradeoffPoint], most: int
) -> tuple[TradeoffPoint, ...]:
    """Return the points, and others that keep or discard one more storage, by increasing time.

    They lie on or above the hull; some need less memory during recomputation. Neighbours of the points that keep
    the fewest bytes are added first, up to ``most`` points in all.
    """
    writer = problem._writer
    # Only what autograd saves is worth keeping or discarding by itself. All other ops (``unasked``) run again
    # whenever a target needs them, so they are free to use.
    targets = sorted({writer[s] for s in problem.saved if writer[s] != _NO_WRITER and problem._charge[s]})
    unasked = frozenset(w for w in writer if w != _NO_WRITER) - frozenset(targets)
    found = {point.discarded: point for point in points}
    for point in sorted(found.values(), key=lambda p: p.kept_bytes):
        for op in targets:
            if len(found) >= most:
                break
            # Keeping a target takes no further ops: ``evaluate`` drops those that only this target needed.
            # Discarding a target also discards the ops that it takes to run it again.
            if op in point.discarded:
                near = evaluate(problem, point.discarded - {op})
            else:
                asked = (s for s in problem.ops[op].writes if s in problem.saved)
                near = evaluate(
                    problem, point.discarded | _needed(problem, point.discarded | unasked | {op}, asked)
                )
            found.setdefault(near.discarded, near)
    return tuple(sorted(found.values(), key=lambda p: (p.recompute_ms, -p.kept_bytes, sorted(p.discarded))))


# --- the cost of a set -------------------------------------------------------------------------------------


def _needed(problem: ClosureProblem, allowed: frozenset[int], asked: Iterable[int]) -> frozenset[int]:
    """Return the ops in ``allowed`` that it takes to compute the storages ``asked``."""
    writer, ops = problem._writer, problem.ops
    stack = [writer[s] for s in asked]
    seen = set(stack)
    while stack:
        for storage in ops[stack.pop()].reads:
            op = writer[storage]
            if op in allowed and op not in seen:
                seen.add(op)
                stack.append(op)
    return frozenset(seen)


def _kept_bytes(problem: ClosureProblem, ops: frozenset[int]) -> int:
    """Return the bytes that are held if exactly ``ops`` run again."""
    held = set(problem.saved)
    held.update(s for op in ops for s in problem.ops[op].reads)
    return sum(problem._charge[s] for s in held if problem._writer[s] not in ops)


def _point(problem: ClosureProblem, ops: frozenset[int]) -> TradeoffPoint:
    # fsum rounds once, so the result does not depend on the order of the ops.
    return TradeoffPoint(_kept_bytes(problem, ops), math.fsum(problem.ops[op].cost_ms for op in ops), ops)


# --- the hull ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vertex:
    """A vertex of the hull.

    Attributes:
        kept: bytes held.
        cost: in units of ``1 / Hull.units_per_ms``.
        ops: those that run again.
    """

    kept: int
    cost: int
    ops: frozenset[int]


class Hull:
    """The lower hull of kept bytes against recompute time, vertex by vertex.

    Attributes:
        units_per_ms: how many units of cost are a millisecond. Costs are integers, and exact, since a float is a binary
            fraction.
        first: the vertex that discards nothing.
        last: the vertex with the fewest bytes; of several, the one with the least time.
    """

    def __init__(self, problem: ClosureProblem) -> None:
        self._problem = problem
        ratios = [op.cost_ms.as_integer_ratio() for op in problem.ops]
        self.units_per_ms = max((denominator for _, denominator in ratios), default=1)
        self._costs = [numerator * (self.units_per_ms // denominator) for numerator, denominator in ratios]
        writer = problem._writer
        discardable = frozenset(w for w in writer if w != _NO_WRITER)
        everything = _needed(problem, discardable, (s for s in problem.saved if writer[s] != _NO_WRITER))
        self.first = self._vertex(frozenset())
        # One byte is worth more than the time of all ops: fewest bytes first, then least time.
        self.last = self._solve(frozenset(), everything, 1, sum(self._costs) + 1)

    def between(self, left: Vertex, right: Vertex) -> tuple[Fraction, Vertex] | None:
        """Return (distance in cost, vertex) of the vertex furthest below the line through both; None if none is."""
        if len(right.ops) - len(left.ops) < 2:  # the sets are nested: nothing fits between
            return None
        # Weighing cost and bytes by the chord makes both ends equally good, so anything better lies below it.
        span, rise = left.kept - right.kept, right.cost - left.cost
        middle = self._solve(left.ops, right.ops, span, rise)
        gap = span * (left.cost - middle.cost) + rise * (left.kept - middle.kept)
        return (Fraction(gap, span), middle) if gap > 0 else None

    def _solve(self, low: frozenset[int], high: frozenset[int], per_cost: int, per_byte: int) -> Vertex:
        return self._vertex(_cut(self._problem, self._costs, low, high, per_cost, per_byte))

    def _vertex(self, ops: frozenset[int]) -> Vertex:
        return Vertex(_kept_bytes(self._problem, ops), sum(self._costs[op] for op in ops), ops)


def _hull(problem: ClosureProblem, max_points: int) -> list[Vertex]:
    hull = Hull(problem)
    if hull.last.kept == hull.first.kept:
        return [hull.first]
    queue: list[tuple[Fraction, int, Vertex, Vertex, Vertex]] = []

    def look_below(left: Vertex, right: Vertex) -> None:
        found = hull.between(left, right)
        if found is not None:
            # Each interval has a left end of its own, so the heap never has to compare vertices.
            gap, middle = found
            heapq.heappush(queue, (-gap, -left.kept, left, middle, right))

    look_below(hull.first, hull.last)
    vertices = [hull.first, hull.last]
    while queue and len(vertices) < max_points:
        # The interval with the largest gap first: if ``max_points`` ends the search, what is missing matters
        # least.
        _, _, left, middle, right = heapq.heappop(queue)
        vertices.append(middle)
        look_below(left, middle)
        look_below(middle, right)
    return sorted(vertices, key=lambda vertex: -vertex.kept)


def _cut(
    problem: ClosureProblem,
    costs: list[int],
    low: frozenset[int],
    high: frozenset[int],
    per_cost: int,
    per_byte: int,
) -> frozenset[int]:
    """Return the smallest set between ``low`` and ``high`` that minimises per_cost * cost + per_byte * bytes.

    An op on the source side of the cut runs again and pays its time: an edge to the sink. On the other side it pays
    for what it writes that is available anyway: an edge from the source. A storage that is available only because an
    op reads it costs its bytes, unless its writer runs again as well: an edge from the reader to the writer. With
    several readers, a node for the storage stands between, so that the bytes are paid once.
    """
    writer, charge, ops = problem._writer, problem._charge, problem.ops
    open_ops = sorted(high - low)
    node = {op: index for index, op in enumerate(open_ops)}
    available = set(problem.saved)
    available.update(s for op in low for s in ops[op].reads)

    # Net terminal capacities: from the source (the bytes it would save) minus to the sink (its time).
    terminal = [-per_cost * costs[op] for op in open_ops]
    readers: dict[int, list[int]] = {}
    for op in open_ops:
        here = node[op]
        for storage in set(ops[op].writes):
            if storage in available:
                terminal[here] += per_byte * charge[storage]
        for storage in set(ops[op].reads):
            made_by = writer[storage]
            # A storage costs something only if it has bytes, is not available already, and is made neither by an
            # op that surely runs again nor by the reader itself.
            if storage not in available and charge[storage] and made_by not in low and made_by != op:
                readers.setdefault(storage, []).append(here)

    edges: list[tuple[int, int, int]] = []
    # More than any flow from the source, so that such an edge is never cut.
    unlimited = sum(capacity for capacity in terminal if capacity > 0) + 1
    for storage, reading in readers.items():
        price = per_byte * charge[storage]
        into = node.get(writer[storage])
        # A single reader needs no node in between, which keeps the graph small: most storages have one.
        if len(reading) == 1:
            if into is None:
                terminal[reading[0]] -= price
            else:
                edges.append((reading[0], into, price))
            continue
        between = len(terminal)
        terminal.append(-price if into is None else 0)
        edges.extend((reader, between, unlimited) for reader in reading)
        if into is not None:
            edges.append((between, into, price))
    chosen = source_side(terminal, edges)
    return low | {op for op in open_ops if chosen[node[op]]}


# --- points between two vertices ---------------------------------------------------------------------------


def _greedy(problem: ClosureProblem, left: TradeoffPoint, right: TradeoffPoint) -> list[TradeoffPoint]:
    """Return reachable points on the way from ``left`` to ``right``.

    Of the saved storages that only ``right`` recomputes, repeatedly discards the one that is currently cheapest per
    byte, with the ops that it takes to recompute it. Every set looked at along the way is a candidate.
    """
    writer, charge, ops = problem._writer, problem._charge, problem.ops
    extra = right.discarded - left.discarded
    # Storages of one op are recomputed together, so the op stands for them.
    targets = sorted({writer[s] for s in problem.saved if charge[s] and writer[s] in extra})
    needs = {op: _needed(problem, extra, (s for s in ops[op].writes if s in problem.saved)) for op in targets}
    touched = {op: {s for n in needs[op] for s in (*ops[n].reads, *ops[n].writes)} for op in targets}

    current = set(left.discarded)
    held = set(problem.saved).union(s for op in current for s in ops[op].reads)
    kept, spent = left.kept_bytes, left.recompute_ms
    order: list[int] = []
    # (kept bytes, time, step, op): what discarding ``op`` after the first ``step`` ops of ``order`` leads to.
    looked_at: list[tuple[int, float, int, int]] = []
    gains: dict[int, tuple[int, float]] = {}
    changed = targets  # the targets whose gains have to be computed
    while targets:
        for op in changed:
            new = needs[op] - current
            # What is freed, less the inputs that must be held for it.
            freed = sum(charge[s] for n in new for s in set(ops[n].writes) if s in held)
            newly_held = {s for n in new for s in ops[n].reads if s not in held}
            freed -= sum(charge[s] for s in newly_held if writer[s] not in new and writer[s] not in current)
            gains[op] = (freed, math.fsum(ops[n].cost_ms for n in new))
        # If no target frees anything by itself, the first is taken all the same: later ones may then be
        # cheaper, and each round takes at least one, so this ends.
        best, lowest = targets[0], math.inf
        for op in targets:
            freed, time = gains[op]
            if freed > 0:
                looked_at.append((kept - freed, spent + time, len(order), op))
                if time / freed < lowest:
                    best, lowest = op, time / freed
        kept -= gains[best][0]
        spent += gains[best][1]
        held.update(s for op in needs[best] - current for s in ops[op].reads)
        current |= needs[best]
        order.append(best)
        # A gain changes only if the ops that were just added touch a storage that the target touches.
        targets = [op for op in targets if not needs[op] <= current]
        changed = [op for op in targets if not touched[best].isdisjoint(touched[op])]

    points: list[TradeoffPoint] = []
    least = right.kept_bytes
    # By rising time, a candidate is of use only if it keeps fewer bytes than all before it.
    for reached, time, step, op in sorted(looked_at, key=lambda entry: (entry[1], entry[0], entry[2:])):
        if time >= right.recompute_ms:
            break
        if least < reached < (points[-1].kept_bytes if points else left.kept_bytes):
            points.append(_point(problem, left.discarded.union(needs[op], *(needs[o] for o in order[:step]))))
    return points


def _spread(
    points: list[TradeoffPoint], left: TradeoffPoint, right: TradeoffPoint, count: int
) -> list[TradeoffPoint]:
    """Return at most ``count`` of the points, spread evenly over the bytes between two vertices."""
    if len(points) <= count:
        return points
    step = Fraction(left.kept_bytes - right.kept_bytes, count + 1)
    rest = list(points)
    for index in range(1, count + 1):
        target = left.kept_bytes - index * step
        # ``rest`` ends up with the points that are not chosen.
        rest.remove(min(rest, key=lambda point: abs(point.kept_bytes - target)))
    return [point for point in points if point not in rest]


def _merge(vertices: list[TradeoffPoint], found: list[TradeoffPoint]) -> list[TradeoffPoint]:
    """Return vertices and ``found`` by decreasing bytes, without points of ``found`` that another one dominates."""
    first, last = vertices[0], vertices[-1]
    inner = sorted((*vertices[1:], *found), key=lambda point: (point.recompute_ms, point.kept_bytes))
    merged = [first]
    for point in inner:
        cheaper = point.recompute_ms < last.recompute_ms
        if cheaper and last.kept_bytes < point.kept_bytes < merged[-1].kept_bytes:
            merged.append(point)
    return [*merged, last] if len(vertices) > 1 else merged
