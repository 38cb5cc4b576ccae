"""Recurrences that are unrolled in one module: planned in windows, with work that grows with the steps."""

from __future__ import annotations

import cProfile
from functools import cache
from itertools import pairwise

import pytest
import torch

import sacplan
from sacplan.core.pins import NO_PINS
from sacplan.core.program import Phase
from sacplan.techniques.recompute.partition import LARGEST_PART, join, most_joined, partition
from tests.support.steps import mean_square
from tests.zoo.layers import Recurrence

STEPS = (50, 100, 200)  # each twice the one before


@cache
def profile_of(steps: int) -> sacplan.Profile:
    torch.manual_seed(0)
    return sacplan.profile(Recurrence(steps), torch.randn(16, 32), mean_square, device="cpu")


@cache
def planned(steps: int) -> sacplan.Plan:
    """The smallest plan."""
    return sacplan.plan(profile_of(steps), "smallest", "greedy")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_planning_does_no_more_for_each_step_of_a_longer_loop() -> None:
    """Functions are called about twice as often for twice the steps."""
    found = []
    for steps in STEPS:
        profile = profile_of.__wrapped__(steps)  # of which nothing has been worked out
        calls = cProfile.Profile(builtins=False)
        calls.runcall(sacplan.plan, profile, "smallest", "greedy")
        found.append(sum(entry.callcount for entry in calls.getstats()))
    for fewer, more in pairwise(found):
        assert more < 2.3 * fewer, found


@pytest.mark.parametrize("steps", STEPS)
def test_windows_are_alike_and_cut_between_steps(steps: int) -> None:
    program = profile_of(steps).program
    parts, _ = partition(program, NO_PINS)
    wanted = [i for i, op in enumerate(program.ops) if op.phase is Phase.FORWARD and op.scope >= 0]
    names = {tuple(program.ops[op].name for (op,) in part.members) for part in parts[1:-1]}
    assert len(names) == 1
    for size in (1, 2, most_joined(parts)):
        joined = join(program, parts, size)
        assert sorted(op for part in joined for group in part.members for op in group) == wanted
        assert max(len(part.members) for part in joined) <= 2 * LARGEST_PART
    # One tensor passes from each window to the next: the state.
    for part, after in pairwise(parts):
        made = {s for (op,) in part.members for s in program.ops[op].writes}
        read = {s for (op,) in after.members for s in program.ops[op].reads}
        assert len(made & read) == 1


@pytest.mark.slow
def test_the_smallest_peak_falls_behind_the_steps() -> None:
    """Kept are the states between windows, so the share of the unplanned peak falls with the steps."""
    shares = [planned(steps).peak_bytes / profile_of(steps).peak_bytes for steps in (25, 50, 100)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.25, shares


@pytest.mark.slow
def test_the_step_with_the_plan_takes_what_it_says() -> None:
    plan = planned(STEPS[0])
    torch.manual_seed(0)
    found = sacplan.verify(Recurrence(STEPS[0]), torch.randn(16, 32), plan, mean_square)
    assert found.peak_bytes == plan.peak_bytes
