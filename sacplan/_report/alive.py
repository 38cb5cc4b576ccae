"""``alive_at_peak``: the storages that make up the peak, and which module and op made each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan, PlanOrPath
from sacplan._profile.profile import Profile, ProfileOrPath
from sacplan._program.arguments import checked, opened
from sacplan._questions.alive import peak_groups
from sacplan._questions.planned import planned
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

REST = "(smaller ones)"


@checked(PlanError)
def alive_at_peak(
    profile: ProfileOrPath, plan: PlanOrPath | None = None, top: int | None = 20
) -> pd.DataFrame:
    """What is alive at the peak of the step, and what made it.

        sacplan.alive_at_peak(profile, plan, top=5)

    Storages that the same op made in modules that differ only by their place in a list are one row. What an
    op makes goes with the module that ran it; parameters go with the module that reads them first.

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

    if top is not None and top < 1:
        raise PlanError(f"top={top}: ask for at least 1 row, or None for all.")
    groups = peak_groups(profile, planned(profile, plan))
    rows = [(g.module, g.op, g.kind, g.recomputed, g.count, g.each_bytes, g.n_bytes) for g in groups[:top]]
    rest = groups[top:] if top is not None else []
    if rest:
        n_bytes = sum(g.n_bytes for g in rest)
        rows.append((REST, "", "", False, sum(g.count for g in rest), 0, n_bytes))
    return pd.DataFrame(rows, columns=["module", "op", "kind", "recomputed", "count", "each_bytes", "bytes"])
