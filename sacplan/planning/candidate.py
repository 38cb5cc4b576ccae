"""A candidate for a plan: decisions about a step, and what the step is with them.

Decisions of a solver, a rule or a user become a candidate. All of its figures are read from one place, the rewritten
program. A search compares candidates by these figures, and ``made_plan`` copies them into a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from sacplan.core.call_sites import OpSequence
from sacplan.core.decisions import Decision, Discarded, Recompute, discarded_by
from sacplan.core.liveness import Footprint
from sacplan.core.optimizer_ops import why_not_again
from sacplan.core.program import Program
from sacplan.distributed.ranks.unit_limits import why_no_units
from sacplan.planning.bound import bound_of
from sacplan.planning.units import unit_plans
from sacplan.planning.value import UnitPlan
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.base.technique import Technique
from sacplan.techniques.registry import by_technique, rewritten


# Without slots, since figures are kept in ``__dict__``.
@dataclass(frozen=True)
class Candidate:
    """Decisions about a step, and the figures of the step with them.

    Attributes:
        step: The step as it was recorded.
        decisions: The decisions of a plan.
        status: ``"optimal"`` or ``"feasible"`` in the solver's own model, ``"unplanned"``, or ``"policy"``.
        gap: Relative optimality gap that the solver proved; None if it proved nothing.
        solver: Name of the solver or policy.
    """

    step: PlanStep
    decisions: tuple[Decision, ...]
    status: str
    gap: float | None = None
    solver: str = "none"

    def __post_init__(self) -> None:
        # Measured now: only the last few rewritten programs are cached, and decisions that cannot be carried out should
        # raise where they are made.
        _ = self.cost

    @property
    def program(self) -> Program:
        """The step with the decisions."""
        return rewritten(self.step.program, self.decisions, self.step.device)

    @cached_property
    def footprint(self) -> Footprint:
        """Peak and recomputation of the step with the decisions."""
        return self.program.footprint

    @property
    def recompute_ms(self) -> float:
        """Time of the ops that run again."""
        return self.footprint.recompute_ms

    @property
    def host_bytes(self) -> int:
        """Peak of what the decisions keep in the memory of the host."""
        return self.footprint.host_peak_bytes

    @cached_property
    def added_ms(self) -> float:
        """Additional time of the step that no op running again explains: slices, and waits for copies."""
        if not self.decisions:
            return 0.0
        return self.program.step_ms - self.step.program.step_ms - self.footprint.recompute_ms

    @cached_property
    def cost(self) -> float:
        """The objective: the cost of the ops that run again, plus that of the additional time (``added_ms``)."""
        again = sum(self.step.costs[op] for op in self.footprint.again)
        return again + self.step.added_cost(self.added_ms)

    @cached_property
    def techniques(self) -> tuple[Technique, ...]:
        """The techniques of its decisions."""
        return tuple(technique for technique, _ in by_technique(self.decisions))

    @property
    def only_recomputes(self) -> bool:
        """Whether nothing but recomputation is decided."""
        return all(isinstance(one, Recompute) for one in self.decisions)

    @property
    def discarded(self) -> Discarded:
        """By unit, the call sites whose ops run again, and how often."""
        return discarded_by(self.decisions)

    @property
    def left(self) -> Program:
        """The step with the decisions of techniques that share no units: what is left to run in units."""
        # Techniques that share units only watch the ops that run there.
        shared = tuple(technique.decision for technique in self.techniques if technique.shares_units)
        others = [one for one in self.decisions if not isinstance(one, shared)]
        return rewritten(self.step.program, others, self.step.device)

    @property
    def lower_bound_ms(self) -> float:
        """The least recomputation of any schedule with this peak that keeps what is pinned."""
        # If memory can be freed without running ops again, a schedule need not recompute anything.
        if any(technique.frees_otherwise for technique in self.techniques):
            return 0.0
        # A new step with the default objective, so that costs are times.
        left = PlanStep(self.left)
        bound = bound_of(left.program, left.costs, self.step.pins.kept_ops)
        return min(bound.at(self.footprint.peak_bytes), self.footprint.recompute_ms)

    @property
    def units(self) -> tuple[Mapping[str, UnitPlan], tuple[OpSequence, ...]]:
        """What each unit keeps and recomputes, and the op sequences that its calls run (see ``unit_plans``)."""
        # Techniques that watch the ops of a unit see only those that are left.
        watched = any(technique.shares_units for technique in self.techniques)
        fqns = dict.fromkeys(unit for one in self.decisions for unit in one.units)
        return unit_plans(self.left if watched else self.step.program, self.discarded, fqns)

    @property
    def why_refused(self) -> str:
        """Why a model cannot run with the decisions, a sentence; empty if it can."""
        return why_no_units(self.step.program, self.discarded) or why_not_again(self.program)
