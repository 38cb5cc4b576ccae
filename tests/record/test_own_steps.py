"""Steps that a function of the user's runs as a whole: several losses and optimizers, closures, ``torch.func``.

The truth is the peak of a real step, by the allocator's events, and the weights of training without a plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import sacplan
from sacplan.errors import TraceError
from tests.support.slow import slow_after
from tests.support.steps import assert_predicted, mean_square

Optimizers = list[torch.optim.Optimizer]


def _network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, outputs)
    )  # fmt: skip


def _gan(penalty: float) -> Callable[[Any, Any, Optimizers], None]:
    """A step of a discriminator, on a gradient penalty if there is one, and then one of a generator."""

    def step(model: Any, batch: Any, optimizers: Optimizers) -> None:
        (generator, discriminator), (real, noise) = optimizers, batch
        discriminator.zero_grad()
        made = model["generator"](noise)
        loss = F.softplus(-model["critic"](real)).mean() + F.softplus(model["critic"](made.detach())).mean()
        if penalty:
            between = (real + made.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(model["critic"](between).sum(), between, create_graph=True)
            loss = loss + penalty * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        discriminator.step()
        generator.zero_grad()
        F.softplus(-model["critic"](made)).mean().backward()
        generator.step()

    return step


class SharpnessAware(torch.optim.SGD):
    """Two gradients a step: where the weights are, and where they would be worse."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with_gradients = torch.enable_grad()(closure)
        with_gradients()
        weights = [p for group in self.param_groups for p in group["params"]]
        moves = [0.05 * p.grad for p in weights]
        for p, move in zip(weights, moves, strict=True):
            p.add_(move)
        self.zero_grad()
        with_gradients()
        for p, move in zip(weights, moves, strict=True):
            p.sub_(move)
        super().step()


def _sharpness_aware(model: Any, batch: Any, optimizers: Optimizers) -> None:
    (optimizer,) = optimizers
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def _of_gan(model: Any) -> Optimizers:
    return [torch.optim.Adam(model[name].parameters()) for name in ("generator", "critic")]


_GAN = nn.ModuleDict({"generator": _network(16, 64), "critic": _network(64, 1)})
_PAIR = (torch.randn(128, 64), torch.randn(128, 16))
_CHAIN = nn.Sequential(*(_network(64, 64) for _ in range(3)))


def _of_chain(model: Any) -> Optimizers:
    return [SharpnessAware(model.parameters(), lr=0.1, momentum=0.9)]


CASES: dict[str, Any] = {
    "gan": (_GAN, _PAIR, _gan(0), _of_gan, 0.1),
    "gradient penalty": (_GAN, _PAIR, _gan(10), _of_gan, 0),
    "sharpness-aware": (_CHAIN, torch.randn(128, 64), _sharpness_aware, _of_chain, 0.1),
}


@pytest.mark.parametrize("trace", slow_after(1, ["fake", "real"]))
@pytest.mark.parametrize("name", CASES)
def test_planned_to_the_byte(name: str, trace: Any) -> None:
    model, batch, step, over, least = CASES[name]
    profile = sacplan.profile(model, batch, step, over(model), device="cpu", trace=trace)
    unplanned, plan = sacplan.plan(profile, "100%"), sacplan.plan(profile, "smallest")
    assert plan.peak_bytes <= (1 - least) * profile.peak_bytes
    for tried in (unplanned, plan):
        for run in ("fake", "real"):
            seen = sacplan.verify(model, batch, tried, step, over(model), run=run)  # type: ignore[arg-type]
            assert seen.peak_bytes == tried.peak_bytes
            assert not seen.differences
            assert not seen.setup_differences

    def trained(planned: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        own = copy.deepcopy(model)
        optimizers = over(own)
        if planned:
            sacplan.apply(own, plan)
        for _ in range(2):
            step(own, batch, optimizers)
        return [p.detach() for p in own.parameters()]

    assert all(map(torch.equal, trained(False), trained(True)))


def test_no_other_optimizer_is_proposed_for_one_that_steps_in_between() -> None:
    profile = sacplan.profile(_GAN, _PAIR, _gan(0), _of_gan(_GAN), device="cpu")
    with pytest.raises(sacplan.InfeasibleBudget) as raised:
        sacplan.plan(profile, "10%")
    assert "AdamW" not in str(raised.value)
    with pytest.raises(TraceError, match="a list needs optimizers"):
        sacplan.profile(_GAN, _PAIR, _gan(0), [], device="cpu")


def test_gradients_of_samples_are_profiled_and_left_alone() -> None:
    model, batch = _network(32, 32), torch.randn(16, 32)

    def step(model: nn.Module, batch: torch.Tensor, optimizers: Optimizers) -> None:
        def loss(weights: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            return functional_call(model, weights, (sample[None],)).square().mean()

        weights = {name: p.detach() for name, p in model.named_parameters()}
        of_samples = vmap(grad(loss), in_dims=(None, 0), randomness="different")(weights, batch)
        for name, p in model.named_parameters():
            p.grad = of_samples[name].mean(0)
        optimizers[0].step()
        optimizers[0].zero_grad()

    optimizers: Optimizers = [torch.optim.AdamW(model.parameters())]
    profile = sacplan.profile(model, batch, step, optimizers, device="cpu")
    plan = sacplan.plan(profile, "100%")
    assert "torch.func.grad" in " ".join(plan.provenance.remarks or ())
    seen = sacplan.verify(model, batch, plan, step, optimizers, run="real")
    assert seen.peak_bytes == profile.peak_bytes
    with pytest.raises(sacplan.InfeasibleBudget, match=r"torch\.func\.grad or a relative"):
        sacplan.plan(profile, "70%")


def test_a_critic_outside_of_the_model_is_an_error_that_says_where_it_belongs() -> None:
    model = _network(16, 64)
    optimizers = [torch.optim.Adam(model.parameters()), torch.optim.Adam(_network(64, 1).parameters())]
    with pytest.raises(TraceError, match="ModuleDict"):
        sacplan.profile(model, torch.randn(4, 16), _gan(0), optimizers, device="cpu")


def test_a_batch_that_wants_gradients() -> None:
    model, batch = _network(32, 32), torch.randn(64, 32, requires_grad=True)
    plan = sacplan.plan(sacplan.profile(model, batch, mean_square, device="cpu"), "100%")
    assert_predicted(model, batch, plan, mean_square)
