"""Ops that are kept or discarded together, since an in-place write ties them.

What an in-place write replaces cannot be kept for later. So who reads the old version can run again only with
the op that made it: the write itself, and any other reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from sacplan._trace.recording import CallSite, Recording

Group = tuple[int, ...]


def tied(recording: Recording, groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups of ops, with those that in-place writes tie made into one; in the order of their first ops."""
    if not recording.overwritten:
        return tuple(groups)
    group_of = {op: at for at, group in enumerate(groups) for op in group}
    leader = list(range(len(groups)))

    def find(at: int) -> int:
        while leader[at] != at:
            leader[at] = at = leader[leader[at]]
        return at

    for op, at in group_of.items():
        for s in recording.ops[op].reads:
            maker = recording.overwritten.get(s)
            if maker in group_of:
                one, other = sorted((find(at), find(group_of[maker])))
                leader[other] = one
    merged: dict[int, list[int]] = defaultdict(list)
    for at, group in enumerate(groups):
        merged[find(at)].extend(group)
    return tuple(tuple(sorted(group)) for _, group in sorted(merged.items()))


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
