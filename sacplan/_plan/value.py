"""The fields of a plan, checked, and what follows from them: what a plan says about itself in words reads these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec import Struct

from sacplan._plan.provenance import Provenance
from sacplan._program.decisions import Chunk, Decision, Recompute, Site, discarded_by
from sacplan._program.files import Count, Milliseconds, Name, Positive, Share
from sacplan._program.fingerprint import Fingerprint
from sacplan._program.names import folded_names
from sacplan._program.places import OpSequence, ops_of
from sacplan._program.program import CallSite
from sacplan._ranks.ranks import ONE_RANK, Ranks
from sacplan.errors import PlanError

Status = Literal["optimal", "feasible", "unplanned", "policy"]


class UnitPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """What the decisions come to in one unit.

    Attributes:
        discard_ratio: share of what autograd keeps in the unit that is not kept.
        recompute_ms: predicted time of what runs again.
        kept: call sites whose outputs autograd keeps.
        calls: which of ``Plan.sequences`` the unit's calls run.
        kept_bytes: bytes of what is kept, for each of ``kept``, all calls of the unit together.
        discarded_bytes, discarded_ms: for each decision to recompute, in their order: bytes that autograd asks for and
            does not get kept, and the predicted time to run the op again. 0 bytes: it runs again for other ops alone.
    """

    discard_ratio: Share
    recompute_ms: Milliseconds
    kept: tuple[CallSite, ...] = ()
    calls: tuple[Count, ...] = ()
    kept_bytes: tuple[Count, ...] = ()
    discarded_bytes: tuple[Count, ...] = ()
    discarded_ms: tuple[Milliseconds, ...] = ()


class PlanValue(Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """The fields of ``Plan``, which says what they are, and what follows from them.

    Raises:
        PlanError: as ``Plan``.
    """

    status: Status
    gap: Milliseconds | None
    peak_bytes: Count
    baseline_peak_bytes: Count
    budget_bytes: Positive | None
    recompute_ms: Milliseconds
    recompute_flops: Count
    lower_bound_ms: Milliseconds
    step_ms: Milliseconds
    step_flops: Count
    device: Name
    ranks: Ranks = ONE_RANK
    provenance: Provenance
    decisions: tuple[Decision, ...]
    units: Mapping[str, UnitPlan]
    fingerprint: Fingerprint
    sequences: tuple[OpSequence, ...] = ()
    added_ms: float = 0.0

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "units", MappingProxyType(dict(self.units)))
        others = {d.unit for d in self.decisions if not isinstance(d, Recompute)}
        recompute = {d.unit for d in self.decisions if isinstance(d, Recompute)}
        _check_nesting([fqn for fqn in self.units if fqn in recompute or fqn not in others])
        for fqn, unit in self.units.items():
            if unit.calls and max(unit.calls) >= len(self.sequences):
                raise PlanError(f"unit {fqn!r} refers to a sequence of ops that the plan does not have.")
        seen: set[Site] = set()
        for decision in self.decisions:
            if decision.unit not in self.units:
                raise PlanError(f"there is a decision about {decision}, but no unit {decision.unit!r}.")
            if not isinstance(decision, Recompute):
                continue
            if decision.site in seen:
                raise PlanError(
                    f"there are two decisions about {decision.site}; a plan has one for a call site."
                )
            seen.add(decision.site)
        self._check_lengths()
        self._check_sites()

    def _check_lengths(self) -> None:
        """``PlanError`` where a unit has figures for other call sites than it has; it may have none."""
        again = Counter(d.unit for d in self.decisions if isinstance(d, Recompute))
        for fqn, unit in self.units.items():
            wanted = {
                "kept_bytes": len(unit.kept), "discarded_bytes": again[fqn], "discarded_ms": again[fqn],
            }  # fmt: skip
            for name, n in wanted.items():
                if len(getattr(unit, name)) not in (0, n):
                    raise PlanError(f"unit {fqn!r} has {len(getattr(unit, name))} {name} for {n} call sites.")

    def _check_sites(self) -> None:
        """``PlanError`` for a call site that no call of its unit has; the calls of a unit may not be known."""
        sites = [{site for _, _, site in ops_of(sequence)} for sequence in self.sequences]
        for decision in self.decisions:
            there = [sites[i] for i in self.units[decision.unit].calls]
            for site in decision.sites if there else ():
                if not any(site in call for call in there):
                    raise PlanError(_not_run(decision.unit, site, set().union(*there)))

    @property
    def gradients(self) -> Literal["bit-equal", "close"]:
        """Whether gradients are those of the step without the plan, bit by bit, or differ by rounding."""
        return "close" if self.chunks else "bit-equal"

    @property
    def why_gradients(self) -> str:
        """Why gradients are what ``gradients`` says, in words."""
        if not self.chunks:
            return "what is recomputed runs the same kernels on the same values"
        named = folded_names(dict.fromkeys(chunk.unit for chunk in self.chunks))
        units = ", ".join(name or "the model" for name in named)
        return f"those of parameters in {units} are added up slice by slice, and kernels may round slices otherwise"

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What runs in slices."""
        return tuple(one for one in self.decisions if isinstance(one, Chunk))

    @property
    def solver(self) -> str:
        """Name of the solver or policy that made it."""
        return self.provenance.solver

    @property
    def discard_ratios(self) -> dict[str, float]:
        """Unit to the share of its activations that is discarded."""
        return {fqn: unit.discard_ratio for fqn, unit in self.units.items()}

    @property
    def discarded(self) -> dict[str, dict[CallSite, int]]:
        """Unit to the call sites that it discards, each with the number of times that its values are dropped."""
        return discarded_by(self.decisions)

    @property
    def recorded(self) -> dict[str, tuple[OpSequence, ...]]:
        """By unit, the ops that its calls run in the recorded step."""
        return {fqn: tuple(self.sequences[i] for i in unit.calls) for fqn, unit in self.units.items()}

    @property
    def op_decisions(self) -> dict[Site, str]:
        """(fqn of the unit, op name, occurrence, place) to ``"discard"`` or ``"keep"``."""
        found: dict[Site, str] = {}
        for fqn, unit in self.units.items():
            found.update((Site(fqn, *site), "keep") for site in unit.kept)
        found.update((d.site, "discard") for d in self.decisions if isinstance(d, Recompute))
        return found


def _not_run(unit: str, site: CallSite, run: Iterable[CallSite]) -> str:
    """That no call of a unit has a call site, and what there is instead."""
    in_place = Counter(one.op for one in run if one.place == site.place)
    places = sorted({one.place for one in run})
    if in_place:
        there = ", ".join(op if n == 1 else f"{op} x{n}" for op, n in sorted(in_place.items()))
        there = f"there it runs {there}"
    else:
        there = f"it has no such place, but {', '.join(map(repr, places[:9]))}{', ...' if places[9:] else ''}"
    return (
        f"there is a decision about {site.op} (number {site.occurrence}, place {site.place!r}) in unit {unit!r}, but "
        f"in the recorded step the unit runs no such op, views aside: {there}. Numbers begin at 0. Make the plan for "
        "this model with sacplan.plan, or decide about call sites of `plan.op_decisions`."
    )


def _check_nesting(units: Collection[str]) -> None:
    """``PlanError`` where a unit that recomputes is inside another: their recipes would overlap."""
    for fqn in units:
        parts = fqn.split(".")
        for depth in range(len(parts)):
            outer = ".".join(parts[:depth])
            if outer in units and outer != fqn:
                raise PlanError(f"units must not nest, but {fqn!r} is inside {outer!r}.")
