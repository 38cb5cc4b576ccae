"""What options to offload do to memory adds up: the solver's numbers are those of the rewritten step."""

from __future__ import annotations

import pytest
import torch

import sacplan
from sacplan._plan.context import planning_context
from sacplan._plan.effects import RegionProblem
from sacplan._solve.problem import HOST_MEMORY
from sacplan._technique.step import PlanStep
from sacplan._techniques import decisions_of, rewritten
from tests.zoo import language_models as models

DEVICES = ("cpu", "h100 without workspaces")


def problem_on(device: str) -> tuple[sacplan.Profile, RegionProblem]:
    torch.manual_seed(0)
    model, batch = models.LM(layers=4, vocab=32), torch.randint(0, 32, (8, 64))
    profile = sacplan.profile(model, batch, models.cross_entropy, device=device)
    context = planning_context(PlanStep(profile.program, device=profile.spec), ("recompute", "offload"))
    return profile, context.effects(1)


@pytest.mark.parametrize("device", DEVICES)
def test_each_option_has_the_peaks_that_the_solver_sees(device: str) -> None:
    profile, effects = problem_on(device)
    host = effects.problem.resources[HOST_MEMORY]
    offloads = 0
    for i, region in enumerate(effects.regions):
        for o, option in enumerate(region.options[1:], start=1):
            decisions = decisions_of(profile.program, [(region, option)], profile.spec)
            found = rewritten(profile.program, decisions, profile.spec).footprint
            assert found.peak_bytes == effects.problem.peak({i: o})
            assert found.host_peak_bytes == effects.problem.total({i: o})[host].max()
            offloads += option.technique == "offload"
    assert offloads >= 40
