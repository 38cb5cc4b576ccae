"""A plan changes no bit of a step: loss, gradients, buffers and random numbers, on random models with random plans.

These are 200 programs of ``benchmarks.random_programs``, with some of the decisions each: the planner's, random ones
that fit, and any at all. The benchmark has all of them for 2,000.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import pytest
import torch

import sacplan
from benchmarks import random_programs
from benchmarks.harness.steps import on_one_thread
from benchmarks.models.random_blocks import INSTRUCTIONS, MORE, net_of
from benchmarks.random_programs import Outcome, make_program
from tests.support.recomputing import fitting_sites, plan_of, same_bits, step
from tests.support.slow import slow_after
from tests.zoo.units import batch

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
    for seed in range(part * PROGRAMS // PARTS, (part + 1) * PROGRAMS // PARTS):  # every turn in each part
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
    from sacplan.techniques.recompute.executor.nodes import RecipeNode

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


@pytest.mark.parametrize("kind", [*INSTRUCTIONS, *MORE])
def test_everything_discarded(kind: str) -> None:
    twice = kind != "buffer"  # whose second call writes what the first one saved
    model = net_of(
        [kind, "linear"],
        order=[0, 0] if twice else [0],
        tie=True,
        number=2 if kind == "in_place_chain" else 1,
    )
    profile = sacplan.profile(model, batch(), device="cpu", trace="real")
    planned = copy.deepcopy(model)
    sacplan.apply(planned, plan_of(profile, {"": sorted(fitting_sites(profile, ""))}))
    for seed in (1, 2):
        assert same_bits(step(model, batch(), seed), step(planned, batch(), seed))
