"""Random options of all regions: bits stay the same, and both peaks are those of the fake step."""

from __future__ import annotations

import copy
import random
from functools import partial

import pytest

import sacplan
from benchmarks.models.random_blocks import Net, net_of
from sacplan.planning.context import planning_context
from sacplan.planning.make import plan_by_hand
from sacplan.planning.plan import Plan
from sacplan.profiling.tracing import trace_step
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.registry import decisions_of, rewritten
from tests.support.recomputing import same_bits, step
from tests.support.threads import at_once
from tests.zoo.units import batch

BOTH = ("recompute", "offload")


def mixed_plan(profile: sacplan.Profile, seed: int) -> Plan:
    """A plan that takes a random option of each region, more often than not one that offloads."""
    draw = random.Random(seed)
    effects = planning_context(PlanStep(profile.program, device=profile.spec), BOTH).effects(1)
    picks = {}
    for i, region in enumerate(effects.regions):
        away = [o for o, option in enumerate(region.options) if option.technique == "offload"]
        picks[i] = draw.choice(away) if away and draw.random() < 0.7 else draw.randrange(len(region.options))
    decisions = decisions_of(profile.program, effects.taken(picks), profile.spec)
    return plan_by_hand(profile, decisions, "none", status="feasible")


def assert_right(model: Net, seed: int) -> int:
    """Check one plan; return how many tensors it offloads."""
    x = batch()
    profile = sacplan.profile(model, x, device="cpu")
    plan = mixed_plan(profile, seed)
    program = rewritten(profile.program, plan.decisions, profile.spec)
    seen = trace_step(
        model, x, None, None, "cpu", "cost-model", "fake",
        prepare=lambda fake: sacplan.apply(fake, plan), saved="observe",
    ).program.footprint  # fmt: skip
    assert seen.peak_bytes == plan.peak_bytes
    assert seen.host_peak_bytes == program.footprint.host_peak_bytes == plan.host_bytes
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan)
    for seed in (1, 2):
        assert same_bits(step(model, x, seed), step(planned, x, seed))
    return len(plan.offloaded)


@pytest.mark.parametrize(
    ("blocks", "form", "tie"),
    [
        ([["gru"]], "dict", False),
        ([["complex", "conv"]], "dict", False),
        ([["linear"], ["dropout"]], "tensor", True),
    ],
    ids=["gates of one matmul", "a conjugate view", "a weight that is used twice"],
)
def test_what_models_do_with_tensors(blocks: list[list[str]], form: str, tie: bool) -> None:
    model = net_of(*blocks, form=form, tie=tie)
    assert sum(assert_right(model, seed) for seed in (0, 1, 3)) > 3


def test_threads_that_train_copies_at_once() -> None:
    """Each thread has entries of its own on the boards of a plan, and nothing stays there."""
    model, x = net_of(*[["gelu", "softmax", "norm"]] * 3), batch()
    profile = sacplan.profile(model, x, device="cpu")
    plan = next(p for p in (mixed_plan(profile, seed) for seed in range(9)) if len(p.offloaded) > 2)
    # No step of the model draws a number, so threads do not change each other's.
    plain = step(model, x)[:-1]
    planned = [copy.deepcopy(model) for _ in range(3)]
    for one in planned:
        sacplan.apply(one, plan)

    def train(one: Net) -> bool:
        return all(same_bits(plain, step(one, x)[:-1]) for _ in range(10))

    assert at_once(*[partial(train, one) for one in planned]) == [True] * 3
