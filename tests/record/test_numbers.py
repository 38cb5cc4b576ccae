"""Tensors of 8 bytes that Python numbers become: predicted while autograd keeps them, and made once under a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from sacplan.core.program import Phase
from sacplan.device.op_kernels import Call
from sacplan.device.workspace import measured_workspace_bytes
from sacplan.record.step import Step
from sacplan.running.measure import measured_step
from sacplan.techniques.runtime.tensors import TAKES_A_NUMBER, with_lent_number
from sacplan.torch_compat.allocations import allocation_deltas
from tests.support.recomputing import plan_of
from tests.support.slow import slow_after
from tests.support.steps import mean_square, total
from tests.zoo.layers import FromFunction, Then

Branch = Callable[[torch.Tensor], torch.Tensor]


def _dead(y: torch.Tensor) -> torch.Tensor:
    ((y * 0.5 + 1) / 3).sigmoid()
    return y.exp().exp()


def _one_result_of_several(y: torch.Tensor) -> torch.Tensor:
    states = [y]
    for _ in range(3):
        states.append((states[-1] * 1.5).sigmoid())
    return states[-2].exp().sum() + states[0].exp().exp().sum()


def _held_by_its_input(y: torch.Tensor) -> torch.Tensor:
    z = y * 0.5
    return (z + z * 0.5).sigmoid().exp()


def _in_place(y: torch.Tensor) -> torch.Tensor:
    (y + y).mul_(0.5).sin()
    return (y + y).mul_(0.5).exp().exp()


def _in_place_through_a_view(y: torch.Tensor) -> torch.Tensor:
    z = y + y
    z.view(-1).div_(0.5).sin()
    return z[:, :4].mul_(0.5).exp().exp()


def _inner_gradient(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    z = y / 3.0  # its node runs last in the inner pass, and once more in the outer one
    (inner,) = torch.autograd.grad(z.exp().sum(), y, create_graph=True)
    return z, inner


def _kept_by_the_last_node_of_an_inner_pass(y: torch.Tensor) -> torch.Tensor:
    z, inner = _inner_gradient(y)
    return torch.cat([inner.detach() * z] * 8).cos()  # the backward formula of ``cos`` is the peak


def _after_an_inner_pass(y: torch.Tensor) -> torch.Tensor:
    z, inner = _inner_gradient(y)
    return inner.sum() + (torch.cat([z] * 8) * 0.5).detach().sum()


BRANCHES: dict[str, Branch] = {
    "not needed": _dead,
    "one of several": _one_result_of_several,
    "needed": _held_by_its_input,
    "in place": _in_place,
    "in place through a view": _in_place_through_a_view,
    "complex": lambda y: torch.view_as_real(torch.complex(y, y) * (1.5 + 0.5j)).exp().exp(),
    "of the last node of an inner pass": _kept_by_the_last_node_of_an_inner_pass,
    "after an inner pass": _after_an_inner_pass,
    "inside a function": lambda y: _Half.apply(y * 2.0).exp().exp(),
    # The formula of ``lerp`` multiplies by the weight and by one less the weight.
    "in a backward formula": lambda y: torch.lerp(y, y.exp(), 0.3).exp(),
}


class _Half(torch.autograd.Function):
    """Numbers in its forward pass are kept by nobody."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 + 1.0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 0.5


@pytest.mark.parametrize("trace", slow_after(1, ["fake", "real"]))
@pytest.mark.parametrize("name", BRANCHES)
def test_a_number_is_alive_as_long_as_the_node_that_keeps_it(name: str, trace: Any) -> None:
    torch.manual_seed(0)
    model, x = Then(BRANCHES[name]), torch.randn(64, 8)

    profile = sacplan.profile(model, x, total, device="cpu", trace=trace)
    assert measured_step(Step(model, x, total, None), [x]).peak_bytes == profile.peak_bytes


def test_a_recomputed_number_counts_once() -> None:
    """A backward formula takes the tensor that its node keeps, and makes none of its own."""
    torch.manual_seed(0)
    part = lambda: Then(lambda y: (y * 1.5).tanh() * 0.5)  # noqa: E731
    model, x = nn.Sequential(part(), part(), part()), torch.randn(64, 8)

    profile = sacplan.profile(model, x, mean_square, device="cpu")
    for plan in (sacplan.plan(profile, "smallest"), sacplan.plan(profile, "80%")):
        assert sacplan.verify(model, x, plan, mean_square, run="real").peak_bytes == plan.peak_bytes


# --- inside a kernel --------------------------------------------------------------------------------------------------

_OVERLOADS = """
    add.Scalar add_.Scalar sub.Scalar mul.Scalar mul_.Scalar div.Scalar div_.Scalar rsub.Scalar remainder.Scalar
    remainder.Scalar_Tensor fmod.Scalar copysign.Scalar xlogy.Scalar_Other xlogy.Scalar_Self pow.Scalar
    pow.Tensor_Scalar pow_.Scalar lerp.Scalar masked_fill.Scalar eq.Scalar gt.Scalar add.Tensor mul.Tensor
    clamp_min.default leaky_relu.default threshold.default elu.default
"""


@pytest.mark.parametrize("name", _OVERLOADS.split())
def test_what_a_kernel_makes_of_a_number(name: str) -> None:
    op, overload = name.split(".")
    func = getattr(getattr(torch.ops.aten, op), overload)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for number in (2, 0.5):
            args = [_operand(argument, dtype, number, overload) for argument in func._schema.arguments[:3]]
            args = [a for a in args if a is not None]
            if op.endswith("_") and dtype == torch.int64 and (isinstance(number, float) or op == "div_"):
                continue  # the result does not fit
            if op in ("leaky_relu", "elu", "lerp") and dtype == torch.int64:
                continue  # floats alone
            if op == "masked_fill":
                args[1] = args[1].bool()
            kept: list[Any] = []
            deltas = allocation_deltas(lambda: kept.append(func(*args)))  # noqa: B023
            made = 0 if op.endswith("_") else kept[0].nbytes
            peak = max(itertools.accumulate(deltas), default=0)
            assert measured_workspace_bytes(Call(func, args, {}, kept[0])) == peak - made, (dtype, number)


def _operand(argument: Any, dtype: torch.dtype, number: float, overload: str) -> Any:
    if isinstance(argument.type, torch.TensorType) and (argument.name, overload) != ("other", "Tensor"):
        return torch.ones(20, 30, dtype=dtype)
    if isinstance(argument.type, torch.TensorType):
        return number
    return number if isinstance(argument.type, torch.NumberType) and argument.name != "alpha" else None


# --- with a plan ------------------------------------------------------------------------------------------------------


class _Gelu(torch.autograd.Function):
    """Takes more memory in its forward pass than in its backward pass, as that of Bloom."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return x.sign().mul_(grads[0])


def peaks_at_numbers() -> nn.Module:
    """The peak of the smallest plan is at an op on a number."""
    return FromFunction(
        lambda self, x: x + _Gelu.apply(self.linear(x)).sum(-1, keepdim=True), linear=nn.Linear(8, 32)
    )


def test_a_plan_passes_numbers_on_without_making_tensors_of_them() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(peaks_at_numbers() for _ in range(3))), torch.randn(64, 8)

    profile = sacplan.profile(model, x, total, device="cpu")
    smallest = sacplan.plan(profile, "smallest")
    program = profile.with_plan(smallest)
    assert program.ops[program.footprint.peak_op].phase is Phase.FORWARD
    for peak in (smallest.peak_bytes, (smallest.peak_bytes + profile.peak_bytes) // 2):
        plan = sacplan.plan(profile, f"{peak}B")
        verified = sacplan.verify(model, x, plan, total, run="real")
        assert verified.peak_bytes == plan.peak_bytes <= peak


def soft_cap() -> nn.Module:
    """Logits between -15 and 15."""
    return FromFunction(
        lambda self, x: 15 * torch.tanh(self.left(x) + self.right(x)),
        left=nn.Linear(8, 64),
        right=nn.Linear(8, 64),
    )


def test_the_number_of_a_node_is_gone_before_the_next_one_recomputes() -> None:
    """``tanh`` asks for its output when the multiplication is done, whose node the output keeps alive."""
    torch.manual_seed(0)
    model, x = nn.Sequential(soft_cap()), torch.randn(64, 8)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss: torch.Tensor = out.sum()
        loss.out = out  # type: ignore[attr-defined]
        return loss

    profile = sacplan.profile(model, x, loss, device="cpu")
    plan = sacplan.policy("full", profile=profile, layers="0")
    program = profile.with_plan(plan)
    assert program.ops[program.footprint.peak_op].recomputes >= 0
    assert sacplan.verify(model, x, plan, loss, run="real").peak_bytes == plan.peak_bytes


def test_a_number_of_a_branch_that_is_dropped_is_gone_with_it_under_a_plan() -> None:
    """The executor runs ops of its own before autograd gives the output its node."""
    torch.manual_seed(0)

    def branches(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        (y * 0.5).cos().sin()  # nobody needs it
        return y.exp().sin().exp()

    model = nn.Sequential(FromFunction(branches, linear=nn.Linear(8, 32)), nn.Linear(32, 8))
    x = torch.randn(64, 8)

    profile = sacplan.profile(model, x, total, device="cpu")
    plan = plan_of(profile, {"0": [("aten.mul.Tensor", 0)]})
    assert sacplan.verify(model, x, plan, total).peak_bytes == plan.peak_bytes


NUMBERS = (2, 0.1, -3, 0.0, float("inf"), float("nan"), 2**40 + 1, 2**70, True)


@pytest.mark.parametrize("func", sorted(TAKES_A_NUMBER, key=str), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5)])
def test_a_number_that_is_passed_on_has_the_same_bits(
    func: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    for number in NUMBERS:
        tensor = (torch.randn(shape) * 3).to(dtype)
        expected = _result(func, (tensor.clone(), number))
        assert _result(func, with_lent_number((tensor.clone(), number))) == expected


def _result(func: Any, args: Any) -> Any:
    """Type and bits of the result, or the type of the error."""
    try:
        out = func(*args)
    except (RuntimeError, OverflowError) as error:
        return type(error)
    return out.dtype, bytes(out.contiguous().reshape(-1).view(torch.uint8).tolist())
