"""Groups of ops that are kept or discarded together, since an in-place write ties them.

An in-place write destroys the old version of its storage, so that version cannot be kept for the backward pass. An op
that reads it (the write itself, or any other reader) can run again only if the op that made it runs again, too. So
the maker and all readers of an overwritten version are one group.

Groups are the connected components of these ties.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sacplan.core.program import CallSite, Program
from sacplan.techniques.base.regions import connected

Group = tuple[int, ...]


def in_place_groups(program: Program, groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups in the order of their first ops, with those joined that in-place writes tie."""
    if not program.overwritten:
        return tuple(groups)
    group_of = {op: at for at, group in enumerate(groups) for op in group}
    # A tie is from the group of a reader to the group of the maker. Versions made outside of these groups tie
    # nothing here; ``discardable`` refuses their readers.
    ties = (
        (at, group_of[program.overwritten[s]])
        for op, at in group_of.items()
        for s in program.ops[op].reads
        if program.overwritten.get(s) in group_of
    )
    return tuple(
        tuple(sorted(op for at in together for op in groups[at]))
        for together in connected(range(len(groups)), ties)
    )


def discardable(program: Program, group: Group) -> bool:
    """Whether a group may run again.

    Each of its ops must be able to run again by itself. And of every overwritten version that the group reads, it must
    contain the maker; of every one that it makes, all readers.
    """
    ops, inside = program.ops, set(group)
    return all(
        ops[i].recomputable
        and all(program.overwritten.get(s, i) in inside for s in ops[i].reads)
        and all(program.readers.get(s, inside) <= inside for s in ops[i].writes if s in program.overwritten)
        for i in group
    )


def reading_lost_versions(program: Program, unit: str, sites: Collection[CallSite]) -> dict[CallSite, bool]:
    """Return the call sites that read an overwritten version which is not made again in the same call.

    True: the op loses only the version that it overwrites itself. The executor and the rewrite keep such an op anyway.

    Decisions that were not made by groups (Rotor's, a user's policy) may have such sites. Leaving a site out may make
    others invalid, but only later ones: makers come before their readers, so one pass suffices.
    """
    may_stay: dict[CallSite, bool] = {}
    # Calls are looked at one by one, but a site that fails in one call is left out in all: a decision names sites.
    for scope in program.calls.get(unit, ()) if program.overwritten else ():
        runs_again: set[int] = set()  # complete for each op, since makers come before readers
        for op, site in program.sites(scope).items():
            if site not in sites or site in may_stay:
                continue
            makers = {s: program.overwritten.get(s) for s in program.ops[op].reads}
            lost = [s for s, maker in makers.items() if maker is not None and maker not in runs_again]
            if lost:
                may_stay[site] = lost == [program.ops[op].replaces]
            else:
                runs_again.add(op)
    return may_stay
