"""Small models and layers of matrices: what most tests of plans, ranks and placements run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.language_models import Block


class MLP(nn.Module):
    """Up, GELU, down: what a placement cuts by columns, then by rows."""

    def __init__(self, dim: int, inner: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        inner = inner or 4 * dim
        self.up, self.down = nn.Linear(dim, inner, bias=bias), nn.Linear(inner, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class FeedForward(nn.Module):
    """A residual MLP with its norm and dropout, each in a module of its own."""

    def __init__(self, dim: int = 64, inner: int | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        inner = inner or 4 * dim
        self.norm = nn.LayerNorm(dim)
        self.up, self.act, self.down = nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Then(nn.Module):
    """A linear layer, then a function that the test hands in: gradients flow into whatever it does."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], dim: int = 8) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(dim, dim), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


class FromFunction(nn.Module):
    """Runs a function of the test, which gets the module before its inputs.

    The parts become attributes, in the order in which they are given: modules and parameters as they are, other
    tensors as buffers. A model of a single test needs no class of its own with this:

        model = FromFunction(lambda self, x: self.head(x).cumsum(1), head=nn.Linear(8, 8))

    A test about what stands beside a model's class, such as a cache in its module, needs a class all the same.
    """

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


class Residual(nn.Module):
    """What goes in, plus what the layers make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x)


class Stack(nn.Module):
    """Layers in a list, without a module around them, and a head."""

    def __init__(self, layers: Iterable[nn.Module], head: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class GatedMLP(nn.Module):
    """The MLP of Llama: SiLU of one projection times another."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class HeavyLayers(Stack):
    """Layers whose parameters outweigh their activations; the batch needs no gradient."""

    def __init__(self, layers: int = 3, dim: int = 64, dropout: float = 0.1) -> None:
        parts = (
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )
        super().__init__(parts, nn.Linear(dim, 10))


class Shared(nn.Module):
    """One layer called three times, and another: a unit with several calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layer, self.other = Block(32, 4, 0.1), Block(32, 4, 0.1)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for _ in range(3):
            h = self.layer(h)
        return self.head(self.other(h))


class Unlike(nn.Module):
    """Two layers that are not alike: small enough to be looked at as one piece."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))
        self.b = nn.Sequential(
            nn.Linear(dim, 3 * dim), nn.SiLU(), nn.LayerNorm(3 * dim), nn.Linear(3 * dim, dim)
        )
        self.head = nn.Linear(dim, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.b(self.a(x)) + x))


class Uneven(nn.Module):
    """Layers of which no two are alike."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, dim * (k + 1)), nn.GELU(), nn.Linear(dim * (k + 1), dim)
            )
            for k in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Recurrence(nn.Module):
    """A gated cell, written out: no modules to split it by."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.gate, self.value = (nn.Parameter(torch.randn(32, 32) / 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(self.steps):
            z = torch.sigmoid(x + h @ self.gate)
            h = z * h + (1 - z) * torch.tanh(x + h @ self.value)
        return h


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it, as LoRA has it."""

    def __init__(self, base: nn.Module, fan_in: int, fan_out: int, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(fan_in, rank, bias=False), nn.Linear(rank, fan_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))
