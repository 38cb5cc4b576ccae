"""Offloading together with slices: norms whose backward pass runs in slices, and what they read on the host."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import in_one_place, plan_with
from benchmarks.harness.plans import as_budget, budget_at
from sacplan.core.decisions import Chunk, Offload
from sacplan.planning.make import plan_by_hand
from sacplan.techniques.offload.executor.parcels import Parcel
from sacplan.techniques.registry import rewritten
from tests.chunk.test_backward import loss_fn, make_case
from tests.support.chunks import step
from tests.support.slow_link import slow_link
from tests.support.steps import bit_equal
from tests.zoo.language_models import TokenModel
from tests.zoo.layers import MLP, FromFunction

LAYERS = 2
WITH = ("recompute", "chunk", "offload")


@functools.cache
def smallest(device: str, techniques: tuple[str, ...]) -> tuple[sacplan.Profile, sacplan.Plan]:
    profile = sacplan.profile(*make_case(LAYERS), loss_fn, device=device)
    return profile, sacplan.plan(profile, "smallest", techniques=techniques)


@functools.cache
def of_all_three() -> tuple[sacplan.Profile, sacplan.Plan]:
    """A plan that recomputes, has slices and offloads."""
    profile, least = smallest("cpu", WITH)
    budget_bytes = budget_at(0.1, least.peak_bytes, profile.peak_bytes)
    plan = sacplan.plan(profile, as_budget(budget_bytes), techniques=WITH)
    assert plan.discarded
    assert plan.chunks
    assert plan.offloaded
    return profile, plan


@pytest.mark.slow
def test_what_sliced_norms_read_waits_on_the_host() -> None:
    profile, plan = smallest("cpu", WITH)
    sliced = {chunk.unit for chunk in plan.chunks if chunk.span == "backward"}
    assert {f"layers.{i}.norm{k}" for i in range(LAYERS) for k in (1, 2)} <= sliced
    # The first op of a layer that has its input is the norm's cast.
    read = [one for one in plan.offloaded if one.place == "norm1" and one.op == "aten._to_copy.default"]
    assert read
    kept = tuple(one for one in plan.decisions if not isinstance(one, Offload))
    assert rewritten(profile.program, kept, profile.spec).footprint.peak_bytes > plan.peak_bytes


def test_the_prediction_is_the_fake_step_and_the_measured_one() -> None:
    profile, plan = smallest("cpu", WITH)
    model, batch = make_case(LAYERS)
    for _ in range(2):
        seen = sacplan.verify(model, batch, plan, loss_fn, run="fake")
        assert seen.peak_bytes == plan.peak_bytes
        assert not seen.differences
    real = sacplan.verify(model, batch, plan, loss_fn, run="real")
    assert real.peak_bytes == in_one_place(rewritten(profile.program, plan.decisions, profile.spec))


def test_bits_are_those_of_the_same_slices_without_copies() -> None:
    profile, plan = smallest("cpu", WITH)
    model, batch = make_case(LAYERS)
    kept = tuple(one for one in plan.decisions if not isinstance(one, Offload))
    with sacplan.apply(model, plan_by_hand(profile, kept, "by hand")):
        expected = step(model, batch, loss_fn)
    with sacplan.apply(model, plan) as handle:
        for _ in range(3):
            found = step(model, batch, loss_fn)
            assert found.keys() == expected.keys()
            assert bit_equal(list(expected.values()), list(found.values()))
        assert not handle.differences


class Failing:
    """Modules of a model that fail, one after the other: in the forward pass, or when their gradient comes."""

    def __init__(self, model: nn.Module, backward: bool) -> None:
        self.model, self.backward = model, backward

    def _fail(self, *_: object) -> None:
        raise KeyError("in the middle")

    def _forward(self, module: nn.Module, args: object, output: torch.Tensor) -> None:
        if self.backward:
            output.register_hook(self._fail)
        else:
            self._fail()

    def __iter__(self) -> Iterator[nn.Module]:
        for module in self.model.modules():
            handle = module.register_forward_hook(self._forward)
            yield module
            handle.remove()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_exceptions_in_the_middle_leave_nothing_behind(
    backward: bool, parcels: list[weakref.ref[Parcel]]
) -> None:
    """With recomputation, slices and copies; also on a link whose copies are still under way then."""
    _, plan = of_all_three()
    model, batch = make_case(LAYERS)
    with sacplan.apply(model, plan), slow_link() as link:
        expected = step(model, batch, loss_fn)
        failed = copied = 0
        for _ in Failing(model, backward):
            before = len(parcels)
            with contextlib.suppress(KeyError):  # a module whose output needs no gradient fails in neither
                step(model, batch, loss_fn)
                failed -= 1
            failed, copied = failed + 1, copied + (len(parcels) > before)
            model.zero_grad()
            if any(ref() for ref in parcels):
                gc.collect()
            assert not any(ref() for ref in parcels)
        assert failed > 5
        assert copied > 5
        found = step(model, batch, loss_fn)
        assert bit_equal(list(expected.values()), list(found.values()))
    assert not link.broken


def test_slices_and_copies_in_one_unit_that_recomputes_nothing() -> None:
    """The ops of the unit are those that the slices leave: else its other ops would be looked for in wrong places."""
    torch.manual_seed(0)
    layers = [
        FromFunction(
            lambda self, x: torch.sin(x + self.mlp(self.norm(x))).exp(), norm=nn.LayerNorm(32), mlp=MLP(32)
        )
        for _ in range(LAYERS)
    ]
    model, batch = TokenModel(layers, 32, 64), torch.randint(0, 64, (2, 96))
    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    copies = sacplan.plan(profile, "smallest", techniques=("offload",)).offloaded
    outside = [
        one for one in copies if "mlp" not in one.place.split(".")[0] and "mlp." not in one.let_go.place
    ]
    assert outside
    plan = plan_with(profile, [Chunk("layers.0.mlp", "module", 2, 1), *outside])
    seen = sacplan.verify(model, batch, plan, loss_fn)
    assert (seen.peak_bytes, seen.host_bytes) == (plan.peak_bytes, plan.host_bytes)
    assert plan.host_bytes
    assert not seen.differences
