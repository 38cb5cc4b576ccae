"""Which ops of one module to save within a share of its memory: the prototype's program per module.

Source: PyTorch PR #137908, after xformers' ``selective_checkpoint``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sacplan.classic.graph import SACStats
from sacplan.core.arguments import checked, fits
from sacplan.core.budget import format_bytes
from sacplan.errors import BudgetError, InfeasibleBudget, PlanError, SolverError
from sacplan.solvers.milp import Milp
from sacplan.solvers.mip import WORK_LIMIT, check_options
from sacplan.solvers.problem import DEVICE_MEMORY, Choice, Problem, ResourceRow


@checked(PlanError, "memory_budget")
def get_optimal_checkpointing_policy_per_module(
    sac_stats: SACStats,
    memory_budget: float,
    *,
    gap: float = 1e-4,
) -> list[int]:
    """Choose which of a module's ops to save (1) and which to recompute (0), with the least recompute time.

    The constraints are those of PR #137908, after xformers: random ops go together (all saved if
    ``force_store_random``), view-like ops are recomputed, an in-place op goes with the op whose output it
    writes, or is saved where that is unknown.

    Args:
        sac_stats: the module's ops.
        memory_budget: share of the ops' total memory that may be saved, in [0, 1].
        gap: relative gap at which a policy counts as optimal.

    Raises:
        BudgetError: the share is not in [0, 1].
        InfeasibleBudget: the ops that must be saved take more.
        PlanError: statistics that contradict each other.
        SolverError: no policy found with the work of ``WORK_LIMIT``.
    """
    if not fits(memory_budget, float) or not 0 <= memory_budget <= 1:
        raise BudgetError(f"memory budget {memory_budget!r} is not a share in [0, 1] of the module's memory")
    check_options(gap, WORK_LIMIT, 0)
    group = _op_groups(sac_stats)
    ops = range(len(group))
    # An in-place op that is paired with itself: it is not known what made the tensor that it writes, so it is kept.
    saved = {group[op] for op, parent in sac_stats.inplace_ops if op == parent}
    if sac_stats.force_store_random:
        saved |= {group[op] for op in sac_stats.rand_ops}
    recomputed = {group[op] for op in sac_stats.view_like_ops}
    for op in ops:
        if group[op] in saved & recomputed:
            raise PlanError(
                f"op {op} ({sac_stats.func_names[op]}) has to be saved, as a random or in-place op, and "
                "recomputed, as a view-like op or one that goes with it; correct the statistics"
            )

    memory = dict.fromkeys(group, 0)
    for op in ops:
        memory[group[op]] += sac_stats.memory[op]
    budget_bytes = math.ceil(memory_budget * sum(sac_stats.memory))
    needed = sum(memory[g] for g in saved)
    if needed > budget_bytes:
        largest = max((op for op in ops if group[op] in saved), key=lambda op: sac_stats.memory[op])
        raise InfeasibleBudget(
            f"{format_bytes(budget_bytes)} ({budget_bytes} B) may be saved, but random and in-place ops that must be "
            f"take {format_bytes(needed)} ({needed} B; the largest: op {largest}, {sac_stats.func_names[largest]}); "
            f"raise the budget to {needed / sum(sac_stats.memory):.4f} or recompute random ops",
            budget_bytes=budget_bytes,
            smallest_feasible_bytes=needed,
            binding=sac_stats.func_names[largest],
        )
    undecided = [g for g in memory if g not in saved and g not in recomputed]
    runtime = {g: math.fsum(sac_stats.runtimes[op] for op in ops if group[op] == g) for g in undecided}
    saved |= _knapsack(
        [(g, memory[g], runtime[g]) for g in undecided],
        budget_bytes - needed,
        Milp(gap),
    )
    return [int(group[op] in saved) for op in ops]


def _op_groups(sac_stats: SACStats) -> list[int]:
    """Return, for each op, the first op that it is decided with."""
    n_ops = len(sac_stats.func_names)
    pairs = list(sac_stats.inplace_ops)
    if not sac_stats.force_store_random:
        pairs += zip(sac_stats.rand_ops[:-1], sac_stats.rand_ops[1:], strict=True)
    mentioned = {*sac_stats.view_like_ops, *sac_stats.rand_ops, *(op for pair in pairs for op in pair)}
    if outside := sorted(op for op in mentioned if not 0 <= op < n_ops):
        raise PlanError(f"op indices {outside[:5]} are not among the {n_ops} ops")
    group = list(range(n_ops))
    # Each pair joins two groups under the smaller number, which is thus the first op. Quadratic, for the ops of
    # one module.
    for one, other in pairs:
        first, second = sorted((group[one], group[other]))
        group = [first if g == second else g for g in group]
    return group


def _knapsack(items: Sequence[tuple[int, int, float]], budget_bytes: int, options: Milp) -> set[int]:
    """Return the keys of the items (key, bytes, ms) that fit and are worth the most ms.

    Each item is a choice of two options: keep it, or leave it out, which costs its ms and frees its bytes.
    """
    sizes = np.array([[n_bytes] for _, n_bytes, _ in items], dtype=np.int64).reshape(-1, 1)
    choices = tuple(
        Choice((n_bytes, ms), np.array([0.0, ms]), np.array([[0], [-n_bytes]]), np.array([n_bytes, 0]))
        for _, n_bytes, ms in items
    )
    row, limit = ResourceRow(DEVICE_MEMORY, 0, 1), np.array([budget_bytes], dtype=np.int64)
    solution = options.solve(Problem((row,), sizes.sum(axis=0), limit, choices))
    if solution is None or solution.status == "unknown":
        raise SolverError(
            f"no policy for {len(items)} ops was found with the work of {options.work_limit} (nodes x nonzeros); "
            "give a larger gap"
        )
    return {key for i, (key, _, _) in enumerate(items) if not solution.picks.get(i)}
