"""``ByHand``: the weights of N blocks wait on the host, as people swap blocks by hand.

These are the first N blocks, the last N, or N at even distances. All their weights come back ahead of their use, or
only when they are needed; and either all layers are checkpointed or none. For each such way the smallest N that holds
the budget is looked for. So a plan costs no more than the best N, as far as more blocks on the host never cost less.

N blocks free at most the bytes of their weights. So what a step is over its budget says how many more blocks it needs
at least, and three or four steps are measured for each way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from sacplan.core.decisions import Decision, as_decisions
from sacplan.planning.candidate import Candidate
from sacplan.planning.checkpoints import discarded_in, everything, runs_of
from sacplan.techniques.base.regions import Option, Region, units_of
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.registry import TECHNIQUES, by_technique, regions, rewritten

_Taken = list[tuple[Region, Option]]


@dataclass(frozen=True, slots=True)
class ByHand:
    """The solver. It proposes nothing if no weights of blocks may leave the device."""

    techniques: tuple[str, ...]
    name: str = "by hand"

    def proposals(self, step: PlanStep, budget_bytes: int) -> Iterator[tuple[Decision, ...]]:
        """Yield for each way decisions with more and more blocks, until a step with them holds the budget."""
        leaving = tuple(name for name in self.techniques if TECHNIQUES[name].takes_host)
        found = regions(step, 1, leaving) if leaving else []
        layers = [fqn for run in (runs_of(step.program) if found else ()) for fqn in run]
        # Regions of weights have no ops.
        blocks = [r for r in found if not r.members and any(f"{r.unit}.".startswith(f"{f}.") for f in layers)]
        if not blocks:
            return
        discarded = (discarded_in(step.program, fqn, everything, step.pins) for fqn in layers)
        checkpointed = as_decisions({unit: sites for one in discarded for unit, sites in one.items()})
        may_checkpoint = all(technique.name in self.techniques for technique, _ in by_technique(checkpointed))
        n = len(blocks)
        for base, ahead in product([(), checkpointed] if may_checkpoint else [()], (min, max)):
            swaps = [(block, _all_weights(block, ahead)) for block in blocks]
            first = [swaps[:i] for i in range(n + 1)]
            last = [swaps[n - i :] for i in range(n + 1)]
            even = [[swaps[j * n // i] for j in range(i)] for i in range(n + 1)]
            for ways in (first, last, even):
                yield from _least(step, base, ways, budget_bytes)


def _least(
    step: PlanStep, base: tuple[Decision, ...], ways: Sequence[_Taken], budget_bytes: int
) -> Iterator[tuple[Decision, ...]]:
    bytes_of = step.program.storage_bytes.__getitem__
    freed = [sum(bytes_of(s) for _, option in way for s in option.reach.storages) for way in ways]
    program, numbers = rewritten(step.program, base, step.device), [0]
    while numbers:
        way = ways[numbers[0]]
        # A weight leaves in the unit that is checkpointed, since units do not nest.
        units = dict.fromkeys((*units_of(way), *(unit for one in base for unit in one.units)))
        names = dict.fromkeys(option.technique for _, option in way)
        decisions = sum((TECHNIQUES[name].decisions(program, way, units) for name in names), base)
        yield decisions
        over = Candidate(step, decisions, "feasible").footprint.peak_bytes - budget_bytes
        enough = freed[numbers[0]] + over
        numbers = [n for n in range(numbers[0] + 1, len(ways)) if freed[n] >= enough] if over > 0 else []


def _all_weights(region: Region, ahead: Callable[..., Option]) -> Option:
    most = max(option.host_bytes for option in region.options)
    return ahead((o for o in region.options if o.host_bytes == most), key=lambda option: option.cost)
