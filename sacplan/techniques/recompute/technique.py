"""The technique "recompute": discard what ops make, and run them again when the backward pass asks for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from sacplan.core.decisions import Decision, Discarded, Partition, Recompute, as_decisions, discarded_by
from sacplan.core.derived import derived
from sacplan.core.program import CallSite, Patch, Program
from sacplan.device.devices import DeviceSpec
from sacplan.distributed.ranks.unit_limits import narrowed
from sacplan.errors import PlanError
from sacplan.techniques.base.regions import Option, Region, outermost, units_of
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.base.technique import Installed, Technique, ToInstall
from sacplan.techniques.recompute.in_place_groups import reading_lost_versions
from sacplan.techniques.recompute.regions import Regions
from sacplan.techniques.recompute.rewrite import recompute, recompute_ops


class Recomputation(Technique):
    """Recomputation names the regions of the forward pass, which come with its own options (``regions.py``)."""

    name = "recompute"
    decision = (Recompute, Partition)
    keeps_bits = True
    shares_units = True

    def longest_run(self, step: PlanStep) -> int:
        """Return the length of the longest run of parts that can be joined."""
        return _regions(step).longest_run

    def regions(self, step: PlanStep, size: int) -> Sequence[Region]:
        """Return regions that cover the forward pass, each with its options."""
        return _regions(step).joined(size)

    def option_patch(self, program: Program, region: Region, option: Option) -> Patch:
        """Return the patch that discards the option's ops in the region's unit."""
        discarded = dict.fromkeys(region.ops(option), 1)
        return recompute_ops(program, discarded, frozenset(program.calls.get(region.unit, ())))

    def decisions(
        self, program: Program, taken: Sequence[tuple[Region, Option]], units: Collection[str] | None = None
    ) -> tuple[Decision, ...]:
        """Return decisions about call sites of units that do not nest: an outer unit takes over those of inner ones."""
        gone = frozenset(op for region, option in taken for op in region.ops(option))
        # A unit inside a unit belongs to the outer one in the executor, so only the outermost are named.
        outer = set(outermost(program, units_of(taken) if units is None else units))
        discarded: dict[str, dict[CallSite, int]] = defaultdict(dict)
        for unit in program.calls:
            if unit in outer:
                for scope in program.calls[unit]:
                    for op, site in program.sites(scope).items():
                        if op in gone:
                            discarded[unit][site] = 1
        return as_decisions(narrowed(program, discarded))

    def patch(self, program: Program, decisions: Sequence[Decision], device: DeviceSpec | None) -> Patch:
        """Return the patch that drops the discarded storages and runs their ops again.

        Raises:
            PlanError: one of these ops cannot run again.
        """
        discarded = discarded_by(decisions)
        _check_runs_again(program, discarded)
        return recompute(program, discarded)

    def install(self, wanted: ToInstall) -> Iterator[Installed]:
        """Replace the forward of each unit; if there are partitions, also have the compiler split graphs by them."""
        # Imported here, since planning does not need the executors.
        from sacplan.techniques.recompute.executor.partitions import InstalledPartitions
        from sacplan.techniques.recompute.executor.recipes import InstalledRecipes

        partitions = [decision for decision in wanted.decisions if isinstance(decision, Partition)]
        discarded = discarded_by(wanted.decisions)
        arguments = wanted.model, discarded, wanted.recorded, wanted.check
        yield InstalledPartitions(partitions, *arguments) if partitions else InstalledRecipes(*arguments)


@derived
def _regions(step: PlanStep) -> Regions:
    early = step.program.liveness.unpacked_before_peak
    return Regions(step.program, step.costs, early, step.pins)


def _check_runs_again(program: Program, discarded: Discarded) -> None:
    """Raise ``PlanError`` for an op that cannot run again. Call sites that do not run are ignored."""
    # The executor decides op by op: it would discard such an op, and hold the op's inputs.
    for unit, sites in discarded.items():
        fixed = _fixed_sites(program, unit)
        found = next((site for site in sites if site in fixed), None)
        if found is not None:
            raise _cannot_run_again(unit, found, "it would not give the same values, or have another effect")
        lost = reading_lost_versions(program, unit, sites).items()
        if (found := next((site for site, may_stay in lost if not may_stay), None)) is not None:
            why = "what it reads is written in place later, and the plan keeps what makes that"
            raise _cannot_run_again(unit, found, why)


@derived
def _fixed_sites(program: Program, unit: str) -> frozenset[CallSite]:
    """Return the call sites of a unit whose op may not run again, in one of its calls at least."""
    ops = program.ops
    return frozenset(
        site
        for scope in program.calls.get(unit, ())
        for op, site in program.sites(scope).items()
        if not ops[op].recomputable
    )


def _cannot_run_again(unit: str, site: CallSite, why: str) -> PlanError:
    place = f", place {site.place!r}" if site.place else ""
    return PlanError(
        f"the plan discards {site.op} #{site.occurrence} of unit {unit!r}{place}, which cannot run again in this step: "
        f"{why}. Leave out this decision, or have sacplan.plan make the plan."
    )
