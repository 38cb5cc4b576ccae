"""The planned time of a step that offloads is that of streams, simulated event by event from what the executor does."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import mixed_plan, scattered_plan
from benchmarks.harness.plans import as_budget, budget_at
from benchmarks.harness.streams import fake_step, noted_streams, planned_ms, simulated, simulated_ms
from benchmarks.models.cases import Case
from sacplan.device.links import LINKS, Link
from tests.offload.test_trained_weights import OPTIMIZER
from tests.offload.test_trained_weights import TOKENS as TRAINED_TOKENS
from tests.offload.test_trained_weights import Net as Trained
from tests.offload.test_weights import KINDS, TOKENS
from tests.support.slow import slow_after
from tests.support.steps import mean_square
from tests.zoo import language_models
from tests.zoo.convnets import CNN
from tests.zoo.layers import FromFunction, Recurrence, Uneven

LINKS_OF_CASES = {
    "PCIe 5.0": LINKS["PCIe 5.0"],
    # What NVIDIA says of one direction. No device of the table has it yet.
    "NVLink-C2C": Link("NVLink-C2C", 450e9, 1.9e-6),
    "busy": Link("busy", 2e9, 2.5e-6),
    "far": Link("far", 48e9, 1e-3),
}


def recurrent() -> nn.Module:
    """Layers of which each is a loop over time, of another length."""
    return nn.Sequential(nn.Sequential(*(Recurrence(steps) for steps in (2, 5, 3))))


def lstm() -> nn.Module:
    """cuDNN's kernels on a GPU: one op for a layer."""
    layers = (
        FromFunction(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(64, 64, batch_first=True))
        for _ in range(3)
    )
    return nn.Sequential(nn.Sequential(*layers))


CASES: dict[str, Callable[[], Case]] = {
    "transformer": lambda: Case(
        language_models.LM(layers=4, vocab=32), torch.randint(0, 32, (16, 128)), language_models.cross_entropy
    ),
    "uneven": lambda: Case(Uneven(), torch.randn(16, 512, 32), mean_square),
    "recurrent": lambda: Case(recurrent(), torch.randn(16384, 32), mean_square),
    "lstm": lambda: Case(lstm(), torch.randn(32, 128, 64), mean_square),
    "cnn": lambda: Case(CNN(), torch.randn(64, 4, 8, 8), mean_square),
}
OF_WEIGHTS: dict[str, Callable[[], Case]] = {
    "frozen": lambda: Case(KINDS["tied"](), TOKENS, mean_square),
    "in 8 bits": lambda: Case(KINDS["int8"](), TOKENS, mean_square),
    "in 4 bits": lambda: Case(KINDS["nf4"](), TOKENS, mean_square),
    "trained": lambda: Case(Trained(), TRAINED_TOKENS, mean_square, OPTIMIZER),
}


@functools.cache
def profile_of(name: str, link: str) -> tuple[Case, sacplan.Profile]:
    torch.manual_seed(0)
    case = (CASES | OF_WEIGHTS)[name]()
    spec = dataclasses.replace(
        sacplan.DeviceSpec.of("h100 without workspaces"), host_link=LINKS_OF_CASES[link]
    )
    return case, sacplan.profile(case.model, case.batch, case.loss_fn, case.optimizer, device=spec)


def assert_as_simulated(case: Case, profile: sacplan.Profile, plan: sacplan.Plan) -> None:
    seen, ms = simulated(case, plan, profile.spec)
    # Both add up the same times, in another order.
    assert planned_ms(profile, plan) == pytest.approx(ms, rel=1e-9)
    assert (seen.peak_bytes, seen.program.footprint.host_peak_bytes) == (plan.peak_bytes, plan.host_bytes)


@pytest.mark.parametrize(
    ("name", "techniques", "link"),
    slow_after(
        5,
        [
            ("transformer", ("recompute", "offload"), "busy"),
            ("uneven", ("recompute", "offload"), "NVLink-C2C"),
            ("recurrent", ("offload",), "PCIe 5.0"),
            ("lstm", ("offload",), "busy"),
            ("transformer", ("offload",), "far"),
            *(("transformer", ("recompute", "offload"), link) for link in LINKS_OF_CASES if link != "busy"),
        ],
    ),
)
def test_planned(name: str, techniques: tuple[str, ...], link: str) -> None:
    case, profile = profile_of(name, link)
    least = sacplan.plan(profile, "smallest", "greedy", techniques=("offload",)).peak_bytes
    budget = as_budget(budget_at(0.3, least, profile.peak_bytes))
    plan = sacplan.plan(profile, budget, "greedy", techniques=techniques)
    assert plan.offloaded or "recompute" in techniques  # which is cheaper where the link is slow
    assert_as_simulated(case, profile, plan)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("link", slow_after(1, ["busy", "NVLink-C2C"]))
def test_at_random_places(name: str, link: str) -> None:
    case, profile = profile_of(name, link)
    draw = random.Random(0)
    units = [unit for unit in profile.program.calls if unit.count(".") == 1]
    plan = scattered_plan(profile, draw, units)
    assert plan.offloaded
    assert_as_simulated(case, profile, plan)
    assert_as_simulated(case, profile, mixed_plan(profile, draw, ("recompute", "offload")))


WEIGHTS_ON_LINKS = [
    ("trained", "busy"),
    ("in 8 bits", "busy"),
    ("frozen", "busy"),
    ("in 4 bits", "busy"),
    *((name, link) for link in ("PCIe 5.0", "far") for name in OF_WEIGHTS),
]


@pytest.mark.parametrize(("name", "link"), slow_after(2, WEIGHTS_ON_LINKS))
def test_where_weights_leave(name: str, link: str) -> None:
    """With weights and activations on the link, searched for and drawn, few of which are early enough."""
    case, profile = profile_of(name, link)
    both = ("recompute", "offload")
    plans = [sacplan.plan(profile, "smallest", "greedy", techniques=both)]
    plans += [mixed_plan(profile, random.Random(seed), both) for seed in range(2)]
    for plan in plans:
        assert plan.offloaded_weights
        assert any(one.trained for one in plan.offloaded_weights) or name != "trained"
        assert plan.added_ms > 0
        assert_as_simulated(case, profile, plan)


def test_a_busy_link_is_waited_for() -> None:
    case, profile = profile_of("transformer", "busy")
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=("offload",))
    assert plan.added_ms > profile.program.step_ms
    with noted_streams() as noted:
        seen = fake_step(case, plan, profile.spec)
    # With all of the link it is faster, and no faster than without copies.
    whole = simulated_ms(seen.program, noted, profile.spec.host_link, 1.0)
    assert profile.program.step_ms < whole < planned_ms(profile, plan)
