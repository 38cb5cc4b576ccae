"""Put a step on a predicted time axis: what runs when, and what is alive then, with and without a plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sacplan.core.program import Phase, Program, StorageKind
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.questions.planned import planned
from sacplan.techniques.registry import by_technique


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A step with one entry per op that runs, in order, including recomputed ops.

    Attributes:
        ops: index of the recorded op that runs.
        recomputed: whether it runs a second time.
        start_ms: when it starts, each op taking its predicted time.
        end_ms: when the last one ends.
        live_bytes: everything alive while it runs.
        kind_bytes: the same by ``StorageKind``, one row per op.
        phases: the phase in which it runs; for a recomputed op, that of the op that waits for it.
    """

    ops: NDArray[np.int64]
    recomputed: NDArray[np.bool_]
    start_ms: NDArray[np.float64]
    end_ms: float
    live_bytes: NDArray[np.int64]
    kind_bytes: NDArray[np.int64]
    phases: NDArray[np.int64]

    @property
    def peak(self) -> int:
        """Index of the entry with the peak, the first if there are several."""
        return int(self.live_bytes.argmax())

    @property
    def peak_bytes(self) -> int:
        """Bytes that are alive at the peak."""
        return int(self.live_bytes.max())

    def phase_spans(self) -> list[tuple[Phase, float, float]]:
        """Return the phases with begin and end in ms. There are several forwards if gradients are accumulated."""
        ends = [*self.start_ms[1:], self.end_ms]
        spans: list[tuple[Phase, float, float]] = []
        for phase, start, end in zip(self.phases.tolist(), self.start_ms.tolist(), ends, strict=True):
            # The same phase goes on; otherwise a new one begins.
            if spans and spans[-1][0] == phase:
                spans[-1] = (spans[-1][0], spans[-1][1], float(end))
            else:
                spans.append((Phase(phase), start, float(end)))
        return spans


def timeline_of(program: Program) -> Timeline:
    """Put a step on a time axis."""
    moments = program.liveness.moments[1:]  # the first is the state before the step
    running = [program.ops[m.op] for m in moments]
    recomputed = np.array([op.recomputes >= 0 for op in running], dtype=bool)
    ops = [op.recomputes if op.recomputes >= 0 else m.op for m, op in zip(moments, running, strict=True)]
    kind_bytes = np.array([m.by_kind for m in moments], dtype=np.int64).reshape(-1, len(StorageKind))
    for row, op in zip(kind_bytes, running, strict=True):
        # The fold takes an overwritten storage off the temporaries. Here it is taken off its own kind.
        if op.replaces >= 0:
            size = program.storage_bytes[op.replaces]
            row[StorageKind.TEMPORARY] += size
            row[program.storage_kinds[op.replaces]] -= size
    times = np.array([program.ops[op].time_ms for op in ops], dtype=float)
    ends = np.cumsum(times)
    return Timeline(
        ops=np.array(ops, dtype=np.int64),
        recomputed=recomputed,
        start_ms=np.concatenate(([0.0], ends[:-1])) if len(ends) else ends,
        end_ms=float(ends[-1]) if len(ends) else 0.0,
        live_bytes=np.array([m.live_bytes for m in moments], dtype=np.int64),
        kind_bytes=kind_bytes,
        phases=np.array([op.phase for op in running], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """A step under a title, with the budget to compare it with."""

    title: str
    program: Program
    timeline: Timeline
    budget_bytes: int | None


def panels_of(profile: Profile, *plans: Plan) -> list[Panel]:
    """Return panels for the step without a plan and with each plan. Several plans are titled by their techniques.

    Raises:
        PlanMismatch: a plan was made from another profile.
    """
    first = plans[0].budget_bytes if plans else None
    panels = [Panel("Without a plan", profile.program, timeline_of(profile.program), first)]
    for plan in plans:
        program = planned(profile, plan)
        names = " + ".join(technique.name for technique, _ in by_technique(plan.decisions))
        title = names.capitalize() if len(plans) > 1 and names else "With the plan"
        panels.append(Panel(title, program, timeline_of(program), plan.budget_bytes))
    return panels


def buckets_of(timeline: Timeline, width_ms: float) -> Sequence[int]:
    """Divide the step into buckets of equal length, and return the entry with the most alive bytes of each.

    So no peak is lost. The op that is running when a bucket begins belongs to it as well.
    """
    # The small number keeps rounding from adding a bucket at the end.
    n = max(1, int(np.ceil(timeline.end_ms / width_ms - 1e-9)))
    # The op that runs when a bucket begins has started before it, hence - 1.
    starts = np.searchsorted(timeline.start_ms, np.arange(n) * width_ms) - 1
    first = [*np.maximum(starts, 0).tolist(), len(timeline.ops) - 1]
    live = timeline.live_bytes
    return [a + int(live[a : b + 1].argmax()) for a, b in itertools.pairwise(first)]
