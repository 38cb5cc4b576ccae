"""The time of a step where the CPU may be slower than the GPU."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.program import Phase
from sacplan.device import eager
from sacplan.device.eager import eager_ms
from tests.support.slow import slow_after
from tests.zoo.language_models import LM, cross_entropy, tokens


def blocks(width: int) -> sacplan.Profile:
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))
        x = torch.empty(2 * width, width)
    return sacplan.profile(nn.Sequential(*layers), x, lambda m, x: m(x).sum(), device="h100")


def test_small_ops_wait_for_the_cpu() -> None:
    """What the GPU takes for the last op is beside the next step's first."""
    profile = blocks(8)
    ops = [op for op in profile.program.ops if op.time_ms]
    assert max(op.time_ms for op in ops) < 1e-3 * eager.BACKWARD_US
    issued = sum(eager.FORWARD_US if op.phase == Phase.FORWARD else eager.BACKWARD_US for op in ops)
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
    assert adamw.update_ms == pytest.approx(1e-3 * eager.FOREACH_US * lists * parameters, rel=0.01)
    assert adamw.step_ms - adamw.update_ms == pytest.approx(plain.step_ms)


def test_large_ops_hide_it() -> None:
    """All but the first one, in a loop that waits for the GPU between steps."""
    profile = blocks(4096)
    assert profile.step_ms == profile.program.step_ms == pytest.approx(eager_ms(profile.program))
    waited_ms = eager_ms(profile.program, waited=True)
    assert waited_ms == pytest.approx(profile.step_ms + 1e-3 * eager.FORWARD_US)


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
    assert asked.step_ms > asked.program.step_ms + 100 * 1e-3 * eager.FORWARD_US / 2


def test_a_plan_says_how_long_the_gpu_waits() -> None:
    """What runs again is issued by Python, and the forward pass is watched. On large ops that is hidden."""
    small, large = (sacplan.policy("full", profile=blocks(width)) for width in (8, 4096))
    for plan in (small, large):
        assert plan.planned_ms == pytest.approx(
            plan.step_ms + plan.recompute_ms + plan.added_ms + plan.waits_ms
        )
    forward = [op for op in blocks(8).program.ops if op.phase == Phase.FORWARD and op.time_ms]
    issued = eager.WATCHED_US * len(forward) + eager.RECOMPUTED_US * sum(map(len, small.discarded.values()))
    assert small.planned_ms - small.step_ms == pytest.approx(1e-3 * issued)
    assert large.waits_ms == 0
    # PyTorch's checkpointing calls an op as a forward pass does, and watches none.
    again_us = eager.FORWARD_US * sum(map(len, small.discarded.values()))
    program = blocks(8).with_plan(small)
    assert eager_ms(program, checkpointed=True) - small.step_ms == pytest.approx(1e-3 * again_us)


@pytest.mark.parametrize(
    ("mode", "techniques", "solver"),
    slow_after(
        3,
        [
            ("train", ("recompute",), "milp"),
            ("train", ("recompute",), "rotor"),
            ("inference", ("chunk",), "best"),
            ("train", ("chunk",), "best"),
            ("train", ("recompute", "chunk"), "best"),
        ],
    ),
)
@pytest.mark.usefixtures("no_cublas_workspaces")
def test_a_recorded_step_with_a_plan_says_what_ran_again(
    mode: str, techniques: tuple[str, ...], solver: str
) -> None:
    with torch.device("meta"):
        model = LM(layers=2, dim=64, heads=2, vocab=2048)
    loss_fn = cross_entropy if mode == "train" else None
    profile = sacplan.profile(model, tokens(4), loss_fn, device="h100", mode=mode)
    plan = sacplan.plan(profile, "smallest", solver, techniques=techniques)
    assert plan.peak_bytes < profile.peak_bytes
    assert bool(plan.recompute_ms) is ("recompute" in techniques)
    assert sacplan.verify(model, tokens(4), plan, loss_fn).step_ms == pytest.approx(plan.planned_ms, rel=1e-9)
