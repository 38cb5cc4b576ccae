"""The bytes that each unit of a step keeps for the backward pass, with decisions and without."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sacplan.core.call_sites import OpSequence
from sacplan.core.decisions import Discarded
from sacplan.core.program import CallSite, Program
from sacplan.planning.layers import LayerReading, kept_layers
from sacplan.planning.value import UnitPlan


def unit_plans(
    program: Program, discarded: Discarded, fqns: Iterable[str]
) -> tuple[dict[str, UnitPlan], tuple[OpSequence, ...]]:
    """Return what each unit keeps and recomputes, and the op sequences that the calls of the units run.

    A ``UnitPlan`` refers to these sequences by index, since many units run the same one.
    """
    units = {}
    sequences: dict[OpSequence, int] = {}
    # Only storages that autograd has a handle on are kept for the backward pass, so only their bytes count below.
    held = set(program.handle_storages)
    for fqn in fqns:
        times = discarded.get(fqn, {})
        kept: dict[CallSite, int] = {}
        # Bytes and ms by call site to recompute. Each site has an entry, even with 0 bytes: the figures of a unit are
        # matched with its decisions by position.
        dropped = dict.fromkeys(times, (0, 0.0))
        saved_bytes = 0
        calls: dict[int, None] = {}
        # A decision holds for all calls of a unit, so bytes and times add up over the calls.
        for scope in program.calls[fqn]:
            calls[sequences.setdefault(program.sequence(scope), len(sequences))] = None
            for i, site in program.sites(scope).items():
                op = program.ops[i]
                n_bytes = sum(program.storage_bytes[s] for s in op.writes if s in held)
                saved_bytes += n_bytes
                # Rotor may drop a value several times, and its op then runs again as often.
                if site in times:
                    before, ms = dropped[site]
                    dropped[site] = before + n_bytes, ms + times[site] * op.time_ms
                elif n_bytes:
                    kept[site] = kept.get(site, 0) + n_bytes
        discarded_bytes = sum(n_bytes for n_bytes, _ in dropped.values())
        units[fqn] = UnitPlan(
            discard_ratio=discarded_bytes / saved_bytes if saved_bytes else 0.0,
            recompute_ms=math.fsum(ms for _, ms in dropped.values()),
            kept=tuple(kept),
            calls=tuple(calls),
            kept_bytes=tuple(kept.values()),
            discarded_bytes=tuple(n_bytes for n_bytes, _ in dropped.values()),
            discarded_ms=tuple(ms for _, ms in dropped.values()),
        )
    return units, tuple(sequences)


def kept_by_layer(program: Program) -> list[LayerReading]:
    """Return what autograd keeps in each layer of a step without a plan."""
    # If a loss function calls only parts of the model and never the model itself, these parts are the units.
    outermost = [""] if "" in program.calls else [fqn for fqn in program.calls if "." not in fqn]
    return kept_layers(*unit_plans(program, {}, outermost))
