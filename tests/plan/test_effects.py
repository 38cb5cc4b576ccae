"""What options do to memory adds up to what a replay of all of them says; regions cover the forward pass."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sacplan
from sacplan._plan.context import PlanningContext
from sacplan._plan.effects import RegionProblem, _Effects, _Events, _sum_of
from sacplan._program.decisions import discarded_by
from sacplan._program.program import Phase, Program
from sacplan._recompute.rewrite import recompute_ops, recomputed
from sacplan._technique.regions import Option, Region
from sacplan._technique.step import PlanStep
from sacplan._techniques import TECHNIQUES, decisions_of
from tests.zoo.experts import Experts
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import Shared


def _language_model() -> sacplan.Profile:
    with torch.device("meta"):
        model = LM(layers=5, dim=64, vocab=300)
    return sacplan.profile(model, tokens(4, 64, 300), loss_fn=cross_entropy, device="h100")


def _on_rows(*layers: nn.Module) -> sacplan.Profile:
    return sacplan.profile(nn.Sequential(*layers), torch.randn(64, 32), device="cpu")


PROFILES = {
    "lm": _language_model,
    "experts": lambda: _on_rows(*(Experts() for _ in range(4))),
    "shared": lambda: sacplan.profile(Shared(), torch.randn(2, 16, 16), device="cpu"),
    "plain": lambda: _on_rows(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)),
}


@functools.cache
def program_of(name: str) -> Program:
    return PROFILES[name]().program


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("size", [1, 2])
def test_effects_add_up_to_the_replay(name: str, size: int) -> None:
    context = PlanningContext(PlanStep(program_of(name)))
    effects = context.effects(size)
    program = context.program
    pick = random.Random(size)
    assert any(len(region.options) > 1 for region in effects.regions)
    for _ in range(30):
        choice = {i: pick.randrange(len(region.options)) for i, region in enumerate(effects.regions)}
        choice = {i: o for i, o in choice.items() if o}
        discarded = {
            op for i, o in choice.items() for op in effects.regions[i].ops(effects.regions[i].options[o])
        }
        scopes = {s for i in choice for s in program.calls[effects.regions[i].unit]}
        if any(a in scopes for s in scopes for a in program.ancestors(s)):
            scopes = {0}  # units do not nest: the model is the unit
        run = program.with_(recompute_ops(program, dict.fromkeys(discarded, 1), scopes)).footprint
        assert effects.problem.peak(choice) == run.peak_bytes
        cost = sum(effects.problem.choices[i].costs[o] for i, o in choice.items())
        assert run.recompute_ms == pytest.approx(cost)


@pytest.mark.parametrize("name", PROFILES)
def test_effects_of_parts_add_up_to_that_of_the_whole_option(name: str) -> None:
    step = PlanStep(program_of(name))
    several = 0
    for size in PlanningContext(step).sizes:
        regions = TECHNIQUES["recompute"].regions(step, size)
        effects = _Effects(step.program, regions)
        for region in regions:
            events = _Events(step.program, region, effects._events_for(region))
            for option in region.options[1:]:
                parts = TECHNIQUES["recompute"].parts(step.program, region, option)
                assert sorted(m for part in parts for m in part.members) == sorted(option.members)
                several += len(parts) > 1
                whole = effects._local_effect(region, option, events)
                found = _sum_of([effects._local_effect(region, part, events) for part in parts])
                assert np.array_equal(found.after, whole.after)
                assert np.array_equal(found.during, whole.during)
                assert found.again == whole.again
    assert several or name == "plain"


def test_parts_are_folded_once_for_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[int] = []
    fold = _Effects._local_effect

    def counted(self: _Effects, region: Region, option: Option, own: _Events) -> Any:
        folded.append(len(option.members))
        return fold(self, region, option, own)

    monkeypatch.setattr(_Effects, "_local_effect", counted)
    context = PlanningContext(PlanStep(_language_model().program))
    joined = context.effects(5)
    of_options = sum(len(option.members) for region in joined.regions for option in region.options)
    # Options drop ops of several layers; most folds are of a part of one of them.
    assert sum(folded) < of_options / 3


@pytest.mark.parametrize("name", PROFILES)
def test_decisions_discard_what_was_chosen(name: str) -> None:
    context = PlanningContext(PlanStep(program_of(name)))
    program = context.program
    for size in context.sizes:
        effects = context.effects(size)
        for i, region in enumerate(effects.regions):
            for o in range(1, len(region.options)):
                decisions = discarded_by(decisions_of(program, [(region, region.options[o])]))
                run = recomputed(program, decisions).footprint
                assert set(run.again) == region.ops(region.options[o])
                assert run.peak_bytes == effects.problem.peak({i: o})
                assert not any(fqn in program.leaf_fqns for fqn in decisions)


@pytest.mark.parametrize("name", PROFILES)
def test_each_op_of_the_forward_pass_is_in_one_cell(name: str) -> None:
    context = PlanningContext(PlanStep(program_of(name)))
    ops = context.program.ops
    forward = [i for i, op in enumerate(ops) if op.phase == Phase.FORWARD and op.scope >= 0]
    for size in context.sizes:
        found = sorted(
            op for region in context.effects(size).regions for group in region.members for op in group
        )
        assert found == forward


def test_layers_are_cells_and_experts_are_not() -> None:
    units = [region.unit for region in PlanningContext(PlanStep(program_of("experts"))).effects(1).regions]
    assert units == ["0", "1", "2", "3"]
    layers = [region.unit for region in PlanningContext(PlanStep(program_of("lm"))).effects(1).regions]
    assert layers[1:-1] == ["layers.1", "layers.2", "layers.3"]
    kinds = [region.kind for region in PlanningContext(PlanStep(program_of("lm"))).effects(1).regions]
    assert len(set(kinds[1:-1])) == 1


# --- layers that are alike share what is worked out for them


def _effects_worked_out(program: Program, monkeypatch: pytest.MonkeyPatch) -> tuple[int, RegionProblem]:
    """How many, and what they come to, where regions are not joined."""
    ran = 0
    work_out = _Effects._local_effect

    def counted(*args: Any) -> Any:
        nonlocal ran
        ran += 1
        return work_out(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_Effects, "_local_effect", counted)
        found = PlanningContext(PlanStep(program)).effects(1)
    return ran, found


@pytest.mark.parametrize("name", PROFILES)
def test_shared_effects_are_those_of_each_region(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(name)
    ran, shared = _effects_worked_out(program, monkeypatch)
    own = itertools.count()
    monkeypatch.setattr(_Effects, "_pattern", lambda *_: (next(own),))
    ran_for_each, alone = _effects_worked_out(program, monkeypatch)
    assert ran <= ran_for_each
    for one, other in zip(shared.problem.choices, alone.problem.choices, strict=True):
        assert np.array_equal(one.uses, other.uses)
        assert np.array_equal(one.costs, other.costs)


def test_more_layers_of_a_kind_take_no_more_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = {}
    for layers in (6, 12):
        with torch.device("meta"):
            model = LM(layers=layers, dim=64, vocab=300)
        program = sacplan.profile(model, tokens(4, 64, 300), cross_entropy, device="h100").program
        ran[layers], _ = _effects_worked_out(program, monkeypatch)
    assert 0 < ran[12] <= ran[6]
