"""A request: what ``plan`` is asked for, whatever the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacplan.core.budget import format_bytes, parse_budget
from sacplan.core.pins import resolve_pins
from sacplan.errors import PlanError
from sacplan.planning.basis import Basis
from sacplan.planning.by_hand import ByHand
from sacplan.planning.limits import OF_DEVICE, Limit
from sacplan.planning.planner import ROTOR_STAGES, Planner, Searches
from sacplan.profiling.profile import Profile
from sacplan.solvers.alike import Alike
from sacplan.solvers.greedy import Greedy
from sacplan.solvers.milp import Milp
from sacplan.solvers.rotor.sequences import Rotor
from sacplan.solvers.solvers import Solver
from sacplan.techniques.base.step import Objective, PlanStep
from sacplan.techniques.base.technique import StepSolver
from sacplan.techniques.registry import DEFAULT_TECHNIQUES, INFERENCE_TECHNIQUES, resolve_techniques


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``plan`` except the step, as the user gave them.

    Most are checked only in ``planner``, since patterns, shares and defaults depend on the step.
    """

    limit: Limit = OF_DEVICE
    solver: str | Solver | StepSolver = "best"
    objective: Objective = "time"
    keep: Sequence[str] = ()
    never: Sequence[str] = ()
    techniques: Sequence[str] | None = None
    host_budget: float | str | None = None
    beside_compiled: bool = False
    """Plan only what runs eagerly in a compiled step, and leave its compiled modules as they are."""

    def techniques_for(self, profile: Profile) -> tuple[str, ...]:
        """Return the names of the techniques that were asked for, or the default ones for the mode of the step."""
        if self.techniques is not None:
            return resolve_techniques(self.techniques)
        return INFERENCE_TECHNIQUES if profile.mode == "inference" else DEFAULT_TECHNIQUES

    def planner(self, profile: Profile) -> Planner:
        """Check the arguments for a step, and return its planner. Errors are those of ``plan``."""
        if profile.runs_compiled and not self.beside_compiled:
            raise PlanError(
                "this asks what a plan would make of a recorded step, and of a compiled one that shows only when it is "
                "compiled again. Give a profile that was made with compile=False."
            )
        solvers = tuple(resolve_solver(self.solver))
        names = self.techniques_for(profile)
        pins = resolve_pins(profile.program, profile.fingerprint, self.keep, self.never)
        # Only ``"best"`` falls back on Rotor, and only if the user allows the technique that Rotor's plans use.
        last = Rotor(stages=ROTOR_STAGES)
        usable = self.solver == "best" and set(last.techniques) <= set(names)
        # Plans of Rotor may recompute a value twice, which cannot be compiled.
        usable = usable and profile.fingerprint.setup.compiled is None
        # With several offers, such as one for each layer, the integer program is slow. These two solvers stay quick.
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
            max(0, host_bytes - taken),  # what is left for a plan
        )
        basis = Basis(step, profile.fingerprint, names)
        by_hand = ByHand(names) if self.solver == "best" else None
        return Planner(Searches(basis, solvers, crowded), last if usable else None, by_hand)


def resolve_solver(solver: str | Solver | StepSolver) -> list[Solver | StepSolver]:
    """Return the solvers that a name stands for, or the given solver alone. ``"best"`` is several, the quickest first.

    Raises:
        PlanError: The name is unknown.
    """
    if not isinstance(solver, str):
        return [solver]
    known: dict[str, list[Solver | StepSolver]] = {
        "milp": [Milp()],
        "greedy": [Greedy()],
        "rotor": [Rotor()],
        "best": [Greedy(), Milp()],
    }
    if solver not in known:
        raise PlanError(
            f"unknown solver {solver!r}; known are {', '.join(map(repr, known))}, or an object such as "
            "sacplan.Milp()."
        )
    return known[solver]
