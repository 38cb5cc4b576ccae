"""The step over predicted time: what runs when, and what is alive meanwhile, before and after a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sacplan._program.program import Phase, Program, StorageKind
from sacplan._recompute.replay import Decisions, replay


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """The replayed step, one entry per op that runs, recomputed ones included, in the order in which they run.

    Attributes:
        ops: index of the recorded op that runs.
        during: the recorded op that waits for it: itself, or for a recomputed one the next that is none.
        recomputed: it runs a second time.
        start_ms: when it starts, each op taking its predicted time.
        end_ms: when the last one ends.
        live_bytes: everything alive while it runs.
        kind_bytes: the same by ``StorageKind``, one row per op.
        phases: the part of the step; of a recomputed op, that of the op that waits.
    """

    ops: NDArray[np.int64]
    during: NDArray[np.int64]
    recomputed: NDArray[np.bool_]
    start_ms: NDArray[np.float64]
    end_ms: float
    live_bytes: NDArray[np.int64]
    kind_bytes: NDArray[np.int64]
    phases: NDArray[np.int64]

    @property
    def peak(self) -> int:
        """Which entry the peak is (the first, if there are several)."""
        return int(self.live_bytes.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most that is alive."""
        return int(self.live_bytes.max())

    def phase_spans(self) -> list[tuple[Phase, float, float]]:
        """The parts of the step with begin and end in ms; several forwards if gradients are accumulated."""
        ends = [*self.start_ms[1:], self.end_ms]
        spans: list[tuple[Phase, float, float]] = []
        for phase, start, end in zip(self.phases.tolist(), self.start_ms.tolist(), ends, strict=True):
            if spans and spans[-1][0] == phase:
                spans[-1] = (spans[-1][0], spans[-1][1], float(end))
            else:
                spans.append((Phase(phase), start, float(end)))
        return spans


def timeline_of(program: Program, decisions: Decisions) -> Timeline:
    """Replay the step with the given call sites discarded, and put it on a time axis."""
    run = replay(program, decisions, timeline=True)
    moments = run.moments[1:]  # the first is the state before the step
    again = iter(run.again)
    ops = [next(again) if m.recomputed else m.op for m in moments]
    recomputed = np.array([m.recomputed for m in moments], dtype=bool)
    kind_bytes = np.array([m.by_kind for m in moments], dtype=np.int64).reshape(-1, len(StorageKind))
    for i, moment in enumerate(moments):
        replaced = program.ops[ops[i]].replaces
        if replaced >= 0 and not moment.recomputed:  # overwritten: a replay takes it off the temporaries
            size = program.storage_bytes[replaced]
            kind_bytes[i, StorageKind.TEMPORARY] += size
            kind_bytes[i, program.storage_kinds[replaced]] -= size
    during = list(ops)
    for i in range(len(moments) - 2, -1, -1):
        if moments[i].recomputed:
            during[i] = during[i + 1]
    times = np.array([program.ops[op].time_ms for op in ops], dtype=float)
    ends = np.cumsum(times)
    return Timeline(
        ops=np.array(ops, dtype=np.int64),
        during=np.array(during, dtype=np.int64),
        recomputed=recomputed,
        start_ms=np.concatenate(([0.0], ends[:-1])) if len(ends) else ends,
        end_ms=float(ends[-1]) if len(ends) else 0.0,
        live_bytes=np.array([m.live_bytes for m in moments], dtype=np.int64),
        kind_bytes=kind_bytes,
        phases=np.array([program.ops[op].phase for op in during], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """A timeline in few steps of equal length, each as high as its highest moment, so that no peak is lost.

    Attributes:
        width_ms: of a bucket; the first begins at 0.
        entries: by bucket, the entry of the timeline that stands for it.
    """

    width_ms: float
    entries: Sequence[int]


def buckets_of(timeline: Timeline, count: int, width_ms: float | None = None) -> Buckets:
    """At most ``count`` buckets; each shows the moment in it, or running at its beginning, at which most is alive."""
    total = timeline.end_ms
    width = width_ms or total / count or 1.0
    n = max(1, min(count, int(np.ceil(total / width - 1e-9))))
    first = np.minimum((timeline.start_ms / width).astype(np.int64), n - 1).tolist()
    live = timeline.live_bytes.tolist()
    entries: list[int] = []
    at = running = 0
    for bucket in range(n):
        best = running
        while at < len(live) and first[at] <= bucket:
            if live[at] > live[best]:
                best = at
            running = at
            at += 1
        entries.append(best)
    return Buckets(width, tuple(entries))
