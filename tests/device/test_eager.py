"""The time of a step where the CPU may be slower than the GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.program import Phase
from sacplan.device.eager import BACKWARD_US, FOREACH_US, FORWARD_US, eager_ms


def step(width: int, rows: int) -> sacplan.Profile:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
        x = torch.empty(rows, width)
    return sacplan.profile(model, x, lambda m, x: m(x).sum(), device="h100")


def blocks(width: int) -> sacplan.Profile:
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        x = torch.empty(2 * width, width)
    return sacplan.profile(nn.Sequential(*layers), x, lambda m, x: m(x).sum(), device="h100")


def test_small_ops_wait_for_the_cpu() -> None:
    """What the GPU takes for the last op is beside the next step's first."""
    profile = step(8, 8)
    ops = [op for op in profile.program.ops if op.time_ms]
    assert max(op.time_ms for op in ops) < 1e-3 * BACKWARD_US
    issued = sum(FORWARD_US if op.phase == Phase.FORWARD else BACKWARD_US for op in ops)
    assert eager_ms(profile.program) == pytest.approx(1e-3 * issued) == profile.step_ms


def test_an_optimizer_takes_the_cpu_time_for_each_parameter() -> None:
    """One op of a foreach optimizer is for all parameters, and gets lists of them."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        x = torch.empty(8, 8)
    plain, adamw = (
        sacplan.profile(model, x, lambda m, x: m(x).sum(), optimizer, device="h100")
        for optimizer in (None, functools.partial(torch.optim.AdamW, foreach=True))
    )
    lists = 14  # of parameters, gradients and state, in the nine ops of AdamW
    parameters = len(list(model.parameters()))
    assert adamw.update_ms == pytest.approx(1e-3 * FOREACH_US * lists * parameters, rel=0.01)
    assert adamw.step_ms - adamw.update_ms == pytest.approx(plain.step_ms)


def test_large_ops_hide_it() -> None:
    profile = step(4096, 8192)
    assert profile.step_ms == profile.program.step_ms == pytest.approx(eager_ms(profile.program))


@pytest.mark.filterwarnings("ignore::sacplan.errors.SacplanWarning")
def test_a_value_that_is_asked_for_is_waited_for() -> None:
    """What comes after ``item()`` is issued when the GPU has done what came before; without, it would be hidden."""
    model = nn.Linear(2**13, 2**13, bias=False, device="meta")

    def loss(model: nn.Module, x: torch.Tensor, asks: bool) -> torch.Tensor:
        y = model(x)
        if asks:
            y.sum().item()
        for _ in range(100):
            x = x[:1] + 1  # small ops
        return y.mean() + x.sum()

    x = torch.empty(2**13, 2**13, device="meta")
    asked, not_asked = (
        sacplan.profile(model, x, functools.partial(loss, asks=asks), device="h100") for asks in (True, False)
    )
    assert not_asked.step_ms == not_asked.program.step_ms
    assert asked.step_ms > asked.program.step_ms + 100 * 1e-3 * FORWARD_US / 2


def test_a_plan_says_how_long_the_gpu_waits() -> None:
    """What runs again is issued again: on small ops that is all it costs, on large ones it is hidden."""
    small, large = (sacplan.policy("full", profile=blocks(width)) for width in (8, 4096))
    for plan in (small, large):
        assert plan.planned_ms == pytest.approx(
            plan.step_ms + plan.recompute_ms + plan.added_ms + plan.waits_ms
        )
    issued = 1e-3 * BACKWARD_US * sum(map(len, small.discarded.values()))
    assert small.planned_ms - small.step_ms == pytest.approx(issued)
    assert large.waits_ms == 0
