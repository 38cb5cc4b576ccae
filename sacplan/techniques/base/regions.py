"""Regions of the forward pass and their options: the choices of a plan, whatever the technique."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sacplan.core.decisions import Decision
from sacplan.core.program import Patch, Program


@dataclass(frozen=True, slots=True)
class Reach:
    """The reach of an option beyond the ops of its region and what they make.

    Attributes:
        positions: events of the program in whose place its patch puts others.
        storages: made elsewhere or not, storages whose lives it changes; nobody outside of the region holds them.
    """

    positions: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()


class Copies(NamedTuple):
    """Copies that share a link with those of other options, on the clock of the recorded step, in ms.

    Attributes:
        link: which one.
        begin_ms, end_ms: when they may begin, and when they have to be over.
        link_ms: how long they take the link. Copies that computation waits for in any case are left out.
    """

    link: str
    begin_ms: float
    end_ms: float
    link_ms: float


@dataclass(frozen=True, slots=True)
class Option:
    """One choice for a region: one technique or several, applied to some of its members.

    Attributes:
        cost: in the unit of the objective (ms for time).
        kept_bytes: bytes that are held from forward to backward on the region's account.
        members: indices into ``Region.members``; none: everything stays as it is.
        technique: the name of the technique.
        decision, patch: what it becomes in a plan and in a program; None if the technique works them out later.
        also: other techniques that have decisions in it. Its patch, from ``technique``, does what all of them do.
        units: the modules that have to be units for it; none: the region's.
        remembered: what the technique needs to know of it.
        signature: equal for options that do the same in regions that look alike, where ``members`` do not tell.
        reach: what it touches beside the region.
        host_bytes: the most that it has in the memory of the host.
        copies: what it sends over links.
    """

    cost: float
    kept_bytes: int
    members: tuple[int, ...]
    technique: str
    decision: Decision | None = None
    patch: Patch | None = None
    also: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    remembered: Any = None
    signature: Hashable = ()
    reach: Reach = Reach()
    host_bytes: int = 0
    copies: tuple[Copies, ...] = ()

    @property
    def techniques(self) -> tuple[str, ...]:
        """The techniques that have decisions in it."""
        # The one whose patch it is comes first.
        return (self.technique, *self.also)

    @property
    def key(self) -> tuple[Hashable, ...]:
        """A key that is equal for options that do the same in regions that look alike."""
        # Without the decision and the patch, which name modules and events, so that they differ from layer to layer.
        return (self.technique, self.members, self.signature)


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
            # All that is given by option is cut down alike; a further field of this kind has to be, too.
            options=tuple(self.options[o] for o in options),
            units=tuple(self.units[o] for o in options),
            wide=tuple(self.wide[o] for o in options),
        )

    def extended(self, options: Sequence[Option], kind: Hashable) -> Region:
        """Return the region with further options, for which its module has to be a unit unless they say otherwise."""
        n = len(options)
        return replace(
            self,
            kind=kind,
            # New options come behind the others, so these keep their places, and the first one still keeps everything.
            options=self.options + tuple(options),
            units=self.units + tuple(option.units or (self.unit,) for option in options),
            wide=self.wide + (False,) * n,
        )


def units_of(taken: Sequence[tuple[Region, Option]]) -> tuple[str, ...]:
    """Return the modules that have to be units for options of regions. An offer brings its decision, and needs none."""
    # Each once, and not as a set: the order decides that of the decisions, which must be the same in every process.
    return tuple(
        dict.fromkeys(
            unit
            for region, option in taken
            if option.decision is None
            for unit in region.units[region.options.index(option)]
        )
    )


def outermost(program: Program, units: Collection[str]) -> tuple[str, ...]:
    """Return the units that are in no call of another one."""
    # By calls and not by names, since a module may be called inside of one that does not contain it.
    scopes = {scope for unit in units for scope in program.calls[unit]}
    return tuple(
        unit
        for unit in units
        # ``Program.calls`` leaves out calls within a call of the same module, so no unit is inside of itself.
        if not any(a in scopes for scope in program.calls[unit] for a in program.ancestors(scope))
    )


def connected(items: Iterable[int], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the connected components of the items under these pairs, in the order of the items.

    By union-find with path halving, which is nearly linear.
    """
    leader = {item: item for item in items}

    def find(item: int) -> int:
        while leader[item] != item:
            # Path halving: every other item on the way is hung up one level higher.
            leader[item] = item = leader[leader[item]]
        return item

    for one, other in pairs:
        leader[find(one)] = find(other)
    groups: dict[int, list[int]] = defaultdict(list)
    for item in leader:
        groups[find(item)].append(item)
    return list(groups.values())
