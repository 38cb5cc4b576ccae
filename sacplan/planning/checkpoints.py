"""The layers of a step, found by structure, and what checkpointing a layer discards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from itertools import pairwise

from sacplan.core.decisions import Discarded
from sacplan.core.pins import Pins
from sacplan.core.program import ROOT_SCOPE, CallSite, Op, Phase, Program, is_inside

Selects = Callable[[Sequence[Op]], set[int]]
"""A rule: it takes the ops of one call of a layer, and returns the positions of those to discard."""


def everything(ops: Sequence[Op]) -> set[int]:
    """Select all ops."""
    return set(range(len(ops)))


def runs_of(program: Program) -> list[list[str]]:
    """Return runs of at least two siblings that are alike and feed one another, the longest first.

    Of two runs that nest (layers, and numbered modules in a layer), only the longer one is returned. This is greedy.
    """
    members: dict[str, set[str]] = defaultdict(set)  # module to the names of modules called directly in it
    for fqn in program.calls:
        parts = fqn.split(".")
        for depth in range(1, len(parts)):
            members[".".join(parts[:depth])].add(parts[depth])
    siblings: dict[str, list[str]] = defaultdict(list)
    for fqn in program.calls:
        parent, _, name = fqn.rpartition(".")
        # A numbered leaf, such as a linear module of nn.Sequential, is not a layer.
        if name.isdigit() and fqn not in program.leaf_fqns and members[fqn]:
            siblings[parent].append(fqn)

    def first_call(fqn: str) -> range:
        return program.ops_in(program.calls[fqn][0])

    def follows(one: str, other: str) -> bool:
        # Sharing half of the names is enough: a model may mix dense layers and mixtures of experts.
        alike = 2 * len(members[one] & members[other]) >= len(members[one] | members[other])
        return alike and program.depends(first_call(other), first_call(one))

    runs: list[list[str]] = []
    for fqns in siblings.values():
        run = fqns[:1]
        # A run is extended as long as neighbours follow each other, and ends at the first pair that does not.
        for one, other in pairwise(fqns):
            if not follows(one, other):
                runs.append(run)
                run = []
            run.append(other)
        runs.append(run)
    taken: list[list[str]] = []
    # The sort is stable, so runs of equal length stay in execution order.
    for run in sorted((run for run in runs if len(run) > 1), key=len, reverse=True):
        others = [fqn for other in taken for fqn in other]
        if not any(is_inside(a, b) or is_inside(b, a) for a in run for b in others):
            taken.append(run)
    return taken


def discarded_in(program: Program, fqn: str, selects: Selects, pins: Pins) -> Discarded:
    """Return by unit the call sites that one layer discards, each once.

    These are the selected ops that made saved tensors, and the selected ops that have to run again to feed them. The
    unit is the layer; if pins forbid that, modules inside it are units.
    """
    chosen: set[int] = set()
    for scope in program.calls[fqn]:
        # Selected by position within one call, so that matmuls are counted from 0 in every call of a layer.
        order = [i for i in program.sites(scope) if program.ops[i].phase == Phase.FORWARD]
        chosen.update(order[at] for at in selects([program.ops[i] for i in order]))
    # Pinned ops are removed only after the selection, so that they do not change how matmuls are counted.
    chosen -= pins.kept_ops
    found = {}
    for unit in pins.units_in(program, fqn):
        sites: dict[CallSite, int] = {}
        for scope, (inside, outside) in _saved_by_call(program, unit).items():
            # Storages that something else holds, such as the unit's output, need no recomputation.
            again = _again(program, scope, inside, outside | program.liveness.outlives_forward, chosen)
            sites.update((site, 1) for op, site in program.sites(scope).items() if op in again)
        # A decision holds for all calls of the unit. If an op may not run again in one call, its site is kept in all.
        for site, ops in program.call_sites(unit).items():
            if not pins.kept_ops.isdisjoint(ops) or not all(program.ops[i].recomputable for i in ops):
                sites.pop(site, None)
        if sites:
            found[unit] = sites
    return found


def _saved_by_call(program: Program, fqn: str) -> dict[int, tuple[set[int], set[int]]]:
    """Return for each call of a module the storages that autograd saves in this call, and those it saves elsewhere."""
    # A handle is inside a call if autograd took it in this call or in a call nested in it.
    scopes = {scope for scope in program.liveness.handle_scopes if scope != ROOT_SCOPE}
    around = {scope: {scope, *program.ancestors(scope)} for scope in scopes}
    by_call: dict[int, tuple[set[int], set[int]]] = {call: (set(), set()) for call in program.calls[fqn]}
    for storage, scope in zip(program.handle_storages, program.liveness.handle_scopes, strict=True):
        for call, (inside, outside) in by_call.items():
            (inside if call in around.get(scope, ()) else outside).add(storage)
    return by_call


def _again(
    program: Program, scope: int, saved: set[int], held: Container[int], chosen: Container[int]
) -> set[int]:
    """Return the chosen ops of one call that have to run again to make its saved storages.

    Walks from the saved storages back to the ops that made them, and on to what these ops read. It ends at ops that are
    not chosen and at storages in ``held``.
    """
    ops = program.ops
    inside = [i for i in program.sites(scope) if i in chosen and ops[i].recomputable]
    # Storages in ``held`` have no entry, so the walk ends at them.
    maker = {s: i for i in inside for s in ops[i].writes if s not in held}
    stack = [maker[s] for s in saved if s in maker]
    again = set(stack)
    while stack:
        for s in ops[stack.pop()].reads:
            if s in maker and maker[s] not in again:
                again.add(maker[s])
                stack.append(maker[s])
    return again
