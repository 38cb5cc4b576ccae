"""``plan``: read the arguments, plan for a step or on a mesh, and return the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sacplan.core.arguments import checked, opened
from sacplan.distributed.ranks.ranks import AnyRanks
from sacplan.errors import PlanError
from sacplan.planning.infeasible import handed_out
from sacplan.planning.limits import Limit
from sacplan.planning.make import outcome_of, smallest_plan
from sacplan.planning.meshes import asks_for_mesh, on_meshes
from sacplan.planning.plan import Plan
from sacplan.planning.request import Request
from sacplan.profiling.profile import Profile, ProfileOrPath
from sacplan.solvers.solvers import Solver
from sacplan.techniques.base.step import Objective
from sacplan.techniques.base.technique import StepSolver

SMALLEST = "smallest"
"""The budget that stands for the smallest peak."""


@checked(PlanError, "budget", "host_budget", "ranks")
def plan(
    profile: ProfileOrPath,
    budget: float | str | None = None,
    solver: str | Solver | StepSolver = "best",
    objective: Objective = "time",
    *,
    keep: Sequence[str] = (),
    never: Sequence[str] = (),
    techniques: Sequence[str] | None = None,
    ranks: AnyRanks | None = None,
    mesh: Any = None,
    host_budget: float | str | None = None,
) -> Plan:
    """Return the cheapest plan that keeps the peak of the whole step under a budget.

    The plan says which tensors each module discards in the forward pass and recomputes in the backward pass.

        plan = sacplan.plan(profile)  # for the profile's device
        plan = sacplan.plan(profile, budget="22GiB")
        plan = sacplan.plan(profile, "smallest")
        plan = sacplan.plan(profile, "60%", keep=["*.router", "aten.topk"], never=["vision_tower.*"])

    Args:
        profile: A profile from ``sacplan.profile``, or the path of one.
        budget: Limit for the peak of the whole step. A number is in GiB. A string has a unit (``"22GiB"``, ``"24GB"``)
            or is a share of the peak without a plan (``"60%"``). None: the plan has to fit the profile's device. On a
            GPU, what torch reserves for it (``Plan.device_memory``) and what lies outside of torch's allocator may
            take all memory; on a CPU, the peak may take 85% of the machine's. With several ranks, that holds for each.
            ``"smallest"``: the smallest peak that the search finds, however much it recomputes, which is what
            ``InfeasibleBudget`` reports as ``smallest_feasible_bytes``. That search takes longer.
        solver: ``"milp"``, ``"greedy"``, or an object such as ``sacplan.Milp(gap=1e-4)``. ``"best"`` asks greedy, and
            milp if the plan of greedy is not at the lower bound, and takes the cheaper plan.
            ``"rotor"`` (``sacplan.Rotor``) plans models that are a chain. Its plans cost more, but its smallest peak
            may be lower, since it may recompute a value several times. It always minimises time. If neither greedy nor
            milp holds the budget, or only with a plan that takes more than 20% of the step, ``"best"`` asks
            ``sacplan.Rotor(stages=48)``.
        objective: The amount of recomputation to minimise: ``"time"`` (in ms, as the profile predicts) or ``"flops"``.
        keep: Patterns of ops and modules whose outputs are never discarded. A pattern that starts with ``aten.`` or
            ``prims.`` or contains ``::`` is matched (``fnmatch``) with the names of ops: ``"aten.topk"``,
            ``"aten.topk.default"``, ``"aten.*attention*"``, ``"mylib::scan"``. Any other pattern is matched with the
            names of modules, and stands for everything that runs in them. ``*`` also matches dots. Without ``*``,
            ``?`` or ``[``, a pattern is the name itself.
        never: Patterns of modules to leave alone. Nothing in such a module is discarded or runs in slices. Neither it
            nor a module around it or inside it becomes a unit, so it runs as without a plan. In a module around it,
            only the outputs of other inner modules can then be discarded.
        techniques: What the plan may do. By default in training, everything that keeps gradients bit-equal and takes no
            memory but the device's (``"recompute"``). With ``"offload"`` what is kept may wait on the host until the
            backward pass needs it. ``"chunk"`` is the default for a profile with ``mode="inference"``, where only this
            helps; a search of its own finds the stretches to run in slices, whatever the solver.
        ranks: What the step is spread over, as for ``sacplan.profile``; the ranks of another plan will do, too. By
            default, those of the profile.
        mesh: Also spread the step over ranks: ``{"dp": 2, "tp": 4}``, the axis with the slowest links first. ``8`` or
            ``"8xh100"`` tries all meshes of eight devices and returns the fastest plan. The batch of the profile is
            that of all ranks together. The budget limits the peak of each rank; a share is a share of the peak that a
            rank has without a plan, with the sharding in question. ``Plan.ranks.sharding`` has the placements of the
            parameters. ``"shard"`` among the techniques may be given as well, and means the same.
        host_budget: Limit for the memory of the host that the step takes, for each device: what ``"offload"`` has
            there, an optimizer with state on the host, and what an ``offload_policy`` keeps there. GiB, or a string
            with a unit, or a share of what the device's row says. None: all of that, ``DeviceSpec.host_memory_bytes``.

    Returns:
        The plan: peaks in bytes, times in ms. With ``keep`` or ``never``, ``Plan.lower_bound_ms`` holds for schedules
        that keep the same. A plan that does not fit the device gives a ``SacplanWarning``; this happens if the budget
        leaves too little for what torch reserves beyond the peak.

    Raises:
        BudgetError: The budget cannot be read.
        PlanError: An unknown solver, objective or technique; a pattern that matches nothing; or arguments about a mesh
            that contradict each other.
        TraceError: The model cannot be spread over the ranks in this way.
        InfeasibleBudget: No plan was found that holds the budget, or fits the device. It carries the smallest peak that
            was reached.
    """
    profile = opened(profile, Profile)
    is_smallest, spreads = budget == SMALLEST, asks_for_mesh(mesh, techniques, ranks)
    if is_smallest and spreads:
        raise PlanError(f'budget="{SMALLEST}" is for one device or ranks=, and not for a mesh.')
    limit = Limit(None if is_smallest else budget)
    request = Request(limit, solver, objective, keep, never, techniques, host_budget)
    if is_smallest:
        return handed_out(smallest_plan(request, profile.on_ranks(ranks)), profile)
    if spreads:
        outcome = on_meshes(request, profile, mesh)
    else:
        outcome = outcome_of(request, profile.on_ranks(ranks), looks_further=True)
    return handed_out(outcome.made(), profile)
