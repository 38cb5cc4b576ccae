"""Which slices of a loop run in a rehearsal, and how often each of them counts.

Slices that read equally long parts of everything that is sliced run the same ops. Of a run of such slices only the
first two are rehearsed. The first makes the results, and the second adds to them, as do all that follow. The last slice
of the loop always runs, as it may be shorter. What the second one shows is then counted once for each slice that it
stands for. Memory needs no such factor: each slice frees what it made, so a later slice of the run has the same peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import msgspec

from sacplan.core.program import Phase
from sacplan.core.rewriting import PatchBuilder
from sacplan.record.rehearsal import Rehearsal, RehearsedOps


class SampledSlices:
    """Chooses the slices of the loops of one rehearsal (``SlicedRegion``'s ``choose``), and remembers what they ran.

    Attributes:
        windows: begin and end, in the region's axis, of tensors that have only a part of it, such as shifted ones. A
            slice may lie inside such a window, outside, or across its edge.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        self._rehearsal = rehearsal
        self.windows: set[tuple[int, int]] = set()
        # By loop: how many ops had run before a slice, and how many slices it stands for.
        self._loops: list[list[tuple[int, int]]] = []

    def __call__(self, slices: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the slices that run."""
        # The last slice counts for itself: it may be shorter, and a loop of one slice has no other.
        *every, last = slices
        chosen: list[tuple[tuple[int, int], int]] = []
        for _, same in groupby(every, self._lengths):
            first, *others = same
            chosen += [(first, 1), *((second, len(others)) for second in others[:1])]
        marks: list[tuple[int, int]] = []
        self._loops.append(marks)
        for bounds, times in (*chosen, (last, 1)):
            marks.append((self._rehearsal.n_ops, times))
            yield bounds
        marks.append((self._rehearsal.n_ops, 1))  # the end of the last slice

    def into(
        self, draft: PatchBuilder, seen: RehearsedOps, phase: Phase, scope: int
    ) -> list[tuple[int, int]]:
        """Put ops that ran into a program, with the time and FLOPs of all slices that they stand for; return events."""
        first, ops = seen.first, seen.ops
        found = list(ops)
        for marks in self._loops:
            if marks[0][0] < first or marks[-1][0] > first + len(ops):
                continue  # a loop that ran for something else
            for (begin, times), (end, _) in pairwise(marks):
                for at in range(begin - first, end - first):
                    op = found[at]
                    found[at] = msgspec.structs.replace(
                        op, time_ms=op.time_ms * times, flops=op.flops * times, runs=op.runs * times
                    )
        return self._rehearsal.into(draft, replace(seen, ops=found), phase, scope)

    def _lengths(self, bounds: tuple[int, int]) -> tuple[int, ...]:
        """Return how long a slice is, and how much of it lies in each window."""
        start, stop = bounds
        return stop - start, *(
            max(0, min(stop, end) - max(start, begin)) for begin, end in sorted(self.windows)
        )
