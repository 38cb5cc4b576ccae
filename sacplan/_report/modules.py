"""``module_table``: what each module keeps, what it discards, what that costs, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sacplan._plan.plan import Plan
from sacplan._profile.profile import Profile
from sacplan._program.budget import format_bytes
from sacplan._program.program import Phase
from sacplan._report.alive import peak_snapshot
from sacplan._report.inputs import decisions_of_plan
from sacplan._report.kept import KeptAndLeft, Price
from sacplan._report.names import OUTSIDE, module_of, pattern_of, pattern_over, short_op

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("kept_bytes", "discarded_bytes", "recompute_ms", "recompute_share", "forward_ms", "why")
_MINOR = 0.02  # share of what a module discards up to which what it keeps besides needs no reason
_CLOSE = 1.02  # prices nearer to each other than this are the same to a reader


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module: what its own ops make, those of the modules in it not included.

    Attributes:
        module: its name; "" is the model itself.
        kept_bytes: made in the forward pass and held for the backward pass, or for a recipe.
        discarded_bytes: what autograd asked for and does not get kept.
        recompute_ms: of its ops, what runs a second time.
        recompute_share: of all that runs a second time.
        forward_ms: of its ops in the forward pass.
        why: a sentence.
    """

    module: str
    kept_bytes: int
    discarded_bytes: int
    recompute_ms: float
    recompute_share: float
    forward_ms: float
    why: str


def module_table(profile: Profile, plan: Plan | None = None) -> pd.DataFrame:
    """What each module keeps for the backward pass, what it discards, and why; one row per module.

        sacplan.module_table(profile, plan).sort_values("recompute_ms")

    A row counts what the module's own ops make; modules in it have their own rows. So the rows add up to what the
    step holds, and to ``plan.recompute_ms``. What runs outside of the model, such as a loss, has a row as well.

    Args:
        profile: from ``sacplan.profile``.
        plan: made from that profile; without one, what discarding would cost.

    Returns:
        By module, in the order of execution: ``kept_bytes`` (for the backward pass, or to recompute from),
        ``discarded_bytes``, ``recompute_ms``, ``recompute_share``, ``forward_ms`` and ``why``. Prices in ``why`` are of
        the whole row: µs of recomputation that nothing else needs, for a MiB.

    Raises:
        PlanMismatch: the plan was made from another profile.
    """
    import pandas as pd

    rows = module_rows(profile, plan)
    frame = pd.DataFrame(
        [[getattr(row, column) for column in _COLUMNS] for row in rows],
        columns=list(_COLUMNS),
        index=pd.Index([row.module for row in rows], name="module"),
    )
    return frame


def module_rows(profile: Profile, plan: Plan | None = None) -> list[ModuleRow]:
    """The rows of ``module_table``."""
    return _Rows(profile, plan).rows()


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Modules of one pattern with equal rows: ``module`` leaves open the numbers that differ.

    ``row`` is one of theirs; ``count`` of them there are. Sums are ``count`` times what ``row`` has.
    """

    module: str
    count: int
    row: ModuleRow
    members: tuple[str, ...]


def grouped(rows: Iterable[ModuleRow]) -> list[RowGroup]:
    """Rows that are equal in all that is shown of them, together; in the order of their first ones."""
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
    """What belongs to one module."""

    kept: list[int]
    discarded: list[int]
    recompute_ms: float = 0.0
    forward_ms: float = 0.0
    paid: Price | None = None
    asked: Price | None = None
    movable: tuple[int, ...] = ()


class _Rows:
    def __init__(self, profile: Profile, plan: Plan | None) -> None:
        self.program = program = profile.program
        self.plan = plan
        self.at_peak = frozenset(peak_snapshot(profile, plan).storages)
        self.state = state = KeptAndLeft(program, decisions_of_plan(plan))
        self.own: dict[str, _Own] = {scope.fqn: _Own([], []) for scope in program.scopes}
        for i, op in enumerate(program.ops):
            if op.phase == Phase.FORWARD:
                self._of(i).forward_ms += op.time_ms
        for i in state.again:
            self._of(i).recompute_ms += program.ops[i].time_ms
        for s in sorted(state.kept):
            self._of(state.made[s]).kept.append(s)
        for s in sorted(state.discarded):
            self._of(state.made[s]).discarded.append(s)
        for own in self.own.values():
            own.movable = tuple(s for s in own.kept if state.can_go(s))
            if own.discarded:
                own.paid = state.price_paid(own.discarded)
            if own.movable:
                own.asked = state.price_asked(own.movable)
        paid = [o.paid.us_per_mib for o in self.own.values() if o.paid is not None]
        self.dearest_paid = max(paid, default=None)
        self._peaks: dict[tuple[object, ...], int] = {}
        asked = sorted((o.asked.us_per_mib, fqn) for fqn, o in self.own.items() if o.asked is not None)
        self.cheapest_asked = next((price for price, fqn in asked if self._lowers(fqn)), None)

    def _lowers(self, module: str) -> bool:
        """Whether discarding what the module keeps as well would lower the peak: replayed, once for modules alike."""
        own = self.own[module]
        if own.asked is None or self.at_peak.isdisjoint(own.movable):
            return False
        alike = (pattern_of(module), own.asked.n_bytes, len(own.asked.ops))
        if alike not in self._peaks:
            self._peaks[alike] = self.state.peak_with(own.asked.ops)
        return self._peaks[alike] < self.state.replay.peak_bytes

    def _of(self, op: int) -> _Own:
        module = module_of(self.program, op)
        return self.own.setdefault(OUTSIDE if module is None else module, _Own([], []))

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
        if own.paid is not None:
            reasons.append(self._why_discarded(own.paid))
        if kept > _MINOR * discarded:
            reasons.append(self._why_kept(module) if own.movable else self._why_fixed(own.kept))
        if reasons:
            return "; ".join(reasons)
        if own.recompute_ms:
            return (
                "runs again on the way to tensors of other modules; autograd keeps nothing that is made here"
            )
        return "nothing to gain: autograd keeps nothing that is made here"

    def _why_discarded(self, price: Price) -> str:
        if not price.ops:
            n_bytes = format_bytes(price.n_bytes)
            return f"discarded: its {n_bytes} are made on the way to others, at no price of their own"
        said = f"discarded: recomputing it takes {self._cost(price)}"
        if self.cheapest_asked is not None:
            said += f"; the cheapest bytes that are kept would cost {_us(self.cheapest_asked)}"
        return said

    def _why_kept(self, module: str) -> str:
        own = self.own[module]
        if own.asked is None:
            return "kept: what it would be recomputed from is no smaller and would have to be held instead"
        cost = self._cost(own.asked)
        if self.plan is None:
            return f"could be discarded: recomputing it would take {cost}"
        said = f"kept: recomputing it would take {cost}"
        if self.dearest_paid is None:
            return f"{said}; nothing is discarded"
        if self.at_peak.isdisjoint(own.movable):
            return f"{said}, but it is not alive at the peak"
        if not self._lowers(module):
            return f"{said}, but that would not lower the peak"
        if own.asked.us_per_mib * _CLOSE >= self.dearest_paid:
            return f"{said}; the dearest bytes that are discarded cost {_us(self.dearest_paid)}"
        budget = self.plan.budget_bytes
        room = "" if budget is None else f", with {format_bytes(budget - self.plan.peak_bytes)} to spare"
        return (
            f"{said}, less than the dearest bytes that are discarded ({_us(self.dearest_paid)}); "
            f"the plan holds without it{room}"
        )

    def _why_fixed(self, kept: Sequence[int]) -> str:
        program, state = self.program, self.state
        largest = max(kept, key=lambda s: (program.storage_bytes[s], -s))
        op = program.ops[state.made[largest]]
        if largest in state.written:
            return f"not discardable: written in place by {short_op(state.written[largest])}"
        if op.recomputable:
            return "nothing to gain: other code holds it until the backward pass anyway"
        read = next((s for s in op.reads if s in state.written), None)
        if read is not None:
            writer = short_op(state.written[read])
            return f"not discardable: what {short_op(op.name)} reads is written in place by {writer}"
        return f"not discardable: {short_op(op.name)} must not run a second time"

    def _cost(self, price: Price) -> str:
        longest = [op for op in price.ops if self.program.ops[op].time_ms > 0]
        took = _ops_in_words(self.program.ops[op].name for op in longest[:3])
        took += f" and {len(longest) - 3} more" if len(longest) > 3 else ""
        for_what = f"{_ms(price.recompute_ms)} for {format_bytes(price.n_bytes)}"
        return (
            f"{took} ({for_what}, {_us(price.us_per_mib)})"
            if took
            else f"{for_what}, {_us(price.us_per_mib)}"
        )


def _ops_in_words(names: Iterable[str]) -> str:
    counted: Mapping[str, int] = _count(short_op(name) for name in names)
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in counted.items())


def _count(names: Iterable[str]) -> dict[str, int]:
    counted: dict[str, int] = defaultdict(int)
    for name in names:
        counted[name] += 1
    return dict(counted)


def _ms(ms: float) -> str:
    return f"{ms:.2f} ms" if ms >= 0.1 else f"{ms * 1e3:.3g} µs"


def _us(us_per_mib: float) -> str:
    return f"{us_per_mib:.3g} µs/MiB" if us_per_mib < 1000 else f"{us_per_mib:,.0f} µs/MiB"


def totals(rows: Collection[ModuleRow]) -> tuple[int, int, float, float]:
    """Bytes kept and discarded, ms recomputed, and ms of the forward pass, over all rows."""
    return (
        sum(r.kept_bytes for r in rows),
        sum(r.discarded_bytes for r in rows),
        sum(r.recompute_ms for r in rows),
        sum(r.forward_ms for r in rows),
    )
