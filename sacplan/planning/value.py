"""The fields of a plan, their checks, and what follows from them.

``Plan`` adds files and text. The two classes are in separate modules to avoid a cycle of imports: ``Plan`` needs
``reading.py``, which reads these fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec import Struct

from sacplan.core.call_sites import OpSequence, ops_of
from sacplan.core.decisions import (
    Chunk,
    Decision,
    Offload,
    OffloadWeight,
    Partition,
    Recompute,
    Site,
    discarded_by,
)
from sacplan.core.elements import is_inside
from sacplan.core.files import Count, Milliseconds, Name, Positive, Share
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.names import folded_names
from sacplan.core.program import CallSite
from sacplan.device.device_memory import DeviceMemory
from sacplan.distributed.ranks.ranks import ONE_RANK, Ranks
from sacplan.errors import PlanError
from sacplan.planning.provenance import Provenance

Status = Literal["optimal", "feasible", "unplanned", "policy"]


class UnitPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of the decisions in one unit.

    Attributes:
        discard_ratio: Bytes that are discarded, as a share of those that autograd keeps in the unit without a plan.
        recompute_ms: Predicted time of the ops that run again.
        kept: Call sites whose outputs autograd keeps.
        calls: Indices in ``Plan.sequences`` of the op sequences that the calls of the unit run.
        kept_bytes: For each of ``kept``, the bytes that are kept, all calls of the unit together.
        discarded_bytes, discarded_ms: For each decision to recompute, in their order: the bytes that autograd would
            have kept, and the predicted time to run the op again. With 0 bytes, it runs again only for other ops.
    """

    discard_ratio: Share
    recompute_ms: Milliseconds
    kept: tuple[CallSite, ...] = ()
    calls: tuple[Count, ...] = ()
    kept_bytes: tuple[Count, ...] = ()
    discarded_bytes: tuple[Count, ...] = ()
    discarded_ms: tuple[Milliseconds, ...] = ()


class PlanValue(Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """The fields of ``Plan``, where they are documented, and what follows from them.

    Raises:
        PlanError: As for ``Plan``.
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
    waits_ms: float = 0.0
    device_memory: DeviceMemory | None = None
    host_bytes: Count = 0

    def __post_init__(self) -> None:
        # The struct is frozen, and a caller's dict is not.
        msgspec.structs.force_setattr(self, "units", MappingProxyType(dict(self.units)))
        # Units with recipes or copies must not nest. Only units of other techniques alone may: they are not checked.
        in_unit = Recompute | Offload | OffloadWeight
        recorded = {unit for d in self.decisions if isinstance(d, in_unit) for unit in d.units}
        others = {d.unit for d in self.decisions if not isinstance(d, in_unit)}
        for fqn, unit in self.units.items():
            if unit.calls and max(unit.calls) >= len(self.sequences):
                raise PlanError(f"unit {fqn!r} refers to a sequence of ops that the plan does not have.")
        self._check_nesting([fqn for fqn in self.units if fqn in recorded or fqn not in others])
        # A call site has at most one decision to recompute: two would contradict each other. It may have several to
        # copy, since an op may have several tensors.
        seen: set[Site] = set()
        for decision in self.decisions:
            if decision.unit not in self.units:
                raise PlanError(f"there is a decision about {decision}, but no unit {decision.unit!r}.")
            if not isinstance(decision, Recompute):  # only recomputation decides about single call sites
                continue
            if decision.site in seen:
                raise PlanError(
                    f"there are two decisions about {decision.site}; a plan has one for a call site."
                )
            seen.add(decision.site)
        self._check_lengths()
        self._check_sites()

    def _check_nesting(self, units: Collection[str]) -> None:
        """Raise ``PlanError`` if a unit runs inside another: their recipes would overlap."""
        for fqn in units:
            parts = fqn.split(".")
            # The empty name at depth 0 is the model itself, which is around every other unit.
            for depth in range(len(parts)):
                outer, inner = ".".join(parts[:depth]), ".".join(parts[depth:])
                # They do not nest if the outer unit never calls the inner one, as when a loss function calls it.
                if outer in units and outer != fqn and self._calls(outer, inner):
                    raise PlanError(f"units must not nest, but {fqn!r} is inside {outer!r}.")

    def _calls(self, unit: str, inner: str) -> bool:
        """Whether a unit calls its submodule ``inner``. True if the calls of the unit are not known."""
        known = [self.sequences[i] for i in self.units[unit].calls]
        # The number of a later call is cut off: "head.0 (2)" is a call of "head.0".
        callers = {caller.partition(" (")[0] for sequence in known for caller, _, _ in sequence}
        return not known or any(name == inner or is_inside(name, inner) for name in callers)

    def _check_lengths(self) -> None:
        """Raise ``PlanError`` if a unit has figures, but not one for each call site."""
        again = Counter(d.unit for d in self.decisions if isinstance(d, Recompute))
        for fqn, unit in self.units.items():
            wanted = {
                "kept_bytes": len(unit.kept), "discarded_bytes": again[fqn], "discarded_ms": again[fqn],
            }  # fmt: skip
            for name, n in wanted.items():
                if len(getattr(unit, name)) not in (0, n):
                    raise PlanError(f"unit {fqn!r} has {len(getattr(unit, name))} {name} for {n} call sites.")

    def _check_sites(self) -> None:
        """Raise ``PlanError`` for a decision about a call site that no call of its unit has."""
        # By sequence and not by unit: many units run the same one.
        sites = [{site for _, _, site in ops_of(sequence)} for sequence in self.sequences]
        for decision in self.decisions:
            there = [sites[i] for i in self.units[decision.unit].calls]
            # Without recorded calls, as in a plan that was put together by hand, nothing can be checked.
            for site in decision.sites if there else ():
                if not any(site in call for call in there):
                    raise PlanError(_not_run(decision.unit, site, set().union(*there)))

    @property
    def planned_ms(self) -> float:
        """Predicted time of the step with the plan."""
        return self.step_ms + self.recompute_ms + self.added_ms + self.waits_ms

    @property
    def gradients(self) -> Literal["bit-equal", "close"]:
        """``"bit-equal"`` if gradients equal those without the plan; ``"close"`` if they may differ by rounding."""
        return "close" if self.chunks or self.partitions else "bit-equal"

    @property
    def why_gradients(self) -> str:
        """The reason for ``gradients``, in words."""
        if self.partitions:
            return "kernels of the compiler round otherwise where it fuses what runs again"
        if not self.chunks:
            return "what is recomputed runs the same kernels on the same values"
        named = folded_names(dict.fromkeys(chunk.unit for chunk in self.chunks))
        units = ", ".join(name or "the model" for name in named)
        return f"those of parameters in {units} are added up slice by slice, and kernels may round slices otherwise"

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The decisions to run ops in slices."""
        return tuple(one for one in self.decisions if isinstance(one, Chunk))

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """The decisions about what the graphs of ``torch.compile`` save."""
        return tuple(one for one in self.decisions if isinstance(one, Partition))

    @property
    def offloaded(self) -> tuple[Offload, ...]:
        """The decisions to copy tensors to the host."""
        return tuple(one for one in self.decisions if isinstance(one, Offload))

    @property
    def offloaded_weights(self) -> tuple[OffloadWeight, ...]:
        """The decisions to leave parameters on the host."""
        return tuple(one for one in self.decisions if isinstance(one, OffloadWeight))

    @property
    def solver(self) -> str:
        """Name of the solver or policy that made the plan."""
        return self.provenance.solver

    @property
    def discard_ratios(self) -> dict[str, float]:
        """Name of each unit to the share of its activations that is discarded."""
        return {fqn: unit.discard_ratio for fqn, unit in self.units.items()}

    @property
    def discarded(self) -> dict[str, dict[CallSite, int]]:
        """Name of each unit to the call sites that it discards, each with how often its values are dropped."""
        return discarded_by(self.decisions)

    @property
    def recorded(self) -> dict[str, tuple[OpSequence, ...]]:
        """Name of each unit to the op sequences that its calls run in the recorded step."""
        return {fqn: tuple(self.sequences[i] for i in unit.calls) for fqn, unit in self.units.items()}

    @property
    def op_decisions(self) -> dict[Site, str]:
        """``"discard"`` or ``"keep"`` for each call site (with its unit)."""
        found: dict[Site, str] = {}
        for fqn, unit in self.units.items():
            found.update((Site(fqn, *site), "keep") for site in unit.kept)
        found.update((d.site, "discard") for d in self.decisions if isinstance(d, Recompute))
        return found


def _not_run(unit: str, site: CallSite, run: Iterable[CallSite]) -> str:
    """Return the message that no call of a unit runs a call site, with similar sites that it does run."""
    in_place = Counter(one.op for one in run if one.place == site.place)
    places = sorted({one.place for one in run})
    # What the user may have meant: an op at this place if there are any, else a place of the unit.
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
