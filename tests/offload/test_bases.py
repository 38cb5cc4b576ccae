"""For which options to recompute there are options to offload."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import sacplan
from sacplan.core.program import Phase
from sacplan.techniques.base.regions import Option
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.offload.options import _along_hull, offloads
from sacplan.techniques.registry import regions
from tests.zoo import language_models as models


def options_at(points: list[tuple[float, int]]) -> list[Option]:
    return [Option(cost, kept, (), "recompute") for cost, kept in sorted(points)]


def lower_hull(options: list[Option]) -> list[Option]:
    """Return by brute force the options that are below every line between two others, and both ends."""

    def above_a_line(i: int) -> bool:
        one = options[i]
        return any(
            one.kept_bytes
            >= a.kept_bytes + (b.kept_bytes - a.kept_bytes) * (one.cost - a.cost) / (b.cost - a.cost)
            for a, b in itertools.product(options[:i], options[i + 1 :])
        )

    ends = (0, len(options) - 1)
    return [one for i, one in enumerate(options) if i in ends or not above_a_line(i)]


@pytest.mark.parametrize("seed", range(20))
def test_the_vertices_of_the_hull_come_first(seed: int) -> None:
    draw = random.Random(seed)
    points = [(cost, draw.randrange(10**6)) for cost in draw.sample(range(10**6), 40)]
    options = options_at([(float(cost), kept) for cost, kept in points])
    vertices = lower_hull(options)
    assert _along_hull(options, len(vertices)) == vertices
    assert _along_hull(options, 100) == options
    # Fewer are the same vertices, however many other options there are.
    fewer = min(4, len(vertices))
    assert _along_hull(options, fewer) == _along_hull(vertices, fewer)


def test_equal_options_and_few_options() -> None:
    same = options_at([(1.0, 5)] * 4)
    assert len(_along_hull(same, 3)) == 3
    assert _along_hull(same[:1], 3) == same[:1]


def test_what_the_heaviest_backward_op_reads_can_be_away_beside_recomputation() -> None:
    """To make queries again where attention's gradients are takes what they are made of, and at the worst moment."""
    torch.manual_seed(0)
    model, batch = models.LM(layers=4, vocab=32), torch.randint(0, 32, (8, 64))
    profile = sacplan.profile(model, batch, models.cross_entropy, device="h100 without workspaces")
    program = profile.program
    step = PlanStep(program, device=profile.spec)
    heavy = {
        op.forward_of: op
        for op in program.ops
        if op.phase is Phase.BACKWARD and "attention" in op.name and "backward" in op.name
    }
    found = 0
    for region in regions(step, 1, ("recompute", "offload")):
        attention = [op for group in region.members for op in group if op in heavy]
        if not attention:
            continue
        read = {s for s in heavy[attention[0]].reads if s in program.writer}
        read = {s for s in read if program.ops[program.writer[s]].phase is Phase.FORWARD}
        assert len(read) >= 3
        dearest = [one for one in region.options if one.technique == "recompute"][-1]
        assert any(read.intersection(program.ops[op].writes) for op in region.ops(dearest))
        unit = next(one.units[0] for one in region.options if one.technique == "offload")
        inside = frozenset(program.ops_in(program.calls[unit][0]))
        members = tuple(m for m in dearest.members if inside.issuperset(region.members[m]))
        left = offloads(step)._less_at_heaviest(region, members)
        again = frozenset(op for m in left for op in region.members[m])
        # All of it is asked for by autograd, or by what else is made again.
        asked = {s for op in again for s in program.ops[op].reads} | set(program.handle_storages)
        written = [frozenset(program.ops[op].writes) for op in again]
        assert written
        assert all(read.isdisjoint(each) and not asked.isdisjoint(each) for each in written)
        found += any(one.technique == "offload" and region.ops(one) == again for one in region.options)
    assert found == 4
