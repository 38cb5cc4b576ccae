"""``plan``: propose, replay, tighten or widen, until the replayed peak is under the budget.

A solver's memory model is a model; the replay is the step. So a proposal counts only with its
replayed peak, and of all replayed proposals that hold the budget the cheapest is the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sacplan._plan.budget import format_bytes, parse_budget
from sacplan._plan.plan import Plan, UnitPlan
from sacplan._plan.replay import Replay, replay
from sacplan._solve.solvers import Choice, Proposal, Solver, resolve_solver
from sacplan._trace.profile import Profile
from sacplan._trace.recording import Phase
from sacplan.errors import InfeasibleBudget

_ROUNDS = 8  # of asking a solver again
_COARSE = 8  # rungs of a ladder that are tried first
_RELAX_EVENTS = 1_500_000  # events that the replays of the last improvement may go through


@dataclass(frozen=True, slots=True)
class _Tried:
    choice: Choice
    replay: Replay
    status: str
    gap: float | None
    solver: str


@dataclass(slots=True)
class Search:
    """Replays each proposal once and remembers it."""

    profile: Profile
    tried: list[_Tried] = field(default_factory=list)
    _seen: dict[tuple[object, ...], _Tried] = field(default_factory=dict)

    def add(self, proposal: Proposal, solver: str) -> _Tried:
        """Replay a proposal."""
        key = tuple((fqn, point.discarded) for fqn, point in proposal.choice.items())
        known = self._seen.get(key)
        if known is None:
            run = replay(self.profile.recording, {f: p.discarded for f, p in proposal.choice.items()})
            known = _Tried(proposal.choice, run, proposal.status, proposal.gap, solver)
            self._seen[key] = known
            self.tried.append(known)
        return known

    def best(self, budget_bytes: int) -> _Tried | None:
        """The cheapest that holds; the lower peak on a tie."""
        holding = [t for t in self.tried if t.replay.peak_bytes <= budget_bytes]
        return min(holding, key=lambda t: (t.replay.recompute_ms, t.replay.peak_bytes), default=None)

    @property
    def smallest(self) -> _Tried:
        """The lowest peak seen."""
        return min(self.tried, key=lambda t: (t.replay.peak_bytes, t.replay.recompute_ms))


def plan(profile: Profile, budget: float | str, solver: str | Solver = "best") -> Plan:
    """Choose what each module discards, so that the whole step stays under a budget.

        plan = sacplan.plan(profile, budget="22GiB")

    Args:
        profile: from ``sacplan.profile``.
        budget: a number is GiB; a string has a unit (``"22GiB"``, ``"24GB"``), or is a share of the
            unplanned peak (``"60%"``). It bounds the peak of the whole step.
        solver: ``"best"`` (all of them, the cheapest plan wins), ``"milp"``, ``"lagrangian"``, or an object
            such as ``sacplan.Milp(gap=1e-4)``.

    Raises:
        BudgetError: a budget that cannot be read.
        InfeasibleBudget: no plan found holds it; carries the smallest peak that one does.
    """
    budget_bytes = parse_budget(budget, profile.peak_bytes)
    solvers = resolve_solver(profile, solver)
    search = Search(profile)
    unplanned = search.add(Proposal({}, "unplanned"), "none")
    if unplanned.replay.peak_bytes <= budget_bytes:
        return _as_plan(profile, unplanned, budget_bytes)
    for one in solvers:
        _close_loop(search, one, budget_bytes)
    found = search.best(budget_bytes)
    if found is None:
        raise _infeasible(search, solvers, budget_bytes)
    return _as_plan(profile, _relax(search, found, budget_bytes), budget_bytes)


def plan_smallest(profile: Profile, solver: str | Solver = "best") -> Plan:
    """The plan with the smallest peak that the search finds, whatever it recomputes.

    Its ``peak_bytes`` is the ``smallest_feasible_bytes`` that ``InfeasibleBudget`` reports.
    """
    search = Search(profile)
    search.add(Proposal({}, "unplanned"), "none")
    for one in resolve_solver(profile, solver):
        _close_loop(search, one, 1)
    return _as_plan(profile, search.smallest, None)


def _close_loop(search: Search, solver: Solver, budget_bytes: int) -> None:
    """Ask at the budget, then at surrogates moved by what the replay was over or under."""
    surrogate = budget_bytes
    low, high = 0, 2 * search.profile.peak_bytes  # surrogates known to hold, and known not to
    before = None
    for _ in range(_ROUNDS):
        proposal = solver.propose(search.profile, surrogate)
        if proposal is None:
            break
        tried = search.add(proposal, solver.name)
        if tried is before:
            break
        before = tried
        slack = budget_bytes - tried.replay.peak_bytes
        if slack < 0:
            high = min(high, surrogate)
            surrogate = max(surrogate + slack, (low + surrogate) // 2 if low else 0)
        else:
            low = max(low, surrogate)
            if slack < budget_bytes // 500:
                break
            surrogate = min(surrogate + slack, (high + surrogate) // 2)
        if high - low < budget_bytes // 1000 or surrogate <= 0:
            break
    if search.best(budget_bytes) is None:
        _climb_down(search, solver, budget_bytes)


def _climb_down(search: Search, solver: Solver, budget_bytes: int) -> None:
    """The lowest peak on a solver's ladder, coarse to fine; then the mildest rung that holds the budget.

    Peaks fall along a ladder until the working set of the recomputation outweighs what is saved.
    """
    ladder = solver.ladder(search.profile)
    if not ladder:
        return

    def peak(rung: int) -> int:
        return search.add(Proposal(ladder[rung], "feasible"), solver.name).replay.peak_bytes

    last = len(ladder) - 1
    step = max(1, last // _COARSE)
    lowest = min({*range(0, last, step), last}, key=lambda rung: (peak(rung), rung))
    while step > 1:
        step = step // 2
        near = (rung for rung in (lowest - step, lowest, lowest + step) if 0 <= rung <= last)
        lowest = min(near, key=lambda rung: (peak(rung), rung))
    if peak(lowest) > budget_bytes:
        return
    too_mild, holds = -1, lowest
    while holds - too_mild > 1:
        middle = (too_mild + holds) // 2
        if peak(middle) <= budget_bytes:
            holds = middle
        else:
            too_mild = middle


def _relax(search: Search, found: _Tried, budget_bytes: int) -> _Tried:
    """Give back what the budget has room for: single units to cheaper points, the largest saving first.

    A move that does not fit is not tried again, since later moves only add memory.
    """
    tradeoffs = search.profile.tradeoffs
    moves = sorted(
        (
            (point.recompute_ms - milder_ms, fqn, milder)
            for fqn, point in found.choice.items()
            for milder_ms, milder in ((0.0, None), *((p.recompute_ms, p) for p in tradeoffs[fqn].points))
            if milder_ms < point.recompute_ms
        ),
        key=lambda move: -move[0],
    )
    left = max(_RELAX_EVENTS // max(1, len(search.profile.recording.events)), 10)
    for _, fqn, milder in moves[:left]:
        now = found.choice.get(fqn)
        if now is None or (milder is not None and milder.recompute_ms >= now.recompute_ms):
            continue  # already better off
        choice = {f: p for f, p in found.choice.items() if f != fqn}
        if milder is not None:
            choice = {f: milder if f == fqn else p for f, p in found.choice.items()}
        solver = found.solver.removesuffix("+relax") + "+relax"
        tried = search.add(Proposal(choice, "feasible"), solver)
        fits = tried.replay.peak_bytes <= budget_bytes
        if fits and tried.replay.recompute_ms < found.replay.recompute_ms:
            found = tried
    return found


def _infeasible(search: Search, solvers: list[Solver], budget_bytes: int) -> InfeasibleBudget:
    smallest = search.smallest
    run = smallest.replay
    if run.peak_phase == Phase.OPTIMIZER:
        binding = "optimizer step"
    else:
        op = search.profile.recording.ops[run.peak_op]
        binding = run.peak_fqn or ("the loss, outside of any module" if op.scope < 0 else "the model itself")
    where = f"{run.peak_phase.name.lower()} of {binding}" if binding != "optimizer step" else binding
    names = " and ".join(s.name for s in solvers)
    return InfeasibleBudget(
        f"no plan found keeps the step under {format_bytes(budget_bytes)} (solvers: {names}). The smallest peak "
        f"reached is {format_bytes(run.peak_bytes)} ({run.peak_bytes} bytes), in the {where}. Give at least "
        f'budget="{run.peak_bytes}B", or make the batch smaller.',
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=run.peak_bytes,
        binding=binding,
    )


def _as_plan(profile: Profile, found: _Tried, budget_bytes: int | None) -> Plan:
    units = {}
    for fqn, tradeoff in profile.tradeoffs.items():
        point = found.choice.get(fqn)
        if point is not None and point.discarded:
            gone = set(point.discarded)
            units[fqn] = UnitPlan(
                discard_ratio=point.discard_ratio,
                recompute_ms=point.recompute_ms,
                discarded=point.discarded,
                kept=tuple(s for s in tradeoff.saved_sites if s not in gone),
            )
    return Plan(
        units=units,
        peak_bytes=found.replay.peak_bytes,
        baseline_peak_bytes=profile.peak_bytes,
        budget_bytes=budget_bytes,
        recompute_ms=found.replay.recompute_ms,
        recompute_flops=found.replay.recompute_flops,
        step_ms=profile.step_ms,
        step_flops=profile.recording.flops,
        status=found.status,
        gap=found.gap,
        solver=found.solver,
        device=profile.device,
        fingerprint=profile.fingerprint,
    )
