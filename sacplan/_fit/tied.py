"""Ops that are kept or discarded together, since an in-place write ties them.

What an in-place write replaces cannot be kept for later. So who reads the old version can run again only with
the op that made it: the write itself, and any other reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from sacplan._trace.recording import CallSite, Recording

Group = tuple[int, ...]


def tied(recording: Recording, groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups of ops, with those that in-place writes tie made into one; in the order of their first ops."""
    if not recording.overwritten:
        return tuple(groups)
    group_of = {op: at for at, group in enumerate(groups) for op in group}
    ties = (
        (at, group_of[recording.overwritten[s]])
        for op, at in group_of.items()
        for s in recording.ops[op].reads
        if recording.overwritten.get(s) in group_of
    )
    return tuple(
        tuple(sorted(op for at in together for op in groups[at]))
        for together in connected(range(len(groups)), ties)
    )


def connected(items: Iterable[int], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The items in the groups that pairs of them connect; in the order of the items."""
    leader = {item: item for item in items}

    def find(item: int) -> int:
        while leader[item] != item:
            leader[item] = item = leader[leader[item]]
        return item

    for one, other in pairs:
        leader[find(one)] = find(other)
    groups: dict[int, list[int]] = defaultdict(list)
    for item in leader:
        groups[find(item)].append(item)
    return list(groups.values())


def discardable(recording: Recording, group: Group) -> bool:
    """Whether a group may run again: all of its ops may, and whatever they are tied to is in it."""
    ops, inside = recording.ops, set(group)
    return all(
        ops[i].recomputable
        and all(recording.overwritten.get(s, i) in inside for s in ops[i].reads)
        and all(recording.readers_of_overwritten.get(s, inside) <= inside for s in ops[i].writes)
        for i in group
    )


def without_loose_ends(
    recording: Recording, decisions: Mapping[str, Collection[CallSite]]
) -> dict[str, tuple[CallSite, ...]]:
    """Decisions, less the call sites that read an overwritten version which is not made again in the same unit."""
    found = {}
    for unit, sites in decisions.items():
        wanted = set(sites)
        for scope in recording.calls.get(unit, ()) if recording.overwritten else ():
            made: set[int] = set()  # ops that run again; makers come before readers
            for op, site in recording.sites(scope).items():
                if site in wanted:
                    makers = (recording.overwritten.get(s) for s in recording.ops[op].reads)
                    if all(maker is None or maker in made for maker in makers):
                        made.add(op)
                    else:
                        wanted.discard(site)
        found[unit] = tuple(site for site in sites if site in wanted)
    return found
