"""The trade-offs of modules: closure problems taken from a program, solved by ``techniques/recompute/closure.py``.

Repeated layers give the same problem, which is solved once.
"""

from __future__ import annotations

from dataclasses import dataclass

from sacplan.classic.graph import ExactTradeoff
from sacplan.core.program import Program
from sacplan.techniques.recompute import closure
from sacplan.techniques.recompute.in_place_groups import discardable, in_place_groups
from sacplan.techniques.recompute.regions import closure_problem

_MAX_UNIT_OPS = 6000  # modules with more op call sites are not offered as a unit
_MAX_POINTS, _BETWEEN = 16, 2  # of a module's trade-off, see ``closure.tradeoff``


@dataclass(frozen=True, slots=True)
class UnitTradeoff:
    """The trade-offs of one module.

    Attributes:
        fqn: the module.
        saved_bytes: what autograd keeps in it and nothing else keeps alive.
        runtime_ms: time of its forward ops.
        points: reachable trade-offs by increasing ratio, without 'discard nothing'.
    """

    fqn: str
    saved_bytes: int
    runtime_ms: float
    points: tuple[ExactTradeoff, ...]


def unit_tradeoffs(program: Program) -> dict[str, UnitTradeoff]:
    """Return the trade-offs of all modules that have children, in execution order. A forward pass is enough."""
    solved: dict[closure.ClosureProblem, tuple[closure.TradeoffPoint, ...]] = {}
    tradeoffs = {}
    for fqn in program.calls:
        if fqn in program.leaf_fqns:
            continue
        problem = _cut_out(program, fqn)
        # The module keeps nothing, or has too many ops.
        if problem is None:
            continue
        if problem not in solved:
            solved[problem] = closure.tradeoff(problem, _MAX_POINTS, _BETWEEN)
        tradeoffs[fqn] = _tradeoff(fqn, problem, solved[problem])
    return tradeoffs


def _tradeoff(
    fqn: str, problem: closure.ClosureProblem, points: tuple[closure.TradeoffPoint, ...]
) -> UnitTradeoff:
    # The first point discards nothing, so it keeps the whole.
    whole = points[0].kept_bytes
    reached = tuple(
        ExactTradeoff((whole - p.kept_bytes) / whole, p.recompute_ms) for p in points[1:] if whole
    )
    return UnitTradeoff(fqn, whole, sum(op.cost_ms for op in problem.ops), reached)


def _cut_out(program: Program, fqn: str) -> closure.ClosureProblem | None:
    """Return the closure problem of one module over all its calls; None where it keeps nothing or is too large."""
    members = program.call_sites(fqn)
    if not members or len(members) > _MAX_UNIT_OPS:
        return None
    calls = set(program.calls[fqn])
    saved: set[int] = set()
    elsewhere: set[int] = set()
    for storage, scope in zip(program.handle_storages, program.liveness.handle_scopes, strict=True):
        # A storage may be in both sets. Keeping it then costs the module nothing, since others keep it anyway.
        within = not calls.isdisjoint((scope, *program.ancestors(scope)))
        (saved if within else elsewhere).add(storage)
    if not saved:
        return None
    groups = in_place_groups(program, list(members.values()))
    costs = [op.time_ms for op in program.ops]
    problem, _ = closure_problem(
        program, groups, costs, lambda group: discardable(program, group), saved, elsewhere
    )
    return problem
