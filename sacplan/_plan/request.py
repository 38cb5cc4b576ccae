"""A request: what ``plan`` is asked for, whatever the step, and the outcome of asking it of a step.

Everything that plans goes this way: ``plan`` itself, each sharding of a mesh (``meshes.py``), and each case of a sweep
(``_questions/sweep.py``). An outcome without a plan carries the error that ``plan`` raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from sacplan._plan.beyond import beyond
from sacplan._plan.infeasible import infeasible, segments_do_not_fit
from sacplan._plan.limits import OF_DEVICE, Limit, Try, next_budget
from sacplan._plan.make import MadeBy, made_plan
from sacplan._plan.plan import Plan
from sacplan._plan.planner import ROTOR_STAGES, Planner, resolve_solver
from sacplan._plan.search import Candidate
from sacplan._plan.value import Status
from sacplan._profile.profile import Profile
from sacplan._program.budget import format_bytes, parse_budget
from sacplan._program.decisions import Accumulate
from sacplan._program.pins import resolve_pins
from sacplan._rotor.sequences import Rotor
from sacplan._solve.alike import Alike
from sacplan._solve.greedy import Greedy
from sacplan._solve.solvers import Solver
from sacplan._technique.step import Objective, PlanStep
from sacplan._technique.technique import StepSolver
from sacplan._techniques import DEFAULT_TECHNIQUES, INFERENCE_TECHNIQUES, resolve_techniques
from sacplan.errors import InfeasibleBudget, PlanError


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step that was planned for, and its plan if there is one.

    Attributes:
        profile: The step.
        plan: It holds the limit; None if none does.
        peak_bytes: Peak of the plan, or the smallest that was reached.
        error: Why there is no plan.
    """

    profile: Profile
    plan: Plan | None
    peak_bytes: int
    error: InfeasibleBudget | None = None

    def made(self) -> Plan:
        """Return the plan, or raise the error that says why there is none."""
        if self.error is not None:
            raise self.error
        assert self.plan is not None
        return self.plan

    @property
    def step_ms(self) -> float | None:
        """Predicted time of the step with the plan; None without one."""
        made = self.plan
        return None if made is None else made.step_ms + made.recompute_ms + made.added_ms

    @property
    def binding(self) -> str:
        """The module or step at which the smallest peak is; ``""`` if a plan holds the budget."""
        return "" if self.error is None else self.error.binding


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``plan`` that do not depend on the step, as the user gave them.

    Whether they can be read is known only with a step, since patterns, shares and defaults depend on it.
    """

    limit: Limit = OF_DEVICE
    solver: str | Solver | StepSolver = "best"
    objective: Objective = "time"
    keep: Sequence[str] = ()
    never: Sequence[str] = ()
    techniques: Sequence[str] | None = None
    accumulate: Accumulate = "float32"
    host_budget: float | str | None = None

    def outcome(self, profile: Profile, *, says_beyond: bool = False) -> Outcome:
        """Plan a step: return its cheapest plan within the limit, or why there is none. Errors are those of ``plan``.

        A limit that no plan holds is no error here: ``Outcome.made`` raises it. With ``says_beyond``, a plan with the
        default techniques says what others would save.
        """
        room = self.limit.room_of(profile)
        tries: list[Try] = []
        while (budget_bytes := next_budget(room, tries)) is not None:
            # A planner for each budget: the result is then what the user gets who asks for that budget.
            asked = self.planner(profile)
            found = asked.cheapest(budget_bytes)
            # If nothing holds the budget, the plan with the smallest peak says how far it is off.
            if found is None:
                found = asked.nearest.smallest
            peak_bytes = found.footprint.peak_bytes
            needs = room.needs(found.program)
            if needs <= room.n_bytes:
                # The plan with the smallest peak may be above the budget, and fit the room. Then its peak is the limit.
                kept_bytes = max(budget_bytes, peak_bytes)
                # Whoever names the techniques has chosen. In inference, nothing else helps.
                says_beyond = says_beyond and self.techniques is None and profile.mode == "train"
                said = beyond(asked, found, kept_bytes) if says_beyond else ()
                return Outcome(profile, self._made(profile, asked, found, kept_bytes, said), peak_bytes)
            tries.append(Try(found, budget_bytes, peak_bytes, needs))
        least = min(tries, key=lambda one: one.needs)
        # Segments are looked at only where the tensors fit. If they do not, there was one try.
        if least.peak_bytes <= room.n_bytes:
            error = segments_do_not_fit(profile, least, room)
        else:
            error = infeasible(profile, asked, room.n_bytes)
        return Outcome(profile, None, error.smallest_feasible_bytes, error)

    def smallest_plan(self, profile: Profile, *, without_rotor: bool = False) -> Plan:
        """Return the plan with the smallest peak.

        Rotor may reach a smaller peak than the other solvers, at several times the cost of the step. A comparison or a
        recommendation does not want that plan: ``without_rotor``.
        """
        asked = self.planner(profile)
        if without_rotor:
            asked = replace(asked, last=None)
        # No limit was asked for, so the plan names none.
        return replace(self, limit=OF_DEVICE)._made(profile, asked, asked.smallest(0))

    def _made(
        self,
        profile: Profile,
        asked: Planner,
        found: Candidate,
        budget_bytes: int | None = None,
        beyond: tuple[str, ...] = (),
    ) -> Plan:
        """Return what a planner has found as a plan.

        Args:
            profile: The step.
            asked: The planner.
            found: The candidate.
            budget_bytes: What it was planned for; None: the smallest peak.
            beyond: What other techniques would save, a sentence for each.
        """
        known = (*asked.solvers, *asked.crowded, *(() if asked.last is None else (asked.last,)))
        made_by = MadeBy(
            found.solver,
            # A solver that a technique brings itself is in none of these lists, and its options are not noted.
            next((_options_of(solver) for solver in known if solver.name == found.solver), {}),
            self.objective,
            self.limit,
            self.host_budget,
            asked.recorded.pins,
            asked.techniques,
            tuple(asked.limits_reached),
            beyond,
        )
        status = cast(Status, found.status)
        return made_plan(
            profile, found.decisions, made_by, status=status, gap=found.gap, budget_bytes=budget_bytes
        )

    def planner(self, profile: Profile) -> Planner:
        """Check the arguments for a step, and return its planner. Errors are those of ``plan``."""
        solvers = tuple(resolve_solver(self.solver))
        default = INFERENCE_TECHNIQUES if profile.mode == "inference" else DEFAULT_TECHNIQUES
        names = resolve_techniques(default if self.techniques is None else self.techniques)
        pins = resolve_pins(profile.program, profile.fingerprint, self.keep, self.never)
        if self.accumulate not in get_args(Accumulate):
            known = " and ".join(map(repr, get_args(Accumulate)))
            raise PlanError(f"accumulate is {self.accumulate!r}; known are {known}.")
        # Rotor as the last resort is part of ``"best"`` alone, and only if the user allows the technique that its plans
        # use.
        last = Rotor(stages=ROTOR_STAGES)
        usable = self.solver == "best" and set(last.techniques) <= set(names)
        # Several offers, such as those of all layers, make the integer program of the whole step slow. These two stay
        # quick.
        crowded = (Alike(), Greedy()) if self.solver == "best" else solvers
        taken, spec = profile.unplanned_host_bytes, profile.spec
        host_bytes = spec.host_memory_bytes
        if self.host_budget is not None:
            host_bytes = parse_budget(self.host_budget, spec.host_memory_bytes)
            if host_bytes < taken:
                raise PlanError(
                    f"host_budget={self.host_budget!r} is {format_bytes(host_bytes)}, and without a plan the step "
                    f"takes {format_bytes(taken)} of the host: its optimizer, and what an offload_policy keeps there. "
                    "Raise it."
                )
        step = PlanStep(
            profile.program,
            self.objective,
            pins,
            spec,
            profile.mode != "inference",
            self.accumulate,
            max(0, host_bytes - taken),  # what is left for a plan
        )
        return Planner(step, profile.fingerprint, solvers, names, last if usable else None, crowded)


def _options_of(solver: object) -> dict[str, Any]:
    # Solvers of sacplan are dataclasses. One of the user's own may be any object.
    if dataclasses.is_dataclass(solver):
        return {f.name: getattr(solver, f.name) for f in dataclasses.fields(solver)}
    return dict(getattr(solver, "__dict__", {}))
