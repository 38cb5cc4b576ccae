"""Optimizers that step in hooks of parameters while the backward pass runs: against the allocator of a CPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.optimizer_ops import recomputed_from_updated, steps_in_backward, why_not_again
from sacplan.core.program import Event, Patch, Phase, StorageKind
from sacplan.errors import TraceError
from tests.support.steps import bit_equal, mean_square
from tests.zoo.layers import HeavyLayers

BATCH = (8, 64)
Loop = Callable[[nn.Module, Any], None]


def tutorial(model: nn.Module, make: Any) -> None:
    """As PyTorch's tutorial and torchtune's ``register_optim_in_bwd_hooks`` do it."""
    optimizers = {p: make([p]) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


OPTIMIZERS: dict[Any, torch.optim.Optimizer] = {}


def _step_global(parameter: torch.Tensor) -> None:
    OPTIMIZERS[parameter].step()
    OPTIMIZERS[parameter].zero_grad()


def in_globals(model: nn.Module, make: Any) -> None:
    """As in a script: the hook finds its optimizers in a global variable."""
    OPTIMIZERS.clear()
    OPTIMIZERS.update({p: make([p]) for p in model.parameters()})
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_step_global)


class _Stepper:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, parameter: torch.Tensor) -> None:
        self.optimizer.step()
        parameter.grad = None


def bound_method(model: nn.Module, make: Any) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_Stepper(make([p])).step)


def _step_given(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


def partial(model: nn.Module, make: Any) -> None:
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(functools.partial(_step_given, make([p])))


def applied(model: nn.Module, make: Any) -> None:
    """torch.distributed's own."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    optimizer_class, arguments = (
        (make.func, make.keywords) if isinstance(make, functools.partial) else (make, {})
    )
    _apply_optimizer_in_backward(optimizer_class, list(model.parameters()), {"lr": 1e-3, **arguments})


LOOPS: dict[str, Loop] = {f.__name__: f for f in (tutorial, in_globals, bound_method, partial, applied)}
adamw = functools.partial(torch.optim.AdamW, foreach=False)
momentum = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=False)


def heavy() -> nn.Module:
    torch.manual_seed(0)
    return HeavyLayers(dropout=0.0)


def measured(model: nn.Module, batch: Any) -> int:
    """The peak of a real step, of the allocator."""
    empty = sacplan.plan(sacplan.profile(model, batch, mean_square, device="cpu"), "100%")
    return sacplan.verify(model, batch, empty, mean_square, run="real").peak_bytes


@pytest.mark.parametrize(
    ("loop", "make"),
    [*((loop, adamw) for loop in LOOPS), ("tutorial", momentum), ("tutorial", torch.optim.SGD)],
)
def test_the_peak_is_the_allocators(loop: str, make: Any) -> None:
    model, batch = heavy(), torch.randn(BATCH)
    LOOPS[loop](model, make)
    before = [p.detach().clone() for p in model.parameters()]
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    real = sacplan.profile(model, batch, mean_square, device="cpu", trace="real")
    assert profile.peak_bytes == real.peak_bytes == measured(model, batch)
    assert bit_equal(before, list(model.parameters()))  # nothing of the user's is touched
    assert not profile.has_no_optimizer


def test_a_gradient_goes_when_its_parameter_is_stepped() -> None:
    """Against the same step with one optimizer behind the backward pass, which keeps all gradients until then."""
    model, batch = heavy(), torch.randn(BATCH)
    after = sacplan.profile(heavy(), batch, mean_square, adamw, "cpu")
    tutorial(model, adamw)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    gradients = [p.numel() * 4 for p in model.parameters()]
    most = max(moment.by_kind[StorageKind.GRADIENT] for moment in profile.program.liveness.moments)
    assert most < sum(gradients) / 2
    assert steps_in_backward(profile.recorded)
    assert not steps_in_backward(after.recorded)
    assert after.peak_bytes - profile.peak_bytes > sum(gradients) / 2
    state = [op for op in profile.recorded.ops if op.phase is Phase.OPTIMIZER]
    assert len(state) == len([op for op in after.recorded.ops if op.phase is Phase.OPTIMIZER])


@pytest.mark.parametrize("loop", ["tutorial", "applied"])
def test_a_plan_changes_no_bit_of_what_is_trained(loop: str) -> None:
    """Three steps with a plan and without; peaks are those that were predicted."""
    batch = torch.randn(512, 64)
    profiled = heavy()
    LOOPS[loop](profiled, momentum)
    profile = sacplan.profile(profiled, batch, mean_square, device="cpu")
    plan = sacplan.plan(profile, "smallest")
    assert plan.recompute_flops > 0 or plan.recompute_ms > 0
    assert plan.peak_bytes < profile.peak_bytes
    assert sacplan.verify(profiled, batch, plan, mean_square).peak_bytes == plan.peak_bytes
    seen = sacplan.verify(profiled, batch, plan, mean_square, run="real")
    assert seen.peak_bytes == plan.peak_bytes
    assert not seen.setup_differences
    trained = []
    for planned in (False, True):
        model = heavy()
        LOOPS[loop](model, momentum)
        if planned:
            sacplan.apply(model, plan)
        for _ in range(3):
            mean_square(model, batch).backward()
        trained.append([p.detach() for p in model.parameters()])
    assert bit_equal(*trained)


def test_a_parameter_that_is_read_after_its_update() -> None:
    """The same step with an update moved in front of the first op that runs again."""
    model, batch = heavy(), torch.randn(512, 64)
    tutorial(model, momentum)
    profile = sacplan.profile(model, batch, mean_square, device="cpu")
    program = profile.with_plan(sacplan.plan(profile, "smallest"))
    assert recomputed_from_updated(program) is None
    reads = {s for op in program.ops if op.recomputes >= 0 for s in op.reads}
    first = next(
        position
        for position, (code, arg) in enumerate(program.events)
        if code == Event.OP and program.ops[arg].recomputes >= 0
    )
    update = next(
        i for i, op in enumerate(program.ops) if op.phase is Phase.OPTIMIZER and reads & set(op.mutates)
    )
    early = program.with_(Patch(events={first: ((int(Event.OP), update), program.events[first])}))
    found = recomputed_from_updated(early)
    assert found is not None
    assert set(program.ops[found].reads) & set(program.ops[update].mutates)
    assert not why_not_again(program)
    assert f"{program.ops[found].name} in" in why_not_again(early)


def test_what_is_refused() -> None:
    model = heavy()
    tutorial(model, adamw)
    step: Any = (model, torch.randn(BATCH), mean_square)
    with pytest.raises(TraceError, match=r"register_post_accumulate_grad_hook.*sacplan\.ranks"):
        sacplan.profile(*step, device="cpu", ranks=sacplan.FSDP2(2, ["layers.*", ""]))
    profile = sacplan.profile(*step, device="cpu")
    with pytest.raises(TraceError, match=r"register_post_accumulate_grad_hook.*sacplan\.ranks"):
        sacplan.plan(profile, "100%", ranks=sacplan.DDP(2))


def test_other_hooks_run_on_the_copy() -> None:
    """A counter of the user's: the hook has nothing to do with tensors, and stays the same function."""
    model, seen = heavy(), []
    model.head.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sacplan.profile(model, torch.randn(BATCH), mean_square, torch.optim.SGD, "cpu")
    assert seen == [torch.Size([10])]
