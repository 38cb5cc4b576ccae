"""The modules that may be units of a plan where parameters are gathered and freed (``fully_shard``).

A recipe that reads a parameter can run only while the unit of ``fully_shard`` that holds it is gathered: in the
forward and in the backward of that unit. So a unit of a plan must not be around several such units, and what it
discards must not be asked for outside of the one that it is in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import msgspec

from sacplan.core.derived import derived
from sacplan.core.program import ROOT_SCOPE, CallSite, Op, Phase, Program, StorageKind
from sacplan.record.settle import final_ops

_COPY_OUT = "fsdp.split_with_sizes_copy.default"


@derived
def gathering_ops(program: Program) -> frozenset[int]:
    """Return the forward ops with which units gather parameters: modules around a unit run them, not the unit."""
    found = set[int]()
    for end, op in enumerate(program.ops):
        if op.name != _COPY_OUT or op.phase != Phase.FORWARD:
            continue
        # Back from the copy into the gathered parameters, as long as ops deal only with these and with the buffer.
        own = {*op.reads, *op.mutates}
        at = end
        while at >= 0 and _is_about(program, program.ops[at], own):
            found.add(at)
            at -= 1
    return frozenset(found)


def _is_about(program: Program, op: Op, storages: Collection[int]) -> bool:
    touched = {*op.reads, *op.writes, *op.mutates}
    rest = touched.difference(storages)
    return len(rest) < len(touched) and all(program.storage_kinds[s] is StorageKind.PARAMETER for s in rest)


def too_wide(program: Program) -> frozenset[str]:
    """Return the modules that must not be units, since modules inside of them gather parameters of their own."""
    return frozenset(
        program.scopes[scope].fqn
        for fqn in program.gathering
        for call in program.calls.get(fqn, ())
        for scope in program.ancestors(call)
    )


def why_no_units(program: Program, units: Iterable[str]) -> str:
    """Return a message about a unit around modules that ``fully_shard`` gathers one by one; ``""`` if none is."""
    # ``fully_shard`` may free their parameters after their forward, so the unit could not run their ops again.
    wide = sorted(too_wide(program).intersection(units))
    if not wide:
        return ""
    return (
        f"unit {wide[0]!r} is around several modules that fully_shard gathers one by one: what it recomputes may "
        "need parameters that are freed. A unit of a plan must be inside of one of the units of FSDP2."
    )


def narrowed(
    program: Program, decisions: Mapping[str, Mapping[CallSite, int]]
) -> dict[str, dict[CallSite, int]]:
    """Return decisions in which no unit is too wide: the units inside of a wide one discard what it would have.

    Decisions of other units stay the same.
    """
    wide = too_wide(program)
    # Nothing to narrow.
    if wide.isdisjoint(decisions):
        return {unit: dict(sites) for unit, sites in decisions.items()}
    calls = program.outermost_calls(wide)
    found = {unit: dict(sites) for unit, sites in decisions.items() if unit not in wide}
    inner: dict[str, dict[CallSite, int]] = defaultdict(dict)
    for unit in wide.intersection(decisions):
        times = decisions[unit]
        # Sites are of the wide unit: the same ops have other sites in the units inside of it.
        gone = {
            op: times[site]
            for call in program.calls[unit]
            for op, site in program.sites(call).items()
            if site in times and program.ops[op].recomputable
        }
        for call in dict.fromkeys(calls[program.ops[op].scope] for op in gone):
            for op, site in program.sites(call).items():
                if op in gone:
                    known = inner[program.scopes[call].fqn]
                    # Several calls of a module share its sites, so the largest number of times holds for all
                    # of them.
                    known[site] = max(gone[op], known.get(site, 0))
    found.update(inner)
    # In the order of the program.
    return {unit: found[unit] for unit in program.calls if unit in found}


def kept_at_limits(program: Program) -> Program:
    """Return the program with ops marked that must not run again where modules gather and free parameters.

    These are the ops outside of all modules that may be units, and those whose outputs are read or kept by
    autograd outside of the widest such module around the op.
    """
    wide = too_wide(program)
    if not wide:
        return program  # all parameters are gathered from the forward of the model to the end of its backward
    calls = program.outermost_calls(wide)
    places: dict[int, set[int]] = defaultdict(set)  # storage to the units where it is wanted
    for op in program.ops:
        if op.phase == Phase.FORWARD:
            for s in op.reads:
                places[s].add(calls[op.scope])
    # A saved tensor is wanted in the backward pass of the call that saved it.
    for s, scope in zip(program.handle_storages, program.liveness.handle_scopes, strict=True):
        places[s].add(calls[scope])

    def may_run_again(scope: int, writes: Iterable[int]) -> bool:
        unit = calls[scope]
        # Outside of all units nothing could run the op again. If an output is wanted in another unit's pass, the op
        # would have to run while its own unit is sharded.
        return unit != ROOT_SCOPE and all(places[s] <= {unit} for s in writes)

    ops = [
        msgspec.structs.replace(op, recomputable=False)
        if op.recomputable and not may_run_again(op.scope, op.writes)
        else op
        for op in program.ops
    ]
    # ``final_ops`` does the same for ops that write in place on outputs of the marked ones.
    limited = msgspec.structs.replace(program, ops=tuple(ops))
    return msgspec.structs.replace(limited, ops=final_ops(limited))
