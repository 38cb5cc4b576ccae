"""Provenance: how a plan was made."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

from sacplan.core.files import Name
from sacplan.record.step import Mode
from sacplan.solvers.mip import WORK_LIMIT
from sacplan.techniques.base.step import Objective
from sacplan.techniques.registry import DEFAULT_TECHNIQUES

Scalar = bool | int | float | str | None


class Provenance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a plan was made: by which solver, with which arguments and versions, and when.

    It has no influence on what the plan does.

    Attributes:
        solver: Name of the solver or policy; ``"none"`` for a step that fits as it is.
        options: Options of the solver or policy.
        objective: The amount of recomputation that was minimised; None for a policy.
        techniques: The techniques that the plan was allowed to use.
        keep, never: The pins, see ``sacplan.plan``.
        budget: The budget as the user gave it; None if there was none, as when the plan had to fit its
            device.
        host_budget: The limit for the memory of the host as the user gave it. Absent if there was none.
        mode, trace, runtime: Arguments of the profile, see ``sacplan.profile``.
        assumptions: Rules of the profile for sizes that depend on data (``data_rules``), such as balanced routing.
            Absent if there were none.
        limits_reached: Solvers and searches that stopped at their limit of work before they had proved their answer,
            such as ``"milp"``. With a higher limit (``sacplan.Milp(work_limit=)``) there may be a better plan. Absent
            if there were none.
        remarks: Sentences on what no plan changes about this step. Absent if there are none.
        sacplan, torch: Versions of the packages.
        date: Time at which the plan was made, in UTC.
    """

    solver: Name
    options: Mapping[Name, Scalar] = {}
    objective: Objective | None = None
    techniques: tuple[Name, ...] = DEFAULT_TECHNIQUES
    keep: tuple[Name, ...] = ()
    never: tuple[Name, ...] = ()
    budget: int | float | str | None = None
    host_budget: int | float | str | UnsetType = UNSET
    mode: Mode = "train"
    trace: Name
    runtime: Name
    assumptions: tuple[Name, ...] | UnsetType = UNSET
    limits_reached: tuple[Name, ...] | UnsetType = UNSET
    remarks: tuple[Name, ...] | UnsetType = UNSET
    sacplan: Name
    torch: Name
    date: Annotated[datetime, Meta(tz=True)]

    @property
    def assumed(self) -> tuple[str, ...]:
        """A sentence for each assumption about sizes that depend on data, with what to do in case it is wrong."""
        if self.assumptions is UNSET:
            return ()
        return tuple(
            f"{found}. Where the data decide otherwise, a step may take more than the plan says: make the profile with "
            'trace="real" and the most uneven batch, or give a smaller budget'
            for found in self.assumptions
        )

    @property
    def limit_in_words(self) -> str:
        """A sentence on the limits of work that were reached, and what to try; ``""`` if none was."""
        if self.limits_reached is UNSET:
            return ""
        return (
            f"{' and '.join(self.limits_reached)} ended at the limit of work: with a higher one, such as "
            f"sacplan.Milp(work_limit={10 * WORK_LIMIT}), there may be a better plan"
        )
