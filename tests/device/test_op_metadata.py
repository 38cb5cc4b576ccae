"""Strides and storages of fake tensors against those of the CPU's kernels, and what a plan makes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import sacplan
from benchmarks.harness.steps import real_step
from benchmarks.op_metadata import (
    LEFT,
    MORE,
    CompareMetadata,
    MoreOfAnOp,
    sweep,
)
from sacplan.device.kernels import fake_device
from sacplan.torch_compat.fake_kernels import elementwise_ops, is_structured, run_in_cpp, torchs_own_fake
from tests.support.slow import slow_after
from tests.zoo.convnets import BasicBlock, Depthwise, Inverted
from tests.zoo.layers import FromFunction

aten = torch.ops.aten


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape).mul(0.8).add(0.1).requires_grad_()


NAMES = """nn.functional.embedding_bag nn.functional.max_unpool2d nn.functional.threshold select_scatter
    diagonal_scatter as_strided_scatter slice_scatter nn.functional.batch_norm nn.functional.group_norm
    nn.functional.layer_norm nn.functional.mse_loss nn.functional.smooth_l1_loss nn.functional.huber_loss
    nn.functional.l1_loss nn.functional.soft_margin_loss nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div xlogy special.xlog1py copysign floor_divide
    heaviside logaddexp logical_and ldexp normal nn.functional.relu nn.functional.leaky_relu nn.functional.hardtanh
    nn.functional.hardswish nn.functional.logsigmoid logit log_softmax nn.functional.pad nn.functional.channel_shuffle
    nn.functional.unfold"""


@pytest.mark.filterwarnings("ignore")  # those of torch's own samples
@pytest.mark.parametrize("limit", [1, pytest.param(3, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_ops_of_the_database(limit: int) -> None:
    """The ops with rules and their relatives, in all layouts, as PyTorch's own tests call them."""
    pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
    from torch.testing._internal.common_methods_invocations import op_db

    ops = [op for op in op_db if op.name in NAMES.split()]
    assert {op.name for op in ops} == set(NAMES.split())
    compare = CompareMetadata()
    assert not sweep(compare, ops, [torch.float32], limit)
    assert set(compare.found()) <= set(LEFT)
    assert {
        "aten.native_batch_norm.default",
        "aten.native_group_norm.default",
        "aten.col2im.default",
    } <= compare.calls.keys()
    assert len(compare.calls) > 80


# --- answers that are torch's own, sooner


def layout_of(out: Any, given: Sequence[Any]) -> list[Any]:
    """What is to be equal of results: layouts, the bytes below them, and whether one is an argument."""
    values = out if isinstance(out, (tuple, list)) else (out,)
    return [
        (
            v.shape,
            v.stride(),
            v.dtype,
            v.storage_offset(),
            v.untyped_storage().nbytes(),
            [v is a for a in given],
        )
        if isinstance(v, torch.Tensor)
        else v
        for v in values
    ]


@contextmanager
def unlogged() -> Iterator[None]:
    """FakeTensorMode logs a traceback for each op that its formula refuses; the error is still raised."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def test_functions_in_cpp_of_elementwise_ops_say_what_torchs_formulas_say() -> None:
    """Of contiguous operands of one type, equal in size and not: there C++ is asked since it is faster."""
    compared = set()
    with fake_device("cpu") as mode, torch.no_grad(), unlogged():
        for op in filter(is_structured, elementwise_ops()):
            for shapes in (((4, 6, 8),) * 4, ((8,), (4, 6, 8), (6, 8), (8,))):
                given = arguments_of(op, shapes)
                try:
                    own = torchs_own_fake(mode, op, given, {})
                except Exception:  # it wants more than these arguments
                    continue
                in_cpp = run_in_cpp(mode, op, given, {})
                assert layout_of(in_cpp, given) == layout_of(own, given), op
                compared.add(op)
    assert len(compared) > 120
    assert {aten.gelu_backward.default, aten.mul.Tensor, aten.exp.default} <= compared


def arguments_of(op: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Tensors of these shapes, and some value for each other argument."""
    others: dict[str, Any] = {"number": 0.5, "float": 0.5, "bool": False, "int": 1, "str": "none"}
    sizes = iter(shapes)
    return [
        torch.empty(next(sizes)) if "Tensor" in str(a.type) else others.get(str(a.type), a.default_value)
        for a in op._schema.arguments
        if not a.kwarg_only
    ]


def convolution() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1), torch.nn.Sigmoid())


def losses_inside() -> torch.nn.Module:
    return FromFunction(loss_inside, layers=torch.nn.ModuleList(convolution() for _ in range(3)))


def residual(channels: int, width: int, stride: int) -> torch.nn.Module:
    shortcut = torch.nn.Conv2d(channels, width, 1, stride, bias=False)
    return BasicBlock(channels, width, stride, shortcut, inplace=False)


def loss_inside(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(())
    for layer in self.layers:
        y = layer(x)
        total = total + F.mse_loss(y, x).sin() + F.binary_cross_entropy(y, x).sin()
        x = y
    return total


def transposed() -> torch.nn.Module:
    return FromFunction(
        lambda self, x: self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2)).tanh(),
        norm=torch.nn.BatchNorm1d(16),
        linear=torch.nn.Linear(16, 16, bias=False),
    )


def folded(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
    columns = F.unfold(self.conv(x).relu(), 5, padding=2)
    return F.fold(self.out(columns.transpose(1, 2)).transpose(1, 2), (24, 24), 3, padding=1)


# --- images of a batch of one, whose first stride says nothing but is looked at --------------------------------------


@pytest.mark.parametrize("op", MORE, ids=lambda op: op.name)
def test_strides_of_sizes_of_one(op: MoreOfAnOp) -> None:
    compare = CompareMetadata()
    assert not sweep(compare, [op], [torch.float32], limit=2)
    assert not compare.found()
    assert compare.calls


def autoencoder() -> torch.nn.Module:
    """Attention over the pixels of an image, then convolutions, as in the autoencoders of diffusion models."""

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        pixels = x.flatten(2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*(self.linear(pixels)[:, None],) * 3).squeeze(1)
        image = (mixed.transpose(-1, -2).reshape(x.shape) + x) / 1.0
        image = image + self.conv(F.silu(self.norm(image)))
        return self.conv(F.interpolate(image, scale_factor=2.0))

    return FromFunction(
        forward, linear=torch.nn.Linear(32, 32), norm=torch.nn.GroupNorm(8, 32),
        conv=torch.nn.Conv2d(32, 32, 3, padding=1),
    )  # fmt: skip


def reconstruction(loss: Any) -> Any:
    return convolution, (2, 3, 64, 64), lambda model, batch: loss(model(batch), batch)


def columns() -> torch.nn.Module:
    return FromFunction(folded, conv=torch.nn.Conv2d(3, 8, 1), out=torch.nn.Linear(8 * 25, 72))


STEPS: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...], Any]] = {
    **{loss.__name__: reconstruction(loss) for loss in (F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy)},
    "batch norm of a transposed input": (
        lambda: torch.nn.Sequential(*(transposed() for _ in range(3))), (8, 32, 16), None
    ),
    "columns": (columns, (2, 3, 24, 24), None),
    # Losses inside units, so that results on large storages are among what may be discarded.
    "losses inside": (losses_inside, (2, 3, 32, 32), None),
    "depthwise": (
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 24, 4, 4), *(Depthwise(24) for _ in range(4))),
        (4, 3, 64, 64), None,
    ),
    "a batch of one": (autoencoder, (1, 32, 16, 16), None),
    "residual": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, 2, 1), residual(16, 16, 1), residual(16, 32, 2), residual(32, 64, 2)
        ), (4, 3, 64, 64), None,
    ),
    "inverted": (
        lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), *(Inverted(8) for _ in range(4))),
        (4, 3, 64, 64), None,
    ),
    "a batch of two": (autoencoder, (2, 32, 16, 16), None),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_after(8, STEPS))
def test_steps_are_predicted_as_measured(name: str) -> None:
    """From a fake trace and a real one, without a plan and with one, and as the fake step with the plan says."""
    torch.manual_seed(0)
    make, shape, loss_fn = STEPS[name]
    model, batch = make(), torch.rand(shape)
    profile = sacplan.profile(model, batch, loss_fn, device="cpu")
    plain = real_step(model, batch, loss_fn)
    assert profile.peak_bytes == plain.peak_bytes
    assert profile.peak_bytes == sacplan.profile(model, batch, loss_fn, device="cpu", trace="real").peak_bytes
    smallest = sacplan.plan(profile, "smallest")
    assert name != "losses inside" or any("mse_loss" in one.op for one in smallest.decisions)
    middle = (smallest.peak_bytes + profile.peak_bytes) // 2
    for plan in (smallest, sacplan.plan(profile, f"{middle}B")):
        planned = real_step(model, batch, loss_fn, plan=plan)
        assert plan.peak_bytes == planned.peak_bytes
        assert planned.same_bits(plain)
        assert sacplan.verify(model, batch, plan, loss_fn, run="fake").peak_bytes == plan.peak_bytes
