"""A plan: per unit, which call sites are discarded and which kept, and what that gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sacplan._program.budget import format_bytes
from sacplan._program.files import read_json, write_json
from sacplan._program.fingerprint import Fingerprint
from sacplan._program.program import CallSite
from sacplan._ranks.ranks import ONE_RANK, Ranks

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What one unit does.

    Attributes:
        discard_ratio: share of what autograd keeps in the unit that is not kept.
        recompute_ms: predicted time of what runs again.
        discarded: call sites (op name, occurrence within one call of the unit) that are not kept.
        kept: call sites whose outputs autograd keeps.
        drops: for discarded call sites whose values are let go more than once, how often: the first time after the
            forward pass, then each time when they have been made again on the way to something else.
    """

    discard_ratio: float
    recompute_ms: float
    discarded: tuple[CallSite, ...]
    kept: tuple[CallSite, ...] = ()
    drops: Mapping[CallSite, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "drops", {site: n for site, n in self.drops.items() if n > 1})

    @property
    def decisions(self) -> Mapping[CallSite, int]:
        """Discarded call sites, each with the number of times that its values are let go."""
        return {site: self.drops.get(site, 1) for site in self.discarded}


@dataclass(frozen=True)
class Plan:
    """What each module discards, and the peak and recomputation that a replay of the step gives for it.

    Frozen; ``save`` and ``load`` it as JSON.

    Attributes:
        units: fqn to what the unit does, in execution order. Units do not nest.
        peak_bytes: replayed peak of the whole step with the plan.
        baseline_peak_bytes: the same without it.
        budget_bytes: what was asked for; None for a plan that was not made for a budget.
        recompute_ms, recompute_flops: what runs a second time.
        lower_bound_ms: no schedule with that peak recomputes less (see ``sacplan/_plan/bound.py``).
        step_ms, step_flops: the step without the plan.
        status: "optimal" (among the options of the regions, to ``gap``), "feasible", "unplanned", or "policy" (made by
            rule, see ``sacplan.policy``).
        gap: relative gap that the solver proved; None where it proved nothing.
        solver: its name.
        device: name of the device planned for.
        fingerprint: the model and batch planned for.
        keep, never: the pins it was made with (see ``sacplan.plan``), for whoever reads the file.
        ranks: over how many ranks the step is spread, and how; peaks are those of one rank.
    """

    units: Mapping[str, UnitPlan]
    peak_bytes: int
    baseline_peak_bytes: int
    budget_bytes: int | None
    recompute_ms: float
    recompute_flops: int
    lower_bound_ms: float
    step_ms: float
    step_flops: int
    status: str
    gap: float | None
    solver: str
    device: str
    fingerprint: Fingerprint
    keep: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    ranks: Ranks = ONE_RANK

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", MappingProxyType(dict(self.units)))

    @property
    def discard_ratios(self) -> dict[str, float]:
        """Unit to the share of its activations that is discarded."""
        return {fqn: unit.discard_ratio for fqn, unit in self.units.items()}

    @property
    def decisions(self) -> dict[str, Mapping[CallSite, int]]:
        """Unit to the call sites that it discards, each with the number of times that its values are let go."""
        return {fqn: unit.decisions for fqn, unit in self.units.items()}

    @property
    def op_decisions(self) -> dict[tuple[str, str, int], str]:
        """(fqn of the unit, op name, occurrence) to ``"discard"`` or ``"keep"``."""
        return {
            (fqn, name, occurrence): decision
            for fqn, unit in self.units.items()
            for decision, sites in (("keep", unit.kept), ("discard", unit.discarded))
            for name, occurrence in sites
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per unit."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "module": fqn,
                    "discard_ratio": unit.discard_ratio,
                    "recompute_ms": unit.recompute_ms,
                    "discarded_sites": len(unit.discarded),
                    "kept_sites": len(unit.kept),
                }
                for fqn, unit in self.units.items()
            ],
            columns=["module", "discard_ratio", "recompute_ms", "discarded_sites", "kept_sites"],
        ).set_index("module")

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote."""
        return cls.from_dict(read_json(path, "plan", SCHEMA_VERSION))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "what": "plan",
            "schema_version": SCHEMA_VERSION,
            "units": {
                fqn: {
                    "discard_ratio": u.discard_ratio,
                    "recompute_ms": u.recompute_ms,
                    "discarded": [list(s) for s in u.discarded],
                    "kept": [list(s) for s in u.kept],
                }
                | ({"drops": [[*site, n] for site, n in u.drops.items()]} if u.drops else {})
                for fqn, u in self.units.items()
            },
            "peak_bytes": self.peak_bytes,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "recompute_ms": self.recompute_ms,
            "recompute_flops": self.recompute_flops,
            "lower_bound_ms": self.lower_bound_ms,
            "step_ms": self.step_ms,
            "step_flops": self.step_flops,
            "status": self.status,
            "gap": self.gap,
            "solver": self.solver,
            "device": self.device,
            "fingerprint": self.fingerprint.to_dict(),
            "keep": list(self.keep),
            "never": list(self.never),
            "ranks": self.ranks.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_dict``."""
        fields = {
            k: v
            for k, v in data.items()
            if k not in ("what", "schema_version", "units", "fingerprint", "keep", "never", "ranks")
        }
        return cls(
            units={
                fqn: UnitPlan(
                    u["discard_ratio"],
                    u["recompute_ms"],
                    tuple((name, n) for name, n in u["discarded"]),
                    tuple((name, n) for name, n in u["kept"]),
                    {(name, n): drops for name, n, drops in u.get("drops", ())},
                )
                for fqn, u in data["units"].items()
            },
            fingerprint=Fingerprint.from_dict(data["fingerprint"]),
            ranks=Ranks.from_dict(data["ranks"]) if "ranks" in data else ONE_RANK,
            keep=tuple(data.get("keep", ())),
            never=tuple(data.get("never", ())),
            **fields,
        )

    def __repr__(self) -> str:
        return (
            f"Plan({self.fingerprint.model_class} on {self.device}: peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.baseline_peak_bytes)} unplanned, recompute {self.recompute_ms:.2f} ms of a "
            f"{self.step_ms:.2f} ms step, {len(self.units)} units, {self.status})"
        )
