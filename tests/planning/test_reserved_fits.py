"""Without a budget on a GPU, what torch reserves has to fit, and not the tensors alone."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sacplan
from sacplan.device.device_memory import expandable_segments, reserved_bytes, retries_within
from sacplan.device.devices import resolve_device
from sacplan.device.outside_allocator import CUDA_CONTEXT, outside_allocator, outside_text
from sacplan.planning.limits import OF_DEVICE, allocator_room
from sacplan.planning.make import outcome_of
from sacplan.planning.request import Request
from sacplan.testing import assert_step_fits
from tests.support.devices import memory_with_room
from tests.zoo.language_models import LM, cross_entropy, tokens

CONTEXT = CUDA_CONTEXT.n_bytes
EXPANDABLE = "expandable_segments:True"


@functools.cache
def recorded(layers: int) -> sacplan.Profile:
    model = LM(layers=layers, dim=192, heads=6, vocab=1000, dropout=0.0)
    return sacplan.profile(model, tokens(16, 100, 1000), cross_entropy, torch.optim.AdamW, "h100")


def profile_with_room(room_bytes: int, layers: int = 3) -> sacplan.Profile:
    """One recording for all sizes of the device: a step is the same however much memory is beside it."""
    found = recorded(layers)
    spec = dataclasses.replace(found.spec, memory_bytes=memory_with_room(room_bytes))
    return dataclasses.replace(found, spec=spec)


@pytest.fixture(scope="module")
def whole() -> sacplan.Profile:
    return profile_with_room(2**40)


# --- the rule ------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(share=st.floats(0.7, 1.3))
def test_a_plan_without_a_budget_fits_its_device_or_there_is_none(share: float) -> None:
    room = int(share * 150 * 2**20)
    profile = profile_with_room(room, layers=2)
    outcome = outcome_of(Request(), profile)
    plan = outcome.plan
    if plan is None:
        # If the tensors fit, it is what torch would reserve that does not.
        assert outcome.error is not None
        assert OF_DEVICE.room_of(profile).n_bytes == room < outcome.error.smallest_feasible_bytes
        return
    assert plan.device_memory.reserved_bytes() <= room
    assert plan.device_memory == profile.device_memory(plan)
    assert plan.budget_bytes is not None
    assert plan.peak_bytes <= plan.budget_bytes <= room
    assert plan.provenance.budget is None
    # The limit that it came to, given as a budget, makes the same plan.
    if plan.status != "unplanned":
        assert sacplan.plan(profile, f"{plan.budget_bytes}B") == plan


def test_a_step_as_it_is_needs_no_plan_if_its_segments_fit(whole: sacplan.Profile) -> None:
    reserved = reserved_bytes(whole.program)
    assert reserved > whole.peak_bytes
    assert sacplan.plan(profile_with_room(reserved)).status == "unplanned"
    planned = sacplan.plan(profile_with_room(reserved - 1))
    assert planned.status != "unplanned"
    assert (planned.budget_bytes or 0) < whole.peak_bytes


def test_a_policy_whose_segments_do_not_fit_warns(whole: sacplan.Profile) -> None:
    reserved = reserved_bytes(whole.program)
    assert sacplan.policy("none", profile=profile_with_room(reserved)).peak_bytes == whole.peak_bytes
    with pytest.warns(sacplan.SacplanWarning, match=r"max_memory_reserved.*CUDA context 512.00 MiB"):
        sacplan.policy("none", profile=profile_with_room(reserved - 1))


def test_a_budget_limits_the_tensors_alone(whole: sacplan.Profile) -> None:
    """It is kept as it is given, and the warning says that the segments do not fit."""
    room = whole.peak_bytes
    with pytest.warns(sacplan.SacplanWarning, match="Without a budget, a plan is made that fits"):
        plan = sacplan.plan(profile_with_room(room), f"{room}B")
    assert plan.status == "unplanned"
    assert plan.budget_bytes == room


def test_an_assertion_is_about_segments(whole: sacplan.Profile) -> None:
    def asserted(room: int) -> None:
        profile = profile_with_room(room)
        model = LM(layers=3, dim=192, heads=6, vocab=1000, dropout=0.0)
        assert_step_fits(
            model,
            tokens(16, 100, 1000),
            profile.spec,
            loss_fn=cross_entropy,
            optimizer=torch.optim.AdamW,
        )

    reserved = reserved_bytes(whole.program)
    asserted(reserved)
    with pytest.raises(AssertionError, match=r"CUDA context 512.00 MiB(.|\n)*max_memory_reserved"):
        asserted(reserved - 1)


LAYERS = 2
"""Of a step whose smallest plan reserves less with expandable segments."""

# --- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensors_that_fit_and_segments_that_do_not() -> None:
    smallest = sacplan.plan(profile_with_room(2**40, LAYERS), "smallest")
    expandable = smallest.device_memory.reserved_bytes(expandable=True)
    reserved = smallest.device_memory.reserved_bytes()
    assert smallest.peak_bytes < expandable < reserved
    room = (expandable + reserved) // 2
    with pytest.raises(sacplan.InfeasibleBudget) as caught:
        sacplan.plan(profile_with_room(room, LAYERS))
    said = str(caught.value)
    assert said.startswith("the tensors of a plan fit, but what the allocator reserves for them does not")
    assert "CUDA context 512.00 MiB" in said
    assert f"With PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}" in said
    assert caught.value.smallest_feasible_bytes > caught.value.budget_bytes == room
    # Tensors that do not fit are the other error.
    with pytest.raises(sacplan.InfeasibleBudget, match="no plan found keeps the step under"):
        sacplan.plan(profile_with_room(smallest.peak_bytes - 2**20, LAYERS))


def test_a_plan_that_runs_with_retries_says_so(whole: sacplan.Profile) -> None:
    """Torch gives cached segments back to the driver before it gives up."""
    plan = sacplan.policy("full", profile=whole)
    reserved, said = plan.device_memory.reserved_bytes(), set()
    for room in range(plan.peak_bytes, reserved, (reserved - plan.peak_bytes) // 4):
        with pytest.warns(sacplan.SacplanWarning, match="this plan does not fit") as caught:
            sacplan.policy("full", profile=profile_with_room(room))
        runs = retries_within(whole.with_plan(plan), room)
        said.add(runs is not None)
        assert ("allocation retries" in str(caught[0].message)) == (runs is not None)
    assert True in said


def test_nothing_is_left_beside_the_context() -> None:
    with pytest.raises(sacplan.errors.BudgetError, match="nothing is left"):
        allocator_room(dataclasses.replace(resolve_device("h100"), memory_bytes=CONTEXT))


# --- the environment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}, True),
        ({"PYTORCH_ALLOC_CONF": f"max_split_size_mb:128, {EXPANDABLE}"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": EXPANDABLE}, False),
    ],
)
def test_the_first_variable_that_is_set_decides(environment: dict[str, str], found: bool) -> None:
    assert expandable_segments(environment) is found


def test_with_expandable_segments_their_figures_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = sacplan.plan(profile_with_room(2**40, LAYERS), "smallest")
    room = smallest.device_memory.reserved_bytes(expandable=True)
    with pytest.raises(sacplan.InfeasibleBudget):
        sacplan.plan(profile_with_room(room, LAYERS))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    plan = sacplan.plan(profile_with_room(room, LAYERS))
    assert plan.device_memory.reserved_bytes() == plan.device_memory.reserved_bytes(expandable=True) <= room


# --- what lies outside -----------------------------------------------------------------------------------------


def test_what_lies_outside_is_named_with_its_source() -> None:
    h100, cpu = resolve_device("h100"), resolve_device("cpu")
    assert outside_allocator(cpu, communicators=2) == ()
    context, margin = outside_allocator(h100)
    assert outside_allocator(h100, communicators=2)[::2] == (context, margin)
    nccl = outside_allocator(h100, communicators=2)[1]
    assert context == CUDA_CONTEXT
    assert "assumption" in nccl.source
    assert "docs/measured.md" in margin.source
    assert margin.n_bytes == int(0.012 * h100.memory_bytes)
    assert nccl.n_bytes == 2 * outside_allocator(h100, communicators=1)[1].n_bytes
    assert outside_text((context,)) == "CUDA context 512.00 MiB"
    # NCCL's src/init.cc and device.h: the FIFOs of three protocols, in pages of 2 MiB; another page where data is sent.
    fifos = 2**22 + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
    connection = (math.ceil(fifos / 2**21) + 1) * 2
    assert f"{24 * 2 * connection} MiB with the 24 channels" in nccl.source
    assert f"{32 * 7 * connection / 1024:.1f} GiB by the source" in nccl.source
    taken = context.n_bytes + nccl.n_bytes + margin.n_bytes
    assert allocator_room(h100, 2).n_bytes == h100.memory_bytes - taken
