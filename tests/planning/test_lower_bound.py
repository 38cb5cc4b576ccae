"""No choice of ops to run again undercuts the bound at its peak; on a small graph, all choices are tried."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.program import Phase
from sacplan.planning.context import PlanningContext
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.recompute.rewrite import recompute_ops
from tests.zoo.layers import FromFunction

pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")


def mixed() -> nn.Module:
    """Cheap and expensive ops of different sizes, one branch."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.wide(x))
        y = torch.tanh(self.narrow(h))
        return (self.out(torch.nn.functional.silu(y)) * y).exp()

    return FromFunction(forward, wide=nn.Linear(64, 256), narrow=nn.Linear(256, 64), out=nn.Linear(64, 64))


@pytest.mark.parametrize(("depth", "reached"), [(1, 0.3), (2, 0.9)])
def test_the_bound_is_under_every_choice(depth: int, reached: float) -> None:
    """And it is not vacuous: at some peak it is that share of what the choice there costs."""
    model = nn.Sequential(*(mixed() for _ in range(depth)))
    program = sacplan.profile(model, torch.randn(512, 64, requires_grad=True), device="cpu").program
    context = PlanningContext(PlanStep(program))
    again = [
        i for i, op in enumerate(program.ops) if op.phase == Phase.FORWARD and op.recomputable and op.writes
    ]
    largest = sorted(again, key=lambda i: -sum(program.storage_bytes[s] for s in program.ops[i].writes))
    again = sorted(largest[:11])
    assert len(again) >= 6
    tightest = 0.0
    for picked in itertools.chain.from_iterable(
        itertools.combinations(again, n) for n in range(len(again) + 1)
    ):
        run = program.with_(recompute_ops(program, dict.fromkeys(picked, 1), {0})).footprint
        bound = context.bound.at(run.peak_bytes)
        assert bound <= run.recompute_ms + 1e-9
        if run.recompute_ms:
            tightest = max(tightest, bound / run.recompute_ms)
    assert tightest > reached
