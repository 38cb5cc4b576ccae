"""The technique "offload": what is kept for the backward pass waits on the host, and so do parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter

from msgspec.structs import replace

from sacplan.core.decisions import Decision, Offload, OffloadWeight
from sacplan.core.program import CallSite, Patch, Program
from sacplan.core.rewriting import PatchBuilder
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.techniques.base.regions import Option, Region, outermost, units_of
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.base.technique import Installed, Technique, ToInstall
from sacplan.techniques.offload.options import Away, offloads
from sacplan.techniques.offload.rewrite import Move, Visit, moved
from sacplan.techniques.offload.sites import decision_of, moves_of
from sacplan.techniques.offload.timing import clocked
from sacplan.techniques.offload.weight_options import weight_regions
from sacplan.techniques.offload.weights import visits_of, weight_decision


class Offloading(Technique):
    """Saved tensors wait on the host between the passes, and parameters between their uses."""

    name = "offload"
    row = "offload"
    uncompiled = "torch.compile cannot copy to the host: run the step uncompiled."
    decision = Offload, OffloadWeight
    keeps_bits = True
    takes_host = True
    shares_units = True
    frees_otherwise = True

    def regions(self, step: PlanStep, size: int) -> Sequence[Region]:
        """Return regions of parameters, whose options leave these on the host. They have no ops."""
        return weight_regions(step.outside)

    def leaving_bytes(self, step: PlanStep) -> int:
        """Return the bytes of the parameters that may be on the host."""
        regions = weight_regions(step.outside)
        leaving = {s for region in regions for option in region.options for s in option.reach.storages}
        return sum(step.program.storage_bytes[s] for s in leaving)

    def options(self, step: PlanStep, region: Region) -> Sequence[Option]:
        """Return options in which what the region keeps waits on the host. In inference nothing is kept."""
        if not step.gradients or step.device is None:
            return ()
        return list(offloads(step.outside).options(region))

    def option_patch(self, program: Program, region: Region, option: Option) -> Patch:
        """Return the patch that discards the option's ops, and moves tensors."""
        away: Away = option.remembered
        return moved(program, away.moves, away.spec, away.base)

    def decisions(
        self, program: Program, taken: Sequence[tuple[Region, Option]], units: Collection[str] | None = None
    ) -> tuple[Decision, ...]:
        """Return the decisions, by call sites of the outermost units; none for what chunks have taken."""
        outer = outermost(program, units_of(taken) if units is None else units)
        calls = {scope: unit for unit in outer for scope in program.calls[unit]}

        def outer_unit(unit: str) -> str:
            scope = program.calls[unit][0]
            return next(calls[a] for a in (scope, *program.ancestors(scope)) if a in calls)

        found: list[tuple[int, Decision | None]] = []
        # A region may name ops by a module inside of another unit of the plan, and units do not nest.
        for _, option in taken:
            away: Away = option.remembered
            unit_of = {op: outer_unit(unit) for op, unit in away.unit_of}
            for move, anchor, needed in zip(away.moves, away.anchors, away.needed, strict=True):
                anchor_op = anchor.op if anchor else None
                if isinstance(move, Visit):
                    unit = outer_unit(away.unit)
                    found.append((needed, weight_decision(program, move, anchor_op, unit_of, unit)))
                else:
                    found.append((needed, decision_of(program, move, anchor_op, unit_of)))
        # Copies back that begin at the same place go in this order, and computation waits for the first one it needs.
        found.sort(key=itemgetter(0))
        return tuple(one for _, one in found if one is not None)

    def patch(self, program: Program, decisions: Sequence[Decision], device: DeviceSpec | None) -> Patch:
        """Return the patch that moves the tensors, with the time that computation waits for copies.

        Raises:
            PlanError: one of the decisions cannot be carried out on this step.
        """
        # Two passes: events are placed first, and how long each wait takes depends on all of them.
        moves: list[Move | Visit] = [
            *moves_of(program, [one for one in decisions if isinstance(one, Offload)]),
            *visits_of(program, [one for one in decisions if isinstance(one, OffloadWeight)]),
        ]
        spec = device or resolve_device("cpu")
        patch = moved(program, moves, spec)
        draft = PatchBuilder.continuing(program, patch)
        waits = clocked(draft.ops.__getitem__, draft.stream(), draft.storage_bytes.__getitem__, spec)
        for op, ms in waits.items():
            draft.ops[op] = replace(draft.ops[op], time_ms=ms)
        return draft.patch()

    def install(self, wanted: ToInstall) -> Iterator[Installed]:
        """Mark the ops at which something is copied in the units."""
        # The executors are not needed to plan. That of recipes has the hooks through which all saved tensors go.
        from sacplan.techniques.offload.executor.marks import Board, Fetch, LetGo, Send
        from sacplan.techniques.offload.executor.weights import InstalledWeights
        from sacplan.techniques.recompute.executor.recipes import InstalledRecipes

        # At one op memory is let go of first, then copies out begin, and copies back are ordered last.
        marks: dict[str, dict[CallSite, list[LetGo | Send | Fetch]]] = defaultdict(lambda: defaultdict(list))
        board = Board()
        numbered = list(enumerate(wanted.decisions))
        own = [(number, one) for number, one in numbered if isinstance(one, Offload)]
        weights = {number: one for number, one in numbered if isinstance(one, OffloadWeight)}
        for number, one in own:
            marks[one.let_go.unit][CallSite(*one.let_go[1:])].append(LetGo(board, number))
        for number, one in own:
            marks[one.unit][one.sites[0]].append(Send(board, number, one.tensor, one.unit))
        for weight in weights.values():
            marks[weight.unit]  # an empty entry: what it saves of a parameter is taken away without a mark
        fetches = [(number, one.fetch) for number, one in own]
        fetches += [(number, one.fetch) for number, one in weights.items()]
        for number, fetch in fetches:
            if fetch is not None:
                marks[fetch.unit][CallSite(*fetch.site[1:])].append(Fetch(board, number, fetch.tensor))
        frozen = {unit: {site: tuple(all_) for site, all_ in sites.items()} for unit, sites in marks.items()}
        yield InstalledRecipes(wanted.model, {}, wanted.recorded, check=False, marks=frozen)
        if weights:
            yield InstalledWeights(wanted.model, weights, board)
