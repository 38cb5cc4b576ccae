"""For which options to recompute there are options to offload."""

from __future__ import annotations

import torch

import sacplan
from sacplan._offload.options import offloads
from sacplan._program.program import Phase
from sacplan._technique.step import PlanStep
from sacplan._techniques import regions
from tests.zoo import language_models as models


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
