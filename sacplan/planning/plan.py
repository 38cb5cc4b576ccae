"""A plan: decisions about the ops of a step, and the figures of the step with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from sacplan.core import files
from sacplan.core.arguments import checked
from sacplan.core.budget import format_bytes
from sacplan.errors import PlanError
from sacplan.planning.reading import as_text, plan_sections
from sacplan.planning.value import PlanValue

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 4


class Plan(PlanValue, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Which tensors each module discards, and the peak and recomputation of the step with this plan.

    A plan is frozen. ``save`` writes it as JSON, ``load`` reads it, and ``msgspec.structs.replace`` makes a changed
    copy. Two plans are equal if all fields but their provenance are.

    Attributes:
        status: ``"optimal"`` (among the options of the regions, up to ``gap``), ``"feasible"``, ``"unplanned"``, or
            ``"policy"`` (made by rule, see ``sacplan.policy``).
        gap: Relative optimality gap that the solver proved; None if it proved nothing.
        peak_bytes: Peak of the whole step with the plan.
        baseline_peak_bytes: Peak of the step without a plan.
        budget_bytes: The limit for the peak: the budget that was asked for, or what is left for the tensors on the
            device. On a GPU, that is its memory less what lies outside of torch's allocator and less what the allocator
            reserves beyond the tensors. None for a plan that was not made for a limit (a policy, or the plan with the
            smallest peak).
        recompute_ms, recompute_flops: Predicted time and FLOPs of the ops that run a second time.
        lower_bound_ms: No schedule with this peak recomputes less (see ``sacplan/planning/bound.py``). For a plan with
            chunks: no schedule with the same chunks.
        device_memory: The peaks that torch's allocator on a GPU would report: of the blocks that it hands out, and of
            the segments that it reserves. The latter decide whether the plan fits a GPU. None for a CPU, and in files
            older than this field.
        added_ms: How much longer the step takes because of its chunks (more launches, and each slice reads the weights
            again; negative if the slices together are quicker), and because it waits for copies to and from the host.
        waits_ms: How much longer a GPU waits for the CPU that issues its ops (``sacplan/device/eager.py``); negative
            if recomputation runs while the GPU would wait.
        host_bytes: The most that the plan has in the memory of the host, as torch's allocator of pinned memory rounds
            it.
        step_ms, step_flops: Predicted time and FLOPs of the step without the plan.
        device: Name of the device that the plan is for.
        ranks: How many ranks the step is spread over, and how. Peaks are those of one rank.
        provenance: How the plan was made.
        decisions: The decisions, in execution order of their units.
        units: What the plan does in a module, by its fully qualified name, in execution order. Units do not nest.
        fingerprint: The model and batch that the plan is for.
        sequences: The ops that the recorded step runs in the calls of the units (see ``call_sites.py``).

    Raises:
        PlanError: Units nest; two decisions are about one call site; or a decision is about a unit that is not listed,
            or about an op that no call of its unit runs.
    """

    MADE_BY: ClassVar[str] = "sacplan.plan(profile, budget)"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        # Provenance, such as the date and the solver, says nothing about what the plan does.
        names = (name for name in Plan.__struct_fields__ if name != "provenance")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields, ``units`` as a dict: a mapping proxy cannot be pickled."""
        fields = {name: getattr(self, name) for name in Plan.__struct_fields__}
        return _plan, (fields | {"units": dict(self.units)},)

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row for each unit."""
        import pandas as pd

        discarded = self.discarded
        return pd.DataFrame(
            [
                (fqn, unit.discard_ratio, unit.recompute_ms, len(discarded.get(fqn, ())), len(unit.kept))
                for fqn, unit in self.units.items()
            ],
            columns=["module", "discard_ratio", "recompute_ms", "discarded_sites", "kept_sites"],
        ).set_index("module")

    def code(self) -> str:
        """Return the calls of PyTorch that spread the model over the mesh of the plan, as ``sacplan.apply`` makes them.

        Raises:
            PlanError: The plan is not for a mesh.
        """
        if self.ranks.sharding is None:
            raise PlanError(
                "the plan spreads nothing over ranks; make one with sacplan.plan(profile, budget, mesh=...)."
            )
        kind = "cpu" if self.device == "cpu" else "cuda"
        return self.ranks.sharding.code(kind, self.ranks.fsdp_units)

    @checked(PlanError)
    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (``docs/files.md``), compressed if the name ends in ``.gz``.

        Raises:
            PlanError: A field has a value that a plan file cannot hold.
        """
        try:
            # Converted to the types of the fields, as ``load`` does: the checksums have to agree.
            data = _plain(msgspec.convert(_plain(self), Plan))
            digest = _digest(data)
            msgspec.json.encode(data)  # raises for text that no reader takes, such as a lone surrogate
        except (TypeError, ValueError) as error:
            raise PlanError(f"this plan cannot be saved: {error}. Make it with sacplan.plan.") from error
        files.write(path, {"what": "plan", "schema_version": SCHEMA_VERSION, **data, "sha256": digest})

    @classmethod
    @checked(PlanError)
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            PlanError: The file is not a plan, is damaged, was edited, or has another schema version.
        """
        file = files.load(path, PlanFile, "plan", SCHEMA_VERSION, PlanError)
        # ``PlanFile`` also has the version and the checksum of the file.
        return Plan(**{name: getattr(file, name) for name in Plan.__struct_fields__})

    def _chunked(self) -> str:
        if not self.chunks:
            return ""
        most = max(chunk.slices for chunk in self.chunks)
        return f"chunks of up to {most} slices {self.added_ms:+.2f} ms, "

    def __str__(self) -> str:
        """The plan in words, layer by layer, in lines of up to 100 characters."""
        return as_text(plan_sections(self))

    def __repr__(self) -> str:
        return (
            f"Plan({self.fingerprint.model_class} on {self.device}: peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.baseline_peak_bytes)} unplanned, recompute {self.recompute_ms:.2f} ms of a "
            f"{self.step_ms:.2f} ms step, {self._chunked()}{len(self.units)} units, {self.status})"
        )


PlanOrPath: TypeAlias = Plan | str | Path
"""A plan, or the path of the file that it was saved to."""


def _plan(fields: Mapping[str, Any]) -> Plan:
    return Plan(**fields)


class PlanFile(Plan, frozen=True, kw_only=True, eq=False, tag_field="what", tag="plan"):
    """The contents of a plan file.

    Attributes:
        schema_version: Version of the file format.
        sha256: Checksum of the fields of ``Plan``. It reveals a file that was damaged or edited.
    """

    schema_version: Literal[4]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]

    def __post_init__(self) -> None:
        data = _plain(self)
        # As in ``save``: the fields of the plan alone, without those that ``_plain`` has left out.
        if self.sha256 != _digest({name: data[name] for name in Plan.__struct_fields__ if name in data}):
            raise PlanError("its contents do not have the checksum in `sha256`: it was damaged or edited.")
        super().__post_init__()


def _plain(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan in types that JSON has, without some defaults."""
    found: dict[str, Any] = msgspec.to_builtins(plan, enc_hook=_as_dict)
    # Left out, so that the checksums of files older than this field still hold.
    if found["device_memory"] is None:
        del found["device_memory"]
    # Left out for the same reason.
    if not found["host_bytes"]:
        del found["host_bytes"]
    return found


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}, which JSON has no form for")


def _digest(data: Mapping[str, Any]) -> str:
    # Sorted and without spaces, so that neither the order of keys nor the layout of a file changes the checksum. JSON
    # has no form for NaN and infinity: the ValueError for them becomes the error of ``save``.
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
