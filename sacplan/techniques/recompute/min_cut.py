"""Minimum cuts with exact integer capacities, by Dinic's algorithm (1970).

Capacities are Python integers of any size, so nothing is rounded; SciPy's ``maximum_flow`` has 32 bits.

In phases: a breadth-first search gives each node its distance from the source over edges with room. A depth-first
search then pushes flow along edges that lead one level deeper, until no such path to the sink is left (a blocking
flow). The distance to the sink grows with each phase, so there are fewer phases than nodes. When the search no longer
reaches the sink, the nodes that it does reach are the smallest source side of a minimum cut.

Known inefficiencies: it is plain Python, and a cut of 5,000 nodes takes about 20 ms. Each path is walked from its
first full edge on, so long chains of nodes without a terminal make long augmenting paths.
"""

from __future__ import annotations


def source_side(terminal: list[int], edges: list[tuple[int, int, int]]) -> list[bool]:
    """Return the smallest source side of a minimum cut.

    Args:
        terminal: by node, the capacity from the source where positive, to the sink where negative.
        edges: (from, to, capacity).

    Returns:
        By node, whether it is on the source side.
    """
    source, sink = len(terminal), len(terminal) + 1
    head: list[int] = []
    room: list[int] = []
    out: list[list[int]] = [[] for _ in range(sink + 1)]

    def connect(tail: int, tip: int, capacity: int) -> None:
        # An edge and its reverse are neighbours in ``head``, so ``edge ^ 1`` is the reverse of ``edge``.
        out[tail].append(len(head))
        out[tip].append(len(head) + 1)
        head.extend((tip, tail))
        room.extend((capacity, 0))

    for v, capacity in enumerate(terminal):
        if capacity > 0:
            connect(source, v, capacity)
        elif capacity < 0:
            connect(v, sink, -capacity)
    for tail, tip, capacity in edges:
        connect(tail, tip, capacity)

    while True:
        # One phase: levels first, then a blocking flow.
        level = [-1] * (sink + 1)
        level[source] = 0
        reached = [source]
        for v in reached:
            for edge in out[v]:
                tip = head[edge]
                if level[tip] < 0 and room[edge]:
                    level[tip] = level[v] + 1
                    reached.append(tip)
        if level[sink] < 0:
            # No augmenting path is left, so the flow is maximal. The nodes that this search reached are the
            # source side.
            return [depth >= 0 for depth in level[:source]]
        position = [0] * (sink + 1)  # by node, the first edge that is not known to be useless in this phase
        path: list[int] = []  # edges from the source to ``v``
        v = source
        while True:
            # Invariant: ``path`` is a path of edges with room, one level deeper at each step, from the source to
            # ``v``.
            if v == sink:
                pushed = min(room[edge] for edge in path)
                for edge in path:
                    room[edge] -= pushed
                    room[edge ^ 1] += pushed
                # Continue from the tail of the first edge that is now full.
                full = next(i for i, edge in enumerate(path) if not room[edge])
                v = head[path[full] ^ 1]
                del path[full:]
            candidates = out[v]
            at, deeper = position[v], level[v] + 1
            while at < len(candidates):
                if room[candidates[at]] and level[head[candidates[at]]] == deeper:
                    break
                at += 1
            position[v] = at
            if at < len(candidates):
                path.append(candidates[at])
                v = head[candidates[at]]
            elif path:  # a dead end: never enter this node again in this phase
                edge = path.pop()
                v = head[edge ^ 1]
                position[v] += 1
            else:
                break
