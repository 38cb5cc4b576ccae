"""Techniques beyond those of a plan, and the time that they would save.

The default techniques keep every bit of the gradients. Others may be cheaper, and their users decide whether rounding
matters to them. So a plan with the default techniques says in one line what each of the others would have saved.

A lower bound on what a plan with them costs comes first: where it leaves too little to gain, nothing is searched for.
"""

from __future__ import annotations

from sacplan.planning.candidate import Candidate
from sacplan.planning.planner import Planner
from sacplan.techniques.registry import TECHNIQUES

_WORTH = 5e-3
"""Share of the step's time that another technique has to save to be worth a line."""


def beyond(asked: Planner, plan: Candidate, budget_bytes: int) -> tuple[str, ...]:
    """Return a sentence for each technique that was not asked for and with which the step would be faster.

    Args:
        asked: The planner of the plan.
        plan: The decisions of the plan.
        budget_bytes: The budget that the plan was made for.
    """
    # What the plan adds to the step is all that another technique could save, and a line is worth it only for a share
    # of the whole step.
    again_ms = plan.footprint.recompute_ms + plan.added_ms
    step_ms = asked.basis.recorded.program.step_ms + again_ms
    worth_ms = _WORTH * step_ms
    # Too little to save, or FLOPs were minimised, and not time.
    if again_ms < worth_ms or asked.basis.recorded.objective != "time":
        return ()
    said = []
    for name, technique in TECHNIQUES.items():
        # Asked for already. Or it takes memory of the host, whose use the user has to grant first.
        if name in asked.techniques or technique.takes_host:
            continue
        more = asked.with_technique(name)
        found = more.cheapest_beyond(asked, budget_bytes, again_ms - worth_ms)
        if found is None:
            continue
        saved_ms = again_ms - found.footprint.recompute_ms - found.added_ms
        less = f"{saved_ms:.4g} ms less ({saved_ms / step_ms:.1%})"
        bits = "" if technique.keeps_bits else ", and its gradients are close, not bit-equal"
        said.append(f"With techniques={more.techniques!r} the step takes {less}{bits}")
    return tuple(said)
