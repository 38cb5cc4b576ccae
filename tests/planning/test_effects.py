"""What options do to memory adds up to what a replay of all of them says; regions cover the forward pass."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.program import Program
from sacplan.planning.context import PlanningContext
from sacplan.planning.effects import RegionProblem, _Effects
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.recompute.rewrite import recompute_ops
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


def test_more_layers_of_a_kind_take_no_more_effects(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = {}
    for layers in (6, 12):
        with torch.device("meta"):
            model = LM(layers=layers, dim=64, vocab=300)
        program = sacplan.profile(model, tokens(4, 64, 300), cross_entropy, device="h100").program
        ran[layers], _ = _effects_worked_out(program, monkeypatch)
    assert 0 < ran[12] <= ran[6]
