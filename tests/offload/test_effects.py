"""What options to offload do to memory adds up: the solver's numbers are those of the rewritten step."""

from __future__ import annotations

import pytest
import torch

import sacplan
from sacplan.planning.context import planning_context
from sacplan.planning.effects import RegionProblem
from sacplan.solvers.problem import HOST_MEMORY
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.offload.timing import copy_ms
from sacplan.techniques.registry import decisions_of, rewritten
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


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_waits_for_an_option_that_has_no_wait_in_its_price(device: str) -> None:
    """Places are reckoned for the order in which copies go, also where two begin at one op."""
    profile, effects = problem_on(device)
    together = 0
    for region in effects.regions:
        for option in region.options:
            if option.technique != "offload":
                continue
            decisions = decisions_of(profile.program, [(region, option)], profile.spec)
            program = rewritten(profile.program, decisions, profile.spec)
            again_ms = program.footprint.recompute_ms
            moves = option.remembered.moves
            copies_ms = sum(copy_ms(profile.spec, profile.program.storage_bytes[m.storage]) for m in moves)
            # What no one waits for has a price of a thousandth of its time.
            if option.cost - again_ms > 1.001e-3 * copies_ms:
                continue
            assert program.step_ms == pytest.approx(profile.program.step_ms + again_ms, rel=1e-12)
            together += len({move.sent for move in moves}) < len(moves)
    assert together >= 30
