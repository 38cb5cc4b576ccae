"""Steps to draw side by side: without a plan, and with each of some plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sacplan.core.program import Program
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.profiling.timeline import timeline_of
from sacplan.questions.planned import planned
from sacplan.techniques.registry import by_technique

if TYPE_CHECKING:
    import pandas as pd


class Panel:
    """A step under a title, with the budget to compare it with.

    Attributes:
        title: what stands over it.
        program: the step, with the plan if there is one.
        budget_bytes: the line that it is compared with; None: there is none.
        timeline: a row for each op that runs, see ``Profile.timeline``.
        end_ms: when the last op ends.
        peak_bytes: bytes that are alive at the peak.
    """

    def __init__(self, title: str, program: Program, budget_bytes: int | None) -> None:
        self.title, self.program, self.budget_bytes = title, program, budget_bytes
        self.timeline: pd.DataFrame = timeline_of(program)
        self.end_ms = float(self.timeline["ms"].sum())
        self.peak_bytes = int(self.timeline["total_bytes"].max())

    def phase_spans(self) -> Iterator[tuple[str, float, float]]:
        """Yield the phases with begin and end in ms. There are several forwards if gradients are accumulated."""
        rows = zip(self.timeline["phase"], self.timeline["start_ms"], strict=True)
        begins = [next(same) for _, same in itertools.groupby(rows, key=lambda row: row[0])]
        for (phase, start), (_, end) in itertools.pairwise([*begins, ("", self.end_ms)]):
            yield phase, start, end


def panels_of(profile: Profile, *plans: Plan) -> list[Panel]:
    """Return panels for the step without a plan and with each plan. Several plans are titled by their techniques.

    Raises:
        PlanMismatch: a plan was made from another profile.
    """
    budget_bytes = plans[0].budget_bytes if plans else None
    panels = [Panel("Without a plan", profile.program, budget_bytes)]
    for plan in plans:
        program = planned(profile, plan)
        names = " + ".join(technique.name for technique, _ in by_technique(plan.decisions))
        title = names.capitalize() if len(plans) > 1 and names else "With the plan"
        panels.append(Panel(title, program, plan.budget_bytes))
    return panels


def buckets_of(panel: Panel, width_ms: float) -> Sequence[int]:
    """Divide the step into buckets of equal length, and return the row with the most alive bytes of each.

    So no peak is lost. The op that is running when a bucket begins belongs to it as well.
    """
    live = panel.timeline["total_bytes"].to_numpy()
    # The small number keeps rounding from adding a bucket at the end.
    n = max(1, int(np.ceil(panel.end_ms / width_ms - 1e-9)))
    # The op that runs when a bucket begins has started before it, hence - 1.
    starts = np.searchsorted(panel.timeline["start_ms"], np.arange(n) * width_ms) - 1
    first_rows = [*np.maximum(starts, 0).tolist(), len(live) - 1]
    return [a + int(live[a : b + 1].argmax()) for a, b in itertools.pairwise(first_rows)]
