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
    """What an option touches apart from the ops of its region and their results.

    Attributes:
        positions: events of the program that its patch replaces.
        storages: storages whose lifetimes it changes, wherever they are made; nobody outside of the region holds them.
    """

    positions: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()


class Copies(NamedTuple):
    """An option's copies over a link that it shares with other options; times in ms, on the clock of the recorded step.

    Attributes:
        link: the name of the link.
        begin_ms, end_ms: when the copies may begin, and when they have to be over.
        link_ms: how long they occupy the link. Copies that computation waits for in any case are left out.
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
        members: indices into ``Region.members``; (): everything stays as it is.
        technique: the name of the technique.
        decision, patch: the option in a plan and in a program; None if the technique works them out later.
        also: other techniques that have decisions in it. Its patch, from ``technique``, does what all of them do.
        units: the modules that have to be units for it; (): the region's.
        remembered: what the technique needs to know of the option when it is chosen.
        signature: equal for options that do the same in regions that look alike, where ``members`` do not tell.
        reach: what it touches apart from the region.
        host_bytes: the most host memory that it takes at once.
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
        # The technique that the patch is from comes first.
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
        wide: by option, whether one of its units is around more than this region's modules.
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
            # Every field with an entry for each option is cut down; a new field of this kind has to be, too.
            options=tuple(self.options[o] for o in options),
            units=tuple(self.units[o] for o in options),
            wide=tuple(self.wide[o] for o in options),
        )

    def extended(self, options: Sequence[Option], kind: Hashable) -> Region:
        """Return the region with further options. Its module has to be a unit for those that name no units."""
        n = len(options)
        return replace(
            self,
            kind=kind,
            # New options come after the old ones, which keep their indices: the first one still keeps everything.
            options=self.options + tuple(options),
            units=self.units + tuple(option.units or (self.unit,) for option in options),
            wide=self.wide + (False,) * n,
        )


def units_of(taken: Sequence[tuple[Region, Option]]) -> tuple[str, ...]:
    """Return the modules that have to be units for options of regions; none for options that bring their decision."""
    # A dict and not a set: the order of units decides that of the decisions, which must be the same in every process.
    return tuple(
        dict.fromkeys(
            unit
            for region, option in taken
            if option.decision is None
            for unit in region.units[region.options.index(option)]
        )
    )


def outermost(program: Program, units: Collection[str]) -> tuple[str, ...]:
    """Return the units whose calls lie in no call of another unit."""
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
            # Path halving: every second item on the way to its leader is linked one level higher.
            leader[item] = item = leader[leader[item]]
        return item

    for one, other in pairs:
        leader[find(one)] = find(other)
    groups: dict[int, list[int]] = defaultdict(list)
    for item in leader:
        groups[find(item)].append(item)
    return list(groups.values())
