"""What each module keeps and discards, what that costs, and the reason for it.

``KeptAndDiscarded`` finds what a plan keeps from the forward to the backward pass, and what either costs. Both costs
are those of ops that run for the given storages alone. ``cost_paid`` walks from discarded storages towards
the inputs, over ops that run again and that no other recomputed op needs. ``cost_of_discarding`` walks from kept
storages to what is still held. It subtracts the outputs of ops that cannot run again, which would have to be held.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sacplan.core.budget import format_bytes, format_difference
from sacplan.core.decisions import Discarded
from sacplan.core.elements import pattern_of
from sacplan.core.names import OUTSIDE, module_of, pattern_over, short_op
from sacplan.core.program import ROOT_SCOPE, Event, Phase, Program
from sacplan.planning.plan import Plan
from sacplan.profiling.profile import Profile
from sacplan.questions.alive import alive_at
from sacplan.questions.planned import planned
from sacplan.techniques.recompute.rewrite import discarded_ops, recompute_ops

_NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of recomputing some storages.

    Attributes:
        recompute_ms: time of the ops that have to run again for these storages and for nothing else.
        n_bytes: bytes that are freed, less those that have to be held instead.
        ops: these ops, the longest first.
    """

    recompute_ms: float
    n_bytes: int
    ops: tuple[int, ...]

    @property
    def us_per_mib(self) -> float:
        """Microseconds of recomputation per MiB."""
        return self.recompute_ms * 1e3 / (self.n_bytes / 2**20)


class KeptAndDiscarded:
    """The storages that a step with a plan holds from the forward to the backward pass, and those that it discards.

    Args:
        program: the step with the chunks of the plan, but without its recomputation.
        planned: the step with the whole plan.
        discarded: call sites that the plan discards.

    Attributes:
        asked: storages that autograd asks for.
        kept: storages made in the forward pass that are held for the backward pass or for a recipe.
        discarded: those that autograd asked for and that are held nowhere.
        again: the ops that run a second time, one entry per run.
    """

    def __init__(self, program: Program, planned: Program, discarded: Discarded) -> None:
        self.program = program
        self.ops_discarded = discarded_ops(program, discarded)
        self.footprint = planned.footprint
        self.again = self.footprint.again
        self._again = frozenset(self.again)
        self.made = {s: op for s, op in program.writer.items() if program.ops[op].phase == Phase.FORWARD}
        # Packed without the plan: autograd asks for it. Packed with it: the plan holds it.
        asked, held = (
            {p.handle_storages[arg] for code, arg in p.events if code == Event.PACK}
            for p in (program, planned)
        )
        self.asked = frozenset(asked)
        self.kept = frozenset(held & self.made.keys())
        self.discarded = frozenset((asked - held) & self.made.keys())

    @cached_property
    def written(self) -> Mapping[int, str]:
        """Storages that an op writes in place before the optimizer step, with the name of such an op."""
        return {s: op.name for op in self.program.ops if op.phase != Phase.OPTIMIZER for s in op.mutates}

    @cached_property
    def _readers_again(self) -> Mapping[int, frozenset[int]]:
        readers: dict[int, set[int]] = defaultdict(set)
        for op in self._again:
            for s in self.program.ops[op].reads:
                readers[s].add(op)
        return {s: frozenset(ops) for s, ops in readers.items()}

    def n_bytes(self, storages: Iterable[int]) -> int:
        """Return the bytes of these storages together."""
        return sum(self.program.storage_bytes[s] for s in storages)

    def cost_paid(self, storages: Collection[int]) -> Cost:
        """Return the cost that keeping these discarded storages would save."""
        ops = self.program.ops
        wanted = set(storages)
        candidates = [self.made[s] for s in wanted]
        only: set[int] = set()
        # Towards the inputs. An op is counted once all that reads its other outputs again is counted too.
        while candidates:
            op = candidates.pop()
            # Counted already, or it runs once anyway.
            if op in only or op not in self._again:
                continue
            others = [s for s in ops[op].writes if s not in wanted]
            # It also runs for another discarded storage, or for an op that would run again in any case:
            # keeping these storages would not save it. It comes back as a candidate when its other readers
            # have been counted.
            if any(s in self.discarded or not self._readers_again.get(s, _NOBODY) <= only for s in others):
                continue
            only.add(op)
            candidates.extend(self.made[s] for s in ops[op].reads if s in self.made and s not in self.kept)
        return self._cost(only, self.n_bytes(wanted))

    def cost_of_discarding(self, storages: Collection[int]) -> Cost | None:
        """Return the cost of discarding these kept storages as well, or None if that would free nothing.

        Their recipes would start from what is held already, and from outputs of ops that cannot run again, which would
        have to be held instead.
        """
        program, gone = self.program, set(storages)
        more: set[int] = set()
        instead: set[int] = set()
        stack = [self.made[s] for s in gone]
        while stack:
            op = stack.pop()
            # Walked already, or running again anyway, so at no further cost.
            if op in more or op in self._again:
                continue
            more.add(op)
            for s in program.ops[op].reads:
                maker = self.made.get(s)
                if (
                    maker is None
                    or (s in self.kept and s not in gone)
                    or s in program.liveness.outlives_forward
                ):
                    continue
                # Go on towards the inputs, or stop at what cannot run again: its output has to be held
                # instead.
                if program.ops[maker].recomputable:
                    stack.append(maker)
                else:
                    instead.add(s)
        # A discarded tensor's recipe may start from one of these: then that one's inputs are asked for as well,
        # which the walk above has covered, since it goes on until something is held.
        freed = self.n_bytes(gone) - self.n_bytes(instead)
        # Holding what recipes start from may take as much as is freed.
        return self._cost(more, freed) if freed > 0 else None

    def discardable(self, storage: int) -> bool:
        """Return whether a kept storage could be discarded, and whether that would free it."""
        op = self.program.ops[self.made[storage]]
        return op.recomputable and storage not in self.program.liveness.outlives_forward

    def peak_with(self, ops: Collection[int]) -> int:
        """Return the peak if the outputs of these ops were discarded as well, with the whole model as one unit."""
        program = self.program
        units = {i for i, scope in enumerate(program.scopes) if scope.parent == ROOT_SCOPE}
        # The plan's own numbers of times win over 1.
        discarded = dict.fromkeys(ops, 1) | self.ops_discarded
        return program.with_(recompute_ops(program, discarded, units)).footprint.peak_bytes

    def _cost(self, ops: Collection[int], n_bytes: int) -> Cost:
        times = {op: self.program.ops[op].time_ms for op in ops}
        ordered = tuple(sorted(ops, key=lambda op: (-times[op], op)))
        return Cost(sum(times[op] for op in ordered), n_bytes, ordered)


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
        # The strongest reason that applies: nothing is discarded at all, it is not alive at the peak, it does not
        # lower the peak, it costs more than anything discarded. The weakest comes last: the plan fits without it.
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
