"""A plan: decisions about the ops of a step, and what they give."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from sacplan._plan.provenance import Provenance
from sacplan._plan.reading import as_text, plan_sections
from sacplan._program import files
from sacplan._program.arguments import checked
from sacplan._program.budget import format_bytes
from sacplan._program.decisions import Chunk, Decision, Recompute, Site, discarded_by
from sacplan._program.files import Count, Milliseconds, Name, Positive, Share
from sacplan._program.fingerprint import Fingerprint
from sacplan._program.names import folded_names
from sacplan._program.notebook import as_html
from sacplan._program.places import OpSequence, ops_of
from sacplan._program.program import CallSite
from sacplan._ranks.ranks import ONE_RANK, Ranks
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 4

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


class Plan(Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """What each module discards, and the peak and recomputation of the step with it.

    Frozen; ``save`` and ``load`` it as JSON, ``msgspec.structs.replace`` makes a changed one. Plans are equal
    whatever their provenance.

    Attributes:
        status: "optimal" (among the options of the regions, to ``gap``), "feasible", "unplanned", or "policy" (made by
            rule, see ``sacplan.policy``).
        gap: relative gap that the solver proved; None where it proved nothing.
        peak_bytes: peak of the whole step with the plan.
        baseline_peak_bytes: the same without it.
        budget_bytes: what the peak must not exceed: the budget that was asked for, or the device's memory less the
            headroom; None for a plan that was not made for a budget (by rule, or the smallest).
        recompute_ms, recompute_flops: what runs a second time.
        lower_bound_ms: no schedule with that peak recomputes less (see ``sacplan/_plan/bound.py``); of a plan with
            chunks, no schedule with these.
        added_ms: how much longer the step takes for its chunks: more launches, and weights that each slice reads. Less
            than 0 if the slices together are quicker.
        step_ms, step_flops: the step without the plan.
        device: name of the device planned for.
        ranks: over how many ranks the step is spread, and how; peaks are those of one rank.
        provenance: who made it with what.
        decisions: what it does, in execution order of the units.
        units: fqn to what the decisions come to there, in execution order. Units do not nest.
        fingerprint: the model and batch planned for.
        sequences: the ops that the recorded step runs in the calls of the units, see ``places.py``.

    Raises:
        PlanError: units that nest, two decisions about one call site, one about a unit that is not listed or about ops
            that its calls do not run, or a unit whose ops are not there.
    """

    MADE_BY: ClassVar[str] = "sacplan.plan(profile, budget)"

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        names = (name for name in Plan.__struct_fields__ if name != "provenance")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its fields; the view of ``units`` is made again."""
        fields = {name: getattr(self, name) for name in Plan.__struct_fields__}
        return _plan, (fields | {"units": dict(self.units)},)

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

    def to_frame(self) -> pd.DataFrame:
        """One row per unit."""
        import pandas as pd

        discarded = self.discarded
        return pd.DataFrame(
            [
                (fqn, unit.discard_ratio, unit.recompute_ms, len(discarded.get(fqn, ())), len(unit.kept))
                for fqn, unit in self.units.items()
            ],
            columns=["module", "discard_ratio", "recompute_ms", "discarded_sites", "kept_sites"],
        ).set_index("module")

    @checked(PlanError)
    def save(self, path: str | Path) -> None:
        """Write as JSON (``docs/files.md``), compressed where the name ends in ``.gz``.

        Raises:
            PlanError: a field holds what no plan file may.
        """
        try:
            data = _plain(
                msgspec.convert(_plain(self), Plan)
            )  # numbers in the types that they will be read as
            digest = _digest(data)
        except (TypeError, ValueError) as error:
            raise PlanError(f"this plan cannot be saved: {error}. Make it with sacplan.plan.") from error
        files.write(path, {"what": "plan", "schema_version": SCHEMA_VERSION, **data, "sha256": digest})

    @classmethod
    @checked(PlanError)
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote.

        Raises:
            PlanError: the file is something else, damaged, edited, or of another schema version.
        """
        file = files.load(path, PlanFile, "plan", SCHEMA_VERSION, PlanError)
        return Plan(**{name: getattr(file, name) for name in Plan.__struct_fields__})

    def _chunked(self) -> str:
        if not self.chunks:
            return ""
        most = max(chunk.slices for chunk in self.chunks)
        return f"chunks of up to {most} slices {self.added_ms:+.2f} ms, "

    def __str__(self) -> str:
        """What the plan does, layer by layer, in lines of up to 100 characters."""
        return as_text(plan_sections(self))

    def _repr_html_(self) -> str:
        return as_html(plan_sections(self))

    def __repr__(self) -> str:
        return (
            f"Plan({self.fingerprint.model_class} on {self.device}: peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.baseline_peak_bytes)} unplanned, recompute {self.recompute_ms:.2f} ms of a "
            f"{self.step_ms:.2f} ms step, {self._chunked()}{len(self.units)} units, {self.status})"
        )


PlanOrPath: TypeAlias = Plan | str | Path
"""A plan, or the file that it was saved to."""


def _plan(fields: Mapping[str, Any]) -> Plan:
    return Plan(**fields)


class PlanFile(Plan, frozen=True, kw_only=True, eq=False, tag_field="what", tag="plan"):
    """A file of a plan.

    Attributes:
        schema_version: of the file's form.
        sha256: checksum of everything else, so that a plan that was damaged or edited is noticed.
    """

    schema_version: Literal[4]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

    def __post_init__(self) -> None:
        data = _plain(self)
        if self.sha256 != _digest({name: data[name] for name in Plan.__struct_fields__ if name in data}):
            raise PlanError("its contents do not have the checksum in `sha256`: it was damaged or edited.")
        super().__post_init__()


def _plain(plan: Plan) -> dict[str, Any]:
    """JSON-ready."""
    found: dict[str, Any] = msgspec.to_builtins(plan, enc_hook=_as_dict)
    return found


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}, which JSON has no form for")


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


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
