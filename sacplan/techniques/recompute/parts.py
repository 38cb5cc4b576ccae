"""The parts of an option whose effects on memory add up: ops that run again, in groups that do not touch each other.

The effect of a large option is the sum of those of its parts. Other options of the region have the same parts in other
combinations, so each part is looked at once.

Two members of an option are in one part if one reads what the other makes, or if both may prolong the life of a storage
that is kept: then the later of two ends counts, and not their sum.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from sacplan.core.program import Program
from sacplan.techniques.base.regions import Option, Region
from sacplan.techniques.recompute.in_place_groups import connected


def parts(program: Program, region: Region, option: Option) -> tuple[Option, ...]:
    """Return options for the parts of an option, in the order of their ops."""
    if len(option.members) < 2:
        return (option,)
    makers = {
        s: member
        for member in option.members
        for op in region.members[member]
        for s in program.ops[op].writes
    }
    tied = connected(option.members, _by_values(program, region, option, makers))
    if len(tied) > 1:
        tied = [
            [member for each in together for member in tied[each]]
            for together in connected(range(len(tied)), _by_lives(program, region, tied, makers))
        ]
    return tuple(replace(option, members=tuple(sorted(members))) for members in tied)


def _by_values(
    program: Program, region: Region, option: Option, makers: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield the pairs of members of which one reads, or writes anew, what the other makes."""
    for member in option.members:
        for op in region.members[member]:
            for s in (*program.ops[op].reads, *program.ops[op].writes):
                maker = makers.get(s, member)
                if maker != member:
                    yield member, maker


def _by_lives(
    program: Program, region: Region, tied: list[list[int]], makers: dict[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of groups that may both prolong the life of one storage: they hold it until they run again."""
    liveness = program.liveness
    left = max(liveness.exited[scope] for scope in program.calls.get(region.unit, (0,)))
    holders: dict[int, list[int]] = defaultdict(
        list
    )  # by storage, the groups that may hold it beyond its death
    for at, members in enumerate(tied):
        ops = [program.ops[op] for member in members for op in region.members[member]]
        # A group lets go of what it holds where something happens to a storage of its own, or where the unit is left.
        last = max(
            (liveness.events_of[s][-1] for op in ops for s in op.writes if len(liveness.events_of[s])),
            default=left,
        )
        last = max(last, left)
        for s in {s for op in ops for s in op.reads} - makers.keys():
            if liveness.died[s] <= last:
                holders[s].append(at)
    for groups in holders.values():
        yield from itertools.pairwise(groups)
