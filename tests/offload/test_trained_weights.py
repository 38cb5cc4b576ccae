"""Trained parameters on the host, where an optimizer updates them: figures, bits, and what people do between steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from benchmarks.harness.mixed_plans import mixed_plan
from sacplan.errors import OffloadError
from sacplan.torch_compat.host_memory import is_for_host
from tests.support.on_host import MINIMAL, OnHost, optimizer_bytes
from tests.support.slow_link import slow_link
from tests.support.steps import bit_equal, mean_square, peaks_of_steps
from tests.zoo.language_models import TokenModel

OPTIMIZER = "adamw-offload-gradients"
TOKENS = torch.arange(64).reshape(2, 32) % 64


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, 3, padding=1, groups=1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x).mT).mT
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Net(TokenModel):
    """Tokens through four blocks, all of it trained but for the second block."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__([Block(64) for _ in range(4)], 64, 64)
        self.layers[1].requires_grad_(False)


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> Iterator[list[torch.Tensor]]:
    """Yield the loss and all weights behind each of some steps."""
    for _ in range(steps):
        loss = mean_square(model, TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield [loss.detach(), *(t.clone() for t in model.state_dict().values())]


def profiled(optimizer: str = OPTIMIZER, device: str = "cpu") -> sacplan.Profile:
    return sacplan.profile(Net(), TOKENS, mean_square, optimizer, device=device)


@pytest.fixture(scope="module")
def planned() -> sacplan.Plan:
    plan = sacplan.plan(profiled(), "smallest", techniques=("offload",))
    names = {one.parameter for one in plan.offloaded_weights if one.trained}
    large = {n for n, p in Net().named_parameters() if p.requires_grad and p.numel() >= MINIMAL}
    assert names == large
    assert any(not one.trained for one in plan.offloaded_weights)
    return plan


@pytest.mark.parametrize("techniques", [("offload",), ("recompute", "offload")], ids=["alone", "both"])
def test_predicted_is_fake_is_measured_and_bits_are_equal(techniques: tuple[str, ...]) -> None:
    profile = profiled()
    plans = [sacplan.plan(profile, budget, techniques=techniques) for budget in ("70%", "smallest")]
    plans += [mixed_plan(profile, random.Random(seed), techniques) for seed in range(3)]
    assert sum(any(one.trained for one in plan.offloaded_weights) for plan in plans) >= 3
    # Less than the weights alone.
    assert plans[1].peak_bytes < 0.6 * sum(p.nbytes for p in Net().parameters())
    how = {"lr": 1e-2, "fused": True}
    plain = Net()
    wanted = list(trained(plain, torch.optim.AdamW(plain.parameters(), **how)))
    for plan in plans:
        fake = sacplan.verify(Net(), TOKENS, plan, mean_square, OPTIMIZER)
        assert fake.peak_bytes == plan.peak_bytes == profile.footprint(plan).peak_bytes
        assert fake.host_bytes == plan.host_bytes

        def build(plan: sacplan.Plan = plan) -> tuple[Any, ...]:
            model = Net()
            sacplan.apply(model, plan)
            return model, TOKENS.clone(), OnHost(model.parameters(), **how)

        # A CPU has one memory, and the peaks of both parts may be at different times.
        both = max(one.live_bytes + one.host_bytes for one in profile.with_plan(plan).liveness.moments)
        assert peaks_of_steps(build, 3)[-1] == both + optimizer_bytes(Net())
        model = Net()
        handle = sacplan.apply(model, plan)
        found = list(trained(model, OnHost(model.parameters(), **how)))
        assert not handle.differences
        assert all(map(bit_equal, wanted, found))
        handle.remove()
        assert bit_equal(wanted[-1][1:], list(model.state_dict().values()))


def test_right_on_a_slow_link_and_not_without_its_waits(planned: sacplan.Plan) -> None:
    plain = Net()
    wanted = list(trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)))
    for without in ((), ("wait", "_enter"), ("wait", "take")):
        model = Net()
        with sacplan.apply(model, planned):
            optimizer = OnHost(model.parameters(), lr=1e-2, fused=True)
            with slow_link(without) as link:
                found = list(trained(model, optimizer))
                right = all(map(bit_equal, wanted, found)) and not link.broken
        assert right == (not without), without


def test_only_what_the_device_never_changes_leaves() -> None:
    for optimizer in ("adamw", "adamw-offload"):  # the second keeps gradients on the device
        plan = sacplan.plan(profiled(optimizer), "smallest", techniques=("recompute", "offload"))
        assert plan.offloaded_weights
        assert all(one.parameter.startswith("layers.1.") for one in plan.offloaded_weights)


def test_another_optimizer_is_refused_and_changes_nothing(planned: sacplan.Plan) -> None:
    model, plain = Net(), Net()
    with sacplan.apply(model, planned):
        optimizer = torch.optim.AdamW(model.parameters())
        mean_square(model, TOKENS).backward()
        with pytest.raises(OffloadError, match=r"AdamW would .*offload_gradients=True"):
            optimizer.step()
        assert bit_equal(list(plain.state_dict().values()), list(model.state_dict().values()))
        named = dict(model.named_parameters())
        assert all(is_for_host(named[one.parameter].untyped_storage()) for one in planned.offloaded_weights)
        # Optimizers of other models step as before.
        mean_square(plain, TOKENS).backward()
        torch.optim.AdamW(plain.parameters()).step()
    optimizer.step()
