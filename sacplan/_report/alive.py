"""``alive_at_peak``: the storages that make up the peak, with the module and op that made each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan, PlanOrPath
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._questions.alive import peak_groups
from sacplan._questions.planned import planned
from sacplan._report.inputs import check_top
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

REST = "(smaller ones)"


@checked(PlanError)
def alive_at_peak(
    profile: ProfileOrPath, plan: PlanOrPath | None = None, top: int | None = 20
) -> pd.DataFrame:
    """List the tensors that are alive at the peak of the step, and the ops that made them.

        sacplan.alive_at_peak(profile, plan, top=5)

    Storages share a row if the same op made them in modules that differ only by their number. The output of an op is
    listed under the module that ran it, a parameter under the module that reads it first.

    Args:
        profile: from ``sacplan.profile``.
        plan: made from that profile; without one, the step as it is.
        top: the largest rows; the others are summed up in a last one. None for all.

    Returns:
        ``module``, ``op``, ``kind``, ``recomputed`` (made a second time), ``count``, ``each_bytes``, ``bytes``; the
        largest first. ``bytes`` sum up to ``peak_bytes``. In the last row, ``each_bytes`` is 0.

    Raises:
        PlanMismatch: the plan was made from another profile.
        PlanError: ``top`` is less than 1.
    """
    profile = opened(profile, Profile)
    plan = opened(plan, Plan)
    import pandas as pd

    check_top(top)
    groups = peak_groups(profile, planned(profile, plan))
    rows = [(g.module, g.op, g.kind, g.recomputed, g.count, g.each_bytes, g.n_bytes) for g in groups[:top]]
    # One row for all that is not shown, so that the bytes still sum up to the peak.
    rest = groups[top:] if top is not None else []
    if rest:
        n_bytes = sum(g.n_bytes for g in rest)
        rows.append((REST, "", "", False, sum(g.count for g in rest), 0, n_bytes))
    return pd.DataFrame(rows, columns=["module", "op", "kind", "recomputed", "count", "each_bytes", "bytes"])
