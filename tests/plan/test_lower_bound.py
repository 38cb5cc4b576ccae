"""No choice of ops to run again undercuts the bound at its peak; on a small graph, all choices are tried."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import sacplan
from sacplan._chunk.entries import ChunkOptions, loss_chunks
from sacplan._plan.context import PlanningContext
from sacplan._program.program import Phase
from sacplan._recompute.rewrite import recompute_ops
from sacplan._technique.step import PlanStep
from sacplan._techniques import rewritten
from tests.zoo.language_models import LM, cross_entropy, tokens
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


def test_the_bound_falls_with_the_budget_and_ends_at_zero() -> None:
    with torch.device("meta"):
        model = LM(layers=3, dim=64, vocab=300)
    profile = sacplan.profile(model, tokens(4, 64, 300), loss_fn=cross_entropy, device="h100")
    bound = PlanningContext(PlanStep(profile.program)).bound
    at = [bound.at(profile.peak_bytes * share // 20) for share in range(8, 21)]
    assert at == sorted(at, reverse=True)
    assert at[0] > 0
    assert at[-1] == 0


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("vocab", [64, 1024])
def test_options_that_are_not_worked_out_do_not_lower_the_bound(vocab: int, device: str) -> None:
    model = LM(layers=2, dim=32, heads=4, vocab=vocab, dropout=0.0)
    profile = sacplan.profile(model, tokens(4, 32, vocab), cross_entropy, device=device)
    found = loss_chunks(profile.program, profile.spec)
    assert isinstance(found, ChunkOptions)
    step = PlanStep(profile.program, device=profile.spec)
    context = PlanningContext(step, offers=(found.offer(step),))
    # Without an offer, with all options at once: the bound of each rewritten step, and its cost.
    every = [(0.0, PlanningContext(step))]
    for option in found.offer(step).region.options[1:]:
        left = PlanStep(rewritten(profile.program, (option.decision,), profile.spec), device=profile.spec)
        every.append((option.cost, PlanningContext(left)))
    floor = profile.program.liveness.floor_bytes
    for share in (0.3, 0.6, 0.8, 0.95):
        budget = int(floor + share * (profile.peak_bytes - floor))
        least = min(cost + alone.bound_at(budget) for cost, alone in every)
        assert context.bound_at(budget) == pytest.approx(least)
        for most in (0.5 * least, 2 * least):
            assert context.bound_at(budget, most) == pytest.approx(min(least, most))
