"""Writes in place through views: the backward pass that autograd makes for them, op by op, to the byte.

In the plain step a view that was written gets a node ``AsStridedBackward0``, and its base ``CopySlices``. The measured
side is the allocation events of ``torch.profiler``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sacplan
from tests.support.steps import total
from tests.zoo.layers import FromFunction

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda y: y.view(-1, *y.shape).view(y.shape),
    "transposed": lambda y: y.transpose(0, -1),
    "part": lambda y: y[..., :-1],
}


def _written(
    view: Callable[[torch.Tensor], torch.Tensor], write: Callable[..., Any], args: Any, kwargs: Any
) -> Callable[..., torch.Tensor]:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + self.weight
        v = view(y)
        given = [getattr(self, a) if isinstance(a, str) and a.startswith("given") else a for a in args]
        write(v, *given, **kwargs)
        return v.exp() + v

    return run


def off_by(write: Callable[..., Any], x: torch.Tensor, args: Any, kwargs: Any, view: str) -> int | None:
    """Return predicted less measured bytes; None if the step itself does not run."""
    given = {f"given{i}": a.detach().clone() for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
    names = [f"given{i}" if isinstance(a, torch.Tensor) else a for i, a in enumerate(args)]
    weight = nn.Parameter(torch.rand_like(x) / 2 + 0.2)
    model = FromFunction(_written(VIEWS[view], write, names, kwargs), weight=weight, **given)
    try:
        total(model, x).backward()
    except (RuntimeError, IndexError, ValueError):
        return None  # this op takes no such view
    model.zero_grad()
    profile = sacplan.profile(model, x, total, device="cpu")
    return (
        profile.peak_bytes
        - sacplan.verify(model, x, sacplan.plan(profile, "100%"), total, run="real").peak_bytes
    )


@pytest.mark.parametrize("view", VIEWS)
def test_gradients_of_written_views(view: str) -> None:
    x = torch.randn(16, 16)
    mask, index = torch.rand(16, 16) > 0.5, torch.zeros(8, 8, dtype=torch.long)
    mask = VIEWS[view](mask)
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "tanh_": (torch.Tensor.tanh_, ()),
        "sgn_": (torch.Tensor.sgn_, ()),  # its gradient is zeros without memory
        "mul_": (torch.Tensor.mul_, (2.0,)),
        "masked_fill_": (torch.Tensor.masked_fill_, (mask, 0.0)),
        "scatter_": (torch.Tensor.scatter_, (0, index, torch.rand(8, 8))),
        "copy_": (torch.Tensor.copy_, (torch.rand(mask.shape),)),
        # Its backward formula has a masked fill out of place; that of ``atan2`` has one in place.
        "xlogy_": (torch.Tensor.xlogy_, (torch.rand(mask.shape) + 0.1,)),
        "atan2_": (torch.Tensor.atan2_, (torch.rand(mask.shape),)),
    }
    assert {name: off_by(write, x, args, {}, view) for name, (write, args) in cases.items()} == dict.fromkeys(
        cases, 0
    )


OTHERWISE = {
    # Under a mode ``cumprod_backward`` and that of ``clamp`` with tensors take another way. What the plain one takes is
    # measured for nodes of their own, and not within ``CopySlices``.
    "cumprod", "clamp",
    # The database takes the generator's state around them, and they run no op: bytes are compared at ops.
    "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout",
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_all_ops_of_the_op_database_write_through_views(view: str) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    wrong, ran = {}, 0
    for op in op_db:
        if op.inplace_variant is None or not op.supports_autograd or op.name in OTHERWISE:
            continue
        if torch.float32 not in op.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        samples = op.sample_inputs_func(op, "cpu", torch.float32, False)
        # The first one with dimensions, and without arguments that hold tensors in lists.
        for sample in samples:
            lists = any(isinstance(a, (list, tuple)) for a in sample.args)
            named = any(isinstance(a, torch.Tensor) for a in sample.kwargs.values())
            if sample.input.dim() > 1 and sample.input.numel() and not lists and not named:
                found = off_by(op.inplace_variant, sample.input.clone(), sample.args, sample.kwargs, view)
                ran += found is not None
                if found:
                    wrong[op.name] = found
                break
    assert not wrong
    assert ran > 35
