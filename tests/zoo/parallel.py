"""Models that are spread over a mesh, by PyTorch's own styles of tensor parallelism or by code that sacplan writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.language_models import LM
from tests.zoo.layers import FeedForward


class Sequences(nn.Module):
    """Residual layers on sequences, and a norm: what sequence parallelism is written for."""

    def __init__(self, layers: int = 3, dim: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=256, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def parallel_sequences(model: nn.Module, mesh: Any) -> None:
    """The stream of activations is cut over the sequence; norms and dropout run on a part of it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    parallelize_module(
        model, mesh,
        {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            "layers.*.norm": SequenceParallel(),
            "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "layers.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "layers.*.drop": SequenceParallel(),
            "norm": SequenceParallel(),
        },
    )  # fmt: skip


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: Any = model(x)
    return out.to_local().square().mean()


class ByHeads(nn.Module):
    """Attention that takes its number of heads from its projections, so that a rank may hold some of them."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.of_head = dim // heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.o = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.of_head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class HalfFlat(nn.Module):
    """A transformer's layer whose second half has its norm, columns and rows in one module."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.before, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = ByHeads(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SplitLM(LM):
    """A language model that runs with the weights of one rank: no size is written down in its forward pass."""

    def __init__(self, layers: int = 2, dim: int = 16, heads: int = 4, vocab: int = 24) -> None:
        super().__init__(0, dim, heads, vocab)
        self.layers.extend(HalfFlat(dim, heads) for _ in range(layers))


def parallel_lm(model: nn.Module, mesh: Any, head: bool = True) -> nn.Module:
    """Tensor and sequence parallelism of a ``SplitLM``, as torchtitan writes it; logits are cut over the vocabulary."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    cut = Shard(1)
    styles: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "layers.*.before": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(input_layouts=cut, desired_input_layouts=Replicate()),
        **{f"layers.*.attention.{n}": ColwiseParallel() for n in "qkv"},
        "layers.*.attention.o": RowwiseParallel(output_layouts=cut),
        "layers.*.norm": SequenceParallel(),
        "layers.*.up": ColwiseParallel(input_layouts=cut),
        "layers.*.down": RowwiseParallel(output_layouts=cut),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=cut,
            output_layouts=Shard(-1) if head else Replicate(),
            use_local_output=not head,
        ),
    }
    return parallelize_module(model, mesh, styles)
