"""Plans for a compiled step: proposals, each of which is run compiled, without kernels, and judged by that run.

The compiler may save less than an eager step, or more; it recomputes what it can fuse at no cost, and reuses buffers.
None of that is modelled here. There are two kinds of proposals:

- With inductor, partitions of the joint graphs (``partitions.py``), from the fastest to the smallest. What runs eagerly
  around compiled modules is planned on the dry run with a partition. Then partition and plan are run together.
- With another backend, or if the user chooses what is recomputed: plans for the eager step, which tag ops in the
  graph. The budget moves by what the last run left, or was over. With inductor, too, if no partition holds the budget,
  and the smallest plan is near it.

Only the peak of the dry run decides whether a proposal holds the budget. Of those that do, the fastest compiled wins.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from sacplan.core.budget import exact_bytes, format_bytes
from sacplan.core.decisions import Partition
from sacplan.core.liveness import bytes_at_ops
from sacplan.core.pins import resolve_pins
from sacplan.core.program import StorageKind
from sacplan.device.device_memory import device_memory
from sacplan.errors import InfeasibleBudget, PlanError
from sacplan.planning.limits import ROUNDS, Limit, Room
from sacplan.planning.partitions import (
    JointGraph,
    Split,
    Splits,
    fastest,
    lower,
    ms_of,
    order_of,
    smallest,
)
from sacplan.planning.plan import Plan
from sacplan.planning.request import Request
from sacplan.planning.value import UnitPlan
from sacplan.profiling.profile import Profile
from sacplan.record.compiled import compiler_for
from sacplan.techniques.registry import TECHNIQUES, by_technique, rewritten
from sacplan.torch_compat.partitioning import GivenGraph, joint_graphs_noted

_CLOSE = 0.01
"""Share of the budget that a plan may leave unused without a cheaper one being sought."""

_UNSURE = 0.05
"""A split that is expected to be over the budget by more than this share is not run: what inductor does not count
differs by that between two splits of T5 (``benchmarks.compiled_budgets``)."""

_WORTH = 0.005
"""Share of the step by which a split has to be faster than one that fits to be run as well."""


Planned = Callable[[Request, Profile], Plan]
"""A function that plans a step."""


@dataclass(frozen=True, eq=False, slots=True)
class _Try:
    """A plan, and the step with it as it runs compiled.

    Attributes:
        plan: the proposal.
        seen: the dry run of the step with this plan.
        needs: bytes of the run that are compared with the room.
        splits: how the plan splits compiled graphs; () if it does not.
    """

    plan: Plan
    seen: Profile
    needs: int
    splits: Splits = ()

    @property
    def asked(self) -> int:
        """The budget in bytes of a proposal for the eager step; 0 for none."""
        return self.plan.budget_bytes or 0


def compiled_plan(
    request: Request, profile: Profile, planned: Planned, smallest: Planned, unplanned: Plan
) -> Plan | InfeasibleBudget:
    """Return the fastest plan found for a compiled step, or the error that says why there is none.

    Args:
        request: what is asked for.
        profile: of the compiled step.
        planned: plans an eager step, or what runs eagerly in a compiled one, or raises ``InfeasibleBudget``.
        smallest: returns such a plan with the smallest peak, whatever the limit.
        unplanned: the compiled step without a plan.

    Raises:
        PlanError: the profile cannot run again; the whole model is compiled, and a technique works only on what is
            not; or a proposal cannot run compiled.
    """
    room = request.limit.room_of(profile)
    over = max(0, room.needs(profile.program) - room.n_bytes)
    tries: list[_Try] = []
    splits = splits_graphs(request, profile)

    def fitting() -> list[_Try]:
        return [one for one in tries if one.needs <= room.n_bytes]

    if not over:
        tries = [_Try(unplanned, profile, room.n_bytes)]
    elif splits:
        tries = _partitions(request, profile, room, planned, unplanned)
    else:
        tries = _eager_plans(request, profile, room, over, planned)
    if not fitting():
        small = _small(request, profile, smallest, unplanned)
        tries = [_Try(plan, seen, room.needs(seen.program)) for plan, seen in small]
        if splits and min(one.needs for one in tries) <= (1 + _UNSURE) * room.n_bytes:
            tries += _eager_plans(request, profile, room, over, planned)
    if not fitting():
        return _infeasible(profile, room, tries)
    best = min(fitting(), key=lambda one: _computing_ms(one.seen) + _waits_ms(one.plan, profile))
    found = structs.replace(
        best.plan,
        budget_bytes=room.for_peak(best.seen.program),
        status="feasible" if best.plan.decisions else "unplanned",
    )
    return as_compiled(found, profile)


def splits_graphs(request: Request, profile: Profile) -> bool:
    """Whether plans for a compiled step are partitions of its graphs."""
    how: Any = profile.fingerprint.setup.compiled
    chosen = request.keep or request.never or request.solver not in ("best", "milp")
    recomputes = profile.mode == "train" and "recompute" in request.techniques_for(profile)
    return recomputes and not chosen and how.backend == "inductor"


def works_nowhere(techniques: Sequence[str], profile: Profile) -> str:
    """Return why some of the techniques cannot work in a step, because all of it is compiled; ``""`` if all can."""
    how = profile.fingerprint.setup.compiled
    why = " ".join(filter(None, (TECHNIQUES[name].uncompiled for name in techniques)))
    return f"this step is compiled as a whole. {why}" if why and how is not None and "" in how.modules else ""


def _runs_eagerly(request: Request, profile: Profile) -> bool:
    """Whether anything of a compiled step runs eagerly.

    Raises:
        PlanError: nothing does, and a technique that was asked for works only there.
    """
    if why := works_nowhere(request.techniques_for(profile), profile):
        raise PlanError(why)
    how: Any = profile.fingerprint.setup.compiled
    return "" not in how.modules


def _partitions(
    request: Request, profile: Profile, room: Room, planned: Planned, unplanned: Plan
) -> list[_Try]:
    """Return the tries of partitions: alone, then together with plans for what runs eagerly.

    These are for the step as it is and the smallest partition. They may fit alone, or leave more room to partitions.
    """
    eagerly, partitions = _runs_eagerly(request, profile), _Partitions(profile, unplanned)
    tries = partitions.within(room)
    for step in dict.fromkeys((tries[0], min(tries, key=lambda one: one.needs)) if eagerly else ()):
        eager = _plan_of_eager(request, step.seen, room, planned)
        if eager.decisions:
            tries += partitions.within(room, eager, step.splits)
    return tries


def _plan_of_eager(request: Request, step: Profile, room: Room, planned: Planned) -> Plan:
    """Return the cheapest plan for what runs eagerly in a compiled step; if none fits, one near the smallest peak."""
    limit = request.limit if room.is_reserved else Limit.exactly(room.n_bytes)
    asked = dataclasses.replace(request, limit=limit, beside_compiled=True)
    try:
        return planned(asked, step)
    except InfeasibleBudget as error:
        near = Limit.exactly(int((1 + _CLOSE) * error.smallest_feasible_bytes))
        return planned(dataclasses.replace(asked, limit=near), step)


class _Partitions:
    """Proposals that split the graphs of a compiled step differently, with or without a plan for what runs eagerly."""

    def __init__(self, profile: Profile, unplanned: Plan) -> None:
        how: Any = profile.fingerprint.setup.compiled
        self._profile = profile
        self._unplanned = unplanned
        self._unit = how.modules[0]
        self._calls = len(how.modules)  # alike modules share a graph, which each of them calls
        # The caller of a whole model usually keeps only the loss. If it keeps more, the dry run shows that.
        outputs_stay = self._unit != ""
        graphs: dict[str, JointGraph] = profile.joint_graphs

        def note(given: GivenGraph) -> JointGraph:
            graph = JointGraph(given, outputs_stay, profile.spec)
            graphs[graph.key] = graph
            return graph

        if not graphs:
            for given in profile.source.joint_graphs if profile.source else ():
                note(given)
            if not graphs or any(graph.is_dynamic for graph in graphs.values()):
                # Symbolic sizes may be fixed by now: lower each graph while it is compiled.
                graphs.clear()
                with joint_graphs_noted(lambda given: lower(note(given).splits)):
                    profile.run_again()
            for graph in graphs.values():
                graph.world = functools.partial(compiler_for, profile.spec)
        self._graphs = graphs

    def run(self, splits: Splits, eager: Plan | None = None) -> tuple[Plan, Profile]:
        """Return the plan with one split of each graph and the decisions of ``eager``, and its dry run."""
        eager = eager or self._unplanned
        decisions = tuple(
            Partition(self._unit, key, tuple(sorted(split.saved)))
            for key, split in zip(self._graphs, splits, strict=True)
        )
        saved_by_default = sum(graph.own.lowered.saved_bytes for graph in self._graphs.values())
        still_saved = sum(split.lowered.saved_bytes for split in splits)
        discarded = max(0.0, 1 - still_saved / max(1, saved_by_default))  # a share
        plan = structs.replace(
            self._unplanned,
            decisions=(*decisions, *eager.decisions),
            # The time is known only after the dry run, and is filled in below.
            units={self._unit: UnitPlan(discarded, 0.0), **eager.units},
            sequences=eager.sequences,
            status="feasible",
        )
        seen = self._profile.run_with(plan)
        again_ms = max(0.0, _computing_ms(seen) - _computing_ms(self._profile))
        return structs.replace(plan, units={**plan.units, self._unit: UnitPlan(discarded, again_ms)}), seen

    def _saved_bytes(self, splits: Splits) -> int:
        return self._calls * sum(split.expected.saved_bytes for split in splits)

    def n_bytes(self, splits: Splits) -> int:
        """Return about how many bytes the graphs take with these splits while they run, and nothing else."""
        most = max((split.expected.needs_bytes(0) for split in splits), default=0)
        return self._saved_bytes(splits) + most

    def within(self, room: Room, eager: Plan | None = None, start: Splits | None = None) -> list[_Try]:
        """Return the tries that were run to find the fastest splits within some room.

        Args:
            room: it is too small for the step as it is.
            eager: a plan for what runs eagerly.
            start: the splits that are run first with ``eager``; by default, PyTorch's own.
        """
        start = start or tuple(graph.own for graph in self._graphs.values())
        ran = (self._unplanned, self._profile) if eager is None else self.run(start, eager)
        tries = [_Try(*ran, room.needs(ran[1].program), start)]

        def left() -> list[Splits]:
            tried = [one.splits for one in tries]
            fit = (ms_of(one.splits) for one in tries if one.needs <= room.n_bytes)
            most_ms = min(fit, default=math.inf) - _WORTH * self._profile.step_ms / self._calls
            return [one for one in self._options() if one not in tried and ms_of(one) < most_ms]

        while len(tries) <= ROUNDS and left():
            expected, unsure = self._expected(tries[-1]), int((1 + _UNSURE) * room.n_bytes)
            splits = fastest(left, expected, room.n_bytes)
            if splits is None and all(
                one.needs > room.n_bytes for one in tries
            ):  # none should fit, and none does
                splits = smallest(left, expected)
                if (eager or len(tries) > 1) and expected(splits) > unsure:
                    break  # even the smallest should be too large, by the last run
            splits = splits or fastest(left, expected, unsure)
            if splits is None:  # a try fits, and all faster splits are clearly too large
                break
            plan, seen = self.run(splits, eager)
            tries.append(_Try(plan, seen, room.needs(seen.program), splits))
        return tries

    def _expected(self, ran: _Try) -> Callable[[Splits], int]:
        """Return a function that estimates from one run what the step takes with other splits.

        The larger of two peaks counts: while a graph runs, all that it has alive changes; else only what graphs save.
        """
        program = ran.seen.program
        inside = resolve_pins(program, ran.seen.fingerprint, (), ()).compiled_ops
        most = [0, 0]
        for i, nbytes in enumerate(bytes_at_ops(program)):
            most[i in inside] = max(most[i in inside], int(nbytes))
        outside_bytes, inside_bytes = (n + ran.needs - program.footprint.peak_bytes for n in most)
        saved_bytes, n_bytes = self._saved_bytes(ran.splits), self.n_bytes(ran.splits)

        def expected(splits: Splits) -> int:
            outside = outside_bytes + self._saved_bytes(splits) - saved_bytes
            return max(outside, inside_bytes + self.n_bytes(splits) - n_bytes)

        return expected

    @property
    def small(self) -> list[Splits]:
        """The splits that inductor counts as smallest: the same for every budget."""
        for graph in self._graphs.values():
            lower(graph.splits)
        options = self._options()
        found = sorted(options, key=lambda one: (self.n_bytes(one), order_of(one)))[:2]
        # The one that saves least may be smaller still: inductor does not count that kernels write in place.
        found.append(min(options, key=lambda one: (sum(s.lowered.saved_bytes for s in one), order_of(one))))
        return list(dict.fromkeys(found))

    def _options(self) -> list[Splits]:
        """Return some ways to split all graphs; of a single graph, all of them.

        Of several, the first way has the fastest split of each. Each further one takes the next smaller split of one
        graph, where a byte costs the least time.
        """
        graphs = [graph.splits for graph in self._graphs.values()]
        if len(graphs) == 1:
            return [(split,) for split in graphs[0]]

        def needs(split: Split) -> int:
            return split.expected.needs_bytes(self._calls)

        stairs: list[list[Split]] = []
        for splits in graphs:
            stair: list[Split] = []
            for split in sorted(splits, key=lambda one: (one.expected.ms, needs(one))):
                if not stair or needs(split) < needs(stair[-1]):
                    stair.append(split)
            stairs.append(stair)

        def price(i: int) -> float:
            now, then = stairs[i][at[i] : at[i] + 2]
            return (then.expected.ms - now.expected.ms) / (needs(now) - needs(then))

        at = [0] * len(stairs)
        found = [tuple(stair[0] for stair in stairs)]
        while left := [i for i, stair in enumerate(stairs) if at[i] + 1 < len(stair)]:
            at[min(left, key=price)] += 1
            found.append(tuple(stair[i] for stair, i in zip(stairs, at, strict=True)))
        return found


def smallest_compiled(request: Request, profile: Profile, smallest: Planned, unplanned: Plan) -> Plan:
    """Return the plan with the smallest peak found for a compiled step; arguments as for ``compiled_plan``."""
    tries = _small(request, profile, smallest, unplanned)
    plan, _ = min(tries, key=lambda one: (one[1].peak_bytes, one[1].step_ms))
    return as_compiled(plan, profile)


def _small(
    request: Request, profile: Profile, smallest: Planned, unplanned: Plan
) -> list[tuple[Plan, Profile]]:
    """Return candidates for the plan with the smallest peak, and their dry runs: the same for every budget."""
    runs_eagerly = _runs_eagerly(request, profile)
    found = [profile.planned_and_run(functools.partial(smallest, request))]
    if not splits_graphs(request, profile):
        return found
    partitions = _Partitions(profile, unplanned)
    for splits in partitions.small:
        plan, seen = partitions.run(splits)
        eager = (
            smallest(dataclasses.replace(request, beside_compiled=True), seen) if runs_eagerly else unplanned
        )
        found.append((plan, seen))
        if eager.decisions:
            found.append(partitions.run(splits, eager))
    return found


def _eager_plans(request: Request, profile: Profile, room: Room, over: int, planned: Planned) -> list[_Try]:
    _runs_eagerly(request, profile)  # for its error
    most = profile.uncompiled.peak_bytes
    tries: list[_Try] = []
    budget: int | None = most - over
    while budget is not None and len(tries) < ROUNDS:
        asked = dataclasses.replace(request, limit=Limit.exactly(max(1, budget)))
        try:
            plan, seen = profile.planned_and_run(functools.partial(planned, asked))
        except InfeasibleBudget as error:
            # Ask for the smallest peak of the eager step, but only once: compiled, it may fit.
            if any(one.asked <= error.smallest_feasible_bytes for one in tries):
                break
            budget = error.smallest_feasible_bytes
            continue
        tries.append(_Try(plan, seen, room.needs(seen.program)))
        budget = _next_budget(room, tries, most)
    return tries


def _next_budget(room: Room, tries: Sequence[_Try], most: int) -> int | None:
    """Return the next budget for the eager step in bytes; None if the search is over."""
    last = tries[-1]
    fits = max((one.asked for one in tries if one.needs <= room.n_bytes), default=None)
    over = min((one.asked for one in tries if one.needs > room.n_bytes), default=None)
    left = room.n_bytes - last.needs
    if fits is None:
        # Peaks of plans lie below their budgets. ``left`` is negative here.
        return min(last.plan.peak_bytes, last.asked) + left
    if left >= 0 and (left <= _CLOSE * room.n_bytes or last.asked >= most or not last.plan.decisions):
        return None
    if over is None:
        return min(most, last.asked + left)
    return None if over - fits <= _CLOSE * room.n_bytes else (fits + over) // 2


def as_compiled(plan: Plan, profile: Profile) -> Plan:
    """Return a plan with the figures of a dry run of the compiled step with this plan."""
    seen = profile.run_with(plan)
    figures: dict[str, Any] = {
        "peak_bytes": seen.peak_bytes,
        "baseline_peak_bytes": profile.peak_bytes,
        # What the compiler recomputes is only known as the difference of the two runs.
        "recompute_ms": max(0.0, _computing_ms(seen) - _computing_ms(profile)),
        "recompute_flops": max(0, seen.program.flops - profile.program.flops),
        "step_ms": profile.step_ms,
        "step_flops": profile.program.flops,
        "lower_bound_ms": 0.0,
        "added_ms": _waits_ms(plan, profile),
        "waits_ms": 0.0,
        "gap": None,
        "device_memory": device_memory(seen.program) if profile.spec.kind == "cuda" else None,
        "host_bytes": seen.program.footprint.host_peak_bytes,
        "fingerprint": profile.fingerprint,
    }
    return structs.replace(plan, **figures)


def _computing_ms(seen: Profile) -> float:
    """Return the time of a dry run without copies to the host and back: on a device, these overlap computation."""
    ops, kinds = seen.program.ops, seen.program.storage_kinds
    copies = (op for op in ops if any(kinds[s] == StorageKind.HOST for s in (*op.reads, *op.writes)))
    return seen.step_ms - sum(op.time_ms for op in copies)


def _waits_ms(plan: Plan, profile: Profile) -> float:
    """Return how long computation waits for copies to the host and back, by the clocks of the recorded step."""
    stay = [one for technique, own in by_technique(plan.decisions) if not technique.takes_host for one in own]
    if len(stay) == len(plan.decisions):
        return 0.0
    # A plan with partitions is about the compiled recording, any other about the uncompiled step.
    program = (profile if plan.partitions else profile.uncompiled).program
    with_copies, without = (rewritten(program, d, profile.spec).step_ms for d in (plan.decisions, stay))
    return with_copies - without


def _infeasible(profile: Profile, room: Room, tries: Sequence[_Try]) -> InfeasibleBudget:
    best = min(tries, key=lambda one: one.needs)
    at = best.seen.program.footprint
    where = at.peak_fqn or at.peak_phase.name.lower()
    return InfeasibleBudget(
        f"no plan that was run, dry, keeps the compiled step under {format_bytes(room.n_bytes)}. "
        f"Unplanned it takes {format_bytes(profile.peak_bytes)}. The smallest reached is {format_bytes(best.needs)}, "
        f"in the {at.peak_phase.name.lower()} of {where}. "
        f"Give at least {exact_bytes(best.needs)}, or make the batch smaller.",
        budget_bytes=room.n_bytes,
        smallest_feasible_bytes=best.needs,
        binding=where,
    )
