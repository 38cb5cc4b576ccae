"""What options to offload do to memory adds up: the solver's numbers are those of the rewritten step."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

import sacplan
from sacplan.device.links import Link
from sacplan.planning.context import planning_context
from sacplan.planning.effects import RegionProblem
from sacplan.solvers.problem import HOST_MEMORY
from sacplan.techniques.base.step import PlanStep
from sacplan.techniques.offload.rewrite import Move
from sacplan.techniques.offload.sites import weights_asked_for
from sacplan.techniques.offload.timing import copy_ms
from sacplan.techniques.registry import decisions_of, regions, rewritten
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
def test_options_of_several_regions_add_up(device: str) -> None:
    profile, effects = problem_on(device)
    draw = random.Random(0)
    for _ in range(8):
        picks = {i: draw.randrange(len(region.options)) for i, region in enumerate(effects.regions)}
        decisions = decisions_of(profile.program, effects.taken(picks), profile.spec)
        found = rewritten(profile.program, decisions, profile.spec).footprint
        assert found.peak_bytes == effects.problem.peak(picks)


def test_all_that_is_kept_can_come_back_no_earlier_than_it_must() -> None:
    """At the last weight that is asked for before it is needed, though computation waits."""
    torch.manual_seed(0)
    model, batch = models.LM(layers=4, vocab=32), torch.randint(0, 32, (8, 64))
    slow = Link("of the test", 2e9, 2.5e-6)
    spec = dataclasses.replace(sacplan.DeviceSpec.of("h100 without workspaces"), host_link=slow)
    profile = sacplan.profile(model, batch, models.cross_entropy, device=spec)
    step = PlanStep(profile.program, device=profile.spec)
    anchors: dict[int, int] = {}  # by event, the op whose weight is asked for
    for i in range(4):
        anchors.update(weights_asked_for(profile.program, f"layers.{i}"))

    def is_last(move: Move, needed: int) -> bool:
        last = max((at for at in anchors if at < needed), default=-1)
        # An op that has run before the tensor is sent cannot know of it: then the need of it begins the copy.
        return move.fetch == (last if last >= 0 and anchors[last] >= move.sent else -1)

    earlier = 0
    found = [r for r in regions(step, 1, ("recompute", "offload")) if len(r.options) > 1]
    assert len(found) == 4
    for region in found:
        for members in {option.members for option in region.options}:
            most = [
                option
                for option in region.options
                if option.technique == "offload" and option.members == members
            ]
            if not most:
                continue
            size = max(len(option.remembered.moves) for option in most)
            most = [option for option in most if len(option.remembered.moves) == size]
            late = [
                option
                for option in most
                if all(map(is_last, option.remembered.moves, option.remembered.needed))
            ]
            assert late
            # Copies that begin earlier are waited for no longer.
            assert min(option.cost for option in most) <= min(option.cost for option in late)
            earlier += len(most) - len(late)
    assert earlier


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
