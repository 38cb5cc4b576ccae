"""Who made a plan, with what, and when."""

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
    """Who made a plan, with what, and when. Says nothing about what the plan does.

    Attributes:
        solver: name of the solver or policy whose proposal it is; ``"none"`` for a step that fits as it is.
        options: of the solver or policy.
        objective: what was recomputed the least of; None for a policy.
        techniques: what the plan was allowed to do.
        keep, never: the pins, see ``sacplan.plan``.
        budget: as it was asked for; None where ``Plan.budget_bytes`` is the device's memory less a headroom, or None.
        headroom: as it was asked for; None for the default of 15%, and where a budget was given.
        mode, trace, runtime: of the profile, see ``sacplan.profile``.
        assumptions: of the profile, by which sizes were decided that depend on data (``data_rules``), such as balanced
            routing. Absent where there were none.
        limits_reached: what ended at its limit of work before it had proved its answer, such as ``"milp"``: with more
            of it (``sacplan.Milp(work_limit=)``) there may be a better plan. Absent where nothing did.
        sacplan, torch: versions.
        date: when, in UTC.
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
    ) -> Provenance:
        """Of a plan that is made now, by this version; options that are no JSON scalars are written as text."""
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
            sacplan=sacplan.__version__,
            torch=str(torch.__version__),
            date=datetime.now(timezone.utc).replace(microsecond=0),
        )

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the plan's figures take for granted where sizes depend on data, and what to try, a sentence each."""
        if self.assumptions is UNSET:
            return ()
        return tuple(
            f"{found}. Where the data decide otherwise, a step may take more than the plan says: make the profile with "
            'trace="real" and the most uneven batch, or leave headroom'
            for found in self.assumptions
        )

    def with_limit(self, what: str) -> Provenance:
        """The same, with something more that ended at its limit of work."""
        reached = () if self.limits_reached is UNSET else self.limits_reached
        return msgspec.structs.replace(self, limits_reached=(*reached, what))

    @property
    def limit_in_words(self) -> str:
        """That a limit of work was reached, and what to try; empty where none was."""
        if self.limits_reached is UNSET:
            return ""
        return (
            f"{' and '.join(self.limits_reached)} ended at the limit of work: with a higher one, such as "
            f"sacplan.Milp(work_limit={10 * WORK_LIMIT}), there may be a better plan"
        )

    @staticmethod
    def asked(budget: Any, headroom: Any) -> dict[str, Any]:
        """Both fields, in types that JSON has."""
        return {"budget": _as_written(budget), "headroom": _as_written(headroom)}


def _as_written(size: Any) -> int | float | str | None:
    if size is None or isinstance(size, str):
        return size
    return int(size) if isinstance(size, Integral) else float(size)


def options_of(solver: object) -> dict[str, Any]:
    """The fields of a solver object."""
    if dataclasses.is_dataclass(solver):
        return {f.name: getattr(solver, f.name) for f in dataclasses.fields(solver)}
    return dict(getattr(solver, "__dict__", {}))
