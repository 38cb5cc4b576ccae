"""The options of a region: what recomputation leaves on the device may wait on the host instead.

    found = Offloads.of(step).options(region)

A region's tensors are moved in one module, its *unit*: the module call that runs the most of its ops. For some of the
region's options to recompute, what they still keep may be away: all of it, the largest tensors, or what comes in. A
tensor that recomputation reads has to be back when that runs.

When a tensor is let go of, and when it is fetched, follows from predicted times: the copies of a region are put on the
link one after the other. A tensor is let go of at the first op by which it is out, and fetched at the last weight that
autograd asks for early enough. So a tensor is on the device no longer than the link needs, and the places are fixed:
what an option does to memory adds up with what options of other regions do.

The price of an option is what computation has to wait at the region's borders, whatever other regions do. All other
copies hide behind computation together: an option says when they take the link (``Copies``), and a solver adds them up
(``planning/effects.py``). The clocks of the rewritten program (``timing.py``) say what a plan really waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from math import fsum
from typing import NamedTuple

import numpy as np

from sacplan.core.derived import derived
from sacplan.core.program import ROOT_SCOPE, Event, Patch, Phase, Program, StorageKind
from sacplan.device.devices import DeviceSpec
from sacplan.distributed.ranks.unit_limits import too_wide
from sacplan.techniques.base.regions import Copies, Option, Reach, Region
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.offload.rewrite import Move, Visit, behind, last_writes
from sacplan.techniques.offload.sites import first_seen, place_of, sites_of, weights_asked_for
from sacplan.techniques.offload.timing import copy_ms
from sacplan.techniques.recompute.rewrite import recompute_ops
from sacplan.techniques.recompute.technique import Recomputation

_BASES = 10  # options to recompute, at most, for each of which options to offload are made
LARGEST = (1, 2, 3, 4, 6, 8)  # how many of the largest tensors
SMALLEST = 1 / 64  # share of a region's largest tensor: smaller ones stay
TIE = 1e-3  # price of a copy that nobody waits for, as a share of its time: what need not be copied stays
ROUNDED = 9  # digits of a wait in ms: sums of times would tell equal layers apart in their last bits

_MAY_GO = (StorageKind.ACTIVATION, StorageKind.TEMPORARY, StorageKind.OTHER)


class Anchor(NamedTuple):
    """The event at which autograd asks for a weight, which begins copies back, and the op whose weight it is."""

    event: int
    op: int


@dataclass(frozen=True, slots=True)
class Away:
    """What an option has away, and when.

    Attributes:
        moves: the storages; those of activations in the order in which they are needed again.
        anchors: by move, what begins the copy back; None if only the need does.
        needed: by move, the event at which it is needed again; -1 if it is not.
        unit_of: the unit in which each op of the moves is seen.
        unit: the unit of the option.
        spec: the device.
        base: the patch that discards the option's ops, if it has any.
    """

    moves: tuple[Move | Visit, ...]
    anchors: tuple[Anchor | None, ...]
    needed: tuple[int, ...]
    unit_of: tuple[tuple[int, str], ...]
    unit: str
    spec: DeviceSpec
    base: Patch | None = None


Fetches = dict[int, Anchor | None]
"""By storage, what begins its copy back; None: the need."""


class Offloads:
    """The tensors of a step that can be offloaded, and the options that they give.

    Args:
        step: the step to plan for, with a device.
        spec: the device.
    """

    def __init__(self, step: PlanStep, spec: DeviceSpec) -> None:
        self.step, self.spec = step, spec
        program = self.program = step.program
        self.liveness = program.liveness
        self._ends = np.cumsum([op.time_ms for op in program.ops])
        self._op_events = self.liveness.op_events
        self.units = self._find_units()
        self.unit_of = {op: unit for unit in self.units for op in sites_of(program, unit)}
        # Marks may be put on the ops of all units, except on those whose results the user wants kept.
        kept = step.pins.kept_ops
        self._stops = sorted(op for op in self.unit_of if op not in kept)
        # The executor sees the backward pass where autograd asks for a weight. Copies back begin at such events.
        anchors: dict[int, int] = {}
        for unit in self.units:
            anchors.update({at: op for at, op in weights_asked_for(program, unit).items() if op not in kept})
        self._anchors = sorted(starmap(Anchor, anchors.items()))
        self._handles: dict[int, list[int]] = defaultdict(list)
        for handle, storage in enumerate(program.handle_storages):
            self._handles[storage].append(handle)
        # By storage, the first event at which autograd asks for its value.
        self._asked: dict[int, int] = {}
        for instance, handle in enumerate(program.instance_handles):
            at, storage = self.liveness.unpacked[instance], program.handle_storages[handle]
            self._asked[storage] = min(at, self._asked.get(storage, at))

    def _find_units(self) -> dict[str, int]:
        """Return the units of the regions, and their calls."""
        found = map(self._unit_of_region, Recomputation().regions(self.step, 1))
        return {unit: self.program.calls[unit][0] for unit in found if unit is not None}

    def _unit_of_region(self, region: Region) -> str | None:
        """Return the module that runs most of a region's ops and no others, in its only call."""
        program = self.program
        ops = {op for group in region.members for op in group}
        wide = too_wide(program)
        best, most = None, 0
        scopes = {program.ops[op].scope for op in ops} - {ROOT_SCOPE}
        for scope in {a for s in scopes for a in (s, *program.ancestors(s))}:
            fqn = program.scopes[scope].fqn
            # Call sites tell ops apart within one call, so a module that is called again cannot be a unit here.
            inside = [op for op in program.ops_in(scope) if program.ops[op].phase == Phase.FORWARD]
            if (
                len(inside) > most
                and len(program.calls.get(fqn, ())) == 1
                and fqn not in wide
                and self.step.pins.may_be_a_unit(program, fqn)
                and ops.issuperset(inside)
            ):
                best, most = fqn, len(inside)
        return best

    def options(self, region: Region) -> Iterator[Option]:
        """Yield further options of a region, in which tensors are away."""
        unit = self._unit_of_region(region)
        if unit is None or unit not in self.units:
            return
        inside = frozenset(self.program.ops_in(self.units[unit]))
        candidates = self._candidates(unit, inside)
        if not candidates:
            return
        seen: set[object] = set()
        for kept_bytes, members in self._bases(region, inside):
            gone = frozenset(op for member in members for op in region.members[member])
            # Options may differ only in ops that another module runs.
            if gone in seen:
                continue
            seen.add(gone)
            patch = recompute_ops(
                self.program, dict.fromkeys(sorted(gone), 1), frozenset(self.program.calls[unit])
            )
            kept = [s for s in self._kept(candidates, gone) if self._leaves(unit, s)]
            for chosen in self._sets(kept, inside):
                late = self._option(unit, kept_bytes, members, gone, patch, chosen, self._stops[-1])
                yield late
                # Over a slow link the copies of many regions would be under way at once: wait at the end of this one.
                latest = max((op for op in self._stops if op in inside), default=-1)
                prompt = self._option(unit, kept_bytes, members, gone, patch, chosen, latest)
                if prompt.signature != late.signature:
                    yield prompt
            # For the smallest peak, copies come back no earlier than they must, though computation waits for them.
            if kept:
                every, last = tuple(sorted(kept)), self._stops[-1]
                yield self._option(unit, kept_bytes, members, gone, patch, every, last, early=False)

    def _bases(self, region: Region, inside: frozenset[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the bytes kept, with nothing away, if members that the unit runs are recomputed; and these members."""
        known = [o for o in region.options if o.technique == Recomputation.name]
        for option in _along_hull(known, _BASES):
            members = tuple(m for m in option.members if inside.issuperset(region.members[m]))
            yield option.kept_bytes, members
            fewer = self._less_at_heaviest(region, members)
            if fewer != members:
                kept_ops = (op for m in set(members).difference(fewer) for op in region.members[m])
                more = {s for op in kept_ops for s in self.program.ops[op].writes if self._handles.get(s)}
                yield option.kept_bytes + sum(self.program.storage_bytes[s] for s in more), fewer

    def _less_at_heaviest(self, region: Region, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return the members without those that make what the region's heaviest backward op reads.

        Making a tensor again just before that op also takes what the tensor is made from, at the moment at which most
        is alive. Copying it back takes the tensor alone.
        """
        program = self.program
        # Without kept ops: those of slices are among them, which never run as a whole.
        ops = {op for group in region.members for op in group} - self.step.pins.kept_ops
        heaviest = max((_heaviest(program).get(op, (0, -1)) for op in ops), default=(0, -1))[1]
        read = frozenset(program.ops[heaviest].reads) if heaviest >= 0 else frozenset()
        remaining: list[int] = []
        asked: set[int] = set()  # what the remaining members read
        # Backwards, so that the readers of a member's results are known before it.
        for member in sorted(members, key=lambda m: region.members[m], reverse=True):
            rerun = [program.ops[op] for op in region.members[member]]
            made = {s for op in rerun for s in op.writes}
            # Left out: the heaviest op reads what the member makes, or only members that are left out do.
            if not made.isdisjoint(read) or not any(s in asked or self._handles.get(s) for s in made):
                continue
            remaining.append(member)
            asked.update(s for op in rerun for s in op.reads)
        return tuple(sorted(remaining))

    def _candidates(self, unit: str, inside: frozenset[int]) -> list[int]:
        """Return the storages that may be away: nobody outside of the unit keeps or reads them."""
        program, liveness = self.program, self.liveness
        scope = self.units[unit]
        begin, end = liveness.entered[scope], liveness.exited[scope]
        pinned = self.step.pins.kept_ops
        found = {s for op in inside for s in (*program.ops[op].reads, *program.ops[op].writes)}
        initial = set(program.initial)

        # The unit has to see the whole life of a storage up to the backward pass: it is made by a forward op
        # and not written to later, and is read and packed only while the unit runs. What code holds longer
        # would stay on the device anyway.
        def may_go(s: int) -> bool:
            maker, write = program.writer.get(s), last_writes(program).get(s, -1)
            since = max(begin, int(self._op_events[write]) if write >= 0 else begin)
            return (
                s not in initial
                and maker is not None
                and maker not in pinned
                and program.ops[maker].phase == Phase.FORWARD
                and program.storage_kinds[s] in _MAY_GO
                and s not in liveness.outlives_forward
                and s not in program.overwritten
                and all(s != resized for resized, _, _ in program.resizes)
                and program.readers.get(s, frozenset()) <= inside
                and pinned.isdisjoint(program.readers.get(s, ()))
                and all(since < liveness.packed[h] < end for h in self._handles.get(s, ()))
                and s in first_seen(program, unit)
            )

        storages = sorted(s for s in found if may_go(s))
        # A small tensor costs the latency of two copies and frees next to nothing.
        least = SMALLEST * max((program.storage_bytes[s] for s in storages), default=0)
        return [s for s in storages if program.storage_bytes[s] >= least]

    def _kept(self, candidates: Sequence[int], gone: frozenset[int]) -> list[int]:
        """Return the candidates that autograd or recipes hold if some ops are discarded, the largest first."""
        program = self.program
        made = {s for op in gone for s in program.ops[op].writes}
        read = {s for op in gone for s in program.ops[op].reads}
        kept = [s for s in candidates if s not in made and (self._handles.get(s) or s in read)]
        return sorted(kept, key=lambda s: (-program.storage_bytes[s], s))

    def _leaves(self, unit: str, storage: int) -> bool:
        """Whether there is an op, after the last use of a storage, at which it may be let go of."""
        at = first_seen(self.program, unit).get(storage)
        return at is not None and bool(
            self._stops
            and self._stops[-1] > at
            and self._op_events[self._stops[-1]] >= self._last_use(storage)
        )

    def _last_use(self, storage: int) -> int:
        """Return the last event of the forward pass that reads a storage, or takes a handle on it."""
        packed = [self.liveness.packed[h] for h in self._handles.get(storage, ())]
        return max(
            [*packed, *(int(self._op_events[op]) for op in self.program.readers.get(storage, ()))], default=-1
        )

    def _sets(self, kept: Sequence[int], inside: frozenset[int]) -> Iterator[tuple[int, ...]]:
        """Yield the sets of storages that are away together."""
        incoming = tuple(s for s in kept if self.program.writer[s] not in inside)
        # Not all subsets, of which there are too many: the largest few, all, what comes in, and what is made inside.
        sets = [tuple(kept[:n]) for n in LARGEST if n <= len(kept)]
        sets += [tuple(kept), incoming, tuple(s for s in kept if s not in incoming)]
        yield from dict.fromkeys(tuple(sorted(one)) for one in sets if one)

    def _option(
        self,
        unit: str,
        kept_bytes: int,
        members: tuple[int, ...],
        gone: frozenset[int],
        patch: Patch,
        chosen: tuple[int, ...],
        latest: int,
        *,
        early: bool = True,
    ) -> Option:
        """Return the option that recomputes the ops ``gone`` and has the storages ``chosen`` away.

        Args:
            unit: the module whose call the region is.
            kept_bytes: what recomputation without offloading keeps.
            members: indices of the region's groups that recomputation discards.
            gone: the ops in those groups.
            patch: the rewrite of that recomputation.
            chosen: the storages.
            latest: the last op at which computation may wait for a copy out.
            early: copies back begin early enough to be hidden; else at the last anchor, the last event before the need
                at which a copy can begin, and computation waits.
        """
        program = self.program
        copies = {s: copy_ms(self.spec, program.storage_bytes[s]) for s in chosen}
        sent = {s: first_seen(program, unit)[s] for s in chosen}
        needed = self._needed(chosen, gone, patch)
        let_go, late_out = self._let_go(needed, copies, sent, latest)
        fetch, late_back = (self._fetch if early else self._fetch_last)(needed, copies, sent)
        by_need = sorted(chosen, key=needed.__getitem__)
        anchors = tuple(fetch[s] for s in by_need)
        moves = [
            Move(s, sent[s], let_go[s], a.event if a else -1) for s, a in zip(by_need, anchors, strict=True)
        ]
        ops = {*sent.values(), *let_go.values(), *(a.op for a in anchors if a)}
        needed_at = tuple(needed[s] for s in by_need)
        unit_of = tuple(sorted((op, self.unit_of[op]) for op in ops))
        recompute_cost = fsum(self.step.costs[op] for op in gone)
        total = sum(copies.values())
        out_span = min(self._ends[op] for op in sent.values()), max(self._ends[op] for op in let_go.values())
        scope = self.units[unit]
        first = min(program.ops_in(scope))
        # Copies begin and end after the ops of the moves, some of which may be ops of other regions.
        positions = {int(self._op_events[op]) for op in ops} | {behind(program, op) for op in ops}
        positions |= {move.fetch for move in moves if move.fetch >= 0}
        positions |= {self.liveness.entered[scope], self.liveness.exited[scope]}
        return Option(
            cost=recompute_cost + self.step.added_cost(round(late_out + late_back, ROUNDED) + TIE * total),
            kept_bytes=max(0, kept_bytes - sum(program.storage_bytes[s] for s in chosen)),
            members=members,
            technique="offload",
            also=(Recomputation.name,),
            units=tuple(dict.fromkeys((unit, *(found for _, found in unit_of)))),
            remembered=Away(tuple(moves), anchors, needed_at, unit_of, unit, self.spec, patch),
            # Ops are numbered from the unit's first one, so that equal layers have equal signatures.
            signature=tuple(
                (
                    m.sent - first,
                    place_of(program, m.sent, m.storage),
                    m.let_go - first,
                    a.op - first if a else -1,
                    program.storage_bytes[m.storage],
                )
                for m, a in zip(moves, anchors, strict=True)
            ),
            reach=Reach(tuple(sorted(positions)), chosen),
            host_bytes=sum(self.spec.host_bytes(program.storage_bytes[s]) for s in chosen),
            copies=(
                Copies("out", float(out_span[0]), float(out_span[1]), max(0.0, total - late_out)),
                self._back(needed, fetch, total - late_back),
            ),
        )

    def _back(self, needed: dict[int, int], fetch: Fetches, link_ms: float) -> Copies:
        """Return the copies back, from the first anchor that begins one to the last event that needs one."""
        begins = (a.event if a else needed[s] for s, a in fetch.items())
        times = self._time_at(min(begins)), self._time_at(max(needed.values()))
        return Copies("back", *times, max(0.0, link_ms))

    def _let_go(
        self, needed: dict[int, int], copies: dict[int, float], sent: dict[int, int], latest: int
    ) -> tuple[dict[int, int], float]:
        """Return by storage the op after which it is let go of, and how long computation waits for the copies out.

        ``latest`` is the last op that is waited at, unless the storage is used after it.
        """
        found, late, free, stops = {}, 0.0, 0.0, self._stops
        # The link takes one copy at a time, in the order in which they can begin. Copies that begin at the same op go
        # in the order of the moves.
        for s in sorted(needed, key=lambda s: (sent[s], needed[s])):
            free = max(free, float(self._ends[sent[s]])) + copies[s]
            last = self._last_use(s)
            # Indices of the first op after the last use, and of the first of these by which the copy is over.
            unused = bisect_left(
                stops, True, bisect_right(stops, sent[s]), key=lambda op: bool(self._op_events[op] >= last)
            )
            out = bisect_left(stops, True, unused, key=lambda op: bool(self._ends[op] >= free))
            # Let go when the copy is over, but not after ``latest``, and never before the last use.
            found[s] = stops[max(unused, min(out, bisect_right(stops, latest) - 1))]
            late = max(late, free - float(self._ends[found[s]]))
        return found, late

    def _fetch(
        self, needed: dict[int, int], copies: dict[int, float], sent: dict[int, int]
    ) -> tuple[Fetches, float]:
        """Return by storage the anchor at which its copy back begins, and how long computation waits for it."""
        found: Fetches = {}
        begins, late = float("inf"), 0.0
        # Backwards in time: a copy has to be over when its tensor is needed and when the next copy begins, so
        # it begins as late as both allow.
        for s in sorted(needed, key=needed.__getitem__, reverse=True):
            begins = min(self._time_at(needed[s]), begins) - copies[s]
            before = bisect_left(self._anchors, (needed[s],))
            early = bisect_right(self._anchors, begins, key=lambda a: self._time_at(a.event))
            # If neither the copy nor the ops take time, the clock alone could choose an anchor after the need.
            found[s] = self._known(min(before, early) - 1, sent[s])
            if found[s] is None:  # as early as the backward pass allows
                first = found[s] = next((a for a in self._anchors[:before] if a.op >= sent[s]), None)
                late = max(late, self._time_at(first.event if first else needed[s]) - begins)
        return found, late

    def _known(self, at: int, sent: int) -> Anchor | None:
        """Return the anchor ``at``; None if there is none, or its op runs before ``sent`` and knows of no copy."""
        return self._anchors[at] if at >= 0 and self._anchors[at].op >= sent else None

    def _fetch_last(
        self, needed: dict[int, int], copies: dict[int, float], sent: dict[int, int]
    ) -> tuple[Fetches, float]:
        """Return what ``_fetch`` does, with each copy back begun at the last anchor before its tensor is needed."""
        found: Fetches = {}
        free, late = 0.0, 0.0
        for s in sorted(needed, key=needed.__getitem__):
            last = found[s] = self._known(bisect_left(self._anchors, (needed[s],)) - 1, sent[s])
            free = max(free, self._time_at(last.event if last else needed[s])) + copies[s]
            late = max(late, free - self._time_at(needed[s]))
        return found, late

    def _needed(self, chosen: Sequence[int], gone: frozenset[int], patch: Patch) -> dict[int, int]:
        """Return by storage the event at which its value is first needed: autograd asks for it, or an op runs again."""
        n_ops, end = len(self.program.ops), len(self.program.events)
        found = {s: self._asked.get(s, end) for s in chosen}
        for position, events in patch.events.items():
            for code, arg in events:
                # Ops that the patch adds are numbered after those of the program.
                if code == Event.OP and arg >= n_ops:
                    for s in patch.ops[arg - n_ops].reads:
                        if s in found:
                            found[s] = min(found[s], position)
        return found

    def _time_at(self, position: int) -> float:
        """Return the time at which an event comes in the recorded step, in ms."""
        before = int(np.searchsorted(self._op_events, position))
        return float(self._ends[before - 1]) if before else 0.0


def _along_hull(options: Sequence[Option], most: int) -> list[Option]:
    """Return the first option, the last one, and those between that keep least for what they cost, in their order.

    These are the vertices of the lower hull of kept bytes over cost, the farthest below the others first, and then what
    is nearest to it (Ramer, Douglas and Peucker's way to simplify a curve). Options at equal distances in the list
    would change with its length, which depends on how many layers there are.

    Args:
        options: by rising cost.
        most: how many to return at most, two or more.
    """

    def below(i: int) -> float:
        """Return how much less an option keeps than a mix, at the same cost, of its neighbours that are taken."""
        at = bisect_left(taken, i)
        left, right = options[taken[at - 1]], options[taken[at]]
        share = (options[i].cost - left.cost) / (right.cost - left.cost) if right.cost > left.cost else 0.0
        return left.kept_bytes + share * (right.kept_bytes - left.kept_bytes) - options[i].kept_bytes

    taken = sorted({0, len(options) - 1})
    rest = list(range(1, len(options) - 1))
    while rest and len(taken) < most:
        rest.remove(best := max(rest, key=below))
        insort(taken, best)
    return [options[i] for i in taken]


@derived
def _heaviest(program: Program) -> dict[int, tuple[int, int]]:
    """Return by forward op (bytes, op) of its backward op that touches most bytes, workspace included."""
    found: dict[int, tuple[int, int]] = {}
    for i, op in enumerate(program.ops):
        if op.phase == Phase.BACKWARD and op.forward_of >= 0:
            touched = sum(program.storage_bytes[s] for s in {*op.reads, *op.writes})
            found[op.forward_of] = max(found.get(op.forward_of, (0, -1)), (touched + op.workspace_bytes, i))
    return found


@derived
def offloads(step: PlanStep) -> Offloads:
    """Return what can be offloaded in a step, whose device is known."""
    assert step.device is not None
    return Offloads(step, step.device)
