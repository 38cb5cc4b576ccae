"""The effect of every option of every region on memory, in every interval of the step.

The memory that a plan takes is the footprint of its rewritten program. That is exact, but a solver cannot rewrite the
program for each of its choices. It gets a linear model instead. Regions that keep what passes between them do not touch
each other's storages, so the changes of their options *add up*:

    peak(interval) = base(interval) + sum over regions of effect(region, option, interval)

An interval is a run of ops of one region (or of none) in one phase. Within it, the effects of all other regions are
constant, so the sum is exact. It includes the recomputed tensors that live there, the gradients that come in, and
the workspaces of the kernels.

To find an effect, we fold the events that the option's rewrite touches, once with the rewrite and once without, and
take the difference. Regions that look alike (the layers of a model) share the result. It does not matter which
technique the option belongs to. If two regions share a storage, the sum may be wrong; the search notices, because it
measures the rewritten program (``search.py``).

Copies of all options share links. The step is cut into windows of equal time, and in each of them

    wait(link, window) = max(0, copies in the window - computation in the window)

is a cost of the plan (priced rows, ``solvers/problem.py``). Ops that run again add to the computation. A copy counts
evenly over the time from where it may begin to where it has to be over. Real queues also wait where copies begin late
in a window, so the model is optimistic, and the clocks of the rewritten program decide.

Options that cost more and save nothing are dropped, and so are near duplicates of other options, which may cost the
optimum a share of ``_ALIKE``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from sacplan.core.derived import derived
from sacplan.core.liveness import Fold
from sacplan.core.program import Event, Patch, Program
from sacplan.solvers.problem import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    Choice,
    Costs,
    OnceCost,
    Picks,
    Problem,
    ResourceRow,
)
from sacplan.techniques.base.regions import Option, Region
from sacplan.techniques.registry import TECHNIQUES

Bytes = npt.NDArray[np.int64]

_ALIKE = 2e-3  # share of the peak, and of the cost, that dropping near duplicates may lose over all regions together
# Windows of the step, in each of which copies share a link. Found by trial on Flux LoRA among 16, 32, 64 and 128: with
# few windows, copies of neighbouring layers overlapped computation that is too far away.
_WINDOWS = 64
_NS = 1e6  # in a millisecond
_OP, _FREE, _CALLS = int(Event.OP), int(Event.FREE), (int(Event.ENTER), int(Event.EXIT))
_HANDLES = int(Event.PACK), int(Event.RELEASE)
_INSTANCES = int(Event.UNPACK), int(Event.DROP)


@dataclass(frozen=True, slots=True)
class _LocalEffect:
    """The effect of an option at the events of its region; equal for regions that look alike.

    All bytes are relative to the step without the option.

    Attributes:
        before: Additional bytes that are alive before the first of these events, from the beginning of the step.
        after: By event of the region, additional bytes that are alive from this event on; may be negative.
        during: By event of the region, additional bytes that are alive while the event's op runs.
        again: Triples (event, bytes, ms): the most additional bytes that are alive while ops run again just before the
            event, and for how long they run.
    """

    before: int
    after: Bytes
    during: Bytes
    again: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """The effects known so far for one program, shared by all choices of techniques and offers.

    Attributes:
        patterns: Number of each pattern of a region's events: patterns are too long for keys of ``effects``.
        effects: Effects by the number of the pattern and what the option does to its events.
    """

    patterns: dict[tuple[object, ...], int]
    effects: dict[tuple[object, ...], _LocalEffect]


@derived
def _known(program: Program) -> _Known:
    return _Known({}, {})


class _Events:
    """The events that decide how long the storages of a region are alive, in order. All of its options share them.

    Attributes:
        events: Position, code and argument of each event.
        made: Storages that ops of the region write, or whose lives its options change.
        at: Position in the program to index in ``events``.
        about: Storage to the indices of its events.
    """

    def __init__(self, program: Program, region: Region, events: Sequence[tuple[int, int, int]]) -> None:
        self.events = events
        self.made = {s for group in region.members for op in group for s in program.ops[op].writes}
        self.made.update(s for option in region.options for s in option.reach.storages)
        self.at = {position: k for k, (position, _, _) in enumerate(events)}
        self.about: dict[int, list[int]] = defaultdict(list)
        storage_of = program.storage_of
        # An event is about the storages that it begins or ceases to hold: an op about those that it writes, any other
        # event about the one that it names. Entering or leaving a module is about none.
        for k, (_, code, arg) in enumerate(events):
            if code == _OP:
                for s in program.ops[arg].writes:
                    self.about[s].append(k)
            elif code not in _CALLS:
                self.about[storage_of(code, arg)].append(k)

    def touched(self, patch: Patch, storages: Iterable[int]) -> list[int]:
        """Return the indices of the events that a patch replaces or that concern these storages."""
        # A patch must not replace events outside of its region: that would be a KeyError here.
        found = {self.at[position] for position in patch.events}
        return sorted(found.union(*map(self.about.__getitem__, storages)))


@dataclass(frozen=True, slots=True, eq=False)
class RegionProblem:
    """A problem for a solver, and the regions that its choices stand for.

    Attributes:
        regions: Each takes one of its options.
        problem: One choice for each region, with its options in the same order. The rows are the intervals of device
            memory, with the unplanned peak as their limit.
    """

    regions: tuple[Region, ...]
    problem: Problem

    def taken(self, picks: Picks) -> list[tuple[Region, Option]]:
        """Return the regions that do not take their first option, each with the option that it takes."""
        return [(self.regions[i], self.regions[i].options[o]) for i, o in picks.items() if o]


def effects_of(
    program: Program,
    regions: Sequence[Region],
    wide_cost: float = 0.0,
    host_bytes: int = 0,
    wait_cost: float = 1,
) -> RegionProblem:
    """Return the problem that the regions pose: the effects of their options, without the dominated ones.

    Args:
        program: The step without a plan.
        regions: The regions with their options.
        wide_cost: Cost that is paid once if any option is taken that makes a module around several regions a unit.
        host_bytes: The memory of the host that all options together may take.
        wait_cost: Cost of a millisecond in which computation waits for a link.
    """
    found = _Effects(program, regions)
    kept, changes, uses = found.without_dominated()
    # Choices are of one kind if their regions are, and if the same options are left after the dominated ones are gone.
    # Solvers that treat layers alike go by this number.
    kinds: dict[object, int] = {}
    on_host = any(option.host_bytes for region in kept for option in region.options)
    choices = tuple(
        Choice(
            kinds.setdefault((region.kind, tuple(o.key for o in region.options)), len(kinds)),
            np.array([option.cost for option in region.options]),
            # At the end of the forward pass all copies are on the host at once, so one row is enough.
            np.column_stack([change, [o.host_bytes for o in region.options], use]) if on_host else change,
            np.array([option.kept_bytes for option in region.options], dtype=np.int64),
        )
        for region, change, use in zip(kept, changes, uses, strict=True)
    )
    # If a plan takes any of these options, the cost of a wide unit is due, and only once.
    wide = frozenset(
        (i, o) for i, region in enumerate(kept) for o, is_wide in enumerate(region.wide) if is_wide
    )
    ends = [*found.first_op[1:], len(program.ops)]
    rows = [ResourceRow(DEVICE_MEMORY, *ops) for ops in zip(found.first_op, ends, strict=True)]
    # A search for a budget replaces these limits by the budget (``Problem.with_limit``).
    base, limits = found.base, np.full_like(found.base, found.base.max())
    if on_host:
        rows.append(ResourceRow(HOST_MEMORY, 0, len(program.ops)))
        base, limits = np.append(base, 0), np.append(limits, host_bytes)
        # Copies overlap the computation of their window, and the step waits for what is left of them.
        windows = np.searchsorted(found.ends, found.edges).tolist()
        rows += [ResourceRow(link, *at, wait_cost / _NS) for link in found.links for at in pairwise(windows)]
        room = np.tile(np.diff(found.edges) * _NS, len(found.links)).astype(np.int64)
        base, limits = np.append(base, np.zeros_like(room)), np.append(limits, room)
    return RegionProblem(
        kept,
        Problem(
            rows=tuple(rows),
            base=base,
            limits=limits,
            choices=choices,
            once_costs=(OnceCost(wide_cost, wide),) if wide and wide_cost else (),
        ),
    )


class _Effects:
    """Computes the effects of options on memory and links.

    Attributes:
        first_op: By interval, its first recorded op; -1 for the state before the step, which is interval 0.
        base: By interval, the peak without a plan.
        links: The links that options send something over.
        ends: By op, when it ends on the clock of the step without waits, in ms.
        edges: On this clock, the times at which windows begin, and the end of the last window.
    """

    def __init__(self, program: Program, regions: Sequence[Region]) -> None:
        self.program = program
        self.liveness = program.liveness
        self.known = _known(program)
        self.regions = tuple(regions)
        self.first_op = self._intervals()
        self.links = sorted({copies.link for r in regions for o in r.options for copies in o.copies})
        self.ends = np.cumsum([op.time_ms for op in program.ops])
        self.edges = np.linspace(0.0, self.ends[-1] if len(self.ends) else 0.0, _WINDOWS + 1)
        self._starts = np.array([int(op) for op in self.first_op if op >= 0])
        # No op runs in interval 0, so its base is what is alive before the first event.
        peaks = np.maximum.reduceat(self.liveness.at_op, self._starts)
        self.base = np.append(np.int64(self.liveness.initial_bytes), peaks)
        ends = np.append(self._starts[1:], len(program.ops))
        self._lengths = ends - self._starts
        self._last_event = self.liveness.op_events[ends - 1]

    def _intervals(self) -> list[int]:
        """Return the first op of each run of ops of one region in one phase; -1 stands for the state before the step.

        A backward op belongs to the region of the module call that it runs for.
        """
        program = self.program
        region_of_op = {
            op: i for i, region in enumerate(self.regions) for group in region.members for op in group
        }
        region_of_scope: dict[int, int] = {}
        several: set[int] = set()  # module calls with ops of more than one region, such as a loop that is cut
        for i, region in region_of_op.items():
            scope = program.ops[i].scope
            if region_of_scope.setdefault(scope, region) != region:
                several.add(scope)
        starts, before = [-1], None
        # A new interval begins where the phase or the region changes. An op that is in no region itself goes to the
        # region of its module call.
        for i, op in enumerate(program.ops):
            region = region_of_op.get(i, -1)
            # In a module call with several regions, a backward op goes to the region of its forward op.
            if region < 0 and op.scope in several:
                region = region_of_op.get(op.forward_of, -1)
            if region < 0:
                region = region_of_scope.get(op.scope, -1)
            here = (op.phase, region)
            if here != before:
                starts.append(i)
                before = here
        return starts

    def _changes(self) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield for each region the effects of its options (options x intervals), and their ns of links in windows.

        The first option changes nothing.
        """
        patterns: dict[tuple[object, ...], list[_LocalEffect]] = {}
        # Regions with one pattern of events have the same effects at these events, so these are computed once. Where
        # the events lie in the step differs, and is worked out for each region.
        for region in self.regions:
            changes = np.zeros((len(region.options), len(self.base)), dtype=np.int64)
            uses = np.zeros((len(region.options), len(self.links), _WINDOWS))
            if len(region.options) > 1:
                events = self._events_for(region)
                pattern = self._pattern(events)
                # Two kinds of regions may have the same events and other options, so the kind is part of the key.
                key = (region.kind, self.known.patterns.setdefault(pattern, len(self.known.patterns)))
                if key not in patterns:
                    own = _Events(self.program, region, events)
                    patterns[key] = [
                        self._local_effect_of(key[1], region, option, own) for option in region.options[1:]
                    ]
                # The first option stays at zero: it changes nothing.
                where = np.array([event[0] for event in events])
                self._spread(patterns[key], where, changes[1:])
                for option, effect, use in zip(region.options[1:], patterns[key], uses[1:], strict=True):
                    self._use_links(option, effect, where, use)
            yield changes, np.rint(uses * _NS).astype(np.int64)

    def _use_links(self, option: Option, effect: _LocalEffect, where: Bytes, use: Costs) -> None:
        """Add to ``use`` (links x windows) the ms of the copies of an option, each spread evenly over its time."""
        for link, begin, end, ms in option.copies:
            begun = np.maximum(self.edges[:-1], begin)
            over = np.minimum(self.edges[1:], max(end, begin + 1 / _NS))
            share = np.maximum(over - begun, 0.0)
            use[self.links.index(link)] += ms * share / (share.sum() or 1.0)
        # Copies overlap ops that run again as well.
        for k, _, ms in effect.again if self.links else ():
            at = self.ends[np.searchsorted(self.liveness.op_events, where[k]) - 1]
            use[:, np.searchsorted(self.edges[1:-1], at)] -= ms

    def without_dominated(self) -> tuple[tuple[Region, ...], tuple[Bytes, ...], tuple[Bytes, ...]]:
        """Return the regions, effects and uses of links without the options that another option beats.

        One option beats another if it costs no more, takes no more memory in any interval and no more time of any link,
        or if it is so close to the other that dropping the other hardly matters. Over all regions together, this loses
        at most a share of ``_ALIKE`` of the peak and of the cost of discarding everything.
        """
        regions, left, left_uses = [], [], []
        # Near duplicates are dropped region by region. Each region gets an equal part of what all of them together may
        # lose.
        share = _ALIKE / len(self.regions) if self.regions else 0.0
        nearly_bytes = int(share * self.base.max())
        nearly_cost = share * sum(max(option.cost for option in region.options) for region in self.regions)
        undominated: dict[tuple[Hashable, ...], list[int]] = {}
        for region, (change, use) in zip(self.regions, self._changes(), strict=True):
            # Dominance is the same on the distinct columns, which are far fewer and equal for regions that look alike.
            distinct = np.unique(change, axis=1)
            # Total use of each link in 100 ns. The windows are left out: they differ for regions that look alike.
            links = np.rint(use.sum(axis=2) / 100).astype(np.int64)
            key = (region.kind, distinct.tobytes(), links.tobytes())
            if key not in undominated:
                undominated[key] = _undominated(
                    np.array([o.cost for o in region.options]),
                    np.column_stack([distinct, links]),
                    nearly_cost,
                    np.repeat([nearly_bytes, nearly_cost * _NS / 100], [distinct.shape[1], links.shape[1]]),
                )
            keep = undominated[key]
            regions.append(region.only(keep))
            left.append(change[keep])
            left_uses.append(use[keep].reshape(len(keep), -1))
        return tuple(regions), tuple(left), tuple(left_uses)

    def _pattern(self, events: Sequence[tuple[int, int, int]]) -> tuple[object, ...]:
        """Return the events of a region with storages and handles numbered as they appear, and what these are.

        It is equal for regions that look alike.
        """
        program = self.program
        local: dict[int, int] = {}
        handles: dict[int, int] = {}
        instances: dict[int, int] = {}
        pattern: list[object] = []
        # What a fold and a rewrite look at. Names of modules and numbers of ops are left out, since they differ between
        # equal layers.
        for _, code, arg in events:
            pattern.append(code)
            if code == _OP:
                op = program.ops[arg]
                pattern.append((op.name, op.workspace_bytes, op.state_bytes, op.replaces >= 0))
                pattern.extend(local.setdefault(s, len(local)) for s in (*op.reads, *op.writes))
            elif code not in _CALLS:
                storage = program.storage_of(code, arg)
                pattern.append(local.setdefault(storage, len(local)))
                # Autograd may unpack one handle several times, so each instance has its own number and its handle's.
                if code in _INSTANCES:
                    pattern.append(instances.setdefault(arg, len(instances)))
                    arg = program.instance_handles[arg]
                if code in _INSTANCES or code in _HANDLES:
                    pattern.append(handles.setdefault(arg, len(handles)))
        # A handle without an op and a tensor belongs to code that runs in slices, and a rewrite treats it as such.
        held = ((program.handle_ops[h] < 0, program.handle_tensors[h] < 0) for h in handles)
        return (*pattern, *(program.storage_bytes[s] for s in local), *held)

    def _local_effect_of(self, pattern: int, region: Region, option: Option, events: _Events) -> _LocalEffect:
        # An option that brings its decision is known by its index in regions of this kind, since its ops do not tell it
        # from others. Any other is known by the places of its ops among the events.
        where: Hashable
        if option.decision is None:
            position = self.liveness.op_events
            places = tuple(sorted(events.at[int(position[op])] for op in region.ops(option)))
            where = places, option.signature
        else:
            where = region.kind, region.options.index(option)
        of_option = (pattern, option.technique, where)
        known = self.known.effects
        if of_option not in known:
            known[of_option] = self._local_effect(region, option, events)
        return known[of_option]

    def _events_for(self, region: Region) -> list[tuple[int, int, int]]:
        """Return position, code and argument of the events that decide how long a region's storages are alive.

        A storage from outside the region contributes only its last event: until then it is alive, whatever the region
        does.
        """
        program, liveness = self.program, self.liveness
        patches = [option.patch for option in region.options if option.patch is not None]
        # Options with patches are those of an offer, whose ops, backward ones included, belong to no other region. So
        # only the events of its patches and of the storages that they hold can change.
        if patches:
            positions = {at for patch in patches for at in patch.events}
            positions.update(
                at for patch in patches for s in self._held(patch) for at in liveness.events_of[s]
            )
            return [(p, *program.events[p]) for p in sorted(positions)]
        ops = [op for group in region.members for op in group]
        made = {s for op in ops for s in program.ops[op].writes}
        positions = {int(liveness.op_events[op]) for op in ops}
        for option in region.options:
            positions.update(option.reach.positions)
            made.update(option.reach.storages)
        for s in made:
            positions.update(liveness.events_of[s])
        # A rewrite may put events where the unit's calls begin and end.
        for scope in program.calls.get(region.unit, ()):
            positions.update((liveness.entered[scope], liveness.exited[scope]))
        events = [(p, *program.events[p]) for p in positions]
        # Whatever the last event of a storage from outside is, a free stands for it: both folds begin with one holder
        # of each.
        outside = {s for op in ops for s in program.ops[op].reads} - made
        died = ((liveness.died[s], _FREE, s) for s in outside)
        # Storages that are alive when the step ends have no last event.
        events += [event for event in died if event[0] < len(program.events)]
        return sorted(events)

    def _local_effect(self, region: Region, option: Option, own: _Events) -> _LocalEffect:
        """Fold the events that the option's rewrite touches, with and without it. All other events cancel out."""
        program, storage_of, events = self.program, self.program.storage_of, own.events
        patch = TECHNIQUES[option.technique].option_patch(program, region, option)
        # Handles of the patch may be on storages that it adds. Those have no events in the plain step.
        touched = {s for s in patch.handle_storages if s < len(program.storage_bytes)} | set(patch.resized)
        touched.update(
            storage_of(code, arg)
            for code, arg in map(program.events.__getitem__, patch.events)
            if code != _OP and code not in _CALLS
        )
        # Storages from outside are alive when the region begins, so both folds start with them; but not with those that
        # an offer's patch holds, since the events that make these are among the folded ones.
        outside = touched - own.made
        if option.patch is not None:
            outside.difference_update(self._held(patch))
        # Storages to which a patch gives another kind, such as weights on the host, are alive before the step.
        outside.update(patch.changed_kinds)
        plain, planned = Fold(program, initial=outside), Fold(program, patch, outside)
        already = planned.live - plain.live if patch.changed_kinds else 0
        places, after, during = own.touched(patch, touched), [], []
        again: list[tuple[int, int, float]] = []
        # ``noted``: bytes during the op of this event with the rewrite; ``most``: the most during an op that runs again
        # before this event.
        noted, n_ops = 0, len(program.ops)
        for k in places:
            position, code, arg = events[k]
            before = plain.live
            plain.step(code, arg)
            # If the rewrite has removed the op, nothing runs here, and only what is alive counts.
            noted, most, ms = planned.live, 0, 0.0
            for new_code, new_arg in patch.events.get(position, ((code, arg),)):
                planned.step(new_code, new_arg)
                if new_code == _OP:
                    if new_arg < n_ops:
                        noted = planned.noted
                    else:  # an op that the rewrite adds: it runs again before the recorded one
                        most, ms = max(most, planned.noted), ms + patch.ops[new_arg - n_ops].time_ms
            after.append(planned.live - plain.live)
            during.append(noted - plain.noted if code == _OP else after[-1])
            # Counted from what the plain step has alive before the event, to which ``_spread`` adds it.
            if most:
                again.append((k, most - before, ms))
        # Extend the result from the touched events to all events of the region: between two of them nothing changes.
        last = np.searchsorted(places, np.arange(len(events)), side="right") - 1
        all_after = np.where(last >= 0, np.array(after)[last], already)
        all_during = all_after.copy()
        all_during[places] = during
        return _LocalEffect(already, all_after, all_during, tuple(again))

    def _held(self, patch: Patch) -> Iterator[int]:
        """Yield the recorded storages that a patch holds and that do not exist before the step."""
        initial = self.program.initial
        return (s for s in patch.handle_storages if s < len(self.program.storage_bytes) and s not in initial)

    def _spread(self, effects: Sequence[_LocalEffect], where: Bytes, changes: Bytes) -> None:
        """Turn effects at the events of one region into effects on the intervals of the step.

        An interval without an event of the region has one constant effect. Only intervals with events are gone through
        op by op: the peak with the option may be at another op than the peak without it.

        Args:
            effects: The effect of each option.
            where: Positions of the region's events.
            changes: Options x intervals, filled in; interval 0 is before the step.
        """
        liveness, starts = self.liveness, self._starts
        # The region's events before an interval begins and those up to its end, as counts. If they are equal, no event
        # lies in the interval.
        before = np.searchsorted(where, liveness.op_events[starts], side="left")
        until = np.searchsorted(where, self._last_event, side="right")
        own = np.flatnonzero(before != until)
        # The ops of all intervals with events in one flat array, so that NumPy goes through all of them at once. The
        # ops of the i-th such interval begin at ``offsets[i]``.
        lengths = self._lengths[own]
        offsets = np.cumsum(lengths) - lengths
        ops = np.arange(int(lengths.sum())) + np.repeat(starts[own] - offsets, lengths)
        at_op, positions = liveness.at_op[ops], liveness.op_events[ops]
        # The event that has happened last when an op runs. If that is the op's own event, what is alive during it
        # counts, else what is alive after the event.
        last = np.searchsorted(where, positions, side="right") - 1
        exact = where[np.maximum(last, 0)] == positions
        for row, effect in zip(changes, effects, strict=True):
            # The constant effect first, for every interval. Intervals with events are overwritten below.
            row[0] = effect.before
            row[1:] = np.where(before > 0, effect.after[before - 1], effect.before)
            if len(own):
                by_op = np.where(exact, effect.during[last], effect.after[last])
                by_op[last < 0] = effect.before  # before the region's first event
                # The difference of the interval's two peaks, which may be at different ops.
                row[own + 1] = np.maximum.reduceat(at_op + by_op, offsets) - self.base[own + 1]
            if not effect.again:
                continue
            # Ops that run again may set the peak of their interval: the first one that ends at their event or later
            # (+ 1, since interval 0 is before the step). Events after the last op count in the last interval.
            at, n_bytes = np.array([triple[:2] for triple in effect.again], dtype=np.int64).T
            intervals = np.minimum(np.searchsorted(self._last_event, where[at]) + 1, len(row) - 1)
            alive = liveness.before_event[where[at]] + n_bytes - self.base[intervals]
            np.maximum.at(row, intervals, alive)


def _undominated(costs: Costs, changes: Bytes, nearly_cost: float, margins: Costs) -> list[int]:
    """Return the first option and the options that no other one beats, by rising cost.

    Options are taken by rising cost, so every option that is already kept costs no more than the one in question.
    """
    keep = [0]
    # If two options cost the same, the one with fewer bytes in sum comes first: only that one can dominate the other,
    # and it is already kept when the other is looked at.
    for option in sorted(range(1, len(costs)), key=lambda o: (costs[o], changes[o].sum(), o)):
        better = (changes[keep] <= changes[option]).all(axis=1)
        nearly = (changes[keep] <= changes[option] + margins).all(axis=1)
        same = np.abs(costs[keep] - costs[option]) <= nearly_cost
        if not (better | (nearly & same)).any():
            keep.append(option)
    return keep
