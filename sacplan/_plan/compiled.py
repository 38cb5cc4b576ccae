"""Plans for a compiled step: proposals, each of which is run compiled, without kernels, and judged by that.

The compiler saves less than an eager step, or more; it recomputes what fuses for nothing, and reuses buffers. None of
that is modelled here. There are two kinds of proposals, and one search, whose budget moves by what is left, or over:

- With inductor, partitions of the joint graphs (``partitions.py``): of each graph, the cheapest that saves no more than
  a share of what PyTorch would save.
- If none holds the budget, with another backend, and where the user has a say in what is recomputed: plans for the
  eager step, whose ops are tags in the graph.

A proposal counts only with the peak of its dry run. The cheapest one that holds the budget wins, by its compiled time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from sacplan._device.device_memory import device_memory
from sacplan._plan.limits import ROUNDS, Limit, Room
from sacplan._plan.partitions import JointGraph, Partitioner
from sacplan._plan.plan import Plan
from sacplan._plan.request import Request
from sacplan._plan.saved_values import SHARES, cheapest_saved
from sacplan._plan.value import UnitPlan
from sacplan._profile.profile import Profile
from sacplan._program.budget import exact_bytes, format_bytes
from sacplan._program.decisions import Partition
from sacplan.errors import InfeasibleBudget

_CLOSE = 0.01
"""Share of the budget that a plan may leave unused without a dearer one being sought."""


@dataclass(frozen=True, slots=True)
class _Try:
    """A plan, and the step with it as it runs compiled.

    Attributes:
        asked: the budget of the proposal.
        plan: the proposal.
        reached: its peak as the proposal has it.
        seen: the step with it.
        needs: what of it is compared with the room.
    """

    asked: int
    plan: Plan
    reached: int
    seen: Profile
    needs: int


def compiled_plan(
    request: Request, profile: Profile, planned: Callable[[Request, Profile], Plan], unplanned: Plan
) -> Plan | InfeasibleBudget:
    """Return the cheapest plan that was found for a compiled step, or why there is none.

    Args:
        request: what is asked for.
        profile: of the compiled step.
        planned: plans an eager step, or raises ``InfeasibleBudget``.
        unplanned: the compiled step without a plan.

    Raises:
        PlanError: the profile cannot run again, or a proposal cannot run compiled.
    """
    room = request.limit.room_of(profile)
    over = max(0, room.needs(profile.program) - room.n_bytes)
    tries: list[_Try] = []
    if not over:
        tries = [_Try(profile.peak_bytes, unplanned, profile.peak_bytes, profile, room.n_bytes)]
    elif splits_graphs(request, profile):
        tries = _partitions(profile, room, over, unplanned)
    if not any(one.needs <= room.n_bytes for one in tries):
        tries += _eager_plans(request, profile, room, over, planned)
    fitting = [one for one in tries if one.needs <= room.n_bytes]
    if not fitting:
        return _infeasible(profile, room, tries)
    best = min(fitting, key=lambda one: one.seen.step_ms)
    found = structs.replace(
        best.plan,
        budget_bytes=room.for_peak(best.seen.program),
        status="feasible" if best.plan.decisions else "unplanned",
    )
    return as_compiled(found, profile)


def splits_graphs(request: Request, profile: Profile) -> bool:
    """Whether plans for a compiled step are partitions of its graphs."""
    how = profile.fingerprint.setup.compiled
    chosen = request.keep or request.never or request.solver not in ("best", "milp")
    techniques = request.techniques is None or tuple(request.techniques) == ("recompute",)
    return (
        how is not None
        and how.backend == "inductor"
        and profile.mode == "train"
        and techniques
        and not chosen
    )


class _Partitions:
    """Proposals for a compiled step that split its graphs otherwise.

    Each graph saves the same share of what PyTorch would save of it.
    """

    def __init__(self, profile: Profile, unplanned: Plan) -> None:
        self._profile = profile
        self._unplanned = unplanned
        self._graphs: dict[str, JointGraph] = profile.joint_graphs
        if not self._graphs:
            with Partitioner(lambda key, graph, peaks: self._graphs.update({key: graph}), ("sacplan",)):
                profile.run_again()

    def saving(self, limit_of: Callable[[JointGraph], float]) -> tuple[Plan, Profile]:
        """Return the plan, and the step, in which each graph saves no more bytes than a limit."""
        how: Any = self._profile.fingerprint.setup.compiled
        unit = how.modules[0]
        found = [cheapest_saved(graph.values, limit_of(graph)) for graph in self._graphs.values()]
        decisions = tuple(
            Partition(unit, key, tuple(sorted(saved.names)))
            for key, saved in zip(self._graphs, found, strict=True)
        )
        before = sum(graph.own_bytes for graph in self._graphs.values())
        left = sum(saved.n_bytes for saved in found)
        ratio = max(0.0, 1 - left / max(1, before))
        plan = structs.replace(
            self._unplanned, decisions=decisions, units={unit: UnitPlan(ratio, 0.0)}, status="feasible"
        )
        seen = self._profile.run_with(plan)
        again_ms = max(0.0, seen.step_ms - self._profile.step_ms)
        return structs.replace(plan, units={unit: UnitPlan(ratio, again_ms)}), seen

    def within(self, budget: int) -> tuple[Plan, Profile]:
        """Return the plan and the step that should need no more than a budget."""
        how: Any = self._profile.fingerprint.setup.compiled
        # Alike modules share a graph, which each of them calls.
        before = len(how.modules) * sum(graph.own_bytes for graph in self._graphs.values())
        share = max(0.0, 1 - (self._profile.peak_bytes - budget) / max(1, before))
        return self.saving(lambda graph: share * graph.own_bytes)

    @property
    def small(self) -> list[tuple[Plan, Profile]]:
        """Plans that save little, and the steps with them: the same for every budget."""

        def limit_of(share: float, graph: JointGraph) -> float:
            return share * graph.own_bytes

        return [self.saving(functools.partial(limit_of, share)) for share in SHARES]


def smallest_compiled(
    request: Request, profile: Profile, smallest: Callable[[Profile], Plan], unplanned: Plan
) -> Plan:
    """Return the plan for a compiled step with the smallest peak that was found.

    Args:
        request, profile, unplanned: as for ``compiled_plan``.
        smallest: returns the plan with the smallest peak of an eager step.
    """
    tries = [profile.planned_and_run(smallest)]
    if splits_graphs(request, profile):
        tries += _Partitions(profile, unplanned).small
    plan, _ = min(tries, key=lambda one: one[1].peak_bytes)
    return as_compiled(plan, profile)


def _partitions(profile: Profile, room: Room, over: int, unplanned: Plan) -> list[_Try]:
    proposals = _Partitions(profile, unplanned)
    tries: list[_Try] = []
    budget: int | None = profile.peak_bytes - over
    while budget is not None and len(tries) < ROUNDS:
        plan, seen = proposals.within(budget)
        if any(one.plan.decisions == plan.decisions for one in tries):
            break
        tries.append(_Try(budget, plan, budget, seen, room.needs(seen.program)))
        budget = _next_budget(room, tries, profile.peak_bytes)
    if not any(one.needs <= room.n_bytes for one in tries):
        # What an error names is then found again.
        tries = [
            _Try(seen.peak_bytes, plan, seen.peak_bytes, seen, room.needs(seen.program))
            for plan, seen in proposals.small
        ]
    return tries


def _eager_plans(
    request: Request, profile: Profile, room: Room, over: int, planned: Callable[[Request, Profile], Plan]
) -> list[_Try]:
    most = profile.uncompiled.peak_bytes
    tries: list[_Try] = []
    budget: int | None = most - over
    while budget is not None and len(tries) < ROUNDS:
        asked = dataclasses.replace(request, limit=Limit.exactly(max(1, budget)))
        try:
            plan, seen = profile.planned_and_run(functools.partial(planned, asked))
        except InfeasibleBudget as error:
            # The smallest peak of the eager step, once. It may be small enough when it is compiled.
            if any(one.asked <= error.smallest_feasible_bytes for one in tries):
                break
            budget = error.smallest_feasible_bytes
            continue
        tries.append(_Try(budget, plan, plan.peak_bytes, seen, room.needs(seen.program)))
        budget = _next_budget(room, tries, most)
    return tries


def _next_budget(room: Room, tries: Sequence[_Try], most: int) -> int | None:
    """Return the budget of the next proposal; None if the search is over."""
    last = tries[-1]
    fits = max((one.asked for one in tries if one.needs <= room.n_bytes), default=None)
    over = min((one.asked for one in tries if one.needs > room.n_bytes), default=None)
    left = room.n_bytes - last.needs
    if fits is None:
        # Peaks of plans lie below their budgets: the next one must do better than this plan did.
        return min(last.reached, last.asked) + left
    if left >= 0 and (left <= _CLOSE * room.n_bytes or last.asked >= most or not last.plan.decisions):
        return None
    if over is None:
        return min(most, last.asked + left)
    return None if over - fits <= _CLOSE * room.n_bytes else (fits + over) // 2


def as_compiled(plan: Plan, profile: Profile) -> Plan:
    """Return a plan of the eager step with the figures of the compiled one, which is run with it, dry."""
    seen = profile.run_with(plan)
    figures: dict[str, Any] = {
        "peak_bytes": seen.peak_bytes,
        "baseline_peak_bytes": profile.peak_bytes,
        # What the compiler recomputes has no place in the plan; what it adds to the step has.
        "recompute_ms": max(0.0, seen.step_ms - profile.step_ms),
        "recompute_flops": max(0, seen.program.flops - profile.program.flops),
        "step_ms": profile.step_ms,
        "step_flops": profile.program.flops,
        "lower_bound_ms": 0.0,
        "added_ms": 0.0,
        "gap": None,
        "device_memory": device_memory(seen.program) if profile.spec.kind == "cuda" else None,
        "host_bytes": seen.program.footprint.host_peak_bytes,
        "fingerprint": profile.fingerprint,
    }
    return structs.replace(plan, **figures)


def _infeasible(profile: Profile, room: Room, tries: Sequence[_Try]) -> InfeasibleBudget:
    best = min(tries, key=lambda one: one.needs)
    at = best.seen.program.footprint
    where = at.peak_fqn or at.peak_phase.name.lower()
    return InfeasibleBudget(
        f"no plan found keeps the compiled step under {format_bytes(room.n_bytes)}; {len(tries)} were run, dry. "
        f"Unplanned it takes {format_bytes(profile.peak_bytes)}. The smallest reached is {format_bytes(best.needs)}, "
        f"in the {at.peak_phase.name.lower()} of {where}. "
        f"Give at least {exact_bytes(best.needs)}, or make the batch smaller.",
        budget_bytes=room.n_bytes,
        smallest_feasible_bytes=best.needs,
        binding=where,
    )
