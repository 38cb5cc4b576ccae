"""A plan changes no bit of a step: loss, gradients, buffers and random numbers, on random models with random plans.

Two kinds of models are drawn: nets of a few steps, with arbitrary plans, and 200 programs of
``benchmarks.random_programs``, with some of the decisions each. The benchmark has all of them for 2,000.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import sacplan
from benchmarks import random_programs
from benchmarks.harness.steps import on_one_thread
from benchmarks.random_programs import Outcome, make_program
from tests.support.recomputing import (
    fitting_sites,
    fuzz,
    plan_of,
    random_plan,
    same_bits,
    step,
)
from tests.support.slow import slow_after
from tests.zoo.random_nets import STEPS, RandomNet, batch, nets

PROGRAMS, PARTS = 200, 10
TURNS = (
    ("full", "everything"),
    ("adversarial",),
    ("planned",),
    ("random", "full"),
    ("everything", "adversarial"),
)


def run(seed: int) -> Outcome:
    return random_programs.run(seed, kinds=TURNS[seed // 2 % len(TURNS)], threads=seed % 10 == 0)


@pytest.mark.parametrize("part", slow_after(1, range(PARTS)))
def test_no_plan_changes_a_bit_and_the_planners_own_is_never_refused(part: int) -> None:
    failures: dict[int, list[str]] = {}  # by seed, for `python -m benchmarks.random_programs --only`
    seen: Counter[str] = Counter()
    for seed in range(part, PROGRAMS, PARTS):
        outcome = on_one_thread(run)(seed)
        seen.update(steps=outcome.steps, sites=outcome.discarded, tried=outcome.steps > 3)
        if outcome.failures:
            failures[seed] = outcome.failures
    assert not failures
    assert seen["steps"] > 40
    assert seen["sites"] > 50
    assert seen["tried"] > PROGRAMS // PARTS // 2  # autograd itself refuses the others, or keeps nothing


def test_a_seed_makes_the_same_program_again() -> None:
    first, again = make_program(5), make_program(5)
    assert str(first) == str(again)
    assert torch.equal(first.batch(2), again.batch(2))
    assert str(first) != str(make_program(6))


def test_a_wrong_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: recomputed tensors that are off by one bit."""
    from sacplan._recompute.executor.nodes import RecipeNode

    compute = RecipeNode.compute

    def off(self: RecipeNode) -> object:
        outputs = compute(self)
        for t in outputs:
            if t.is_floating_point() and t.numel():
                t[(0,) * t.ndim].add_(1e-3)
        return outputs

    monkeypatch.setattr(RecipeNode, "compute", off)
    found = (seed for seed in range(1, 30, 2) if random_programs.run(seed, threads=False).failures)
    assert len(list(itertools.islice(found, 6))) == 6


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("form", ["twice", "inplace_residual"])
def test_everything_discarded(kind: str, form: str) -> None:
    torch.manual_seed(0)
    model = RandomNet([([kind, "linear"], form)], share=True, tie=True)
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, {"": sorted(fitting_sites(profile, ""))}))
    for seed in (1, 2):
        assert same_bits(step(model, batch(), seed), step(planned, batch(), seed))


@fuzz(20)
@given(nets(list(STEPS)), st.integers(0, 10**6))
def test_a_plan_that_fits_is_never_refused_and_changes_no_bit(model: RandomNet, seed: int) -> None:
    x = batch()
    profile = sacplan.profile(model, x, device="cpu", trace="real")
    plan = random_plan(profile, seed, fitting=True)
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan)
    for seed in (1, 2):
        assert same_bits(step(model, x, seed), step(planned, x, seed))


def test_any_plan_is_refused_or_changes_no_bit() -> None:
    seen: Counter[str] = Counter()

    @fuzz(30)
    @given(nets(list(STEPS)), st.integers(0, 10**6))
    def check(model: RandomNet, seed: int) -> None:
        x = batch()
        plan = random_plan(sacplan.profile(model, x, device="cpu", trace="real"), seed, fitting=False)
        planned = copy.deepcopy(model)
        sacplan.apply(planned, plan, check=False)
        for seed in (1, 2):
            expected = step(model, x, seed)
            try:
                found = step(planned, x, seed)
            except sacplan.RecipeError:
                seen["refused"] += 1
                return
            assert same_bits(expected, found)
        seen["ran"] += bool(plan.units)

    check()
    assert seen["refused"] > 0
    assert seen["ran"] > 10
