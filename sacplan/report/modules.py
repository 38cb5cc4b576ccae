"""What each module keeps and discards, what that costs, and the reason for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sacplan.core.budget import format_bytes, format_difference
from sacplan.core.elements import pattern_of
from sacplan.core.names import OUTSIDE, module_of, pattern_over, short_op
from sacplan.core.program import Event, Phase
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.questions.alive import alive_at
from sacplan.questions.planned import planned
from sacplan.report.kept import Cost, KeptAndDiscarded

NOTHING = "keeps nothing for the backward pass"
"""The reason for a module that has nothing to discard."""

_MINOR = 0.02  # a module that keeps less than this share of what it discards needs no reason for it
_CLOSE = 1.02  # costs whose ratio is smaller look equal when they are printed


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module, counting what its own ops make; modules inside it have their own rows.

    Attributes:
        module: its name; "" is the model itself.
        kept_bytes: bytes that are made in the forward pass and held for the backward pass, or for a recipe.
        discarded_bytes: bytes that autograd would save and that the plan discards.
        recompute_ms: time of its ops that run a second time.
        recompute_share: the same as a share of all recomputation.
        forward_ms: time of its ops in the forward pass.
        why: a sentence.
    """

    module: str
    kept_bytes: int
    discarded_bytes: int
    recompute_ms: float
    recompute_share: float
    forward_ms: float
    why: str


def module_rows(profile: Profile, plan: Plan | None = None) -> list[ModuleRow]:
    """Return what each module keeps and discards, in the order of execution."""
    return _Rows(profile, plan).rows()


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Modules of one pattern with equal rows: ``module`` has ``*`` for the numbers that differ.

    ``row`` is the row of one of them. Sums over the group are ``count`` times its values.
    """

    module: str
    count: int
    row: ModuleRow
    members: tuple[str, ...]


def grouped(rows: Iterable[ModuleRow]) -> list[RowGroup]:
    """Group rows that look the same, in the order of their first members."""
    found: dict[tuple[object, ...], list[ModuleRow]] = defaultdict(list)
    for row in rows:
        n_bytes = (row.kept_bytes, row.discarded_bytes)
        times = (round(row.recompute_ms, 6), round(row.forward_ms, 6))
        found[pattern_of(row.module), n_bytes, times, row.why].append(row)
    return [
        RowGroup(pattern_over(r.module for r in same), len(same), same[0], tuple(r.module for r in same))
        for same in found.values()
    ]


@dataclass(slots=True)
class _Own:
    """The storages, times and costs of one module.

    ``discardable`` are kept storages that could be discarded as well; ``cost`` is the cost of that. ``paid`` is the
    cost of recomputing the storages that are discarded.
    """

    kept: list[int] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    discardable: list[int] = field(default_factory=list)
    recompute_ms: float = 0.0
    forward_ms: float = 0.0
    paid: Cost | None = None
    cost: Cost | None = None


class _Rows:
    def __init__(self, profile: Profile, plan: Plan | None) -> None:
        with_plan = planned(profile, plan)
        if profile.runs_compiled:  # what is compiled with a plan is another program, and has the plan in it
            self.program, plan = with_plan, None
        else:
            # With the chunks of the plan, but without its recomputation.
            self.program = profile.with_plan(() if plan is None else plan.chunks)
        program = self.program
        self.plan = plan
        self.at_peak = alive_at(with_plan, with_plan.footprint.peak_op)
        self.state = state = KeptAndDiscarded(program, with_plan, plan.discarded if plan else {})
        self.own = {scope.fqn: _Own() for scope in program.scopes}
        # Not ``program.ops``: ops that run in slices are listed there, but do not run.
        for code, i in program.events:
            if code == Event.OP and program.ops[i].phase == Phase.FORWARD:
                self._of(i).forward_ms += program.ops[i].time_ms
        self.sliced = self._sliced(profile)
        for i in state.again:
            self._of(i).recompute_ms += program.ops[i].time_ms
        for s in sorted(state.kept):
            self._of(state.made[s]).kept.append(s)
        for s in sorted(state.discarded):
            self._of(state.made[s]).discarded.append(s)
        for own in self.own.values():
            own.discardable = [s for s in own.kept if state.discardable(s)]
            if own.discarded:
                own.paid = state.cost_paid(own.discarded)
            if own.discardable:
                own.cost = state.cost_of_discarding(own.discardable)
        self.most_paid = max((o.paid.us_per_mib for o in self.own.values() if o.paid), default=None)
        self._peaks: dict[tuple[object, ...], int] = {}
        costs = sorted((o.cost.us_per_mib, fqn) for fqn, o in self.own.items() if o.cost)
        # In order of cost, and lazily: ``_lowers`` makes a program for each kind of module that it is asked
        # about.
        self.cheapest = next((cost for cost, fqn in costs if self._lowers(fqn)), None)

    def _sliced(self, profile: Profile) -> dict[str, int]:
        """Return by module the bytes that autograd would save of ops in slices. They never exist as a whole."""
        recorded, found = profile.program, dict[str, int]()
        runs = {i for code, i in self.program.events if code == Event.OP}
        # What autograd saves of the recorded step and no longer does with chunks.
        asked = set(recorded.handle_storages) - self.state.asked
        for i, op in enumerate(recorded.ops):
            if op.phase == Phase.FORWARD and i not in runs:
                module = module_of(recorded, i)
                n_bytes = sum(recorded.storage_bytes[s] for s in op.writes if s in asked)
                name = OUTSIDE if module is None else module
                found[name] = found.get(name, 0) + n_bytes
        return found

    def _lowers(self, module: str) -> bool:
        """Return whether discarding what the module keeps would lower the peak, computed once for modules alike."""
        own = self.own[module]
        # Discarding frees nothing, or nothing that is alive at the peak: no need to try it.
        if own.cost is None or self.at_peak.isdisjoint(own.discardable):
            return False
        # Equal layers have equal peaks: one program for all of them.
        alike = (pattern_of(module), own.cost.n_bytes, len(own.cost.ops))
        if alike not in self._peaks:
            self._peaks[alike] = self.state.peak_with(own.cost.ops)
        return self._peaks[alike] < self.state.footprint.peak_bytes

    def _of(self, op: int) -> _Own:
        module = module_of(self.program, op)
        return self.own.setdefault(OUTSIDE if module is None else module, _Own())

    def rows(self) -> list[ModuleRow]:
        total = sum(own.recompute_ms for own in self.own.values())
        return [
            ModuleRow(
                module=module,
                kept_bytes=self.state.n_bytes(own.kept),
                discarded_bytes=self.state.n_bytes(own.discarded),
                recompute_ms=own.recompute_ms,
                recompute_share=own.recompute_ms / total if total else 0.0,
                forward_ms=own.forward_ms,
                why=self._why(module),
            )
            for module, own in self.own.items()
        ]

    def _why(self, module: str) -> str:
        own = self.own[module]
        kept, discarded = (self.state.n_bytes(storages) for storages in (own.kept, own.discarded))
        reasons = []
        sliced = self.sliced.get(module, 0)
        if sliced:
            reasons.append(f"in slices: its {format_bytes(sliced)} never exist as a whole")
        elif module in self.sliced:
            reasons.append("in slices")
        if own.paid is not None:
            reasons.append(self._why_discarded(own.paid))
        # A small rest beside what is discarded would make the sentence longer and not clearer.
        if kept > _MINOR * (discarded + sliced):
            reasons.append(self._why_kept(module) if own.discardable else self._why_fixed(own.kept))
        if reasons:
            return "; ".join(reasons)
        # Its own tensors are not asked for, but recipes of others go through it.
        if own.recompute_ms:
            return "runs again for other modules; keeps nothing for the backward pass itself"
        return NOTHING

    def _why_discarded(self, cost: Cost) -> str:
        # All ops behind it run again for others.
        if not cost.ops:
            n_bytes = format_bytes(cost.n_bytes)
            return f"discarded at no extra cost: what makes its {n_bytes} runs again for other modules anyway"
        took = f"takes {_ms(cost.recompute_ms)} and saves {format_bytes(cost.n_bytes)}"
        beside = "" if self.cheapest is None else f"; what is kept would cost {_us(self.cheapest)} or more"
        return f"discarded: running {self._ops(cost)} again {took} ({_us(cost.us_per_mib)} per MiB{beside})"

    def _why_kept(self, module: str) -> str:
        own = self.own[module]
        # Recipes would have to hold as much as is freed.
        if own.cost is None:
            return "kept: it could only be recomputed from tensors that are no smaller"
        took = f"would take {_ms(own.cost.recompute_ms)} and save {format_bytes(own.cost.n_bytes)}"
        again = f"running {self._ops(own.cost)} again {took}"
        if self.plan is None:
            return f"could be discarded: {again} ({_us(own.cost.us_per_mib)} per MiB)"
        said = f"kept: {again}"
        # The plan discards nothing. The exits that follow go from the strongest reason to the weakest: not
        # alive at the peak, does not lower it, costs more than what was discarded, and at last that the plan
        # fits without it.
        if self.most_paid is None:
            return f"{said}, and the step fits without"
        if self.at_peak.isdisjoint(own.discardable):
            return f"{said}, but not at the peak, where it is not alive"
        if not self._lowers(module):
            return f"{said}, but would not lower the peak"
        price = f"({_us(own.cost.us_per_mib)} per MiB; what is discarded costs {_us(self.most_paid)} at most)"
        if own.cost.us_per_mib * _CLOSE >= self.most_paid:
            return f"{said} {price}"
        budget = self.plan.budget_bytes
        room = "" if budget is None else f", with {format_difference(budget, self.plan.peak_bytes)} to spare"
        return f"{said} {price}, but the plan fits without{room}"

    def _why_fixed(self, kept: Sequence[int]) -> str:
        program, state = self.program, self.state
        largest = max(kept, key=lambda s: (program.storage_bytes[s], -s))
        op = program.ops[state.made[largest]]
        # Of the largest one alone: a sentence has room for one reason. In-place writes first, then code that
        # holds the tensor, then an input that is overwritten, then the op itself.
        if largest in state.written:
            return f"kept: {short_op(state.written[largest])} writes it in place"
        if op.recomputable:
            return "kept: other code holds it until the backward pass anyway"
        read = next((s for s in op.reads if s in state.written), None)
        if read is not None:
            writer = short_op(state.written[read])
            return f"kept: {writer} writes in place what {short_op(op.name)} reads"
        return f"kept: {short_op(op.name)} must not run a second time"

    def _ops(self, cost: Cost) -> str:
        longest = [op for op in cost.ops if self.program.ops[op].time_ms > 0]
        named = _ops_in_words(self.program.ops[op].name for op in longest[:3])
        return named + (f" and {len(longest) - 3} more" if len(longest) > 3 else "") or "views"


def _ops_in_words(names: Iterable[str]) -> str:
    counted = Counter(short_op(name) for name in names)
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in counted.items())


def _ms(ms: float) -> str:
    return f"{ms:.2f} ms" if ms >= 0.1 else f"{ms * 1e3:.3g} µs"


def _us(us_per_mib: float) -> str:
    return f"{us_per_mib:.3g} µs" if us_per_mib < 1000 else f"{us_per_mib:,.0f} µs"
