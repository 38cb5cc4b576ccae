"""What is on the host in training on a GPU, on a CPU: an optimizer that steps there, and weights of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

MINIMAL = 4096
"""Elements of a parameter from which on torchao updates it on the host."""


class OnHost(torch.optim.Optimizer):
    """What torchao's ``CPUOffloadOptimizer`` does with ``offload_gradients=True``, which asks for a GPU.

    A copy of each large parameter, its gradient and its state are on the host; the device has no gradient of it once it
    is copied, and gets the updated parameter back.
    """

    def __init__(self, params: Any, **kwargs: Any) -> None:
        trained = [p for p in params if p.requires_grad]
        self.copies = {p: p.detach().clone() for p in trained if p.numel() >= MINIMAL}
        for p, copy in self.copies.items():
            copy.grad = torch.empty_like(copy)
            p.register_post_accumulate_grad_hook(self._to_host)
        self.inner = [torch.optim.AdamW([copy], **kwargs) for copy in self.copies.values()]
        self.inner.append(torch.optim.AdamW([p for p in trained if p.numel() < MINIMAL], **kwargs))

    def _to_host(self, p: torch.Tensor) -> None:
        self.copies[p].grad.copy_(p.grad)
        p.grad = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for each in self.inner:
            each.step()
        for p, copy in self.copies.items():
            p.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner[-1].zero_grad(set_to_none)


def optimizer_bytes(model: nn.Module) -> int:
    """Return what ``OnHost`` with AdamW keeps on the host: a copy, its gradient, two moments and a count of steps."""
    trained = [p for p in model.parameters() if p.requires_grad and p.numel() >= MINIMAL]
    return sum(4 * p.nbytes + 4 for p in trained)


class Int8(nn.Module):
    """A layer that dequantizes its weight, and a scale for each output."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        weight = torch.randint(-127, 127, (fan_out, fan_in), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(fan_out, 1) / 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def nf4(fan_in: int, fan_out: int) -> nn.Module:
    """Return a layer of bitsandbytes, whose custom function keeps the weight as an attribute of its node."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(fan_in, fan_out, False, torch.float32, quant_type="nf4")
    return layer.to("cpu")  # type: ignore[no-any-return]  # quantizes


def quantized(model: nn.Module, kind: Callable[[int, int], nn.Module]) -> nn.Module:
    """Return the model with layers of a kind in the place of its linear layers, without their biases.

    Those whose type the model looks up when it runs stay, as in transformers and diffusers.
    """
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    for fqn, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and not set(kept).intersection(fqn.split(".")):
            model.set_submodule(fqn, kind(layer.in_features, layer.out_features))
    return model
