"""Provenance: how a plan was made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime, timezone
from numbers import Integral
from typing import Annotated, Any

import msgspec
import torch
from msgspec import UNSET, Meta, Struct, UnsetType

import sacplan
from sacplan._profile.profile import Profile
from sacplan._program.files import Name
from sacplan._program.pins import NO_PINS, Pins
from sacplan._record.fake_values import decides_sizes
from sacplan._record.step import Mode
from sacplan._solve.mip import WORK_LIMIT
from sacplan._technique.step import Objective
from sacplan._techniques import DEFAULT_TECHNIQUES

Scalar = bool | int | float | str | None
_SCALARS = (bool, int, float, str, type(None))


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
        headroom: The headroom as the user gave it; None if there was none.
        mode, trace, runtime: Arguments of the profile, see ``sacplan.profile``.
        assumptions: Rules of the profile for sizes that depend on data (``data_rules``), such as balanced routing.
            Absent if there were none.
        limits_reached: Solvers and searches that stopped at their limit of work before they had proved their answer,
            such as ``"milp"``. With a higher limit (``sacplan.Milp(work_limit=)``) there may be a better plan. Absent
            if there were none.
        beyond: What techniques would save that the plan was not allowed to use, a sentence for each. Absent if there is
            nothing to save, and where the techniques were asked for.
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
    headroom: int | float | str | None = None
    mode: Mode = "train"
    trace: Name
    runtime: Name
    assumptions: tuple[Name, ...] | UnsetType = UNSET
    limits_reached: tuple[Name, ...] | UnsetType = UNSET
    beyond: tuple[Name, ...] | UnsetType = UNSET
    sacplan: Name
    torch: Name
    date: Annotated[datetime, Meta(tz=True)]

    @classmethod
    def now(
        cls,
        profile: Profile,
        solver: str,
        options: Mapping[str, Any] | None = None,
        *,
        objective: Objective | None = None,
        budget: Any = None,
        headroom: Any = None,
        pins: Pins = NO_PINS,
        techniques: tuple[str, ...] = DEFAULT_TECHNIQUES,
        limits_reached: tuple[str, ...] = (),
        beyond: tuple[str, ...] = (),
    ) -> Provenance:
        """Return the provenance of a plan made now, by this version. Options that are not JSON scalars become text."""
        # Values of options are told apart by exact type. A subclass, such as ``numpy.float64``, becomes text like any
        # other object. Of the rules of the profile, only those about sizes count: an assumed value alone makes no
        # tensor larger. Seconds are enough for the date.
        return cls(
            solver=solver,
            options={k: v if type(v) in _SCALARS else repr(v) for k, v in (options or {}).items()},
            objective=objective,
            techniques=techniques,
            keep=pins.keep,
            never=pins.never,
            **cls.asked(budget, headroom),
            mode=profile.mode,
            trace=profile.trace,
            runtime=profile.runtime,
            assumptions=tuple(filter(decides_sizes, profile.rules)) or UNSET,
            limits_reached=limits_reached or UNSET,
            beyond=beyond or UNSET,
            sacplan=sacplan.__version__,
            torch=str(torch.__version__),
            date=datetime.now(timezone.utc).replace(microsecond=0),
        )

    @property
    def assumed(self) -> tuple[str, ...]:
        """One sentence for each assumption about sizes that depend on data, with what to do if it may not hold."""
        if self.assumptions is UNSET:
            return ()
        return tuple(
            f"{found}. Where the data decide otherwise, a step may take more than the plan says: make the profile with "
            'trace="real" and the most uneven batch, or leave headroom'
            for found in self.assumptions
        )

    def with_limit(self, what: str) -> Provenance:
        """Return a copy that names one more solver or search that stopped at its limit of work."""
        reached = () if self.limits_reached is UNSET else self.limits_reached
        return msgspec.structs.replace(self, limits_reached=(*reached, what))

    @property
    def limit_in_words(self) -> str:
        """A sentence on the limits of work that were reached, and what to try; empty if there were none."""
        if self.limits_reached is UNSET:
            return ""
        return (
            f"{' and '.join(self.limits_reached)} ended at the limit of work: with a higher one, such as "
            f"sacplan.Milp(work_limit={10 * WORK_LIMIT}), there may be a better plan"
        )

    @staticmethod
    def asked(budget: Any, headroom: Any) -> dict[str, Any]:
        """Return budget and headroom as fields, in types that JSON has."""
        return {"budget": _as_written(budget), "headroom": _as_written(headroom)}


def _as_written(size: Any) -> int | float | str | None:
    if size is None or isinstance(size, str):
        return size
    # Numbers of NumPy count as Integral or Real, too. A file has Python's.
    return int(size) if isinstance(size, Integral) else float(size)


def options_of(solver: object) -> dict[str, Any]:
    """Return the fields of a solver object."""
    # Solvers of sacplan are dataclasses. One of the user's own may be any object.
    if dataclasses.is_dataclass(solver):
        return {f.name: getattr(solver, f.name) for f in dataclasses.fields(solver)}
    return dict(getattr(solver, "__dict__", {}))
