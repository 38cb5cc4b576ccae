"""What every option of every region does to memory, at every interval of the step.

What a plan takes is the footprint of its rewritten program, but that tells one plan from another only by trying.
Regions that keep what passes between them do not touch each other's storages, so what their options change *adds up*:

    peak(interval) = base(interval) + sum over regions of effect(region, option, interval)

An interval is a run of ops of one region (or of none) in one phase. Within it only that region's own options change
over time, so the sum is exact: the recomputed tensors that live there, the gradients that come in, and the
workspace of the kernels are all in it. An effect is found by folding just the events that touch what the option's
rewrite touches, once for each kind of region, whatever the technique. Where regions do share a storage the sum may be
off, which the rewritten program shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sacplan._program.liveness import Fold
from sacplan._program.program import Event, Patch, Program
from sacplan._solve.problem import DEVICE_MEMORY, Choice, OnceCost, Picks, Problem, ResourceRow
from sacplan._technique.regions import Option, Region
from sacplan._techniques import TECHNIQUES

Bytes = npt.NDArray[np.int64]

_ALIKE = 2e-3
_OP, _FREE, _CALLS = int(Event.OP), int(Event.FREE), (int(Event.ENTER), int(Event.EXIT))


@dataclass(frozen=True, slots=True)
class _LocalEffect:
    """An option's effect in the region's own events, equal for regions of one kind.

    Attributes:
        after: by event of the region, bytes that are alive more (or less) from it on.
        during: the same while the event's op runs.
        again: pairs (event, bytes): alive while something runs again just before it, over what is alive there
            without the option.
    """

    after: Bytes
    during: Bytes
    again: tuple[tuple[int, int], ...]


LocalEffects = dict[tuple[object, ...], _LocalEffect]
"""Effects that are known, by kind of region and option; for one program."""


class _Events:
    """The events that say how long what a region touches is alive, in their order; once for all of its options.

    Attributes:
        events: (position, code, argument) of each.
        made: storages that ops of the region make.
        at: by position, which it is.
        about: by storage, those about it.
    """

    __slots__ = ("about", "at", "events", "made")

    def __init__(self, program: Program, region: Region, events: Sequence[tuple[int, int, int]]) -> None:
        self.events = events
        self.made = {s for group in region.members for op in group for s in program.ops[op].writes}
        self.at = {position: k for k, (position, _, _) in enumerate(events)}
        self.about: dict[int, list[int]] = defaultdict(list)
        storage_of = program.storage_of
        for k, (_, code, arg) in enumerate(events):
            if code == _OP:
                for s in program.ops[arg].writes:
                    self.about[s].append(k)
            elif code not in _CALLS:
                self.about[storage_of(code, arg)].append(k)

    def touched(self, patch: Patch, storages: Iterable[int]) -> list[int]:
        """Those that a patch replaces, or that are about one of some storages."""
        found = {self.at[position] for position in patch.events}
        return sorted(found.union(*map(self.about.__getitem__, storages)))


@dataclass(frozen=True, slots=True, eq=False)
class RegionProblem:
    """What a solver sees, and what its choices stand for.

    Attributes:
        regions: each takes one of its options.
        problem: a choice for each region, with its options in the same order. Rows are the intervals of device
            memory, with the unplanned peak as their limit.
    """

    regions: tuple[Region, ...]
    problem: Problem

    def taken(self, picks: Picks) -> list[tuple[Region, Option]]:
        """The regions that do not take their first option, each with the option that it takes."""
        return [(self.regions[i], self.regions[i].options[o]) for i, o in picks.items() if o]


def effects_of(
    program: Program, regions: Sequence[Region], wide_cost: float = 0.0, known: LocalEffects | None = None
) -> RegionProblem:
    """The effects of the regions' options on the intervals of a step; dominated options are left out.

    Args:
        program: the step without a plan.
        regions: with their options.
        wide_cost: paid once, if any option is taken that makes a module around several regions a unit.
        known: effects that are known; what is found is added.
    """
    found = _Effects(program, regions, {} if known is None else known)
    kept, changes = found.without_dominated()
    kinds: dict[object, int] = {}
    choices = tuple(
        Choice(
            kinds.setdefault(
                (region.kind, tuple((o.technique, o.members) for o in region.options)), len(kinds)
            ),
            np.array([option.cost for option in region.options]),
            change,
            np.array([option.kept_bytes for option in region.options], dtype=np.int64),
        )
        for region, change in zip(kept, changes, strict=True)
    )
    wide = frozenset(
        (i, o) for i, region in enumerate(kept) for o, is_wide in enumerate(region.wide) if is_wide
    )
    ends = [*found.first_op[1:], len(program.ops)]
    return RegionProblem(
        kept,
        Problem(
            rows=tuple(ResourceRow(DEVICE_MEMORY, *ops) for ops in zip(found.first_op, ends, strict=True)),
            base=found.base,
            limits=np.full_like(found.base, found.base.max()),
            choices=choices,
            once_costs=(OnceCost(wide_cost, wide),) if wide and wide_cost else (),
        ),
    )


class _Effects:
    """Works the effects out; ``first_op``: by interval, the first recorded op in it (-1: before the step)."""

    def __init__(self, program: Program, regions: Sequence[Region], known: LocalEffects) -> None:
        self.program = program
        self.liveness = program.liveness
        self.known = known
        self.regions = tuple(regions)
        self.first_op = self._intervals()
        self._starts = np.array([int(op) for op in self.first_op if op >= 0])
        self.base = self._with_first(np.maximum.reduceat(self.liveness.at_op, self._starts))
        ends = np.append(self._starts[1:], len(program.ops))
        self._lengths = ends - self._starts
        self._last_event = self.liveness.op_events[ends - 1]

    def _with_first(self, by_interval: Bytes) -> Bytes:
        return np.concatenate([np.array([self.liveness.initial_bytes], dtype=np.int64), by_interval])

    def _intervals(self) -> list[int]:
        """First ops of the runs of ops of one region in one phase; -1 stands for the state before the step."""
        program = self.program
        region_of_op = {
            op: i for i, region in enumerate(self.regions) for group in region.members for op in group
        }
        region_of_scope: dict[int, int] = {}
        several: set[int] = set()  # module calls that more than one region has ops of: a loop that is cut
        for i, region in region_of_op.items():
            scope = program.ops[i].scope
            if region_of_scope.setdefault(scope, region) != region:
                several.add(scope)
        starts, before = [-1], None
        for i, op in enumerate(program.ops):
            region = region_of_op.get(i, -1)
            if region < 0 and op.scope in several:
                region = region_of_op.get(op.forward_of, -1)
            if region < 0:
                region = region_of_scope.get(op.scope, -1)
            here = (op.phase, region)
            if here != before:
                starts.append(i)
                before = here
        return starts

    def _changes(self) -> tuple[Bytes, ...]:
        patterns: dict[tuple[object, ...], list[_LocalEffect]] = {}
        found = []
        for region in self.regions:
            changes = np.zeros((len(region.options), len(self.base)), dtype=np.int64)
            if len(region.options) > 1:
                events = self._events_for(region)
                key = (region.kind, self._pattern(events))
                if key not in patterns:
                    own = _Events(self.program, region, events)
                    patterns[key] = [
                        self._local_effect_of(key, region, option, own) for option in region.options[1:]
                    ]
                self._spread(patterns[key], np.array([event[0] for event in events]), changes[1:])
            found.append(changes)
        return tuple(found)

    def without_dominated(self) -> tuple[tuple[Region, ...], tuple[Bytes, ...]]:
        """Leaves out options that another one undercuts, or nearly, in cost and, at every interval, in memory.

        Nearly: all regions together lose no more than a share of ``_ALIKE`` of the peak and of the cost of the
        forward pass.
        """
        regions, left = [], []
        share = _ALIKE / len(self.regions) if self.regions else 0.0
        nearly_bytes = int(share * self.base.max())
        nearly_cost = share * sum(self._member_costs())
        undominated: dict[tuple[Hashable, bytes], list[int]] = {}
        for region, change in zip(self.regions, self._changes(), strict=True):
            distinct = np.unique(change, axis=1)
            key = (region.kind, distinct.tobytes())
            if key not in undominated:
                undominated[key] = _undominated(
                    np.array([o.cost for o in region.options]), distinct, nearly_cost, nearly_bytes
                )
            keep = undominated[key]
            regions.append(region.only(keep))
            left.append(change[keep])
        return tuple(regions), tuple(left)

    def _member_costs(self) -> list[float]:
        """The most that each region can cost."""
        return [max(option.cost for option in region.options) for region in self.regions]

    def _pattern(self, events: Sequence[tuple[int, int, int]]) -> tuple[object, ...]:
        """What the events of a region look like, up to names."""
        program = self.program
        local: dict[int, int] = {}
        pattern: list[object] = []
        for _, code, arg in events:
            pattern.append(code)
            if code == _OP:
                op = program.ops[arg]
                pattern.append((op.name, op.workspace_bytes, op.state_bytes, op.replaces >= 0))
                pattern.extend(local.setdefault(s, len(local)) for s in (*op.reads, *op.writes))
            elif code not in _CALLS:
                storage = program.storage_of(code, arg)
                pattern.append(local.setdefault(storage, len(local)))
        return tuple(pattern)

    def _local_effect_of(
        self, key: tuple[object, ...], region: Region, option: Option, events: _Events
    ) -> _LocalEffect:
        number = -1 if option.decision is None else region.options.index(option)  # members say nothing of it
        of_option = (key, option.technique, option.members, number)
        if of_option not in self.known:
            self.known[of_option] = self._local_effect(region, option, events)
        return self.known[of_option]

    def _events_for(self, region: Region) -> list[tuple[int, int, int]]:
        """(position, code, argument) of the events that say how long what a region touches is alive.

        What comes from outside is alive until its last event, whatever the region does.
        """
        program, liveness = self.program, self.liveness
        patches = [option.patch for option in region.options if option.patch is not None]
        if patches:  # of ops that are no region's but its own, backward ones included
            positions = {at for patch in patches for at in patch.events}
            positions.update(
                at for patch in patches for s in self._held(patch) for at in liveness.events_of[s]
            )
            return [(p, *program.events[p]) for p in sorted(positions)]
        ops = [op for group in region.members for op in group]
        made = {s for op in ops for s in program.ops[op].writes}
        positions = {int(liveness.op_events[op]) for op in ops}
        for s in made:
            positions.update(liveness.events_of[s])
        for scope in program.calls.get(region.unit, ()):
            positions.update((liveness.entered[scope], liveness.exited[scope]))
        events = [(p, *program.events[p]) for p in positions]
        outside = {s for op in ops for s in program.ops[op].reads} - made
        died = ((liveness.died[s], _FREE, s) for s in outside)
        events += [event for event in died if event[0] < len(program.events)]
        return sorted(events)

    def _local_effect(self, region: Region, option: Option, own: _Events) -> _LocalEffect:
        """Folds the events of what the option's rewrite touches, with and without it; all the rest is the same."""
        program, storage_of, events = self.program, self.program.storage_of, own.events
        patch = TECHNIQUES[option.technique].option_patch(program, region, option)
        touched = {s for s in patch.handle_storages if s < len(program.storage_bytes)} | set(patch.resized)
        touched.update(
            storage_of(code, arg)
            for code, arg in map(program.events.__getitem__, patch.events)
            if code != _OP and code not in _CALLS
        )
        outside = touched - own.made
        if option.patch is not None:
            outside.difference_update(self._held(patch))
        plain, planned = Fold(program, initial=outside), Fold(program, patch, outside)
        places, after, during = own.touched(patch, touched), [], []
        again: list[tuple[int, int]] = []
        noted, n_ops = 0, len(program.ops)
        for k in places:
            position, code, arg = events[k]
            before = plain.live
            plain.step(code, arg)
            noted, most = planned.live, 0  # where the op does not run any more
            for new_code, new_arg in patch.events.get(position, ((code, arg),)):
                planned.step(new_code, new_arg)
                if new_code == _OP:
                    if new_arg < n_ops:
                        noted = planned.noted
                    else:
                        most = max(most, planned.noted)
            after.append(planned.live - plain.live)
            during.append(noted - plain.noted)
            if most:
                again.append((k, most - before))
        last = np.searchsorted(places, np.arange(len(events)), side="right") - 1
        all_after = np.where(last >= 0, np.array(after)[last], 0)
        all_during = all_after.copy()
        all_during[places] = during
        return _LocalEffect(all_after, all_during, tuple(again))

    def _held(self, patch: Patch) -> Iterator[int]:
        """Storages that a patch holds for longer, and that are not there from the beginning."""
        initial = self.program.initial
        return (s for s in patch.handle_storages if s < len(self.program.storage_bytes) and s not in initial)

    def _spread(self, effects: Sequence[_LocalEffect], where: Bytes, changes: Bytes) -> None:
        """Effects of one kind of region, on the intervals of the step, for one region.

        Where none of the region's events is in an interval, its effect there is the same throughout. So only the ops of
        the others are looked at one by one.

        Args:
            effects: of each option.
            where: positions of the region's events.
            changes: options x intervals, filled in.
        """
        liveness, starts = self.liveness, self._starts
        before = np.searchsorted(where, liveness.op_events[starts], side="left")
        until = np.searchsorted(where, self._last_event, side="right")
        own = np.flatnonzero(before != until)
        lengths = self._lengths[own]
        offsets = np.cumsum(lengths) - lengths
        ops = np.arange(int(lengths.sum())) + np.repeat(starts[own] - offsets, lengths)
        at_op, positions = liveness.at_op[ops], liveness.op_events[ops]
        last = np.searchsorted(where, positions, side="right") - 1
        exact = where[np.maximum(last, 0)] == positions
        for row, effect in zip(changes, effects, strict=True):
            row[1:] = np.where(before > 0, effect.after[before - 1], 0)
            if len(own):
                by_op = np.where(exact, effect.during[last], effect.after[last])
                by_op[last < 0] = 0
                row[own + 1] = np.maximum.reduceat(at_op + by_op, offsets) - self.base[own + 1]
            for k, n_bytes in effect.again:
                interval = int(np.searchsorted(self._last_event, where[k])) + 1
                interval = min(interval, len(row) - 1)
                row[interval] = max(
                    row[interval], liveness.before_event[where[k]] + n_bytes - self.base[interval]
                )


def _undominated(
    costs: npt.NDArray[np.float64], changes: Bytes, nearly_cost: float, nearly_bytes: int
) -> list[int]:
    """The first option, and the options that no other one undercuts; by rising cost."""
    keep = [0]
    for option in sorted(range(1, len(costs)), key=lambda o: (costs[o], changes[o].sum(), o)):
        better = (changes[keep] <= changes[option]).all(axis=1)
        nearly = (changes[keep] <= changes[option] + nearly_bytes).all(axis=1)
        same = np.abs(costs[keep] - costs[option]) <= nearly_cost
        if not (better | (nearly & same)).any():
            keep.append(option)
    return keep
