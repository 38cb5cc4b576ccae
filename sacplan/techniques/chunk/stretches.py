"""Stretches of a step for inference, as a rewrite of its program.

The rewrite is exact, since the executor's own loop is rehearsed:

1. ``placed``: a decision names call sites; find their ops in the call of the unit, and what the loop reads.
2. ``_rehearsed``: defer these ops on fake tensors with the kernels of the device (``executor/collected.py``), and run
   the loop under the recorder, with the slices that ``sampling.py`` chooses. The ops and what they allocate go from the
   program, the buffer of each exit is made where its op stood, and the loop runs where the last op stood. What the loop
   reads is freed after it at the earliest.

Layers repeat, so the rewrite of one stretch serves for all that are alike (``families.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial

from sacplan.core.decisions import Chunk
from sacplan.core.derived import derived
from sacplan.core.elements import CallSite, Event, Phase
from sacplan.core.liveness import Fold
from sacplan.core.program import Program
from sacplan.core.replayed_calls import call_with
from sacplan.core.rewriting import PatchBuilder
from sacplan.device.devices import DeviceSpec
from sacplan.errors import PlanError
from sacplan.record.rehearsal import Rehearsal, RehearsedOps
from sacplan.techniques.chunk.dataflow import dataflow
from sacplan.techniques.chunk.executor.collected import Stretch
from sacplan.techniques.chunk.families import Kinship, Rewrite, transferred
from sacplan.techniques.chunk.sampling import SampledSlices
from sacplan.torch_compat.ops import is_alias, is_computation, op_named, tensors_in

_FREE = int(Event.FREE)


@dataclass(frozen=True, slots=True)
class PlacedStretch:
    """A decision in the call of its unit.

    Attributes:
        decision: the decision.
        members: the ops of the loop, with views of what they make.
        end: the last of them, in whose place the loop runs.
        exits: by op, its outputs that are needed after the loop: their positions, each with the last version of its
            storage.
        inputs: the tensors that the loop reads, in the order of first use.
        waiting: the storages of these that the step frees before the loop.
    """

    decision: Chunk
    members: tuple[int, ...]
    end: int
    exits: Mapping[int, Mapping[int, int]]
    inputs: tuple[int, ...]
    waiting: tuple[int, ...]


@derived
def stretch_rewrite(program: Program, decision: Chunk, device: DeviceSpec) -> Rewrite:
    """Return the rewrite for a stretch; worked out once, since searches ask again.

    Raises:
        PlanError: a stretch that the program does not have, or that cannot run in slices as it says.
    """
    stretch, d = placed(program, decision), decision
    # The kind of a stretch is what its ops do not tell: how it is cut, what is read after it, and which inputs wait.
    late = tuple(program.tensors[t].storage in stretch.waiting for t in stretch.inputs)
    alike = _rehearsed_stretches(program, (d.slices, d.dim, d.outer, d.inner, d.exits, late), device)
    kin = ((_kinship(program, other, stretch), rewrite) for other, rewrite in alike)
    found = transferred(kin, program.ops[stretch.end].scope)
    if found is None:
        found = _rehearsed(program, stretch, device)
        alike.append((stretch, found))
    return found


@derived
def _rehearsed_stretches(
    program: Program, kind: Hashable, device: DeviceSpec
) -> list[tuple[PlacedStretch, Rewrite]]:
    """Return the stretches of a kind that were rehearsed, none at first; ``stretch_rewrite`` adds to them."""
    return []


def _kinship(program: Program, one: PlacedStretch, other: PlacedStretch) -> Kinship | None:
    found = Kinship(program, program)
    return found if found.add_ops(one.members, other.members) else None


def placed(program: Program, decision: Chunk) -> PlacedStretch:
    """Return a decision's place in the call of its unit, which must be the only one: sites do not tell calls apart.

    Raises:
        PlanError: the call does not have the decision's sites, or their ops are not as the decision says.
    """
    calls = program.calls.get(decision.unit, ())
    ops = ops_by_site(program, calls[0]) if len(calls) == 1 else {}
    last = decision.sites[-1] if decision.sites else "nothing"
    name = f"a stretch of unit {decision.unit!r} that ends with {last}"
    if not decision.sites or any(site not in ops for site in decision.sites):
        raise PlanError(f"no call runs all ops of {name}. Make a plan for this step with sacplan.plan.")
    sites = [ops[site] for site in decision.sites]
    flow = dataflow(program)
    inside, end = set(sites), sites[-1]
    members: list[int] = []
    made: set[int] = set()
    for i in range(sites[0], end + 1):
        op = program.ops[i]
        # Sites name ops that compute. Views of what the loop makes belong to the loop as well; any other op in between
        # that reads its results would read what is not there yet.
        reads = not made.isdisjoint(op.inputs)
        if i in inside or (reads and is_alias(op.name)):
            members.append(i)
            made.update(flow.outputs[i])
        elif reads:
            raise PlanError(f"{name} makes what {op.name} reads before that.")
    # A plan names an exit by its position among the sites, the patch by its op. Members are in order, so later versions
    # of a storage replace earlier ones.
    latest = {flow.origin[s]: s for i in members for s in program.ops[i].writes}
    exits: dict[int, dict[int, int]] = defaultdict(dict)
    for position, output in decision.exits:
        if position >= len(sites) or output >= len(flow.outputs[sites[position]]):
            raise PlanError(f"an exit of {name} refers to a site or a result that it does not have.")
        storage = flow.storage[flow.outputs[sites[position]][output]]
        exits[sites[position]][output] = latest.get(flow.origin[storage], storage)
    inputs = flow.inputs_of(members)
    storages = dict.fromkeys(flow.storage[t] for t in inputs)
    loop_event = program.liveness.op_events[end]
    waiting = tuple(s for s in storages if program.liveness.freed[s] < loop_event)
    return PlacedStretch(decision, tuple(members), end, exits, tuple(inputs), waiting)


@derived
def ops_by_site(program: Program, scope: int) -> Mapping[CallSite, int]:
    """Return the ops of a module call that compute something; worked out once."""
    return {site: op for op, site in program.sites(scope).items() if is_computation(site.op)}


def _rehearsed(program: Program, stretch: PlacedStretch, device: DeviceSpec) -> Rewrite:
    d = stretch.decision
    rehearsal = Rehearsal(program, device)
    sampled = SampledSlices(rehearsal)
    loop = Stretch(d)
    # First the ops are put off, which allocates the buffers of the exits. Then one run of the loop fills them.
    with rehearsal.running():
        allocated = _deferred(program, stretch, loop, rehearsal)
        in_slices, seen = rehearsal.seen(partial(loop.run, sampled))
    # If not, the engine has run all ops whole. That is no error in a step, but a plan must not count on it.
    if not in_slices:
        raise PlanError(f"the stretch of unit {d.unit!r} that ends with {d.sites[-1]} cannot run in slices.")
    draft, scope = PatchBuilder(program), program.ops[stretch.end].scope
    removed_ms = sum(program.ops[i].time_ms for i in stretch.members)
    _remove(program, draft, stretch)
    for i, buffers in allocated.items():
        at = int(program.liveness.op_events[i])
        draft.events[at] = tuple(rehearsal.into(draft, buffers, Phase.FORWARD, program.ops[i].scope))
    events = sampled.into(draft, seen, Phase.FORWARD, scope)
    # Only what the loop makes is counted: the inputs and the buffers of the exits belong to the step around it.
    fold, loop_bytes = Fold(program, draft.patch(), initial=()), 0
    for code, arg in events:
        fold.step(code, arg)
        loop_bytes = max(loop_bytes, fold.noted)
    # Inputs that the plain step frees before the end (``waiting``) are read by the loop, and so freed after it.
    at = int(program.liveness.op_events[stretch.end])
    draft.events[at] = (*draft.events[at], *events, *((_FREE, s) for s in stretch.waiting))
    added_ms = sum(op.time_ms for op in draft.ops.new) - removed_ms
    return Rewrite(draft.patch(), frozenset(stretch.members), added_ms, loop_bytes=loop_bytes)


def _deferred(
    program: Program, stretch: PlacedStretch, loop: Stretch, rehearsal: Rehearsal
) -> dict[int, RehearsedOps]:
    """Defer the ops of a stretch; return by op what allocated the buffers of its exits."""
    tensors = {t: rehearsal.given(t) for t in stretch.inputs}
    allocated = {}
    for i in stretch.members:
        op, kept = program.ops[i], stretch.exits.get(i, {})
        func = op_named(op.name)
        args, kwargs = call_with(op.arguments, [tensors[t] for t in op.inputs])
        if func is None or not loop.may_defer(func, args, kwargs):
            raise PlanError(f"{op.name} in unit {stretch.decision.unit!r} cannot run in slices.")
        put_off, seen = rehearsal.seen(partial(loop.defer, func, args, kwargs, tuple(kept)))
        made = list(tensors_in(put_off))
        tensors.update(zip(op.outputs, made, strict=True))
        for output, storage in kept.items():
            rehearsal.is_made(made[output], storage)
            allocated[i] = seen
        rehearsal.keep(made[output] for output in kept)
        del made, put_off, args, kwargs  # the loop keeps a tensor for as long as somebody refers to it
    return allocated


def _remove(program: Program, draft: PatchBuilder, stretch: PlacedStretch) -> None:
    """Remove the ops of a stretch, what they allocate, and the frees of what the loop still reads."""
    flow = dataflow(program)
    freed, ops = program.liveness.freed, stretch.members
    results = {s for kept in stretch.exits.values() for s in kept.values()}
    # Where ops write a buffer in place, its last version stays, and is freed when the buffer is.
    dropped = (s for i in ops for s in program.ops[i].writes if s not in results)
    draft.events.update(
        {freed[s]: () for s in (*dropped, *stretch.waiting) if freed[s] < len(program.events)}
    )
    # A view of a buffer is made where the step makes it. All else happens in the loop.
    buffers = {flow.origin[s] for s in results}
    for i in ops:
        if flow.computes[i] or not any(flow.origin[flow.storage[t]] in buffers for t in flow.inputs[i]):
            draft.events[int(program.liveness.op_events[i])] = ()
