"""A plan: decisions about the ops of a step, and what they give."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from sacplan._plan.reading import as_text, plan_sections
from sacplan._plan.value import PlanValue
from sacplan._program import files
from sacplan._program.arguments import checked
from sacplan._program.budget import format_bytes
from sacplan._program.notebook import as_html
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 4


class Plan(PlanValue, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        names = (name for name in Plan.__struct_fields__ if name != "provenance")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its fields; the view of ``units`` is made again."""
        fields = {name: getattr(self, name) for name in Plan.__struct_fields__}
        return _plan, (fields | {"units": dict(self.units)},)

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
