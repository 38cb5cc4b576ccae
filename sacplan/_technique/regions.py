"""Regions of the forward pass and their options: the choices of a plan, whatever the technique."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from sacplan._program.decisions import Decision
from sacplan._program.elements import Patch


@dataclass(frozen=True, slots=True)
class Option:
    """One choice for a region: a technique, applied to some of its members.

    Attributes:
        cost: in the unit of the objective (ms for time).
        kept_bytes: bytes that are held from forward to backward on the region's account.
        members: indices into ``Region.members``; none: everything stays as it is.
        technique: the name of the technique.
        decision, patch: what it becomes in a plan and in a program; None if the technique works them out later.
    """

    cost: float
    kept_bytes: int
    members: tuple[int, ...]
    technique: str
    decision: Decision | None = None
    patch: Patch | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """Some forward ops, and the options for them.

    Attributes:
        unit: fqn of the smallest module that runs them all.
        members: groups of op indices; a group is one call site in all calls of the unit, and is kept or
            discarded as one.
        kind: equal for regions with the same options.
        options: by rising cost; the first keeps everything.
        units: by option, the modules that have to be units for it.
        wide: by option, whether one of these is around more than this region's modules.
    """

    unit: str
    members: tuple[tuple[int, ...], ...]
    kind: Hashable
    options: tuple[Option, ...]
    units: tuple[tuple[str, ...], ...]
    wide: tuple[bool, ...]

    def ops(self, option: Option) -> frozenset[int]:
        """Return the recorded ops that an option is about."""
        return frozenset(op for member in option.members for op in self.members[member])

    def only(self, options: Sequence[int]) -> Region:
        """Return the region with some of its options."""
        return replace(
            self,
            options=tuple(self.options[o] for o in options),
            units=tuple(self.units[o] for o in options),
            wide=tuple(self.wide[o] for o in options),
        )

    def extended(self, options: Sequence[Option], kind: Hashable) -> Region:
        """Return the region with further options, for which its module has to be a unit."""
        n = len(options)
        return replace(
            self,
            kind=kind,
            options=self.options + tuple(options),
            units=self.units + ((self.unit,),) * n,
            wide=self.wide + (False,) * n,
        )
