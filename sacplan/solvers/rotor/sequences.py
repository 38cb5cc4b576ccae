"""Plans from Rotor's sequences: how often a sequence drops each stage, as decisions about call sites.

Rotor counts memory its own way: whole stages, in slots, with room for gradients that may not be there. The peak that
counts is that of the rewritten program. So ``sequences`` moves the budget that Rotor is given, by secant steps and
then by bisection, until that peak is just under the plan's budget. The result is optimal for the chain, not for the
step. Less runs again than Rotor assumes: not whole stages, but the ops that the backward pass asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sacplan.core.decisions import Discarded, Recompute, as_decisions
from sacplan.core.liveness import Footprint
from sacplan.core.program import Program
from sacplan.distributed.ranks.unit_limits import narrowed
from sacplan.errors import InfeasibleBudget, PlanError
from sacplan.solvers.rotor.cuts import find_cuts
from sacplan.solvers.rotor.rotor import RotorResult, rotor
from sacplan.solvers.rotor.stages import Stages, drops_of, stages_of
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.recompute.in_place_groups import reading_lost_versions
from sacplan.techniques.recompute.rewrite import recomputed

_ROUNDS = 8  # of asking Rotor again


@dataclass(frozen=True, slots=True)
class Rotor:
    """The Rotor solver for ``sacplan.plan``: the model as a chain of stages, solved by dynamic programming.

        plan = sacplan.plan(profile, "60%", solver=sacplan.Rotor(slots=500))

    For models whose forward pass is a chain of at least two stages (``Profile.chain``). Where the sequence
    says so, stages run more than once again; no other solver does that. See ``sacplan.rotor``.

    Attributes:
        slots: as for ``sacplan.rotor``.
        stages: the most that the chain is solved with; of a longer chain, neighbouring stages are joined. Time grows
            with the third power of ``stages``, and memory with the square.
    """

    slots: int = 500
    stages: int = 256

    def __post_init__(self) -> None:
        if isinstance(self.stages, bool) or not isinstance(self.stages, int) or self.stages < 1:
            raise PlanError(f"Rotor: stages is {self.stages!r}; give a whole number from 1 on (default 256)")

    @property
    def name(self) -> str:
        """As it appears in ``Plan.solver``."""
        return "rotor"

    @property
    def techniques(self) -> tuple[str, ...]:
        """The techniques that its plans use."""
        return ("recompute",)

    def proposals(self, step: PlanStep, budget_bytes: int) -> Sequence[tuple[Recompute, ...]]:
        """Return Rotor's sequences for a budget, or for the smallest peak, as decisions about call sites.

        Raises:
            PlanError: the model is no chain, or pins do not leave it one unit.
        """
        program, pins = step.program, step.pins
        if pins.widest_units is not None and not pins.may_be_a_unit(program, unit_of(program)):
            raise PlanError(
                f"solver 'rotor' runs all stages in one unit, {unit_of(program) or 'the model itself'!r}, but "
                f"no unit may be around some modules in it ({pins.said}). Use another solver, or keep= instead."
            )
        found = sequences(program, budget_bytes, self, pins.kept_ops)
        return [as_decisions(narrowed(program, planned.discarded)) for planned in found]


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence, the call sites that it discards, and the memory of the step that discards them."""

    result: RotorResult
    discarded: Discarded
    footprint: Footprint


def unit_of(program: Program) -> str:
    """Return the module that runs all stages.

    Raises:
        PlanError: the model is no chain.
    """
    return _stages(program, Rotor()).unit


def _stages(program: Program, solver: Rotor) -> Stages:
    """Return the stages of a program. Without ``most`` where it changes nothing, so that all budgets share them."""
    is_longer = len(find_cuts(program).boundary) > solver.stages
    return stages_of(program, solver.stages) if is_longer else stages_of(program)


def sequences(
    program: Program, budget_bytes: int, solver: Rotor, kept: frozenset[int]
) -> list[PlannedSequence]:
    """Return the sequence for Rotor's smallest feasible budget, and sequences for budgets around the one asked for.

    If Rotor can hold the budget at all, some of the peaks are under it, and the best is near it.

    Args:
        program: the step.
        budget_bytes: for the whole step.
        solver: how many slots.
        kept: ops that must not be discarded.

    Raises:
        PlanError: the model is no chain, or the slots are too few for it.
    """
    stages = _stages(program, solver)
    tried = [_planned(program, stages, _result(stages, 0, solver), kept)]
    asked = budget_bytes - stages.fixed_bytes
    # Rotor's budgets: the largest whose peak held ``budget_bytes``, and the smallest whose peak did not.
    low, high = tried[0].result.budget_bytes, None
    # Invariant: ``low`` held (or is the least that Rotor can be given), ``high`` did not. The next one differs from
    # the last by what the peak missed; where that leaves the interval, it is the middle.
    for _ in range(_ROUNDS):
        # Nothing is left in between, or Rotor cannot hold so little.
        if asked <= low or (high is not None and asked >= high):
            break
        result = _result(stages, asked, solver)
        planned = _planned(program, stages, result, kept)
        tried.append(planned)
        room = budget_bytes - planned.footprint.peak_bytes
        if room >= 0:
            low = asked
        else:
            high = asked
        # The peak holds, and nothing runs again, or less than one slot is left: no larger budget gives a better
        # sequence.
        if room >= 0 and (not planned.footprint.recompute_ms or room < result.budget_bytes // solver.slots):
            break
        asked += room
        if high is not None and not low < asked < high:
            asked = (low + high) // 2
    return tried


def _result(stages: Stages, budget_bytes: int, solver: Rotor) -> RotorResult:
    """Return Rotor's answer for a budget, or for the smallest feasible one."""
    try:
        return rotor(stages.chain, budget_bytes, solver.slots)
    except InfeasibleBudget as error:
        return rotor(stages.chain, error.smallest_feasible_bytes, solver.slots)


def _planned(program: Program, stages: Stages, result: RotorResult, kept: frozenset[int]) -> PlannedSequence:
    drops = drops_of(stages, result.operations)
    # A version that is overwritten later is made again as often as the reader that runs again most often.
    for s, maker in program.overwritten.items():
        wanted = max((drops.get(op, 0) for op in program.readers.get(s, ())), default=0)
        if wanted > drops.get(maker, 0):
            drops[maker] = wanted
    (scope,) = program.calls[stages.unit]
    sites = {
        site: drops[op]
        for op, site in program.sites(scope).items()
        if op in drops and op not in kept and program.ops[op].recomputable
    }
    for site in reading_lost_versions(program, stages.unit, sites):
        del sites[site]
    decisions = {stages.unit: sites} if sites else {}
    return PlannedSequence(result, decisions, recomputed(program, decisions).footprint)
