"""Parameters that may wait on the host between their uses, and decisions about them as visits.

    home = homes_of(program)[storage]  # the module call in which a forward pass needs the parameter

A parameter may leave if the device never changes it: it is frozen, or its optimizer updates it on the host and keeps
its gradient there. And each use of it has to be one that the executor serves:

- In the forward pass, one module call runs all ops that read it, and its module is called once: the executor brings the
  parameter when that call begins, and takes it away when it ends. A tied parameter goes when the last of its uses ends,
  if that is the only one that autograd saves it for.
- In the backward pass, only ops read it that autograd has unpacked it for, or that run again: it is brought back for
  these, nodes of custom functions among them that keep it in an attribute of their own, as those of bitsandbytes do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sacplan.core.decisions import OffloadWeight
from sacplan.core.derived import derived
from sacplan.core.program import ROOT_SCOPE, Event, Phase, Program, StorageKind
from sacplan.errors import PlanError
from sacplan.techniques.offload.rewrite import FROM_HOST, Visit, last_writes
from sacplan.techniques.offload.sites import fetch_event, seen_weight


class Home(NamedTuple):
    """Where a parameter is used.

    Attributes:
        around: the innermost module call that runs all ops of the forward pass that read it.
        call: the innermost call inside ``around`` that runs the last of these ops, and all that autograd saves it for.
        asked: the event at which the backward pass first asks for it; -1 if the backward pass does not.
    """

    around: int
    call: int
    asked: int


@derived
def homes_of(program: Program) -> Mapping[int, Home]:
    """Return by storage where a parameter is used, for those that may wait on the host."""
    # Parameters that are gathered from shards are others in each step.
    if program.gathering or program.on_dtensors:
        return {}
    found = {s: _home(program, s) for s in program.fixed}
    return {s: home for s, home in found.items() if home is not None}


def _home(program: Program, storage: int) -> Home | None:
    """Return where a parameter is used; None if it has to stay on the device."""
    liveness = program.liveness
    readers, handles, instances = _uses(program)[storage]
    forward = [op for op in readers if program.ops[op].phase == Phase.FORWARD]
    saving = [op for op in map(program.handle_ops.__getitem__, handles) if op >= 0]
    around, call = (
        program.common_scope(program.ops[op].scope for op in ops)
        for ops in ([*forward, *saving], [*forward[-1:], *saving])
    )
    if (
        program.storage_kinds[storage] != StorageKind.PARAMETER
        or ROOT_SCOPE in (around, call)
        or any(program.calls.get(program.scopes[at].fqn) != (at,) for at in (around, call))
        or (storage in (written := last_writes(program)) and program.ops[written[storage]].name != FROM_HOST)
        or storage in program.gradients
        # Kernels of GPUs want the weights of a recurrent layer in one piece of memory, of which each weight is a part.
        or any(part in program.ops[op].name for op in forward for part in ("lstm", "gru", "rnn"))
        # The parameter is resized, or code was seen to take or drop it: something other than the module holds it.
        or any(
            program.events[at][0] in (Event.ALLOC, Event.FREE, Event.RESIZE)
            for at in liveness.events_of[storage]
        )
    ):
        return None
    begin, end = liveness.entered[call], liveness.exited[call]
    # Code's own handles, as those of ops that run in slices, hold the parameter itself.
    if any(
        not begin < liveness.packed[h] < end or (program.handle_ops[h] < 0 and program.handle_tensors[h] < 0)
        for h in handles
    ):
        return None
    lent = [(liveness.unpacked[i], liveness.dropped[i]) for i in instances]
    for op in readers:
        at = int(liveness.op_events[op])
        inside = program.ops[op].phase == Phase.FORWARD and liveness.entered[around] < at < end
        reruns = program.ops[op].recomputes >= 0 and at > end
        if not inside and not reruns and not any(start < at < stop for start, stop in lent):
            return None
    asked = min((start for start, _ in lent), default=-1)
    return Home(around, call, asked) if asked < 0 or asked > end else None


class _Uses(NamedTuple):
    """The uses of a storage: ops that run and read it or return a view of it, handles on it, and instances of these."""

    readers: list[int]
    handles: list[int]
    instances: list[int]


@derived
def _uses(program: Program) -> Mapping[int, _Uses]:
    """Return the uses of the parameters that may leave, in any phase; an update on the host is not a use."""
    found = {s: _Uses([], [], []) for s in program.fixed}
    for code, arg in program.events:
        if code == Event.OP and program.ops[arg].name != FROM_HOST:
            for s in found.keys() & program.ops[arg].reads:
                found[s].readers.append(arg)
        elif code in (Event.PACK, Event.UNPACK) and (s := program.storage_of(code, arg)) in found:
            (found[s].handles if code == Event.PACK else found[s].instances).append(arg)
    return found


def visits_of(program: Program, decisions: Sequence[OffloadWeight]) -> list[Visit]:
    """Return the visits that decisions stand for.

    Raises:
        PlanError: one of them cannot be carried out on this step.
    """
    storages = {name: s for s, name in program.fixed.items()}
    found: list[Visit] = []
    for one in decisions:
        storage = storages.get(one.parameter)
        home = None if storage is None else homes_of(program).get(storage)
        uses = None if home is None else (program.scopes[home.around].fqn, program.scopes[home.call].fqn)
        if storage is None or home is None or uses != (one.around, one.module):
            raise PlanError(
                f"the plan leaves parameter {one.parameter!r} on the host but for the call of module {one.module!r}, "
                "and it is changed on the device, shared, or used elsewhere as well. Leave out this decision, or have "
                "sacplan.plan make the plan."
            )
        calls = program.calls.get(one.begin, ())
        if len(calls) != 1 or program.liveness.entered[calls[0]] > program.liveness.entered[home.around]:
            raise PlanError(
                f"the copy of parameter {one.parameter!r} begins with the call of module {one.begin!r}, which does not "
                f"run once before {one.around!r}. Have sacplan.plan make the plan."
            )
        # What is seen before the call has ended cannot know of the parameter.
        fetch = fetch_event(program, one.fetch, program.scopes[home.call].end_op)
        found.append(Visit(storage, calls[0], home.around, home.call, fetch))
    return found


def weight_decision(
    program: Program, visit: Visit, anchor: int | None, unit_of: Mapping[int, str], unit: str
) -> OffloadWeight | None:
    """Return the decision for a visit; None if other techniques have changed the parameter's uses: then it stays.

    Args:
        program: the step, with what other techniques did to it.
        visit: of the parameter.
        anchor, unit_of: as for ``seen_weight``.
        unit: the one in which what autograd saves of the parameter is seen.
    """
    home = homes_of(program).get(visit.storage)
    same = home is not None and (home.around, home.call) == (visit.around, visit.call)
    if not same or program.liveness.entered[visit.begin] < 0:
        return None
    return OffloadWeight(
        unit=unit,
        parameter=program.fixed[visit.storage],
        module=program.scopes[visit.call].fqn,
        around=program.scopes[visit.around].fqn,
        trained=visit.storage in last_writes(program),
        begin=program.scopes[visit.begin].fqn,
        fetch=seen_weight(program, anchor, unit_of),
    )
