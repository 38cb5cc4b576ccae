"""Models that call a module twice, tie weights, or have saved-tensor hooks of their own; and regions that are joined.

Bits stay the same. The peaks on the device and on the host are those of the fake step, and their sum is what PyTorch's
profiler measures on a CPU.
"""

from __future__ import annotations

import contextlib
import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import sacplan
from benchmarks.harness.mixed_plans import in_one_place, mixed_plan, scattered_plan
from benchmarks.harness.streams import fake_step
from benchmarks.models.cases import Case
from sacplan.techniques.offload.executor.parcels import Parcel
from sacplan.techniques.registry import rewritten
from tests.support.slow import slow_after
from tests.support.steps import bit_equal, grads_of, mean_square
from tests.zoo import language_models as models
from tests.zoo.layers import FromFunction, Shared

BOTH = ("recompute", "offload")
Parcels = list[weakref.ref[Parcel]]


class OneLayerIn(models.LM):
    """A language model with a context around its second layer."""

    around: Callable[[], Any] = contextlib.nullcontext

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            with self.around() if i == 1 else contextlib.nullcontext():
                h = layer(h)
        return self.head(self.norm(h))


def hooks() -> Any:
    """Hooks that keep what they get."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def language_model(around: Callable[[], Any] | None = None, tied: bool = False) -> Case:
    model = OneLayerIn(layers=3, vocab=32, dropout=0.0)
    if around is not None:
        model.around = around
    if tied:
        model.head.weight = model.embed.weight
    return Case(model, torch.randint(0, 32, (8, 32)), models.cross_entropy)


def twice_inside() -> nn.Module:
    """Blocks of which one part is called twice."""

    def block(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return x + self.once(torch.sigmoid(self.twice(torch.tanh(self.twice(x)))))

    blocks = (FromFunction(block, twice=nn.Linear(32, 32), once=nn.Linear(32, 32)) for _ in range(3))
    return nn.Sequential(nn.Sequential(*blocks))


CASES: dict[str, Callable[[], Case]] = {
    "a layer is called three times": lambda: Case(Shared(), torch.randn(16, 16, 16), mean_square),
    "a part of a layer is called twice": lambda: Case(twice_inside(), torch.randn(256, 32), mean_square),
    "tied weights": lambda: language_model(tied=True),
    "hooks around a layer": lambda: language_model(hooks),
    "save_on_cpu around a layer": lambda: language_model(save_on_cpu),
}


def assert_right(case: Case, profile: sacplan.Profile, plan: sacplan.Plan) -> None:
    seen = fake_step(case, plan, profile.spec).program.footprint
    assert (seen.peak_bytes, seen.host_peak_bytes) == (plan.peak_bytes, plan.host_bytes)
    real = case.verify(plan, run="real")
    assert real.peak_bytes == in_one_place(rewritten(profile.program, plan.decisions, profile.spec))
    plain = grads_of(case.model, case.batch, case.loss_fn)
    with sacplan.apply(case.model, plan):
        for _ in range(2):
            assert bit_equal(plain, grads_of(case.model, case.batch, case.loss_fn))


@pytest.mark.parametrize("name", slow_after(3, CASES))
def test_bits_and_peaks(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    profile = case.profile("cpu")
    plans = [mixed_plan(profile, random.Random(seed), BOTH) for seed in range(3)]
    once = [unit for unit, calls in profile.program.calls.items() if unit.count(".") <= 1 and len(calls) == 1]
    units = [unit for unit in once if unit and not any(other.startswith(f"{unit}.") for other in once)]
    plans.append(scattered_plan(profile, random.Random(0), units))
    assert any(plan.offloaded for plan in plans)
    for plan in plans:
        assert_right(case, profile, plan)


@pytest.fixture(scope="module")
def planned() -> tuple[Case, sacplan.Profile, sacplan.Plan]:
    torch.manual_seed(0)
    case = language_model()
    profile = case.profile("cpu")
    return case, profile, sacplan.plan(profile, "60%", techniques=BOTH)


def checkpointed(case: Case) -> list[torch.Tensor]:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return checkpoint(case.loss_fn, model, batch, use_reentrant=False)

    return grads_of(case.model, case.batch, loss)


def inside(context: Callable[[], Any]) -> Callable[[Case], list[torch.Tensor]]:
    def run(case: Case) -> list[torch.Tensor]:
        with context():
            return grads_of(case.model, case.batch, case.loss_fn)

    return run


@pytest.mark.parametrize(
    "run", [inside(hooks), inside(save_on_cpu), checkpointed], ids=["hooks", "save_on_cpu", "checkpoint"]
)
def test_hooks_around_the_model_that_the_profile_does_not_know(
    planned: Any, parcels: Parcels, run: Callable[[Case], list[torch.Tensor]]
) -> None:
    """They hold what is saved, so nothing is copied, and a warning says so once."""
    case, _, plan = planned
    assert plan.offloaded
    plain = run(case)
    with sacplan.apply(case.model, plan):
        with pytest.warns(sacplan.SacplanWarning, match="saved-tensor hooks"):
            assert bit_equal(plain, run(case))
        assert not parcels
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert bit_equal(plain, run(case))
            # Without them the plan does all of it again.
            assert bit_equal(plain, grads_of(case.model, case.batch, case.loss_fn))
        assert len(parcels) == len(plan.offloaded)


def test_what_hooks_in_the_model_hold_is_not_offloaded() -> None:
    torch.manual_seed(0)
    case = language_model(save_on_cpu)
    plan = sacplan.plan(case.profile("cpu"), "smallest", "greedy", techniques=("offload",))
    assert {one.unit for one in plan.offloaded} == {"layers.0", "layers.2"}


def test_a_backward_formula_that_runs_otherwise_under_a_mode() -> None:
    """What ``prod``'s takes is measured. Copies in the forward pass do not hide which op the formula belongs to."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down((h * h.prod(1, keepdim=True)).sin())

    products = (FromFunction(forward, up=nn.Linear(16, 64), down=nn.Linear(64, 16)) for _ in range(3))
    model, batch = nn.Sequential(*products), torch.randn(64, 16)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    plan = sacplan.plan(profile, "smallest", "greedy", techniques=("offload",))
    assert plan.offloaded
    assert sacplan.verify(model, batch, plan, mean_square).peak_bytes == plan.peak_bytes
