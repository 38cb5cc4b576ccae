"""Regions whose options leave parameters on the host, one for each unit that uses some.

    for region in weight_regions(step): region.options

They are regions of their own, without ops, so that a solver chooses their options in addition to those about
activations. An option leaves the largest parameters of a unit on the host, or all. They come back early enough to be
there in time, or as late as possible, which takes the least memory. Computation then waits for them, and that is the
price. Copies that are not waited for share the link with those of activations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from sacplan.core.derived import derived
from sacplan.device.devices import DeviceSpec
from sacplan.distributed.ranks.unit_limits import too_wide
from sacplan.techniques.base.regions import Copies, Option, Reach, Region
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.offload.options import LARGEST, ROUNDED, SMALLEST, TIE, Away, Offloads
from sacplan.techniques.offload.rewrite import Visit
from sacplan.techniques.offload.timing import copy_ms
from sacplan.techniques.offload.weights import homes_of


@derived
def weight_regions(step: PlanStep) -> Sequence[Region]:
    """Return the regions of a step. In inference there are none: a plan does not offload there."""
    if step.device is None or not step.gradients or not homes_of(step.program):
        return ()
    return tuple(_Weights(step, step.device).regions())


class _Weights(Offloads):
    """The parameters of a step that may leave, by unit."""

    def __init__(self, step: PlanStep, spec: DeviceSpec) -> None:
        super().__init__(step, spec)
        self.homes = homes_of(step.program)
        entered = self.liveness.entered
        once = (calls[0] for calls in self.program.calls.values() if len(calls) == 1)
        # Module calls of the forward pass that may begin a copy, in order.
        self._enters = sorted((c for c in once if entered[c] >= 0), key=entered.__getitem__)

    def regions(self) -> Iterator[Region]:
        """Yield the regions, in the order of their first use."""
        program, entered = self.program, self.liveness.entered
        pinned = self.step.pins.kept_ops
        by_unit: dict[str, list[int]] = defaultdict(list)
        for s in sorted(self.homes, key=lambda s: (entered[self.homes[s].around], s)):
            unit = self._unit(s)
            if unit is not None and pinned.isdisjoint(program.readers.get(s, ())):
                by_unit[unit].append(s)
        # A small parameter costs the latency of the copies and frees next to nothing.
        least = SMALLEST * max((program.storage_bytes[s] for s in self.homes), default=0)
        for unit, storages in by_unit.items():
            large = [s for s in storages if program.storage_bytes[s] >= least]
            different = {o.signature: o for o in self._options_of(unit, large)}.values()
            options = sorted(different, key=lambda o: (o.cost, o.host_bytes))
            if options:
                stay = Option(0.0, 0, (), "offload")
                kind = "weights", tuple((o.key, o.cost) for o in options)
                yield Region(unit, (), None, (stay,), ((),), (False,)).extended(options, kind)

    def _unit(self, storage: int) -> str | None:
        """Return the unit of a parameter: that of the region around its uses, or else the module that uses it."""
        program, call = self.program, self.homes[storage].call
        calls = {at: unit for unit, at in self.units.items()}
        for around in (call, *program.ancestors(call)):
            if around in calls:
                return calls[around]
        # A module around such units would take the place of all of them, so its own parameters stay.
        if any(call in program.ancestors(at) for at in calls):
            return None
        fqn = program.scopes[call].fqn
        alone = fqn not in too_wide(program) and self.step.pins.may_be_a_unit(program, fqn)
        return fqn if alone else None

    def _options_of(self, unit: str, storages: Sequence[int]) -> Iterator[Option]:
        largest = sorted(storages, key=lambda s: (-self.program.storage_bytes[s], s))
        sizes = [n for n in LARGEST if n < len(largest)]
        for n in (*sizes, len(largest)) if largest else ():
            chosen = [s for s in storages if s in largest[:n]]
            yield self._option_leaving(unit, chosen, early=True)
            yield self._option_leaving(unit, chosen, early=False)

    def _option_leaving(self, unit: str, chosen: Sequence[int], *, early: bool) -> Option:
        program, liveness = self.program, self.liveness
        copies = {s: copy_ms(self.spec, program.storage_bytes[s]) for s in chosen}
        begin = self._begin(chosen, copies) if early else {s: self.homes[s].around for s in chosen}
        asked = {s: self.homes[s].asked for s in chosen if self.homes[s].asked >= 0}
        ends = {s: program.scopes[self.homes[s].call].end_op for s in asked}
        fetch, late_back = (self._fetch if early else self._fetch_last)(asked, copies, ends)
        anchors = tuple(fetch.get(s) for s in chosen)
        visits = [
            Visit(s, begin[s], self.homes[s].around, self.homes[s].call, a.event if a else -1)
            for s, a in zip(chosen, anchors, strict=True)
        ]
        needed_at = tuple(self.homes[s].asked for s in chosen)
        unit_of = {a.op: self.unit_of[a.op] for a in anchors if a}
        total, backward_total = sum(copies.values()), sum(copies[s] for s in asked)
        late = 0.0 if early else total
        begun = min(self._time_at(liveness.entered[v.begin]) for v in visits)
        needed = max(self._time_at(liveness.entered[v.around]) for v in visits)
        positions = {liveness.entered[v.begin] for v in visits} | {v.fetch for v in visits if v.fetch >= 0}
        positions |= {at for v in visits for at in (liveness.entered[v.around], liveness.exited[v.call])}
        first = program.scopes[visits[0].call].first_op
        return Option(
            cost=self.step.added_cost(round(late + late_back, ROUNDED) + TIE * (total + backward_total)),
            kept_bytes=0,
            members=(),
            technique="offload",
            units=tuple(dict.fromkeys((unit, *unit_of.values()))),
            remembered=Away(tuple(visits), anchors, needed_at, tuple(unit_of.items()), unit, self.spec),
            # Relative to the first call, so that equal layers have equal signatures.
            signature=tuple(
                (
                    v.begin - visits[0].call,
                    v.call - visits[0].call,
                    a.op - first if a else -1,
                    program.storage_bytes[v.storage],
                )
                for v, a in zip(visits, anchors, strict=True)
            ),
            reach=Reach(tuple(sorted(positions)), tuple(chosen)),
            host_bytes=sum(self.spec.host_bytes(program.storage_bytes[s]) for s in chosen),
            copies=(
                Copies("back", begun, needed, total - late),
                *([self._back(asked, fetch, backward_total - late_back)] if asked else []),
            ),
        )

    def _begin(self, chosen: Sequence[int], copies: dict[int, float]) -> dict[int, int]:
        """Return by storage the module call with which its copy begins: the last one that is early enough."""
        found: dict[int, int] = {}
        entered, begins = self.liveness.entered, float("inf")
        # Backwards in time, as in ``_fetch``: a copy ends before its use, and before the next copy begins.
        for s in reversed(chosen):
            own = entered[self.homes[s].around]
            begins = min(self._time_at(own), begins) - copies[s]
            at = bisect_right(self._enters, begins, key=lambda call: self._time_at(entered[call]))
            # Of calls that begin at the same time, some may come after the parameter's own.
            at = min(at, bisect_right(self._enters, own, key=entered.__getitem__))
            found[s] = self._enters[max(at - 1, 0)]
        return found
