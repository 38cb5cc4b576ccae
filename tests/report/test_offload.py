"""What reports, traces and ``verify`` say of tensors that wait on the host."""

from __future__ import annotations

import pytest
import torch

import sacplan
from sacplan.cli.show import plan_facts
from sacplan.core.program import Program
from sacplan.device.device_memory import device_memory
from sacplan.planning.layers import read_layers
from sacplan.planning.reading import host_text
from sacplan.questions.planned import planned
from tests.zoo import language_models as models


@pytest.fixture(scope="module")
def step() -> tuple[models.LM, torch.Tensor, sacplan.Profile, sacplan.Plan]:
    model, batch = models.LM(layers=4, vocab=32), torch.randint(0, 32, (8, 64))
    profile = sacplan.profile(model, batch, models.cross_entropy, device="cpu")
    plan = sacplan.plan(profile, "50%", techniques=("recompute", "offload"))
    assert plan.offloaded
    return model, batch, profile, plan


@pytest.fixture(scope="module")
def program(step: tuple[models.LM, torch.Tensor, sacplan.Profile, sacplan.Plan]) -> Program:
    _, _, profile, plan = step
    return planned(profile, plan)


def test_layers_are_named_where_the_tensors_are(step) -> None:  # type: ignore[no-untyped-def]
    plan = step[3]
    away = {name: layer.away for layer in read_layers(plan) for name in layer.layers if layer.away}
    assert set(away) == {one.unit for one in plan.offloaded}
    assert len(away) > 1
    assert all(name.startswith("layers.") for name in away)
    assert "on the host  of what it keeps: " in str(plan)


def test_a_plan_on_the_command_line(step) -> None:  # type: ignore[no-untyped-def]
    plan = step[3]
    facts = plan_facts(plan)
    assert facts["host_bytes"] == plan.host_bytes
    assert f"on the host {host_text(plan)}" in " ".join(str(plan).split())


def test_what_is_alive_at_the_peak_is_on_the_device(step) -> None:  # type: ignore[no-untyped-def]
    _, _, profile, plan = step
    assert int(sacplan.Report(profile, plan).alive_at_peak()["bytes"].sum()) == plan.peak_bytes


def test_the_allocator_of_the_device_gives_no_block_to_the_host(program: Program) -> None:
    assert program.on_host
    assert {program.device_bytes[s] for s in program.on_host} == {0}
    # On a fresh allocator, a step has at most its peak and what the blocks of the peak are rounded up to.
    assert device_memory(program).steps.max_memory_allocated <= 1.02 * program.footprint.peak_bytes


def test_verify_says_both_peaks(step) -> None:  # type: ignore[no-untyped-def]
    model, batch, _, plan = step
    fake = sacplan.verify(model, batch, plan, models.cross_entropy)
    assert (fake.peak_bytes, fake.host_bytes) == (plan.peak_bytes, plan.host_bytes)
    assert f"on the host {fake.host_text}" in repr(fake)
    real = sacplan.verify(model, batch, plan, models.cross_entropy, run="real")
    assert real.host_bytes is None
    assert real.within_budget
    assert real.peak_bytes <= real.predicted_peak_bytes == plan.peak_bytes + plan.host_bytes
    assert any("one memory" in sentence for sentence in real.assumptions)
