"""Moves, translated between call sites, as in a plan, and ops and events, as in a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sacplan.core.decisions import Offload, SeenTensor, Site
from sacplan.core.derived import derived
from sacplan.core.program import CallSite, Event, Phase, Program, StorageKind
from sacplan.errors import PlanError
from sacplan.techniques.base.step import backward_ops
from sacplan.techniques.offload.rewrite import Move, last_writes
from sacplan.torch_compat.ops import is_computation


@derived
def sites_of(program: Program, unit: str) -> Mapping[int, CallSite]:
    """Return by op the sites of the forward ops that compute something in a unit's only call; {} if it has several."""
    scopes = program.calls.get(unit, ())
    if len(scopes) != 1:
        return {}
    ops = program.ops
    return {
        op: site
        for op, site in program.sites(scopes[0]).items()
        if ops[op].phase == Phase.FORWARD and is_computation(ops[op].name)
    }


def tensors_of(program: Program, op: int) -> tuple[int, ...]:
    """Return the storages of the tensors of an op's arguments, then of its outputs; -1 where not known.

    Of a tensor that is written in place, only the version that the op itself reads or makes is known.
    """
    found = program.ops[op]
    # An argument that an earlier op has replaced has the old version's storage, which nobody could find at run time.
    there = {*found.reads, *found.writes}
    storages = (program.tensors[t].storage if t >= 0 else -1 for t in (*found.inputs, *found.outputs))
    return tuple(s if s in there else -1 for s in storages)


def place_of(program: Program, op: int, storage: int) -> int | None:
    """Return the place of a storage among the tensors of an op; None if it has none there."""
    found = tensors_of(program, op)
    return found.index(storage) if storage in found else None


@derived
def first_seen(program: Program, unit: str) -> Mapping[int, int]:
    """Return by storage the first op of a unit with a tensor on it, after the last write in place to the storage."""
    found: dict[int, int] = {}
    # Parts that are split apart count writes separately: the holder of one cannot tell whether a copy is up to date.
    written, split = last_writes(program), split_apart(program)
    for op in sites_of(program, unit):
        if program.ops[op].replaces < 0:
            for s in tensors_of(program, op):
                if s not in split and op > written.get(s, -1):
                    found.setdefault(s, op)
    return found


@derived
def split_apart(program: Program) -> frozenset[int]:
    """Return the storages that are written in place and have been split into parts with versions of their own.

    Examples are the gates of recurrent layers: ``unsafe_chunk`` gives parts that autograd does not take for views.
    """
    split = (op for op in program.ops if op.name.startswith("aten.unsafe_split"))
    parts = {program.tensors[t].storage for op in split for t in op.outputs if t >= 0}
    return frozenset(parts.intersection(last_writes(program)))


_WEIGHTS = {"aten.mm.default": 1, "aten.addmm.default": 2, "aten.convolution.default": 1}
"""By op whose backward formula asks for the weight last, just before it runs: the weight's place among its tensors."""


@derived
def weights_asked_for(program: Program, unit: str) -> Mapping[int, int]:
    """Return by event the op whose weight autograd asks for there: nobody discards weights, so the event stays.

    Only a weight that the unit uses once tells for which of its uses it is asked for.
    """
    uses: Counter[int] = Counter(s for op in sites_of(program, unit) for s in set(tensors_of(program, op)))
    backward = backward_ops(program)
    found = {}
    for op in sites_of(program, unit):
        if program.ops[op].name in _WEIGHTS and op in backward:
            # The executor learns of the backward pass only where autograd asks for what it saved.
            weight = tensors_of(program, op)[weight_of(program, op)]
            is_parameter = weight >= 0 and program.storage_kinds[weight] == StorageKind.PARAMETER
            # A product whose other factor needs no gradient does not save the weight.
            asked = any(weight in program.ops[gradient].reads for gradient in backward[op])
            if is_parameter and asked and uses[weight] == 1:
                found[int(program.liveness.op_events[backward[op][0]])] = op
    return dict(sorted(found.items()))


def weight_of(program: Program, op: int) -> int:
    """Return the place of an op's weight among its tensors."""
    return _WEIGHTS[program.ops[op].name]


def moves_of(program: Program, decisions: Sequence[Offload]) -> list[Move]:
    """Return the moves that decisions stand for. A decision about an op that does not run moves nothing.

    Raises:
        PlanError: one of them cannot be carried out on this step.
    """
    by_site: dict[str, dict[CallSite, int]] = {}
    for unit in {unit for one in decisions for unit in one.units}:
        if len(program.calls.get(unit, ())) > 1:
            raise PlanError(
                f"module {unit!r} runs several times in a step, so which tensor of it to copy to the host is not "
                "known. Offload in modules that run once."
            )
        by_site[unit] = {site: op for op, site in sites_of(program, unit).items()}

    def op_at(site: Site) -> int:
        return by_site[site.unit].get(CallSite(site.op, site.occurrence, site.place), -1)

    found: list[Move] = []
    taken: dict[int, int] = {}  # by storage that moves, where it is sent
    initial = frozenset(program.initial)
    for one in decisions:
        sent, let_go = op_at(one.site), op_at(one.let_go)
        seen = tensors_of(program, sent) if sent >= 0 else ()
        storage = seen[one.tensor] if one.tensor < len(seen) else -1
        # The op does not run here, or has no such tensor; or an earlier decision moves the storage already.
        if storage < 0 or (storage in taken and not _dropped_between(program, storage, taken[storage], sent)):
            continue
        # What a step begins with stays. And versions of tensors do not tell the executor of every write.
        if storage in initial:
            raise _refused(one, "is there before the step, as a parameter is, and stays on the device")
        if last_writes(program).get(storage, -1) >= sent:
            raise _refused(one, "is written in place by that op or after it, so the copy has other contents")
        taken[storage] = sent
        # PyTorch counts a write in place when the op returns, after the mark, so that nobody would let go.
        made = program.ops[sent]
        if let_go <= sent or (made.replaces >= 0 and storage in made.writes):
            let_go = -1
        (call,) = program.calls[one.unit]
        # From ``sent`` on: an earlier op, when it is seen, cannot know of the copy that it is to fetch.
        found.append(Move(storage, sent, let_go, fetch_event(program, one.fetch, sent), call))
    return found


def _refused(decision: Offload, why: str) -> PlanError:
    place = f", place {decision.place!r}" if decision.place else ""
    return PlanError(
        f"the plan copies tensor {decision.tensor} of {decision.op} #{decision.occurrence} of unit {decision.unit!r}"
        f"{place} to the host, but it {why}. Leave out this decision, or have sacplan.plan make the plan."
    )


def _dropped_between(program: Program, storage: int, first: int, last: int) -> bool:
    """Whether all that held a storage for the backward pass let go between two ops, and its copy went with them.

    Code may drop a part of the graph during a forward pass, as for an inner gradient, and keep the tensor.
    """
    begin, end = int(program.liveness.op_events[first]), int(program.liveness.op_events[last])
    held = 0
    for at in program.liveness.events_of[storage]:
        code, arg = program.events[at]
        if at >= end:
            break
        if code == Event.PACK and program.handle_ops[arg] >= 0:
            held += 1
        elif code == Event.RELEASE and program.handle_ops[arg] >= 0:
            held -= 1
            if not held and at > begin:
                return True
    return False


def fetch_event(program: Program, seen: SeenTensor | None, first: int) -> int:
    """Return the event before which a copy back begins: autograd asks for a tensor of an op from ``first`` on.

    -1 if only the need of the copy begins it.
    """
    if seen is None:
        return -1
    sites, site = sites_of(program, seen.unit), CallSite(*seen.site[1:])
    asked = weights_asked_for(program, seen.unit).items()
    return next((at for at, op in asked if op >= first and sites[op] == site), -1)


def seen_weight(program: Program, anchor: int | None, unit_of: Mapping[int, str]) -> SeenTensor | None:
    """Return, by call site, the weight that begins a copy back when autograd asks for it; None if only need does.

    Args:
        program: the step.
        anchor: the op whose weight it is.
        unit_of: by op, the unit that is to see it.
    """
    site = None if anchor is None else _site_of(program, anchor, unit_of)
    # The unit of the plan may be around the one that the option was made for. If the weight has other uses there, it
    # may be asked for by another op first.
    if anchor is None or site is None or anchor not in weights_asked_for(program, site.unit).values():
        return None
    return SeenTensor(*site, weight_of(program, anchor))


def _site_of(program: Program, op: int, unit_of: Mapping[int, str]) -> Site | None:
    unit = unit_of.get(op)
    site = None if unit is None else sites_of(program, unit).get(op)
    return None if unit is None or site is None else Site(unit, *site)


def decision_of(
    program: Program, move: Move, anchor: int | None, unit_of: Mapping[int, str]
) -> Offload | None:
    """Return the decision for a move; None if the program has no call sites for it, as where a chunk has taken an op.

    ``anchor`` and ``unit_of`` are those of ``seen_weight``.
    """
    sent, let_go = (_site_of(program, op, unit_of) for op in (move.sent, move.let_go))
    tensor = place_of(program, move.sent, move.storage)
    if sent is None or let_go is None or tensor is None:
        return None
    return Offload(*sent, tensor=tensor, let_go=let_go, fetch=seen_weight(program, anchor, unit_of))
